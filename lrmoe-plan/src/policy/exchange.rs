//! Exchanges of instances between a full rank and an open one.

use std::cmp::Reverse;

use crate::flow::{Flow, Instance};
use crate::policy::repair::{Repair, Step, TRIES, slot};

/// Full and open ranks between which exchanges of one instance are looked for; fewer for two.
const RANKS: usize = 16;

/// Instances of a rank up to which pairs of them are formed: with more, single ones do.
const MOST_SINGLES: usize = 64;
/// Exchanges found after which no further ranks are looked at.
const ENOUGH: usize = 40 * TRIES;

/// Up to two experts of a rank, with the pairs that would go with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Set {
    pairs: u64,
    experts: [Option<u32>; 2],
}

impl Set {
    fn len(&self) -> usize {
        self.experts.iter().flatten().count()
    }
}

/// An exchange, the most promising first: what it would let be pushed by the loads of the two ranks alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Exchange {
    gain: Reverse<u64>,
    from: usize,
    to: usize,
    there: Set,
    back: Set,
    /// The expert of `there` also stays, in place of the one given here if there is no free slot.
    stays: Option<Option<u32>>,
}

impl Exchange {
    fn steps(&self) -> Vec<Step> {
        let there = self.there.experts.into_iter().flatten();
        let back = self.back.experts.into_iter().flatten();
        let leave: Vec<u32> = match self.stays {
            Some(evicted) => evicted.into_iter().collect(),
            None => there.clone().collect(),
        };
        let mut steps: Vec<Step> = Vec::with_capacity(8);
        steps.extend(leave.into_iter().map(|e| Step::Remove(self.from, e)));
        steps.extend(back.clone().map(|e| Step::Remove(self.to, e)));
        steps.extend(back.map(|e| Step::Add(self.from, e)));
        steps.extend(there.map(|e| Step::Add(self.to, e)));
        steps
    }
}

impl Repair<'_> {
    /// Exchanges up to `most` instances of a full rank for as many or fewer pairs of an open one.
    pub(super) fn exchange(&mut self, open: &[usize], most: usize) -> bool {
        let ranks = RANKS / most;
        let open = &open[..open.len().min(ranks)];
        let room: u64 = open.iter().map(|&rank| self.flow.room(rank)).sum();
        let mut tries = Vec::new();
        for from in self.full_ranks(ranks) {
            for &to in open {
                if self.flow.work() > self.limit || tries.len() > ENOUGH {
                    break;
                }
                self.between(from, to, room, most, &mut tries);
            }
        }
        if tries.len() > TRIES {
            tries.select_nth_unstable(TRIES);
            tries.truncate(TRIES);
        }
        tries.sort_unstable();
        tries.iter().any(|exchange| self.attempt(&exchange.steps()))
    }

    /// Ranks of the full set, nearest to what is left first.
    fn full_ranks(&self, most: usize) -> Vec<usize> {
        let mut full = Vec::new();
        for &expert in self.flow.full_experts() {
            for instance in self.flow.hosts().of_expert(expert as usize) {
                let rank = instance.rank as usize;
                if !full.contains(&rank) {
                    full.push(rank);
                }
                if full.len() == most {
                    return full;
                }
            }
        }
        full
    }

    /// Collects exchanges between two ranks.
    ///
    /// If d more pairs go than come back, min(d, left) are pushed that were not, and d - room no longer are. So all
    /// d between the two are as good; for each set that may go, the two sets around that to come back are taken.
    fn between(
        &mut self,
        from: usize,
        to: usize,
        room: u64,
        most: usize,
        tries: &mut Vec<Exchange>,
    ) {
        let flow = &*self.flow;
        let on_from = flow.hosts().on_rank(from).iter();
        let left: u64 = on_from.map(|here| flow.left(here.expert as usize)).sum();
        let left = if left > 0 { left } else { flow.total_left() };
        let room = if flow.room(to) > 0 {
            flow.room(to)
        } else {
            room
        };
        let spare = slot(flow, self.per_expert, from);

        let there = sets(flow, from, to, most);
        let back = sets(flow, to, from, most);
        let mut by_len: [Vec<Set>; 3] = Default::default();
        for set in back {
            by_len[set.len()].push(set);
        }
        by_len.iter_mut().for_each(|sets| sets.sort_unstable());
        let free = |rank| flow.hosts().free(rank);
        for &there in &there {
            for (len, back) in by_len.iter().enumerate() {
                let single = there.len() == 1 && len == 1;
                let stays = spare.filter(|&evicted| single && evicted != there.experts[0]);
                let fits = len <= there.len() + free(from) && there.len() <= len + free(to);
                if !fits && stays.is_none() {
                    continue;
                }
                let most_back = there.pairs.saturating_sub(left.min(room));
                let above = back.partition_point(|set| set.pairs <= most_back);
                for &back in &back[above.saturating_sub(1)..back.len().min(above + 1)] {
                    let more = there.pairs.saturating_sub(back.pairs);
                    let lost = if stays.is_some() {
                        0
                    } else {
                        more.saturating_sub(room)
                    };
                    let gain = more.min(left).saturating_sub(lost);
                    if gain > 0 {
                        tries.push(Exchange {
                            gain: Reverse(gain),
                            from,
                            to,
                            there,
                            back,
                            stays,
                        });
                    }
                }
            }
        }
        let back: usize = by_len.iter().map(Vec::len).sum();
        let steps = 16 * there.len() + 8 * back;
        self.flow.count_work(steps as u64);
    }
}

/// Sets of up to `most` experts of `rank` that `other` lacks.
fn sets(flow: &Flow, rank: usize, other: usize, most: usize) -> Vec<Set> {
    let single = |here: &Instance| Set {
        pairs: here.amount + flow.left(here.expert as usize),
        experts: [Some(here.expert), None],
    };
    let here = flow.hosts().on_rank(rank).iter();
    let mut sets: Vec<Set> = here
        .filter(|here| !flow.hosts().hosts(other, here.expert))
        .map(single)
        .collect();
    let singles = sets.len();
    if most > 1 && singles <= MOST_SINGLES {
        for second in 1..singles {
            for first in 0..second {
                sets.push(Set {
                    pairs: sets[first].pairs + sets[second].pairs,
                    experts: [sets[first].experts[0], sets[second].experts[0]],
                });
            }
        }
    }
    sets.push(Set {
        pairs: 0,
        experts: [None; 2],
    });
    sets
}
