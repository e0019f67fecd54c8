//! The `cpu` backend: tiles of rows shared among the threads of the ambient rayon pool, products by kernels for the
//! machine's instruction set.

mod backward;
mod compact;
mod copy;
mod element;
mod experts;
mod forward;
mod gradient_norms;
mod isa;
mod kernel;
mod memory;
mod metric;
mod pack;
mod product;
mod stream;
mod sums;
#[cfg(test)]
mod tests;
mod tile;
mod transpose;
mod wgrad;
mod workspace;

use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{
    BackwardRows, Error, ExpertFfn, FfnShape, PreActivations, PreActivationsMut, StashFfn,
    WeightGradients, Weights, error::check_length, ffn::Experts,
};
pub use element::FfnElement;
pub use memory::HostBuffer;
pub use sums::HiddenSums;
pub use workspace::Workspace;

/// Runs on the threads of the rayon pool it is called in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Names of the instruction sets that kernels run on: `portable`, `avx2`, `avx512`, `avx512-bf16` or `amx-bf16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSets {
    /// With f32 weights and rows.
    pub f32: &'static str,
    /// With bf16 weights and rows of sizes that are multiples of 32.
    pub bf16: &'static str,
}

impl Cpu {
    /// What kernels run on here.
    pub fn instruction_sets() -> InstructionSets {
        let best = isa::Isa::detect();
        InstructionSets {
            f32: best.min(isa::Isa::Avx512).name(),
            bf16: best.name(),
        }
    }
}

impl<T: FfnElement> ExpertFfn<T> for Cpu {
    fn forward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        x: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, T>,
        h_norms: Option<&mut [SquaredNorm]>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &x)?;
        experts.check_forward(&out, h_norms.as_deref())?;
        let outputs = forward::Outputs {
            out,
            h_norms,
            stash: None,
        };
        forward::forward(&experts, x, workspace, outputs)
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        rows: &BackwardRows<'_, T>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, T>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &rows.x)?;
        experts.check_backward(rows, &dx, dp, gradients, accumulate)?;
        let outputs = backward::Outputs { dx, dp };
        backward::backward(
            &experts, rows, None, workspace, outputs, gradients, accumulate,
        )
    }
}

impl<T: FfnElement> StashFfn<T> for Cpu {
    fn forward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        x: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, T>,
        h_norms: Option<&mut [SquaredNorm]>,
        stash: PreActivationsMut<'_, T>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &x)?;
        experts.check_forward(&out, h_norms.as_deref())?;
        experts.check_stash(stash.gate.as_deref(), &stash.up)?;
        let outputs = forward::Outputs {
            out,
            h_norms,
            stash: Some(forward::Stash {
                matrices: [stash.gate, Some(stash.up)]
                    .map(|matrix| matrix.map(|rows| rows.into_slice().expect("checked layout"))),
                chosen: None,
            }),
        };
        forward::forward(&experts, x, workspace, outputs)
    }

    fn backward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        rows: &BackwardRows<'_, T>,
        stash: &PreActivations<'_, T>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, T>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &rows.x)?;
        experts.check_backward(rows, &dx, dp, gradients, accumulate)?;
        experts.check_stash(stash.gate.as_deref(), &stash.up)?;
        let outputs = backward::Outputs { dx, dp };
        backward::backward(
            &experts,
            rows,
            Some(stash),
            workspace,
            outputs,
            gradients,
            accumulate,
        )
    }
}

/// Elements as rows.
fn rows<'a, T>(
    what: &'static str,
    values: &'a [T],
    shape: [usize; 2],
) -> Result<ArrayView2<'a, T>, Error> {
    check_length(what, values.len(), shape[0].saturating_mul(shape[1]))?;
    ArrayView2::from_shape(shape, values).map_err(|_| wrong_rows(what, values.len(), shape))
}

/// Elements as rows to write to.
fn rows_mut<'a, T>(
    what: &'static str,
    values: &'a mut [T],
    shape: [usize; 2],
) -> Result<ArrayViewMut2<'a, T>, Error> {
    let got = values.len();
    check_length(what, got, shape[0].saturating_mul(shape[1]))?;
    ArrayViewMut2::from_shape(shape, values).map_err(|_| wrong_rows(what, got, shape))
}

fn wrong_rows(what: &'static str, got: usize, shape: [usize; 2]) -> Error {
    Error::Shape {
        what,
        got: vec![got],
        expected: shape.to_vec(),
    }
}
