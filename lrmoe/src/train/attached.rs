//! A MoE layer of a rank as its model sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lrmoe_comm::{Collective, Counted, Hierarchical};
use ndarray::{Array2, ArrayView2};

use super::oracle::Oracle;
use super::retention::Noise;
use crate::layer::{Backend, MoeLayer};
use crate::model::{LayerError, SparseLayer};

/// A communicator that counts what it sends and knows of nodes.
pub(super) type InNodes<C> = Hierarchical<Counted<C>>;

/// A layer with the communicator its rank shares among its layers.
#[derive(Debug)]
pub(super) struct Attached<B: Backend, C> {
    pub(super) layer: MoeLayer<B>,
    pub(super) comm: Arc<Mutex<InNodes<C>>>,
    pub(super) step: u32,
    /// Whether the step's pairs are recorded, and those of the last forward pass.
    pub(super) records_pairs: bool,
    pub(super) pairs: Option<(Array2<i32>, Array2<f32>)>,
    /// Whether the step's noise is measured, and what was found in how many seconds.
    pub(super) measures_noise: bool,
    pub(super) noise: (Noise, f64),
    /// Draws that the oracle is to look at in this step, 0 if it is not asked, and what it found.
    pub(super) oracle_draws: u32,
    pub(super) oracle: Option<Oracle>,
}

impl<B: Backend, C: Collective> SparseLayer for Attached<B, C> {
    fn forward(
        &mut self,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        training: bool,
    ) -> Result<Array2<f32>, LayerError> {
        let step = training.then_some(self.step);
        if training {
            let recorded = self.records_pairs || self.oracle_draws > 0;
            self.pairs = recorded.then(|| (expert_ids.to_owned(), gate_weights.to_owned()));
        }
        Ok(self
            .layer
            .forward(&mut *lock(&self.comm), x, expert_ids, gate_weights, step)?)
    }

    fn backward(
        &mut self,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), LayerError> {
        let comm = &mut *lock(&self.comm);
        if self.measures_noise {
            self.noise = Noise::measure(&mut self.layer, comm, dy)?;
        }
        self.oracle = None;
        if self.oracle_draws > 0 {
            // What the oracle sends is no part of the step.
            let sent = *comm.world().traffic();
            let ahead = Oracle::ahead(&mut self.layer, comm, dy, self.oracle_draws)?;
            comm.world_mut().set_traffic(sent);
            self.oracle = Some(ahead);
        }
        let (dx, dp) = self.layer.backward(comm, dy)?;
        if let (Some(oracle), Some((ids, _))) = (&mut self.oracle, &self.pairs) {
            let judged = self.layer.scores().zip(self.layer.selection());
            oracle.take_backward([&dx, &dp], ids, self.layer.config().experts, judged);
        }
        Ok((dx, dp))
    }

    fn loads(&self) -> &[u32] {
        self.layer.loads().map_or(&[], |loads| loads.per_expert())
    }
}

/// A panic elsewhere must not turn into a second one here; its rank reports it.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
