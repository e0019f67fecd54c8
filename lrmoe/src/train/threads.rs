//! A run whose ranks are threads of this process.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

use lrmoe_comm::{Collective, Threads};

use super::rank::RankTrainer;
use super::record::StepRecord;
use super::run::{Observer, Outputs, Run};
use super::setup::enough_memory;
use crate::backend::{OnBackend, on_device};
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::Backend;
use crate::text::Corpus;

/// Trains as `config` says until its steps are done, the target loss is reached, or `stop` is set; then writes a checkpoint.
/// Returns the records of the whole run, those before a resumption included.
///
/// # Errors
/// Everything that makes the run impossible is found before a file is written. A failure in a rank ends all ranks; the last checkpoint stays.
pub fn train(
    config: &TrainConfig,
    corpus: &Corpus,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Vec<StepRecord>, Error> {
    let run = OfThreads {
        config,
        corpus,
        stop,
        observer,
    };
    on_device(config.device, run)
}

/// The arguments of [`train`].
struct OfThreads<'a> {
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    stop: &'a AtomicBool,
    observer: &'a mut dyn Observer,
}

impl OnBackend for OfThreads<'_> {
    type Output = Vec<StepRecord>;

    fn run<B: Backend + Clone>(self, of_rank: impl Fn(usize) -> B) -> Result<Self::Output, Error> {
        train_on(of_rank, self.config, self.corpus, self.stop, self.observer)
    }
}

/// As [`train`], with the layers of each rank on the backend that `of_rank` gives it, whatever the device of `config`. Ranks are threads and may share
/// a device.
///
/// # Errors
/// As [`train`].
pub fn train_on<B: Backend + Clone>(
    of_rank: impl Fn(usize) -> B,
    config: &TrainConfig,
    corpus: &Corpus,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Vec<StepRecord>, Error> {
    let run = Run::new(config, corpus, stop)?;
    let bytes = run.read_checkpoint()?;
    let checkpoint = bytes
        .map(|bytes| run.parse_checkpoint(&bytes))
        .transpose()?;
    enough_memory(config, config.ranks)?;
    let world = Threads::world(config.ranks, Duration::from_secs(config.deadline_seconds))?;
    let trainer = |comm: Threads| run.trainer(&of_rank(comm.rank()), comm, checkpoint.as_ref());
    let trainers = world
        .into_iter()
        .map(trainer)
        .collect::<Result<Vec<_>, _>>()?;
    let done = checkpoint.map_or(0, |checkpoint| checkpoint.step);
    let mut outputs = Outputs::open(&run, done, observer)?;
    let mut ran = Ok(());
    if !outputs.are_complete() {
        ran = ranks(&run, trainers, &mut outputs);
    }
    outputs.finish(ran)
}

/// Runs every rank on a thread of its own and takes in what they report.
fn ranks<B: Backend + Clone>(
    run: &Run<'_>,
    trainers: Vec<RankTrainer<'_, B, Threads>>,
    outputs: &mut Outputs<'_>,
) -> Result<(), Error> {
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        let start = |trainer| {
            let send = send.clone();
            // A rank goes on once its step is written, so that no checkpoint is ahead of the log.
            let record = move |step, trace| {
                let (answer, written) = mpsc::channel();
                send.send((step, trace, answer)).is_ok() && written.recv().unwrap_or(false)
            };
            scope.spawn(move || run.rank(trainer, record))
        };
        let ranks: Vec<_> = trainers.into_iter().map(start).collect();
        drop(send);
        for (record, trace, answer) in receive {
            // A rank that does not wait for the answer has ended, and its own error says how.
            let _ = answer.send(outputs.record(&record, trace));
        }
        let results = ranks.into_iter().enumerate().map(|(rank, thread)| {
            thread.join().unwrap_or_else(|panic| {
                let message = panic_message(panic.as_ref());
                Err(Error::Panicked { rank, message })
            })
        });
        first_cause(results.collect())
    })
}

/// The error to report: a rank's own, rather than what the others met because that rank was gone.
fn first_cause(results: Vec<Result<(), Error>>) -> Result<(), Error> {
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(Error::is_consequence);
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
