//! Elements on their way through messages, in chunks that lie in the world's own memory.

use super::slot::{Channel, Code, Slot, Tag};

/// Bytes of a chunk: small enough to stay in a core's cache, large enough to hide the start of a
/// message.
pub(super) const CHUNK: usize = 128 << 10;

/// Chunks on their way from one rank to another at a time.
const DEPTH: usize = 4;

/// Chunks from and to one peer. The slots are made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    outgoing: Vec<Slot>,
    incoming: Vec<Slot>,
    /// Chunks of this exchange that have been given to MPI, of `to_send`.
    sent: usize,
    to_send: usize,
    /// Chunks that have been asked for and that have been taken, of `to_take`.
    asked: usize,
    taken: usize,
    to_take: usize,
}

impl Staging {
    /// Starts an exchange of so many bytes each way.
    pub(super) fn start(
        &mut self,
        channel: Channel,
        peer: usize,
        send: usize,
        receive: usize,
    ) -> Result<(), Code> {
        (self.sent, self.asked, self.taken) = (0, 0, 0);
        (self.to_send, self.to_take) = (send.div_ceil(CHUNK), receive.div_ceil(CHUNK));
        let slots = |bytes: usize| (0..bytes.div_ceil(CHUNK).min(DEPTH)).map(|_| Slot::new(CHUNK));
        self.outgoing.extend(slots(send).skip(self.outgoing.len()));
        self.incoming
            .extend(slots(receive).skip(self.incoming.len()));
        while self.asked < self.to_take.min(DEPTH) {
            self.incoming[self.asked].receive(channel, peer, Tag::Chunk)?;
            self.asked += 1;
        }
        Ok(())
    }

    /// Sends what fits of `bytes`, all that goes to `peer`. Whether anything did.
    pub(super) fn push(
        &mut self,
        channel: Channel,
        peer: usize,
        bytes: &[u8],
    ) -> Result<bool, Code> {
        let before = self.sent;
        while self.sent < self.to_send {
            let slot = &mut self.outgoing[self.sent % DEPTH];
            if !slot.test()? {
                break;
            }
            let chunk = bytes.chunks(CHUNK).nth(self.sent).unwrap_or_default();
            slot.bytes_mut()[..chunk.len()].copy_from_slice(chunk);
            slot.send(channel, peer, Tag::Chunk, chunk.len())?;
            self.sent += 1;
        }
        Ok(self.sent > before)
    }

    /// The number of the next chunk and its memory, if it has come.
    pub(super) fn next(&mut self) -> Result<Option<(usize, &[u8])>, Code> {
        if self.taken == self.to_take {
            return Ok(None);
        }
        let slot = &mut self.incoming[self.taken % DEPTH];
        Ok(slot.test()?.then(|| (self.taken, slot.bytes())))
    }

    /// Gives the memory of the next chunk back, for a later one.
    pub(super) fn take(&mut self, channel: Channel, peer: usize) -> Result<(), Code> {
        let slot = &mut self.incoming[self.taken % DEPTH];
        self.taken += 1;
        if self.asked < self.to_take {
            slot.receive(channel, peer, Tag::Chunk)?;
            self.asked += 1;
        }
        Ok(())
    }

    /// Whether MPI needs no more of this rank's time for what goes to the peer.
    pub(super) fn all_sent(&mut self) -> Result<bool, Code> {
        let mut idle = self.sent == self.to_send;
        for slot in &mut self.outgoing {
            idle &= slot.test()?;
        }
        Ok(idle)
    }

    pub(super) fn all_taken(&self) -> bool {
        self.taken == self.to_take
    }
}
