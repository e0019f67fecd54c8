//! The grouped expert FFN: which products and element-wise steps make a pass.

mod hidden;
mod product;

use lrmoe_metric::SquaredNorm;

use self::product::Matrices;
use super::{Buffer, Wgpu, batch::Batch, norm::squared_norms};
use crate::{ComputeExperts, Error, ExpertBuffers, FfnShape, Memory, RowBuffers, experts::Groups};

/// Hidden rows of a call, `[rows, F]` each, reused by later calls.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Pre-activations, then their gradients; empty where the activation has no gate.
    gate: Buffer<f32>,
    /// Pre-activations, then in the forward pass the hidden rows, in the backward pass their gradients.
    up: Buffer<f32>,
    /// Gradients of the hidden rows, then the hidden rows times w p.
    dh: Buffer<f32>,
}

/// The commands of a pass as they are gathered.
struct Pass<'a> {
    wgpu: &'a Wgpu,
    groups: Groups<'a>,
    batch: Batch<'a>,
}

impl<'a> Pass<'a> {
    fn new(wgpu: &'a Wgpu, groups: Groups<'a>) -> Self {
        let batch = Batch::new(wgpu);
        Self {
            wgpu,
            groups,
            batch,
        }
    }

    /// The pre-activations of x.
    fn project(
        &mut self,
        weights: &'a ExpertBuffers<Wgpu>,
        x: &'a Buffer<f32>,
        scratch: &'a Scratch,
    ) -> Result<(), Error> {
        let inward = |buffer| Matrices::inward(buffer, &self.groups.shape);
        let (gate, up) = (weights.gate.as_ref().map(inward), inward(&weights.up));
        if let Some(gate) = gate {
            self.rows_by_transposed(x, gate, &scratch.gate)?;
        }
        self.rows_by_transposed(x, up, &scratch.up)
    }
}

impl ComputeExperts for Wgpu {
    type Scratch = Scratch;

    fn scratch_bytes(scratch: &Scratch) -> usize {
        let Scratch { gate, up, dh } = scratch;
        let elements: usize = [gate, up, dh].map(Self::len).iter().sum();
        elements * size_of::<f32>()
    }

    fn forward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self>,
        offsets: &[usize],
        x: &Buffer<f32>,
        scratch: &mut Scratch,
        out: &mut Buffer<f32>,
        h_norms: Option<&mut Buffer<SquaredNorm>>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        let rows = groups.rows();
        self.resize(out, rows * shape.width)?;
        scratch.make_room(self, &groups)?;
        let scratch = &*scratch;
        let mut pass = Pass::new(self, groups);
        pass.project(weights, x, scratch)?;
        pass.activate(scratch)?;
        if let Some(norms) = h_norms {
            self.resize(norms, rows)?;
            let hidden = [rows, shape.hidden];
            squared_norms(&mut pass.batch, self, &scratch.up, hidden, norms)?;
        }
        pass.rows_by_transposed(&scratch.up, Matrices::down(&weights.down, shape), out)?;
        pass.batch.submit()
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self>,
        offsets: &[usize],
        inputs: &RowBuffers<'_, Self>,
        scratch: &mut Scratch,
        dx: &mut Buffer<f32>,
        dp: &mut Buffer<f32>,
        gradients: &mut ExpertBuffers<Self>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, inputs.x)?;
        groups.check_backward(inputs, gradients, accumulate)?;
        self.resize(dx, groups.rows() * shape.width)?;
        self.resize(dp, groups.rows())?;
        for matrices in [&mut gradients.up, &mut gradients.down]
            .into_iter()
            .chain(&mut gradients.gate)
        {
            self.resize(matrices, groups.matrices())?;
        }
        scratch.make_room(self, &groups)?;
        self.resize(&mut scratch.dh, groups.rows() * shape.hidden)?;

        let (scratch, dx) = (&*scratch, &*dx);
        let mut pass = Pass::new(self, groups);
        pass.project(weights, inputs.x, scratch)?;
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_matrices(inputs.dy, down, &scratch.dh, false)?;
        pass.differentiate(inputs, scratch, dp)?;
        let up = Matrices::inward(&weights.up, shape);
        pass.rows_by_matrices(&scratch.up, up, dx, false)?;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            pass.rows_by_matrices(&scratch.gate, gate, dx, true)?;
        }
        // dx is without w, what follows with it.
        pass.scale(&scratch.up, inputs.weights)?;
        pass.sum_products(
            &scratch.up,
            inputs.x,
            Matrices::inward(&gradients.up, shape),
            accumulate,
        )?;
        if let Some(gate) = &gradients.gate {
            pass.scale(&scratch.gate, inputs.weights)?;
            let gate = Matrices::inward(gate, shape);
            pass.sum_products(&scratch.gate, inputs.x, gate, accumulate)?;
        }
        let down = Matrices::down(&gradients.down, shape);
        pass.sum_products(inputs.dy, &scratch.dh, down, accumulate)?;
        pass.batch.submit()
    }
}

impl Scratch {
    /// Room for pre-activations.
    fn make_room(&mut self, wgpu: &Wgpu, groups: &Groups<'_>) -> Result<(), Error> {
        let hidden = groups.rows() * groups.shape.hidden;
        let gated = groups.shape.activation.is_gated();
        wgpu.resize(&mut self.gate, if gated { hidden } else { 0 })?;
        wgpu.resize(&mut self.up, hidden)
    }
}
