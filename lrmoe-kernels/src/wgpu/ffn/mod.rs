//! The grouped expert FFN: which products and element-wise steps make a pass.

mod hidden;
mod product;

use lrmoe_metric::SquaredNorm;

use self::product::Matrices;
use super::{Buffer, Wgpu, batch::Batch, norm::squared_norms};
use crate::{
    ComputeExperts, Error, ExpertBuffers, FfnShape, Memory, PreActivationBuffers, RowBuffers,
    experts::Groups,
};

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

/// Hidden rows where a step of a pass has them, as in [`Scratch`].
#[derive(Clone, Copy)]
struct Hidden<'a> {
    gate: &'a Buffer<f32>,
    up: &'a Buffer<f32>,
    dh: &'a Buffer<f32>,
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
        hidden: Hidden<'a>,
    ) -> Result<(), Error> {
        let inward = |buffer| Matrices::inward(buffer, &self.groups.shape);
        let (gate, up) = (weights.gate.as_ref().map(inward), inward(&weights.up));
        if let Some(gate) = gate {
            self.rows_by_transposed(x, gate, hidden.gate)?;
        }
        self.rows_by_transposed(x, up, hidden.up)
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
        mut kept: Option<&mut PreActivationBuffers<Self>>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        let rows = groups.rows();
        self.resize(out, rows * shape.width)?;
        if let Some(kept) = &mut kept {
            kept.resize(self, shape, rows)?;
        }
        let kept = kept.as_deref();
        scratch.make_room(self, &groups, kept.is_some())?;
        let scratch = &*scratch;
        let mut pass = Pass::new(self, groups);
        let pre_activations = scratch.or(kept);
        pass.project(weights, x, pre_activations)?;
        let hidden = Hidden {
            up: &scratch.up,
            ..pre_activations
        };
        if kept.is_some() {
            pass.batch.copy(pre_activations.up, hidden.up);
        }
        pass.activate(hidden)?;
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
        kept: Option<&mut PreActivationBuffers<Self>>,
        scratch: &mut Scratch,
        dx: &mut Buffer<f32>,
        dp: &mut Buffer<f32>,
        gradients: &mut ExpertBuffers<Self>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, inputs.x)?;
        let kept = kept.as_deref();
        groups.check_backward(inputs, kept, gradients, accumulate)?;
        self.resize(dx, groups.rows() * shape.width)?;
        self.resize(dp, groups.rows())?;
        for matrices in [&mut gradients.up, &mut gradients.down]
            .into_iter()
            .chain(&mut gradients.gate)
        {
            self.resize(matrices, groups.matrices())?;
        }
        if kept.is_none() {
            scratch.make_room(self, &groups, false)?;
        }
        self.resize(&mut scratch.dh, groups.rows() * shape.hidden)?;

        let (hidden, dx) = (scratch.or(kept), &*dx);
        let mut pass = Pass::new(self, groups);
        if kept.is_none() {
            pass.project(weights, inputs.x, hidden)?;
        }
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_matrices(inputs.dy, down, hidden.dh, false)?;
        pass.differentiate(inputs, hidden, dp)?;
        let up = Matrices::inward(&weights.up, shape);
        pass.rows_by_matrices(hidden.up, up, dx, false)?;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            pass.rows_by_matrices(hidden.gate, gate, dx, true)?;
        }
        // dx is without w, what follows with it.
        pass.scale(hidden.up, inputs.weights)?;
        pass.sum_products(
            hidden.up,
            inputs.x,
            Matrices::inward(&gradients.up, shape),
            accumulate,
        )?;
        if let Some(gate) = &gradients.gate {
            pass.scale(hidden.gate, inputs.weights)?;
            let gate = Matrices::inward(gate, shape);
            pass.sum_products(hidden.gate, inputs.x, gate, accumulate)?;
        }
        let down = Matrices::down(&gradients.down, shape);
        pass.sum_products(inputs.dy, hidden.dh, down, accumulate)?;
        pass.batch.submit()
    }
}

impl Scratch {
    /// Room for pre-activations; where these are kept elsewhere, for hidden rows alone.
    fn make_room(&mut self, wgpu: &Wgpu, groups: &Groups<'_>, kept: bool) -> Result<(), Error> {
        let hidden = groups.rows() * groups.shape.hidden;
        let gated = groups.shape.activation.is_gated() && !kept;
        wgpu.resize(&mut self.gate, if gated { hidden } else { 0 })?;
        wgpu.resize(&mut self.up, hidden)
    }

    /// Its rows, with the pre-activations that were kept in place of its own.
    fn or<'a>(&'a self, kept: Option<&'a PreActivationBuffers<Wgpu>>) -> Hidden<'a> {
        let [gate, up] = kept.map_or([&self.gate, &self.up], |kept| [&kept.gate, &kept.up]);
        Hidden {
            gate,
            up,
            dh: &self.dh,
        }
    }
}
