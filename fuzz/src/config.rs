//! TOML files against the untyped tables that the toml crate reads.

mod cluster;
mod sweep;
mod train;

use toml::{Table, Value};

pub use cluster::cluster_toml;
pub use sweep::sweep_toml;
pub use train::train_toml;

/// Longest file with which a target goes on.
const MOST_BYTES: usize = 4096;

/// The bytes as text.
fn text(data: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(data).ok()?;
    (text.len() <= MOST_BYTES).then_some(text)
}

/// Whether a run with these options would look at this machine or at files.
fn looks_around(options: &Table) -> bool {
    let cluster = options.get("cluster").and_then(Value::as_str);
    cluster.is_some_and(|name| name == "local" || name.ends_with(".toml"))
}
