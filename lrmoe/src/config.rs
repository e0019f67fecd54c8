//! Options of a training run: the command line over a TOML file over defaults, checked before anything starts.
//!
//! [`TrainOptions`] is what a user says, in either place and under the same names; what is left out is
//! `None`. [`TrainOptions::resolve`] makes a [`TrainConfig`] of it, which is complete and consistent.

mod all_to_all;
mod contender;
mod device;
mod dtype;
mod error;
mod options;
mod schedule;
mod switch;

use std::path::{Path, PathBuf};

use lrmoe_kernels::Activation;
use lrmoe_metric::Score;
use lrmoe_plan::{ClusterSpec, Stash};

use crate::calibrate::local;
use crate::model::ModelConfig;
use crate::policy::Policy;

pub use all_to_all::AllToAll;
pub use contender::{Contender, ContenderName, PolicyName};
pub use device::{Cards, Device};
pub use dtype::Dtype;
pub use error::ConfigError;
pub use options::TrainOptions;
pub use schedule::RetentionSchedule;
pub use switch::Switch;

use error::above;
pub(crate) use error::within;

const MIB: u64 = 1 << 20;
/// Ranks and threads of one process.
const MOST_THREADS: usize = 1024;

/// A training run, complete and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    /// Files and folders of the text.
    pub text: Vec<PathBuf>,
    /// Sizes of the model.
    pub model: ModelConfig,
    /// Activation of the experts.
    pub activation: Activation,
    /// How the MoE layers treat their pairs.
    pub policy: Policy,
    /// Retention of each layer, where they differ; the policy has their mean.
    pub layer_retention: Option<Vec<f64>>,
    /// How the retention changes over the run.
    pub retention_schedule: RetentionSchedule,
    /// What the forward pass leaves for the backward pass, whatever the policy.
    pub stash: Stash,
    /// Policies to run one after another and compare; empty for a single run of `policy`.
    pub compare: Vec<Contender>,
    /// Where the MoE layers compute.
    pub device: Device,
    /// Ranks, each a thread or a process.
    pub ranks: usize,
    /// Ranks that share a node.
    pub ranks_per_node: usize,
    /// How rows travel between nodes.
    pub all_to_all: AllToAll,
    /// Threads of the compute pool; `None` for one per core.
    pub threads: Option<usize>,
    /// Expert slots of each rank.
    pub slots: u32,
    /// Rows of a chunk.
    pub chunk_rows: u64,
    /// Whether chunks travel while another is computed with.
    pub overlap: bool,
    /// Memory budget of a rank for experts and token buffers, in bytes.
    pub budget_bytes: Option<u64>,
    /// Cluster of the modelled times.
    pub cluster: ClusterSpec,
    /// Sequences per step over all ranks, a multiple of `ranks`.
    pub batch: usize,
    /// Steps of the run.
    pub steps: u32,
    /// Largest learning rate.
    pub learning_rate: f32,
    /// Steps over which the learning rate rises.
    pub warmup: u32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Largest norm of the gradient; 0 leaves it as it is.
    pub clip: f32,
    /// Weight of each layer's balance loss.
    pub balance_loss: f64,
    /// Seed of parameters, batches and selection.
    pub seed: u64,
    /// Steps between evaluations; 0 for one at the end.
    pub eval_every: u32,
    /// Held-out sequences of an evaluation.
    pub eval_sequences: usize,
    /// Steps between checkpoints; 0 for one at the end.
    pub checkpoint_every: u32,
    /// Folder of the results.
    pub out: PathBuf,
    /// Continue from the checkpoint in `out`.
    pub resume: bool,
    /// Replace an earlier run in `out`.
    pub overwrite: bool,
    /// Routing trace to write.
    pub record_trace: Option<PathBuf>,
    /// Steps between those of which the trace has every pair; 0 for none.
    pub record_pairs_every: u32,
    /// Steps between those whose gradients are compared with those of all pairs; 0 for none.
    pub oracle_every: u32,
    /// Draws of the selection in such a step.
    pub oracle_draws: u32,
    /// Held-out loss at which the run ends, in nats per byte.
    pub target_loss: Option<f32>,
    /// Longest wait for the other ranks, in seconds.
    pub deadline_seconds: u64,
}

impl TrainOptions {
    /// Reads the configuration file, if one is named, and fills what the command line leaves open from it, then
    /// from the defaults; checks everything.
    ///
    /// # Errors
    ///
    /// A configuration or cluster file that cannot be read, no text, a value out of its range, or values that
    /// contradict each other. Whether the text itself can be used is not looked at.
    pub fn resolve(self) -> Result<TrainConfig, ConfigError> {
        match self.config.clone() {
            Some(path) => {
                let text = read(&path)?;
                let file = Self::from_toml(&text).map_err(|source| {
                    let start = source.span().map_or(0, |span| span.start);
                    let line = 1 + text[..start].matches('\n').count();
                    let source = Box::new(source);
                    ConfigError::Toml { path, line, source }
                })?;
                self.or(file).complete()
            }
            None => self.complete(),
        }
    }

    fn complete(self) -> Result<TrainConfig, ConfigError> {
        let text = self.text.clone().unwrap_or_default();
        if text.is_empty() {
            return Err(ConfigError::NoText);
        }
        let model = self.model()?;
        let ranks = self.ranks()?;
        let per_node = self.ranks_per_node.unwrap_or(ranks);
        let threads = self
            .threads
            .map(|threads| within("threads", threads, 1..=MOST_THREADS));
        let steps = within("steps", self.steps.unwrap_or(300), 1..=u32::MAX)?;
        let warmup = self.warmup.unwrap_or(20.min(steps / 5));
        let budget = self
            .budget_mib
            .map(|mib| within("budget-mib", mib, 1..=u64::MAX / MIB));
        let target = self.target_loss.map(|loss| above("target-loss", loss, 0.0));
        let chunk_rows = self.chunk_rows.unwrap_or(4096);
        let policy = self.policy(self.policy.unwrap_or(PolicyName::Lrmoe), None)?;
        let compare = self.contenders()?;
        let device = self.device()?;
        let run: Vec<&Policy> = match &compare[..] {
            [] => vec![&policy],
            contenders => contenders.iter().map(|one| &one.policy).collect(),
        };
        if device != Device::Cpu && run.iter().any(|policy| policy.compensates()) {
            return Err(ConfigError::Compensation { device });
        }
        let (oracle_every, oracle_draws) = self.oracle(&run)?;
        Ok(TrainConfig {
            text,
            activation: self.activation.unwrap_or(Activation::SwiGlu),
            policy,
            layer_retention: self.layer_retention(model.layers)?,
            retention_schedule: self.retention_schedule(steps)?,
            stash: self.stash.unwrap_or_default(),
            compare,
            oracle_every,
            oracle_draws,
            device,
            record_trace: self.record_trace()?,
            ranks_per_node: within("ranks-per-node", per_node, 1..=MOST_THREADS)?,
            all_to_all: self.all_to_all.unwrap_or_default(),
            threads: threads.transpose()?,
            slots: self.slots(ranks, model.experts)?,
            chunk_rows: within("chunk-rows", chunk_rows, 1..=u64::from(u32::MAX))?,
            overlap: self.overlap.unwrap_or_default() == Switch::On,
            budget_bytes: budget.transpose()?.map(|mib| mib * MIB),
            cluster: cluster(
                self.cluster.as_deref().unwrap_or(ClusterSpec::PRESETS[0]),
                ranks,
            )?,
            batch: self.batch(ranks, &model)?,
            steps,
            learning_rate: above("learning-rate", self.learning_rate.unwrap_or(3e-3), 0.0)?,
            warmup: within("warmup", warmup, 0..=steps)?,
            weight_decay: within(
                "weight-decay",
                self.weight_decay.unwrap_or(0.1),
                0.0..=f32::MAX,
            )?,
            clip: within("clip", self.clip.unwrap_or(1.0), 0.0..=f32::MAX)?,
            balance_loss: within(
                "balance-loss",
                self.balance_loss.unwrap_or(1e-3),
                0.0..=f64::MAX,
            )?,
            seed: self.seed.unwrap_or(1),
            eval_every: self.eval_every.unwrap_or(25),
            eval_sequences: within(
                "eval-sequences",
                self.eval_sequences.unwrap_or(16),
                1..=1 << 20,
            )?,
            checkpoint_every: self.checkpoint_every.unwrap_or(100),
            out: self.out.unwrap_or_else(|| "out".into()),
            record_pairs_every: self.record_pairs_every.unwrap_or(0),
            resume: self.resume,
            overwrite: self.overwrite,
            target_loss: target.transpose()?,
            deadline_seconds: within(
                "deadline-seconds",
                self.deadline_seconds.unwrap_or(600),
                1..=u64::MAX,
            )?,
            model,
            ranks,
        })
    }

    fn device(&self) -> Result<Device, ConfigError> {
        let device = self.device.unwrap_or_default().built()?;
        match self.score {
            Some(Score::FullGrad) if device != Device::Cpu => Err(ConfigError::FullGrad { device }),
            _ => Ok(device),
        }
    }

    fn ranks(&self) -> Result<usize, ConfigError> {
        match (self.ranks, self.processes) {
            (Some(ranks), Some(processes)) if ranks != processes => {
                Err(ConfigError::Processes { ranks, processes })
            }
            (_, Some(_)) if self.compare.as_ref().is_some_and(|runs| !runs.is_empty()) => {
                Err(ConfigError::CompareProcesses)
            }
            (_, Some(processes)) => Ok(processes),
            (ranks, None) => within("ranks", ranks.unwrap_or(4), 1..=MOST_THREADS),
        }
    }

    fn record_trace(&self) -> Result<Option<PathBuf>, ConfigError> {
        if self.record_trace.is_some() && self.compare.as_ref().is_some_and(|runs| !runs.is_empty())
        {
            return Err(ConfigError::RecordComparison);
        }
        if self.record_trace.is_none() && self.record_pairs_every.is_some() {
            return Err(ConfigError::NoRecord);
        }
        Ok(self.record_trace.clone())
    }

    /// Steps between those of the oracle, and its draws, which only a policy that draws can repeat.
    fn oracle(&self, policies: &[&Policy]) -> Result<(u32, u32), ConfigError> {
        let every = self.oracle_every.unwrap_or(0);
        let draws = within("oracle-draws", self.oracle_draws.unwrap_or(1), 1..=1000)?;
        if every == 0 && self.oracle_draws.is_some() {
            return Err(ConfigError::NoOracle);
        }
        let stash = self.stash.unwrap_or_default();
        if every > 0 && stash != Stash::Recompute {
            let option = "oracle-every";
            return Err(ConfigError::KeptOnce { option, stash });
        }
        if draws > 1 && !policies.iter().any(|policy| policy.draws()) {
            return Err(ConfigError::NothingDrawn { draws });
        }
        Ok((every, draws))
    }

    fn model(&self) -> Result<ModelConfig, ConfigError> {
        let model = ModelConfig {
            width: self.width.unwrap_or(128),
            heads: self.heads.unwrap_or(4),
            layers: self.layers.unwrap_or(2),
            context: self.context.unwrap_or(256),
            experts: self.experts.unwrap_or(16),
            top_k: self.top_k.unwrap_or(2),
            hidden: self.hidden.unwrap_or(128),
        };
        model
            .validate()
            .map_err(|error| ConfigError::Model(Box::new(error)))?;
        Ok(model)
    }

    /// Slots of a rank: a quarter more than the experts that it needs to hold.
    fn slots(&self, ranks: usize, experts: usize) -> Result<u32, ConfigError> {
        let standard = (5 * experts.div_ceil(ranks)).div_ceil(4).min(experts);
        let slots = self.slots.map_or(standard, |slots| slots as usize);
        if slots * ranks < experts || slots > experts {
            return Err(ConfigError::Slots {
                slots,
                ranks,
                experts,
            });
        }
        Ok(slots as u32)
    }

    /// Sequences of a step, divisible among the ranks; the pairs of a layer are counted in 32 bits.
    fn batch(&self, ranks: usize, model: &ModelConfig) -> Result<usize, ConfigError> {
        let batch = within("batch", self.batch.unwrap_or(8), 1..=u32::MAX as usize)?;
        if !batch.is_multiple_of(ranks) {
            return Err(ConfigError::Batch { batch, ranks });
        }
        let pairs = batch as u128 * model.context as u128 * model.top_k as u128;
        if pairs > u128::from(u32::MAX) {
            return Err(ConfigError::Pairs {
                pairs,
                batch,
                context: model.context,
                top_k: model.top_k,
            });
        }
        Ok(batch)
    }
}

/// The cluster called `name`: a preset, `local` (this machine, measured as `ranks` ranks that share it), or the description in a file whose
/// name ends in `.toml`.
///
/// # Errors
///
/// An unknown name, a file that cannot be read or describes no cluster, a machine that cannot be measured.
pub fn cluster(name: &str, ranks: usize) -> Result<ClusterSpec, ConfigError> {
    if name == "local" {
        return local(ranks).map_err(|error| ConfigError::Local(Box::new(error)));
    }
    if !name.ends_with(".toml") {
        return ClusterSpec::preset(name).map_err(|error| ConfigError::Preset(Box::new(error)));
    }
    let path = PathBuf::from(name);
    let text = read(&path)?;
    ClusterSpec::from_toml(&text).map_err(|source| ConfigError::Cluster {
        path,
        source: Box::new(source),
    })
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::File {
        path: path.to_path_buf(),
        source,
    })
}
