//! Plain oracles over all subsets of ranks.

use lrmoe_plan::Placement;

/// Experts all of whose instances lie on ranks of `subset` (a bit mask).
fn confined(placement: &Placement, subset: usize) -> impl Iterator<Item = usize> {
    (0..placement.experts()).filter(move |&expert| {
        (0..placement.ranks())
            .filter(|&rank| placement.local_experts(rank).contains(&(expert as u32)))
            .all(|rank| subset >> rank & 1 == 1)
    })
}

fn confined_load(placement: &Placement, load: &[u32], subset: usize) -> u64 {
    confined(placement, subset)
        .map(|e| u64::from(load[e]))
        .sum()
}

/// Hall's condition: no set of ranks has to take more than it can.
pub(crate) fn routable(placement: &Placement, load: &[u32], capacities: &[u64]) -> bool {
    (0..1usize << placement.ranks()).all(|subset| {
        let room: u64 = (0..placement.ranks())
            .filter(|rank| subset >> rank & 1 == 1)
            .map(|rank| capacities[rank])
            .sum();
        confined_load(placement, load, subset) <= room
    })
}

/// The smallest possible largest rank load.
pub(crate) fn largest_load(placement: &Placement, load: &[u32]) -> u64 {
    (1..1usize << placement.ranks())
        .map(|subset| {
            confined_load(placement, load, subset).div_ceil(u64::from(subset.count_ones()))
        })
        .max()
        .unwrap()
}
