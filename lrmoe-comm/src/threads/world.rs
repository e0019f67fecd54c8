use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::thread;
use std::time::{Duration, Instant};

use super::lent::Lent;
use crate::check::counts_agree;
use crate::{Call, Element, Error};

/// Bytes from which on what a rank sends is lent to the others. A copy for them would take longer
/// than waiting until all have read.
const LENT: usize = 1 << 15;

/// How long a rank stays awake before it waits for others. To wake a thread takes about as long.
const PATIENCE: Duration = Duration::from_micros(50);

/// Everyone's posts of one exchange, by rank.
pub(super) type Posts<'a> = Vec<RwLockReadGuard<'a, Post>>;

/// A rank's mailbox.
pub(super) struct Post {
    call: Call,
    pub(super) send_counts: Vec<usize>,
    pub(super) recv_counts: Vec<usize>,
    /// The lowest element that this rank could not sum.
    pub(super) overflow: Option<usize>,
    /// What the rank sends: its own memory if that is lent, else a copy.
    lent: Option<Lent>,
    bytes: Vec<u8>,
}

impl Post {
    fn empty() -> Self {
        Self {
            call: Call::Barrier,
            send_counts: vec![],
            recv_counts: vec![],
            overflow: None,
            lent: None,
            bytes: vec![],
        }
    }

    /// Empties the mailbox but keeps its memory.
    fn clear(&mut self, call: Call) {
        self.call = call;
        self.send_counts.clear();
        self.recv_counts.clear();
        self.overflow = None;
        self.bytes.clear();
    }

    /// Copies the elements from `start` on.
    pub(super) fn read<T: Element>(&self, start: usize, out: &mut [T]) {
        let bytes = self.bytes::<T>(start..start + out.len());
        bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
    }

    pub(super) fn bytes<T: Element>(&self, elements: Range<usize>) -> &[u8] {
        let bytes = self.lent.as_ref().map_or(&*self.bytes, Lent::bytes);
        &bytes[elements.start * size_of::<T>()..elements.end * size_of::<T>()]
    }
}

/// What the ranks share: two mailboxes each, and the meeting point.
///
/// Exchanges take the mailboxes in turns. A rank writes a mailbox again two exchanges later, after
/// the meeting in between, and every rank has read it before coming to that meeting. So no lock on
/// a mailbox is ever waited for.
pub(super) struct World {
    deadline: Duration,
    meeting: Mutex<Meeting>,
    changed: Condvar,
    /// Meetings that everyone has come to; changes under the lock of `meeting`.
    held: AtomicU64,
    /// Ranks that have not yet read the posts of the last meeting.
    reading: AtomicUsize,
    all_read: Condvar,
    posts: [Vec<RwLock<Post>>; 2],
}

struct Meeting {
    /// Who has come to the next meeting.
    arrived: Vec<bool>,
    /// The first rank that was dropped.
    left: Option<usize>,
    failure: Option<Error>,
}

impl Meeting {
    /// Refuses to go on in a world that has failed or lost a rank.
    fn check(&mut self, collective: Call) -> Result<(), Error> {
        if self.failure.is_none() {
            self.failure = self.left.map(|rank| Error::PeerLost { rank, collective });
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
            left: None,
            failure: None,
        };
        Self {
            deadline,
            meeting: Mutex::new(meeting),
            changed: Condvar::new(),
            held: AtomicU64::new(0),
            reading: AtomicUsize::new(0),
            all_read: Condvar::new(),
            posts: [posts(), posts()],
        }
    }

    /// Posts `send` and what `fill` writes in the mailbox of this turn, meets the other ranks and,
    /// once their posts are seen to agree, returns what `read` makes of them.
    pub(super) fn exchange<T: Element, R>(
        &self,
        (rank, turn): (usize, usize),
        call: Call,
        send: &[T],
        fill: impl FnOnce(&mut Post),
        read: impl FnOnce(&Posts<'_>) -> R,
    ) -> Result<R, Error> {
        // After a failure a slower rank may still be reading, so nothing may be posted.
        self.meeting().check(call)?;
        let post = &self.posts[turn][rank];
        {
            let mut post = write(post);
            post.clear(call);
            fill(&mut post);
        }
        let mut posting = Posting::new(self, post, send);
        self.meet(rank, call)?;
        posting.has_met = true;
        let read_lock = |post| RwLock::read(post).unwrap_or_else(PoisonError::into_inner);
        let posts: Posts<'_> = self.posts[turn].iter().map(read_lock).collect();
        agree(&posts)
            .map(|()| read(&posts))
            .map_err(|error| self.fail(error))
    }

    /// Returns once every rank is here, or has failed to come.
    fn meet(&self, rank: usize, call: Call) -> Result<(), Error> {
        let start = Instant::now();
        let mut meeting = self.meeting();
        meeting.check(call)?;
        meeting.arrived[rank] = true;
        if meeting.arrived.iter().all(|&arrived| arrived) {
            meeting.arrived.fill(false);
            self.reading.store(meeting.arrived.len(), Ordering::Relaxed);
            self.held.fetch_add(1, Ordering::Release);
            drop(meeting);
            self.changed.notify_all();
            return Ok(());
        }
        let held = self.held.load(Ordering::Relaxed);
        let is_held = || self.held.load(Ordering::Acquire) != held;
        drop(meeting);
        if soon(is_held) {
            return Ok(());
        }
        meeting = self.meeting();
        loop {
            if is_held() {
                return Ok(());
            }
            meeting.check(call)?;
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
                self.changed.notify_all();
                return Err(error);
            };
            meeting = self
                .changed
                .wait_timeout(meeting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Ends the world with this error unless it has ended already.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.meeting().failure.get_or_insert_with(|| error.clone());
        self.changed.notify_all();
        error
    }

    pub(super) fn leave(&self, rank: usize) {
        self.meeting().left.get_or_insert(rank);
        self.changed.notify_all();
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From the posting of what a rank sends until all others have read it.
///
/// Dropped, also by a panic, it waits until every rank of the meeting has read, if this rank lends.
/// That wait alone has no deadline. It needs none: each rank by then is only copying.
struct Posting<'a> {
    world: &'a World,
    post: &'a RwLock<Post>,
    lends: bool,
    /// Whether others may read. All ranks meet, or none does.
    has_met: bool,
}

impl<'a> Posting<'a> {
    /// Posts `send`: lent if it is large, else as a copy.
    #[allow(unsafe_code)]
    fn new<T: Element>(world: &'a World, post: &'a RwLock<Post>, send: &'a [T]) -> Self {
        let lends = size_of_val(send) >= LENT;
        let posting = Self {
            world,
            post,
            lends,
            has_met: false,
        };
        let mut post = write(post);
        if lends {
            // SAFETY: `send` is borrowed for 'a, and the `Lent` does not outlive that: `posting`
            // takes it out of the post when dropped, and is dropped in `exchange`, which lets go
            // of it in no other way.
            post.lent = Some(unsafe { Lent::new(send) });
        } else {
            post.bytes.extend_from_slice(bytemuck::cast_slice(send));
        }
        posting
    }
}

impl Drop for Posting<'_> {
    fn drop(&mut self) {
        let world = self.world;
        if self.has_met {
            // What this rank has read it has read before a lender sees that all have.
            if world.reading.fetch_sub(1, Ordering::AcqRel) == 1 {
                // A lender that has just seen somebody reading is asleep once the lock is free.
                drop(world.meeting());
                world.all_read.notify_all();
            }
            let all_read = || world.reading.load(Ordering::Acquire) == 0;
            if self.lends && !soon(all_read) {
                let mut meeting = world.meeting();
                while !all_read() {
                    let woken = world.all_read.wait(meeting);
                    meeting = woken.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        if self.lends {
            write(self.post).lent = None;
        }
    }
}

/// Whether something comes true within `PATIENCE`. Until then other threads have the core.
fn soon(is_true: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if is_true() {
            return true;
        }
        if start.elapsed() > PATIENCE {
            return false;
        }
        thread::yield_now();
    }
}

fn write(post: &RwLock<Post>) -> RwLockWriteGuard<'_, Post> {
    post.write().unwrap_or_else(PoisonError::into_inner)
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
            |rank| &posts[rank].send_counts,
            |rank| &posts[rank].recv_counts,
        ),
        _ => Ok(()),
    }
}
