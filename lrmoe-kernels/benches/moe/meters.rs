//! Clocks, and what the machine gives at the time.

use std::{array, time::Instant};

/// Seconds of wall and of CPU time, the latter of all threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) wall: f64,
    pub(super) cpu: f64,
}

pub(super) fn timed<R>(work: impl FnOnce() -> R) -> (R, Times) {
    let cpu = cpu_seconds();
    let start = Instant::now();
    let result = work();
    (
        result,
        Times {
            wall: start.elapsed().as_secs_f64(),
            cpu: cpu_seconds() - cpu,
        },
    )
}

/// CPU time of this process's threads so far; 0 where the system does not tell.
fn cpu_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let nanoseconds = threads.filter_map(|thread| {
        let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        times.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// GFLOP/s of fused multiply-adds while all threads run them: all together by wall clock, and of one thread by CPU time.
pub(super) fn canary() -> [f64; 2] {
    rates(fused_multiply_adds)
}

/// GFLOP/s of dot products of pairs of bf16 while all threads run them, where the machine has AVX-512-BF16.
#[cfg_attr(not(target_arch = "x86_64"), expect(clippy::unnecessary_wraps))]
pub(super) fn dot_rate() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the machine has both.
        return Some(rates(|| unsafe { dots() })[0]);
    }
    None
}

/// GFLOP/s of work that says its operations, on all threads: by wall clock, and of one thread by CPU time.
fn rates(work: impl Fn() -> f64 + Sync) -> [f64; 2] {
    let (flop, times) = timed(|| {
        let of_threads = rayon::broadcast(|_| {
            let (start, mut flop) = (Instant::now(), 0.0);
            while start.elapsed().as_secs_f64() < 0.2 {
                flop += work();
            }
            flop
        });
        of_threads.iter().sum::<f64>()
    });
    [flop / times.wall, flop / times.cpu].map(|rate| (rate / 1e8).round() / 10.0)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots() -> f64 {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_epi16,
        _mm512_set1_ps,
    };
    // SAFETY: the same 512 bits.
    let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi16(0x3c00)) };
    let mut sums: [_; CHAINS] = array::from_fn(|i| _mm512_set1_ps(i as f32));
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    std::hint::black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    (ROUNDS * CHAINS * 32 * 2) as f64
}

const ROUNDS: usize = 20_000;
const CHAINS: usize = 14;

#[cfg(target_arch = "x86_64")]
fn fused_multiply_adds() -> f64 {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has AVX-512 F.
        unsafe { wide_multiply_adds() }
    } else {
        plain_multiply_adds()
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fused_multiply_adds() -> f64 {
    plain_multiply_adds()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn wide_multiply_adds() -> f64 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (x, y) = (_mm512_set1_ps(0.999_999), _mm512_set1_ps(1e-9));
    let mut sums: [_; CHAINS] = array::from_fn(|i| _mm512_set1_ps(i as f32));
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, x, y);
        }
    }
    std::hint::black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    (ROUNDS * CHAINS * 16 * 2) as f64
}

fn plain_multiply_adds() -> f64 {
    let mut sums: [f32; 64] = array::from_fn(|i| i as f32);
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = *sum * 0.999_999 + 1e-9;
        }
    }
    std::hint::black_box(sums);
    (ROUNDS * 64 * 2) as f64
}

pub(super) fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
