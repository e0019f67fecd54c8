//! What a replay found.

use lrmoe_plan::{ClusterSpec, ModelledSeconds};
use serde::Serialize;

use super::traffic::LinkBytes;

/// A replay's assumptions and figures. Nothing in it is measured except where the name says so.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What the figures rest on.
    pub header: Header,
    /// Contender by contender, in the order asked for.
    pub policies: Vec<PolicyReport>,
}

/// What the figures of a replay rest on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Header {
    /// Files of the trace.
    pub traces: Vec<String>,
    /// Number of the first step replayed.
    pub first_step: u32,
    /// Number of the last.
    pub last_step: u32,
    /// Steps replayed.
    pub steps: usize,
    /// First steps of these that only move the placements on.
    pub warmup: usize,
    /// Steps of these whose pairs and scores are known.
    pub scored_steps: usize,
    /// MoE layers of the trace.
    pub layers: usize,
    /// Layers that memory, bytes and time are for.
    pub model_layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Ranks replayed.
    pub ranks: usize,
    /// Ranks of the trace.
    pub trace_ranks: usize,
    /// Most tokens of a rank in a step.
    pub tokens_per_rank: usize,
    /// Copies of every token of the trace.
    pub token_copies: usize,
    /// Name of the model.
    pub model: String,
    /// Its width D.
    pub width: usize,
    /// Hidden width F of an expert.
    pub hidden: usize,
    /// Whether an expert has a gate projection.
    pub gated: bool,
    /// Bytes of an element of weights, gradients and rows.
    pub element_bytes: usize,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// Memory budget of a rank, in bytes.
    pub budget_bytes: u64,
    /// Rows of a chunk.
    pub chunk_rows: u64,
    /// Capacity factor of `symi`.
    pub capacity_factor: f64,
    /// Steps whose loads `fixed-replicas` places by.
    pub history: usize,
    /// How `lrmoe` divides what it retains among experts.
    pub quota_policy: String,
    /// Pairs that every expert keeps if it has them.
    pub floor: u32,
    /// How `lrmoe` selects pairs by their scores.
    pub select: String,
    /// What differs between trace, model and question, and what else to be wary of.
    pub notes: Vec<String>,
    /// What is counted, and how.
    pub assumptions: Vec<String>,
}

/// Figures of one contender.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// As given: `POLICY[@RETENTION][+BUFFERING]`.
    pub name: String,
    /// The policy.
    pub policy: String,
    /// Share of the pairs that is to run backward; `None` where all do that run forward.
    pub retention: Option<f64>,
    /// What is held in memory.
    pub buffering: String,
    /// Most slots of a rank, in each layer.
    pub slots: u32,
    /// Memory of the rank that holds most.
    pub memory: MemoryReport,
    /// Largest over mean of the rows that a rank runs forward and backward, mean over steps and layers.
    pub load_max_over_mean: f64,
    /// The same in the worst layer and step.
    pub worst_load_max_over_mean: f64,
    /// Modelled time of the MoE layers in a step, mean over steps.
    pub modelled_step_seconds: f64,
    /// Its parts; gradients to the optimizer's shards are in the exchange.
    pub modelled_seconds: ModelledSeconds,
    /// Modelled time if the same rows and bytes lay evenly on ranks and links, over the modelled time.
    pub share_of_balanced: f64,
    /// Bytes between ranks in a forward pass, all ranks together, mean over steps.
    pub forward_bytes: u64,
    /// Bytes between ranks in a backward pass.
    pub backward_bytes: u64,
    /// Bytes of gradients to the optimizer's shards and of weights back.
    pub update_bytes: u64,
    /// Bytes forward by link.
    pub forward_links: LinkBytes,
    /// Bytes backward by link.
    pub backward_links: LinkBytes,
    /// Gradients and weights by link.
    pub update_links: LinkBytes,
    /// Share of the pairs that runs neither forward nor backward.
    pub dropped: f64,
    /// Share of the pairs that runs forward alone.
    pub left_out: f64,
    /// Sum of the scores of the pairs that run backward over that of all, mean over layers and the steps that have scores; `None` if none has.
    pub contribution_kept: Option<f64>,
    /// Measured time of planning quotas and the next placement, per layer and step, on one thread of this machine.
    pub measured_planning_seconds: f64,
    /// Step by step, for plots.
    #[serde(skip)]
    pub points: Vec<Point>,
}

/// Memory of the rank that holds most, in bytes. The optimizer's state is apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// The most in any step: parts of that rank in that step.
    pub peak_bytes: MemoryParts,
    /// Mean over steps of the rank that holds most in each.
    pub mean_bytes: MemoryParts,
    /// The most that placement, replicas and token buffers take together on a rank: the total without the stash.
    pub peak_without_stash_bytes: u64,
    /// Mean over steps of the same.
    pub mean_without_stash_bytes: u64,
    /// Optimizer state of a rank.
    pub optimizer_bytes: u64,
    /// The most that everything together takes on a rank.
    pub needed_bytes: u64,
    /// Whether that exceeds the budget.
    pub over_budget: bool,
}

/// Memory of one rank by what it is for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryParts {
    /// Weights and gradients of each expert's first instance, all layers.
    pub placement: u64,
    /// Weights and gradients of all other slots, all layers.
    pub replicas: u64,
    /// Token buffers of both passes, of the layer that needs most.
    pub token_buffers: u64,
    /// Part of these for the forward pass.
    pub forward_buffers: u64,
    /// Part of these for the backward pass.
    pub backward_buffers: u64,
    /// What the forward pass leaves for the backward pass, all layers.
    pub stash: u64,
    /// Placement, replicas, token buffers and stash.
    pub total: u64,
}

impl MemoryParts {
    /// Placement, replicas and token buffers.
    pub fn without_stash(&self) -> u64 {
        self.total - self.stash
    }

    fn each(&mut self) -> [&mut u64; 7] {
        [
            &mut self.placement,
            &mut self.replicas,
            &mut self.token_buffers,
            &mut self.forward_buffers,
            &mut self.backward_buffers,
            &mut self.stash,
            &mut self.total,
        ]
    }

    pub(super) fn add(&mut self, other: &Self) {
        let mut other = *other;
        for (sum, part) in self.each().into_iter().zip(other.each()) {
            *sum += *part;
        }
    }

    pub(super) fn over(mut self, steps: u64) -> Self {
        self.each().into_iter().for_each(|part| *part /= steps);
        self
    }
}

/// A step of one contender.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Number of the step.
    pub step: u32,
    /// Largest over mean of the rows that a rank runs, mean over layers.
    pub load_max_over_mean: f64,
    /// Modelled time of the MoE layers.
    pub modelled_seconds: f64,
}
