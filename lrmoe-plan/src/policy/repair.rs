//! Changes of a placement that let every rank stay within a level.

use std::cmp::Reverse;

use crate::flow::Flow;
use crate::policy::near::Near;

/// Changes of one kind tried in a row.
pub(super) const TRIES: usize = 16;
/// Ranks with the least left to do that are looked at for additions.
const RANKS: usize = 16;

/// One step of a change: an expert comes to a rank or leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Add(usize, u32),
    Remove(usize, u32),
}

/// A placement being changed, with a flow that pushes as much as it can.
///
/// What cannot be pushed lies with the experts of a full set, see [`Flow::full_experts`]. More can be pushed
/// only if one of them gets an instance on an open rank: one that has room, or whose pairs can go to one that has.
#[derive(Debug)]
pub(super) struct Repair<'a> {
    pub(super) flow: &'a mut Flow,
    pub(super) per_expert: &'a [u32],
    pub(super) near: &'a Near<'a>,
    /// Work of the flow at which to give up.
    pub(super) limit: u64,
}

impl Repair<'_> {
    /// Adds, replaces and exchanges instances until all pairs fit into `level` on each rank; whether they do.
    ///
    /// Every change lets more pairs be pushed.
    pub(super) fn reach(mut self, level: u64) -> bool {
        self.flow.fill(self.per_expert, level);
        while !self.flow.is_settled() {
            if self.flow.work() > self.limit {
                return false;
            }
            if self.add_directly() {
                self.flow.settle();
                continue;
            }
            let open = self.open_ranks();
            let changed = self.add(&open)
                || self.exchange(&open, 1)
                || self.replace(&open)
                || self.exchange(&open, 2);
            if !changed {
                return false;
            }
        }
        true
    }

    /// Adds instances of experts that have pairs left to ranks that have room.
    ///
    /// An expert goes where it takes most; among equals to the node with most of its pairs that are not served
    /// there, then to the rank with most room.
    fn add_directly(&mut self) -> bool {
        let flow = &mut *self.flow;
        let usable =
            |flow: &Flow, rank| flow.room(rank) > 0 && slot(flow, self.per_expert, rank).is_some();
        let mut open: Vec<usize> = (0..flow.hosts().ranks())
            .filter(|&rank| usable(flow, rank))
            .collect();
        if open.is_empty() {
            return false;
        }
        let mut experts: Vec<u32> = (0..self.per_expert.len() as u32)
            .filter(|&e| flow.left(e as usize) > 0)
            .collect();
        experts.sort_by_key(|&e| Reverse(flow.left(e as usize)));
        let mut added = false;
        for expert in experts {
            let mut unserved = self.near.unserved(flow.hosts(), expert);
            while flow.left(expert as usize) > 0 {
                let left = flow.left(expert as usize);
                flow.count_work(open.len() as u64);
                let best = (0..open.len()).max_by_key(|&i| {
                    let (rank, room) = (open[i], flow.room(open[i]));
                    let taken = left.min(room);
                    let here = unserved.get(self.near.node_of(rank));
                    let served = here.map_or(0, |&here| here.min(taken));
                    (taken, served, room, Reverse(rank))
                });
                let Some(rank) = best.map(|i| open.swap_remove(i)) else {
                    break;
                };
                let Some(evicted) = slot(flow, self.per_expert, rank) else {
                    continue;
                };
                if let Some(evicted) = evicted {
                    flow.remove(rank, evicted);
                }
                flow.add(rank, expert);
                added = true;
                if let Some(here) = unserved.get_mut(self.near.node_of(rank)) {
                    *here = here.saturating_sub(left - flow.left(expert as usize));
                }
                if usable(flow, rank) {
                    open.push(rank);
                }
            }
        }
        added
    }

    /// Open ranks, those with most room first, then by the distance from them.
    fn open_ranks(&mut self) -> Vec<usize> {
        let hosts = self.flow.hosts();
        let has_room = |&rank: &usize| self.flow.room(rank) > 0 && hosts.slots(rank) > 0;
        let mut open: Vec<usize> = (0..hosts.ranks()).filter(has_room).collect();
        open.sort_by_key(|&rank| Reverse(self.flow.room(rank)));
        let mut seen = vec![false; hosts.ranks()];
        open.iter().for_each(|&rank| seen[rank] = true);
        let mut done = 0;
        let mut steps = 0;
        while let Some(&rank) = open.get(done) {
            done += 1;
            for here in hosts.on_rank(rank) {
                for other in hosts.of_expert(here.expert as usize) {
                    steps += 1;
                    if other.amount > 0 && !seen[other.rank as usize] {
                        seen[other.rank as usize] = true;
                        open.push(other.rank as usize);
                    }
                }
            }
        }
        self.flow.count_work(steps);
        open
    }

    /// Experts of the full set by falling load.
    fn full_experts(&self) -> Vec<u32> {
        let mut experts = self.flow.full_experts().to_vec();
        experts.sort_by_key(|&e| (Reverse(self.per_expert[e as usize]), e));
        experts
    }

    /// Adds a full expert to an open rank.
    fn add(&mut self, open: &[usize]) -> bool {
        let experts = self.full_experts();
        let mut tries = Vec::new();
        for &rank in open {
            let Some(evicted) = slot(self.flow, self.per_expert, rank) else {
                continue;
            };
            let hosts = self.flow.hosts();
            let absent = experts.iter().filter(|&&e| !hosts.hosts(rank, e));
            tries.extend(absent.take(2).map(|&e| (rank, e, evicted)));
            if tries.len() >= TRIES {
                break;
            }
        }
        tries.into_iter().any(|(rank, expert, evicted)| {
            let evict = evicted.map(|e| Step::Remove(rank, e));
            let steps: Vec<Step> = evict.into_iter().chain([Step::Add(rank, expert)]).collect();
            self.attempt(&steps)
        })
    }

    /// Adds a full expert to an open rank in place of one that has other instances or can move to a free slot.
    fn replace(&mut self, open: &[usize]) -> bool {
        let hosts = self.flow.hosts();
        let experts = self.full_experts();
        let mut free: Vec<usize> = (0..hosts.ranks())
            .filter(|&rank| hosts.free(rank) > 0)
            .collect();
        free.sort_by_key(|&rank| Reverse(self.flow.room(rank)));
        let mut tries = Vec::new();
        for &rank in open.iter().take(RANKS) {
            for out in hosts.on_rank(rank) {
                let mut absent = free.iter().filter(|&&r| !hosts.hosts(r, out.expert));
                let to = match hosts.count(out.expert as usize) {
                    1 => absent.next(),
                    _ => None,
                };
                if hosts.count(out.expert as usize) > 1 || to.is_some() {
                    let moved = to.map(|&to| Step::Add(to, out.expert));
                    let absent = experts.iter().filter(|&&e| !hosts.hosts(rank, e));
                    let change = |&e| (out.amount, rank, out.expert, moved, e);
                    tries.extend(absent.take(2).map(change));
                }
            }
        }
        tries.sort_by_key(|&(amount, ..)| amount);
        tries.truncate(TRIES);
        tries.into_iter().any(|(_, rank, out, moved, expert)| {
            let mut steps = vec![Step::Remove(rank, out)];
            steps.extend(moved);
            steps.push(Step::Add(rank, expert));
            self.attempt(&steps)
        })
    }

    /// Makes a change if more can be pushed after it.
    pub(super) fn attempt(&mut self, steps: &[Step]) -> bool {
        if self.flow.work() > self.limit {
            return false;
        }
        let before = self.flow.total_left();
        for &step in steps {
            self.take(step);
        }
        self.flow.settle();
        if self.flow.total_left() < before {
            return true;
        }
        for &step in steps.iter().rev() {
            self.take(match step {
                Step::Add(rank, expert) => Step::Remove(rank, expert),
                Step::Remove(rank, expert) => Step::Add(rank, expert),
            });
        }
        self.flow.settle();
        false
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Add(rank, expert) => self.flow.add(rank, expert),
            Step::Remove(rank, expert) => self.flow.remove(rank, expert),
        }
    }
}

/// A slot of `rank` for another expert: a free one, or that of an expert that has other instances and no pairs
/// here, the one with the smallest load.
pub(super) fn slot(flow: &Flow, per_expert: &[u32], rank: usize) -> Option<Option<u32>> {
    let hosts = flow.hosts();
    if hosts.free(rank) > 0 {
        return Some(None);
    }
    let idle = hosts
        .on_rank(rank)
        .iter()
        .filter(|here| here.amount == 0 && hosts.count(here.expert as usize) > 1);
    let least = idle.min_by_key(|here| (per_expert[here.expert as usize], here.expert));
    least.map(|here| Some(here.expert))
}
