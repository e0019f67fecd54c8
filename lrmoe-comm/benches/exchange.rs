//! All-to-alls against what they are measured by: a plain copy of the same bytes for threads, `MPI_Alltoallv` on the same buffers for
//! processes. Both take turns in one run; rates are medians, in bytes that all ranks receive per second.
//!
//! `cargo bench -p lrmoe-comm --features mpi`; without the feature or `mpirun`, threads alone.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use lrmoe_comm::{Collective, Threads};

/// Bytes of a message between two ranks.
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20];
const RANKS: [usize; 2] = [2, 4];
const ROUNDS: usize = 15;
/// Bytes that a rank moves in a round, at least.
const WORK: usize = 64 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

fn main() {
    #[cfg(feature = "mpi")]
    if processes::is_rank() {
        return processes::rank();
    }
    println!("threads: ranks, bytes of a message, plain copy GB/s, all-to-all GB/s, share");
    for ranks in RANKS {
        threads(ranks);
    }
    #[cfg(feature = "mpi")]
    for ranks in RANKS {
        processes::start(ranks);
    }
}

/// Seconds of one call, by turns of the two, until `rounds` are done; the medians.
fn by_turns(
    ranks: usize,
    bytes: usize,
    mut meet: impl FnMut(),
    mut run: impl FnMut(bool),
) -> [f64; 2] {
    let calls = (WORK / (bytes * ranks)).clamp(1, 500);
    let mut seconds = [vec![], vec![]];
    for round in 0..=ROUNDS {
        for (which, seconds) in seconds.iter_mut().enumerate() {
            meet();
            let start = Instant::now();
            for _ in 0..calls {
                run(which == 1);
            }
            meet();
            // The first round only warms up.
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64() / calls as f64);
            }
        }
    }
    seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    })
}

fn print(ranks: usize, bytes: usize, [other, ours]: [f64; 2]) {
    let rate = |seconds: f64| (ranks * ranks * bytes) as f64 / seconds / 1e9;
    let (other_rate, our_rate, share) = (rate(other), rate(ours), 100.0 * other / ours);
    println!("{ranks:5} {bytes:10} {other_rate:8.2} {our_rate:8.2} {share:6.0} %");
}

fn threads(ranks: usize) {
    let meeting = Barrier::new(ranks);
    std::thread::scope(|scope| {
        for mut comm in Threads::world(ranks, DEADLINE).unwrap() {
            let meeting = &meeting;
            scope.spawn(move || {
                for bytes in SIZES {
                    let len = bytes / 4;
                    let (send, counts) = (vec![1f32; len * ranks], vec![len; ranks]);
                    let mut recv = vec![0f32; len * ranks];
                    let wait = || {
                        meeting.wait();
                    };
                    let medians = by_turns(ranks, bytes, wait, |ours| match ours {
                        true => comm.all_to_all(&send, &counts, &mut recv, &counts).unwrap(),
                        false => recv.copy_from_slice(std::hint::black_box(&send)),
                    });
                    if comm.rank() == 0 {
                        print(ranks, bytes, medians);
                    }
                }
            });
        }
    });
}

#[cfg(feature = "mpi")]
mod processes {
    use std::process::Command;

    use lrmoe_comm::rsmpi::datatype::{Partition, PartitionMut};
    use lrmoe_comm::rsmpi::traits::CommunicatorCollectives;
    use lrmoe_comm::rsmpi::{Threading, initialize_with_threading};
    use lrmoe_comm::{Collective, Mpi};

    use super::{DEADLINE, SIZES, by_turns, print};

    const RANK: &str = "LRMOE_COMM_BENCH_RANK";

    pub(super) fn is_rank() -> bool {
        std::env::var_os(RANK).is_some()
    }

    pub(super) fn start(ranks: usize) {
        let mut mpirun = Command::new("mpirun");
        mpirun.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            &ranks.to_string(),
        ]);
        mpirun
            .arg(std::env::current_exe().expect("a path"))
            .env(RANK, "1");
        match mpirun.status() {
            Ok(status) if status.success() => {}
            Ok(status) => println!("mpirun ended with {status}"),
            Err(error) => println!("no mpirun: {error}"),
        }
    }

    pub(super) fn rank() {
        let (universe, _) = initialize_with_threading(Threading::Multiple).expect("once");
        let job = universe.world();
        for (name, through) in [("each other's memory", false), ("messages", true)] {
            let mut comm = match through {
                true => Mpi::through_messages(&job, DEADLINE),
                false => Mpi::new(&job, DEADLINE),
            }
            .expect("a world");
            if comm.rank() == 0 {
                println!("mpi through {name}: ranks, bytes, MPI_Alltoallv GB/s, ours GB/s, share");
            }
            let ranks = comm.ranks();
            for bytes in SIZES {
                let len = bytes / 4;
                let (send, counts) = (vec![1f32; len * ranks], vec![len; ranks]);
                let mut recv = vec![0f32; len * ranks];
                let theirs = vec![len as i32; ranks];
                let starts: Vec<i32> = (0..ranks).map(|rank| (rank * len) as i32).collect();
                let medians = by_turns(
                    ranks,
                    bytes,
                    || job.barrier(),
                    |ours| match ours {
                        true => comm.all_to_all(&send, &counts, &mut recv, &counts).unwrap(),
                        false => {
                            let send = Partition::new(&send[..], &theirs[..], &starts[..]);
                            let mut recv =
                                PartitionMut::new(&mut recv[..], &theirs[..], &starts[..]);
                            job.all_to_all_varcount_into(&send, &mut recv);
                        }
                    },
                );
                if comm.rank() == 0 {
                    print(ranks, bytes, medians);
                }
            }
        }
    }
}
