use std::path::PathBuf;

use super::PolicyName;
use crate::trace::TraceError;

/// What makes a replay impossible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A policy that does not exist.
    #[error("unknown policy `{name}`, must be fixed, fixed-replicas, symi, flexmoe or lrmoe")]
    UnknownPolicy {
        /// The name given.
        name: String,
    },
    /// A way to hold rows in memory that does not exist.
    #[error("unknown buffering `{name}`, must be whole, chunked-forward or chunked")]
    UnknownBuffering {
        /// The name given.
        name: String,
    },
    /// A retention that is no share.
    #[error("retention `{share}` of `{contender}` must be a number from 0 to 1")]
    Retention {
        /// The contender.
        contender: String,
        /// What stands for its retention.
        share: String,
    },
    /// A retention for a policy that runs all it keeps backward.
    #[error("{policy} runs every pair backward that it runs forward; only lrmoe has a retention")]
    NoRetention {
        /// The policy.
        policy: PolicyName,
    },
    /// The same contender twice.
    #[error("{name} is compared with itself")]
    Repeated {
        /// The contender.
        name: String,
    },
    /// Nothing to compare or to replay.
    #[error("no {0} given")]
    Nothing(&'static str),
    /// A number out of its range.
    #[error("{name} {value} is out of range, must be {range}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it can be.
        range: String,
    },
    /// Files that are not of one run.
    #[error("{} has {found} {what}, {} has {expected}: they are not of one run", .path.display(), .first.display())]
    OtherShape {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the file has.
        found: usize,
        /// The first file.
        first: PathBuf,
        /// What that has.
        expected: usize,
    },
    /// Two files with different counts for one step.
    #[error(
        "{} and {} have different counts for step {step}, layer {layer}, rank {rank}, expert {expert}: {} and {}",
        .paths[0].display(), .paths[1].display(), .counts[0], .counts[1]
    )]
    OtherCounts {
        /// The files.
        paths: Box<[PathBuf; 2]>,
        /// Number of the step in its run.
        step: u32,
        /// Layer.
        layer: usize,
        /// Source rank.
        rank: usize,
        /// Expert.
        expert: usize,
        /// The counts.
        counts: [u32; 2],
    },
    /// Nothing is left to count.
    #[error("all {steps} steps would be warm-up of {warmup}: none would count")]
    NoSteps {
        /// Steps to replay.
        steps: usize,
        /// Steps that do not count.
        warmup: usize,
    },
    /// No step in the range asked for.
    #[error("steps {start}..{end} hold none of the trace's, which are {first} to {last}")]
    OutsideTrace {
        /// First step asked for.
        start: u32,
        /// End of the range.
        end: u32,
        /// First step of the trace.
        first: u32,
        /// Its last one.
        last: u32,
    },
    /// Neither the trace nor the model says how many experts a token has.
    #[error("the trace does not say how many experts a token has; give --preset or --top-k")]
    UnknownTopK,
    /// Tokens cannot be multiplied if their number is unknown.
    #[error(
        "the trace does not say how many tokens a rank has, so --tokens-per-rank cannot multiply them"
    )]
    UnknownTokens,
    /// More or fewer ranks or tokens than a multiple of the trace's.
    #[error("{asked} {what} are not a multiple of the trace's {traced}")]
    NotAMultiple {
        /// Ranks, or tokens per rank.
        what: &'static str,
        /// What was asked for.
        asked: usize,
        /// What the trace has.
        traced: usize,
    },
    /// A count that no longer fits when it is multiplied.
    #[error("step {step}: {count} pairs times {times} pass 32 bits")]
    Overflow {
        /// Number of the step.
        step: u32,
        /// The count.
        count: u32,
        /// The factor.
        times: u32,
    },
    /// A budget that cannot hold what a rank needs in any case.
    #[error(
        "{contender}, step {step}: a budget of {budget} bytes is {missing} bytes short on rank {rank}; the smallest that works there is {} bytes",
        budget + missing
    )]
    Budget {
        /// The contender.
        contender: String,
        /// Number of the step.
        step: u32,
        /// The rank.
        rank: usize,
        /// Its budget.
        budget: u64,
        /// Bytes missing.
        missing: u64,
    },
    /// What a stage refuses, with the place in the replay.
    #[error("{contender}, step {step}, layer {layer}: {source}")]
    At {
        /// The contender.
        contender: String,
        /// Number of the step.
        step: u32,
        /// Layer.
        layer: usize,
        /// What was refused.
        source: Box<crate::error::Error>,
    },
    /// A plan that is no JSON, or lacks what is read of it.
    #[error("{}: {source}", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where, and what is wrong.
        source: serde_json::Error,
    },
    /// The placement of an earlier plan does not fit.
    #[error("{}: {source}", .path.display())]
    Previous {
        /// The file.
        path: PathBuf,
        /// Why.
        source: lrmoe_plan::Error,
    },
    /// A value of a load matrix that is no count.
    #[error("{}: line {line}, column {column}: `{value}` must be a whole number from 0 to {}", .path.display(), u32::MAX)]
    Count {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Column, from 1.
        column: usize,
        /// What stands there.
        value: String,
    },
    /// A load matrix that is no CSV, or whose lines differ in length.
    #[error("{}: {source}", .path.display())]
    Csv {
        /// The file.
        path: PathBuf,
        /// Where, and what is wrong.
        source: csv::Error,
    },
    /// A load matrix that cannot be planned for.
    #[error("{}: {source}", .path.display())]
    Loads {
        /// The file.
        path: PathBuf,
        /// Why.
        source: lrmoe_plan::Error,
    },
    /// From a trace.
    #[error(transparent)]
    Trace(Box<TraceError>),
    /// From placement, memory or cost, before the first step.
    #[error(transparent)]
    Plan(#[from] lrmoe_plan::Error),
    /// The user stopped the replay.
    #[error("stopped after {done} of {steps} steps; nothing was written")]
    Interrupted {
        /// Steps replayed.
        done: usize,
        /// Steps asked for.
        steps: usize,
    },
}

impl From<TraceError> for ReplayError {
    fn from(error: TraceError) -> Self {
        Self::Trace(Box::new(error))
    }
}
