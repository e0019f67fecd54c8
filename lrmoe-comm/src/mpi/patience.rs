use std::time::{Duration, Instant};

/// How a rank waits for others: it looks again at once, then lets other threads run in between, then
/// sleeps, longer and longer.
#[derive(Debug)]
pub(super) struct Patience {
    since: Instant,
    looks: u32,
    nap: Duration,
}

/// Looks before other threads are let run, and before the first sleep.
const EAGER: u32 = 20;
const AWAKE: u32 = 2000;

/// To look for a message takes longer than to look at memory, and MPI lets other threads run meanwhile: of so many looks one does it
/// too, until the rank sleeps.
const LISTEN: u32 = 64;

const LONGEST_NAP: Duration = Duration::from_millis(1);

impl Patience {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            looks: 0,
            nap: Duration::from_micros(20),
        }
    }

    /// Whether it is time to look for messages of peers that are near as well.
    pub(super) fn listens(&self) -> bool {
        self.looks >= AWAKE || self.looks % LISTEN == LISTEN - 1
    }

    /// Passes some time. `Err`: how long the wait has lasted, if that is past the deadline.
    pub(super) fn pause(&mut self, deadline: Duration) -> Result<(), Duration> {
        self.looks = self.looks.saturating_add(1);
        if self.looks < EAGER {
            std::hint::spin_loop();
            return Ok(());
        }
        if self.looks < AWAKE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.nap);
            self.nap = (self.nap * 2).min(LONGEST_NAP);
        }
        let waited = self.since.elapsed();
        if waited < deadline {
            Ok(())
        } else {
            Err(waited)
        }
    }
}
