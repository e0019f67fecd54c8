//! `lrmoe train`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use lrmoe::config::TrainOptions;
use lrmoe::error::Error;
use lrmoe::progress::Progress;
use lrmoe::text::Corpus;
use lrmoe::train::{compare, train};

/// Train a byte-level language model on text.
///
/// Every rank is a thread with its own shard of the batch; the MoE layers are LRMoE's. Each step appends one JSON line to
/// OUT/steps.jsonl. Ctrl-C ends the run after the current step, saves it and exits with 0; --resume continues it bit for bit.
#[derive(Args)]
#[command(args_override_self = true)]
#[command(after_help = "Examples:
  lrmoe train --text .                                    train on the .txt, .md and .rs files of this folder
  lrmoe train --text book.txt --retention 0.25 --out run  run a quarter of the pairs backward
  lrmoe train --out run --text book.txt --resume          continue an interrupted run
  lrmoe train --text book.txt --compare dropless,symi,lrmoe --target-loss 2.2
                                                          which policy reaches 2.2 nats per byte first

Where ranks outnumber cores, the environment variable CANDLE_NUM_THREADS=1 makes steps faster (`cargo run` here sets it).")]
pub(crate) struct Train {
    #[command(flatten)]
    options: TrainOptions,
}

impl Train {
    /// Trains, or compares policies.
    pub(crate) fn run(self) -> Result<(), Error> {
        let mut config = self.options.resolve()?;
        config.device = super::of_process(config.device)?;
        let corpus = Corpus::load(&config.text, config.model.context)?;
        if let Some(threads) = config.threads {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build_global()
                .expect("nothing has used the pool before");
        }
        let stop = stop_on_signal();
        if config.compare.is_empty() {
            let records = train(
                &config,
                &corpus,
                &stop,
                &mut Progress::new(config.policy.name()),
            )?;
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
        } else {
            let comparison = compare(&config, &corpus, &stop, |name| {
                Box::new(Progress::new(name))
            })?;
            println!("{comparison}");
        }
        Ok(())
    }
}

/// A flag that the first Ctrl-C (or SIGTERM) sets; the second ends the program at once.
fn stop_on_signal() -> Arc<AtomicBool> {
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
