use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence, spin_loop,
    yield_now,
};
use crate::{Call, Error};

/// Looks at whether all have come before a rank lets other threads run in between, and before it
/// sleeps: to wake it takes longer than most meetings. Ranks that have no core each give way at once.
const EAGER: usize = 100;
const PATIENT: usize = if cfg!(loom) { 1 } else { 100 };

/// Where ranks wait for each other. Their meetings are numbered from 1 on, and a rank comes to one,
/// and by this to all before, by a store to a line that it alone writes. Only a rank that sleeps, or
/// that wakes one, takes a lock.
///
/// A fence lies between what a rank says (that it has come, sleeps, reads, or that a meeting is not
/// held) and what it then looks at, so that of two ranks at least one sees the other.
pub(super) struct Meetings {
    deadline: Duration,
    lines: Vec<Line>,
    eager: usize,
    /// The first meeting that is not held any more.
    ended: AtomicU64,
    /// Ranks that sleep until something changes.
    asleep: AtomicUsize,
    end: Mutex<End>,
    changed: Condvar,
}

/// What a rank says to the others, in a cache line of its own (two, as processors fetch pairs).
#[repr(align(128))]
struct Line {
    /// The latest meeting that it has come to.
    come: AtomicU64,
    /// Whether it reads what others have lent.
    reads: AtomicBool,
}

/// Why a meeting is not held.
struct End {
    /// The rank that was dropped and misses the earliest meeting.
    left: usize,
    failure: Option<Error>,
}

impl End {
    fn error(&mut self, collective: Call, waited: Duration) -> Error {
        let rank = self.left;
        let lost = || Error::PeerLost {
            rank,
            collective,
            waited,
        };
        self.failure.get_or_insert_with(lost).clone()
    }
}

impl Meetings {
    pub(super) fn new(ranks: usize, deadline: Duration) -> Self {
        let line = |_| Line {
            come: AtomicU64::new(0),
            reads: AtomicBool::new(false),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            deadline,
            lines: (0..ranks).map(line).collect(),
            eager: if ranks > cores || cfg!(loom) {
                0
            } else {
                EAGER
            },
            ended: AtomicU64::new(u64::MAX),
            asleep: AtomicUsize::new(0),
            end: Mutex::new(End {
                left: 0,
                failure: None,
            }),
            changed: Condvar::new(),
        }
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The latest meeting that a rank has come to, as it alone knows for certain.
    pub(super) fn latest(&self, rank: usize) -> u64 {
        self.lines[rank].come.load(Ordering::Relaxed)
    }

    /// Refuses a meeting that is not held.
    pub(super) fn open(&self, number: u64, call: Call) -> Result<(), Error> {
        if self.ended.load(Ordering::Relaxed) > number {
            return Ok(());
        }
        Err(self.end().error(call, Duration::ZERO))
    }

    /// Says that a rank is here.
    pub(super) fn come(&self, rank: usize, number: u64) {
        self.lines[rank].come.store(number, Ordering::Release);
        fence(Ordering::SeqCst);
        // Who is not seen to sleep sees that this rank has come.
        if self.asleep.load(Ordering::Relaxed) > 0 && self.is_held(number) {
            // Who looks around right now falls asleep before the lock is had.
            let _end = self.end();
            self.changed.notify_all();
        }
    }

    /// Returns once every rank has come, or has failed to.
    pub(super) fn wait(&self, number: u64, call: Call) -> Result<(), Error> {
        for _ in 0..self.eager {
            if self.is_held(number) {
                return Ok(());
            }
            spin_loop();
        }
        let start = Instant::now();
        for _ in 0..PATIENT {
            if self.is_held(number) {
                return Ok(());
            }
            yield_now();
        }
        let mut end = self.end();
        self.asleep.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let result = loop {
            if self.is_held(number) {
                break Ok(());
            }
            let waited = start.elapsed();
            if self.ended.load(Ordering::Relaxed) <= number {
                break Err(end.error(call, waited));
            }
            let left = self.deadline.saturating_sub(waited);
            if left.is_zero() {
                let missing = |line: &Line| line.come.load(Ordering::Relaxed) < number;
                let late = Error::Deadline {
                    rank: self.lines.iter().position(missing).unwrap_or(0),
                    collective: call,
                    waited,
                };
                let error = end.failure.get_or_insert(late).clone();
                self.end_at(number);
                break Err(error);
            }
            end = self
                .changed
                .wait_timeout(end, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        };
        self.asleep.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Has a rank read what others have lent until they all have come to a meeting, if it is held.
    pub(super) fn read<R>(
        &self,
        rank: usize,
        number: u64,
        call: Call,
        read: impl FnOnce() -> R,
    ) -> Result<R, Error> {
        let reads = Reads(&self.lines[rank].reads);
        reads.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Who ends the meeting from here on sees that this rank reads, and waits.
        self.open(number, call)?;
        let result = read();
        drop(reads);
        Ok(result)
    }

    /// Ends the world with this error unless it has ended already. Meetings to which the rank has
    /// come are still held.
    pub(super) fn fail(&self, rank: usize, error: Error) -> Error {
        let mut end = self.end();
        let error = end.failure.get_or_insert(error).clone();
        self.end_at(self.latest(rank) + 1);
        error
    }

    /// Ends the world, as a rank comes to no more meetings.
    pub(super) fn leave(&self, rank: usize) {
        let mut end = self.end();
        let missed = self.latest(rank) + 1;
        if self.end_at(missed) > missed {
            end.left = rank;
        }
    }

    /// Ends a loan until a meeting: if not all have come to it, they will not, and none reads any more
    /// when this returns. Ranks that read copy or sum a finite number of bytes, and wait for nothing
    /// meanwhile.
    pub(super) fn take_back(&self, rank: usize, number: u64) {
        if self.is_held(number) {
            return;
        }
        self.leave(rank);
        fence(Ordering::SeqCst);
        let reads = |line: &Line| line.reads.load(Ordering::Acquire);
        while self.lines.iter().any(reads) {
            yield_now();
        }
    }

    fn is_held(&self, number: u64) -> bool {
        let come = |line: &Line| line.come.load(Ordering::Acquire) >= number;
        self.lines.iter().all(come)
    }

    /// With the lock: holds this meeting and those after it no more. Returns which were not held before.
    fn end_at(&self, number: u64) -> u64 {
        let before = self.ended.fetch_min(number, Ordering::Relaxed);
        self.changed.notify_all();
        before
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says, when it is dropped, that a rank reads no more.
struct Reads<'a>(&'a AtomicBool);

impl Drop for Reads<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
