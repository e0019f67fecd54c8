//! Greedy replication and packing by longest processing time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Load of each of `replicas` instances of an expert with `load` pairs, in parts of 2^-20 pairs.
pub(super) fn share(load: u32, replicas: u32) -> u64 {
    (u64::from(load) << 20) / u64::from(replicas)
}

/// Experts of each rank, at most `slots[r]` on rank r, for instances that sum to at most the slots.
///
/// Instances go, largest share first, to the rank with the least load that has a free slot and not that expert; a
/// replica for which there is no such rank is left out. Ties to the lower expert and the earlier rank in `order`.
fn pack(per_expert: &[u32], replicas: &[u32], slots: &[usize], order: &[usize]) -> Vec<Vec<u32>> {
    let share = |e: u32| share(per_expert[e as usize], replicas[e as usize]);
    let mut experts: Vec<u32> = (0..per_expert.len() as u32).collect();
    experts.sort_by_key(|&e| Reverse(share(e)));

    let mut by_rank: Vec<Vec<u32>> = slots.iter().map(|&s| Vec::with_capacity(s)).collect();
    let mut open: BinaryHeap<Reverse<(u64, usize, usize)>> = order
        .iter()
        .enumerate()
        .filter(|&(_, &rank)| slots[rank] > 0)
        .map(|(position, &rank)| Reverse((0, position, rank)))
        .collect();
    let mut taken = Vec::new();
    for expert in experts {
        // Equal shares lie together, so the ranks taken out of the heap are those that have this expert.
        taken.extend((0..replicas[expert as usize]).map_while(|_| open.pop()));
        for Reverse((load, position, rank)) in taken.drain(..) {
            by_rank[rank].push(expert);
            if by_rank[rank].len() < slots[rank] {
                open.push(Reverse((load + share(expert), position, rank)));
            }
        }
    }
    by_rank
}

/// [`replicas`] packed, ties to the lower rank.
pub(super) fn pack_replicas(per_expert: &[u32], slots: &[usize]) -> Vec<Vec<u32>> {
    let order: Vec<usize> = (0..slots.len()).collect();
    pack(per_expert, &replicas(per_expert, slots), slots, &order)
}

/// One instance of each expert packed, ties to the rank with the fewest slots; then, if slots differ, to the rank
/// with the most.
pub(super) fn pack_single(per_expert: &[u32], slots: &[usize]) -> Vec<Vec<Vec<u32>>> {
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|&rank| slots[rank]);
    let single = vec![1; per_expert.len()];
    let mut packings = vec![pack(per_expert, &single, slots, &order)];
    if slots.iter().any(|&s| s != slots[0]) {
        order.reverse();
        packings.push(pack(per_expert, &single, slots, &order));
    }
    packings
}

/// An expert that can take another replica; the greatest has the largest load per instance.
#[derive(PartialEq, Eq)]
struct Candidate {
    load: u32,
    replicas: u32,
    expert: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let cross = |a: &Self, b: &Self| u64::from(a.load) * u64::from(b.replicas);
        let by_share = cross(self, other).cmp(&cross(other, self));
        by_share.then(other.expert.cmp(&self.expert))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Instances of each expert: one, and the rest one by one to the expert with the largest load per instance, until the
/// slots are used or no expert with pairs can take more. Ties to the lower expert. No rank has more slots than there are experts.
fn replicas(per_expert: &[u32], slots: &[usize]) -> Vec<u32> {
    let usable = slots.iter().filter(|&&s| s > 0).count() as u32;
    let mut replicas = vec![1; per_expert.len()];
    let mut candidates: BinaryHeap<Candidate> = (0..per_expert.len())
        .map(|expert| Candidate {
            load: per_expert[expert],
            replicas: 1,
            expert,
        })
        .filter(|candidate| candidate.load > 0)
        .collect();
    for _ in per_expert.len()..slots.iter().sum() {
        let Some(mut first) = candidates.pop() else {
            break;
        };
        first.replicas += 1;
        replicas[first.expert] = first.replicas;
        if first.replicas < usable {
            candidates.push(first);
        }
    }
    replicas
}
