//! The grouped expert FFN: which products and element-wise steps make a pass.

mod hidden;
mod product;

use lrmoe_metric::SquaredNorm;

use self::product::{GroupTable, Matrices};
use super::{Buffer, Cuda, buffer::bytes_of};
use crate::{
    ComputeExperts, Element, Error, ExpertBuffers, FfnElement, FfnShape, Memory,
    PreActivationBuffers, RowBuffers, experts::Groups,
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

/// Hidden rows where a step of a pass has them, as in [`Scratch`].
#[derive(Clone, Copy)]
struct Hidden<'a, T: Element> {
    gate: &'a Buffer<T>,
    up: &'a Buffer<T>,
    dh: &'a Buffer<T>,
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
        hidden: Hidden<'_, T>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let shape = &self.groups.shape;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            self.rows_by_transposed(x, gate, hidden.gate, table)?;
        }
        let up = Matrices::inward(&weights.up, shape);
        self.rows_by_transposed(x, up, hidden.up, table)
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
        mut kept: Option<&mut PreActivationBuffers<Self, T>>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        let rows = groups.rows();
        self.resize(out, rows * shape.width)?;
        if let Some(kept) = &mut kept {
            kept.resize(self, shape, rows)?;
        }
        let kept = kept.as_deref();
        scratch.make_room(self, &groups, kept.is_some())?;
        scratch.groups.write::<T>(self, &groups, &[])?;
        let (scratch, table) = (&*scratch, &scratch.groups);
        let pass = Pass { cuda: self, groups };
        let pre_activations = scratch.or(kept);
        pass.project(weights, x, pre_activations, table)?;
        let hidden = Hidden {
            up: &scratch.up,
            ..pre_activations
        };
        if kept.is_some() {
            let [from, to] = [self.address(pre_activations.up)?, self.address(hidden.up)?];
            // SAFETY: both are of all hidden rows.
            unsafe { self.copy_bytes(from, to, rows * shape.hidden * bytes_of::<T>()) }?;
        }
        pass.activate(hidden)?;
        if let Some(norms) = h_norms {
            self.norms_of(hidden.up, [rows, shape.hidden], norms)?;
        }
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_transposed(hidden.up, down, out, table)
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        inputs: &RowBuffers<'_, Self, T>,
        kept: Option<&mut PreActivationBuffers<Self, T>>,
        scratch: &mut Scratch<T>,
        dx: &mut Buffer<T>,
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
        scratch.groups.write::<T>(self, &groups, accumulate)?;
        self.resize(&mut scratch.dh, groups.rows() * shape.hidden)?;

        let (hidden, dx, table) = (scratch.or(kept), &*dx, &scratch.groups);
        let pass = Pass { cuda: self, groups };
        if kept.is_none() {
            pass.project(weights, inputs.x, hidden, table)?;
        }
        let down = Matrices::down(&weights.down, shape);
        pass.rows_by_matrices(inputs.dy, down, hidden.dh, table, false)?;
        pass.differentiate(inputs, hidden, dp)?;
        let up = Matrices::inward(&weights.up, shape);
        pass.rows_by_matrices(hidden.up, up, dx, table, false)?;
        if let Some(gate) = &weights.gate {
            let gate = Matrices::inward(gate, shape);
            pass.rows_by_matrices(hidden.gate, gate, dx, table, true)?;
        }
        // dx is without w, what follows with it.
        pass.scale(inputs.weights, hidden)?;
        let up = Matrices::inward(&gradients.up, shape);
        pass.sum_products(hidden.up, inputs.x, up, table)?;
        if let Some(gate) = &gradients.gate {
            let gate = Matrices::inward(gate, shape);
            pass.sum_products(hidden.gate, inputs.x, gate, table)?;
        }
        let down = Matrices::down(&gradients.down, shape);
        pass.sum_products(inputs.dy, hidden.dh, down, table)
    }
}

impl<T: FfnElement> Scratch<T> {
    /// Room for pre-activations; where these are kept elsewhere, for hidden rows alone.
    fn make_room(&mut self, cuda: &Cuda, groups: &Groups<'_>, kept: bool) -> Result<(), Error> {
        let hidden = groups.rows() * groups.shape.hidden;
        let gated = groups.shape.activation.is_gated() && !kept;
        cuda.resize(&mut self.gate, if gated { hidden } else { 0 })?;
        cuda.resize(&mut self.up, hidden)
    }

    /// Its rows, with the pre-activations that were kept in place of its own.
    fn or<'a>(&'a self, kept: Option<&'a PreActivationBuffers<Cuda, T>>) -> Hidden<'a, T> {
        let [gate, up] = kept.map_or([&self.gate, &self.up], |kept| [&kept.gate, &kept.up]);
        Hidden {
            gate,
            up,
            dh: &self.dh,
        }
    }
}
