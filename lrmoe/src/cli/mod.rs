//! The commands of the program.

mod train;

use clap::Subcommand;
use lrmoe::error::Error;

#[derive(Subcommand)]
pub(crate) enum Command {
    Train(train::Train),
}

impl Command {
    pub(crate) fn run(self) -> Result<(), Error> {
        match self {
            Self::Train(train) => train.run(),
        }
    }
}
