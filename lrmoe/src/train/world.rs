//! A run: the ranks as threads, the records they send, what is kept on disk.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use lrmoe_comm::{Collective, Threads};
use lrmoe_kernels::FfnShape;
use lrmoe_plan::{ExpertShape, MemoryModel, Stash, Topology};

use super::checkpoint::{Checkpoint, CheckpointError};
use super::log::StepLog;
use super::rank::RankTrainer;
use super::record::StepRecord;
use super::trace::{StepTrace, TraceLog};
use crate::backend::{OnBackend, on_device};
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::{Backend, LayerConfig};
use crate::text::Corpus;

/// Follows a run while it goes on.
pub trait Observer {
    /// The run starts or goes on after `done` of `steps` steps.
    fn start(&mut self, done: u32, steps: u32);
    /// A step is done.
    fn step(&mut self, record: &StepRecord);
}

/// Decay per step of the profile of scores.
const PROFILE_DECAY: f32 = 0.9;

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
    let run = Run {
        config,
        corpus,
        stop,
        observer,
    };
    on_device(config.device, run)
}

/// The arguments of [`train`].
struct Run<'a> {
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    stop: &'a AtomicBool,
    observer: &'a mut dyn Observer,
}

impl OnBackend for Run<'_> {
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
    let layers = layer_configs(config)?;
    let identity = identity(config, corpus);
    let path = checkpoint_path(&config.out);
    let checkpoint = if config.resume {
        Some(Checkpoint::load(&path, &identity)?)
    } else {
        None
    };
    let trainers = start_ranks(of_rank, config, corpus, &layers, checkpoint.as_ref())?;
    let done = checkpoint.map_or(0, |checkpoint| checkpoint.step);
    if done > config.steps {
        return Err(Error::StepsDone {
            done,
            steps: config.steps,
        });
    }
    let mut trace = TraceLog::create(config, done)?;
    let _lock = lock(&config.out)?;
    let mut log = StepLog::open(&config.out, done, config.overwrite || config.resume)?;
    if !config.resume {
        forget(&path)?;
    }
    observer.start(done, config.steps);
    let last = log.records().last();
    if !last.is_some_and(|last| reached_target(config, last)) {
        let run = RankRun {
            config,
            stop,
            identity: &identity,
            checkpoint: &path,
        };
        let ran = run.ranks(trainers, &mut log, &mut trace, observer);
        // Steps that were done are worth keeping, however the run ended.
        let recorded = trace.finish();
        ran.and(recorded)?;
    }
    Ok(log.into_records())
}

/// Keeps other runs out of the folder for as long as the file is held; the system lets go of it however the program ends.
fn lock(out: &Path) -> Result<File, Error> {
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
pub(super) fn checkpoint_path(out: &Path) -> PathBuf {
    out.join("checkpoint.safetensors")
}

/// What every rank's thread needs.
struct RankRun<'a> {
    config: &'a TrainConfig,
    stop: &'a AtomicBool,
    identity: &'a BTreeMap<String, String>,
    checkpoint: &'a Path,
}

impl RankRun<'_> {
    /// Runs every rank on a thread of its own and takes in their records.
    fn ranks<B: Backend + Clone>(
        &self,
        trainers: Vec<RankTrainer<'_, B, Threads>>,
        log: &mut StepLog,
        trace: &mut TraceLog,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            let start = |trainer| {
                let send = send.clone();
                scope.spawn(move || self.rank(trainer, &send))
            };
            let ranks: Vec<_> = trainers.into_iter().map(start).collect();
            drop(send);
            let mut logged = Ok(());
            for (record, step) in receive {
                logged = logged
                    .and_then(|()| log.append(&record))
                    .and_then(|()| trace.append(step));
                if logged.is_err() {
                    self.stop.store(true, Ordering::Relaxed);
                }
                observer.step(&record);
            }
            let results = ranks.into_iter().enumerate().map(|(rank, thread)| {
                thread.join().unwrap_or_else(|panic| {
                    let message = panic_message(panic.as_ref());
                    Err(Error::Panicked { rank, message })
                })
            });
            first_cause(results.collect()).and(logged)
        })
    }

    fn rank<B: Backend + Clone>(
        &self,
        mut trainer: RankTrainer<'_, B, Threads>,
        records: &mpsc::Sender<(StepRecord, Option<StepTrace>)>,
    ) -> Result<(), Error> {
        let every = |period: u32, step: u32| period > 0 && step.is_multiple_of(period);
        let mut saved = None;
        while trainer.step() < self.config.steps
            && !trainer.agree(self.stop.load(Ordering::Relaxed))?
        {
            let (mut record, trace) = trainer.train_step()?;
            if every(self.config.eval_every, record.step) || record.step == self.config.steps {
                record.held_out_loss = Some(trainer.held_out_loss()?);
            }
            let reached = reached_target(self.config, &record);
            if trainer.rank() == 0 && records.send((record, trace)).is_err() {
                break;
            }
            if every(self.config.checkpoint_every, trainer.step()) {
                self.save(&trainer)?;
                saved = Some(trainer.step());
            }
            if reached {
                break;
            }
        }
        if saved != Some(trainer.step()) {
            self.save(&trainer)
        } else {
            Ok(())
        }
    }

    fn save<B: Backend + Clone>(&self, trainer: &RankTrainer<'_, B, Threads>) -> Result<(), Error> {
        if let Some(checkpoint) = trainer.checkpoint()? {
            checkpoint.save(self.checkpoint, self.identity)?;
            tracing::info!(step = checkpoint.step, path = %self.checkpoint.display(), "checkpoint written");
        }
        Ok(())
    }
}

/// Ranks with their models, built side by side: the layers' construction exchanges nothing.
fn start_ranks<'a, B: Backend + Clone>(
    of_rank: impl Fn(usize) -> B,
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    layers: &[LayerConfig],
    checkpoint: Option<&Checkpoint>,
) -> Result<Vec<RankTrainer<'a, B, Threads>>, Error> {
    enough_memory(config)?;
    if let Some(found) = checkpoint.map(|checkpoint| checkpoint.layers.len())
        && found != layers.len()
    {
        return Err(CheckpointError::Corrupt {
            path: checkpoint_path(&config.out),
            reason: format!(
                "it holds {found} MoE layers, its metadata says {}",
                layers.len()
            ),
        }
        .into());
    }
    let deadline = Duration::from_secs(config.deadline_seconds);
    let world = Threads::world(config.ranks, deadline)?;
    world
        .into_iter()
        .map(|comm| {
            let backend = of_rank(comm.rank());
            RankTrainer::new(&backend, config, corpus, layers.to_vec(), comm, checkpoint)
        })
        .collect()
}

/// Refuses what would end in an aborted allocation: every rank holds the dense parameters with gradient and moments, twice the
/// former; the ranks together hold the experts with theirs.
fn enough_memory(config: &TrainConfig) -> Result<(), Error> {
    let [width, layers, experts, ranks] = [
        config.model.width,
        config.model.layers,
        config.model.experts,
        config.ranks,
    ]
    .map(|n| n as u128);
    let dense = 4 * width * width * layers + 2 * 256 * width;
    let expert = u128::from(expert_shape(config).parameters());
    let numbers =
        5 * ranks * dense + layers * (3 * experts + 2 * ranks * u128::from(config.slots)) * expert;
    let bytes = numbers * size_of::<f32>() as u128;
    let got =
        usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    if got {
        Ok(())
    } else {
        Err(Error::Memory { bytes })
    }
}

/// Settings of each MoE layer; checks the memory budget.
fn layer_configs(config: &TrainConfig) -> Result<Vec<LayerConfig>, Error> {
    let model = &config.model;
    let shape = FfnShape {
        width: model.width,
        hidden: model.hidden,
        activation: config.activation,
    };
    let slots = vec![config.slots; config.ranks];
    let capacities = config
        .budget_bytes
        .map(|budget| capacities(config, budget, &slots));
    let template = LayerConfig {
        layer: 0,
        seed: config.seed,
        shape,
        experts: model.experts,
        top_k: model.top_k,
        topology: Topology::new(config.ranks, config.ranks_per_node)?,
        slots,
        chunk_rows: config.chunk_rows,
        capacities: capacities.transpose()?,
        policy: config.policy.clone(),
        profile_decay: PROFILE_DECAY,
    };
    Ok((0..model.layers)
        .map(|layer| LayerConfig {
            layer: layer as u32,
            ..template.clone()
        })
        .collect())
}

/// Retained rows that each rank can hold in each layer, the budget divided evenly among the layers.
fn capacities(config: &TrainConfig, budget: u64, slots: &[u32]) -> Result<Vec<u64>, Error> {
    let layers = config.model.layers as u64;
    let shares = vec![budget / layers; config.ranks];
    let found = memory_model(config).capacities(slots, config.model.experts, &shares);
    found.map_err(|error| match error {
        lrmoe_plan::Error::BudgetTooSmall { smallest, .. } => Error::Budget {
            mib: budget >> 20,
            smallest_mib: smallest.saturating_mul(layers).div_ceil(1 << 20),
        },
        other => other.into(),
    })
}

fn memory_model(config: &TrainConfig) -> MemoryModel {
    MemoryModel {
        shape: expert_shape(config),
        top_k: config.model.top_k,
        tokens: config.batch / config.ranks * config.model.context,
        chunk_rows: config.chunk_rows,
        stash: Stash::Recompute,
        keeps_outputs: config.policy.needs_outputs(),
        fixed: 0,
    }
}

/// One expert as memory and cost models see it.
pub(super) fn expert_shape(config: &TrainConfig) -> ExpertShape {
    ExpertShape {
        width: config.model.width,
        hidden: config.model.hidden,
        gated: config.activation.is_gated(),
        bytes: size_of::<f32>(),
    }
}

/// Options that a resumed run must share with the run it continues. Others (steps, learning rate, paths) may change.
fn identity(config: &TrainConfig, corpus: &Corpus) -> BTreeMap<String, String> {
    let model = &config.model;
    let values = [
        ("width", model.width.to_string()),
        ("layers", model.layers.to_string()),
        ("heads", model.heads.to_string()),
        ("context", model.context.to_string()),
        ("experts", model.experts.to_string()),
        ("top-k", model.top_k.to_string()),
        ("hidden", model.hidden.to_string()),
        ("activation", config.activation.to_string()),
        ("policy", config.policy.name().to_owned()),
        ("ranks", config.ranks.to_string()),
        ("slots", config.slots.to_string()),
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
        (
            "text",
            format!("{} bytes {:08x}", corpus.len(), corpus.checksum()),
        ),
    ];
    values
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
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
