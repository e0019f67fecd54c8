//! Norms of the pairs' terms in all weight gradients, for the score `full-grad`: every pair runs backward, as far as they need it.

use lrmoe_comm::Collective;
use lrmoe_kernels::RowBuffers;
use lrmoe_metric::{Pairs, Selection, SquaredNorm};

use super::backward::{Inputs, per_pair};
use super::buffers::Buffers;
use super::dispatch::{Chunk, Dispatch};
use super::element::LayerElement;
use super::experts::Experts;
use super::pass::{Pass, on_host};
use super::stash::PairStash;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::policy::DxWeight;

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Makes the norms of `kept` those of the gradients of this rank's pairs.
    pub(super) fn gradient_norms<C: Collective>(
        &mut self,
        comm: &mut C,
        pairs: &Pairs<'_>,
        [x, dy]: [&B::Buffer<T>; 2],
        kept: &mut PairStash<B, T>,
    ) -> Result<(), Error> {
        let mut clock = Clock::start();
        unmasked(pairs, &mut self.lists.chosen);
        let table = self.route_chosen(comm, &mut clock, pairs, false)?;
        let mut dispatch = Dispatch::new(
            &table,
            self.rank,
            (pairs.expert_ids(), pairs.top_k()),
            &mut self.lists,
            self.config.chunk_rows,
            0,
        )?;
        let (backend, buffers) = (&self.backend, &mut self.buffers);
        per_pair(
            &Selection::default(),
            pairs.len(),
            &mut buffers.host.weights,
        );
        backend.resize(&mut buffers.all_dp, dispatch.rows())?;
        let mut pass = Pass::new(backend, comm, clock, &mut self.stats.seconds);
        pass.lap(Stage::Route);
        let inputs = Inputs {
            x,
            dy,
            pairs,
            width: self.config.shape.width,
            dx_weight: DxWeight::One,
            at_once: false,
        };
        while let Some(chunk) = dispatch.next_chunk()? {
            let place = (&dispatch, &chunk);
            buffers.norms_chunk(&mut pass, place, &self.experts, &inputs)?;
            self.stats.buffer_bytes = self.stats.buffer_bytes.max(buffers.bytes() as u64);
        }
        let [copy, ..] = &mut buffers.host.scalars;
        let found = on_host(backend, &buffers.all_dp, copy)?;
        let [norms, _] = &mut buffers.host.norms;
        norms.clear();
        norms.resize(pairs.len(), SquaredNorm::default());
        for (pair, norm) in self.lists.gone.iter().zip(found) {
            norms[*pair as usize] = SquaredNorm::of(&[*norm]);
        }
        backend.write(norms, kept.norms_mut())?;
        pass.lap(Stage::Score);
        Ok(())
    }
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    /// One chunk: rows of x and dy to their instances, and the norms back to `all_dp`.
    fn norms_chunk<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        experts: &Experts<B, T>,
        inputs: &Inputs<'_, B, T>,
    ) -> Result<(), Error> {
        let (backend, shape) = (pass.backend, experts.shape());
        self.bring_backward(pass, (dispatch, chunk), inputs, true)?;
        let rows = RowBuffers {
            x: &self.x,
            dy: &self.dy,
            gate_weights: &self.gate_weights,
            weights: &self.weights,
        };
        let offsets = chunk.grouping.offsets();
        backend.gradient_norms(shape, experts.weights(), offsets, &rows, &mut self.dp)?;
        pass.lap(Stage::Score);
        self.give_dp(pass, chunk)?;
        self.take_dp(pass, chunk)
    }
}
