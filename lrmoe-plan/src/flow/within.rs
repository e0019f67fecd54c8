//! Flows within capacities that differ from rank to rank.

use super::{Flow, NONE};
use crate::Placement;

impl Flow {
    /// No capacities yet, over a placement without free slots.
    pub(crate) fn over(placement: &Placement) -> Self {
        let slots = (0..placement.ranks()).map(|rank| placement.on_rank(rank).len());
        Self::of(placement, slots)
    }

    /// Starts anew with a capacity for each rank and pushes as much of `per_expert` as there is room for.
    pub(crate) fn fill_within(&mut self, per_expert: &[u32], capacities: &[u64]) {
        self.room.copy_from_slice(capacities);
        self.refill(per_expert);
    }

    /// What each rank has taken.
    pub(crate) fn rank_loads(&self) -> Vec<u64> {
        let taken = |rank| self.hosts.on_rank(rank).iter().map(|i| i.amount).sum();
        (0..self.hosts.ranks()).map(taken).collect()
    }

    /// After [`settle`](Self::settle), if something is left: the ranks that are full together.
    pub(crate) fn full_ranks(&self) -> impl Iterator<Item = usize> {
        let levels = self.search.rank_level.iter().enumerate();
        levels
            .filter(|(_, level)| **level != NONE)
            .map(|(rank, _)| rank)
    }
}
