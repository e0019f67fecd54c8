//! Blocking flows along shortest augmenting paths (Dinic 1970).

use super::Flow;
use super::hosts::NONE;

/// Scratch of a search and what the last one reached: everything that is full together if it found no room.
#[derive(Clone, Debug)]
pub(super) struct Search {
    /// Steps from the nearest source, [`NONE`] if not reached.
    pub(super) expert_level: Vec<u32>,
    pub(super) rank_level: Vec<u32>,
    /// Experts in the order in which they were reached.
    pub(super) queue: Vec<u32>,
    /// Where the depth-first search goes on.
    expert_arc: Vec<u32>,
    rank_arc: Vec<u32>,
    /// Instances taken: into a rank, and out of it.
    path: Vec<(u32, u32)>,
}

impl Search {
    pub(super) fn new(experts: usize, ranks: usize) -> Self {
        Self {
            expert_level: vec![NONE; experts],
            rank_level: vec![NONE; ranks],
            queue: Vec::with_capacity(experts),
            expert_arc: vec![NONE; experts],
            rank_arc: vec![0; ranks],
            path: Vec::new(),
        }
    }
}

impl Flow {
    /// Breadth-first search from the experts in `sources`; whether it found room.
    ///
    /// It ends at the level of the nearest rank with room, so without room everything that can be reached is.
    pub(super) fn find_room(&mut self, sources: impl Iterator<Item = usize>) -> bool {
        let search = &mut self.search;
        self.work += ((search.expert_level.len() + search.rank_level.len()) / 8) as u64;
        search.expert_level.fill(NONE);
        search.rank_level.fill(NONE);
        search.queue.clear();
        for expert in sources {
            search.expert_level[expert] = 0;
            search.queue.push(expert as u32);
        }
        let mut found = NONE;
        let mut done = 0;
        while let Some(&expert) = search.queue.get(done) {
            done += 1;
            let level = search.expert_level[expert as usize] + 1;
            if level > found {
                break;
            }
            search.expert_arc[expert as usize] = self.hosts.head(expert as usize);
            for instance in self.hosts.of_expert(expert as usize) {
                self.work += 1;
                let rank = instance.rank as usize;
                if search.rank_level[rank] != NONE {
                    continue;
                }
                search.rank_level[rank] = level;
                search.rank_arc[rank] = self.hosts.first(rank);
                if self.room[rank] > 0 {
                    found = level;
                } else if found == NONE {
                    for here in self.hosts.on_rank(rank) {
                        let e = here.expert as usize;
                        if here.amount > 0 && search.expert_level[e] == NONE {
                            search.expert_level[e] = level;
                            search.queue.push(here.expert);
                        }
                    }
                }
            }
        }
        found != NONE
    }

    /// Pushes what `source` has left along the levels of the last search until no path is left.
    pub(super) fn augment(&mut self, source: usize) {
        self.search.path.clear();
        let mut expert = source;
        while self.left[source] > 0 {
            self.work += 1;
            let arc = self.search.expert_arc[expert];
            if arc == NONE {
                let Some((into, _)) = self.search.path.pop() else {
                    return;
                };
                expert = self.hosts.at(into).expert as usize;
                let rank = self.hosts.at(into).rank as usize;
                self.search.rank_arc[rank] += 1;
                continue;
            }
            let rank = self.hosts.at(arc).rank as usize;
            if self.search.rank_level[rank] == self.search.expert_level[expert] + 1 {
                if self.room[rank] > 0 {
                    self.push_along(source, arc);
                    expert = source;
                    self.search.path.clear();
                    continue;
                }
                if let Some(out) = self.next_out(rank) {
                    self.search.path.push((arc, out));
                    expert = self.hosts.at(out).expert as usize;
                    continue;
                }
            }
            self.search.expert_arc[expert] = self.hosts.at(arc).next;
        }
    }

    /// The next instance of `rank` whose flow can go elsewhere on the way to room.
    fn next_out(&mut self, rank: usize) -> Option<u32> {
        let search = &mut self.search;
        while search.rank_arc[rank] < self.hosts.end(rank) {
            let out = self.hosts.at(search.rank_arc[rank]);
            if out.amount > 0 && search.expert_level[out.expert as usize] == search.rank_level[rank]
            {
                return Some(search.rank_arc[rank]);
            }
            search.rank_arc[rank] += 1;
        }
        None
    }

    /// Pushes as much as possible from `source` along the path and then through instance `last`.
    fn push_along(&mut self, source: usize, last: u32) {
        let end = self.hosts.at(last).rank as usize;
        let mut amount = self.left[source].min(self.room[end]);
        for &(_, out) in &self.search.path {
            amount = amount.min(self.hosts.at(out).amount);
        }
        for &(into, out) in &self.search.path {
            self.hosts.at_mut(into).amount += amount;
            self.hosts.at_mut(out).amount -= amount;
        }
        self.hosts.at_mut(last).amount += amount;
        self.room[end] -= amount;
        self.left[source] -= amount;
    }
}
