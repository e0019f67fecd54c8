use std::fmt;
use std::time::Duration;

use super::meetings::Meetings;
use super::post::Post;
use super::sync::UnsafeCell;
use crate::check::counts_agree;
use crate::transport::Counts;
use crate::{Call, Element, Error};

/// What the ranks share: two mailboxes each, and where they meet.
///
/// To its exchange n (from 1 on) a rank comes twice: to meeting 2n - 1 once it has posted, and to
/// meeting 2n once it has read what the others posted. Who has lent memory waits for the latter.
/// Exchanges take the mailboxes in turns, so a rank writes one again after the next exchange's first
/// meeting, to which every rank came after it had read it.
pub(super) struct World {
    meetings: Meetings,
    mailboxes: Vec<[UnsafeCell<Post>; 2]>,
}

// SAFETY: a mailbox is written by its own rank's thread alone, between meetings to which the readers
// come before and after it, as said above; `Post` is both `Send` and `Sync`.
unsafe impl Sync for World {}

/// Everyone's posts of one exchange, while they may be read.
pub(super) struct Posts<'a> {
    world: &'a World,
    turn: usize,
}

impl Posts<'_> {
    /// The bytes that a rank gives to another.
    pub(super) fn part(&self, from: usize, to: usize) -> &[u8] {
        // SAFETY: `World::exchange` makes posts where they may be read, and `Meetings::read` lasts.
        unsafe { self.post(from).part(to) }
    }

    fn post(&self, rank: usize) -> &Post {
        // SAFETY: every rank has posted, and writes this mailbox again only after this one has come
        // to the next exchange.
        self.world.mailboxes[rank][self.turn].with(|post| unsafe { &*post })
    }

    /// Every rank sees the same posts, so every rank comes to the same verdict.
    fn agree(&self) -> Result<(), Error> {
        let expected = self.post(0).call;
        for rank in 1..self.world.ranks() {
            let found = self.post(rank).call;
            if found != expected {
                return Err(Error::Mismatch {
                    rank,
                    found,
                    expected,
                });
            }
        }
        match expected {
            Call::AllToAll { .. } => counts_agree(
                self.world.ranks(),
                |rank| &self.post(rank).counts[0],
                |rank| &self.post(rank).counts[1],
            ),
            _ => Ok(()),
        }
    }
}

impl World {
    pub(super) fn new(ranks: usize, deadline: Duration) -> Self {
        let mailboxes = |_| [(); 2].map(|()| UnsafeCell::new(Post::empty()));
        Self {
            meetings: Meetings::new(ranks, deadline),
            mailboxes: (0..ranks).map(mailboxes).collect(),
        }
    }

    pub(super) fn ranks(&self) -> usize {
        self.mailboxes.len()
    }

    /// Posts `send`, meets the other ranks, and has `read` take what it needs from their posts once
    /// they are seen to agree. `meanwhile`: what is left to do then, while the others read.
    ///
    /// # Safety
    /// A rank must be in one exchange at a time.
    pub(super) unsafe fn exchange<T: Element, R>(
        &self,
        rank: usize,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        read: impl FnOnce(&Posts<'_>) -> R,
        meanwhile: impl FnOnce(),
    ) -> Result<R, Error> {
        let meetings = &self.meetings;
        // The first meeting of the next exchange, also after one that was given up between its two.
        let posted = meetings.latest(rank).next_multiple_of(2) + 1;
        let turn = (posted / 2 % 2) as usize;
        // After a failure a slower rank may still be reading, so nothing may be posted.
        meetings.open(posted, call)?;
        let lent = self.mailboxes[rank][turn].with_mut(|post| {
            // SAFETY: the mailbox of this rank, which is here alone. The others have read what was in
            // it: this one waited for them in the exchange before, and has not failed since.
            let post = unsafe { &mut *post };
            post.fill(rank, call, counts, send);
            post.lent
        });
        let taken = posted + 1;
        let loan = || Loan {
            meetings,
            rank,
            taken,
        };
        let _loan = lent.then(loan);
        meetings.come(rank, posted);
        meetings.wait(posted, call)?;
        let posts = Posts { world: self, turn };
        let result = meetings.read(rank, taken, call, || posts.agree().map(|()| read(&posts)))?;
        let result = result.map_err(|error| meetings.fail(rank, error))?;
        meetings.come(rank, taken);
        meanwhile();
        if lent {
            meetings.wait(taken, call)?;
        }
        Ok(result)
    }

    pub(super) fn fail(&self, rank: usize, error: Error) -> Error {
        self.meetings.fail(rank, error)
    }

    pub(super) fn leave(&self, rank: usize) {
        self.meetings.leave(rank);
    }
}

/// Memory that a rank has lent to the others, which this takes back.
struct Loan<'a> {
    meetings: &'a Meetings,
    rank: usize,
    /// The meeting until which it is lent.
    taken: u64,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.meetings.take_back(self.rank, self.taken);
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("deadline", &self.meetings.deadline())
            .finish_non_exhaustive()
    }
}
