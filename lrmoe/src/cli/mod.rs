//! The program's command line and its commands.

mod bench;
mod doctor;
mod model;
mod plan;
mod processes;
mod replay;
mod sweep;
mod trace;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing::Level;

use crate::config::{ConfigError, Device};
use crate::error::Error;
use crate::trace::{TraceError, check_output};

/// Train Mixture-of-Experts models whose backward work is planned: every routed pair runs forward, the pairs that matter
/// run backward, within quotas, balanced over replicas of the experts.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on standard error (-v: checkpoints, -vv: everything)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl Cli {
    /// Runs the command. An error is printed to standard error, and the exit code says of what kind it is.
    pub fn run(self) -> ExitCode {
        let level = [Level::WARN, Level::INFO, Level::TRACE][usize::from(self.verbose.min(2))];
        tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .init();
        match self.command.run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("lrmoe: {error}");
                ExitCode::from(error.exit_code())
            }
        }
    }
}

/// Checks before long work that its outputs can be written, and that no two of them and no input are one file.
fn check_outputs<const N: usize>(
    inputs: &[PathBuf],
    outputs: [&Option<PathBuf>; N],
    overwrite: bool,
) -> Result<(), Error> {
    let resolved = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut taken: Vec<PathBuf> = inputs.iter().map(resolved).collect();
    for path in outputs.into_iter().flatten() {
        if taken.contains(&resolved(path)) {
            return Err(TraceError::Taken(path.clone()).into());
        }
        check_output(path, overwrite)?;
        taken.push(resolved(path));
    }
    Ok(())
}

/// Settles which card a device means. Launchers (torchrun, Slurm scripts) number the processes of a node in LOCAL_RANK; without it there is one.
fn of_process(device: Device) -> Result<Device, ConfigError> {
    // As torchrun, Open MPI and MPICH call it.
    let names = [
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
    ];
    let found = names.iter().find_map(|name| std::env::var(name).ok());
    match found.ok_or(()) {
        Ok(value) if device == Device::Cuda(None) => match value.parse() {
            Ok(rank) => Ok(device.of_process(rank)),
            Err(_) => Err(ConfigError::LocalRank { value }),
        },
        _ => Ok(device.of_process(0)),
    }
}

#[derive(Subcommand, Debug)]
enum Command {
    Train(Box<train::Train>),
    Sweep(sweep::Sweep),
    Replay(replay::Replay),
    Plan(plan::Plan),
    Bench(bench::Bench),
    Trace(trace::Trace),
    Doctor(doctor::Doctor),
}

impl Command {
    fn run(self) -> Result<(), Error> {
        match self {
            Self::Train(train) => train.run(),
            Self::Sweep(sweep) => sweep.run(),
            Self::Replay(replay) => replay.run(),
            Self::Plan(plan) => plan.run(),
            Self::Bench(bench) => bench.run(),
            Self::Trace(trace) => trace.run(),
            Self::Doctor(doctor) => doctor.run(),
        }
    }
}
