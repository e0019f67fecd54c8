//! The `cpu` backend: f32, tiles of rows shared among the threads of the ambient rayon pool.

mod backward;
mod forward;
mod gemm;
mod tile;
mod wgrad;
mod workspace;

use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{BackwardRows, Error, ExpertFfn, FfnShape, WeightGradients, Weights, ffn::Experts};
pub use workspace::Workspace;

/// Runs on the threads of the rayon pool it is called in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl ExpertFfn for Cpu {
    fn forward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_>,
        offsets: &[usize],
        x: ArrayView2<'_, f32>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, f32>,
        h_norms: Option<&mut [SquaredNorm]>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &x)?;
        experts.check_forward(&out, h_norms.as_deref())?;
        forward::forward(&experts, x, workspace, out, h_norms);
        Ok(())
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_>,
        offsets: &[usize],
        rows: &BackwardRows<'_>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, f32>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
    ) -> Result<(), Error> {
        let experts = Experts::new(shape, weights, offsets, &rows.x)?;
        experts.check_backward(rows, &dx, dp, gradients)?;
        backward::backward(&experts, rows, workspace, dx, dp, gradients);
        Ok(())
    }
}
