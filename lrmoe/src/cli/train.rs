//! `lrmoe train`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use lrmoe::config::{TrainConfig, TrainOptions};
use lrmoe::error::Error;
use lrmoe::progress::Progress;
use lrmoe::text::Corpus;
use lrmoe::train::{OracleSummary, StepRecord, compare, train};

/// Train a byte-level language model on text.
///
/// Every rank is a thread, or a process under mpirun, with its own shard of the batch; the MoE layers are LRMoE's. Each step appends one JSON line to
/// OUT/steps.jsonl. Ctrl-C ends the run after the current step, saves it and exits with 0; --resume continues it bit for bit.
#[derive(Args)]
#[command(args_override_self = true)]
#[command(after_help = "Examples:
  lrmoe train --text .                                    train on the .txt, .md and .rs files of this folder
  lrmoe train --text book.txt --retention 0.25 --out run  run a quarter of the pairs backward
  lrmoe train --out run --text book.txt --resume          continue an interrupted run
  lrmoe train --text book.txt --compare dropless,symi,lrmoe --target-loss 2.2
                                                          which policy reaches 2.2 nats per byte first
  mpirun -n 4 lrmoe train --text book.txt                 every rank a process; with feature mpi

Started by mpirun, the processes are the ranks, and losses are those of as many threads, bit for bit. Rank 0 alone reads and writes the
files of the run and prints; the text must be on every host. Ctrl-C then ends the run at once: resume it from its last checkpoint. mpirun
ends all processes when one dies; with its --enable-recovery the others live on and say which rank they missed and where.")]
pub(crate) struct Train {
    #[command(flatten)]
    options: TrainOptions,
    /// Where the ranks are: threads of this program, or mpi (the processes that mpirun has started)
    /// [default: mpi if mpirun has started it, else threads]
    #[arg(long, value_name = "NAME", help_heading = "Ranks and memory")]
    world: Option<World>,
}

/// What the ranks of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum World {
    Threads,
    Mpi,
}

impl World {
    /// What a launcher has said in the environment: Open MPI, or those that speak PMI (MPICH, Intel MPI, Slurm).
    fn of_launcher() -> Self {
        let launched = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
        match launched.iter().any(|name| std::env::var_os(name).is_some()) {
            true => Self::Mpi,
            false => Self::Threads,
        }
    }
}

impl Train {
    /// Trains, or compares policies.
    pub(crate) fn run(self) -> Result<(), Error> {
        match self.world.unwrap_or_else(World::of_launcher) {
            World::Threads => of_threads(self.options),
            World::Mpi => super::processes::train(self.options),
        }
    }
}

fn of_threads(options: TrainOptions) -> Result<(), Error> {
    let (config, corpus) = prepare(options)?;
    let stop = stop_on_signal();
    if config.compare.is_empty() {
        let mut progress = Progress::new(config.policy.name());
        let records = train(&config, &corpus, &stop, &mut progress)?;
        print_end(&config, &records);
    } else {
        let comparison = compare(&config, &corpus, &stop, |name| {
            Box::new(Progress::new(name))
        })?;
        println!("{comparison}");
    }
    Ok(())
}

/// What a run needs: its options, complete, its text, and the pool it computes on.
pub(super) fn prepare(options: TrainOptions) -> Result<(TrainConfig, Corpus), Error> {
    let mut config = options.resolve()?;
    config.device = super::of_process(config.device)?;
    let corpus = Corpus::load(&config.text, config.model.context)?;
    if let Some(threads) = config.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .expect("nothing has used the pool before");
    }
    Ok((config, corpus))
}

/// One line on how a run ended, after what the oracle found.
pub(super) fn print_end(config: &TrainConfig, records: &[StepRecord]) {
    if let Some(oracle) = OracleSummary::new(records) {
        println!("{oracle}");
    }
    if let Some(last) = records.last() {
        let held_out = last
            .held_out_loss
            .map_or_else(String::new, |loss| format!(", held-out {loss:.3}"));
        println!(
            "{} steps, loss {:.3}{held_out} nats per byte; saved in {}",
            last.step,
            last.loss,
            config.out.display()
        );
    }
}

/// A flag that the first Ctrl-C (or SIGTERM) sets; the second ends the program at once.
pub(super) fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let handler = move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("stopping after this step; press Ctrl-C again to stop at once");
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::warn!(%error, "Ctrl-C will not save the run");
    }
    stop
}
