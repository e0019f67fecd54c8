//! A run of which this process is one rank.

use std::sync::atomic::AtomicBool;

use lrmoe_comm::Collective;

use super::record::StepRecord;
use super::run::{Observer, Outputs, Run};
use super::setup::enough_memory;
use crate::backend::{OnBackend, on_device};
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::Backend;
use crate::text::Corpus;

/// Trains as [`train`](super::train) does, as one rank of `world`, in which every rank makes this call with the same options and text. Rank 0 alone
/// reads and writes the files of the run, follows it with `observer` and returns its records; the others return none.
///
/// # Errors
/// As [`train`](super::train). What one rank finds before the start ends all: the lowest such rank returns its error, the others
/// [`Error::Elsewhere`].
pub fn train_rank<C: Collective + 'static>(
    world: C,
    config: &TrainConfig,
    corpus: &Corpus,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Vec<StepRecord>, Error> {
    let run = OfProcesses {
        world,
        config,
        corpus,
        stop,
        observer,
    };
    on_device(config.device, run)
}

/// The arguments of [`train_rank`].
struct OfProcesses<'a, C> {
    world: C,
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    stop: &'a AtomicBool,
    observer: &'a mut dyn Observer,
}

impl<C: Collective + 'static> OnBackend for OfProcesses<'_, C> {
    type Output = Vec<StepRecord>;

    fn run<B: Backend + Clone>(self, of_rank: impl Fn(usize) -> B) -> Result<Self::Output, Error> {
        let Self {
            mut world,
            config,
            corpus,
            stop,
            observer,
        } = self;
        let run = settle(&mut world, Run::new(config, corpus, stop))?;
        let first = world.rank() == 0;
        let bytes = if first {
            run.read_checkpoint()
        } else {
            Ok(None)
        };
        let bytes = settle(&mut world, bytes)?;
        let bytes = share(&mut world, bytes)?;
        let checkpoint = bytes.map(|bytes| run.parse_checkpoint(&bytes)).transpose();
        let checkpoint = settle(&mut world, checkpoint)?;
        settle(&mut world, enough_memory(config, 1))?;
        let done = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step);
        let outputs = first
            .then(|| Outputs::open(&run, done, observer))
            .transpose();
        let mut outputs = settle(&mut world, outputs)?;
        let mut complete = [outputs.as_ref().is_some_and(Outputs::are_complete).into()];
        world.broadcast::<u32>(&mut complete, 0)?;
        let mut ran = Ok(());
        if complete == [0] {
            let trainer = run.trainer(&of_rank(world.rank()), world, checkpoint.as_ref());
            ran = trainer.and_then(|trainer| {
                run.rank(trainer, |step, trace| {
                    let outputs = outputs.as_mut();
                    outputs.is_none_or(|outputs| outputs.record(&step, trace))
                })
            });
        }
        match outputs {
            Some(outputs) => outputs.finish(ran),
            None => ran.map(|()| Vec::new()),
        }
    }
}

/// Goes on only if every rank has a result. Of those that have not, the lowest returns its error, and all others say that there was one.
///
/// # Errors
/// As said; a rank that is lost.
pub fn settle<C: Collective, T>(world: &mut C, mine: Result<T, Error>) -> Result<T, Error> {
    let mut failed = vec![0; world.ranks()];
    world.all_gather(&[u32::from(mine.is_err())], &mut failed)?;
    match failed.iter().position(|&failed| failed > 0) {
        Some(rank) if rank != world.rank() => Err(Error::Elsewhere { rank }),
        _ => mine,
    }
}

/// Gives every rank the bytes that rank 0 has.
fn share<C: Collective>(world: &mut C, bytes: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, Error> {
    let len = bytes.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64);
    let mut len = [len as u32, (len >> 32) as u32];
    world.broadcast(&mut len, 0)?;
    let len = u64::from(len[0]) | u64::from(len[1]) << 32;
    if len == u64::MAX {
        return Ok(None);
    }
    let mut words: Vec<u32> = vec![0; (len as usize).div_ceil(4)];
    let mut padded = bytes.unwrap_or_default();
    padded.resize(4 * words.len(), 0);
    for (word, bytes) in words.iter_mut().zip(padded.as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
    world.broadcast(&mut words, 0)?;
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.truncate(len as usize);
    Ok(Some(bytes))
}
