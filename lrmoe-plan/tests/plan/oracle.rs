//! Plain oracles over all subsets of ranks.

use lrmoe_plan::Placement;

/// For every subset of ranks (a bit mask) the experts all of whose instances lie on it.
pub(crate) struct Confined {
    ranks: usize,
    experts: Vec<Vec<usize>>,
}

impl Confined {
    pub(crate) fn new(placement: &Placement) -> Self {
        let ranks = placement.ranks();
        let hosts = |expert: usize| -> usize {
            (0..ranks)
                .filter(|&rank| placement.local_experts(rank).contains(&(expert as u32)))
                .map(|rank| 1 << rank)
                .sum()
        };
        let hosts: Vec<usize> = (0..placement.experts()).map(hosts).collect();
        let experts = (0..1usize << ranks)
            .map(|subset| {
                let inside = |&e: &usize| hosts[e] & !subset == 0;
                (0..hosts.len()).filter(inside).collect()
            })
            .collect();
        Self { ranks, experts }
    }

    fn load(&self, load: &[u32], subset: usize) -> u64 {
        self.experts[subset]
            .iter()
            .map(|&e| u64::from(load[e]))
            .sum()
    }

    fn room(&self, capacities: &[u64], subset: usize) -> u64 {
        (0..self.ranks)
            .filter(|rank| subset >> rank & 1 == 1)
            .fold(0, |room, rank| room.saturating_add(capacities[rank]))
    }

    /// Hall's condition: no set of ranks has to take more than it can.
    pub(crate) fn routable(&self, load: &[u32], capacities: &[u64]) -> bool {
        (0..self.experts.len())
            .all(|subset| self.load(load, subset) <= self.room(capacities, subset))
    }

    /// How much of `load` can be routed: the smallest cut.
    pub(crate) fn most(&self, load: &[u32], capacities: &[u64]) -> u64 {
        let all: u64 = load.iter().map(|&n| u64::from(n)).sum();
        let cut = |subset: usize| {
            let outside = all - self.load(load, subset);
            outside.saturating_add(self.room(capacities, subset))
        };
        (0..self.experts.len()).map(cut).min().unwrap()
    }
}

/// Whether `load` can be routed within the capacities.
pub(crate) fn routable(placement: &Placement, load: &[u32], capacities: &[u64]) -> bool {
    Confined::new(placement).routable(load, capacities)
}

/// The smallest possible largest rank load.
pub(crate) fn largest_load(placement: &Placement, load: &[u32]) -> u64 {
    let confined = Confined::new(placement);
    (1..1usize << placement.ranks())
        .map(|subset| {
            confined
                .load(load, subset)
                .div_ceil(u64::from(subset.count_ones()))
        })
        .max()
        .unwrap()
}
