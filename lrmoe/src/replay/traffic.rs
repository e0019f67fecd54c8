//! Bytes between ranks: rows of both passes, gradients and weights of the experts.

use std::ops::AddAssign;

use lrmoe_plan::{ExpertShape, Placement, Stash, Topology};
use ndarray::Array2;
use serde::Serialize;

/// Squared norm of h of a pair, as it travels back in the forward pass.
const NORM: u64 = size_of::<lrmoe_metric::SquaredNorm>() as u64;
/// A gate weight, selection weight or router gradient of a pair.
const SCALAR: u64 = size_of::<f32>() as u64;

/// Bytes that leave a rank, by where they go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkBytes {
    /// To another rank of the same node.
    pub intra: u64,
    /// To another node.
    pub inter: u64,
}

impl LinkBytes {
    /// Both classes together.
    pub fn total(&self) -> u64 {
        self.intra + self.inter
    }

    /// What `bytes`, `[from, to]`, move over the links; what stays on a rank does not count.
    pub(super) fn of(bytes: &Array2<u64>, topology: &Topology) -> Self {
        let mut sum = Self::default();
        for ((from, to), &bytes) in bytes.indexed_iter() {
            match class(from, to, topology) {
                Some(Class::Intra) => sum.intra += bytes,
                Some(Class::Inter) => sum.inter += bytes,
                None => {}
            }
        }
        sum
    }

    pub(super) fn over(&self, parts: u64) -> Self {
        Self {
            intra: self.intra / parts.max(1),
            inter: self.inter / parts.max(1),
        }
    }
}

impl AddAssign for LinkBytes {
    fn add_assign(&mut self, other: Self) {
        self.intra += other.intra;
        self.inter += other.inter;
    }
}

#[derive(PartialEq)]
enum Class {
    Intra,
    Inter,
}

fn class(from: usize, to: usize, topology: &Topology) -> Option<Class> {
    if from == to {
        None
    } else if topology.node_of(from) == topology.node_of(to) {
        Some(Class::Intra)
    } else {
        Some(Class::Inter)
    }
}

/// The same bytes of each link class, divided evenly among the pairs of ranks that it joins.
pub(super) fn evenly(bytes: &Array2<u64>, topology: &Topology) -> Array2<u64> {
    let sum = LinkBytes::of(bytes, topology);
    let mut links = LinkBytes::default();
    for (from, to) in ndarray::indices(bytes.dim()) {
        match class(from, to, topology) {
            Some(Class::Intra) => links.intra += 1,
            Some(Class::Inter) => links.inter += 1,
            None => {}
        }
    }
    Array2::from_shape_fn(bytes.dim(), |(from, to)| match class(from, to, topology) {
        Some(Class::Intra) => sum.intra / links.intra,
        Some(Class::Inter) => sum.inter / links.inter,
        None => 0,
    })
}

/// What travels with the rows of a pass, `[from, to]`, one matrix per all-to-all.
#[derive(Debug)]
pub(super) struct Exchange {
    /// The rows themselves, out and back, as the time of an all-to-all is modelled from.
    pub(super) rows: [Array2<u64>; 2],
    /// Rows and the scalars beside them, both ways together.
    pub(super) bytes: LinkBytes,
}

/// The forward pass, from rows `[source, destination]`: x out and y back, with the squared norm of h where `norms` says so.
pub(super) fn forward(
    rows: &Array2<u64>,
    shape: &ExpertShape,
    norms: bool,
    topology: &Topology,
) -> Exchange {
    let scalars = if norms { NORM } else { 0 };
    exchange(rows, shape, [1, 1], [0, scalars], topology)
}

/// The backward pass: dy out (and x, where it has to be recomputed from) with gate and selection weight, dx back with the gradient of the
/// gate weight.
pub(super) fn backward(
    rows: &Array2<u64>,
    shape: &ExpertShape,
    stash: Stash,
    topology: &Topology,
) -> Exchange {
    let out = if stash == Stash::Recompute { 2 } else { 1 };
    exchange(rows, shape, [out, 1], [2 * SCALAR, SCALAR], topology)
}

fn exchange(
    rows: &Array2<u64>,
    shape: &ExpertShape,
    [out, back]: [u64; 2],
    scalars: [u64; 2],
    topology: &Topology,
) -> Exchange {
    let row = (shape.width * shape.bytes) as u64;
    let mut bytes = LinkBytes::of(&(rows * (out * row + scalars[0])), topology);
    bytes += LinkBytes::of(&(&rows.t() * (back * row + scalars[1])), topology);
    Exchange {
        rows: [rows * (out * row), &rows.t() * (back * row)],
        bytes,
    }
}

/// Bytes of gradients that each rank sends to the owners of the optimizer's shards, `[host, owner]`. Transposed, those of the weights that
/// return.
///
/// All parameters form one vector: matrix by matrix, expert by expert; rank r of R owns elements `n r / R .. n (r + 1) / R`.
pub(super) fn gradients(placement: &Placement, shape: &ExpertShape) -> Array2<u64> {
    let (ranks, experts) = (placement.ranks(), placement.experts());
    let block = shape.parameters() / shape.matrices();
    let length = shape.parameters() * experts as u64;
    let bound = |rank: usize| (u128::from(length) * rank as u128 / ranks as u128) as u64;
    let mut sent = Array2::zeros((ranks, ranks));
    let mut owner = 0;
    for index in 0..shape.matrices() * experts as u64 {
        let (mut start, end) = (index * block, (index + 1) * block);
        while start < end {
            while bound(owner + 1) <= start {
                owner += 1;
            }
            let stop = end.min(bound(owner + 1));
            for &instance in placement.instances_of((index % experts as u64) as usize) {
                let host = placement.rank_of(instance as usize);
                sent[[host, owner]] += (stop - start) * shape.bytes as u64;
            }
            start = stop;
        }
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use lrmoe_plan::Fixed;
    use ndarray::array;

    const SHAPE: ExpertShape = ExpertShape {
        width: 2,
        hidden: 3,
        gated: false,
        bytes: 4,
    };

    #[test]
    fn every_instance_sends_its_gradients_to_the_owners() {
        // Two matrices of two experts, 6 numbers each: 24 in all, 12 owned by each rank, who owns one matrix of both experts.
        let placement = Fixed::placement(2, 2).expect("two experts");
        assert_eq!(gradients(&placement, &SHAPE), array![[24, 24], [24, 24]]);
        let replicated = Placement::new(2, vec![vec![0, 1], vec![1]]).expect("a placement");
        assert_eq!(gradients(&replicated, &SHAPE), array![[48, 48], [24, 24]]);
    }

    #[test]
    fn shards_may_cut_an_experts_matrix() {
        // 24 numbers over three ranks: 8 each. Expert 0 has 0..6 and 12..18, expert 1 has 6..12 and 18..24.
        let placement = Placement::new(2, vec![vec![0], vec![1], vec![]]).expect("a placement");
        let expected = array![[6 * 4, 4 * 4, 2 * 4], [2 * 4, 4 * 4, 6 * 4], [0, 0, 0]];
        assert_eq!(gradients(&placement, &SHAPE), expected);
    }

    #[test]
    fn evened_bytes_are_the_same_by_class() {
        let topology = Topology::new(4, 2).expect("two nodes");
        let bytes = array![[9, 6, 8, 0], [0, 9, 0, 8], [0, 0, 9, 6], [0, 0, 0, 9]];
        let even = evenly(&bytes, &topology);
        assert_eq!(
            even,
            array![[0, 3, 2, 2], [3, 0, 2, 2], [2, 2, 0, 3], [2, 2, 3, 0]]
        );
        assert_eq!(
            LinkBytes::of(&even, &topology),
            LinkBytes::of(&bytes, &topology)
        );
    }
}
