//! Plain oracles: over all subsets of ranks, and greedy replication.

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
