//! Local search for a smaller largest rank load.

use std::cmp::Reverse;

use crate::Topology;
use crate::flow::{Balance, balance, fits, mean_load};

/// Improvements applied at most; a placement by [`super::pack`] needs a few.
const ROUNDS: usize = 64;
/// Changes of one kind tried per round.
const TRIES: usize = 128;

/// What a search needs to know besides the placement.
#[derive(Clone, Copy)]
pub(super) struct Search<'a> {
    pub(super) per_expert: &'a [u32],
    pub(super) slots: &'a [usize],
    pub(super) topology: &'a Topology,
}

/// Expert `expert` comes to rank `to`, in place of `evicted` if given; with `from` the two change places.
#[derive(Clone, Copy)]
struct Change {
    expert: u32,
    to: usize,
    evicted: Option<u32>,
    from: Option<usize>,
}

impl Change {
    fn apply(self, by_rank: &mut [Vec<u32>]) {
        by_rank[self.to].retain(|&e| Some(e) != self.evicted);
        by_rank[self.to].push(self.expert);
        if let Some(from) = self.from {
            by_rank[from].retain(|&e| e != self.expert);
            by_rank[from].extend(self.evicted);
        }
    }
}

impl Search<'_> {
    /// Changes the placement while its largest rank load falls; returns that load.
    pub(super) fn improve(self, by_rank: &mut Vec<Vec<u32>>) -> u64 {
        let mut state = balance(self.per_expert, by_rank);
        for _ in 0..ROUNDS {
            let kinds = self.changes(by_rank, &state);
            let best = kinds
                .iter()
                .find_map(|changes| self.best(by_rank, state.largest, changes));
            let Some((balance, changed)) = best else {
                break;
            };
            state = balance;
            *by_rank = changed;
        }
        state.largest
    }

    /// The change that takes the largest rank load furthest below `largest`, if any does; the first of equals.
    fn best(
        self,
        by_rank: &[Vec<u32>],
        mut largest: u64,
        changes: &[Change],
    ) -> Option<(Balance, Vec<Vec<u32>>)> {
        let mean = mean_load(self.per_expert, by_rank.len());
        let mut best = None;
        for change in changes.iter().take(TRIES) {
            if largest == mean {
                break;
            }
            let mut changed = by_rank.to_vec();
            change.apply(&mut changed);
            if fits(self.per_expert, &changed, &vec![largest - 1; changed.len()]) {
                let balance = balance(self.per_expert, &changed);
                largest = balance.largest;
                best = Some((balance, changed));
            }
        }
        best
    }

    /// Changes that may help, the most promising first: into free slots, in place of an expert with another
    /// instance, by exchange.
    ///
    /// The largest rank load can only fall if an expert of the binding set gets an instance on a rank outside
    /// of the set's ranks.
    fn changes(self, by_rank: &[Vec<u32>], state: &Balance) -> [Vec<Change>; 3] {
        let (mut add, mut replace, mut exchange) = (Vec::new(), Vec::new(), Vec::new());
        let Some((inside, hosts)) = &state.binding else {
            return [add, replace, exchange];
        };
        let ranks_of = |e: u32| (0..by_rank.len()).filter(move |&r| by_rank[r].contains(&e));
        let load = |e: u32| self.per_expert[e as usize];
        let mut experts: Vec<u32> = (0..inside.len() as u32).collect();
        experts.retain(|&e| inside[e as usize] && load(e) > 0);
        experts.sort_by_key(|&e| Reverse(load(e)));

        for &expert in &experts {
            let nodes: Vec<usize> = ranks_of(expert).map(|r| self.topology.node_of(r)).collect();
            let mut outside: Vec<usize> = (0..by_rank.len()).filter(|&r| !hosts[r]).collect();
            outside.sort_by_key(|&r| {
                let near = nodes.contains(&self.topology.node_of(r));
                (state.rank_loads[r], near)
            });
            for to in outside {
                let change = Change {
                    expert,
                    to,
                    evicted: None,
                    from: None,
                };
                if by_rank[to].len() < self.slots[to] {
                    add.push(change);
                }
                let mut here = by_rank[to].clone();
                here.sort_by_key(|&e| (load(e), e));
                for e in here {
                    let change = Change {
                        evicted: Some(e),
                        ..change
                    };
                    if ranks_of(e).count() > 1 {
                        replace.push(change);
                    }
                    exchange.extend(
                        ranks_of(expert)
                            .filter(|&from| !by_rank[from].contains(&e))
                            .map(|from| Change {
                                from: Some(from),
                                ..change
                            }),
                    );
                }
            }
        }
        [add, replace, exchange]
    }

    /// Removes instances that `previous` does not have while the largest rank load stays within `largest`.
    pub(super) fn prune(self, by_rank: &mut [Vec<u32>], previous: &[Vec<u32>], largest: u64) {
        let capacities = vec![largest; by_rank.len()];
        for (rank, before) in previous.iter().enumerate() {
            for expert in by_rank[rank].clone() {
                let instances = by_rank.iter().filter(|here| here.contains(&expert)).count();
                if instances == 1 || before.contains(&expert) {
                    continue;
                }
                by_rank[rank].retain(|&e| e != expert);
                if !fits(self.per_expert, by_rank, &capacities) {
                    by_rank[rank].push(expert);
                }
            }
        }
    }

    /// Renumbers ranks with equally many slots so that many instances stay where `previous` has them.
    pub(super) fn align(self, by_rank: Vec<Vec<u32>>, previous: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let ranks = by_rank.len();
        let mut pairs: Vec<(usize, usize, usize)> = (0..ranks)
            .flat_map(|new| (0..ranks).map(move |old| (new, old)))
            .filter(|&(new, old)| self.slots[new] == self.slots[old])
            .map(|(new, old)| {
                let kept = by_rank[new].iter().filter(|e| previous[old].contains(e));
                (kept.count(), new, old)
            })
            .collect();
        pairs.sort_by_key(|&(kept, new, old)| (Reverse(kept), new, old));
        let mut by_rank: Vec<Option<Vec<u32>>> = by_rank.into_iter().map(Some).collect();
        let mut aligned: Vec<Option<Vec<u32>>> = vec![None; ranks];
        for (_, new, old) in pairs {
            if aligned[old].is_none() {
                aligned[old] = by_rank[new].take();
            }
        }
        aligned.into_iter().map(Option::unwrap_or_default).collect()
    }
}
