//! A description of this machine for the cost model, measured in about a second.
//!
//! The ranks are threads that share the machine, so each gets its part of what all of them reach together. Measured are grouped GEMMs by
//! `lrmoe_kernels::Cpu` in f32, all-to-alls of `lrmoe_comm::Threads`, and the time that a group without rows to speak of takes.

use std::time::{Duration, Instant};

use lrmoe_comm::{Collective, Threads};
use lrmoe_kernels::{Activation, Cpu, ExpertFfn, FfnShape, Weights, Workspace};
use lrmoe_plan::{ClusterSpec, Link};
use ndarray::{Array2, Array3};

use crate::error::Error;

/// Longest time that one measurement repeats for.
const PATIENCE: Duration = Duration::from_millis(250);
/// Sizes of the experts measured.
const SHAPE: FfnShape = FfnShape {
    width: 256,
    hidden: 512,
    activation: Activation::SwiGlu,
};
/// Rows of a group that keeps the machine busy.
const ROWS: usize = 1024;
/// Groups of one row, for the time that a group takes in any case.
const GROUPS: usize = 64;
/// Elements that a rank sends to each other one.
const ELEMENTS: usize = 1 << 18;

/// Measures this machine as a node of `ranks` ranks that share it evenly.
///
/// # Errors
///
/// What kernels and collectives refuse; an unreadable `/proc/meminfo`.
pub fn local(ranks: usize) -> Result<ClusterSpec, Error> {
    let ranks = ranks.max(1);
    let large = forward_seconds(1, ROWS)?;
    let small = forward_seconds(GROUPS, GROUPS)?;
    let flop = |rows: usize| (rows * 6 * SHAPE.width * SHAPE.hidden) as f64;
    let rate = flop(ROWS) / large;
    let link = link(ranks)?;
    Ok(ClusterSpec {
        name: format!("local, measured for {ranks} ranks"),
        ranks_per_node: ranks,
        flops: rate / ranks as f64,
        launch_seconds: ((small - flop(GROUPS) / rate) / GROUPS as f64).max(0.0),
        memory_bytes: memory_bytes()? / ranks as u64,
        intra: link,
        inter: link,
    })
}

/// Shortest time of a forward pass of `rows` rows, as evenly over `groups` experts as they divide.
fn forward_seconds(groups: usize, rows: usize) -> Result<f64, Error> {
    let inward = Array3::from_elem((groups, SHAPE.hidden, SHAPE.width), 0.01);
    let down = Array3::from_elem((groups, SHAPE.width, SHAPE.hidden), 0.01);
    let weights = Weights {
        gate: Some(inward.view()),
        up: inward.view(),
        down: down.view(),
    };
    let offsets: Vec<usize> = (0..=groups).map(|group| group * rows / groups).collect();
    let x = Array2::from_elem((rows, SHAPE.width), 0.5);
    let mut y = Array2::zeros((rows, SHAPE.width));
    let mut workspace = Workspace::new();
    shortest(|| {
        let (x, y) = (x.view(), y.view_mut());
        Ok(Cpu.forward(&SHAPE, &weights, &offsets, x, &mut workspace, y, None)?)
    })
}

/// Latency and rate of an all-to-all, per rank.
fn link(ranks: usize) -> Result<Link, Error> {
    // More threads than cores would measure the scheduler.
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let threads = threads.clamp(2, ranks.max(2));
    let latency = all_to_all_seconds(threads, 1)?;
    let seconds = (all_to_all_seconds(threads, ELEMENTS)? - latency).max(f64::MIN_POSITIVE);
    let bytes = threads * (threads - 1) * ELEMENTS * size_of::<f32>();
    Ok(Link {
        latency_seconds: latency,
        bytes_per_second: bytes as f64 / seconds / ranks as f64,
    })
}

/// Shortest time of an all-to-all between threads that send each other `elements` numbers.
fn all_to_all_seconds(threads: usize, elements: usize) -> Result<f64, Error> {
    let world = Threads::world(threads, Duration::from_secs(60))?;
    let rank = |mut comm: Threads| {
        let send = vec![1.0_f32; threads * elements];
        let mut received = vec![0.0_f32; threads * elements];
        let counts = vec![elements; threads];
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            comm.barrier()?;
            let start = Instant::now();
            comm.all_to_all(&send, &counts, &mut received, &counts)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world
            .into_iter()
            .map(|comm| scope.spawn(move || rank(comm)))
            .collect();
        let slowest = |slowest: f64, seconds: Result<f64, Error>| Ok(slowest.max(seconds?));
        let times = ranks
            .into_iter()
            .map(|rank| rank.join().expect("a measurement does not panic"));
        times.into_iter().try_fold(0.0, slowest)
    })
}

/// All-to-alls of one measurement.
const ROUNDS: usize = 30;

/// The shortest of several runs of the same work.
fn shortest(mut work: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while begin.elapsed() < PATIENCE || best.is_infinite() {
        let start = Instant::now();
        work()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Memory of this machine.
///
/// # Errors
///
/// An unreadable `/proc/meminfo`.
pub fn memory_bytes() -> Result<u64, Error> {
    memory("MemTotal:")
}

/// Memory of this machine that programs can still have.
///
/// # Errors
///
/// An unreadable `/proc/meminfo`.
pub fn available_bytes() -> Result<u64, Error> {
    memory("MemAvailable:")
}

fn memory(key: &str) -> Result<u64, Error> {
    const PATH: &str = "/proc/meminfo";
    let unreadable = |source| Error::Io {
        path: PATH.into(),
        source,
    };
    let text = std::fs::read_to_string(PATH).map_err(unreadable)?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let kib = kib.ok_or_else(|| unreadable(std::io::ErrorKind::InvalidData.into()))?;
    Ok(kib << 10)
}
