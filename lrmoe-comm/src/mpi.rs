mod memory;
mod message;
mod patience;
mod peer;
mod slot;
mod staging;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use mpi::environment::{Threading, threading_support};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

use crate::check::{Caller, counts_agree};
use crate::element::reduce;
use crate::transport::{Counts, Transport, collective_over_transport};
use crate::{Call, Element, Error, Reduction};
use memory::{Offer, Process};
use message::Message;
use patience::Patience;
use peer::{Peer, Way};
use slot::{Channel, Code};
use staging::CHUNK;

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
    failure: Option<Error>,
    /// A chunk from each peer, for sums.
    chunks: Vec<Vec<u8>>,
}

/// How long a rank that ends the world, or leaves it, stays to see its last words sent.
const FAREWELL: Duration = Duration::from_millis(100);

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

    /// Does something with a peer that only MPI can make fail.
    fn on<R>(
        &mut self,
        peer: usize,
        collective: Call,
        body: impl FnOnce(&mut Peer, Channel) -> Result<R, Code>,
    ) -> Result<R, Error> {
        body(&mut self.peers[peer], self.channel).map_err(|Code(code)| {
            let rank = peer;
            self.fail(Error::Mpi {
                rank,
                collective,
                code,
            })
        })
    }

    /// Waits until every peer is `ready` and nothing is left to do. `work` does what can be done
    /// meanwhile and says whether anything was: then the wait counts anew.
    fn wait(
        &mut self,
        collective: Call,
        ready: impl Fn(&Peer) -> bool,
        mut work: impl FnMut(&mut Self) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let mut patience = Patience::new();
        loop {
            let worked = work(self)?;
            let mut missing = self.caller.ranks;
            for rank in self.others() {
                let message = self.on(rank, collective, |peer, _| Ok(peer.look()?.cloned()))?;
                if let Some(Message::Failed(error)) = message {
                    return Err(self.failure.insert(error).clone());
                }
                if ready(&self.peers[rank]) {
                    continue;
                }
                // Having left is no failure of those who need nothing more from the rank.
                if message == Some(Message::Left) {
                    return Err(self.fail(Error::PeerLost { rank, collective }));
                }
                missing = missing.min(rank);
            }
            if worked {
                patience = Patience::new();
            } else if missing == self.caller.ranks {
                return Ok(());
            } else if let Err(waited) = patience.pause(self.deadline) {
                return Err(self.fail(Error::Deadline {
                    rank: missing,
                    collective,
                    waited,
                }));
            }
        }
    }

    /// Tells every peer that this rank is here and what it gives, waits until all have done so and
    /// agree, and starts to move `send[p]` to and `receives(p)` elements from each.
    fn meet<T: Element>(
        &mut self,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        receives: impl Fn(usize) -> usize,
    ) -> Result<(), Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        self.number += 1;
        let number = self.number;
        self.offer.open(number);
        let mut unsent: Vec<usize> = self.others().collect();
        self.wait(call, Peer::has_come, |world| {
            let before = unsent.len();
            let mut result = Ok(());
            unsent.retain(|&peer| {
                let part = bytemuck::cast_slice(send[peer]);
                let send_meet =
                    |peer: &mut Peer, channel| peer.send_meet(channel, number, call, counts, part);
                match world.on(peer, call, send_meet) {
                    Ok(sent) => !sent,
                    Err(error) => {
                        result = Err(error);
                        true
                    }
                }
            });
            result.map(|()| unsent.len() < before)
        })?;
        self.agree(call, counts)?;
        for peer in self.others() {
            let (sends, receives) = (size_of_val(send[peer]), receives(peer) * size_of::<T>());
            self.on(peer, call, |peer, channel| {
                peer.start(channel, sends, receives)
            })?;
        }
        Ok(())
    }

    /// Checks that all ranks make the same call. Every rank has heard the same from all, so every
    /// rank comes to the same verdict.
    fn agree(&mut self, call: Call, counts: Option<Counts<'_>>) -> Result<(), Error> {
        let own = (call, counts.unwrap_or_default().map(<[usize]>::to_vec));
        let posts: Vec<_> = self
            .peers
            .iter()
            .map(|peer| peer.met().unwrap_or_else(|| own.clone()))
            .collect();
        let expected = posts[0].0;
        let different = posts.iter().position(|(call, _)| *call != expected);
        let verdict = match (different, expected) {
            (Some(rank), _) => Err(Error::Mismatch {
                rank,
                found: posts[rank].0,
                expected,
            }),
            (None, Call::AllToAll { .. }) => counts_agree(
                posts.len(),
                |rank| &posts[rank].1[0],
                |rank| &posts[rank].1[1],
            ),
            _ => Ok(()),
        };
        verdict.map_err(|error| self.failure.insert(error).clone())
    }

    /// Sends chunks that MPI takes. Whether anything happened.
    fn push<T: Element>(&mut self, call: Call, send: &[&[T]]) -> Result<bool, Error> {
        let mut worked = false;
        for rank in self
            .others()
            .filter(|&rank| !self.peers[rank].sent)
            .collect::<Vec<_>>()
        {
            let bytes = bytemuck::cast_slice(send[rank]);
            worked |= self.on(rank, call, |peer, channel| {
                let pushed = peer.staging.push(channel, rank, bytes)?;
                peer.sent = peer.staging.all_sent()?;
                Ok(pushed || peer.sent)
            })?;
        }
        Ok(worked)
    }

    /// Tells the peers whose memory was read that it was, once it is sure that it held what they
    /// gave.
    fn tell_read(&mut self, collective: Call) -> Result<(), Error> {
        let number = self.number;
        for rank in self.others() {
            if self.peers[rank].incoming != Way::Memory {
                continue;
            }
            if !self.peers[rank].still_offers() {
                return Err(self.gone(rank, collective));
            }
            self.on(rank, collective, |peer, channel| {
                peer.send_read(channel, number)
            })?;
        }
        Ok(())
    }

    /// A peer's memory cannot be read any more: it has ended the world, which its farewell says, or
    /// died.
    fn gone(&mut self, rank: usize, collective: Call) -> Error {
        let mut patience = Patience::new();
        loop {
            let message = self.on(rank, collective, |peer, channel| {
                if peer.has_come() {
                    peer.listen(channel)?;
                }
                Ok(peer.look()?.cloned())
            });
            match message {
                Err(error) => return error,
                Ok(Some(Message::Failed(error))) => return self.failure.insert(error).clone(),
                Ok(None) if patience.pause(FAREWELL).is_ok() => {}
                Ok(_) => return self.fail(Error::PeerLost { rank, collective }),
            }
        }
    }

    /// Ends an exchange: listens to all peers again, and waits until each has taken all it gets and
    /// given all it gives. `take` takes what has come and says whether anything had.
    fn part<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        mut take: impl FnMut(&mut Self) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        for peer in self.others() {
            self.on(peer, call, Peer::listen)?;
        }
        self.wait(call, Peer::is_through, |world| {
            Ok(world.push(call, send)? | take(world)?)
        })?;
        for peer in self.others() {
            self.on(peer, call, Peer::forget_read)?;
        }
        Ok(())
    }

    fn try_exchange<T: Element>(
        &mut self,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        recv: &mut [&mut [T]],
    ) -> Result<(), Error> {
        self.meet(call, counts, send, |peer| recv[peer].len())?;
        let mut recv: Vec<&mut [u8]> = recv
            .iter_mut()
            .map(|part| bytemuck::cast_slice_mut(part))
            .collect();
        for rank in self.others() {
            let (peer, part) = (&self.peers[rank], &mut *recv[rank]);
            match peer.incoming {
                Way::Inline => part.copy_from_slice(peer.inline(call, part.len())),
                Way::Memory if !peer.read(0, part) => return Err(self.gone(rank, call)),
                Way::Memory | Way::Chunks => {}
            }
        }
        self.tell_read(call)?;
        self.part(call, send, |world| {
            let mut taken = false;
            for rank in world.others() {
                let part = &mut *recv[rank];
                taken |= world.on(rank, call, |peer, channel| {
                    let Some((chunk, bytes)) = peer.staging.next()? else {
                        return Ok(false);
                    };
                    let rest = &mut part[chunk * CHUNK..];
                    let len = rest.len().min(CHUNK);
                    rest[..len].copy_from_slice(&bytes[..len]);
                    peer.staging.take(channel, rank)?;
                    Ok(true)
                })?;
            }
            Ok(taken)
        })
    }

    fn try_reduce<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        reduction: Reduction,
        mine: &mut [T],
    ) -> Result<Option<usize>, Error> {
        self.meet(call, None, send, |_| mine.len())?;
        for rank in self.others() {
            let peer = &self.peers[rank];
            if peer.incoming == Way::Inline {
                self.chunks[rank].clear();
                self.chunks[rank].extend_from_slice(peer.inline(call, size_of_val(mine)));
            }
        }
        let elements = CHUNK / size_of::<T>();
        let (mut next, mut overflow) = (0, None);
        self.part(call, send, |world| {
            let start = next * elements;
            // Without elements there is still memory to give back.
            if start >= mine.len().max(1) || !world.fetch::<T>(call, start, mine.len())? {
                return Ok(false);
            }
            let end = mine.len().min(start + elements);
            let sources: Vec<&[u8]> = world.chunks.iter().map(Vec::as_slice).collect();
            let reduced = reduce(
                &sources,
                world.caller.rank,
                reduction,
                &mut mine[start..end],
            );
            overflow = overflow.or(reduced.err().map(|index| start + index));
            next += 1;
            if end == mine.len() {
                world.tell_read(call)?;
            }
            Ok(true)
        })?;
        Ok(overflow)
    }

    /// Brings the elements from `start` on, a chunk at most, from every peer. `false` if some have
    /// not come.
    fn fetch<T: Element>(&mut self, call: Call, start: usize, len: usize) -> Result<bool, Error> {
        let bytes = (len - start).min(CHUNK / size_of::<T>()) * size_of::<T>();
        let mut here = true;
        for rank in self.others() {
            if self.peers[rank].incoming == Way::Chunks {
                here &= self.on(rank, call, |peer, _| Ok(peer.staging.next()?.is_some()))?;
            }
        }
        if !here {
            return Ok(false);
        }
        for rank in self.others() {
            let mut chunk = std::mem::take(&mut self.chunks[rank]);
            chunk.resize(bytes, 0);
            match self.peers[rank].incoming {
                Way::Inline => {}
                Way::Memory => {
                    if !self.peers[rank].read(start * size_of::<T>(), &mut chunk) {
                        return Err(self.gone(rank, call));
                    }
                }
                Way::Chunks => self.on(rank, call, |peer, channel| {
                    if let Some((_, come)) = peer.staging.next()? {
                        chunk.copy_from_slice(&come[..bytes]);
                    }
                    peer.staging.take(channel, rank)
                })?,
            }
            self.chunks[rank] = chunk;
        }
        Ok(true)
    }

    /// Sends every peer a last message and stays a little to see it leave.
    fn farewell(&mut self, message: &Message) {
        for peer in self.others() {
            self.peers[peer].send_farewell(self.channel, message);
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
        self.farewell(&Message::Failed(error.clone()));
        error
    }
}

collective_over_transport!(Mpi);
