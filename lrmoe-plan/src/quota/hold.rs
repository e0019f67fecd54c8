//! Quotas where pairs cannot choose among the instances of their expert any more.

use super::Quotas;
use super::apportion::apportion;
use crate::error::expect;
use crate::{Error, Placement};

impl Quotas {
    /// Lowers quotas until every rank can hold what it may be left with, for pairs that stay at the instances they were routed to: whichever pairs
    /// are chosen, an instance is left with at most `min(quota, rows)` of its `rows`, `[instances]`.
    ///
    /// Ranks without the room, in ascending order, share what they have out among their instances in proportion to these numbers, by largest
    /// remainder. As the quota of an expert with several instances is held in full at each, this is cautious with replicas. Same inputs give
    /// the same quotas.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if the inputs have different numbers of experts, instances or ranks.
    pub fn held(
        mut self,
        placement: &Placement,
        rows: &[u64],
        capacities: &[u64],
    ) -> Result<Self, Error> {
        expect("quotas", placement.experts(), self.0.len())?;
        expect("rows of instances", placement.instances(), rows.len())?;
        expect("capacities", placement.ranks(), capacities.len())?;
        for (rank, &capacity) in capacities.iter().enumerate() {
            let here = placement.on_rank(rank);
            let most = |i: usize| rows[i].min(self.0[placement.expert_of(i)].into());
            let most: Vec<u128> = here.clone().map(|i| most(i).into()).collect();
            if most.iter().sum::<u128>() <= capacity.into() {
                continue;
            }
            for (instance, share) in here.zip(apportion(capacity, &most)) {
                if share < rows[instance] {
                    let quota = &mut self.0[placement.expert_of(instance)];
                    *quota = (*quota).min(share as u32);
                }
            }
        }
        Ok(self)
    }
}
