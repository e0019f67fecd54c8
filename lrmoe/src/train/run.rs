//! A run: the loop of one rank, over any communicator, and what is kept on disk.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use lrmoe_comm::Collective;

use super::checkpoint::{Checkpoint, CheckpointError};
use super::log::{StepLog, log_path};
use super::rank::RankTrainer;
use super::record::StepRecord;
use super::setup::{identity, layer_configs};
use super::trace::{StepTrace, TraceLog};
use crate::config::TrainConfig;
use crate::error::Error;
use crate::files;
use crate::layer::{Backend, LayerConfig};
use crate::text::Corpus;

/// Follows a run while it goes on.
pub trait Observer {
    /// The run starts or goes on after `done` of `steps` steps.
    fn start(&mut self, done: u32, steps: u32);
    /// A step is done.
    fn step(&mut self, record: &StepRecord);
}

/// A run as its options describe it.
pub(super) struct Run<'a> {
    pub(super) config: &'a TrainConfig,
    corpus: &'a Corpus,
    stop: &'a AtomicBool,
    layers: Vec<LayerConfig>,
    identity: BTreeMap<String, String>,
    checkpoint: PathBuf,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        config: &'a TrainConfig,
        corpus: &'a Corpus,
        stop: &'a AtomicBool,
    ) -> Result<Self, Error> {
        Ok(Self {
            config,
            corpus,
            stop,
            layers: layer_configs(config)?,
            identity: identity(config, corpus),
            checkpoint: checkpoint_path(&config.out),
        })
    }

    /// The bytes of the checkpoint to go on from, if the run is to.
    pub(super) fn read_checkpoint(&self) -> Result<Option<Vec<u8>>, Error> {
        let resume = self.config.resume;
        resume
            .then(|| Checkpoint::read(&self.checkpoint))
            .transpose()
    }

    /// Checks that the run can go on from the checkpoint.
    pub(super) fn parse_checkpoint(&self, bytes: &[u8]) -> Result<Checkpoint, Error> {
        let checkpoint = Checkpoint::parse(bytes, &self.checkpoint, &self.identity)?;
        let (found, expected) = (checkpoint.layers.len(), self.layers.len());
        if found != expected {
            let path = self.checkpoint.clone();
            let reason = format!("it holds {found} MoE layers, its metadata says {expected}");
            return Err(CheckpointError::Corrupt { path, reason }.into());
        }
        let (done, steps) = (checkpoint.step, self.config.steps);
        if done > steps {
            return Err(Error::StepsDone { done, steps });
        }
        Ok(checkpoint)
    }

    /// A rank with its model. Ranks are built side by side: the layers' construction exchanges nothing.
    pub(super) fn trainer<B: Backend + Clone, C: Collective + 'static>(
        &self,
        backend: &B,
        comm: C,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<RankTrainer<'a, B, C>, Error> {
        let layers = self.layers.clone();
        RankTrainer::new(backend, self.config, self.corpus, layers, comm, checkpoint)
    }

    /// Trains one rank until the steps are done, the target is reached or any rank is to stop; then writes a checkpoint. `record` takes in
    /// what rank 0 reports of each step, and says whether the log has it; if not, the run ends without a checkpoint, as nothing could go on
    /// from one that is ahead of the log.
    pub(super) fn rank<B: Backend + Clone, C: Collective + 'static>(
        &self,
        mut trainer: RankTrainer<'_, B, C>,
        mut record: impl FnMut(StepRecord, Option<StepTrace>) -> bool,
    ) -> Result<(), Error> {
        let every = |period: u32, step: u32| period > 0 && step.is_multiple_of(period);
        let (mut saved, mut logged) = (None, true);
        while trainer.step() < self.config.steps
            && !trainer.agree(self.stop.load(Ordering::Relaxed))?
        {
            let (mut step, trace) = trainer.train_step()?;
            if every(self.config.eval_every, step.step) || step.step == self.config.steps {
                step.held_out_loss = Some(trainer.held_out_loss()?);
            }
            let reached = reached_target(self.config, &step);
            if trainer.rank() == 0 && !record(step, trace) {
                logged = false;
                self.stop.store(true, Ordering::Relaxed);
            }
            if every(self.config.checkpoint_every, trainer.step()) {
                self.save(&trainer, logged)?;
                saved = Some(trainer.step());
            }
            if reached {
                break;
            }
        }
        if saved != Some(trainer.step()) {
            self.save(&trainer, logged)
        } else {
            Ok(())
        }
    }

    fn save<B: Backend + Clone, C: Collective + 'static>(
        &self,
        trainer: &RankTrainer<'_, B, C>,
        logged: bool,
    ) -> Result<(), Error> {
        if let Some(checkpoint) = trainer.checkpoint()?
            && logged
        {
            let path = &self.checkpoint;
            // The log is on the disk before a checkpoint that counts on it.
            let log = log_path(&self.config.out);
            let synced = File::open(&log).and_then(|file| file.sync_all());
            synced.map_err(Error::io(log))?;
            checkpoint.save(path, &self.identity)?;
            tracing::info!(step = checkpoint.step, path = %path.display(), "checkpoint written");
        }
        Ok(())
    }
}

/// The files that a run writes while it goes on, and who follows it.
pub(super) struct Outputs<'a> {
    config: &'a TrainConfig,
    stop: &'a AtomicBool,
    observer: &'a mut dyn Observer,
    trace: TraceLog,
    log: StepLog,
    logged: Result<(), Error>,
    /// Held for as long as the run goes on.
    _lock: File,
}

impl<'a> Outputs<'a> {
    /// Opens the files of a run of which `done` steps are done; until here nothing was written.
    pub(super) fn open(
        run: &Run<'a>,
        done: u32,
        observer: &'a mut dyn Observer,
    ) -> Result<Self, Error> {
        let config = run.config;
        let trace = TraceLog::create(config, done)?;
        let lock = lock(&config.out)?;
        let log = StepLog::open(&config.out, done, config.overwrite || config.resume)?;
        if !config.resume {
            forget(&run.checkpoint)?;
        }
        files::remove_leftovers(&run.checkpoint)?;
        observer.start(done, config.steps);
        Ok(Self {
            config,
            stop: run.stop,
            observer,
            trace,
            log,
            logged: Ok(()),
            _lock: lock,
        })
    }

    /// Whether the steps that are done have reached the target already.
    pub(super) fn are_complete(&self) -> bool {
        let last = self.log.records().last();
        last.is_some_and(|last| reached_target(self.config, last))
    }

    /// Takes in a step, and says whether the log has it. What cannot be written ends the run after it.
    pub(super) fn record(&mut self, record: &StepRecord, trace: Option<StepTrace>) -> bool {
        let mut in_log = false;
        if self.logged.is_ok() {
            let logged = self.log.append(record);
            in_log = logged.is_ok();
            self.logged = logged.and_then(|()| self.trace.append(trace));
        }
        if self.logged.is_err() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.observer.step(record);
        in_log
    }

    /// Completes the files after the run has ended as `ran` says, and returns the records of the whole run. Steps that were done are worth
    /// keeping, however it ended.
    pub(super) fn finish(self, ran: Result<(), Error>) -> Result<Vec<StepRecord>, Error> {
        let recorded = self.trace.finish();
        ran.and(self.logged).and(recorded)?;
        Ok(self.log.into_records())
    }
}

/// Keeps other runs out of the folder for as long as the file is held; the system lets go of it however the program ends.
pub(crate) fn lock(out: &Path) -> Result<File, Error> {
    let path = out.join(".lock");
    std::fs::create_dir_all(out).map_err(Error::io(out))?;
    let file = File::create(&path).map_err(Error::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::OutInUse(out.into())),
        Err(TryLockError::Error(source)) => Err(Error::Io { path, source }),
    }
}

/// Whether the run may end with this step.
pub(super) fn reached_target(config: &TrainConfig, record: &StepRecord) -> bool {
    let loss = config.target_loss.zip(record.held_out_loss);
    loss.is_some_and(|(target, loss)| loss <= target)
}

/// Removes the checkpoint of a run that is being replaced: resuming must not go back to it.
fn forget(checkpoint: &Path) -> Result<(), Error> {
    match std::fs::remove_file(checkpoint) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(Error::io(checkpoint)),
    }
}

/// Where a run keeps its checkpoint.
pub(crate) fn checkpoint_path(out: &Path) -> PathBuf {
    out.join("checkpoint.safetensors")
}
