//! The `cpu` backend: f32, tiles of rows shared among the threads of the ambient rayon pool.

mod backward;
mod compact;
mod experts;
mod forward;
mod gemm;
mod memory;
mod metric;
mod tile;
mod wgrad;
mod workspace;

use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{
    BackwardRows, Error, ExpertFfn, FfnShape, WeightGradients, Weights, error::check_length,
    ffn::Experts,
};
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
