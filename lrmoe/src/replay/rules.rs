//! What holds for one contender in every step and layer.

use lrmoe_plan::{ExpertShape, Loads, MemoryModel, Placement, PlacementRequest, Stash, Topology};

use super::contender::{Buffering, Contender, PolicyName};
use super::traffic::LinkBytes;
use super::{ReplayError, Settings};

/// A contender's settings, made out for the trace.
#[derive(Debug)]
pub(super) struct Rules<'a> {
    pub(super) settings: &'a Settings,
    pub(super) contender: Contender,
    pub(super) shape: ExpertShape,
    pub(super) topology: Topology,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    /// Instances that each rank has room for.
    pub(super) slots: Vec<u32>,
    /// Layers that the trace stands for, and those it has.
    pub(super) layers: [usize; 2],
}

/// Slots of each rank: by default a quarter more than the experts need, for replicas; without replicas what it holds.
fn slots(settings: &Settings, policy: PolicyName, experts: usize, ranks: usize) -> Vec<u32> {
    if !policy.replicates() {
        let first = |rank: usize| rank * experts / ranks;
        return (0..ranks)
            .map(|rank| (first(rank + 1) - first(rank)) as u32)
            .collect();
    }
    let usual = (5 * experts).div_ceil(4 * ranks).min(experts);
    vec![settings.slots.unwrap_or(usual as u32); ranks]
}

impl<'a> Rules<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        contender: Contender,
        topology: Topology,
        experts: usize,
        top_k: usize,
        layers: usize,
    ) -> Self {
        Self {
            slots: slots(settings, contender.policy, experts, topology.ranks()),
            settings,
            contender,
            shape: settings.model.shape,
            topology,
            experts,
            top_k,
            layers: [settings.model_layers.unwrap_or(layers), layers],
        }
    }

    pub(super) fn policy(&self) -> PolicyName {
        self.contender.policy
    }

    pub(super) fn retention(&self) -> f64 {
        self.contender.retention.unwrap_or(self.settings.retention)
    }

    pub(super) fn stash(&self) -> Stash {
        self.contender.buffering().stash()
    }

    /// Whether experts stay where they are.
    pub(super) fn is_static(&self) -> bool {
        match self.policy() {
            PolicyName::Fixed | PolicyName::FixedReplicas => true,
            PolicyName::Lrmoe => self.is_frozen(),
            PolicyName::Symi | PolicyName::FlexMoe => false,
        }
    }

    /// Whether what runs backward is planned within the budget: a stash of every row is there before the first quota.
    pub(super) fn plans(&self) -> bool {
        self.policy() == PolicyName::Lrmoe && self.stash() == Stash::Recompute
    }

    /// Whether the experts never learn.
    fn is_frozen(&self) -> bool {
        self.policy() == PolicyName::Lrmoe && self.retention() == 0.0
    }

    /// Whether gradients and weights travel: not where every expert has one instance and its optimizer state lies beside it.
    pub(super) fn updates_travel(&self) -> bool {
        self.policy() != PolicyName::Fixed && !self.is_frozen()
    }

    pub(super) fn request<'b>(
        &'b self,
        loads: &'b Loads,
        previous: &'b Placement,
    ) -> PlacementRequest<'b> {
        PlacementRequest {
            loads,
            previous,
            slots: &self.slots,
            topology: &self.topology,
        }
    }

    /// Memory of one layer.
    pub(super) fn memory(&self, tokens: usize) -> MemoryModel {
        MemoryModel {
            shape: self.shape,
            top_k: self.top_k,
            tokens,
            chunk_rows: match self.contender.buffering() {
                Buffering::Whole => u64::MAX,
                Buffering::ChunkedForward | Buffering::Chunked => self.settings.chunk_rows,
            },
            overlap: false,
            stash: self.stash(),
            keeps_outputs: false,
            fixed: 0,
        }
    }

    /// Rows that the backward pass holds at once.
    pub(super) fn held(&self, retained_rows: u64) -> u64 {
        match self.contender.buffering() {
            Buffering::Chunked => retained_rows.min(self.settings.chunk_rows),
            Buffering::Whole | Buffering::ChunkedForward => retained_rows,
        }
    }

    /// A sum over the trace's layers, for those of the model.
    pub(super) fn all_layers(&self, sum: u64) -> u64 {
        let [model, trace] = self.layers.map(|layers| layers as u128);
        u64::try_from(u128::from(sum) * model / trace).unwrap_or(u64::MAX)
    }

    /// The same of bytes.
    pub(super) fn all_layers_of(&self, sum: LinkBytes) -> LinkBytes {
        LinkBytes {
            intra: self.all_layers(sum.intra),
            inter: self.all_layers(sum.inter),
        }
    }

    /// An error of a stage, with its place in the replay.
    pub(super) fn at(
        &self,
        step: u32,
        layer: usize,
    ) -> impl FnOnce(crate::error::Error) -> ReplayError {
        let contender = self.contender.to_string();
        move |source| ReplayError::At {
            contender,
            step,
            layer,
            source: Box::new(source),
        }
    }
}
