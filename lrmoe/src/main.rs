//! The program `lrmoe`.

mod cli;

use std::process::ExitCode;

use clap::Parser;
use cli::Command;
use tracing::Level;

/// Train Mixture-of-Experts models whose backward work is planned: every routed pair runs forward, the pairs that matter
/// run backward, within quotas, balanced over replicas of the experts.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on standard error (-v: checkpoints, -vv: everything)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// Threads that candle takes for an operation on single elements.
const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";

fn main() -> ExitCode {
    // Every rank is a thread of its own already; those of candle's pool would only wait for each other.
    if std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: nothing else runs yet that could read the environment.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") };
    }
    let cli = Cli::parse();
    let level = [Level::WARN, Level::INFO, Level::TRACE][usize::from(cli.verbose.min(2))];
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .init();
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lrmoe: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
