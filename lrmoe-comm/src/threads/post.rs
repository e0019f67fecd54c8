use std::ops::Range;

use crate::transport::Counts;
use crate::{Call, Element};

/// Parts of up to so many bytes together are copied into the mailbox; above, to wait until they are
/// read costs less than the copy.
const MOST_COPIED: usize = if cfg!(loom) { 8 } else { 16 << 10 };

/// What a rank gives to the others in one exchange: its mailbox.
pub(super) struct Post {
    pub(super) call: Call,
    /// Of an all-to-all: what the rank sends to each peer, then what it expects from each.
    pub(super) counts: [Vec<usize>; 2],
    /// Whether the others read the rank's own memory.
    pub(super) lent: bool,
    /// What each peer takes: of the bytes here, or of the rank's own memory.
    copied: Vec<Range<usize>>,
    bytes: Vec<u8>,
    lendings: Vec<Lent>,
}

/// Bytes that belong to the caller of a rank that waits.
struct Lent(*const [u8]);

// SAFETY: the bytes are only read, from any thread, while `World::exchange` keeps them borrowed.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Post {
    pub(super) fn empty() -> Self {
        Self {
            call: Call::Barrier,
            counts: [vec![], vec![]],
            lent: false,
            copied: vec![],
            bytes: vec![],
            lendings: vec![],
        }
    }

    /// `send`: what each peer takes; the rank's own entry is left out.
    pub(super) fn fill<T: Element>(
        &mut self,
        rank: usize,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
    ) {
        self.call = call;
        let counts = counts.unwrap_or_default();
        for (known, counts) in self.counts.iter_mut().zip(counts) {
            known.clear();
            known.extend_from_slice(counts);
        }
        let parts = || {
            let peer = |peer: usize| if peer == rank { &[][..] } else { send[peer] };
            (0..send.len()).map(peer)
        };
        self.lent = parts().map(size_of_val).sum::<usize>() > MOST_COPIED;
        if self.lent {
            self.lendings.clear();
            let lent = |part| Lent(bytemuck::cast_slice(part));
            self.lendings.extend(parts().map(lent));
        } else {
            self.copy(parts());
        }
    }

    /// Copies the parts. The same memory for several ranks is copied once.
    fn copy<'a, T: Element>(&mut self, parts: impl Iterator<Item = &'a [T]>) {
        self.bytes.clear();
        self.copied.clear();
        let mut last = (&[][..], 0..0);
        for part in parts {
            if !part.is_empty() && !std::ptr::eq(part, last.0) {
                let start = self.bytes.len();
                self.bytes.extend_from_slice(bytemuck::cast_slice(part));
                last = (part, start..self.bytes.len());
            }
            let none = || 0..0;
            self.copied.push(if part.is_empty() {
                none()
            } else {
                last.1.clone()
            });
        }
    }

    /// The bytes for this rank.
    ///
    /// # Safety
    /// What is lent must still be borrowed.
    pub(super) unsafe fn part(&self, rank: usize) -> &[u8] {
        match self.lent {
            // SAFETY: the pointer is that of a slice, which the caller says is still borrowed.
            true => unsafe { &*self.lendings[rank].0 },
            false => &self.bytes[self.copied[rank].clone()],
        }
    }
}
