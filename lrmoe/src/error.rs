//! Errors of the composition and the trainer.

use std::path::PathBuf;

use crate::model::ModelError;
use crate::replay::ReplayError;

/// What can go wrong in a layer, a run or a tool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From scores and selection.
    #[error(transparent)]
    Metric(#[from] lrmoe_metric::Error),
    /// From quotas, placement, memory or cost.
    #[error(transparent)]
    Plan(#[from] lrmoe_plan::Error),
    /// From routing.
    #[error(transparent)]
    Route(#[from] lrmoe_route::Error),
    /// From gather, regroup or scatter-add.
    #[error(transparent)]
    Compact(#[from] lrmoe_compact::Error),
    /// From the expert kernels.
    #[error(transparent)]
    Kernels(lrmoe_kernels::Error),
    /// No device, or one that cannot be used.
    #[error("{0}; `lrmoe doctor` says what this machine has and what would install a driver")]
    Device(lrmoe_kernels::Error),
    /// From a collective.
    #[error(transparent)]
    Comm(#[from] lrmoe_comm::Error),
    /// From the corpus.
    #[error(transparent)]
    Text(#[from] crate::text::TextError),
    /// From the options.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// From a policy and its stash mode.
    #[error(transparent)]
    Stash(#[from] crate::policy::UnknownForward),
    /// From the dense part of the model.
    #[error(transparent)]
    Model(ModelError),
    /// From a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] crate::train::CheckpointError),
    /// From a routing trace.
    #[error(transparent)]
    Trace(#[from] crate::trace::TraceError),
    /// From a replay.
    #[error(transparent)]
    Replay(Box<ReplayError>),
    /// From a sweep.
    #[error(transparent)]
    Sweep(#[from] crate::sweep::SweepError),
    /// From the page of a report.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// From a benchmark.
    #[error(transparent)]
    Bench(#[from] crate::bench::BenchError),
    /// A per-rank setting of another length than the number of ranks.
    #[error("{what} has {len} entries for {ranks} ranks")]
    PerRank {
        /// Which setting.
        what: &'static str,
        /// Its length.
        len: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A rank outside the world.
    #[error("rank {rank} does not exist among {ranks}")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// More experts per token than experts, or none.
    #[error("top-k {top_k} must be at least 1 and at most the number of experts, {experts}")]
    TopK {
        /// Experts per token.
        top_k: usize,
        /// Number of experts.
        experts: usize,
    },
    /// Chunks without rows.
    #[error("a chunk of 0 rows moves nothing; chunk rows must be at least 1")]
    NoChunk,
    /// Initial parameters that do not fit the expert's shape.
    #[error("expert {expert} takes {matrices} matrices of {block} numbers, got lengths {given:?}")]
    ExpertParameters {
        /// The expert.
        expert: usize,
        /// Matrices it takes.
        matrices: usize,
        /// Numbers in each.
        block: usize,
        /// Lengths given.
        given: Vec<usize>,
    },
    /// Inputs of the forward pass that do not fit together.
    #[error(
        "x {x:?}, expert ids {expert_ids:?} and gate weights {gate_weights:?} must be [tokens, {width}] and twice [tokens, {top_k}]"
    )]
    ForwardShapes {
        /// Shape of x.
        x: (usize, usize),
        /// Shape of the expert ids.
        expert_ids: (usize, usize),
        /// Shape of the gate weights.
        gate_weights: (usize, usize),
        /// Width of the layer.
        width: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// A gradient of another shape than the forward pass's x.
    #[error("dy is {dy:?} but the forward pass took {expected:?}")]
    BackwardShape {
        /// Shape given.
        dy: (usize, usize),
        /// Shape of x.
        expected: (usize, usize),
    },
    /// Rows of the backward pass that are not as many as the forward pass took.
    #[error("{what} has {len} numbers, not those of {tokens} tokens of width {width}")]
    BackwardRows {
        /// Which rows.
        what: &'static str,
        /// Numbers given.
        len: usize,
        /// Tokens of the forward pass.
        tokens: usize,
        /// Width of the layer.
        width: usize,
    },
    /// Room for the router's gradient that has another shape than the gate weights.
    #[error("the router's gradient is {dp:?} but the gate weights were {expected:?}")]
    RouterGradientShape {
        /// Shape given.
        dp: (usize, usize),
        /// Shape of the gate weights.
        expected: (usize, usize),
    },
    /// Gradients of another selection than the forward pass left rows for.
    #[error(
        "a step's gradients can be taken again in stash mode recompute alone, not in {0}: what the forward pass kept is for one backward pass"
    )]
    GradientsAside(lrmoe_plan::Stash),
    /// Backward or update without a training forward pass before it.
    #[error("a training forward pass must come first")]
    NoForward,
    /// Layer state of another length.
    #[error("state has {len} {what}, the layer has {expected}")]
    StateLength {
        /// Which vector.
        what: &'static str,
        /// Its length.
        len: usize,
        /// What the layer has.
        expected: usize,
    },
    /// Losses, scores or probabilities are not numbers any more.
    #[error("training diverged in step {step}: {what}; try a smaller --learning-rate")]
    Diverged {
        /// The step.
        step: u32,
        /// What showed it.
        what: String,
    },
    /// More memory than the machine has.
    #[error("a model of these sizes needs at least {} MiB on this machine, more than it gives", bytes >> 20)]
    Memory {
        /// Bytes asked for.
        bytes: u128,
    },
    /// A budget that cannot hold a rank's experts, its optimizer shard and one chunk of rows in every layer.
    #[error(
        "--budget-mib {mib} is too small: a rank needs at least {smallest_mib} MiB for its expert slots, optimizer shard and one chunk of rows"
    )]
    Budget {
        /// The budget.
        mib: u64,
        /// The smallest that works.
        smallest_mib: u64,
    },
    /// The output folder already holds a run.
    #[error("{} already holds a run; continue it with --resume, replace it with --overwrite, or choose another --out", .0.display())]
    OutExists(PathBuf),
    /// Another run is writing to the output folder.
    #[error("{} is in use by a run that is going on; choose another --out", .0.display())]
    OutInUse(PathBuf),
    /// A checkpoint beyond the end of the run.
    #[error("the checkpoint has {done} steps done, more than --steps {steps}")]
    StepsDone {
        /// Steps of the checkpoint.
        done: u32,
        /// Steps of the run.
        steps: u32,
    },
    /// The log of the run that is resumed does not hold the steps that the checkpoint has done.
    #[error("{}: line {line} is not the record of step {line}, which the checkpoint has done", .path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// The first line that is wrong or missing, from 1.
        line: usize,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Ranks that are processes, in a program without MPI.
    #[error(
        "the ranks cannot be processes: this program was built without MPI (cargo build --release -p lrmoe --features mpi), or could not start it; --world threads runs them as threads"
    )]
    NoMpi,
    /// Another rank has found what makes the run impossible, and returns it.
    #[error("rank {rank} could not start")]
    Elsewhere {
        /// The rank.
        rank: usize,
    },
    /// A rank's thread ended by a panic.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        message: String,
    },
}

/// A plot that could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("plot of {plot}: {source}")]
pub struct PlotError {
    /// What it shows.
    pub(crate) plot: &'static str,
    /// Why.
    pub(crate) source: Box<dyn std::error::Error + Send + Sync>,
}

impl Error {
    /// How a program should end with it: 130 after an interruption, as a shell reports one, else 2.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Replay(error) if matches!(**error, ReplayError::Interrupted { .. }) => 130,
            _ => 2,
        }
    }

    /// Whether another rank's failure, rather than this rank, is behind it.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            Self::Comm(_)
                | Self::Elsewhere { .. }
                | Self::Metric(lrmoe_metric::Error::Elsewhere | lrmoe_metric::Error::Exchange(_))
        )
    }

    /// NaN in a training step is named as what it is.
    pub(crate) fn diverged(self, step: u32) -> Self {
        match self {
            Self::Metric(lrmoe_metric::Error::NanScore { .. })
            | Self::Model(ModelError::NanProbability { .. }) => Self::Diverged {
                step,
                what: self.to_string(),
            },
            other => other,
        }
    }

    /// For `map_err` on file operations.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

/// What the stages refuse is the same on every backend.
impl From<lrmoe_kernels::Error> for Error {
    fn from(error: lrmoe_kernels::Error) -> Self {
        match error {
            lrmoe_kernels::Error::Metric(error) => Self::Metric(error),
            lrmoe_kernels::Error::Compact(error) => Self::Compact(error),
            other => Self::Kernels(other),
        }
    }
}

impl From<ReplayError> for Error {
    fn from(error: ReplayError) -> Self {
        Self::Replay(Box::new(error))
    }
}

/// A layer's own error comes out as it went in.
impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Layer { layer, source } => match source.downcast::<Self>() {
                Ok(own) => *own,
                Err(source) => Self::Model(ModelError::Layer { layer, source }),
            },
            other => Self::Model(other),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        ModelError::from(error).into()
    }
}
