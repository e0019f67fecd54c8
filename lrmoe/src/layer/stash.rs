//! What the forward pass leaves for the backward pass: the pairs, a squared norm once per pair, and rows at their instances. In stash mode `recompute`
//! none of these stay, but x with the caller.

use lrmoe_metric::{Pairs, Row, SquaredNorm};
use lrmoe_plan::Quotas;
use ndarray::{Array2, ArrayView2};

use super::Backend;
use super::buffers::{Buffers, bytes};
use super::element::LayerElement;
use super::instances::InstanceRows;
use crate::error::Error;
use crate::policy::Policy;

/// What is left of the last training forward pass, in buffers that are kept from step to step.
#[derive(Debug)]
pub(super) struct Stash<B: Backend<T>, T: LayerElement> {
    /// Number of its step, until the backward pass takes it.
    pub(super) step: Option<u32>,
    pub(super) expert_ids: Array2<i32>,
    pub(super) gate_weights: Array2<f32>,
    pub(super) first_pair: u64,
    pub(super) quotas: Option<Quotas>,
    pub(super) pairs: PairStash<B, T>,
    pub(super) instances: InstanceRows<B, T>,
}

impl<B: Backend<T>, T: LayerElement> Default for Stash<B, T> {
    fn default() -> Self {
        Self {
            step: None,
            expert_ids: Array2::default((0, 0)),
            gate_weights: Array2::default((0, 0)),
            first_pair: 0,
            quotas: None,
            pairs: PairStash::default(),
            instances: InstanceRows::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> Stash<B, T> {
    pub(super) fn bytes(&self) -> usize {
        self.expert_ids.len() * (size_of::<i32>() + size_of::<f32>())
            + bytes::<B, SquaredNorm>(&self.pairs.norms)
            + self.pairs.rows.capacity() * size_of::<u32>()
            + self.pairs.outputs.len() * size_of::<T>()
            + self.instances.bytes()
    }
}

/// What of it is kept of each pair, where the policy wants it.
#[derive(Debug)]
pub(super) struct PairStash<B: Backend<T>, T: LayerElement> {
    norms_of: Option<Row>,
    keeps_outputs: bool,
    /// `[pairs]`; those of masked pairs mean nothing.
    norms: B::Buffer<SquaredNorm>,
    /// The experts' outputs, without the gate weight, `[pairs, width]`.
    outputs: Array2<T>,
    /// Where in the order in which they went out the pairs stand, `[pairs]`.
    rows: Vec<u32>,
}

impl<B: Backend<T>, T: LayerElement> Default for PairStash<B, T> {
    fn default() -> Self {
        Self {
            norms_of: None,
            keeps_outputs: false,
            norms: Default::default(),
            outputs: Array2::default((0, 0)),
            rows: Vec::new(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> PairStash<B, T> {
    /// Makes room for `rows` rows of these pairs, if `training`.
    pub(super) fn start(
        &mut self,
        backend: &B,
        buffers: &mut Buffers<B, T>,
        policy: Option<&Policy>,
        (pairs, rows, width): (usize, usize, usize),
    ) -> Result<(), Error> {
        self.norms_of = policy.and_then(Policy::forward_norms);
        self.keeps_outputs = policy.is_some_and(Policy::needs_outputs);
        if self.norms_of.is_some() {
            // A row that masked pairs can name, in any case.
            backend.resize(&mut buffers.all_norms, rows.max(1))?;
        }
        if self.keeps_outputs && self.outputs.dim() != (pairs, width) {
            self.outputs = Array2::default((pairs, width));
        }
        Ok(())
    }

    /// The rows of each pair whose norms are kept.
    pub(super) fn norms_of(&self) -> Option<Row> {
        self.norms_of
    }

    pub(super) fn keeps_outputs(&self) -> bool {
        self.keeps_outputs
    }

    /// Puts the output rows `[pairs, width]` of these pairs by.
    pub(super) fn take_outputs(&mut self, pairs: &[u32], rows: &[T]) {
        let width = self.outputs.ncols();
        for (pair, row) in pairs.iter().zip(rows.chunks_exact(width)) {
            let row = ArrayView2::from_shape((1, width), row).expect("a row of the width");
            self.outputs.row_mut(*pair as usize).assign(&row.row(0));
        }
    }

    /// Puts the norms, which lie in the order of `gone`, in the order of the pairs.
    pub(super) fn finish(
        &mut self,
        backend: &B,
        buffers: &mut Buffers<B, T>,
        gone: &[u32],
        pairs: &Pairs<'_>,
    ) -> Result<(), Error> {
        if self.norms_of.is_none() {
            return Ok(());
        }
        self.rows.clear();
        self.rows.resize(pairs.len(), 0);
        for (row, pair) in (0..).zip(gone) {
            self.rows[*pair as usize] = row;
        }
        let Buffers {
            all_norms, index, ..
        } = buffers;
        backend.row_index_into(&self.rows, B::len(all_norms), index)?;
        backend.gather(all_norms, 1, index, &mut self.norms)?;
        Ok(())
    }

    /// Those of `norms_of`, `[pairs]`.
    pub(super) fn norms(&self) -> &B::Buffer<SquaredNorm> {
        &self.norms
    }

    /// Those norms, for whoever finds them in the backward pass.
    pub(super) fn norms_mut(&mut self) -> &mut B::Buffer<SquaredNorm> {
        &mut self.norms
    }

    pub(super) fn outputs(&self) -> Option<&Array2<T>> {
        self.keeps_outputs.then_some(&self.outputs)
    }
}

/// Copies an array into memory that is kept, if it has the size.
pub(super) fn keep<T: Copy>(from: ArrayView2<'_, T>, to: &mut Array2<T>) {
    if to.dim() == from.dim() {
        to.assign(&from);
    } else {
        *to = from.as_standard_layout().into_owned();
    }
}
