//! One MoE layer on one rank, over any communicator.

mod arrays;
mod backward;
mod buffers;
mod dispatch;
mod early;
mod element;
mod experts;
mod forward;
mod full_grad;
mod instances;
mod largest;
mod line;
mod moments;
mod oracle;
mod parameters;
mod pass;
mod router;
mod select;
mod stash;
mod state;
mod stats;
mod traffic;

use lrmoe_comm::Collective;
use lrmoe_kernels::{CompactRows, ComputeExperts, Cpu, ExpertBuffers, FfnShape, SelectPairs};
use lrmoe_metric::{Pairs, Profile, Scores, Selection, Selector};
use lrmoe_plan::{Fixed, Loads, Placement, PlacementRequest, Stash as StashMode, Topology};
use ndarray::Array2;

use crate::adamw::{AdamW, sum_of_squares};
use crate::error::Error;
use crate::policy::{Policy, SymiCapacity};
use arrays::Rows;
use buffers::{Buffers, bytes};
use dispatch::Lists;
pub(crate) use dispatch::rows_between_ranks;
pub use element::LayerElement;
use experts::Experts;
use moments::Moments;
pub use oracle::LayerGradients;
pub use parameters::ExpertParameters;
use stash::Stash;
pub use state::LayerState;
use stats::Clock;
pub use stats::{LayerStats, Seconds, Stage, imbalance};

/// What a layer is and how it treats its pairs; the same on every rank.
#[derive(Clone, Debug)]
pub struct LayerConfig {
    /// Number of the layer in the model; separates its random numbers from those of the others.
    pub layer: u32,
    /// Seed of the selection's random numbers.
    pub seed: u64,
    /// Sizes and activation of one expert.
    pub shape: FfnShape,
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Ranks and nodes.
    pub topology: Topology,
    /// Expert slots per rank, `[ranks]`.
    pub slots: Vec<u32>,
    /// Most rows a rank takes at once, in both passes. The backward pass does not depend on it to the bit; y does within rounding, and so do
    /// weight gradients with rows in bf16.
    pub chunk_rows: u64,
    /// Whether chunks travel while another is computed with: a second set of rows on their way, and the same results to the bit.
    pub overlap: bool,
    /// Most rows a rank can hold in the backward pass, `[ranks]`; `None` where memory sets no bound.
    pub capacities: Option<Vec<u64>>,
    /// What is run backward, where experts live, what is dropped.
    pub policy: Policy,
    /// What the forward pass leaves for the backward pass. Where rows stay at their instances, that is where their pairs run backward, and the
    /// quotas are lowered where a rank could be left with more than its capacity.
    pub stash: StashMode,
    /// Decay per step of the profile of scores.
    pub profile_decay: f32,
}

/// What a layer whose rows are `T` needs of a backend: all stages, in one memory.
///
/// Where the experts of a backend cannot compute with `T` there is no such layer, as with `Wgpu` and bf16:
///
/// ```compile_fail
/// use lrmoe_kernels::{Wgpu, half::bf16};
///
/// fn layer(_: lrmoe::layer::MoeLayer<Wgpu, bf16>) {}
/// ```
pub trait Backend<T: LayerElement = f32>:
    SelectPairs + CompactRows + ComputeExperts<T> + Send + 'static
{
}

impl<T, B> Backend<T> for B
where
    T: LayerElement,
    B: SelectPairs + CompactRows + ComputeExperts<T> + Send + 'static,
{
}

/// One MoE layer on one rank: the experts placed there, the owned shard of the optimizer, and what a step leaves behind.
///
/// Rows (x, y, dy, dx, and what travels) and working weights are `T`: f32, or bf16. Gate weights and their gradients, weight gradients, master
/// weights and moments are f32 with both. Working weights are the master weights, rounded.
///
/// A step is `forward`, `backward`, `reduce_gradients`, `update`; every rank calls each of them, with no tokens too. Rows stay in the memory of
/// the backend from the first stage of a pass to its last; `forward_rows` and `backward_rows` take and leave them there.
#[derive(Debug)]
pub struct MoeLayer<B: Backend<T> = Cpu, T: LayerElement = f32> {
    config: LayerConfig,
    rank: usize,
    backend: B,
    experts: Experts<B, T>,
    symi: Option<SymiCapacity>,
    profile: Profile,
    stash: Stash<B, T>,
    selector: Selector,
    has_selection: bool,
    keeps_scores: bool,
    scores: Option<Scores>,
    loads: Option<Loads>,
    buffers: Buffers<B, T>,
    moments: Moments,
    lists: Lists,
    rows: Rows<B, T>,
    stats: LayerStats,
}

impl MoeLayer {
    /// A layer for `rank` on the CPU; `init` gives an expert's first weights and must give the same on every rank.
    ///
    /// # Errors
    /// Sizes of `config` that contradict each other, too few slots, parameters of a wrong length.
    pub fn new(
        config: LayerConfig,
        rank: usize,
        init: impl FnMut(usize) -> ExpertParameters,
    ) -> Result<Self, Error> {
        Self::on(Cpu, config, rank, init)
    }
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// As [`new`](MoeLayer::new), on any backend. Ranks that are threads may share a device.
    ///
    /// # Errors
    /// As [`new`](MoeLayer::new); what the device refuses.
    pub fn on(
        backend: B,
        config: LayerConfig,
        rank: usize,
        init: impl FnMut(usize) -> ExpertParameters,
    ) -> Result<Self, Error> {
        let ranks = config.topology.ranks();
        let capacities = config.capacities.as_ref().map_or(ranks, Vec::len);
        for (what, len) in [("slots", config.slots.len()), ("capacities", capacities)] {
            if len != ranks {
                return Err(Error::PerRank { what, len, ranks });
            }
        }
        if rank >= ranks {
            return Err(Error::NoSuchRank { rank, ranks });
        }
        if config.top_k == 0 || config.top_k > config.experts {
            return Err(Error::TopK {
                top_k: config.top_k,
                experts: config.experts,
            });
        }
        if config.chunk_rows == 0 {
            return Err(Error::NoChunk);
        }
        config.policy.check()?;
        config.policy.check_stash(config.stash)?;
        let placement = first_placement(&config)?;
        Ok(Self {
            rank,
            experts: Experts::new(&backend, config.shape, rank, placement, init)?,
            backend,
            symi: symi_capacity(&config)?,
            profile: Profile::new(config.experts),
            stash: Stash::default(),
            selector: Selector::default(),
            has_selection: false,
            keeps_scores: false,
            scores: None,
            loads: None,
            buffers: Buffers::default(),
            moments: Moments::default(),
            lists: Lists::default(),
            rows: Rows::default(),
            stats: LayerStats::default(),
            config,
        })
    }

    /// The settings given to `new`.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// Treats pairs by `policy` from the next forward pass on, for which a backward pass that has not come yet is given up. Experts stay
    /// where they are until the next update.
    ///
    /// # Errors
    /// Settings that contradict each other; a SYMI policy whose capacities cannot be had; a score that the stash mode cannot wait for.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), Error> {
        policy.check()?;
        policy.check_stash(self.config.stash)?;
        self.config.policy = policy;
        self.symi = symi_capacity(&self.config)?;
        self.stash.step = None;
        Ok(())
    }

    /// Runs this share of the pairs backward from the next forward pass on, which refuses what is not in [0, 1]. A backward pass that has not come yet
    /// is given up. It means nothing to a policy that does not select.
    pub fn set_retention(&mut self, retention: f64) {
        if let Policy::Lrmoe(selecting) = &mut self.config.policy {
            selecting.retention = retention;
            self.stash.step = None;
        }
    }

    /// Stashes by `stash` from the next forward pass on, for which a backward pass that has not come yet is given up.
    ///
    /// # Errors
    /// A score that the stash mode cannot wait for.
    pub fn set_stash(&mut self, stash: StashMode) -> Result<(), Error> {
        self.config.policy.check_stash(stash)?;
        self.config.stash = stash;
        self.stash.step = None;
        Ok(())
    }

    /// Gives the memory of token buffers back, which the next step takes anew, and gives up a backward pass that has not come yet.
    pub fn release(&mut self) {
        self.buffers = Buffers::default();
        self.stash = Stash::default();
        self.rows = Rows::default();
    }

    /// Where experts live now.
    pub fn placement(&self) -> &Placement {
        self.experts.placement()
    }

    /// Pairs per rank and expert in the last forward pass.
    pub fn loads(&self) -> Option<&Loads> {
        self.loads.as_ref()
    }

    /// Pairs of this rank that ran backward in the last backward pass, with their weights.
    pub fn selection(&self) -> Option<&Selection> {
        self.has_selection.then_some(&self.selector.selection)
    }

    /// Whether the next backward pass keeps the scores of its pairs for `scores`.
    pub fn keep_scores(&mut self, keep: bool) {
        self.keeps_scores = keep;
        self.scores = None;
    }

    /// Scores of this rank's pairs in the last backward pass, if it computed them and was to keep them.
    pub fn scores(&self) -> Option<&Scores> {
        self.scores.as_ref()
    }

    /// What the step has done so far.
    pub fn stats(&self) -> &LayerStats {
        &self.stats
    }

    /// Gradients of the instances on this rank, before reduction, `[local instances, ..]` in the order of `Placement::local_experts`.
    pub fn instance_gradients(&self) -> &ExpertBuffers<B> {
        self.experts.gradients()
    }

    /// The owned part of the reduced gradient, after `reduce_gradients`.
    pub fn shard_gradient(&self) -> &[f32] {
        self.experts.shard_gradient()
    }

    /// Adds the gradients of all instances of an expert up at the owners of its parameters. Returns the sum of squares of the owned part.
    ///
    /// # Errors
    /// A failed exchange.
    pub fn reduce_gradients<C: Collective>(&mut self, comm: &mut C) -> Result<f64, Error> {
        if self.config.policy.is_frozen() {
            return Ok(0.0);
        }
        let mut clock = Clock::start();
        self.stats.reduction_bytes = self.experts.reduce(&self.backend, comm)?;
        let sum = sum_of_squares(self.experts.shard_gradient());
        clock.lap(&mut self.stats.seconds, Stage::Update);
        Ok(sum)
    }

    /// Updates the owned shard with gradients times `scale`, plans the next placement from this step's loads and delivers the weights to it.
    /// `step` counts from 1. A policy that never runs a pair backward leaves the weights as they are.
    ///
    /// # Errors
    /// `Error::NoForward` before the first forward pass, a placement that cannot be had, a failed exchange.
    pub fn update<C: Collective>(
        &mut self,
        comm: &mut C,
        adamw: &AdamW,
        step: u32,
        learning_rate: f32,
        scale: f32,
    ) -> Result<(), Error> {
        let mut clock = Clock::start();
        let loads = self.loads.as_ref().ok_or(Error::NoForward)?;
        if self.config.policy.is_frozen() {
            return Ok(());
        }
        let request = PlacementRequest {
            loads,
            previous: self.experts.placement(),
            slots: &self.config.slots,
            topology: &self.config.topology,
        };
        let next = self.config.policy.place(&request)?;
        if let Some(symi) = &mut self.symi {
            symi.follow(loads.per_expert())?;
        }
        clock.lap(&mut self.stats.seconds, Stage::Plan);
        self.experts.update(adamw, step, learning_rate, scale);
        self.stats.delivery_bytes = self.experts.deliver(&self.backend, comm, next)?;
        clock.lap(&mut self.stats.seconds, Stage::Update);
        Ok(())
    }

    /// Takes down what token buffers are held now: rows in exchange, workspaces, stash.
    fn record_buffers(&mut self) {
        let rows = bytes::<B, T>(&self.rows.x) + bytes::<B, T>(&self.rows.dy);
        let held = self.buffers.bytes() + self.lists.bytes() + self.stash.bytes() + rows;
        self.stats.buffer_bytes = self.stats.buffer_bytes.max(held as u64);
    }
}

fn symi_capacity(config: &LayerConfig) -> Result<Option<SymiCapacity>, Error> {
    let Policy::Symi { capacity_factor } = config.policy else {
        return Ok(None);
    };
    let slots = config.slots.iter().sum();
    SymiCapacity::new(capacity_factor, slots, config.experts).map(Some)
}

/// Before any load is known every expert counts alike.
fn first_placement(config: &LayerConfig) -> Result<Placement, Error> {
    let ranks = config.topology.ranks();
    let loads = Loads::new(Array2::ones((ranks, config.experts)))?;
    let previous = Fixed::placement(config.experts, ranks)?;
    config.policy.place(&PlacementRequest {
        loads: &loads,
        previous: &previous,
        slots: &config.slots,
        topology: &config.topology,
    })
}

/// Makes `list` hold the local ids of the pairs that are not masked, ascending.
fn unmasked(pairs: &Pairs<'_>, list: &mut Vec<u32>) {
    let ids = (0..).zip(pairs.expert_ids());
    list.clear();
    list.extend(
        ids.filter(|(_, expert)| **expert >= 0)
            .map(|(pair, _)| pair),
    );
}
