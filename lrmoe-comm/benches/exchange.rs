//! All-to-all between threads against the plain copies that it cannot do without.
//!
//! Both move the same bytes from the same places to the same places: every thread fills its receive
//! buffer with parts of all threads' send buffers. The plain copies meet nobody. The two take turns,
//! and rates and shares are medians over the turns.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use lrmoe_comm::{Collective, Threads};

const TURNS: usize = 31;

fn main() {
    println!("ranks  bytes of a message  copy GB/s  all-to-all GB/s  share");
    for ranks in [2, 4, 8] {
        for bytes in [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23] {
            if ranks * ranks * bytes <= 1 << 29 {
                race(ranks, bytes);
            }
        }
    }
}

fn race(ranks: usize, bytes: usize) {
    let len = bytes / size_of::<f32>();
    // Short exchanges are repeated, so that a turn takes about a millisecond.
    let repeat = ((1 << 23) / (ranks * ranks * bytes)).max(1);
    let start = Barrier::new(ranks);
    let sends: Vec<_> = (0..ranks)
        .map(|rank| vec![rank as f32; ranks * len])
        .collect();
    let turn = |mut comm: Threads| {
        let rank = comm.rank();
        let mut recv = vec![0.0; ranks * len];
        let counts = vec![len; ranks];
        let mut seconds = Vec::with_capacity(TURNS);
        for _ in 0..TURNS {
            start.wait();
            let begin = Instant::now();
            for _ in 0..repeat {
                for (recv, send) in recv.chunks_mut(len).zip(&sends) {
                    recv.copy_from_slice(&send[rank * len..][..len]);
                }
                std::hint::black_box(&mut recv);
            }
            start.wait();
            let copied = begin.elapsed();
            start.wait();
            let begin = Instant::now();
            for _ in 0..repeat {
                comm.all_to_all(&sends[rank], &counts, &mut recv, &counts)
                    .unwrap();
            }
            start.wait();
            seconds.push([copied, begin.elapsed()].map(|time| time.as_secs_f64()));
        }
        seconds
    };
    let turn = &turn;
    let world = Threads::world(ranks, Duration::from_secs(60)).unwrap();
    let seconds = std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .into_iter()
            .map(|comm| scope.spawn(move || turn(comm)))
            .collect();
        let mut all = threads.into_iter().map(|thread| thread.join().unwrap());
        all.next().unwrap()
    });
    let rate = |which: usize| {
        let rates = seconds
            .iter()
            .map(|turn| (ranks * ranks * bytes * repeat) as f64 / turn[which]);
        median(rates) / 1e9
    };
    let share = median(seconds.iter().map(|[copied, exchanged]| copied / exchanged));
    let (copy, exchange) = (rate(0), rate(1));
    println!(
        "{ranks:5}  {bytes:18}  {copy:9.2}  {exchange:15.2}  {:4.0} %",
        100.0 * share
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
