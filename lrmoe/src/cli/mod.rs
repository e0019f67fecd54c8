//! The commands of the program.

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

use clap::Subcommand;
use lrmoe::config::{ConfigError, Device};
use lrmoe::error::Error;
use lrmoe::trace::{TraceError, check_output};

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

#[derive(Subcommand)]
pub(crate) enum Command {
    Train(Box<train::Train>),
    Sweep(sweep::Sweep),
    Replay(replay::Replay),
    Plan(plan::Plan),
    Bench(bench::Bench),
    Trace(trace::Trace),
    Doctor(doctor::Doctor),
}

impl Command {
    pub(crate) fn run(self) -> Result<(), Error> {
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
