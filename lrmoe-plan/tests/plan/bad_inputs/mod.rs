//! What every public entry point does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: placements (`placement.rs`), loads and topologies of nothing (`quotas.rs`), clusters and work of other sizes (`cost.rs`),
//! slots that are too few (`policies.rs`), and budgets that are too small by any amount (`promises.rs`).

mod parts;
mod whole;

use std::fmt::Debug;

use lrmoe_plan::Error;

/// Compares with all values; errors of this crate hold those of others, so they have no equality.
fn expect<T: Debug>(case: &str, found: Result<T, Error>, expected: Result<T, Error>) {
    assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{case}");
}

fn mismatch<T>(what: &'static str, expected: usize, got: usize) -> Result<T, Error> {
    Err(Error::Mismatch {
        what,
        expected,
        got,
    })
}

fn outside<T>(what: &'static str, value: f64, range: &'static str) -> Result<T, Error> {
    Err(Error::OutOfRange { what, value, range })
}
