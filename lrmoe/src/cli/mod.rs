//! The commands of the program.

mod trace;
mod train;

use clap::Subcommand;
use lrmoe::error::Error;

#[derive(Subcommand)]
pub(crate) enum Command {
    Train(Box<train::Train>),
    Trace(trace::Trace),
}

impl Command {
    pub(crate) fn run(self) -> Result<(), Error> {
        match self {
            Self::Train(train) => train.run(),
            Self::Trace(trace) => trace.run(),
        }
    }
}
