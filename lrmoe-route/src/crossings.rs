//! The fewest crossings within the bounds.

use std::ops::Range;

use crate::balance::choosing;
use crate::network::{Edge, Network};
use crate::nodes::Nodes;
use crate::pour::Pour;
use crate::request::Request;

/// Costs of a pair that leaves its rank, and of one that leaves its node: no path between ranks adds 2^31 rank
/// crossings.
const RANK: i64 = 1;
const NODE: i64 = 1 << 32;

/// Rows of each instance such that no rank exceeds its bound and, first, the fewest pairs cross nodes and, second,
/// the fewest cross ranks. The bounds must be feasible.
pub(crate) fn fewest(request: &Request<'_>, nodes: &Nodes, bounds: &[i64]) -> Vec<u32> {
    let (choosing, load) = choosing(request, &request.per_expert);
    let mut start = Start::new(request, nodes, load);
    for &expert in &choosing {
        start.place(expert);
        start.connect(expert);
    }
    let excess = start
        .load
        .iter()
        .zip(bounds)
        .map(|(rows, bound)| rows - bound)
        .collect();
    let mut network = Network::new(start.network_nodes as usize, &start.edges, excess);
    let settled = network.settle();
    debug_assert!(settled, "bounds are feasible");
    for (instance, edges) in start.edges_into {
        start.rows[instance as usize] = edges.map(|edge| network.flow(edge)).sum();
    }
    start.rows
}

/// The fewest crossings without bounds, as the first flow of a network: pairs stay on their rank, else on
/// their node, else go anywhere.
///
/// Source ranks need no nodes in the network. Given the rows y of an expert's instances, min(y, n) pairs stay on a
/// rank where n of its pairs start, and min(sum of y, sum of n) on a node, both at once. So crossings are a sum of
/// convex functions of the rows of instances and of groups (the instances on one node): edges from expert to group to
/// rank, with a cost of -1 up to the n rows that start there and 0 beyond.
struct Start<'a> {
    request: &'a Request<'a>,
    nodes: &'a Nodes,
    load: Vec<i64>,
    /// Rows of each instance.
    rows: Vec<u32>,
    edges: Vec<Edge>,
    /// Instances of experts with a choice, with the edges that end in them.
    edges_into: Vec<(u32, Range<usize>)>,
    network_nodes: u32,
    /// Pairs of the expert that start on the node of each of its groups.
    starting: Vec<u32>,
    pour: Pour,
}

impl<'a> Start<'a> {
    fn new(request: &'a Request<'a>, nodes: &'a Nodes, load: Vec<i64>) -> Self {
        let mut rows = vec![0; request.placement.instances()];
        for (expert, &pairs) in request.per_expert.iter().enumerate() {
            if let &[only] = request.placement.instances_of(expert) {
                rows[only as usize] = pairs;
            }
        }
        Self {
            request,
            nodes,
            load,
            rows,
            edges: Vec::new(),
            edges_into: Vec::new(),
            network_nodes: request.ranks() as u32,
            starting: Vec::new(),
            pour: Pour::default(),
        }
    }

    fn groups(&self, expert: usize) -> impl Iterator<Item = &'a [u32]> + use<'a> {
        let (request, nodes) = (self.request, self.nodes);
        let node_of = move |instance: u32| nodes.of(request.rank_of(instance));
        request
            .placement
            .instances_of(expert)
            .chunk_by(move |&a, &b| node_of(a) == node_of(b))
    }

    fn place(&mut self, expert: usize) {
        let request = self.request;
        self.starting.clear();
        let mut elsewhere = request.per_expert[expert];
        for group in self.groups(expert) {
            let node = self.nodes.of(request.rank_of(group[0]));
            let starting: u32 = self
                .nodes
                .ranks(node)
                .map(|rank| request.count(rank, expert))
                .sum();
            self.starting.push(starting);
            elsewhere -= starting;
            let mut rest = starting;
            for &instance in group {
                let rank = request.rank_of(instance);
                let stay = request.count(rank, expert);
                self.rows[instance as usize] = stay;
                self.load[rank] += i64::from(stay);
                rest -= stay;
            }
            self.pour(rest, group);
        }
        self.pour(elsewhere, request.placement.instances_of(expert));
    }

    fn pour(&mut self, rows: u32, instances: &[u32]) {
        let hosts = instances
            .iter()
            .map(|&instance| self.request.rank_of(instance));
        self.pour.level(rows, hosts, &mut self.load, |at, more| {
            self.rows[instances[at] as usize] += more;
        });
    }

    fn connect(&mut self, expert: usize) {
        let root = self.new_node();
        let one_group = self.starting.len() == 1;
        for (at, group) in self.groups(expert).enumerate() {
            let starting = self.starting[at];
            if let (&[instance], false) = (group, one_group) {
                let stay = self.request.count(self.request.rank_of(instance), expert);
                self.connect_instance(
                    root,
                    instance,
                    &[(stay, NODE + RANK), (starting - stay, NODE)],
                );
                continue;
            }
            let mut hub = root;
            if !one_group {
                hub = self.new_node();
                let rows = group
                    .iter()
                    .map(|&instance| self.rows[instance as usize])
                    .sum();
                self.add_edges(root, hub, rows, &[(starting, NODE)]);
            }
            for &instance in group {
                let stay = self.request.count(self.request.rank_of(instance), expert);
                self.connect_instance(hub, instance, &[(stay, RANK)]);
            }
        }
    }

    fn connect_instance(&mut self, tail: u32, instance: u32, gains: &[(u32, i64)]) {
        let first = self.edges.len();
        let head = self.request.rank_of[instance as usize];
        self.add_edges(tail, head, self.rows[instance as usize], gains);
        self.edges_into.push((instance, first..self.edges.len()));
    }

    /// Edges that carry `rows`: as many as each (rows, gain) says at that gain, then any number at none.
    fn add_edges(&mut self, tail: u32, head: u32, rows: u32, gains: &[(u32, i64)]) {
        let mut left = rows;
        for &(limit, gain) in gains
            .iter()
            .chain(&[(u32::MAX, 0)])
            .filter(|(limit, _)| *limit > 0)
        {
            let flow = left.min(limit);
            left -= flow;
            self.edges.push(Edge {
                tail,
                head,
                flow,
                limit,
                cost: -gain,
            });
        }
    }

    fn new_node(&mut self) -> u32 {
        self.network_nodes += 1;
        self.network_nodes - 1
    }
}
