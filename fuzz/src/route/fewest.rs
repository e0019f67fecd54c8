//! What a routing must reach, by exhaustive search and by a plain flow.

use super::Case;

/// Sets of experts, as bits.
fn sets(case: &Case) -> std::ops::Range<usize> {
    1..1 << case.hosts.len()
}

fn members(case: &Case, set: usize) -> impl Iterator<Item = usize> {
    (0..case.hosts.len()).filter(move |expert| set >> expert & 1 == 1)
}

/// Pairs of a set of experts, and the rows that its ranks have room for.
fn demand_and_room(case: &Case, set: usize, room: &[u64]) -> (u64, u64) {
    let demand = members(case, set).map(|expert| case.load(expert)).sum();
    let hosted = |rank: &usize| members(case, set).any(|expert| case.hosts[expert].contains(rank));
    let room = (0..room.len()).filter(hosted).map(|rank| room[rank]).sum();
    (demand, room)
}

/// Room of each rank where none takes more than `largest` rows.
pub(super) fn room_of(case: &Case, largest: u64) -> Vec<u64> {
    case.room.iter().map(|&rows| rows.min(largest)).collect()
}

/// By how much the most crowded set of experts exceeds its room: the pairs that cannot be routed (Hall's theorem with deficiency).
pub(super) fn worst_set(case: &Case) -> u64 {
    let short = |set| {
        let (demand, room) = demand_and_room(case, set, &case.room);
        demand.saturating_sub(room)
    };
    sets(case).map(short).max().unwrap_or(0)
}

/// The smallest largest load with which every set of experts has room.
pub(super) fn smallest_largest(case: &Case) -> u64 {
    let (mut low, mut high) = (0, u64::from(case.counts.sum()));
    while low < high {
        let middle = (low + high) / 2;
        let room = room_of(case, middle);
        let fits = |set| {
            let (demand, room) = demand_and_room(case, set, &room);
            demand <= room
        };
        if sets(case).all(fits) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// An edge of the flow; the one after it goes back.
struct Edge {
    to: usize,
    room: i64,
    cost: i64,
}

#[derive(Default)]
struct Network {
    edges: Vec<Edge>,
    from: Vec<usize>,
}

impl Network {
    fn add(&mut self, from: usize, to: usize, room: i64, cost: i64) {
        self.edges.push(Edge { to, room, cost });
        self.from.push(from);
        let (to, room, cost) = (from, 0, -cost);
        self.from.push(self.edges[self.edges.len() - 1].to);
        self.edges.push(Edge { to, room, cost });
    }

    /// Cost of the largest flow from node 0 to node 1, along ever cheapest paths (Bellman and Ford).
    fn cheapest(&mut self, nodes: usize) -> i64 {
        let mut total = 0;
        loop {
            let mut distance = vec![i64::MAX; nodes];
            let mut through = vec![usize::MAX; nodes];
            distance[0] = 0;
            let mut changed = true;
            while changed {
                changed = false;
                for (at, edge) in self.edges.iter().enumerate() {
                    let known = distance[self.from[at]];
                    if edge.room > 0 && known < i64::MAX && known + edge.cost < distance[edge.to] {
                        distance[edge.to] = known + edge.cost;
                        through[edge.to] = at;
                        changed = true;
                    }
                }
            }
            if distance[1] == i64::MAX {
                return total;
            }
            let mut path = Vec::new();
            let mut node = 1;
            while node != 0 {
                path.push(through[node]);
                node = self.from[through[node]];
            }
            let room = path.iter().map(|&at| self.edges[at].room).min();
            let room = room.expect("a path has edges");
            for at in path {
                self.edges[at].room -= room;
                self.edges[at ^ 1].room += room;
            }
            total += room * distance[1];
        }
    }
}

/// The fewest (node crossings, rank crossings) with these loads at most.
pub(super) fn fewest_crossings(case: &Case, room: &[u64]) -> (u64, u64) {
    let (ranks, experts) = case.counts.dim();
    // A crossing of nodes weighs more than all crossings of ranks.
    let node = i64::from(case.counts.sum()) + 1;
    let mut network = Network::default();
    let (source_of, rank_of) = (2, 2 + ranks * experts);
    for ((source, expert), &pairs) in case.counts.indexed_iter() {
        let from = source_of + source * experts + expert;
        network.add(0, from, pairs.into(), 0);
        for &rank in &case.hosts[expert] {
            let across = case.topology.node_of(source) != case.topology.node_of(rank);
            let cost = i64::from(source != rank) + if across { node } else { 0 };
            network.add(from, rank_of + rank, pairs.into(), cost);
        }
    }
    for (rank, &rows) in room.iter().enumerate() {
        network.add(rank_of + rank, 1, rows as i64, 0);
    }
    let cost = network.cheapest(rank_of + ranks);
    ((cost / node) as u64, (cost % node) as u64)
}
