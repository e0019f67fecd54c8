//! Placement policies under one interface.

mod exchange;
mod fixed_replicas;
mod flexmoe;
mod level;
mod lrmoe;
mod near;
mod pack;
mod repair;
mod search;
mod symi;

pub use fixed_replicas::FixedReplicas;
pub use flexmoe::FlexMoe;
pub use lrmoe::Lrmoe;
pub use symi::{Symi, symi_capacity, symi_replicas};

use crate::error::expect;
use crate::{Error, Loads, Placement, Topology};

/// What a [`PlacementPolicy`] decides on.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// The last known loads.
    pub loads: &'a Loads,
    /// Where the experts are now.
    pub previous: &'a Placement,
    /// Instances that each rank can hold, `[ranks]`.
    pub slots: &'a [u32],
    /// The ranks and their nodes.
    pub topology: &'a Topology,
}

impl PlacementRequest<'_> {
    /// Checks that the parts belong together and that the slots hold every expert.
    fn check(&self) -> Result<(), Error> {
        let (ranks, experts) = (self.topology.ranks(), self.loads.experts());
        expect("slots", ranks, self.slots.len())?;
        expect(
            "ranks of the previous placement",
            ranks,
            self.previous.ranks(),
        )?;
        expect(
            "experts of the previous placement",
            experts,
            self.previous.experts(),
        )?;
        enough_slots(experts, self.slots)
    }

    /// Slots of each rank that can be used: at most one for each expert.
    fn usable_slots(&self) -> Vec<usize> {
        let experts = self.loads.experts();
        self.slots
            .iter()
            .map(|&s| experts.min(s as usize))
            .collect()
    }
}

/// Checks that `slots` can hold each of the experts once.
pub(crate) fn enough_slots(experts: usize, slots: &[u32]) -> Result<(), Error> {
    let total = slots.iter().map(|&s| u64::from(s)).sum::<u64>();
    if total < experts as u64 {
        return Err(Error::TooFewSlots {
            slots: total,
            experts,
        });
    }
    Ok(())
}

/// Decides where the experts live in the next step.
pub trait PlacementPolicy: std::fmt::Debug {
    /// The policy's name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Places every expert at least once and at most `slots[r]` experts on rank r. Same request, same placement.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if the parts of the request do not belong together, [`Error::TooFewSlots`] or
    /// [`Error::RankSlots`] if the experts do not fit.
    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error>;
}

/// Experts in contiguous blocks, as even as possible, without replicas.
///
/// Rank r holds experts `r * E / R .. (r + 1) * E / R`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed;

impl Fixed {
    /// The placement, which depends on nothing else.
    ///
    /// # Errors
    ///
    /// [`Error::NoRanks`] or [`Error::NoExperts`] if a number is zero, [`Error::TooManyExperts`].
    pub fn placement(experts: usize, ranks: usize) -> Result<Placement, Error> {
        if experts as u64 > 1 << 32 {
            return Err(Error::TooManyExperts { experts });
        }
        let first = |rank| (rank as u128 * experts as u128 / ranks as u128) as u64;
        let here = |rank| (first(rank)..first(rank + 1)).map(|expert| expert as u32);
        let by_rank = (0..ranks).map(|rank| here(rank).collect());
        Placement::new(experts, by_rank.collect())
    }
}

impl PlacementPolicy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let placement = Self::placement(request.loads.experts(), request.slots.len())?;
        for (rank, &slots) in request.slots.iter().enumerate() {
            let needed = placement.on_rank(rank).len();
            if needed > slots as usize {
                return Err(Error::RankSlots {
                    rank,
                    slots,
                    needed,
                });
            }
        }
        Ok(placement)
    }
}
