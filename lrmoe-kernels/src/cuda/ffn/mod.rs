//! The grouped expert FFN: which products and element-wise steps make a pass.

mod hidden;
mod product;

use lrmoe_metric::SquaredNorm;

use self::product::{GroupTable, Matrices};
use super::{Buffer, Cuda};
use crate::{
    ComputeExperts, Element, Error, ExpertBuffers, FfnElement, FfnShape, Memory, RowBuffers,
    experts::Groups,
};

/// Hidden rows of a call, `[rows, F]` each, reused by later calls. They are stored as the rows of x are, so that in bf16 pre-activations and their
/// gradients are rounded where [`Cpu`](crate::Cpu) has them in f32.
#[derive(Debug)]
pub struct Scratch<T: Element = f32> {
    /// Pre-activations, then their gradients; empty where the activation has no gate.
    gate: Buffer<T>,
    /// Pre-activations, then in the forward pass the hidden rows, in the backward pass their gradients.
    up: Buffer<T>,
    /// Gradients of the hidden rows, then the hidden rows times w p.
    dh: Buffer<T>,
    groups: GroupTable,
}

impl<T: Element> Default for Scratch<T> {
    fn default() -> Self {
        Self {
            gate: Buffer::default(),
            up: Buffer::default(),
            dh: Buffer::default(),
            groups: GroupTable::default(),
        }
    }
}

/// What all steps of a pass need.
struct Pass<'a> {
    cuda: &'a Cuda,
    groups: Groups<'a>,
}

impl Pass<'_> {
    /// The pre-activations of x.
    fn project<T: FfnElement>(
        &self,
        weights: &ExpertBuffers<Cuda, T>,
        x: &Buffer<T>,
        scratch: &Scratch<T>,
    ) -> Result<(), Error> {
        let shape = &self.groups.shape;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            self.rows_by_transposed(x, gate, &scratch.gate, &scratch.groups)?;
        }
        let up = Matrices::inward(&weights.up, shape);
        self.rows_by_transposed(x, up, &scratch.up, &scratch.groups)
    }
}

impl<T: FfnElement> ComputeExperts<T> for Cuda {
    type Scratch = Scratch<T>;

    fn scratch_bytes(scratch: &Scratch<T>) -> usize {
        let Scratch {
            gate,
            up,
            dh,
            groups,
        } = scratch;
        gate.held() + up.held() + dh.held() + groups.held()
    }

    fn forward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        x: &Buffer<T>,
        scratch: &mut Scratch<T>,
        out: &mut Buffer<T>,
        h_norms: Option<&mut Buffer<SquaredNorm>>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        let rows = groups.rows();
        self.resize(out, rows * shape.width)?;
        scratch.prepare(self, &groups, &[])?;
        let scratch = &*scratch;
        let pass = Pass { cuda: self, groups };
        pass.project(weights, x, scratch)?;
        pass.activate(scratch)?;
        if let Some(norms) = h_norms {
            self.norms_of(&scratch.up, [rows, shape.hidden], norms)?;
        }
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_transposed(&scratch.up, down, out, &scratch.groups)
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        inputs: &RowBuffers<'_, Self, T>,
        scratch: &mut Scratch<T>,
        dx: &mut Buffer<T>,
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
        scratch.prepare(self, &groups, accumulate)?;
        self.resize(&mut scratch.dh, groups.rows() * shape.hidden)?;

        let (scratch, dx, table) = (&*scratch, &*dx, &scratch.groups);
        let pass = Pass { cuda: self, groups };
        pass.project(weights, inputs.x, scratch)?;
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_matrices(inputs.dy, down, &scratch.dh, table, false)?;
        pass.differentiate(inputs, scratch, dp)?;
        let up = Matrices::inward(&weights.up, shape);
        pass.rows_by_matrices(&scratch.up, up, dx, table, false)?;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            pass.rows_by_matrices(&scratch.gate, gate, dx, table, true)?;
        }
        // dx is without w, what follows with it.
        pass.scale(inputs.weights, scratch)?;
        let up = Matrices::inward(&gradients.up, shape);
        pass.sum_products(&scratch.up, inputs.x, up, table)?;
        if let Some(gate) = &gradients.gate {
            let gate = Matrices::inward(gate, shape);
            pass.sum_products(&scratch.gate, inputs.x, gate, table)?;
        }
        let down = Matrices::down(&gradients.down, shape);
        pass.sum_products(inputs.dy, &scratch.dh, down, table)
    }
}

impl<T: FfnElement> Scratch<T> {
    /// Room for pre-activations, and the table of groups.
    fn prepare(
        &mut self,
        cuda: &Cuda,
        groups: &Groups<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let hidden = groups.rows() * groups.shape.hidden;
        let gated = groups.shape.activation.is_gated();
        cuda.resize(&mut self.gate, if gated { hidden } else { 0 })?;
        cuda.resize(&mut self.up, hidden)?;
        self.groups.write::<T>(cuda, groups, accumulate)
    }
}
