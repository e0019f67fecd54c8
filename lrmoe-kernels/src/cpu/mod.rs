//! The `cpu` backend: tiles of rows shared among the threads of the ambient rayon pool, products by kernels for the
//! machine's instruction set.

mod backward;
mod element;
mod forward;
mod isa;
mod kernel;
mod pack;
mod product;
#[cfg(test)]
mod tests;
mod tile;
mod wgrad;
mod workspace;

use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{
    BackwardRows, Error, ExpertFfn, FfnShape, StashFfn, WeightGradients, Weights, ffn::Experts,
};
pub use element::Element;
pub use workspace::Workspace;

/// Runs on the threads of the rayon pool it is called in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl<T: Element> ExpertFfn<T> for Cpu {
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
        forward::forward(&experts, x, workspace, outputs);
        Ok(())
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
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &rows.x)?;
        experts.check_backward(rows, &dx, dp, gradients)?;
        let outputs = backward::Outputs { dx, dp };
        backward::backward(&experts, rows, None, workspace, outputs, gradients);
        Ok(())
    }
}

impl<T: Element> StashFfn<T> for Cpu {
    fn forward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        x: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, T>,
        h_norms: Option<&mut [SquaredNorm]>,
        stash: ArrayViewMut2<'_, T>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &x)?;
        experts.check_forward(&out, h_norms.as_deref())?;
        experts.check_stash(&stash)?;
        let outputs = forward::Outputs {
            out,
            h_norms,
            stash: Some(stash),
        };
        forward::forward(&experts, x, workspace, outputs);
        Ok(())
    }

    fn backward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        rows: &BackwardRows<'_, T>,
        stash: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, T>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &rows.x)?;
        experts.check_backward(rows, &dx, dp, gradients)?;
        experts.check_stash(&stash)?;
        let outputs = backward::Outputs { dx, dp };
        backward::backward(&experts, rows, Some(stash), workspace, outputs, gradients);
        Ok(())
    }
}
