//! Ranks that end in the middle of a run: processes that exit, threads that return, and both by a panic. This program starts itself again for them,
//! as the program proper has no way to be told to fail.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Parser;
use libtest_mimic::Failed;
use lrmoe::config::{TrainConfig, TrainOptions};
use lrmoe::text::Corpus;
use lrmoe::train::{Observer, StepRecord, train_rank};
use lrmoe_comm::{Collective, Element, Error, Reduction, Threads};

use crate::faults::{assert_resumes, assert_told, end_of, side_by_side};
use crate::job::{Folder, RANKS, assert_success, text};

/// Says to a process how which of its ranks is to end: `panic 2 17` lets rank 2 panic 17 collectives after the first checkpoint.
const FAULT: &str = "LRMOE_TEST_FAULT";

const RUN: &str = "--steps 15 --warmup 2 --eval-every 5 --checkpoint-every 3 --chunk-rows 9";

pub(crate) fn threads_return() -> Result<(), Failed> {
    repeat("return", |folder, options| folder.own_threads(options))
}

pub(crate) fn threads_panic() -> Result<(), Failed> {
    repeat("panic", |folder, options| folder.own_threads(options))
}

pub(crate) fn processes_exit() -> Result<(), Failed> {
    repeat("exit", |folder, options| folder.own_processes(options))
}

pub(crate) fn processes_panic() -> Result<(), Failed> {
    repeat("panic", |folder, options| folder.own_processes(options))
}

/// Every repetition ends another rank at another place; every other one while it computes and exchanges at a time.
fn repeat(end: &str, job: impl Fn(&Folder, &str) -> Command + Sync) -> Result<(), Failed> {
    let folder = Folder::new();
    assert_success(&folder.threads(&format!("{RUN} --out whole")));
    side_by_side(|repetition| {
        let out = format!("cut-{repetition}");
        let (victim, calls) = (repetition % RANKS, 13 * repetition);
        let overlap = ["off", "on"][repetition / RANKS % 2];
        let options = format!("{RUN} --overlap {overlap} --out {out}");
        let mut job = job(&folder, &options);
        job.env(FAULT, format!("{end} {victim} {calls}"));
        let output = end_of(job.spawn()?)?;
        assert_told(&text(&output.stderr), victim);
        assert_resumes(&folder, RUN, &out);
        Ok(())
    })
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: TrainOptions,
}

struct Unseen;

impl Observer for Unseen {
    fn start(&mut self, _: u32, _: u32) {}
    fn step(&mut self, _: &StepRecord) {}
}

#[derive(Clone, Copy, Debug)]
enum End {
    Exit,
    Return,
    Panic,
}

/// What becomes of a rank, so many collectives after there is a checkpoint.
#[derive(Clone, Debug)]
struct Fault {
    end: End,
    rank: usize,
    calls: u32,
    checkpoint: PathBuf,
}

/// The fault that this process was told of, if it was.
pub(crate) fn is_told() -> bool {
    std::env::var_os(FAULT).is_some()
}

/// Runs the ranks of this process.
pub(crate) fn run() -> ExitCode {
    let fault = std::env::var(FAULT).expect("was looked at");
    let words: Vec<&str> = fault.split_whitespace().collect();
    // The first argument names the command, as for the program proper.
    let options = Cli::parse_from(std::env::args_os().skip(1)).options;
    let is_process = std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some();
    let config = match is_process {
        true => options.of_processes(RANKS),
        false => options,
    };
    let config = config.resolve().expect("options");
    let fault = Fault {
        end: match words[0] {
            "exit" => End::Exit,
            "return" => End::Return,
            _ => End::Panic,
        },
        rank: words[1].parse().expect("a rank"),
        calls: words[2].parse().expect("a number"),
        checkpoint: config.out.join("checkpoint.safetensors"),
    };
    match is_process {
        true => run_process(&config, &fault),
        false => run_threads(&config, &fault),
    }
    ExitCode::FAILURE
}

fn run_threads(config: &TrainConfig, fault: &Fault) {
    let deadline = Duration::from_secs(config.deadline_seconds);
    let world = Threads::world(RANKS, deadline).expect("a world");
    std::thread::scope(|scope| {
        let ranks = world.into_iter();
        let ranks: Vec<_> = ranks
            .map(|world| scope.spawn(move || run_rank(world, config, fault)))
            .collect();
        // The panic of one is what the others tell of.
        ranks.into_iter().for_each(|rank| drop(rank.join()));
    });
}

#[cfg(feature = "mpi")]
fn run_process(config: &TrainConfig, fault: &Fault) {
    use lrmoe_comm::Mpi;
    use lrmoe_comm::rsmpi::{Threading, initialize_with_threading};

    let (universe, _) = initialize_with_threading(Threading::Multiple).expect("MPI");
    let deadline = Duration::from_secs(config.deadline_seconds);
    let world = Mpi::new(&universe.world(), deadline).expect("a world");
    // Not finalised: that would wait for ranks that are gone.
    std::mem::forget(universe);
    run_rank(world, config, fault);
    // The job ends once the others have told of it too.
    std::thread::sleep(Duration::from_millis(500));
    std::process::exit(1);
}

#[cfg(not(feature = "mpi"))]
fn run_process(_: &TrainConfig, _: &Fault) {}

/// Trains, and says how that ended in one line.
fn run_rank<C: Collective + 'static>(world: C, config: &TrainConfig, fault: &Fault) {
    let corpus = Corpus::load(&config.text, config.model.context).expect("a text");
    let rank = world.rank();
    let world = Faulty {
        rank,
        ranks: world.ranks(),
        world: Some(world),
        fault: (rank == fault.rank).then(|| fault.clone()),
    };
    let stop = AtomicBool::new(false);
    if let Err(error) = train_rank(world, config, &corpus, &stop, &mut Unseen) {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        let line = format!("lrmoe: rank {rank}: {error}{}\n", cause.unwrap_or_default());
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }
}

/// A rank that may end in any collective.
#[derive(Debug)]
struct Faulty<C> {
    rank: usize,
    ranks: usize,
    world: Option<C>,
    fault: Option<Fault>,
}

impl<C> Faulty<C> {
    fn call(&mut self) -> Result<&mut C, Error> {
        if let Some(fault) = self
            .fault
            .as_mut()
            .filter(|fault| fault.checkpoint.exists())
        {
            match (fault.calls, fault.end) {
                (0, End::Exit) => std::process::exit(3),
                (0, End::Return) => self.world = None,
                (0, End::Panic) => panic!("as it was told to"),
                _ => fault.calls -= 1,
            }
        }
        // Some error of its own.
        self.world.as_mut().ok_or(Error::NoRanks)
    }
}

impl<C: Collective> Collective for Faulty<C> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        let world = self.call()?;
        world.all_to_all(send, send_counts, recv, recv_counts)
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.call()?.all_reduce(values, reduction)
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        self.call()?.all_gather(mine, all)
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.call()?.reduce_scatter(values, mine, reduction)
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        self.call()?.broadcast(values, root)
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.call()?.barrier()
    }
}
