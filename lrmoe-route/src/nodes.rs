use std::ops::Range;

use lrmoe_plan::Topology;

/// The topology as two tables.
#[derive(Debug)]
pub(crate) struct Nodes {
    of: Vec<u32>,
    ranks: Vec<Range<usize>>,
}

impl Nodes {
    pub(crate) fn new(topology: &Topology) -> Self {
        let of: Vec<u32> = (0..topology.ranks())
            .map(|rank| topology.node_of(rank) as u32)
            .collect();
        let mut start = 0;
        let ranks = of.chunk_by(|a, b| a == b).map(|node| {
            start += node.len();
            start - node.len()..start
        });
        Self {
            ranks: ranks.collect(),
            of,
        }
    }

    pub(crate) fn of(&self, rank: usize) -> usize {
        self.of[rank] as usize
    }

    pub(crate) fn ranks(&self, node: usize) -> Range<usize> {
        self.ranks[node].clone()
    }
}
