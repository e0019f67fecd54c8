//! The layer for callers whose rows are arrays on the host.

use lrmoe_comm::Collective;
use lrmoe_kernels::{Element, Memory};
use ndarray::{Array2, ArrayView2};

use super::element::LayerElement;
use super::{Backend, MoeLayer};
use crate::error::Error;

/// Rows of the caller's arrays in the backend's memory.
#[derive(Debug)]
pub(super) struct Rows<B: Backend<T>, T: LayerElement> {
    /// That of the last training forward pass, if it came by an array and the backward pass needs it.
    pub(super) x: B::Buffer<T>,
    /// Whether that pass had it from an array.
    pub(super) has_x: bool,
    pub(super) dy: B::Buffer<T>,
}

impl<B: Backend<T>, T: LayerElement> Default for Rows<B, T> {
    fn default() -> Self {
        Self {
            x: Default::default(),
            has_x: false,
            dy: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// y_t = sum over slots of p times the expert's output, for the tokens of this rank.
    ///
    /// `x`: `[tokens, width]`; `expert_ids`, `gate_weights`: `[tokens, top_k]`, id -1 = masked. `step`: `Some` number of the training step, which
    /// keeps what `backward` needs and lets the policy drop pairs; `None` to evaluate, where nothing is dropped or kept.
    ///
    /// # Errors
    /// Wrong shapes, expert ids out of range, a failed exchange; a plan that memory does not allow; what the device refuses.
    pub fn forward<C: Collective>(
        &mut self,
        comm: &mut C,
        x: ArrayView2<'_, T>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        step: Option<u32>,
    ) -> Result<Array2<T>, Error> {
        let (width, top_k) = (self.config.shape.width, self.config.top_k);
        if x.ncols() != width {
            return Err(Error::ForwardShapes {
                x: x.dim(),
                expert_ids: expert_ids.dim(),
                gate_weights: gate_weights.dim(),
                width,
                top_k,
            });
        }
        // Where x is not needed again dy comes in its place.
        let stays = !self.needs_x();
        let kept = match stays {
            true => &mut self.rows.dy,
            false => &mut self.rows.x,
        };
        let mut rows = match step {
            Some(_) => std::mem::take(kept),
            None => Default::default(),
        };
        write(&self.backend, x, &mut rows)?;
        let mut y = Default::default();
        let done = self.forward_rows(comm, &rows, expert_ids, gate_weights, step, &mut y);
        if step.is_some() {
            match stays {
                true => self.rows.dy = rows,
                false => self.rows.x = rows,
            }
            self.rows.has_x = done.is_ok();
        }
        done?;
        array(&self.backend, y, x.dim())
    }

    /// `(dx [tokens, width], dgate_weights [tokens, top_k])` of the last training forward pass, from dL/dy; leaves the instances'
    /// weight gradients for `reduce_gradients`. A pair that is not retained adds nothing to them, a retained one adds its term times its
    /// selection weight; `Selecting::dx_weight`, `Selecting::router_gradient` and `Selecting::scope` make exceptions for dx and dgate_weights.
    ///
    /// # Errors
    /// `Error::NoForward` without a training forward pass before it, a wrong shape, a NaN score, more rows than memory allows, a failed exchange,
    /// what the device refuses.
    pub fn backward<C: Collective>(
        &mut self,
        comm: &mut C,
        dy: ArrayView2<'_, T>,
    ) -> Result<(Array2<T>, Array2<f32>), Error> {
        if self.stash.step.is_none() || !self.rows.has_x {
            return Err(Error::NoForward);
        }
        let expected = (self.stash.expert_ids.nrows(), self.config.shape.width);
        if dy.dim() != expected {
            let dy = dy.dim();
            return Err(Error::BackwardShape { dy, expected });
        }
        let mut rows = std::mem::take(&mut self.rows);
        rows.has_x = false;
        write(&self.backend, dy, &mut rows.dy)?;
        let mut dx = Default::default();
        let mut dp = Array2::zeros(self.stash.gate_weights.dim());
        let done = self.backward_rows(comm, &rows.x, &rows.dy, &mut dx, dp.view_mut());
        self.rows = rows;
        done?;
        Ok((array(&self.backend, dx, dy.dim())?, dp))
    }
}

fn write<B: Memory, T: Element>(
    backend: &B,
    rows: ArrayView2<'_, T>,
    buffer: &mut B::Buffer<T>,
) -> Result<(), Error> {
    let rows = rows.as_standard_layout();
    let values = rows.as_slice().expect("standard layout is contiguous");
    Ok(backend.write(values, buffer)?)
}

fn array<B: Memory, T: Element>(
    backend: &B,
    rows: B::Buffer<T>,
    shape: (usize, usize),
) -> Result<Array2<T>, Error> {
    let values = backend.download(&rows)?;
    Ok(Array2::from_shape_vec(shape, values).expect("as many rows as went in"))
}
