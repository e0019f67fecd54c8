//! Ranks that really die or stop: the others end within the deadline, with an error that names the rank and the collective.
//!
//! `mpirun` starts this program again, once for each rank; one of them then meets with the fault.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe_comm::rsmpi::traits::Communicator;
use lrmoe_comm::rsmpi::{Threading, initialize_with_threading};
use lrmoe_comm::{Collective, Error, Mpi, Reduction};

/// Says to a process that it is a rank, and which fault there will be.
const FAULT: &str = "LRMOE_COMM_TEST_FAULT";

const FAULTS: [&str; 4] = ["exit", "panic", "kill", "stop"];
const REPETITIONS: usize = 20;
/// Repetitions at a time: they mostly wait.
const AT_A_TIME: usize = 10;
const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(1);
/// From the fault to the last word of the last rank, on a machine with more processes than cores.
const MOST: Duration = Duration::from_secs(10);

fn main() {
    if let Ok(fault) = std::env::var(FAULT) {
        return rank(&fault);
    }
    let required = std::env::var("LRMOE_REQUIRE").is_ok_and(|list| list.contains("mpi"));
    let missing = Command::new("mpirun").arg("--version").output().is_err();
    let trial = |fault: &'static str| {
        let why = if missing { " (no mpirun)" } else { "" };
        Trial::test(format!("mpi::{fault}{why}"), move || repeat(fault))
            .with_ignored_flag(missing && !required)
    };
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, FAULTS.map(trial).into()).exit();
}

fn repeat(fault: &str) -> Result<(), Failed> {
    for first in (0..REPETITIONS).step_by(AT_A_TIME) {
        std::thread::scope(|scope| {
            let some = first..REPETITIONS.min(first + AT_A_TIME);
            let runs: Vec<_> = some
                .map(|repetition| scope.spawn(move || once(fault, repetition)))
                .collect();
            let mut results = runs.into_iter().map(|run| run.join().expect("no panic"));
            results.try_for_each(|result| result)
        })?;
    }
    Ok(())
}

fn once(fault: &str, repetition: usize) -> Result<(), Failed> {
    let started = Instant::now();
    let mut mpirun = Command::new("mpirun");
    mpirun.args([
        "--allow-run-as-root",
        "--oversubscribe",
        "--enable-recovery",
    ]);
    mpirun
        .args(["-n", &RANKS.to_string()])
        .arg(std::env::current_exe()?);
    // By turns the victim is another rank, at another place, and messages take another way.
    mpirun.env(FAULT, format!("{fault} {repetition}"));
    let output = mpirun.stdin(Stdio::null()).output()?;
    let took = started.elapsed();
    let text = String::from_utf8_lossy(&output.stderr);
    let victim = repetition % RANKS;
    // A stopped rank is woken to be ended, and may have a word to say.
    let told: BTreeSet<usize> = (0..RANKS)
        .filter(|&rank| {
            rank != victim && {
                let names = format!("rank {rank}: rank {victim} ");
                let tells = |line: &str| line.starts_with(&names) && line.contains(" f32");
                text.lines().any(tells)
            }
        })
        .collect();
    let expected: BTreeSet<usize> = (0..RANKS).filter(|rank| *rank != victim).collect();
    if told != expected || took > MOST {
        return Err(format!("repetition {repetition}, {took:?}: {told:?} told\n{text}").into());
    }
    Ok(())
}

/// One rank, to its end.
fn rank(fault: &str) {
    let (fault, repetition) = fault.split_once(' ').expect("two words");
    let repetition: usize = repetition.parse().expect("a number");
    let (universe, _) = initialize_with_threading(Threading::Multiple).expect("initialised once");
    let job = universe.world();
    let mut comm = match repetition % 2 {
        0 => Mpi::new(&job, DEADLINE),
        _ => Mpi::through_messages(&job, DEADLINE),
    }
    .expect("a world");
    let rank = comm.rank();
    for step in 0.. {
        if rank == repetition % RANKS && step == 3 + repetition {
            meet_with(fault);
        }
        if let Err(error) = exchange(&mut comm) {
            // At once, so that the lines of several ranks do not mix.
            let line = format!("rank {rank}: {error}\n");
            std::io::stderr()
                .write_all(line.as_bytes())
                .expect("standard error");
            // Time for the others to be told and to say so.
            std::thread::sleep(Duration::from_millis(500));
            job.abort(3);
        }
    }
}

fn exchange(comm: &mut Mpi) -> Result<(), Error> {
    let counts = [50_000; RANKS];
    let (send, mut recv) = (vec![1f32; 50_000 * RANKS], vec![0f32; 50_000 * RANKS]);
    comm.all_to_all(&send, &counts, &mut recv, &counts)?;
    comm.all_reduce(&mut [1f32; 100], Reduction::Sum)
}

fn meet_with(fault: &str) {
    match fault {
        "exit" => std::process::exit(0),
        "panic" => panic!("as the test wants it"),
        // SAFETY: a signal to the own process.
        "kill" => unsafe { libc::raise(libc::SIGKILL) },
        // SAFETY: as above.
        _ => unsafe { libc::raise(libc::SIGSTOP) },
    };
}
