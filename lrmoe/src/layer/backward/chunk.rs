//! One chunk at a time, or three at different stages, in the backward pass.

use lrmoe_comm::Collective;
use lrmoe_kernels::{Memory, RowBuffers};
use lrmoe_metric::Pairs;

use super::Written;
use crate::error::Error;
use crate::layer::Backend;
use crate::layer::buffers::{Buffers, columns, columns_mut, ungroup};
use crate::layer::dispatch::{Chunk, Dispatch};
use crate::layer::element::LayerElement;
use crate::layer::experts::Experts;
use crate::layer::instances::InstanceRows;
use crate::layer::line::Step;
use crate::layer::pass::Pass;
use crate::layer::stats::Stage;
use crate::layer::traffic::Way;
use crate::policy::DxWeight;

/// What a chunk's computation takes from and adds to: inputs, rows that stay at their instances if there are any, dx.
type Around<'a, B, T> = (
    &'a Inputs<'a, B, T>,
    Option<&'a mut InstanceRows<B, T>>,
    &'a mut <B as Memory>::Buffer<T>,
);

/// What the backward pass goes by.
pub(in crate::layer) struct Inputs<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`, as dy.
    pub(in crate::layer) x: &'a B::Buffer<T>,
    pub(in crate::layer) dy: &'a B::Buffer<T>,
    pub(in crate::layer) pairs: &'a Pairs<'a>,
    pub(in crate::layer) width: usize,
    pub(in crate::layer) dx_weight: DxWeight,
    /// Whether all rows go in one chunk.
    pub(in crate::layer) at_once: bool,
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    /// Rows of x and dy to their instances, through the experts, and dx and dp back to where they came from.
    pub(super) fn backward_step<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, step, stays): (&Dispatch<'_>, Step<'_>, Option<&mut InstanceRows<B, T>>),
        (experts, written): (&mut Experts<B, T>, &mut Written),
        inputs: &Inputs<'_, B, T>,
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        match step {
            Step::Bring(chunk) => {
                self.bring_backward(pass, (dispatch, chunk), inputs, stays.is_none())
            }
            Step::Compute { chunk, next, last } => {
                let accumulate = written.next(chunk.grouping.offsets());
                let chunk = (chunk, &accumulate[..]);
                let rows = (inputs, stays, dx);
                self.compute_backward(pass, dispatch, [next, last], chunk, experts, rows)
            }
            Step::GiveBack(chunk) => self.give_dx(pass, (dispatch, chunk), inputs, dx),
        }
    }

    /// Rows of dy come to the experts, with their weights, and those of x if they are to.
    pub(in crate::layer) fn bring_backward<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        inputs: &Inputs<'_, B, T>,
        brings_x: bool,
    ) -> Result<(), Error> {
        self.index_rows(pass.backend, dispatch, inputs.pairs)?;
        let [leg, ..] = &mut self.legs;
        let [x, dy] = [inputs.x, inputs.dy].map(|rows| (rows, inputs.width));
        if brings_x {
            leg.bring(pass, chunk, x, &self.index, &mut self.x)?;
        }
        leg.bring(pass, chunk, dy, &self.index, &mut self.dy)?;
        self.pack_weights(dispatch.pairs(chunk), inputs.pairs);
        if !pass.is_alone() {
            let weights = self.host.row_weights.journey(chunk, Way::Out, 2);
            weights.run(pass.comm)?;
            pass.lap(Stage::Exchange);
        }
        self.take_weights(pass, chunk)
    }

    /// The experts compute with one chunk, adding to gradients where `accumulate` says so; rows of the next come meanwhile, and what they
    /// made of the last goes back.
    fn compute_backward<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        dispatch: &Dispatch<'_>,
        [next, last]: [Option<&Chunk>; 2],
        (chunk, accumulate): (&Chunk, &[bool]),
        experts: &mut Experts<B, T>,
        (inputs, mut stays, dx): Around<'_, B, T>,
    ) -> Result<(), Error> {
        let (backend, width) = (pass.backend, inputs.width);
        let mut legs = std::mem::take(&mut self.legs);
        let [x_leg, dy_leg, back] = &mut legs;
        let mut rows = Vec::with_capacity(3);
        if let Some(last) = last {
            back.pack_back(pass, last, (&self.out, width))?;
            rows.push(back.journey(backend, last, Way::Back, width)?);
            self.pack_dp(backend, last)?;
        }
        if let Some(next) = next {
            self.index_rows(backend, dispatch, inputs.pairs)?;
            let legs = [(&mut *x_leg, inputs.x), (&mut *dy_leg, inputs.dy)];
            for (leg, from) in legs.into_iter().skip(stays.is_some().into()) {
                leg.pack(pass, (from, width), &self.index)?;
                rows.push(leg.journey(backend, next, Way::Out, width)?);
            }
            self.pack_weights(dispatch.pairs(next), inputs.pairs);
        }
        let (dp, weights) = (&mut self.host.dp, &mut self.host.row_weights);
        let dp = last.map(|last| dp.journey(last, Way::Back, 1));
        let weights = next.map(|next| weights.journey(next, Way::Out, 2));
        pass.lap(Stage::Exchange);
        let exchange = (!rows.is_empty()).then_some(|comm: &mut C| {
            let mut numbers = dp.into_iter().chain(weights);
            rows.into_iter().try_for_each(|rows| rows.run(comm))?;
            numbers.try_for_each(|numbers| numbers.run(comm))
        });
        let brings_x = stays.is_none();
        let compute = || {
            let room = (&mut self.x, &mut self.pre_activations);
            let (x, kept) = match &mut stays {
                None => (&*room.0, None),
                Some(instances) => {
                    let count = chunk.grouping.grouped_rows();
                    let (x, kept) = instances.give(backend, experts.shape(), count, room)?;
                    (x, Some(kept))
                }
            };
            let rows = RowBuffers {
                x,
                dy: &self.dy,
                gate_weights: &self.gate_weights,
                weights: &self.weights,
            };
            let shape = *experts.shape();
            let (weights, gradients) = experts.weights_and_gradients();
            Ok(backend.backward(
                &shape,
                weights,
                chunk.grouping.offsets(),
                &rows,
                kept,
                &mut self.scratch,
                &mut self.out,
                &mut self.dp,
                gradients,
                accumulate,
            )?)
        };
        pass.overlap(exchange, compute, Stage::Backward)?;
        if let Some(last) = last {
            back.arrive(pass, Way::Back)?;
            self.take_dx(pass, (dispatch, last), &back.near, inputs, dx)?;
        }
        if let Some(next) = next {
            let legs = [(x_leg, &mut self.x), (dy_leg, &mut self.dy)];
            for (leg, to) in legs.into_iter().skip((!brings_x).into()) {
                leg.arrive(pass, Way::Out)?;
                leg.unpack(pass, next, width, to)?;
            }
            self.take_weights(pass, next)?;
        }
        self.legs = legs;
        Ok(())
    }

    /// What the experts made of a chunk goes back.
    fn give_dx<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        inputs: &Inputs<'_, B, T>,
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (mut legs, out) = (
            std::mem::take(&mut self.legs),
            std::mem::take(&mut self.out),
        );
        self.give_dp(pass, chunk)?;
        let back = legs[0].give_back(pass, chunk, (&out, inputs.width))?;
        self.take_dx(pass, (dispatch, chunk), back, inputs, dx)?;
        (self.legs, self.out) = (legs, out);
        Ok(())
    }

    /// Finds the rows of the latest chunk's tokens.
    fn index_rows(
        &mut self,
        backend: &B,
        dispatch: &Dispatch<'_>,
        pairs: &Pairs<'_>,
    ) -> Result<(), Error> {
        Ok(backend.row_index_into(dispatch.tokens(), pairs.tokens(), &mut self.index)?)
    }

    /// Gate weights and selection weights of a chunk's pairs, to go to where their rows go.
    fn pack_weights(&mut self, chunk: &[u32], pairs: &Pairs<'_>) {
        let of_pair = |pair: &u32| {
            let pair = *pair as usize;
            [pairs.gate_weights()[pair], self.host.weights[pair]]
        };
        let outgoing = &mut self.host.row_weights.outgoing;
        outgoing.clear();
        outgoing.extend(chunk.iter().flat_map(of_pair));
    }

    /// Puts the weights that have come where the experts take them.
    fn take_weights<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
    ) -> Result<(), Error> {
        let weights = &mut self.host.row_weights;
        let (grouped, incoming) = (&mut weights.outgoing, &weights.incoming);
        if !pass.is_alone() {
            grouped.resize(incoming.len(), 0.0);
            chunk
                .grouping
                .group(columns(incoming, 2), columns_mut(grouped, 2))?;
        }
        let (pairs, _) = grouped.as_chunks::<2>();
        let lists = self.host.scalars.iter_mut();
        for ((list, part), buffer) in lists
            .zip(0..)
            .zip([&mut self.gate_weights, &mut self.weights])
        {
            list.clear();
            list.extend(pairs.iter().map(|pair| pair[part]));
            pass.backend.write(list, buffer)?;
        }
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// dp of grouped rows goes back to the ranks that the pairs came from.
    pub(in crate::layer) fn give_dp<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
    ) -> Result<(), Error> {
        if !pass.is_alone() {
            self.pack_dp(pass.backend, chunk)?;
            self.host.dp.journey(chunk, Way::Back, 1).run(pass.comm)?;
            pass.lap(Stage::Exchange);
        }
        Ok(())
    }

    /// dp of grouped rows, to go back to the ranks that the pairs came from.
    fn pack_dp(&mut self, backend: &B, chunk: &Chunk) -> Result<(), Error> {
        let [copy, _] = &mut self.host.scalars;
        ungroup(backend, chunk, &self.dp, [copy, &mut self.host.dp.outgoing])
    }

    /// Puts dp that has come back of a chunk where that of all chunks is.
    pub(in crate::layer) fn take_dp<C: Collective>(
        &mut self,
        pass: &Pass<'_, B, C>,
        chunk: &Chunk,
    ) -> Result<(), Error> {
        let mut dp = &self.dp;
        if !pass.is_alone() {
            pass.backend
                .write(&self.host.dp.incoming, &mut self.back_dp)?;
            dp = &self.back_dp;
        }
        Ok(pass.backend.copy(dp, &mut self.all_dp, chunk.rows.start)?)
    }

    /// Puts what has come back of a chunk, in the order of its pairs, where that of all chunks is.
    fn take_dx<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (dispatch, chunk): (&Dispatch<'_>, &Chunk),
        back: &B::Buffer<T>,
        inputs: &Inputs<'_, B, T>,
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (backend, at) = (pass.backend, chunk.rows.start);
        self.take_dp(pass, chunk)?;
        let rows = (back, inputs.width);
        if inputs.at_once {
            self.combine_dx(backend, rows, dispatch.pairs(chunk), inputs, dx)?;
        } else {
            backend.copy(back, &mut self.all_dx, at * inputs.width)?;
        }
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Writes the sums of each token's rows, in slot order, to dx.
    pub(super) fn combine_dx(
        &mut self,
        backend: &B,
        (rows, width): (&B::Buffer<T>, usize),
        pairs: &[u32],
        inputs: &Inputs<'_, B, T>,
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let mut weights = None;
        if inputs.dx_weight == DxWeight::Selection {
            let ([list, ..], by_pair) = (&mut self.host.scalars, &self.host.weights);
            list.clear();
            list.extend(pairs.iter().map(|pair| by_pair[*pair as usize]));
            backend.write(list, &mut self.weights)?;
            weights = Some(&self.weights);
        }
        let slots = [inputs.pairs.tokens(), inputs.pairs.top_k()];
        backend.pair_rows_into(pairs, slots, &mut self.pairs)?;
        Ok(backend.combine(rows, width, &self.pairs, weights, dx)?)
    }
}
