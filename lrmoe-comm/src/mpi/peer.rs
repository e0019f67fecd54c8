use super::board;
use super::memory::Neighbour;
use super::message::{Message, WORDS};
use super::slot::{Channel, Code, Slot, Tag};
use super::staging::Staging;
use crate::Call;
use crate::check::Caller;
use crate::transport::Counts;

/// Up to so many bytes travel with the message of a meeting: with it they are still among those that MPI libraries send at
/// once, without an agreement between both ends.
const INLINE: usize = 2 << 10;

const MESSAGE_BYTES: usize = WORDS * size_of::<u64>();

/// How the elements of an exchange come from a peer, or go to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// With what the sender says at the meeting.
    Inline,
    /// The receiver reads the sender's memory.
    Memory,
    /// In chunks.
    Chunks,
}

/// What a rank says at a meeting: its call and, of an all-to-all, what it sends to each peer and what it expects from each.
#[derive(Clone, Debug)]
pub(super) struct Post {
    pub(super) call: Call,
    pub(super) counts: [Vec<usize>; 2],
}

impl Post {
    pub(super) fn nothing() -> Self {
        Self {
            call: Call::Barrier,
            counts: [vec![], vec![]],
        }
    }

    /// Takes `counts` of both sides, one after the other; too few if the call has none.
    pub(super) fn set(
        &mut self,
        call: Call,
        ranks: usize,
        mut counts: impl Iterator<Item = usize>,
    ) {
        self.call = call;
        for side in &mut self.counts {
            side.clear();
            side.extend(counts.by_ref().take(ranks));
        }
    }
}

/// How two ranks meet.
#[derive(Debug)]
enum Link {
    /// On their boards.
    Near(Neighbour),
    /// By messages, each in turns: one may not have left when the next exchange begins, but has when the one after that does.
    Far([Slot; 2]),
}

/// What this rank shares with another one.
#[derive(Debug)]
pub(super) struct Peer {
    rank: usize,
    /// This rank.
    caller: Caller,
    link: Link,
    inbox: Slot,
    /// What lies in the inbox, until it is listened to again.
    message: Option<Message>,
    farewell: Slot,
    pub(super) staging: Staging,
    /// The exchange that goes on: its number, how the elements come from the peer, and how they go to it.
    number: u64,
    pub(super) incoming: Way,
    outgoing: Way,
    /// Whether all chunks for the peer have left.
    pub(super) sent: bool,
}

impl Peer {
    pub(super) fn new(rank: usize, caller: Caller, neighbour: Option<Neighbour>) -> Self {
        let meeting = MESSAGE_BYTES + 2 * caller.ranks * size_of::<u64>() + INLINE;
        let far = || Link::Far([Slot::new(meeting), Slot::new(meeting)]);
        Self {
            rank,
            caller,
            link: neighbour.map_or_else(far, Link::Near),
            inbox: Slot::new(meeting),
            message: None,
            farewell: Slot::new(MESSAGE_BYTES),
            staging: Staging::default(),
            number: 0,
            incoming: Way::Inline,
            outgoing: Way::Inline,
            sent: true,
        }
    }

    pub(super) fn is_near(&self) -> bool {
        matches!(self.link, Link::Near(_))
    }

    /// Whether the peer shows on its board that the world has ended for it.
    pub(super) fn has_failed(&self) -> bool {
        matches!(&self.link, Link::Near(neighbour) if neighbour.board.has_failed(self.number))
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

    /// Begins exchange `number`.
    pub(super) fn begin(&mut self, number: u64) {
        self.number = number;
    }

    /// Says that this rank has come to its exchange, and what it gives. Fails to send, with `false`, if the peer is two
    /// exchanges behind. Peers that are near see it on this rank's board.
    pub(super) fn send_meet(
        &mut self,
        channel: Channel,
        call: Call,
        counts: Option<Counts<'_>>,
        part: &[u8],
    ) -> Result<bool, Code> {
        let Link::Far(meets) = &mut self.link else {
            return Ok(true);
        };
        let slot = &mut meets[self.number as usize % 2];
        if !slot.test()? {
            return Ok(false);
        }
        let message = Message::Meet { call };
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

    /// Whether the peer has come to the meeting.
    pub(super) fn has_come(&self) -> bool {
        match &self.link {
            Link::Near(neighbour) => neighbour.board.has_come(self.number),
            Link::Far(_) => matches!(self.message, Some(Message::Meet { .. })),
        }
    }

    /// Fills in what the peer said at the meeting, to which it has come.
    pub(super) fn met(&self, post: &mut Post) {
        let ranks = self.caller.ranks;
        match (&self.link, &self.message) {
            (Link::Near(neighbour), _) => {
                let board = &neighbour.board;
                if let Message::Meet { call } = board.message(self.number) {
                    post.set(call, ranks, board.counts(self.number));
                }
            }
            (Link::Far(_), Some(Message::Meet { call })) => {
                let words = self.inbox.bytes()[MESSAGE_BYTES..].as_chunks().0;
                let counts = words.iter().map(|&word| u64::from_ne_bytes(word) as usize);
                post.set(*call, ranks, counts);
            }
            _ => {}
        }
    }

    /// Starts to move so many bytes to and from the peer, which has come and agrees.
    pub(super) fn start(
        &mut self,
        channel: Channel,
        send: usize,
        receive: usize,
    ) -> Result<(), Code> {
        let (most, way) = match self.link {
            Link::Near(_) => (board::INLINE, Way::Memory),
            Link::Far(_) => (INLINE, Way::Chunks),
        };
        let way = |bytes| if bytes <= most { Way::Inline } else { way };
        (self.outgoing, self.incoming) = (way(send), way(receive));
        let chunks = |way, bytes| if way == Way::Chunks { bytes } else { 0 };
        let (send, receive) = (chunks(self.outgoing, send), chunks(self.incoming, receive));
        self.sent = send == 0;
        self.staging.start(channel, self.rank, send, receive)
    }

    /// The `bytes` that the peer gave at the meeting, whose call is `call`.
    pub(super) fn inline(&self, call: Call, bytes: usize) -> &[u8] {
        if let Link::Near(neighbour) = &self.link {
            let board = &neighbour.board;
            return board.inline(self.number, self.caller.rank, bytes);
        }
        let counts = match call {
            Call::AllToAll { .. } => 2 * self.caller.ranks * size_of::<u64>(),
            _ => 0,
        };
        &self.inbox.bytes()[MESSAGE_BYTES + counts..][..bytes]
    }

    /// Reads what the peer gives, from byte `start` on. Whether it could.
    pub(super) fn read(&self, start: usize, out: &mut [u8]) -> bool {
        let Link::Near(neighbour) = &self.link else {
            return false;
        };
        let source = neighbour.board.source(self.number, self.caller.rank);
        neighbour.read(source + start as u64, out)
    }

    /// Whether what was read from the peer's memory counts: it has not taken it back.
    pub(super) fn still_offers(&self) -> bool {
        matches!(&self.link, Link::Near(neighbour) if neighbour.board.offers(self.number))
    }

    /// Whether the peer has read what this rank gives it, if it is to.
    fn has_read(&self) -> bool {
        match &self.link {
            Link::Near(neighbour) if self.outgoing == Way::Memory => {
                neighbour.board.has_read(self.number, self.caller.rank)
            }
            _ => true,
        }
    }

    /// Says that this rank is gone, or why the world has ended.
    pub(super) fn send_farewell(&mut self, channel: Channel, message: &Message) -> bool {
        self.try_farewell(channel, message).unwrap_or(false)
    }

    fn try_farewell(&mut self, channel: Channel, message: &Message) -> Result<bool, Code> {
        let slot = &mut self.farewell;
        if !slot.test()? {
            return Ok(false);
        }
        slot.bytes_mut()
            .copy_from_slice(bytemuck::bytes_of(&message.to_words()));
        slot.send(channel, self.rank, Tag::Control, MESSAGE_BYTES)?;
        Ok(true)
    }

    /// Whether MPI has sent the farewell, or cannot.
    pub(super) fn said_farewell(&mut self) -> bool {
        self.farewell.test().unwrap_or(true)
    }

    /// Whether the peer has taken all it gets, and given all it gives. One that has left, or failed in a later exchange, has taken
    /// its chunks, whatever MPI knows of it yet.
    pub(super) fn is_through(&self) -> bool {
        let gone = matches!(&self.message, Some(Message::Left | Message::Failed { .. }));
        self.has_read() && (self.sent || gone) && self.staging.all_taken()
    }
}
