//! All-to-alls against what they are measured by: for threads a plain copy of the same bytes, the same bytes copied in turns, and a copy before which
//! the ranks meet at a barrier. Of ranks that share cores, one that copies freely repeats its own bytes, out of the caches, as long as the scheduler
//! lets it; in turns each core goes through the bytes of all its ranks, as an exchange must, and waits for nobody. For processes it is a program in C,
//! compiled with `mpicc`, that calls `MPI_Alltoallv` on buffers of the same sizes. All take turns in one run; rates are medians, in bytes that all ranks
//! receive per second.
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
    println!(
        "threads: ranks, bytes of a message, GB/s of plain copy, copy in turns, copy in step, all-to-all, shares"
    );
    for ranks in RANKS {
        threads(ranks);
    }
    #[cfg(feature = "mpi")]
    processes::start();
}

/// Seconds of one call, over as many calls as a round has.
fn seconds(ranks: usize, bytes: usize, mut meet: impl FnMut(), mut call: impl FnMut()) -> f64 {
    let calls = (WORK / (bytes * ranks)).clamp(1, 8192);
    meet();
    let start = Instant::now();
    for _ in 0..calls {
        call();
    }
    meet();
    start.elapsed().as_secs_f64() / calls as f64
}

fn median(seconds: impl IntoIterator<Item = f64>) -> f64 {
    let mut seconds: Vec<f64> = seconds.into_iter().collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Rates, the last one ours, and its shares of the others.
fn print(ranks: usize, bytes: usize, seconds: &[f64]) {
    print!("{ranks:5} {bytes:10}");
    for seconds in seconds {
        print!(" {:8.2}", (ranks * ranks * bytes) as f64 / seconds / 1e9);
    }
    if let [others @ .., ours] = seconds {
        for other in others {
            print!(" {:6.0} %", 100.0 * other / ours);
        }
    }
    println!();
}

fn threads(ranks: usize) {
    let meeting = Barrier::new(ranks);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        for mut comm in Threads::world(ranks, DEADLINE).unwrap() {
            let meeting = &meeting;
            scope.spawn(move || {
                for bytes in SIZES {
                    let len = bytes / 4;
                    let (send, counts) = (vec![1f32; len * ranks], vec![len; ranks]);
                    let mut recv = vec![0f32; len * ranks];
                    // What is copied in turns: by as many ranks as there are cores, for all.
                    let mine = match comm.rank() {
                        rank if rank < cores => (rank..ranks).step_by(cores).len(),
                        _ => 0,
                    };
                    let mut in_turn = vec![(send.clone(), recv.clone()); mine];
                    let meet = || {
                        meeting.wait();
                    };
                    let mut round = |_| {
                        let copy = seconds(ranks, bytes, meet, || {
                            recv.copy_from_slice(std::hint::black_box(&send));
                        });
                        let in_turns = seconds(ranks, bytes, meet, || {
                            for (send, recv) in &mut in_turn {
                                recv.copy_from_slice(std::hint::black_box(send));
                            }
                        });
                        let in_step = seconds(ranks, bytes, meet, || {
                            comm.barrier().unwrap();
                            recv.copy_from_slice(std::hint::black_box(&send));
                        });
                        let ours = seconds(ranks, bytes, meet, || {
                            comm.all_to_all(&send, &counts, &mut recv, &counts).unwrap();
                        });
                        [copy, in_turns, in_step, ours]
                    };
                    // The first round only warms up.
                    let rounds: Vec<_> = (0..=ROUNDS).map(&mut round).skip(1).collect();
                    let medians =
                        [0, 1, 2, 3].map(|which| median(rounds.iter().map(|round| round[which])));
                    if comm.rank() == 0 {
                        print(ranks, bytes, &medians);
                    }
                }
            });
        }
    });
}

#[cfg(feature = "mpi")]
mod processes {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use lrmoe_comm::rsmpi::traits::CommunicatorCollectives;
    use lrmoe_comm::rsmpi::{Threading, initialize_with_threading};
    use lrmoe_comm::{Collective, Mpi};

    use super::{DEADLINE, ROUNDS, SIZES, WORK, median, print, seconds};

    /// Says to a process that it is a rank, and how its bytes go.
    const RANK: &str = "LRMOE_COMM_BENCH_RANK";
    const WAYS: [&str; 2] = ["memory", "messages"];
    /// Jobs of each kind, by turns.
    const TURNS: usize = 5;

    pub(super) fn is_rank() -> bool {
        std::env::var_os(RANK).is_some()
    }

    /// Makes the program in C; `None` if there is no compiler.
    fn compile() -> Option<PathBuf> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/alltoallv.c");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("alltoallv");
        let mut mpicc = Command::new("mpicc");
        mpicc.arg("-O3").arg(source).arg("-o").arg(&program);
        let made = mpicc.status().is_ok_and(|status| status.success());
        made.then_some(program)
    }

    /// Seconds of a call for each size, as rank 0 of the job prints them.
    fn job(ranks: usize, program: &Path, way: Option<&str>) -> Option<Vec<f64>> {
        let mut mpirun = Command::new("mpirun");
        mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
        mpirun.arg(ranks.to_string()).arg(program);
        if let Some(way) = way {
            mpirun.env(RANK, way);
        }
        mpirun.args([ROUNDS.to_string(), WORK.to_string()]);
        let output = mpirun.args(SIZES.map(|bytes| bytes.to_string())).output();
        let output = output.ok().filter(|output| output.status.success())?;
        let lines = String::from_utf8(output.stdout).ok()?;
        let seconds = lines
            .lines()
            .map(|line| line.split_whitespace().nth(1)?.parse().ok());
        seconds.collect()
    }

    pub(super) fn start() {
        let Some(theirs) = compile() else {
            return println!("mpi: no mpicc to make what it is measured by");
        };
        let ours = std::env::current_exe().expect("a path");
        for way in WAYS {
            println!("mpi through {way}: ranks, bytes, C program GB/s, ours GB/s, share");
            for ranks in super::RANKS {
                let turn = |_| {
                    let theirs = job(ranks, &theirs, None)?;
                    Some([theirs, job(ranks, &ours, Some(way))?])
                };
                let Some(turns) = (0..TURNS).map(turn).collect::<Option<Vec<_>>>() else {
                    return println!("mpirun failed");
                };
                for (size, bytes) in SIZES.into_iter().enumerate() {
                    let of = |which: usize| median(turns.iter().map(|turn| turn[which][size]));
                    print(ranks, bytes, &[of(0), of(1)]);
                }
            }
        }
    }

    /// As the program in C does it.
    pub(super) fn rank() {
        let (universe, _) = initialize_with_threading(Threading::Multiple).expect("once");
        let job = universe.world();
        let through_messages = std::env::var(RANK).is_ok_and(|way| way == WAYS[1]);
        let mut comm = match through_messages {
            true => Mpi::through_messages(&job, DEADLINE),
            false => Mpi::new(&job, DEADLINE),
        }
        .expect("a world");
        let (rank, ranks) = (comm.rank(), comm.ranks());
        for bytes in SIZES {
            let len = bytes / 4;
            let (send, counts) = (vec![1f32; len * ranks], vec![len; ranks]);
            let mut recv = vec![0f32; len * ranks];
            let mut call = || comm.all_to_all(&send, &counts, &mut recv, &counts).unwrap();
            let round = |_| seconds(ranks, bytes, || job.barrier(), &mut call);
            // The first round only warms up.
            let rounds: Vec<f64> = (0..=ROUNDS).map(round).skip(1).collect();
            if rank == 0 {
                println!("{bytes} {}", median(rounds));
            }
        }
    }
}
