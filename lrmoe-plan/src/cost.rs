use ndarray::{Array2, ArrayView2};
use serde::{Deserialize, Serialize};

use crate::cluster::Link;
use crate::error::expect;
use crate::{ClusterSpec, Error, ExpertShape, Loads, Placement, Stash, Topology};

/// What the ranks do in one step of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepWork {
    /// What the forward pass leaves: with `recompute` the backward pass computes the pre-activations again.
    pub stash: Stash,
    /// Instances on each rank, `[ranks]`.
    pub instances: Vec<u32>,
    /// Rows that each rank computes in the forward pass, `[ranks]`.
    pub forward_rows: Vec<u64>,
    /// Rows that each rank computes in the backward pass, `[ranks]`.
    pub backward_rows: Vec<u64>,
    /// Bytes that each rank sends to each peer, `[from, to]`, one matrix per all-to-all: as a rule rows out and
    /// back, forward and backward. The diagonal costs nothing.
    pub exchanges: Vec<Array2<u64>>,
    /// Bytes of weights that each rank sends to each peer for the next placement, `[from, to]`.
    pub delivery: Array2<u64>,
}

/// Seconds of one step of one layer as the cost model sees them; never measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelledSeconds {
    /// Grouped GEMMs of the forward pass.
    pub forward: f64,
    /// Grouped GEMMs of the backward pass.
    pub backward: f64,
    /// All-to-alls of rows.
    pub exchange: f64,
    /// Delivery of weights.
    pub delivery: f64,
}

impl ModelledSeconds {
    /// Sum of all parts: nothing overlaps.
    pub fn total(&self) -> f64 {
        self.forward + self.backward + self.exchange + self.delivery
    }
}

/// Models the time of a step.
///
/// - A pass takes as long as its slowest rank: rows * flop per row / rate + instances * launch time.
/// - A row costs 2 D F flop per projection in the forward pass (6 D F gated, 4 D F plain). In the backward pass
///   every projection has an input and a weight gradient, twice the forward pass, and with [`Stash::Recompute`] gate and up
///   are computed again: 16 D F gated, 10 D F plain.
/// - An all-to-all, and likewise the delivery of weights, takes latency + bytes / bandwidth for the rank that
///   sends or receives most, for each link class in use. The classes work side by side, so the slower one
///   counts.
///
/// # Errors
///
/// [`Error::Mismatch`] if the parts of `work` have different numbers of ranks, [`Error::NoRanks`], and what
/// [`ClusterSpec::from_toml`] says about numbers.
pub fn modelled_seconds(
    cluster: &ClusterSpec,
    shape: &ExpertShape,
    work: &StepWork,
) -> Result<ModelledSeconds, Error> {
    cluster.check()?;
    let ranks = work.instances.len();
    expect("forward rows", ranks, work.forward_rows.len())?;
    expect("backward rows", ranks, work.backward_rows.len())?;
    for bytes in work.exchanges.iter().chain([&work.delivery]) {
        expect("sending ranks", ranks, bytes.nrows())?;
        expect("receiving ranks", ranks, bytes.ncols())?;
    }
    let topology = Topology::new(ranks, cluster.ranks_per_node)?;
    let pass = |rows: &[u64], flop: f64| {
        let ranks = rows.iter().zip(&work.instances);
        slowest(ranks.map(|(&rows, &instances)| gemm_seconds(cluster, instances, rows, flop)))
    };
    let all_to_all = |bytes: &Array2<u64>| all_to_all_seconds(cluster, &topology, bytes.view());
    Ok(ModelledSeconds {
        forward: pass(&work.forward_rows, forward_flop(shape)),
        backward: pass(&work.backward_rows, backward_flop(shape, work.stash)),
        exchange: work.exchanges.iter().map(all_to_all).sum(),
        delivery: all_to_all(&work.delivery),
    })
}

fn slowest(seconds: impl Iterator<Item = f64>) -> f64 {
    seconds.fold(0.0, f64::max)
}

fn forward_flop(shape: &ExpertShape) -> f64 {
    2.0 * shape.matrices() as f64 * shape.width as f64 * shape.hidden as f64
}

fn backward_flop(shape: &ExpertShape, stash: Stash) -> f64 {
    let forward = forward_flop(shape);
    let projections = shape.matrices() as f64;
    match stash {
        Stash::Recompute => 2.0 * forward + forward * (projections - 1.0) / projections,
        Stash::Full | Stash::ForwardSelect => 2.0 * forward,
    }
}

fn gemm_seconds(cluster: &ClusterSpec, instances: u32, rows: u64, flop: f64) -> f64 {
    rows as f64 * flop / cluster.flops + f64::from(instances) * cluster.launch_seconds
}

/// The most rows whose backward GEMMs a rank finishes in `seconds`.
pub(crate) fn rows_within(
    cluster: &ClusterSpec,
    shape: &ExpertShape,
    stash: Stash,
    instances: u32,
    seconds: f64,
) -> u64 {
    let flop = backward_flop(shape, stash);
    // In floating point too, more rows never take less; a quotient can be off by many rows where a launch takes far longer than a row.
    let in_time = |rows| gemm_seconds(cluster, instances, rows, flop) <= seconds;
    if in_time(u64::MAX) {
        return u64::MAX;
    }
    let (mut most, mut late) = (0, u64::MAX);
    while late - most > 1 {
        let middle = most + (late - most) / 2;
        if in_time(middle) {
            most = middle;
        } else {
            late = middle;
        }
    }
    most
}

fn all_to_all_seconds(
    cluster: &ClusterSpec,
    topology: &Topology,
    bytes: ArrayView2<'_, u64>,
) -> f64 {
    let most = |within: bool| {
        let ranks = topology.ranks();
        let (mut sent, mut received) = (vec![0.0; ranks], vec![0.0; ranks]);
        for ((from, to), &bytes) in bytes.indexed_iter() {
            let same_node = topology.node_of(from) == topology.node_of(to);
            if from != to && same_node == within {
                sent[from] += bytes as f64;
                received[to] += bytes as f64;
            }
        }
        slowest(sent.into_iter().chain(received))
    };
    transfer_seconds(cluster, most(true), most(false))
}

/// Time of an all-to-all in which no rank sends or receives more than so many bytes inside its node and between nodes.
fn transfer_seconds(cluster: &ClusterSpec, intra: f64, inter: f64) -> f64 {
    let class = |link: &Link, most: f64| {
        if most > 0.0 {
            link.latency_seconds + most / link.bytes_per_second
        } else {
            0.0
        }
    };
    class(&cluster.intra, intra).max(class(&cluster.inter, inter))
}

/// What is known of a step before its pairs are routed.
pub(crate) struct PredictedWork<'a> {
    pub(crate) loads: &'a Loads,
    pub(crate) placement: &'a Placement,
    pub(crate) forward_rows: &'a [u64],
    pub(crate) retained_rows: &'a [u64],
}

impl PredictedWork<'_> {
    /// Seconds of the step, its exchanges predicted as [`plan`](crate::plan()) says.
    pub(crate) fn seconds(
        &self,
        cluster: &ClusterSpec,
        topology: &Topology,
        shape: &ExpertShape,
        stash: Stash,
    ) -> ModelledSeconds {
        let instances = |rank| self.placement.on_rank(rank).len() as u32;
        let pass = |rows: &[u64], flop: f64| {
            let ranks = rows.iter().enumerate();
            slowest(ranks.map(|(r, &rows)| gemm_seconds(cluster, instances(r), rows, flop)))
        };
        let sources: Vec<u64> = self
            .loads
            .counts()
            .outer_iter()
            .map(|counts| counts.iter().map(|&n| u64::from(n)).sum())
            .collect();
        let shards = vec![1; topology.ranks()];
        let send = |shares: &[u64], amounts: &[u64], bytes: u64| {
            spread_seconds(cluster, topology, shares, amounts, bytes)
        };
        let row = shape.row_bytes(1, 0);
        // x goes along with dy where it is not kept.
        let backward_row = shape.row_bytes(if stash == Stash::Recompute { 2 } else { 1 }, 0);
        let updated: Vec<u64> = if self.retained_rows.iter().any(|&rows| rows > 0) {
            (0..topology.ranks()).map(|r| instances(r).into()).collect()
        } else {
            vec![0; topology.ranks()]
        };
        ModelledSeconds {
            forward: pass(self.forward_rows, forward_flop(shape)),
            backward: pass(self.retained_rows, backward_flop(shape, stash)),
            exchange: 2.0 * send(&sources, self.forward_rows, row)
                + send(&sources, self.retained_rows, backward_row)
                + send(&sources, self.retained_rows, row)
                + send(&shards, &updated, shape.gradient_bytes()),
            delivery: send(&shards, &updated, shape.weight_bytes()),
        }
    }
}

/// Seconds of an all-to-all that carries `amounts[b]` items to rank b, from each rank a in proportion to `shares[a]`. The way
/// back takes as long.
fn spread_seconds(
    cluster: &ClusterSpec,
    topology: &Topology,
    shares: &[u64],
    amounts: &[u64],
    bytes: u64,
) -> f64 {
    let mut nodes = vec![(0, 0); topology.nodes()];
    for (rank, (share, amount)) in shares.iter().zip(amounts).enumerate() {
        let (shares, amounts) = &mut nodes[topology.node_of(rank)];
        *shares += share;
        *amounts += amount;
    }
    let (all_shares, all_amounts) = nodes
        .iter()
        .fold((0, 0), |all, node| (all.0 + node.0, all.1 + node.1));
    let (mut intra, mut inter) = (0.0f64, 0.0f64);
    for (rank, (share, amount)) in shares.iter().zip(amounts).enumerate() {
        let node = nodes[topology.node_of(rank)];
        let product = |share: u64, amount: u64| share as f64 * amount as f64;
        intra = intra
            .max(product(*share, node.1 - amount))
            .max(product(node.0 - share, *amount));
        inter = inter
            .max(product(*share, all_amounts - node.1))
            .max(product(all_shares - node.0, *amount));
    }
    let scale = bytes as f64 / (all_shares as f64).max(1.0);
    transfer_seconds(cluster, intra * scale, inter * scale)
}

#[cfg(test)]
mod tests {
    use super::{all_to_all_seconds, spread_seconds};
    use crate::{ClusterSpec, Topology};
    use ndarray::Array2;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spread_as_pair_by_pair(
            sides in prop::collection::vec((0u64..4, 0u64..4), 1..7),
            ranks_per_node in 1usize..4,
            preset in 0usize..3,
        ) {
            let (shares, amounts): (Vec<_>, Vec<_>) = sides.into_iter().unzip();
            let ranks = shares.len();
            let topology = Topology::new(ranks, ranks_per_node).unwrap();
            let cluster = &ClusterSpec::presets()[preset];
            // So many bytes each that every rank sends whole ones.
            let all = shares.iter().sum::<u64>().max(1);
            let bytes = Array2::from_shape_fn((ranks, ranks), |(a, b)| shares[a] * amounts[b] * 1_000_000);
            let pairs = all_to_all_seconds(cluster, &topology, bytes.view());
            let spread = spread_seconds(cluster, &topology, &shares, &amounts, 1_000_000 * all);
            prop_assert!((spread - pairs).abs() <= 1e-12 * pairs, "{spread} for {pairs}");
        }
    }
}
