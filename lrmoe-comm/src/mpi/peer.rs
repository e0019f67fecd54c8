use super::memory::Process;
use super::message::{Message, WORDS};
use super::slot::{Channel, Code, Slot, Tag};
use super::staging::Staging;
use crate::Call;
use crate::transport::Counts;

/// Up to so many bytes travel with the message of a meeting.
const INLINE: usize = 4 << 10;

const MESSAGE_BYTES: usize = WORDS * size_of::<u64>();

/// How the elements of an exchange come from a peer, or go to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// With the message of the meeting.
    Inline,
    /// The receiver reads the sender's memory.
    Memory,
    /// In chunks.
    Chunks,
}

/// What this rank shares with another one.
#[derive(Debug)]
pub(super) struct Peer {
    rank: usize,
    ranks: usize,
    /// The peer's process, if both may read each other's memory.
    process: Option<Process>,
    inbox: Slot,
    /// What lies in the inbox, until it is listened to again.
    message: Option<Message>,
    /// Messages of meetings and those that say that the memory was read, each in turns: one may not
    /// have left when the next exchange begins, but has when the one after that does.
    meets: [Slot; 2],
    reads: [Slot; 2],
    farewell: Slot,
    pub(super) staging: Staging,
    /// Of the exchange that goes on: what comes from the peer and how, and how it goes to it.
    pub(super) incoming: Way,
    outgoing: Way,
    number: u64,
    address: u64,
    /// Whether all chunks for the peer have left.
    pub(super) sent: bool,
}

impl Peer {
    pub(super) fn new(rank: usize, ranks: usize, process: Option<Process>) -> Self {
        let meeting = MESSAGE_BYTES + 2 * ranks * size_of::<u64>() + INLINE;
        Self {
            rank,
            ranks,
            process,
            inbox: Slot::new(meeting),
            message: None,
            meets: [Slot::new(meeting), Slot::new(meeting)],
            reads: [Slot::new(MESSAGE_BYTES), Slot::new(MESSAGE_BYTES)],
            farewell: Slot::new(MESSAGE_BYTES),
            staging: Staging::default(),
            incoming: Way::Inline,
            outgoing: Way::Inline,
            number: 0,
            address: 0,
            sent: true,
        }
    }

    /// Waits for the peer's next message, without blocking. Nothing is read from the last one after.
    pub(super) fn listen(&mut self, channel: Channel) -> Result<(), Code> {
        self.message = None;
        self.inbox.receive(channel, self.rank, Tag::Control)
    }

    /// The message that lies in the inbox.
    pub(super) fn look(&mut self) -> Result<Option<&Message>, Code> {
        if self.message.is_none() && self.inbox.test()? {
            let mut words = [0; WORDS];
            bytemuck::bytes_of_mut(&mut words)
                .copy_from_slice(&self.inbox.bytes()[..MESSAGE_BYTES]);
            self.message = Some(Message::from_words(&words));
        }
        Ok(self.message.as_ref())
    }

    /// Says that this rank has come to its exchange `number`, and what it gives. Fails to send, with
    /// `false`, if the peer is two exchanges behind.
    pub(super) fn send_meet(
        &mut self,
        channel: Channel,
        number: u64,
        call: Call,
        counts: Option<Counts<'_>>,
        part: &[u8],
    ) -> Result<bool, Code> {
        let slot = &mut self.meets[number as usize % 2];
        if !slot.test()? {
            return Ok(false);
        }
        let message = Message::Meet {
            number,
            call,
            address: part.as_ptr().addr() as u64,
        };
        let inline = if part.len() <= INLINE { part } else { &[] };
        let (head, mut rest) = slot.bytes_mut().split_at_mut(MESSAGE_BYTES);
        head.copy_from_slice(bytemuck::bytes_of(&message.to_words()));
        let mut len = MESSAGE_BYTES + inline.len();
        for &count in counts.iter().flatten().copied().flatten() {
            let (word, tail) = rest.split_at_mut(size_of::<u64>());
            word.copy_from_slice(&(count as u64).to_ne_bytes());
            rest = tail;
            len += word.len();
        }
        rest[..inline.len()].copy_from_slice(inline);
        slot.send(channel, self.rank, Tag::Control, len)?;
        Ok(true)
    }

    /// The call that the peer has come to, with its counts of an all-to-all; only after it has come.
    pub(super) fn met(&self) -> Option<(Call, [Vec<usize>; 2])> {
        let Some(Message::Meet { call, .. }) = self.message else {
            return None;
        };
        let mut counts = [vec![], vec![]];
        if let Call::AllToAll { .. } = call {
            let words = &self.inbox.bytes()[MESSAGE_BYTES..];
            let mut words = words.as_chunks().0.iter().copied().map(u64::from_ne_bytes);
            counts = [(); 2].map(|()| {
                let counts = words.by_ref().take(self.ranks);
                counts.map(|count| count as usize).collect()
            });
        }
        Some((call, counts))
    }

    /// Starts to move so many bytes to and from the peer, which has come and agrees.
    pub(super) fn start(
        &mut self,
        channel: Channel,
        send: usize,
        receive: usize,
    ) -> Result<(), Code> {
        if let Some(Message::Meet {
            number, address, ..
        }) = self.message
        {
            (self.number, self.address) = (number, address);
        }
        let way = |bytes| match self.process {
            _ if bytes <= INLINE => Way::Inline,
            Some(_) => Way::Memory,
            None => Way::Chunks,
        };
        (self.outgoing, self.incoming) = (way(send), way(receive));
        let chunks = |way, bytes| if way == Way::Chunks { bytes } else { 0 };
        let (send, receive) = (chunks(self.outgoing, send), chunks(self.incoming, receive));
        self.sent = send == 0;
        self.staging.start(channel, self.rank, send, receive)
    }

    /// The `bytes` that came with the message of the meeting, whose call is `call`.
    pub(super) fn inline(&self, call: Call, bytes: usize) -> &[u8] {
        let counts = match call {
            Call::AllToAll { .. } => 2 * self.ranks * size_of::<u64>(),
            _ => 0,
        };
        &self.inbox.bytes()[MESSAGE_BYTES + counts..][..bytes]
    }

    /// Reads what the peer gives, from byte `start` on. Whether it could.
    pub(super) fn read(&self, start: usize, out: &mut [u8]) -> bool {
        let address = self.address + start as u64;
        self.process
            .is_some_and(|process| process.read(address, out))
    }

    /// Whether what was read from the peer's memory counts: it has not taken it back.
    pub(super) fn still_offers(&self) -> bool {
        self.process
            .is_some_and(|process| process.offers(self.number))
    }

    /// Says that the peer's memory was read in this rank's exchange `number`.
    pub(super) fn send_read(&mut self, channel: Channel, number: u64) -> Result<bool, Code> {
        let slot = &mut self.reads[number as usize % 2];
        Self::send_message(slot, channel, self.rank, &Message::Read)
    }

    /// Says that this rank is gone, or why the world has ended.
    pub(super) fn send_farewell(&mut self, channel: Channel, message: &Message) -> bool {
        Self::send_message(&mut self.farewell, channel, self.rank, message).unwrap_or(false)
    }

    fn send_message(
        slot: &mut Slot,
        channel: Channel,
        rank: usize,
        message: &Message,
    ) -> Result<bool, Code> {
        if !slot.test()? {
            return Ok(false);
        }
        slot.bytes_mut()
            .copy_from_slice(bytemuck::bytes_of(&message.to_words()));
        slot.send(channel, rank, Tag::Control, MESSAGE_BYTES)?;
        Ok(true)
    }

    /// Whether MPI has sent the farewell, or cannot.
    pub(super) fn said_farewell(&mut self) -> bool {
        self.farewell.test().unwrap_or(true)
    }

    /// Whether the peer has come to the meeting.
    pub(super) fn has_come(&self) -> bool {
        matches!(self.message, Some(Message::Meet { .. }))
    }

    /// Whether the peer has taken all it gets, and given all it gives. One that has left has taken
    /// its chunks, whatever MPI knows of it yet.
    pub(super) fn is_through(&self) -> bool {
        let read = self.outgoing != Way::Memory || self.message == Some(Message::Read);
        let sent = self.sent || self.message == Some(Message::Left);
        read && sent && self.staging.all_taken()
    }

    /// Listens again if the peer's last word was that it has read.
    pub(super) fn forget_read(&mut self, channel: Channel) -> Result<(), Code> {
        match self.message {
            Some(Message::Read) => self.listen(channel),
            _ => Ok(()),
        }
    }
}
