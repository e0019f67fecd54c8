//! Fuzz targets of the workspace's crates.
//!
//! A target is a function of bytes that panics if a promise is broken. It makes an input of the bytes, has a crate work on it and compares
//! what comes of it with the simplest code that says the same: exhaustive search, plain loops, a second reader of a format. What a crate
//! refuses must be wrong by that code too.
//!
//! libFuzzer drives the targets through the programs in `fuzz_targets` (`scripts/fuzz`); `tests/corpus.rs` runs them over the inputs in `corpus`
//! and over generated ones, with any compiler.

// The checker of the plan's own tests, and its oracle.
#[path = "../../lrmoe-plan/tests/plan/checker.rs"]
mod checker;
#[allow(dead_code, reason = "what the plan's own tests need of it")]
#[path = "../../lrmoe-plan/tests/plan/oracle.rs"]
mod oracle;

mod checkpoint;
mod command_line;
mod compact;
mod config;
mod emulator;
mod files;
mod hosts;
mod input;
mod plan;
mod route;
mod select;
mod trace;

pub use checkpoint::checkpoint;
pub use command_line::command_line;
pub use compact::compact;
pub use config::{cluster_toml, sweep_toml, train_toml};
pub use emulator::emulator;
pub use plan::plan;
pub use route::route;
pub use select::select;
pub use trace::{trace_csv, trace_jsonl, trace_megatron, trace_native, trace_numpy};
