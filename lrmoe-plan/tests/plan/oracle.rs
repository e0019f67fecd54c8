//! Plain oracles: over all subsets of ranks, and greedy replication.

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

/// Greedy replication by load per replica, then longest processing time first.
pub(crate) fn greedy(loads: &[u32], slots: &[u32]) -> Placement {
    let slots: Vec<usize> = slots.iter().map(|&s| loads.len().min(s as usize)).collect();
    let usable = slots.iter().filter(|&&s| s > 0).count();
    let mut replicas = vec![1; loads.len()];
    let share = |replicas: &[usize], e: usize| f64::from(loads[e]) / replicas[e] as f64;
    while replicas.iter().sum::<usize>() < slots.iter().sum() {
        let mut best: Option<usize> = None;
        for e in 0..loads.len() {
            let better = |b| share(&replicas, e) > share(&replicas, b);
            if loads[e] > 0 && replicas[e] < usable && best.is_none_or(better) {
                best = Some(e);
            }
        }
        match best {
            Some(e) => replicas[e] += 1,
            None => break,
        }
    }
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by(|&a, &b| share(&replicas, b).total_cmp(&share(&replicas, a)));
    let mut by_rank = vec![Vec::new(); slots.len()];
    let mut rank_loads = vec![0.0; slots.len()];
    for expert in order {
        for _ in 0..replicas[expert] {
            let mut best: Option<usize> = None;
            for rank in 0..slots.len() {
                let open =
                    by_rank[rank].len() < slots[rank] && !by_rank[rank].contains(&(expert as u32));
                if open && best.is_none_or(|b| rank_loads[rank] < rank_loads[b]) {
                    best = Some(rank);
                }
            }
            if let Some(rank) = best {
                by_rank[rank].push(expert as u32);
                rank_loads[rank] += share(&replicas, expert);
            }
        }
    }
    Placement::new(loads.len(), by_rank).unwrap()
}
