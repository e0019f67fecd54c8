mod board;
mod end;
mod exchange;
mod memory;
mod message;
mod patience;
mod peer;
mod slot;
mod staging;

use std::time::{Duration, Instant};

use mpi::environment::{Threading, threading_support};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

use crate::check::Caller;
use crate::transport::{Counts, Transport, collective_over_transport};
use crate::{Call, Element, Error, Reduction};
use board::Board;
use memory::{Card, Neighbour, card};
use message::Message;
use peer::{Peer, Post};
use slot::Channel;

/// One rank of a world whose ranks are the processes of an MPI communicator.
///
/// Its messages go over a duplicate of the communicator, so they do not meet the program's. Ranks of one host meet in memory
/// that they map, if the system lets them read each other's (on Linux: `process_vm_readv`, which MPI libraries use too). There lie
/// the call, all counts, and elements for a rank of up to 16 KiB; more are read by their receiver from the sender's memory.
/// Other ranks meet by one small message to each, with elements of up to 2 KiB; more pass through chunks of 128 KiB in the
/// world's memory, so a message may be of any size.
///
/// No buffer of the caller is ever given to MPI: a request cannot be taken back when a deadline
/// passes, and would write to memory that the caller has again. What MPI still holds after a failure
/// is leaked.
///
/// After an error `MPI_Finalize` may wait for the lost rank for ever: a program should then end with
/// `MPI_Abort`. What survivors see when a process dies is also up to the launcher: Open MPI's
/// `mpirun` ends all processes, unless told `--enable-recovery`.
#[derive(Debug)]
pub struct Mpi {
    caller: Caller,
    deadline: Duration,
    channel: Channel,
    /// By rank; this rank's own is not used.
    peers: Vec<Peer>,
    /// What the ranks of this host read; `None` where the system has no such memory.
    board: Option<Board>,
    /// Exchanges so far.
    number: u64,
    /// When the last one began.
    since: Instant,
    failure: Option<Error>,
    /// What each rank says at a meeting.
    posts: Vec<Post>,
    /// A chunk from each peer, for sums.
    chunks: Vec<Vec<u8>>,
}

impl Mpi {
    /// This process's rank in a world of all processes of `communicator`, which all make this call;
    /// no later wait lasts longer than `deadline` without anything coming or going. The call itself
    /// waits as MPI does.
    ///
    /// # Errors
    /// [`Error::ThreadSupport`] unless MPI was initialised for `MPI_THREAD_MULTIPLE`, which a rank
    /// that may move between threads needs.
    pub fn new(communicator: &impl Communicator, deadline: Duration) -> Result<Self, Error> {
        Self::start(communicator, deadline, true)
    }

    /// As [`new`](Self::new), but no process reads another's memory: everything passes through MPI's
    /// messages. Ranks that call the one meet ranks that call the other.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn through_messages(
        communicator: &impl Communicator,
        deadline: Duration,
    ) -> Result<Self, Error> {
        Self::start(communicator, deadline, false)
    }

    fn start(
        communicator: &impl Communicator,
        deadline: Duration,
        may_share: bool,
    ) -> Result<Self, Error> {
        if threading_support() < Threading::Multiple {
            return Err(Error::ThreadSupport);
        }
        let communicator = communicator.duplicate();
        let (rank, ranks) = (communicator.rank() as usize, communicator.size() as usize);
        let caller = Caller { rank, ranks };
        let (board, neighbours) = neighbours(&communicator, may_share);
        let peers = neighbours.into_iter().enumerate();
        let mut world = Self {
            caller,
            deadline,
            channel: Channel::new(communicator),
            peers: peers
                .map(|(peer, neighbour)| Peer::new(peer, caller, neighbour))
                .collect(),
            board,
            number: 0,
            since: Instant::now(),
            failure: None,
            posts: vec![Post::nothing(); ranks],
            chunks: vec![vec![]; ranks],
        };
        for peer in world.others() {
            world.on(peer, Call::Barrier, Peer::listen)?;
        }
        Ok(world)
    }

    /// Takes back what the ranks of this host may read.
    fn close(&self) {
        if let Some(board) = &self.board {
            board.close();
        }
    }

    /// The other ranks, from the next one on, so that not all begin with the same one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Caller { rank, ranks } = self.caller;
        (rank + 1..ranks).chain(0..rank)
    }
}

/// This rank's board, and by rank the processes with which it shares memory: each reads the other's.
fn neighbours(
    communicator: &SimpleCommunicator,
    may_share: bool,
) -> (Option<Board>, Vec<Option<Neighbour>>) {
    let (rank, ranks) = (communicator.rank() as usize, communicator.size() as usize);
    let board = if may_share { Board::new(ranks) } else { None };
    let mine = board
        .as_ref()
        .map_or([0; 4], |(board, file)| card(board, file));
    let mut cards = vec![Card::default(); ranks];
    communicator.all_gather_into(&mine, bytemuck::cast_slice_mut::<_, u64>(&mut cards));
    let find = |card| board.as_ref().and_then(|_| Neighbour::find(card, ranks));
    let found: Vec<_> = cards.into_iter().map(find).collect();
    let mine: Vec<u64> = found.iter().map(|found| found.is_some().into()).collect();
    let mut all = vec![0u64; ranks * ranks];
    // After this no one needs the board's file any more.
    communicator.all_gather_into(&mine[..], &mut all);
    let finds_me = |peer: usize| all[peer * ranks + rank] == 1;
    let both = |(peer, found): (usize, Option<_>)| found.filter(|_| finds_me(peer));
    let neighbours = found.into_iter().enumerate().map(both).collect();
    (board.map(|(board, _)| board), neighbours)
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.close();
        if self.failure.is_none() {
            self.farewell(&Message::Left);
        }
    }
}

impl Transport for Mpi {
    fn caller(&self) -> Caller {
        self.caller
    }

    fn exchange<T: Element>(
        &mut self,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        recv: &mut [&mut [T]],
    ) -> Result<(), Error> {
        let result = self.try_exchange(call, counts, send, recv);
        self.close();
        result
    }

    fn reduce<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        reduction: Reduction,
        mine: &mut [T],
    ) -> Result<Option<usize>, Error> {
        let result = self.try_reduce(call, send, reduction, mine);
        self.close();
        result
    }

    /// Called between two exchanges: the last one is done.
    fn fail(&mut self, error: Error) -> Error {
        self.end(self.number + 1, error)
    }
}

collective_over_transport!(Mpi);
