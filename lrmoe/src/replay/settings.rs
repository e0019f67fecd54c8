use std::ops::Range;

use lrmoe_metric::Method;
use lrmoe_plan::{ClusterSpec, ExpertShape, QuotaPolicy};

use super::{Contender, ReplayError};

/// The largest size of anything: beyond every model, and small enough that no sum of bytes passes 64 bits.
const MOST: u64 = 1 << 20;

/// What is asked of a replay.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model: name, layers, experts and experts per token are only compared with the trace's.
    pub model: Model,
    /// Layers to scale the trace's to; `None` for those of the trace.
    pub model_layers: Option<usize>,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// Memory of a rank, in bytes.
    pub budget: u64,
    /// What to compare.
    pub contenders: Vec<Contender>,
    /// Retention of `lrmoe` where a contender names none.
    pub retention: f64,
    /// Instances that a rank has room for under policies with replicas; `None` for a quarter more than the experts need.
    pub slots: Option<u32>,
    /// Ranks, a multiple of the trace's; `None` for those of the trace.
    pub ranks: Option<usize>,
    /// Tokens of each rank, a multiple of the trace's; `None` for those of the trace.
    pub tokens_per_rank: Option<usize>,
    /// Numbers of the steps to replay; `None` for all.
    pub steps: Option<Range<u32>>,
    /// First steps that move the placements on but count in no figure.
    pub warmup: usize,
    /// First steps whose loads `fixed-replicas` places by.
    pub history: usize,
    /// Capacity of all slots together under `symi`, as a multiple of the routed pairs.
    pub capacity_factor: f64,
    /// Rows of a chunk, where passes run in chunks.
    pub chunk_rows: u64,
    /// How `lrmoe` divides what it retains among experts.
    pub quota_policy: QuotaPolicy,
    /// Pairs that every expert keeps if it has them.
    pub floor: u32,
    /// How `lrmoe` selects pairs by their scores.
    pub method: Method,
    /// Seed of the selection.
    pub seed: u64,
}

/// The model whose sizes a trace is replayed with.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Name in reports.
    pub name: String,
    /// Sizes of an expert.
    pub shape: ExpertShape,
    /// MoE layers, experts of a layer and experts per token, where they are known.
    pub sizes: Option<[usize; 3]>,
    /// Experts per token, for traces that do not say.
    pub top_k: Option<usize>,
    /// Experts that every token passes: left out of all figures.
    pub shared_experts: usize,
}

impl Settings {
    /// Checks what does not depend on the trace.
    pub(super) fn check(&self) -> Result<(), ReplayError> {
        if self.contenders.is_empty() {
            return Err(ReplayError::Nothing("policies"));
        }
        for (index, contender) in self.contenders.iter().enumerate() {
            if self.contenders[..index].contains(contender) {
                let name = contender.to_string();
                return Err(ReplayError::Repeated { name });
            }
        }
        let out_of_range = |name, value: String, range: &str| ReplayError::OutOfRange {
            name,
            value,
            range: range.into(),
        };
        if !(0.0..=1.0).contains(&self.retention) {
            return Err(out_of_range(
                "retention",
                self.retention.to_string(),
                "0 to 1",
            ));
        }
        if !(self.capacity_factor > 0.0 && self.capacity_factor <= 1e9) {
            let value = self.capacity_factor.to_string();
            return Err(out_of_range(
                "capacity-factor",
                value,
                "above 0 and at most 1e9",
            ));
        }
        let shape = &self.model.shape;
        let counts = [
            ("width", shape.width as u64),
            ("hidden", shape.hidden as u64),
            ("history", self.history as u64),
            ("chunk-rows", self.chunk_rows),
            ("slots", self.slots.unwrap_or(1).into()),
            ("model-layers", self.model_layers.unwrap_or(1) as u64),
            ("ranks", self.ranks.unwrap_or(1) as u64),
            ("tokens-per-rank", self.tokens_per_rank.unwrap_or(1) as u64),
            ("top-k", self.model.top_k.unwrap_or(1) as u64),
        ];
        for (name, value) in counts {
            if !(1..=MOST).contains(&value) {
                return Err(out_of_range(
                    name,
                    value.to_string(),
                    &format!("1 to {MOST}"),
                ));
            }
        }
        Ok(())
    }
}
