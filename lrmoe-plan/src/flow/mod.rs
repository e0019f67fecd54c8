//! Maximum flow from experts to the ranks that host them, within rank capacities.

mod hosts;
mod search;
mod within;

use crate::Placement;
pub(crate) use hosts::{Hosts, Instance, NONE};
use search::Search;

/// A feasible flow, grown by augmenting paths.
///
/// What an expert has pushed is moved between ranks to make room for others. When nothing more fits, the experts
/// that have something left and all that these could push aside are a minimum cut with their ranks.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    hosts: Hosts,
    /// What each rank can still take.
    room: Vec<u64>,
    /// What each expert still has to push.
    left: Vec<u64>,
    search: Search,
    /// Steps of searches so far.
    work: u64,
}

impl Flow {
    /// No capacities yet, over a placement within `slots`.
    pub(crate) fn of(placement: &Placement, slots: impl Iterator<Item = usize>) -> Self {
        let by_rank = (0..placement.ranks()).map(|rank| placement.local_experts(rank));
        Self::on(placement.experts(), slots, by_rank)
    }

    /// No capacities yet, over the experts of each rank within `slots`.
    pub(crate) fn on<'a>(
        experts: usize,
        slots: impl Iterator<Item = usize>,
        by_rank: impl Iterator<Item = &'a [u32]>,
    ) -> Self {
        let mut hosts = Hosts::new(experts, slots);
        for (rank, here) in by_rank.enumerate() {
            for &expert in here {
                hosts.add(rank, expert);
            }
        }
        Self {
            room: vec![0; hosts.ranks()],
            left: vec![0; experts],
            search: Search::new(experts, hosts.ranks()),
            work: 0,
            hosts,
        }
    }

    /// Starts anew with `capacity` on every rank and pushes as much of `per_expert` as there is room for.
    pub(crate) fn fill(&mut self, per_expert: &[u32], capacity: u64) {
        self.room.fill(capacity);
        self.refill(per_expert);
    }

    /// Takes all flow back and pushes as much of `per_expert` as there is room for.
    fn refill(&mut self, per_expert: &[u32]) {
        for rank in 0..self.hosts.ranks() {
            for instance in self.hosts.on_rank_mut(rank) {
                instance.amount = 0;
            }
        }
        self.work += (self.hosts.total_slots() + self.hosts.experts()) as u64;
        for (left, &load) in self.left.iter_mut().zip(per_expert) {
            *left = load.into();
        }
        // Those without a choice first.
        for single in [true, false] {
            for expert in 0..self.hosts.experts() {
                if (self.hosts.count(expert) == 1) == single {
                    self.pour(expert);
                }
            }
        }
        self.settle();
    }

    /// Pushes what is left until nothing more fits.
    pub(crate) fn settle(&mut self) {
        loop {
            let left = std::mem::take(&mut self.left);
            let sources = (0..left.len()).filter(|&e| left[e] > 0);
            let found = self.find_room(sources);
            self.left = left;
            if !found {
                return;
            }
            for expert in 0..self.left.len() {
                self.augment(expert);
            }
        }
    }

    /// Fills with the smallest capacity that holds `per_expert`, which is the largest rank load, and returns it.
    ///
    /// The capacity starts at `least`, a lower bound, and whenever experts are stuck rises to what the full set
    /// around them needs (Newton's method for ratios): only as often as the bound itself rises.
    pub(crate) fn balance(&mut self, per_expert: &[u32], least: u64) -> u64 {
        let mut largest = least;
        self.fill(per_expert, largest);
        while !self.is_settled() {
            let full = &self.search.queue;
            let load: u64 = full
                .iter()
                .map(|&e| u64::from(per_expert[e as usize]))
                .sum();
            let width = self.full_ranks().count();
            let needed = load.div_ceil(width as u64);
            for room in &mut self.room {
                *room += needed - largest;
            }
            largest = needed;
            self.settle();
        }
        largest
    }

    /// Whether everything has been pushed.
    pub(crate) fn is_settled(&self) -> bool {
        self.left.iter().all(|&left| left == 0)
    }

    /// Which rank hosts which expert, with the flow between them.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// What `rank` can still take.
    pub(crate) fn room(&self, rank: usize) -> u64 {
        self.room[rank]
    }

    /// What `expert` still has to push.
    pub(crate) fn left(&self, expert: usize) -> u64 {
        self.left[expert]
    }

    /// What is left of all experts.
    pub(crate) fn total_left(&self) -> u64 {
        self.left.iter().sum()
    }

    /// After [`settle`](Self::settle): the experts that are full together, those with something left first.
    pub(crate) fn full_experts(&self) -> &[u32] {
        &self.search.queue
    }

    /// Steps of searches so far: a measure of time that is the same on every machine.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Counts steps that were taken outside.
    pub(crate) fn count_work(&mut self, steps: u64) {
        self.work += steps;
    }

    /// Adds an instance of `expert` to a free slot of `rank`, and pushes what it can take at once.
    pub(crate) fn add(&mut self, rank: usize, expert: u32) {
        self.hosts.add(rank, expert);
        self.pour(expert as usize);
    }

    /// Removes the instance of `expert` on `rank`; what it took is left.
    pub(crate) fn remove(&mut self, rank: usize, expert: u32) {
        let amount = self.hosts.remove(rank, expert);
        self.room[rank] += amount;
        self.left[expert as usize] += amount;
    }

    /// Pushes what `expert` has left to its ranks with room.
    fn pour(&mut self, expert: usize) {
        let mut id = self.hosts.head(expert);
        while id != NONE && self.left[expert] > 0 {
            let instance = self.hosts.at_mut(id);
            let room = &mut self.room[instance.rank as usize];
            let taken = self.left[expert].min(*room);
            instance.amount += taken;
            *room -= taken;
            self.left[expert] -= taken;
            id = instance.next;
        }
    }
}

/// The mean rank load, rounded up: no placement has a smaller largest one.
pub(crate) fn mean_load(per_expert: &[u32], ranks: usize) -> u64 {
    let total: u64 = per_expert.iter().map(|&n| u64::from(n)).sum();
    total.div_ceil(ranks as u64)
}
