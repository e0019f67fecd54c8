//! What a layer did in one step, and how long each stage took.

use std::time::Instant;

use ndarray::Array2;

/// A stage of a layer's step, for its clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Waiting until every rank has come to the layer; no part of the layer's time.
    Wait,
    /// Quotas and placement.
    Plan,
    /// Routing tables and sending orders.
    Route,
    /// Gather, regroup, scatter-add.
    Compact,
    /// All-to-all of rows and all-gather of counts, waiting for the slowest rank included. Of exchanges that overlap with computing, what they
    /// take longer than it.
    Exchange,
    /// Expert FFN forward.
    Forward,
    /// Norms, scores and the profile, their collectives included.
    Score,
    /// Selection within the quotas, its collectives included.
    Select,
    /// Expert FFN backward.
    Backward,
    /// Gradients to their owners, the optimizer, weights to the next placement.
    Update,
}

impl Stage {
    /// All stages in the order of a step.
    pub const ALL: [Self; 10] = [
        Self::Wait,
        Self::Plan,
        Self::Route,
        Self::Compact,
        Self::Exchange,
        Self::Forward,
        Self::Score,
        Self::Select,
        Self::Backward,
        Self::Update,
    ];

    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Plan => "plan",
            Self::Route => "route",
            Self::Compact => "compact",
            Self::Exchange => "exchange",
            Self::Forward => "forward",
            Self::Score => "score",
            Self::Select => "select",
            Self::Backward => "backward",
            Self::Update => "update",
        }
    }
}

/// Seconds per stage, indexed by `Stage`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds(pub [f64; Stage::ALL.len()]);

impl Seconds {
    /// Sum over the stages without `Stage::Wait`.
    pub fn total(&self) -> f64 {
        self.0.iter().sum::<f64>() - self.0[Stage::Wait as usize]
    }
}

/// Gives the time since the last reading to a stage.
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn lap(&mut self, seconds: &mut Seconds, stage: Stage) {
        let now = Instant::now();
        seconds.0[stage as usize] += (now - self.0).as_secs_f64();
        self.0 = now;
    }
}

/// One training step of one layer, as one rank saw it. Counts over all ranks are the same on every rank; bytes, buffers and seconds are this rank's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerStats {
    /// Pairs per expert over all ranks, before anything is dropped, `[experts]`.
    pub loads: Vec<u32>,
    /// Pairs per expert that were to be selected, `[experts]`.
    pub quotas: Vec<u32>,
    /// Pairs over all ranks dropped in forward and backward.
    pub dropped: u32,
    /// Checksum of this rank's pairs that were selected: added up over the ranks (modulo 2^64) it is the same for any number of ranks and on any
    /// backend that selects the same pairs.
    pub selection: u64,
    /// Rows sent from rank to rank in the forward pass, `[ranks, ranks]`.
    pub forward_rows: Array2<u64>,
    /// Rows sent from rank to rank in the backward pass, `[ranks, ranks]`.
    pub backward_rows: Array2<u64>,
    /// Bytes this rank sent to others in the forward pass.
    pub forward_bytes: u64,
    /// Bytes this rank sent to others in the backward pass; gradient reduction is not included, nor are the rows that score `full-grad` takes.
    pub backward_bytes: u64,
    /// Bytes of gradients this rank sent to each owner, 0 to itself, `[ranks]`; empty before the reduction.
    pub reduction_bytes: Vec<u64>,
    /// Bytes of weights this rank sent to each rank of the next placement, 0 to itself, `[ranks]`; empty before the update.
    pub delivery_bytes: Vec<u64>,
    /// Expert instances on each rank, `[ranks]`.
    pub instances: Vec<u32>,
    /// Token buffers held: rows in exchange, workspaces, stash.
    pub buffer_bytes: u64,
    /// Time per stage, as the host sees it: a device works behind, and its time shows in the stage that waits for it.
    pub seconds: Seconds,
}

/// Largest over mean of the rows that the ranks receive; 1 when there are none.
pub fn imbalance(rows: &Array2<u64>) -> f64 {
    let received: Vec<u64> = rows
        .columns()
        .into_iter()
        .map(|column| column.sum())
        .collect();
    let (largest, total) = (
        received.iter().max().copied().unwrap_or(0),
        received.iter().sum::<u64>(),
    );
    if total == 0 {
        1.0
    } else {
        largest as f64 * received.len() as f64 / total as f64
    }
}
