mod exchange;
mod memory;
mod message;
mod patience;
mod peer;
mod slot;
mod staging;

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use mpi::environment::{Threading, threading_support};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

use crate::check::Caller;
use crate::transport::{Counts, Transport, collective_over_transport};
use crate::{Call, Element, Error, Reduction};
use memory::{Offer, Process};
use message::Message;
use peer::Peer;
use slot::Channel;

/// One rank of a world whose ranks are the processes of an MPI communicator.
///
/// Its messages go over a duplicate of the communicator, so they do not meet the program's. A meeting
/// is one small message to every peer, with the call, all counts, and the elements where they are at
/// most 4 KiB. More elements are read by the receiver from the sender's memory where both are on one
/// host and the system allows it (on Linux: `process_vm_readv`, which MPI libraries use too). Else
/// they pass through chunks of 128 KiB in the world's memory, so a message may be of any size.
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
    offer: Offer,
    /// Exchanges so far.
    number: u64,
    /// When the last one began.
    since: Instant,
    failure: Option<Error>,
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
        may_read: bool,
    ) -> Result<Self, Error> {
        if threading_support() < Threading::Multiple {
            return Err(Error::ThreadSupport);
        }
        let communicator = communicator.duplicate();
        let (rank, ranks) = (communicator.rank() as usize, communicator.size() as usize);
        let offer = Offer::new();
        let processes = readable(&communicator, rank, &offer, may_read);
        let peers = processes.into_iter().enumerate();
        let mut world = Self {
            caller: Caller { rank, ranks },
            deadline,
            channel: Channel::new(communicator),
            peers: peers
                .map(|(rank, process)| Peer::new(rank, ranks, process))
                .collect(),
            offer,
            number: 0,
            since: Instant::now(),
            failure: None,
            chunks: vec![vec![]; ranks],
        };
        for peer in world.others() {
            world.on(peer, Call::Barrier, Peer::listen)?;
        }
        Ok(world)
    }

    /// The other ranks, from the next one on, so that not all begin with the same one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Caller { rank, ranks } = self.caller;
        (rank + 1..ranks).chain(0..rank)
    }
}

/// The processes that this rank and they can read each other's memory of, by rank.
fn readable(
    communicator: &SimpleCommunicator,
    rank: usize,
    offer: &Offer,
    may_read: bool,
) -> Vec<Option<Process>> {
    let ranks = communicator.size() as usize;
    // A process of another host may have the same id as one here, but not this secret at the same
    // place.
    let secret = RandomState::new().hash_one(rank) | 1;
    offer.open(secret);
    let mine = [u64::from(std::process::id()), offer.address(), secret];
    let mut all = vec![[0u64; 3]; ranks];
    communicator.all_gather_into(&mine, bytemuck::cast_slice_mut::<_, u64>(&mut all));
    let process = |[id, offer, secret]: [u64; 3]| {
        let process = Process {
            id: id as u32,
            offer,
        };
        (may_read && process.offers(secret)).then_some(process)
    };
    let readable: Vec<_> = all.into_iter().map(process).collect();
    let mine: Vec<u64> = readable
        .iter()
        .map(|process| process.is_some().into())
        .collect();
    let mut all = vec![0u64; ranks * ranks];
    communicator.all_gather_into(&mine[..], &mut all);
    let reads = |(peer, process): (usize, Option<Process>)| {
        process.filter(|_| all[peer * ranks + rank] == 1)
    };
    readable.into_iter().enumerate().map(reads).collect()
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.offer.close();
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
        self.offer.close();
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
        self.offer.close();
        result
    }

    fn fail(&mut self, error: Error) -> Error {
        if let Some(earlier) = &self.failure {
            return earlier.clone();
        }
        self.failure = Some(error.clone());
        self.offer.close();
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
        self.farewell(&Message::Failed(told));
        error
    }
}

collective_over_transport!(Mpi);
