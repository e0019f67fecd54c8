use crate::Error;

/// Ranks grouped into nodes: rank r lives on node r / ranks_per_node. The last node may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    ranks: usize,
    ranks_per_node: usize,
}

impl Topology {
    /// `ranks` ranks, `ranks_per_node` to a node.
    ///
    /// # Errors
    ///
    /// [`Error::NoRanks`] or [`Error::NoRanksPerNode`] if a number is zero.
    pub fn new(ranks: usize, ranks_per_node: usize) -> Result<Self, Error> {
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        if ranks_per_node == 0 {
            return Err(Error::NoRanksPerNode);
        }
        Ok(Self {
            ranks,
            ranks_per_node,
        })
    }

    /// All ranks on one node.
    ///
    /// # Errors
    ///
    /// [`Error::NoRanks`] if `ranks` is zero.
    pub fn single_node(ranks: usize) -> Result<Self, Error> {
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        Self::new(ranks, ranks)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.ranks.div_ceil(self.ranks_per_node)
    }

    /// Node of `rank`.
    pub fn node_of(&self, rank: usize) -> usize {
        rank / self.ranks_per_node
    }
}
