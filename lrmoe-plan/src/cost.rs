use ndarray::{Array2, ArrayView2};

use crate::cluster::Link;
use crate::error::expect;
use crate::{ClusterSpec, Error, ExpertShape, Topology};

/// What the ranks do in one step of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepWork {
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
#[derive(Clone, Copy, Debug, PartialEq)]
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
///   every projection has an input and a weight gradient, twice the forward pass, and gate and up are
///   recomputed: 16 D F gated, 10 D F plain.
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

    let projection = 2.0 * shape.width as f64 * shape.hidden as f64;
    let projections = shape.matrices() as f64;
    let forward_flop = projections * projection;
    let recompute_flop = (projections - 1.0) * projection;
    let pass = |rows: &[u64], flop: f64| {
        let seconds = rows.iter().zip(&work.instances).map(|(&rows, &instances)| {
            rows as f64 * flop / cluster.flops + f64::from(instances) * cluster.launch_seconds
        });
        seconds.fold(0.0, f64::max)
    };
    let all_to_all = |bytes: &Array2<u64>| all_to_all_seconds(cluster, &topology, bytes.view());
    Ok(ModelledSeconds {
        forward: pass(&work.forward_rows, forward_flop),
        backward: pass(&work.backward_rows, 2.0 * forward_flop + recompute_flop),
        exchange: work.exchanges.iter().map(all_to_all).sum(),
        delivery: all_to_all(&work.delivery),
    })
}

fn all_to_all_seconds(
    cluster: &ClusterSpec,
    topology: &Topology,
    bytes: ArrayView2<'_, u64>,
) -> f64 {
    let class = |link: &Link, within: bool| {
        let ranks = topology.ranks();
        let (mut sent, mut received) = (vec![0.0; ranks], vec![0.0; ranks]);
        for ((from, to), &bytes) in bytes.indexed_iter() {
            let same_node = topology.node_of(from) == topology.node_of(to);
            if from != to && same_node == within {
                sent[from] += bytes as f64;
                received[to] += bytes as f64;
            }
        }
        let most = sent.into_iter().chain(received).fold(0.0, f64::max);
        if most > 0.0 {
            link.latency_seconds + most / link.bytes_per_second
        } else {
            0.0
        }
    };
    class(&cluster.intra, true).max(class(&cluster.inter, false))
}
