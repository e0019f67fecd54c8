use std::cmp::Reverse;

use crate::policy::pack::{pack_replicas, share};
use crate::policy::{PlacementPolicy, PlacementRequest};
use crate::{Error, Placement};

/// The FlexMoE policy, re-derived from the paper's idea: expand, shrink and migrate instances while the cost falls.
///
/// Taken from the paper (Nie et al. 2023): the three operations; that all instances of an expert get equal shares of
/// its pairs; that the hottest expert is expanded and the coldest shrunk together, as a greedy that ends
/// when the modelled cost no longer falls; migration of what can be neither. Ours are the cost, the largest rank
/// load and then how many ranks bear it, and the details:
///
/// - hottest is the expert with the largest load per instance; its new instance goes to the least loaded rank that
///   lacks it and has a free slot or, failing that, to the place of the coldest instance: of the expert with
///   another instance whose load per instance would be smallest after the loss;
/// - where that gains nothing, an instance of the most loaded rank moves to a free slot of the least loaded one or
///   changes places with an instance there, whichever evens the two most.
///
/// At most one operation for each slot, so that a step has a bound. It starts from the previous placement, or from
/// greedy packing if that does not fit into the slots.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlexMoe;

impl PlacementPolicy for FlexMoe {
    fn name(&self) -> &'static str {
        "flexmoe"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let slots = request.usable_slots();
        let mut by_rank = request.previous.by_rank();
        if by_rank.iter().zip(&slots).any(|(here, &s)| here.len() > s) {
            by_rank = pack_replicas(request.loads.per_expert(), &slots);
        }
        let operations = slots.iter().sum();
        let mut state = State::new(request.loads.per_expert(), slots, by_rank);
        for _ in 0..operations {
            if !(state.expand() || state.migrate()) {
                break;
            }
        }
        Placement::new(request.loads.experts(), state.by_rank)
    }
}

struct State<'a> {
    per_expert: &'a [u32],
    slots: Vec<usize>,
    by_rank: Vec<Vec<u32>>,
    replicas: Vec<u32>,
    /// Loads of the ranks at equal shares, in the units of [`share`].
    rank_loads: Vec<u64>,
}

impl<'a> State<'a> {
    fn new(per_expert: &'a [u32], slots: Vec<usize>, by_rank: Vec<Vec<u32>>) -> Self {
        let mut replicas = vec![0; per_expert.len()];
        for &e in by_rank.iter().flatten() {
            replicas[e as usize] += 1;
        }
        let mut state = Self {
            per_expert,
            slots,
            by_rank,
            replicas,
            rank_loads: Vec::new(),
        };
        state.rank_loads = state.loads();
        state
    }

    fn share(&self, expert: u32) -> u64 {
        share(
            self.per_expert[expert as usize],
            self.replicas[expert as usize],
        )
    }

    fn loads(&self) -> Vec<u64> {
        let load = |here: &Vec<u32>| here.iter().map(|&e| self.share(e)).sum();
        self.by_rank.iter().map(load).collect()
    }

    /// The largest rank load and how many ranks bear it.
    fn cost(&self) -> (u64, usize) {
        let largest = self.rank_loads.iter().copied().max().unwrap_or_default();
        let bearing = self.rank_loads.iter().filter(|&&l| l == largest);
        (largest, bearing.count())
    }

    /// Exchanges `out` for `into` on a rank, either of which may be nothing.
    fn exchange(&mut self, rank: usize, out: Option<u32>, into: Option<u32>) {
        if let Some(out) = out {
            self.by_rank[rank].retain(|&e| e != out);
            self.replicas[out as usize] -= 1;
        }
        if let Some(into) = into {
            self.by_rank[rank].push(into);
            self.replicas[into as usize] += 1;
        }
    }

    /// Makes the exchanges if the cost falls.
    fn attempt(&mut self, exchanges: &[(usize, Option<u32>, Option<u32>)]) -> bool {
        let before = self.cost();
        for &(rank, out, into) in exchanges {
            self.exchange(rank, out, into);
        }
        let loads = self.loads();
        let loads_before = std::mem::replace(&mut self.rank_loads, loads);
        if self.cost() < before {
            return true;
        }
        self.rank_loads = loads_before;
        for &(rank, out, into) in exchanges {
            self.exchange(rank, into, out);
        }
        false
    }

    /// Gives the hottest expert an instance, at the cost of the coldest if there is no free slot.
    fn expand(&mut self) -> bool {
        let experts = 0..self.per_expert.len() as u32;
        let Some(hot) = experts.max_by_key(|&e| (self.share(e), Reverse(e))) else {
            return false;
        };
        let lacking = (0..self.slots.len()).filter(|&r| !self.by_rank[r].contains(&hot));
        let free = lacking
            .clone()
            .filter(|&r| self.by_rank[r].len() < self.slots[r]);
        if let Some(rank) = free.min_by_key(|&r| self.rank_loads[r]) {
            return self.attempt(&[(rank, None, Some(hot))]);
        }
        let instances = lacking.flat_map(|r| self.by_rank[r].iter().map(move |&e| (r, e)));
        let coldest = instances
            .filter(|&(_, e)| self.replicas[e as usize] > 1)
            .min_by_key(|&(rank, e)| {
                let remaining = self.replicas[e as usize] - 1;
                let after = share(self.per_expert[e as usize], remaining);
                (after, e, self.rank_loads[rank], rank)
            });
        coldest.is_some_and(|(rank, cold)| self.attempt(&[(rank, Some(cold), Some(hot))]))
    }

    /// Moves an instance of the most loaded rank to the least loaded one, or exchanges two.
    fn migrate(&mut self) -> bool {
        let ranks = (0..self.slots.len()).filter(|&r| self.slots[r] > 0);
        let Some(from) = ranks
            .clone()
            .max_by_key(|&r| (self.rank_loads[r], Reverse(r)))
        else {
            return false;
        };
        let Some(to) = ranks.min_by_key(|&r| (self.rank_loads[r], r)) else {
            return false;
        };
        let free = self.by_rank[to].len() < self.slots[to];
        let back = self.by_rank[to]
            .iter()
            .copied()
            .filter(|e| !self.by_rank[from].contains(e));
        let back: Vec<Option<u32>> = back.map(Some).chain(free.then_some(None)).collect();
        let there = self.by_rank[from]
            .iter()
            .filter(|e| !self.by_rank[to].contains(e));
        let pairs = there.flat_map(|&x| back.iter().map(move |&y| (x, y)));
        let best = pairs.min_by_key(|&(x, y)| {
            let moved = self.share(x).saturating_sub(y.map_or(0, |y| self.share(y)));
            let larger = (self.rank_loads[from] - moved).max(self.rank_loads[to] + moved);
            (larger, x, y)
        });
        best.is_some_and(|(x, y)| self.attempt(&[(from, Some(x), y), (to, y, Some(x))]))
    }
}
