//! What the machine gives at the time: cores and memory.

use std::array;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Says how many cores' worth of arithmetic all threads of the pool get together.
///
/// On shared machines two threads may sit on one core, or on the two halves of one, for seconds at a time. Each run compares what
/// all threads reach at once with the most that one thread has reached alone.
#[derive(Debug)]
pub(super) struct Canary {
    one: f64,
    expected: f64,
}

/// Time of one run.
const RUN: Duration = Duration::from_millis(40);
/// Share of the expected cores below which a measurement is not taken for good.
const ENOUGH: f64 = 0.75;

impl Canary {
    pub(super) fn new() -> Self {
        let threads = rayon::current_num_threads();
        let cores = std::thread::available_parallelism().map_or(threads, usize::from);
        Self {
            one: (0..3).map(|_| rate()).fold(0.0, f64::max),
            expected: threads.min(cores) as f64,
        }
    }

    /// Cores that the threads have now.
    pub(super) fn cores(&mut self) -> f64 {
        let rates = rayon::broadcast(|_| rate());
        let best = rates.iter().copied().fold(self.one, f64::max);
        self.one = best;
        rates.iter().sum::<f64>() / best
    }

    pub(super) fn is_enough(&self, cores: f64) -> bool {
        cores >= ENOUGH * self.expected
    }
}

/// Multiply-adds a second on this thread, with every register in use.
fn rate() -> f64 {
    let (start, mut done) = (Instant::now(), 0.0);
    while start.elapsed() < RUN {
        let mut sums: [f32; 48] = array::from_fn(|i| i as f32);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = *sum * 0.999_999 + 1e-9;
            }
        }
        black_box(sums);
        done += (ROUNDS * sums.len()) as f64;
    }
    done / start.elapsed().as_secs_f64()
}

const ROUNDS: usize = 20_000;

/// Bytes that can be had without swapping; `None` where the system does not tell.
pub(super) fn available_bytes() -> Option<u64> {
    kib("/proc/meminfo", "MemAvailable:")
}

/// Bytes of this process in memory.
pub(super) fn resident_bytes() -> Option<u64> {
    kib("/proc/self/status", "VmRSS:")
}

/// Runs `work` and says how many bytes of this process were in memory at most; `None` where the system does not tell.
pub(super) fn peak_bytes<R>(work: impl FnOnce() -> R) -> (R, Option<u64>) {
    // Linux takes the memory in use now as the new peak.
    let reset = std::fs::write("/proc/self/clear_refs", "5");
    let result = work();
    let peak = reset.ok().and_then(|()| kib("/proc/self/status", "VmHWM:"));
    (result, peak)
}

/// Bytes in the line of `file` that starts with `name`.
fn kib(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_canary_sees_a_core() {
        let mut canary = Canary::new();
        let cores = canary.cores();
        let threads = rayon::current_num_threads() as f64;
        assert!(cores > 0.0 && cores <= threads, "{cores} of {threads}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_peak_is_what_was_touched() {
        let before = resident_bytes().expect("the system tells");
        let (len, peak) = peak_bytes(|| {
            vec![1_u8; 64 << 20]
                .iter()
                .map(|b| usize::from(*b))
                .sum::<usize>()
        });
        assert_eq!(len, 64 << 20);
        // Where the peak cannot be reset there is none.
        assert!(
            peak.is_none_or(|peak| peak > before + (60 << 20)),
            "{peak:?} from {before}"
        );
    }
}
