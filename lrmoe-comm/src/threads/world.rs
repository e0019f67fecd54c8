use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use super::post::{Lending, Post};
use crate::check::counts_agree;
use crate::transport::Counts;
use crate::{Call, Element, Error};

/// Everyone's posts of one exchange, by rank.
type Posts<'a> = Vec<RwLockReadGuard<'a, Post>>;

/// What the ranks share: two mailboxes each, and the meeting point.
///
/// Exchanges take the mailboxes in turns. A rank writes a mailbox again two exchanges later, after
/// the meeting in between, and every rank has read it before coming to that meeting. Memory that is
/// lent is read before a second meeting. So no lock on a mailbox is ever waited for, except by a rank
/// that gives up while another is reading what it lent.
pub(super) struct World {
    deadline: Duration,
    meeting: Mutex<Meeting>,
    changed: Condvar,
    /// As in the meeting, for ranks that look before they sleep.
    held: AtomicU64,
    /// Whether the meeting has a failure, or a rank that left.
    ended: AtomicBool,
    posts: [Vec<RwLock<Post>>; 2],
}

/// Looks at whether all have come before a rank lets other threads run in between, and before it sleeps: to wake it takes longer than
/// most meetings.
const EAGER: usize = 100;
const LOOKS: usize = 200;

struct Meeting {
    /// Who has come to the next meeting.
    arrived: Vec<bool>,
    /// Meetings that everyone has come to.
    held: u64,
    /// Ranks that sleep until something changes.
    asleep: usize,
    /// The first rank that was dropped.
    left: Option<usize>,
    failure: Option<Error>,
}

impl Meeting {
    /// Refuses to go on in a world that has failed or lost a rank.
    fn check(&mut self, collective: Call, start: Instant) -> Result<(), Error> {
        if self.failure.is_none() {
            self.failure = self.left.map(|rank| Error::PeerLost {
                rank,
                collective,
                waited: start.elapsed(),
            });
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// The lowest rank that has not come.
    fn missing(&self) -> usize {
        self.arrived.iter().take_while(|&&arrived| arrived).count()
    }
}

impl World {
    pub(super) fn new(ranks: usize, deadline: Duration) -> Self {
        let posts = || (0..ranks).map(|_| RwLock::new(Post::empty())).collect();
        let meeting = Meeting {
            arrived: vec![false; ranks],
            held: 0,
            asleep: 0,
            left: None,
            failure: None,
        };
        Self {
            deadline,
            meeting: Mutex::new(meeting),
            changed: Condvar::new(),
            held: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            posts: [posts(), posts()],
        }
    }

    /// Posts `send`, meets the other ranks, and has `read` take what it needs from their posts once
    /// they are seen to agree.
    pub(super) fn exchange<T: Element, R>(
        &self,
        rank: usize,
        turn: usize,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        read: impl FnOnce(&Posts<'_>) -> R,
    ) -> Result<R, Error> {
        let start = Instant::now();
        // After a failure a slower rank may still be reading, so nothing may be posted.
        if self.ended.load(Ordering::Acquire) {
            self.meeting().check(call, start)?;
        }
        let _lending = Lending::new(&self.posts[turn][rank], call, counts, send);
        self.meet(rank, call)?;
        let (result, lent) = {
            let read_lock = |post| RwLock::read(post).unwrap_or_else(PoisonError::into_inner);
            let posts: Posts<'_> = self.posts[turn].iter().map(read_lock).collect();
            agree(&posts).map_err(|error| self.fail(error))?;
            if let Some(rank) = posts.iter().position(|post| post.is_withdrawn()) {
                self.meeting().check(call, start)?;
                return Err(self.fail(Error::PeerLost {
                    rank,
                    collective: call,
                    waited: start.elapsed(),
                }));
            }
            (read(&posts), posts.iter().any(|post| post.is_lent()))
        };
        if lent {
            self.meet(rank, call)?;
        }
        Ok(result)
    }

    /// Returns once every rank is here, or has failed to come.
    fn meet(&self, rank: usize, call: Call) -> Result<(), Error> {
        let start = Instant::now();
        let mut meeting = self.meeting();
        meeting.check(call, start)?;
        meeting.arrived[rank] = true;
        if meeting.arrived.iter().all(|&arrived| arrived) {
            meeting.arrived.fill(false);
            meeting.held += 1;
            self.held.store(meeting.held, Ordering::Release);
            if meeting.asleep > 0 {
                self.changed.notify_all();
            }
            return Ok(());
        }
        let held = meeting.held;
        drop(meeting);
        for look in 0..LOOKS {
            if self.held.load(Ordering::Acquire) != held {
                return Ok(());
            }
            match look < EAGER {
                true => std::hint::spin_loop(),
                false => std::thread::yield_now(),
            }
        }
        meeting = self.meeting();
        loop {
            if meeting.held != held {
                return Ok(());
            }
            meeting.check(call, start)?;
            let waited = start.elapsed();
            let Some(left) = self
                .deadline
                .checked_sub(waited)
                .filter(|left| !left.is_zero())
            else {
                let error = Error::Deadline {
                    rank: meeting.missing(),
                    collective: call,
                    waited,
                };
                meeting.failure = Some(error.clone());
                self.ended.store(true, Ordering::Release);
                self.changed.notify_all();
                return Err(error);
            };
            meeting.asleep += 1;
            meeting = self
                .changed
                .wait_timeout(meeting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            meeting.asleep -= 1;
        }
    }

    /// Ends the world with this error unless it has ended already.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.meeting().failure.get_or_insert_with(|| error.clone());
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
        error
    }

    pub(super) fn leave(&self, rank: usize) {
        self.meeting().left.get_or_insert(rank);
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Every rank sees the same posts, so every rank comes to the same verdict.
fn agree(posts: &Posts<'_>) -> Result<(), Error> {
    let expected = posts[0].call;
    if let Some(rank) = posts.iter().position(|post| post.call != expected) {
        return Err(Error::Mismatch {
            rank,
            found: posts[rank].call,
            expected,
        });
    }
    match expected {
        Call::AllToAll { .. } => counts_agree(
            posts.len(),
            |rank| &posts[rank].counts[0],
            |rank| &posts[rank].counts[1],
        ),
        _ => Ok(()),
    }
}
