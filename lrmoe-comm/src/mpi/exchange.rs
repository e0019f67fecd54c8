//! How the ranks of a world of processes meet, give and take.

use std::time::Instant;

use super::Mpi;
use super::end::FAREWELL;
use super::message::Message;
use super::patience::Patience;
use super::peer::{Peer, Way};
use super::slot::{Channel, Code};
use super::staging::CHUNK;
use crate::check::{Caller, counts_agree};
use crate::element::reduce;
use crate::transport::{Counts, keep};
use crate::{Call, Element, Error, Reduction};

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Every peer comes.
    Meet,
    /// Every peer takes all it gets and gives all it gives. It may then leave: what it gave is on its way.
    Part,
}

impl Stage {
    fn is_done(self, peer: &Peer) -> bool {
        match self {
            Self::Meet => peer.has_come(),
            Self::Part => peer.is_through(),
        }
    }
}

impl Mpi {
    /// Does something with a peer that only MPI can make fail.
    pub(super) fn on<R>(
        &mut self,
        peer: usize,
        collective: Call,
        body: impl FnOnce(&mut Peer, Channel) -> Result<R, Code>,
    ) -> Result<R, Error> {
        body(&mut self.peers[peer], self.channel).map_err(|Code(code)| {
            let rank = peer;
            let error = Error::Mpi {
                rank,
                collective,
                code,
            };
            self.end(self.number, error)
        })
    }

    /// Waits until the stage is done by every peer and nothing is left to do. `work` does what can be done
    /// meanwhile and says whether anything was: then the wait counts anew.
    fn wait(
        &mut self,
        collective: Call,
        stage: Stage,
        mut work: impl FnMut(&mut Self) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let mut patience = Patience::new();
        // Why the world has ended for a peer that has gone on to a later exchange.
        let mut later = None;
        loop {
            let worked = work(self)?;
            let mut missing = self.caller.ranks;
            for rank in self.others() {
                let mut message = None;
                // A peer that is near comes on its board; by messages it only fails or leaves.
                let peer = &self.peers[rank];
                if !peer.is_near() || peer.has_failed() || patience.listens() {
                    message = self.on(rank, collective, |peer, _| Ok(peer.look()?.cloned()))?;
                }
                match message {
                    Some(Message::Failed { error, number }) if number <= self.number => {
                        return Err(self.failure.insert(error).clone());
                    }
                    Some(Message::Failed { ref error, .. }) => later = Some(error.clone()),
                    _ => {}
                }
                if stage.is_done(&self.peers[rank]) {
                    continue;
                }
                if stage == Stage::Meet && message == Some(Message::Left) {
                    return Err(self.lost(rank, collective));
                }
                missing = missing.min(rank);
            }
            if worked {
                patience = Patience::new();
            } else if missing == self.caller.ranks {
                return Ok(());
            } else if let Some(error) = &later {
                // What is left of this exchange is on its way, unless a rank is lost in it.
                if patience.pause(FAREWELL.min(self.deadline)).is_err() {
                    return Err(self.failure.insert(error.clone()).clone());
                }
            } else if let Err(waited) = patience.pause(self.deadline) {
                // A rank that has seen the world end says why.
                let mut others = self.others();
                if let Some(rank) = others.find(|&rank| self.peers[rank].has_failed()) {
                    return Err(self.gone(rank, collective));
                }
                let error = Error::Deadline {
                    rank: missing,
                    collective,
                    waited,
                };
                return Err(self.end(self.number, error));
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
        self.since = Instant::now();
        self.number += 1;
        let number = self.number;
        for peer in self.others() {
            self.peers[peer].begin(number);
        }
        if let Some(board) = &self.board {
            board.open(number);
            for peer in self.others().filter(|&peer| self.peers[peer].is_near()) {
                board.put(number, peer, bytemuck::cast_slice(send[peer]));
            }
            board.come(number, call, counts);
        }
        let far = |&peer: &usize| !self.peers[peer].is_near();
        let mut unsent: Vec<usize> = self.others().filter(far).collect();
        self.wait(call, Stage::Meet, |world| {
            let before = unsent.len();
            let mut result = Ok(());
            unsent.retain(|&peer| {
                let part = bytemuck::cast_slice(send[peer]);
                let send_meet =
                    |peer: &mut Peer, channel| peer.send_meet(channel, call, counts, part);
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
        let Caller { rank, ranks } = self.caller;
        for peer in self.others() {
            self.peers[peer].met(&mut self.posts[peer]);
        }
        let own = counts.iter().flatten().copied().flatten();
        self.posts[rank].set(call, ranks, own.copied());
        let posts = &self.posts;
        let expected = posts[0].call;
        let different = posts.iter().position(|post| post.call != expected);
        let verdict = match (different, expected) {
            (Some(rank), _) => Err(Error::Mismatch {
                rank,
                found: posts[rank].call,
                expected,
            }),
            (None, Call::AllToAll { .. }) => counts_agree(
                ranks,
                |rank| &posts[rank].counts[0],
                |rank| &posts[rank].counts[1],
            ),
            _ => Ok(()),
        };
        verdict.map_err(|error| self.failure.insert(error).clone())
    }

    /// Sends chunks that MPI takes. Whether anything happened.
    fn push<T: Element>(&mut self, call: Call, send: &[&[T]]) -> Result<bool, Error> {
        let mut worked = false;
        for rank in self.others() {
            if self.peers[rank].sent {
                continue;
            }
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
        for rank in self.others() {
            if self.peers[rank].incoming != Way::Memory {
                continue;
            }
            if !self.peers[rank].still_offers() {
                return Err(self.gone(rank, collective));
            }
            if let Some(board) = &self.board {
                board.tell_read(self.number, rank);
            }
        }
        Ok(())
    }

    /// Ends an exchange: listens again to peers whose message has been read, and waits until each has taken all it gets
    /// and given all it gives. `take` takes what has come and says whether anything had.
    fn part<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        mut take: impl FnMut(&mut Self) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        for peer in self.others() {
            if !self.peers[peer].is_near() {
                self.on(peer, call, Peer::listen)?;
            }
        }
        self.wait(call, Stage::Part, |world| {
            Ok(world.push(call, send)? | take(world)?)
        })
    }

    pub(super) fn try_exchange<T: Element>(
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
        // While the others read.
        let own = self.caller.rank;
        keep(bytemuck::cast_slice(send[own]), recv[own]);
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

    pub(super) fn try_reduce<T: Element>(
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
}
