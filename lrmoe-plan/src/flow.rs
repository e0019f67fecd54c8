//! Maximum flow from experts to the ranks that host them, within rank capacities.

use std::collections::VecDeque;

use ndarray::Array2;

/// A feasible flow, grown by augmenting paths.
///
/// What each expert has pushed is never taken back, only moved between ranks. So the vectors that can be pushed
/// are the independent vectors of a polymatroid, and an expert that could not push once never can again.
pub(crate) struct Flow<'a> {
    by_rank: &'a [Vec<u32>],
    ranks_of: Vec<Vec<usize>>,
    /// Flow from expert to rank, `[experts, ranks]`.
    flow: Array2<u64>,
    room: Vec<u64>,
    stuck: Vec<bool>,
    search: Search,
}

/// What the last search reached: all of it if it found no room.
struct Search {
    queue: VecDeque<usize>,
    /// Expert through which a rank was reached.
    through: Vec<Option<usize>>,
    /// Rank from which an expert was reached; its own number of ranks for the expert that pushes.
    from: Vec<Option<usize>>,
}

impl<'a> Flow<'a> {
    /// An empty flow; `by_rank` holds the experts of each rank, `capacities` what each rank can take.
    pub(crate) fn new(experts: usize, by_rank: &'a [Vec<u32>], capacities: &[u64]) -> Self {
        let mut ranks_of = vec![Vec::new(); experts];
        for (rank, here) in by_rank.iter().enumerate() {
            for &e in here {
                ranks_of[e as usize].push(rank);
            }
        }
        Self {
            by_rank,
            ranks_of,
            flow: Array2::zeros((experts, by_rank.len())),
            room: capacities.to_vec(),
            stuck: vec![false; experts],
            search: Search {
                queue: VecDeque::new(),
                through: vec![None; by_rank.len()],
                from: vec![None; experts],
            },
        }
    }

    /// Pushes up to `amount` more from `expert`; returns how much there was room for.
    pub(crate) fn push(&mut self, expert: usize, amount: u64) -> u64 {
        if self.stuck[expert] {
            return 0;
        }
        let mut left = amount;
        for &rank in &self.ranks_of[expert] {
            let taken = left.min(self.room[rank]);
            self.flow[(expert, rank)] += taken;
            self.room[rank] -= taken;
            left -= taken;
        }
        while left > 0 {
            let Some(end) = self.find_room(expert) else {
                for (stuck, from) in self.stuck.iter_mut().zip(&self.search.from) {
                    *stuck |= from.is_some();
                }
                break;
            };
            left -= self.augment(expert, end, left);
        }
        amount - left
    }

    /// Gives every rank `more` room.
    pub(crate) fn raise(&mut self, more: u64) {
        for room in &mut self.room {
            *room += more;
        }
        self.stuck.fill(false);
    }

    /// After a push that fell short: the experts and ranks that are full together.
    pub(crate) fn full_set(&self) -> (Vec<bool>, Vec<bool>) {
        (
            self.search.from.iter().map(Option::is_some).collect(),
            self.search.through.iter().map(Option::is_some).collect(),
        )
    }

    /// What each rank has taken.
    pub(crate) fn rank_loads(&self) -> Vec<u64> {
        self.flow
            .columns()
            .into_iter()
            .map(|rank| rank.sum())
            .collect()
    }

    /// Breadth-first search for a rank with room.
    fn find_room(&mut self, expert: usize) -> Option<usize> {
        let Search {
            queue,
            through,
            from,
        } = &mut self.search;
        queue.clear();
        through.fill(None);
        from.fill(None);

        from[expert] = Some(self.by_rank.len());
        for &rank in &self.ranks_of[expert] {
            through[rank] = Some(expert);
            queue.push_back(rank);
        }
        while let Some(rank) = queue.pop_front() {
            if self.room[rank] > 0 {
                return Some(rank);
            }
            for &e in &self.by_rank[rank] {
                let e = e as usize;
                if from[e].is_some() || self.flow[(e, rank)] == 0 {
                    continue;
                }
                from[e] = Some(rank);
                for &next in &self.ranks_of[e] {
                    if through[next].is_none() {
                        through[next] = Some(e);
                        queue.push_back(next);
                    }
                }
            }
        }
        None
    }

    /// Pushes up to `limit` along the path that the search found to `end`.
    fn augment(&mut self, expert: usize, end: usize, limit: u64) -> u64 {
        let mut path = Vec::new();
        let mut amount = limit.min(self.room[end]);
        let mut to = end;
        while let Some(e) = self.search.through[to]
            && e != expert
            && let Some(rank) = self.search.from[e]
        {
            amount = amount.min(self.flow[(e, rank)]);
            path.push((e, rank, to));
            to = rank;
        }
        for (e, rank, to) in path {
            self.flow[(e, rank)] -= amount;
            self.flow[(e, to)] += amount;
        }
        self.flow[(expert, to)] += amount;
        self.room[end] -= amount;
        amount
    }
}

/// The smallest possible largest rank load, and what keeps it from being smaller.
#[derive(Debug)]
pub(crate) struct Balance {
    /// Max over expert sets S of ceil(load(S) / ranks hosting S), at least ceil(total / ranks).
    pub(crate) largest: u64,
    /// A set S that reaches it, with its ranks; none if the load is spread over all ranks.
    pub(crate) binding: Option<(Vec<bool>, Vec<bool>)>,
    /// Loads of the ranks in a flow that reaches it.
    pub(crate) rank_loads: Vec<u64>,
}

/// The mean rank load, rounded up: no placement has a smaller largest one.
pub(crate) fn mean_load(per_expert: &[u32], ranks: usize) -> u64 {
    let total: u64 = per_expert.iter().map(|&n| u64::from(n)).sum();
    total.div_ceil(ranks as u64)
}

/// Balances `per_expert` pairs over the hosting ranks.
///
/// The capacity of all ranks starts at the mean and, whenever an expert is stuck, rises to what the full set
/// around it needs: only as often as the bound itself rises.
pub(crate) fn balance(per_expert: &[u32], by_rank: &[Vec<u32>]) -> Balance {
    let ranks = by_rank.len();
    let mut largest = mean_load(per_expert, ranks);
    let mut binding = None;
    let mut flow = Flow::new(per_expert.len(), by_rank, &vec![largest; ranks]);
    for (expert, &load) in per_expert.iter().enumerate() {
        let mut left = u64::from(load);
        loop {
            left -= flow.push(expert, left);
            if left == 0 {
                break;
            }
            let (experts, hosts) = flow.full_set();
            let load: u64 = per_expert
                .iter()
                .zip(&experts)
                .filter(|(_, inside)| **inside)
                .map(|(&n, _)| u64::from(n))
                .sum();
            let width = hosts.iter().filter(|inside| **inside).count() as u64;
            let needed = load.div_ceil(width);
            flow.raise(needed - largest);
            largest = needed;
            binding = Some((experts, hosts));
        }
    }
    Balance {
        largest,
        binding,
        rank_loads: flow.rank_loads(),
    }
}

/// Whether `per_expert` pairs can be spread over the hosting ranks within `capacities`.
pub(crate) fn fits(per_expert: &[u32], by_rank: &[Vec<u32>], capacities: &[u64]) -> bool {
    let mut flow = Flow::new(per_expert.len(), by_rank, capacities);
    per_expert
        .iter()
        .enumerate()
        .all(|(expert, &load)| flow.push(expert, load.into()) == u64::from(load))
}
