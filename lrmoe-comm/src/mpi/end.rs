//! What ends a world of processes, and how its ranks hear of it.

use std::time::Duration;

use super::Mpi;
use super::message::Message;
use super::patience::Patience;
use crate::{Call, Error};

/// How long a rank that ends the world, or leaves it, stays to see its last words sent; and how long an exchange goes on once a peer has
/// failed in a later one.
pub(super) const FAREWELL: Duration = Duration::from_millis(100);

impl Mpi {
    /// Ends the world in exchange `number`, and tells every peer why. Returns the error, or that of an earlier end.
    pub(super) fn end(&mut self, number: u64, error: Error) -> Error {
        if let Some(earlier) = &self.failure {
            return earlier.clone();
        }
        self.failure = Some(error.clone());
        self.close();
        let told = match error {
            // A peer that MPI does not reach is lost to all.
            Error::Mpi {
                rank, collective, ..
            } => Error::PeerLost {
                rank,
                collective,
                waited: self.since.elapsed(),
            },
            _ => error.clone(),
        };
        self.farewell(&Message::Failed {
            error: told,
            number,
        });
        error
    }

    pub(super) fn lost(&mut self, rank: usize, collective: Call) -> Error {
        let waited = self.since.elapsed();
        let error = Error::PeerLost {
            rank,
            collective,
            waited,
        };
        self.end(self.number, error)
    }

    /// A peer that is near does not go on, or its memory cannot be read any more: it has ended the world, which its farewell
    /// says, or died.
    pub(super) fn gone(&mut self, rank: usize, collective: Call) -> Error {
        let mut patience = Patience::new();
        loop {
            let message = self.on(rank, collective, |peer, _| Ok(peer.look()?.cloned()));
            match message {
                Err(error) => return error,
                Ok(Some(Message::Failed { error, .. })) => {
                    return self.failure.insert(error).clone();
                }
                Ok(None) if patience.pause(FAREWELL).is_ok() => {}
                Ok(_) => return self.lost(rank, collective),
            }
        }
    }

    /// Sends every peer a last message and stays a little to see it leave.
    pub(super) fn farewell(&mut self, message: &Message) {
        for peer in self.others() {
            self.peers[peer].send_farewell(self.channel, message);
        }
        if let (Message::Failed { number, .. }, Some(board)) = (message, &self.board) {
            board.fail(*number);
        }
        let mut patience = Patience::new();
        let mut others = self.others();
        while !others.all(|peer| self.peers[peer].said_farewell()) {
            if patience.pause(FAREWELL).is_err() {
                break;
            }
            others = self.others();
        }
    }
}
