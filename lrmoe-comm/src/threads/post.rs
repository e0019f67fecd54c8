//! What a rank gives to the others in one exchange.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use crate::transport::Counts;
use crate::{Call, Element};

/// Parts of up to so many bytes together are copied into the mailbox; above, a second meeting costs
/// less than the copy.
const MOST_COPIED: usize = 64 << 10;

/// A rank's mailbox.
pub(super) struct Post {
    pub(super) call: Call,
    /// Of an all-to-all: what the rank sends to each peer, then what it expects from each.
    pub(super) counts: [Vec<usize>; 2],
    bytes: Vec<u8>,
    parts: Parts,
}

/// What the others take, by rank.
enum Parts {
    /// Where each part lies in the mailbox's bytes.
    Copied(Vec<Range<usize>>),
    /// Parts in the rank's own memory.
    Lent(Vec<Lent>),
    /// Parts that were lent and whose owner has given up.
    Withdrawn,
}

/// Bytes that belong to the caller of a rank that waits.
struct Lent(*const [u8]);

// SAFETY: the bytes are only read, from any thread, while `Lending` keeps them borrowed.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Post {
    pub(super) fn empty() -> Self {
        Self {
            call: Call::Barrier,
            counts: [vec![], vec![]],
            bytes: vec![],
            parts: Parts::Withdrawn,
        }
    }

    /// Whether the others read the rank's own memory.
    pub(super) fn is_lent(&self) -> bool {
        matches!(self.parts, Parts::Lent(_))
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        matches!(self.parts, Parts::Withdrawn)
    }

    /// The bytes for this rank; none if they were withdrawn.
    pub(super) fn part(&self, rank: usize) -> &[u8] {
        match &self.parts {
            Parts::Copied(ranges) => &self.bytes[ranges[rank].clone()],
            // SAFETY: `Lending::new` took the pointer from a slice that it keeps borrowed, and takes
            // it away under the mailbox's write lock before the borrow ends. `self` is borrowed, so
            // its reader holds the read lock.
            Parts::Lent(parts) => unsafe { &*parts[rank].0 },
            Parts::Withdrawn => &[],
        }
    }

    /// Copies the parts. The same memory for several ranks is copied once.
    fn copy<T: Element>(&mut self, send: &[&[T]]) {
        self.bytes.clear();
        let mut ranges: Vec<Range<usize>> = Vec::with_capacity(send.len());
        for (rank, part) in send.iter().enumerate() {
            let range = match ranges.last() {
                Some(last) if std::ptr::eq(*part, send[rank - 1]) => last.clone(),
                _ => {
                    let start = self.bytes.len();
                    self.bytes.extend_from_slice(bytemuck::cast_slice(part));
                    start..self.bytes.len()
                }
            };
            ranges.push(range);
        }
        self.parts = Parts::Copied(ranges);
    }
}

/// A rank's post, and the loan of its memory, which ends when this is dropped.
pub(super) struct Lending<'a> {
    mailbox: &'a RwLock<Post>,
    /// Whether the others read the rank's own memory.
    lends: bool,
}

impl<'a> Lending<'a> {
    /// Fills the mailbox. `send`: what each peer takes, borrowed for as long as the loan lasts.
    pub(super) fn new<T: Element>(
        mailbox: &'a RwLock<Post>,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &'a [&'a [T]],
    ) -> Self {
        let mut post = mailbox.write().unwrap_or_else(PoisonError::into_inner);
        post.call = call;
        let counts = counts.unwrap_or_default();
        for (known, counts) in post.counts.iter_mut().zip(counts) {
            known.clear();
            known.extend_from_slice(counts);
        }
        let lends = send.iter().map(|part| size_of_val(*part)).sum::<usize>() > MOST_COPIED;
        if lends {
            let lent = |part: &&[T]| Lent(bytemuck::cast_slice(part));
            post.parts = Parts::Lent(send.iter().map(lent).collect());
        } else {
            post.copy(send);
        }
        Self { mailbox, lends }
    }
}

impl Drop for Lending<'_> {
    /// Waits for ranks that are reading: they copy or sum a finite number of bytes, and wait for
    /// nothing meanwhile.
    fn drop(&mut self) {
        if self.lends {
            let mut post = self.mailbox.write().unwrap_or_else(PoisonError::into_inner);
            post.parts = Parts::Withdrawn;
        }
    }
}
