//! One chunk at a time, or three at different stages, in the forward pass.

use lrmoe_comm::Collective;
use lrmoe_metric::{Pairs, Row, SquaredNorm};

use crate::error::Error;
use crate::layer::Backend;
use crate::layer::buffers::{Buffers, ungroup};
use crate::layer::dispatch::{Chunk, Dispatch};
use crate::layer::early::Left;
use crate::layer::element::LayerElement;
use crate::layer::experts::Experts;
use crate::layer::instances::Keeping;
use crate::layer::line::Step;
use crate::layer::pass::{Pass, on_host};
use crate::layer::stash::PairStash;
use crate::layer::stats::Stage;
use crate::layer::traffic::Way;

/// What a pass goes by.
pub(super) struct Inputs<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`
    pub(super) x: &'a B::Buffer<T>,
    pub(super) pairs: &'a Pairs<'a>,
    pub(super) experts: &'a Experts<B, T>,
    /// Whether all rows go in one chunk.
    pub(super) at_once: bool,
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    /// Rows to their instances, through the experts, and back into `y`, weighted; what is kept per pair beside it.
    pub(super) fn forward_step<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, step): (&Dispatch<'_>, Step<'_>),
        inputs: &Inputs<'_, B, T>,
        (kept, instances): Left<'_, B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        match step {
            Step::Bring(chunk) => {
                self.index_tokens(pass.backend, dispatch, inputs)?;
                let x = (inputs.x, inputs.experts.shape().width);
                self.legs[0].bring(pass, chunk, x, &self.index, &mut self.x)
            }
            Step::Compute { chunk, next, last } => {
                let left = ((kept, instances), y);
                self.compute_forward(pass, dispatch, [next, last], chunk, inputs, left)
            }
            Step::GiveBack(chunk) => self.give_outputs(pass, (dispatch, chunk), inputs, kept, y),
        }
    }

    /// Finds the rows of the latest chunk's tokens.
    fn index_tokens(
        &mut self,
        backend: &B,
        dispatch: &Dispatch<'_>,
        inputs: &Inputs<'_, B, T>,
    ) -> Result<(), Error> {
        let tokens = inputs.pairs.tokens();
        Ok(backend.row_index_into(dispatch.tokens(), tokens, &mut self.index)?)
    }

    /// The experts compute with one chunk; rows of the next come meanwhile, and what they made of the last goes back.
    fn compute_forward<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        dispatch: &Dispatch<'_>,
        [next, last]: [Option<&Chunk>; 2],
        chunk: &Chunk,
        inputs: &Inputs<'_, B, T>,
        ((kept, instances), y): (Left<'_, B, T>, &mut B::Buffer<T>),
    ) -> Result<(), Error> {
        let (backend, experts) = (pass.backend, inputs.experts);
        let width = experts.shape().width;
        let mut legs = std::mem::take(&mut self.legs);
        let [out, _, back] = &mut legs;
        let mut rows = Vec::with_capacity(2);
        if let Some(last) = last {
            back.pack_back(pass, last, (&self.out, width))?;
            rows.push(back.journey(backend, last, Way::Back, width)?);
        }
        let norms = last.filter(|_| kept.norms_of() == Some(Row::Hidden));
        if let Some(last) = norms {
            self.pack_norms(backend, last)?;
        }
        if let Some(next) = next {
            self.index_tokens(backend, dispatch, inputs)?;
            out.pack(pass, (inputs.x, width), &self.index)?;
            rows.push(out.journey(backend, next, Way::Out, width)?);
        }
        let norms = norms.map(|last| self.host.norm_words.journey(last, Way::Back, 2));
        pass.lap(Stage::Exchange);
        let exchange = (!rows.is_empty()).then_some(|comm: &mut C| {
            rows.into_iter().try_for_each(|rows| rows.run(comm))?;
            norms.map_or(Ok(()), |norms| norms.run(comm))
        });
        let compute = || {
            let norms = (kept.norms_of() == Some(Row::Hidden)).then_some(&mut self.norms);
            let (shape, weights, x) = (experts.shape(), experts.weights(), &self.x);
            let (offsets, keeping) = (chunk.grouping.offsets(), instances.keeping());
            let (scratch, out) = (&mut self.scratch, &mut self.out);
            let (rows, all) = (chunk.grouping.grouped_rows(), &mut self.pre_activations);
            match instances.chosen_of_next(backend, rows)? {
                Some((index, chosen)) => backend.forward_chosen(
                    shape,
                    weights,
                    offsets,
                    x,
                    scratch,
                    out,
                    norms,
                    index,
                    [all, chosen],
                )?,
                None => {
                    let kept = (keeping != Keeping::Nothing).then_some(all);
                    backend.forward(shape, weights, offsets, x, scratch, out, norms, kept)?;
                }
            }
            Ok(())
        };
        pass.overlap(exchange, compute, Stage::Forward)?;
        let hidden = (kept.norms_of() == Some(Row::Hidden)).then_some(&self.norms);
        instances.take(
            backend,
            experts.shape(),
            (chunk.grouping.offsets(), inputs.at_once),
            (&self.x, &self.pre_activations),
            (hidden, &self.out),
        )?;
        pass.lap(Stage::Compact);
        if let Some(last) = last {
            back.arrive(pass, Way::Back)?;
            self.take_outputs(pass, (dispatch, last), &back.near, inputs, kept, y)?;
        }
        if let Some(next) = next {
            out.arrive(pass, Way::Out)?;
            out.unpack(pass, next, width, &mut self.x)?;
        }
        self.legs = legs;
        Ok(())
    }

    /// What the experts made of a chunk goes back.
    fn give_outputs<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        inputs: &Inputs<'_, B, T>,
        kept: &mut PairStash<B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let width = inputs.experts.shape().width;
        let (mut legs, out) = (
            std::mem::take(&mut self.legs),
            std::mem::take(&mut self.out),
        );
        let back = legs[0].give_back(pass, chunk, (&out, width))?;
        if kept.norms_of() == Some(Row::Hidden) && !pass.is_alone() {
            self.pack_norms(pass.backend, chunk)?;
            let norms = self.host.norm_words.journey(chunk, Way::Back, 2);
            norms.run(pass.comm)?;
            pass.lap(Stage::Exchange);
        }
        self.take_outputs(pass, (dispatch, chunk), back, inputs, kept, y)?;
        (self.legs, self.out) = (legs, out);
        Ok(())
    }

    /// Adds what has come back of a chunk, in the order of its pairs, to y, and puts by what is kept of it.
    fn take_outputs<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        back: &B::Buffer<T>,
        inputs: &Inputs<'_, B, T>,
        kept: &mut PairStash<B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (backend, width) = (pass.backend, inputs.experts.shape().width);
        let (all, pairs) = (inputs.pairs, dispatch.pairs(chunk));
        let [gate_weights, ..] = &mut self.host.scalars;
        gate_weights.clear();
        let of_pair = |pair: &u32| all.gate_weights()[*pair as usize];
        gate_weights.extend(pairs.iter().map(of_pair));
        backend.write(gate_weights, &mut self.gate_weights)?;
        let slots = [all.tokens(), all.top_k()];
        backend.pair_rows_into(pairs, slots, &mut self.pairs)?;
        let weights = Some(&self.gate_weights);
        if inputs.at_once {
            backend.combine(back, width, &self.pairs, weights, y)?;
        } else {
            let sums = T::sums::<B>(y, &mut self.sums);
            backend.scatter_add(back, width, &self.pairs, weights, sums)?;
        }
        if kept.keeps_outputs() {
            kept.take_outputs(pairs, on_host(backend, back, &mut self.host.rows)?);
        }
        pass.lap(Stage::Compact);
        match kept.norms_of() {
            Some(Row::Hidden) => self.take_norms(pass, chunk)?,
            // The rows are here already, so that their norms need no exchange.
            Some(Row::Output) => {
                backend.squared_norms(back, [pairs.len(), width], &mut self.back_norms)?;
                backend.copy(&self.back_norms, &mut self.all_norms, chunk.rows.start)?;
                pass.lap(Stage::Score);
            }
            _ => {}
        }
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// |h|^2 of grouped rows, to go back to the ranks that the pairs came from.
    fn pack_norms(&mut self, backend: &B, chunk: &Chunk) -> Result<(), Error> {
        let [copy, norms] = &mut self.host.norms;
        ungroup(backend, chunk, &self.norms, [copy, norms])?;
        let words = |norm: &SquaredNorm| [norm.significand.to_bits(), norm.scale];
        let outgoing = &mut self.host.norm_words.outgoing;
        outgoing.clear();
        outgoing.extend(norms.iter().flat_map(words));
        Ok(())
    }

    /// Puts |h|^2 of the chunk's pairs where those of all chunks are.
    fn take_norms<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
    ) -> Result<(), Error> {
        let (backend, at) = (pass.backend, chunk.rows.start);
        if pass.is_alone() {
            return Ok(backend.copy(&self.norms, &mut self.all_norms, at)?);
        }
        let [_, norms] = &mut self.host.norms;
        norms.clear();
        let (words, _) = self.host.norm_words.incoming.as_chunks();
        norms.extend(words.iter().map(|&[significand, scale]| SquaredNorm {
            significand: f32::from_bits(significand),
            scale,
        }));
        backend.write(norms, &mut self.back_norms)?;
        Ok(backend.copy(&self.back_norms, &mut self.all_norms, at)?)
    }
}
