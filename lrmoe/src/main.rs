//! The program `lrmoe`.

use std::process::ExitCode;

use clap::Parser;
use lrmoe::cli::Cli;

/// Threads that candle takes for an operation on single elements.
const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";

fn main() -> ExitCode {
    // Every rank is a thread of its own already; those of candle's pool would only wait for each other.
    if std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: nothing else runs yet that could read the environment.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") };
    }
    Cli::parse().run()
}
