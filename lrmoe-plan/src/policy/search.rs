//! The smallest level that changes of a placement reach.

use crate::flow::{Flow, mean_load};
use crate::policy::near::Near;
use crate::policy::repair::Repair;

/// What a search needs to know besides the placement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search<'a> {
    pub(super) per_expert: &'a [u32],
    pub(super) slots: &'a [usize],
    pub(super) near: &'a Near<'a>,
    /// No placement within the slots has a smaller largest rank load, see [`least_load`].
    pub(super) least: u64,
}

/// A placement and where it came from.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) largest: u64,
    pub(super) flow: Flow,
    /// Index of the start that was changed.
    pub(super) start: usize,
}

impl Search<'_> {
    /// Work of all searches of one placement: bounds its time. Small worlds are searched more often; that takes
    /// little time even so.
    fn work(&self) -> u64 {
        let slots = self.slots.iter().sum::<usize>() as u64;
        (1 << 21) / (slots * slots) + slots * self.slots.len() as u64 / 2
    }

    /// Work for reaching the least load by changes of the previous placement: less, if with few slots to spare more
    /// searches may have to follow.
    pub(super) fn work_to_reach_least(&self) -> u64 {
        let spare = self.slots.iter().sum::<usize>() - self.per_expert.len();
        if spare + 1 >= self.slots.len() {
            self.work() * 3 / 2
        } else {
            self.work() / 2
        }
    }

    /// Changes `flow` until every rank stays within `level`; whether that succeeds within `work`.
    pub(super) fn reach(&self, flow: &mut Flow, level: u64, work: u64) -> bool {
        let repair = Repair {
            limit: flow.work() + work,
            flow,
            per_expert: self.per_expert,
            near: self.near,
        };
        repair.reach(level)
    }

    /// The best placement that changes of the `starts` find: by bisection of the level for each start, then by taking
    /// out one replica of the best. Of equals the one from the first start, which is tried hardest.
    pub(super) fn descend(&self, starts: Vec<Flow>) -> Option<Found> {
        let work = self.work() / (starts.len() as u64 + 1);
        let starts = starts
            .into_iter()
            .enumerate()
            .map(|(start, mut flow)| Found {
                largest: flow.balance(self.per_expert, self.least),
                flow,
                start,
            });
        let starts: Vec<Found> = starts.collect();
        let mut best = starts.iter().min_by_key(|found| found.largest)?.clone();
        for start in starts {
            self.bisect(start, &mut best, work);
        }
        let end = best.flow.work() + work;
        while best.largest > self.least && self.without_one(&mut best, end) {}
        Some(best)
    }

    /// Improves on `best` by changes of `start`, to within 1 / 256 of a level that these do not reach.
    fn bisect(&self, mut start: Found, best: &mut Found, work: u64) {
        let end = start.flow.work() + work;
        if start.start == 0 && start.largest > best.largest {
            self.change(&mut start, best.largest, end, best);
        }
        let mut low = self.least;
        while low + (low >> 8) < best.largest && start.flow.work() < end {
            let middle = low.midpoint(best.largest);
            if !self.change(&mut start, middle, end, best) {
                low = middle + 1;
            }
        }
    }

    /// Changes `start` until every rank stays within `level`. If that succeeds it is the best.
    fn change(&self, start: &mut Found, level: u64, end: u64, best: &mut Found) -> bool {
        let mut flow = start.flow.clone();
        let before = flow.work();
        if self.reach(&mut flow, level, end - before) {
            *start = Found {
                largest: flow.balance(self.per_expert, self.least),
                flow,
                start: start.start,
            };
            *best = start.clone();
            return true;
        }
        start.flow.count_work(flow.work() - before);
        false
    }

    /// Improves on `best` by changes after one of its replicas is taken out; whether that succeeds.
    fn without_one(&self, best: &mut Found, end: u64) -> bool {
        let hosts = best.flow.hosts();
        let of_rank = |rank| hosts.on_rank(rank).iter().map(move |i| (rank, i.expert));
        let instances = (0..hosts.ranks()).flat_map(of_rank);
        let replicas = instances.filter(|&(_, e)| hosts.count(e as usize) > 1);
        for (rank, expert) in replicas.collect::<Vec<_>>() {
            let mut flow = best.flow.clone();
            flow.remove(rank, expert);
            let mut changed = Found { flow, ..*best };
            if best.flow.work() >= end || self.change(&mut changed, best.largest - 1, end, best) {
                return best.flow.work() < end;
            }
            best.flow.count_work(changed.flow.work() - best.flow.work());
        }
        false
    }
}

/// A lower bound of the largest rank load of all placements within `slots`: the mean over the ranks with slots, and
/// what an expert needs that can have only as many instances as there are slots beyond one for each expert. If
/// there is none, all slots are in use, so that expert has others beside it.
pub(super) fn least_load(per_expert: &[u32], slots: &[usize]) -> u64 {
    let usable = slots.iter().filter(|&&s| s > 0).count();
    let spare = slots.iter().sum::<usize>() - per_expert.len();
    let hottest = per_expert.iter().copied().max().unwrap_or_default();
    let mut alone = u64::from(hottest).div_ceil(usable.min(spare + 1) as u64);
    if spare == 0 {
        let beside = slots.iter().copied().filter(|&s| s > 0).min().unwrap_or(1) - 1;
        let mut loads = per_expert.to_vec();
        loads.sort_unstable();
        alone += loads[..beside].iter().map(|&n| u64::from(n)).sum::<u64>();
    }
    alone.max(mean_load(per_expert, usable))
}

#[cfg(test)]
mod tests {
    use super::least_load;

    #[test]
    fn bounds_by_hand() {
        // The mean over the ranks with slots.
        assert_eq!(least_load(&[5, 5, 4], &[3, 0, 3]), 7);
        // One slot beyond one for each expert: two instances of the hottest.
        assert_eq!(least_load(&[90, 1, 1], &[2, 1, 1]), 45);
        // None: it lies alone, or beside the smallest of a rank with as few slots as there are.
        assert_eq!(least_load(&[90, 1, 2], &[2, 1, 0]), 90);
        assert_eq!(least_load(&[90, 1, 2, 3], &[2, 0, 2]), 91);
    }
}
