use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use lrmoe_metric::Rescale;

use lrmoe_plan::Stash;

use super::device::Device;
use super::schedule::RetentionSchedule;
use crate::model::ModelError;
use crate::policy::UnknownForward;

/// What makes options unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A configuration or cluster file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The configuration file is not valid TOML, or has an unknown key or a value of the wrong kind.
    #[error("configuration {}, line {line}: {}", path.display(), source.message())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong there.
        source: Box<toml::de::Error>,
    },
    /// The cluster file does not describe a cluster.
    #[error("cluster {}: {source}", path.display())]
    Cluster {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<lrmoe_plan::Error>,
    },
    /// Neither a preset nor a TOML file.
    #[error(transparent)]
    Preset(Box<lrmoe_plan::Error>),
    /// `local` needs measurements that failed.
    #[error("cluster local: {0}")]
    Local(Box<crate::error::Error>),
    /// Nothing to train on.
    #[error("no text given: name files or folders with --text or in the configuration file")]
    NoText,
    /// A number is out of its range.
    #[error("{name} {value} is out of range, must be {range}")]
    OutOfRange {
        /// The option.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it can be.
        range: String,
    },
    /// The sizes make no model.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// A device that does not exist.
    #[error(
        "unknown device `{name}`, must be cpu, wgpu, cuda, or cuda:N or cuda:N-M with numbers of cards"
    )]
    Device {
        /// The name given.
        name: String,
    },
    /// A switch that is neither on nor off.
    #[error("unknown switch position `{name}`, must be on or off")]
    Switch {
        /// What was given.
        name: String,
    },
    /// A way for all-to-alls that does not exist.
    #[error("unknown all-to-all `{name}`, must be direct, hierarchical or auto")]
    AllToAll {
        /// The name given.
        name: String,
    },
    /// A device that this program was built without.
    #[error(
        "this program was built without {0}; build it with `cargo build --release -p lrmoe --features {0}`", device.feature()
    )]
    NotBuilt {
        /// The device.
        device: Device,
    },
    /// A launcher that gives the process no number on its node.
    #[error("the environment variable LOCAL_RANK is `{value}`, must be the number of a card")]
    LocalRank {
        /// Its value.
        value: String,
    },
    /// Another number of ranks than there are processes to be them.
    #[error("--ranks {ranks}, but {processes} processes were started; each is one rank")]
    Processes {
        /// Ranks asked for.
        ranks: usize,
        /// Processes.
        processes: usize,
    },
    /// A comparison by processes, each a rank.
    #[error(
        "--compare runs its ranks as threads; start it without mpirun, or with --world threads"
    )]
    CompareProcesses,
    /// The batch cannot be divided evenly.
    #[error("batch of {batch} sequences is not a multiple of {ranks} ranks")]
    Batch {
        /// Sequences per step.
        batch: usize,
        /// Ranks.
        ranks: usize,
    },
    /// More pairs in a layer than can be counted.
    #[error(
        "a batch of {batch} sequences of {context} bytes sent to {top_k} experts has {pairs} pairs, the limit is {}",
        u32::MAX
    )]
    Pairs {
        /// Pairs of a layer.
        pairs: u128,
        /// Sequences per step.
        batch: usize,
        /// Bytes of a sequence.
        context: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// The slots cannot hold every expert, or more than every expert.
    #[error(
        "{slots} slots on each of {ranks} ranks cannot hold {experts} experts, must be {} to {experts}",
        experts.div_ceil(*ranks)
    )]
    Slots {
        /// Slots of a rank.
        slots: usize,
        /// Ranks.
        ranks: usize,
        /// Experts.
        experts: usize,
    },
    /// A policy that does not exist.
    #[error("unknown policy `{name}`, must be dropless, symi or lrmoe")]
    Policy {
        /// The name given.
        name: String,
    },
    /// A schedule of retention that does not exist.
    #[error(
        "unknown schedule `{text}`, must be constant, linear:FROM:TO with shares from 0 to 1, warmup:STEPS or adaptive:VARIANCE[:STEPS] with numbers above 0"
    )]
    Schedule {
        /// The text given.
        text: String,
    },
    /// A schedule that needs no retention, and one.
    #[error(
        "schedule {schedule} says what the retention is in every step; leave retention out, or use warmup or adaptive, which take it up"
    )]
    TwoRetentions {
        /// The schedule.
        schedule: RetentionSchedule,
    },
    /// Neither one retention nor one for each layer.
    #[error("retention has {given} values for {layers} layers, must have 1 or {layers}")]
    Layers {
        /// Values given.
        given: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Gradients of a step taken again, from rows that are kept for one backward pass.
    #[error(
        "{option} takes a step's gradients again, which stash mode {stash} keeps rows for once only; take stash mode recompute"
    )]
    KeptOnce {
        /// The option that needs the gradients again.
        option: &'static str,
        /// The stash mode.
        stash: Stash,
    },
    /// A score that the stash mode cannot wait for.
    #[error(transparent)]
    Stash(#[from] UnknownForward),
    /// A retention that is no number, or stands behind a policy that retains everything.
    #[error("`{text}` is not POLICY or lrmoe@RETENTION")]
    Contender {
        /// The text given.
        text: String,
    },
    /// One trace for several runs.
    #[error("record-trace takes one run, not a comparison")]
    RecordComparison,
    /// Pairs of no trace.
    #[error("record-pairs-every needs record-trace")]
    NoRecord,
    /// The oracle of scores where it is not computed.
    #[error(
        "score full-grad is computed with device cpu alone, not {device}; it is for measuring the others, of which down-grad comes nearest"
    )]
    FullGrad {
        /// The device.
        device: Device,
    },
    /// Weights multiplied that make up for what is left out already.
    #[error(
        "rescale {rescale} is for select top: the weights of priority already make up for the pairs left out"
    )]
    Rescale {
        /// The rescaling.
        rescale: Rescale,
    },
    /// Weights for a gradient that lacks nothing.
    #[error(
        "dx-weight w is for scope pair: with wgrad all pairs run backward and add to the input's gradient with weight 1"
    )]
    DxWeight,
    /// Two ways at once to make up for dropped pairs.
    #[error(
        "compensation moments puts means in the place of the pairs left out, for which rescale {rescale} makes up too; leave one of them out"
    )]
    Substitutes {
        /// The rescaling.
        rescale: Rescale,
    },
    /// Compensation where it is not computed.
    #[error(
        "compensation moments is computed with device cpu alone, not {device}; leave it out, or compute on the CPU"
    )]
    Compensation {
        /// The device.
        device: Device,
    },
    /// Draws of no oracle.
    #[error("oracle-draws needs oracle-every")]
    NoOracle,
    /// Repeated draws of a selection that is always the same.
    #[error(
        "oracle-draws {draws} repeats the draw of a selection, but nothing is drawn; select priority or score random is"
    )]
    NothingDrawn {
        /// The draws.
        draws: u32,
    },
    /// The same contender twice.
    #[error("{name} is compared with itself")]
    Repeated {
        /// The contender.
        name: String,
    },
}

/// The value, if it lies in the range; NaN lies in none.
pub(crate) fn within<T: Copy + Display + PartialOrd>(
    name: &'static str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<T, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(ConfigError::OutOfRange {
        name,
        value: value.to_string(),
        range: format!("{} to {}", range.start(), range.end()),
    })
}

/// The value, if it is finite and above the limit.
pub(super) fn above<T: Copy + Display + Into<f64>>(
    name: &'static str,
    value: T,
    limit: f64,
) -> Result<T, ConfigError> {
    let number: f64 = value.into();
    if number > limit && number.is_finite() {
        return Ok(value);
    }
    Err(ConfigError::OutOfRange {
        name,
        value: value.to_string(),
        range: format!("above {limit}"),
    })
}
