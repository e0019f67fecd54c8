//! Which rows stay at their instances, and the choice of pairs in the forward pass (stash mode `forward-select`).
//!
//! A score that is known before the rows are computed is chosen by first, and then the rows of the chosen pairs alone are kept. A score of |h| is
//! known for all pairs only when all rows have been computed: until then each instance keeps the rows that can still be chosen, those with the
//! largest keys so far, as many as its expert has quota ([`Largest`](super::largest::Largest)). That order is taken before the layer's scale is
//! known; scores that are too small beside it for f32 count as zero after all, and may then lose against a row that was let go. Where that happened,
//! which takes scores that are 2^60 apart, the pass is done once more with the choice known.

use lrmoe_comm::{Collective, Reduction};
use lrmoe_kernels::Memory;
use lrmoe_metric::Pairs;
use lrmoe_plan::{Quotas, Stash as StashMode};
use lrmoe_route::RoutingTable;

use super::element::LayerElement;
use super::instances::{InstanceRows, Keeping};
use super::stash::PairStash;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer};
use crate::error::Error;
use crate::policy::{Policy, Scope};

/// x `[tokens, width]` and the pairs of its tokens.
pub(super) type Given<'a, B, T> = (&'a <B as Memory>::Buffer<T>, &'a Pairs<'a>);

/// What is left of a forward pass: of pairs, and at instances.
pub(super) type Left<'a, B, T> = (&'a mut PairStash<B, T>, &'a mut InstanceRows<B, T>);

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// All pairs through their experts into `y`; where the stash mode says so, with the choice of those that run backward. Returns the passes that
    /// it took.
    pub(super) fn forward_all<C: Collective>(
        &mut self,
        comm: &mut C,
        mut clock: Clock,
        (step, quotas): (Option<u32>, Option<&Quotas>),
        (table, inputs): (&RoutingTable, Given<'_, B, T>),
        (kept, instances): Left<'_, B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<u64, Error> {
        let keeping = self.keeping(step);
        instances.start(table, keeping);
        let chooses = matches!(keeping, Keeping::Chosen | Keeping::Largest);
        let (Some(step), true) = (step, chooses) else {
            self.forward_chunks(
                comm,
                clock,
                (step, quotas),
                (table, inputs),
                (kept, instances),
                y,
            )?;
            return Ok(1);
        };
        let known = (Some(step), quotas);
        if keeping == Keeping::Chosen {
            self.choose_early(
                comm,
                &mut clock,
                (quotas, step),
                inputs.1,
                (kept, instances),
            )?;
            self.forward_chunks(comm, clock, known, (table, inputs), (kept, instances), y)?;
            instances.settle();
            return Ok(1);
        }
        self.forward_chunks(comm, clock, known, (table, inputs), (kept, instances), y)?;
        let mut clock = Clock::start();
        self.choose_early(
            comm,
            &mut clock,
            (quotas, step),
            inputs.1,
            (kept, instances),
        )?;
        let mut missing = [u32::from(!instances.settle())];
        comm.all_reduce(&mut missing, Reduction::Max)?;
        clock.lap(&mut self.stats.seconds, Stage::Select);
        if missing == [0] {
            return Ok(1);
        }
        instances.choose_again();
        self.forward_chunks(comm, clock, known, (table, inputs), (kept, instances), y)?;
        instances.settle();
        Ok(2)
    }

    /// Which rows stay at their instances in a forward pass.
    fn keeping(&self, step: Option<u32>) -> Keeping {
        match (self.config.stash, &self.config.policy) {
            _ if step.is_none() => Keeping::Nothing,
            (StashMode::ForwardSelect, Policy::Lrmoe(selecting))
                if selecting.scope == Scope::Pair =>
            {
                match selecting.score.row() {
                    Some(_) => Keeping::Largest,
                    None => Keeping::Chosen,
                }
            }
            (StashMode::Full | StashMode::ForwardSelect, _) => Keeping::All,
            _ => Keeping::Nothing,
        }
    }

    /// Chooses the pairs that run backward by what is known now, and finds their rows.
    fn choose_early<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        known: (Option<&Quotas>, u32),
        pairs: &Pairs<'_>,
        (kept, instances): Left<'_, B, T>,
    ) -> Result<(), Error> {
        self.choose(comm, clock, known, pairs, [None; 2], kept.norms())?;
        let chosen = (pairs.expert_ids(), &*self.selector.selection.pairs);
        instances.locate(comm, self.rank, chosen, self.config.capacities.as_deref())?;
        clock.lap(&mut self.stats.seconds, Stage::Route);
        Ok(())
    }
}
