//! Greedy replication and packing by longest processing time.

use std::cmp::Reverse;

/// Experts of each rank, at most `slots[r]` on rank r and every expert at least once.
///
/// Replicas go one by one to the expert with the largest load per instance, until the slots are used or no
/// expert with pairs can take more. Then instances go, largest share first, to the rank with the least load
/// that has a free slot and not that expert; a replica for which there is no such rank is left out. Ties to the
/// lower expert and rank. The slots of all ranks are at least the experts.
pub(super) fn pack(per_expert: &[u32], slots: &[usize]) -> Vec<Vec<u32>> {
    let replicas = replicas(per_expert, slots);
    let mut shares: Vec<(f64, u32)> = Vec::new();
    for (expert, (&load, &r)) in per_expert.iter().zip(&replicas).enumerate() {
        shares.extend((0..r).map(|_| (f64::from(load) / f64::from(r), expert as u32)));
    }
    shares.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));

    let mut by_rank = vec![Vec::new(); slots.len()];
    let mut rank_loads = vec![0.0; slots.len()];
    for (share, expert) in shares {
        let open = (0..slots.len())
            .filter(|&r| by_rank[r].len() < slots[r] && !by_rank[r].contains(&expert))
            .min_by(|&a, &b| f64::total_cmp(&rank_loads[a], &rank_loads[b]));
        if let Some(rank) = open {
            by_rank[rank].push(expert);
            rank_loads[rank] += share;
        }
    }
    by_rank
}

fn replicas(per_expert: &[u32], slots: &[usize]) -> Vec<u32> {
    let usable = slots.iter().filter(|&&s| s > 0).count() as u32;
    let mut free = slots.iter().sum::<usize>() - per_expert.len();
    let mut replicas = vec![1; per_expert.len()];
    while free > 0 {
        let largest = (0..per_expert.len())
            .filter(|&e| replicas[e] < usable && per_expert[e] > 0)
            .max_by(|&a, &b| {
                let cross =
                    |e: usize, other: usize| u64::from(per_expert[e]) * u64::from(replicas[other]);
                cross(a, b)
                    .cmp(&cross(b, a))
                    .then(Reverse(a).cmp(&Reverse(b)))
            });
        let Some(expert) = largest else { break };
        replicas[expert] += 1;
        free -= 1;
    }
    replicas
}
