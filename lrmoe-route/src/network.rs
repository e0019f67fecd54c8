//! Minimum-cost flow between ranks, for the networks of this crate.
//!
//! Why not a library: rs-graph (network simplex) is under the GPL, mcmf wraps a C++ library, and petgraph and
//! pathfinding have maximum flows but no minimum-cost flow with capacities. None starts from a flow that is
//! nearly done, and that is what makes it fast here: without bounds the cheapest routing is known, so only what
//! exceeds a bound has to move. The costs of all paths are few small numbers, so a few phases do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const UNSEEN: u32 = u32::MAX;

/// An edge of the network with the flow that is already on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) tail: u32,
    pub(crate) head: u32,
    pub(crate) flow: u32,
    pub(crate) limit: u32,
    /// Cost of a unit of flow.
    pub(crate) cost: i64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Arc {
    head: u32,
    reverse: u32,
    residual: u32,
    cost: i64,
}

/// Ranks with more or fewer rows than they should have, and the ways rows can take between them.
///
/// Primal-dual minimum-cost flow. The potentials keep the reduced cost of every residual arc at zero or above,
/// and rows move along arcs of reduced cost zero only (blocking flows, after Dinic), so the flow is a cheapest
/// one at all times. The first flow must be a cheapest one for the loads it has; potentials start at zero, so
/// no residual arc of it may have a negative cost.
#[derive(Debug)]
pub(crate) struct Network {
    /// Start of each node's arcs, `[nodes + 1]`.
    first: Vec<u32>,
    arcs: Vec<Arc>,
    /// Forward arc of each edge.
    forward: Vec<u32>,
    /// Rows above the bound of each rank, negative where there is room. Nodes 0..ranks are the ranks.
    excess: Vec<i64>,
    potential: Vec<i64>,
    /// Arcs from a rank above its bound, `UNSEEN` if it cannot be reached.
    level: Vec<u32>,
    queue: Vec<u32>,
    /// The next arc to try of each node.
    next: Vec<u32>,
    path: Vec<u32>,
    distance: Vec<i64>,
    heap: BinaryHeap<Reverse<(i64, u32)>>,
}

impl Network {
    pub(crate) fn new(nodes: usize, edges: &[Edge], excess: Vec<i64>) -> Self {
        let mut first = vec![0; nodes + 1];
        for edge in edges {
            first[edge.tail as usize + 1] += 1;
            first[edge.head as usize + 1] += 1;
        }
        for node in 0..nodes {
            first[node + 1] += first[node];
        }
        let mut next = first[..nodes].to_vec();
        let mut take = |node: u32| {
            let at = next[node as usize];
            next[node as usize] += 1;
            at
        };
        let mut arcs = vec![Arc::default(); 2 * edges.len()];
        let mut forward = Vec::with_capacity(edges.len());
        for edge in edges {
            let (there, back) = (take(edge.tail), take(edge.head));
            arcs[there as usize] = Arc {
                head: edge.head,
                reverse: back,
                residual: edge.limit - edge.flow,
                cost: edge.cost,
            };
            arcs[back as usize] = Arc {
                head: edge.tail,
                reverse: there,
                residual: edge.flow,
                cost: -edge.cost,
            };
            forward.push(there);
        }
        Self {
            first,
            arcs,
            forward,
            excess,
            potential: vec![0; nodes],
            level: vec![UNSEEN; nodes],
            queue: Vec::with_capacity(nodes),
            next,
            path: Vec::new(),
            distance: vec![i64::MAX; nodes],
            heap: BinaryHeap::new(),
        }
    }

    /// Flow on an edge.
    pub(crate) fn flow(&self, edge: usize) -> u32 {
        let back = self.arcs[self.forward[edge] as usize].reverse;
        self.arcs[back as usize].residual
    }

    /// Rows above the bound of each rank.
    pub(crate) fn excess(&self) -> &[i64] {
        &self.excess
    }

    /// Gives a rank `rows` more room.
    pub(crate) fn widen(&mut self, rank: usize, rows: i64) {
        self.excess[rank] -= rows;
    }

    /// Whether rows of a rank above its bound could come to `rank`, after [`Network::settle`] failed.
    pub(crate) fn is_stuck(&self, rank: usize) -> bool {
        self.level[rank] != UNSEEN
    }

    /// Moves rows at the least cost until no rank is above its bound. False if that cannot be; then as many
    /// rows as possible were moved.
    pub(crate) fn settle(&mut self) -> bool {
        while self.excess.iter().any(|&rows| rows > 0) {
            if self.find_levels() {
                self.move_rows();
            } else if !self.raise_potentials() {
                return false;
            }
        }
        true
    }

    fn arcs_of(&self, node: u32) -> std::ops::Range<usize> {
        self.first[node as usize] as usize..self.first[node as usize + 1] as usize
    }

    fn has_room(&self, node: u32) -> bool {
        self.excess.get(node as usize).is_some_and(|&rows| rows < 0)
    }

    fn reduced_cost(&self, tail: u32, arc: &Arc) -> i64 {
        arc.cost + self.potential[tail as usize] - self.potential[arc.head as usize]
    }

    /// Breadth-first search along arcs without reduced cost, to the nearest ranks with room. False if there are none.
    fn find_levels(&mut self) -> bool {
        self.level.fill(UNSEEN);
        self.queue.clear();
        for (rank, _) in self
            .excess
            .iter()
            .enumerate()
            .filter(|(_, rows)| **rows > 0)
        {
            self.level[rank] = 0;
            self.queue.push(rank as u32);
        }
        let mut nearest = UNSEEN;
        let mut done = 0;
        while let Some(&node) = self.queue.get(done) {
            done += 1;
            let level = self.level[node as usize] + 1;
            if level > nearest {
                break;
            }
            for at in self.arcs_of(node) {
                let arc = self.arcs[at];
                if arc.residual == 0
                    || self.level[arc.head as usize] != UNSEEN
                    || self.reduced_cost(node, &arc) != 0
                {
                    continue;
                }
                self.level[arc.head as usize] = level;
                self.queue.push(arc.head);
                if self.has_room(arc.head) {
                    nearest = level;
                }
            }
        }
        nearest != UNSEEN
    }

    /// Blocking flow along the levels.
    fn move_rows(&mut self) {
        let nodes = self.next.len();
        self.next.copy_from_slice(&self.first[..nodes]);
        for source in 0..self.excess.len() {
            self.path.clear();
            let mut node = source as u32;
            while self.excess[source] > 0 {
                if self.has_room(node) {
                    self.move_along_path(source, node as usize);
                    self.path.clear();
                    node = source as u32;
                } else if let Some(at) = self.step(node) {
                    self.path.push(at);
                    node = self.arcs[at as usize].head;
                } else if let Some(at) = self.path.pop() {
                    node = self.arcs[self.arcs[at as usize].reverse as usize].head;
                    self.next[node as usize] += 1;
                } else {
                    break;
                }
            }
        }
    }

    /// The next arc of `node` that leads one level on.
    fn step(&mut self, node: u32) -> Option<u32> {
        let end = self.first[node as usize + 1];
        let level = self.level[node as usize] + 1;
        let at = (self.next[node as usize]..end).find(|&at| {
            let arc = &self.arcs[at as usize];
            arc.residual > 0
                && self.level[arc.head as usize] == level
                && self.reduced_cost(node, arc) == 0
        });
        self.next[node as usize] = at.unwrap_or(end);
        at
    }

    fn move_along_path(&mut self, source: usize, target: usize) {
        let narrowest = self
            .path
            .iter()
            .map(|&at| self.arcs[at as usize].residual)
            .min();
        let rows = self.excess[source]
            .min(-self.excess[target])
            .min(narrowest.unwrap_or(0).into());
        self.excess[source] -= rows;
        self.excess[target] += rows;
        for &at in &self.path {
            let back = self.arcs[at as usize].reverse;
            self.arcs[at as usize].residual -= rows as u32;
            self.arcs[back as usize].residual += rows as u32;
        }
    }

    /// Dijkstra from what [`Network::find_levels`] reached to the cheapest rank with room. False if there is none.
    fn raise_potentials(&mut self) -> bool {
        self.distance.fill(i64::MAX);
        self.heap.clear();
        for &node in &self.queue {
            self.distance[node as usize] = 0;
        }
        for at in 0..self.queue.len() {
            self.relax(self.queue[at], 0);
        }
        while let Some(Reverse((distance, node))) = self.heap.pop() {
            if distance > self.distance[node as usize] {
                continue;
            }
            if self.has_room(node) {
                for (potential, reached) in self.potential.iter_mut().zip(&self.distance) {
                    *potential += distance.min(*reached);
                }
                return true;
            }
            self.relax(node, distance);
        }
        false
    }

    fn relax(&mut self, node: u32, distance: i64) {
        for at in self.arcs_of(node) {
            let arc = self.arcs[at];
            if arc.residual > 0 {
                let there = distance + self.reduced_cost(node, &arc);
                if there < self.distance[arc.head as usize] {
                    self.distance[arc.head as usize] = there;
                    self.heap.push(Reverse((there, arc.head)));
                }
            }
        }
    }
}
