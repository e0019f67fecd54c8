//! Which node serves which pairs.

use std::cmp::Reverse;

use crate::flow::Hosts;
use crate::policy::PlacementRequest;
use crate::policy::level::{Group, experts};
use crate::{Placement, Topology};

/// Pairs of each expert by the node of their source.
///
/// An instance with n pairs on a node serves up to n of that node's own pairs without crossing nodes.
#[derive(Debug)]
pub(super) struct Near<'a> {
    topology: &'a Topology,
    /// `[nodes, experts]`; empty for a single node.
    pairs: Vec<u32>,
    experts: usize,
}

impl<'a> Near<'a> {
    /// Sums the loads over the ranks of each node; if they come from other ranks than those of the topology,
    /// every node is assumed to have the same share.
    pub(super) fn new(request: &PlacementRequest<'a>) -> Self {
        let (loads, topology) = (request.loads, request.topology);
        let (nodes, experts) = (topology.nodes(), loads.experts());
        let mut pairs = Vec::new();
        if nodes > 1 && loads.ranks() == topology.ranks() {
            pairs.resize(nodes * experts, 0);
            for (rank, counts) in loads.counts().outer_iter().enumerate() {
                let node = &mut pairs[topology.node_of(rank) * experts..][..experts];
                for (sum, count) in node.iter_mut().zip(counts) {
                    *sum += count;
                }
            }
        } else if nodes > 1 {
            let share = loads.per_expert().iter().map(|&n| n / nodes as u32);
            pairs = share.cycle().take(nodes * experts).collect();
        }
        Self {
            topology,
            pairs,
            experts,
        }
    }

    /// Pairs of `expert` by the node of their source that no instance there serves; empty for a single node.
    pub(super) fn unserved(&self, hosts: &Hosts, expert: u32) -> Vec<u64> {
        let nodes = self.pairs.chunks(self.experts);
        let mut unserved: Vec<u64> = nodes.map(|pairs| pairs[expert as usize].into()).collect();
        if !unserved.is_empty() {
            for instance in hosts.of_expert(expert as usize) {
                let here = &mut unserved[self.topology.node_of(instance.rank as usize)];
                *here = here.saturating_sub(instance.amount);
            }
        }
        unserved
    }

    /// Node of `rank`.
    pub(super) fn node_of(&self, rank: usize) -> usize {
        self.topology.node_of(rank)
    }

    /// Whether two ranks share a node.
    fn same_node(&self, a: usize, b: usize) -> bool {
        self.node_of(a) == self.node_of(b)
    }

    /// Assigns the groups, one made for each rank, to ranks with as many slots: to nodes so that many pairs
    /// stay on theirs, and inside a node so that many instances stay where `previous` has them.
    pub(super) fn arrange(
        &self,
        mut groups: Vec<Group>,
        slots: &[usize],
        previous: &Placement,
    ) -> Vec<Vec<u32>> {
        if !self.pairs.is_empty() {
            groups = self.to_nodes(groups, slots, previous);
        }
        let keeps = keeps(&groups, slots, previous, |a, b| self.same_node(a, b));
        let mut groups: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
        let mut by_rank: Vec<Option<Group>> = vec![None; groups.len()];
        for (_, group, rank) in keeps {
            if by_rank[rank].is_none() {
                by_rank[rank] = groups[group].take();
            }
        }
        self.rest(groups, slots, &mut by_rank);
        experts(by_rank.into_iter().flatten())
    }

    /// Permutes the groups so that each lies on a rank of the node that serves most of its pairs, given the groups
    /// before it; of equal nodes on the one that has most of its instances already.
    fn to_nodes(&self, groups: Vec<Group>, slots: &[usize], previous: &Placement) -> Vec<Group> {
        // Free ranks of each number of slots and node, the lowest last.
        let nodes = self.topology.nodes();
        let mut widths = slots.to_vec();
        widths.sort_unstable();
        widths.dedup();
        let class = |rank: usize| widths.binary_search(&slots[rank]).unwrap_or_default();
        let mut free: Vec<Vec<usize>> = vec![Vec::new(); widths.len() * nodes];
        for rank in (0..slots.len()).rev() {
            free[class(rank) * nodes + self.node_of(rank)].push(rank);
        }
        let ranks = rank_of_instances(previous);
        let mut unserved = self.pairs.clone();
        let mut kept = vec![0_u32; nodes];
        let mut moved = vec![Group::new(); groups.len()];
        for (rank, group) in groups.into_iter().enumerate() {
            kept.fill(0);
            for &instance in group
                .iter()
                .flat_map(|&(e, _)| previous.instances_of(e as usize))
            {
                kept[self.node_of(ranks[instance as usize])] += 1;
            }
            let free = &mut free[class(rank) * nodes..][..nodes];
            let served = |node: usize| -> u64 {
                let pairs = &unserved[node * self.experts..];
                let served = |&(e, n): &(u32, u64)| n.min(pairs[e as usize].into());
                group.iter().map(served).sum()
            };
            let open = (0..nodes).filter(|&node| !free[node].is_empty());
            let best = open.max_by_key(|&node| (served(node), kept[node], Reverse(node)));
            let Some((node, to)) = best.and_then(|node| Some((node, free[node].pop()?))) else {
                continue;
            };
            for &(e, n) in &group {
                let pairs = &mut unserved[node * self.experts + e as usize];
                *pairs -= n.min((*pairs).into()) as u32;
            }
            moved[to] = group;
        }
        moved
    }

    /// Fills the ranks that are still free with the groups that are left.
    fn rest(&self, groups: Vec<Option<Group>>, slots: &[usize], by_rank: &mut [Option<Group>]) {
        // There are as many of both for each number of slots and node.
        let class = |rank: usize| (slots[rank], self.node_of(rank), rank);
        let free = (0..slots.len()).filter(|&rank| by_rank[rank].is_none());
        let mut free: Vec<usize> = free.collect();
        free.sort_unstable_by_key(|&rank| class(rank));
        let mut left: Vec<usize> = (0..slots.len()).filter(|&g| groups[g].is_some()).collect();
        left.sort_unstable_by_key(|&group| class(group));
        let mut groups = groups;
        for (rank, group) in free.into_iter().zip(left) {
            by_rank[rank] = groups[group].take();
        }
    }
}

/// (Kept instances, group, rank), most first, for groups and ranks that may be matched and share an expert.
fn keeps(
    groups: &[Group],
    slots: &[usize],
    previous: &Placement,
    same_node: impl Fn(usize, usize) -> bool,
) -> Vec<(u32, usize, usize)> {
    let rank_of = rank_of_instances(previous);
    let mut kept = vec![0; slots.len()];
    let mut touched = Vec::new();
    let mut keeps = Vec::new();
    for (group, experts) in groups.iter().enumerate() {
        for &(expert, _) in experts {
            for &instance in previous.instances_of(expert as usize) {
                let rank = rank_of[instance as usize];
                if slots[rank] == slots[group] && same_node(rank, group) {
                    if kept[rank] == 0 {
                        touched.push(rank);
                    }
                    kept[rank] += 1;
                }
            }
        }
        keeps.extend(touched.drain(..).map(|rank| {
            let kept = std::mem::take(&mut kept[rank]);
            (kept, group, rank)
        }));
    }
    keeps.sort_unstable_by_key(|&(kept, group, rank)| (Reverse(kept), group, rank));
    keeps
}

/// Rank of each instance.
fn rank_of_instances(placement: &Placement) -> Vec<usize> {
    let mut rank_of = vec![0; placement.instances()];
    for rank in 0..placement.ranks() {
        rank_of[placement.on_rank(rank)].fill(rank);
    }
    rank_of
}
