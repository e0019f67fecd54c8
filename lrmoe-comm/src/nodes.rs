use std::ops::Range;

use crate::Error;

/// Ranks divided into nodes: neighbours in rank order, the last node perhaps with fewer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nodes {
    ranks: usize,
    per_node: usize,
}

impl Nodes {
    pub(crate) fn new(ranks: usize, ranks_per_node: usize) -> Result<Self, Error> {
        if ranks_per_node == 0 {
            return Err(Error::NoRanksPerNode);
        }
        Ok(Self {
            ranks,
            per_node: ranks_per_node.min(ranks.max(1)),
        })
    }

    pub(crate) fn ranks(self) -> usize {
        self.ranks
    }

    /// Number of nodes.
    pub(crate) fn len(self) -> usize {
        self.ranks.div_ceil(self.per_node)
    }

    pub(crate) fn of(self, rank: usize) -> usize {
        rank / self.per_node
    }

    pub(crate) fn members(self, node: usize) -> Range<usize> {
        let start = node * self.per_node;
        start..self.ranks.min(start + self.per_node)
    }

    /// Whether no message could be joined with another: one node, or nodes of one rank.
    pub(crate) fn are_trivial(self) -> bool {
        self.len() <= 1 || self.per_node == 1
    }

    /// The member of `node` that hands on what the node sends to `destination`: the one with the
    /// destination's place in its node, so that the destinations are divided evenly.
    pub(crate) fn relay(self, node: usize, destination: usize) -> usize {
        let members = self.members(node);
        members.start + destination % self.per_node % members.len()
    }

    /// What `relay` hands on, ascending.
    pub(crate) fn destinations(self, relay: usize) -> impl Iterator<Item = usize> {
        let node = self.of(relay);
        (0..self.ranks).filter(move |&destination| self.relay(node, destination) == relay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_destination_has_one_relay_in_each_node() {
        for ranks in 1..=9 {
            for per_node in 1..=ranks + 1 {
                let nodes = Nodes::new(ranks, per_node).unwrap();
                for node in 0..nodes.len() {
                    let mut relayed: Vec<usize> = nodes
                        .members(node)
                        .flat_map(|relay| nodes.destinations(relay))
                        .collect();
                    relayed.sort_unstable();
                    assert!(relayed.into_iter().eq(0..ranks));
                    // Nothing within a node takes a detour.
                    assert!(
                        nodes
                            .members(node)
                            .all(|rank| nodes.relay(node, rank) == rank)
                    );
                }
                assert!((0..ranks).all(|rank| nodes.members(nodes.of(rank)).contains(&rank)));
            }
        }
        assert_eq!(Nodes::new(3, 0).unwrap_err(), Error::NoRanksPerNode);
    }
}
