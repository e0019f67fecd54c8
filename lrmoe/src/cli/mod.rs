//! The commands of the program.

mod model;
mod plan;
mod replay;
mod trace;
mod train;

use clap::Subcommand;
use lrmoe::error::Error;

#[derive(Subcommand)]
pub(crate) enum Command {
    Train(Box<train::Train>),
    Replay(replay::Replay),
    Plan(plan::Plan),
    Trace(trace::Trace),
}

impl Command {
    pub(crate) fn run(self) -> Result<(), Error> {
        match self {
            Self::Train(train) => train.run(),
            Self::Replay(replay) => replay.run(),
            Self::Plan(plan) => plan.run(),
            Self::Trace(trace) => trace.run(),
        }
    }
}
