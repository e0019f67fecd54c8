//! Gradient of the gate weights: dp = <dy, f(x)> of each pair.

use lrmoe_kernels::FfnElement;
use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut2};

use super::element::LayerElement;
use super::pass::on_host;
use super::stash::Stash;
use super::{Backend, MoeLayer};
use crate::error::Error;

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Of all pairs where the forward pass kept their outputs, else of the retained ones, whose dp lie in `buffers.all_dp`.
    pub(super) fn router_gradient(
        &mut self,
        stash: &Stash<B, T>,
        dy: &B::Buffer<T>,
        dp: ArrayViewMut2<'_, f32>,
    ) -> Result<(), Error> {
        match stash.pairs.outputs() {
            Some(outputs) => {
                let dy = on_host(&self.backend, dy, &mut self.buffers.host.rows)?;
                let shape = (stash.expert_ids.nrows(), self.config.shape.width);
                let dy = ArrayView2::from_shape(shape, dy).expect("checked length");
                all_dots(dy, outputs, &stash.expert_ids, dp);
                Ok(())
            }
            None => self.retained_gradient(dp),
        }
    }

    /// dp of the pairs that ran backward times their selection weights, or as it is if all did; 0 of the others.
    fn retained_gradient(&mut self, mut dp: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
        let buffers = &mut self.buffers;
        let [values, ..] = &mut buffers.host.scalars;
        let values = on_host(&self.backend, &buffers.all_dp, values)?;
        let top_k = dp.ncols();
        let exact = self.config.policy.runs_all_backward();
        dp.fill(0.0);
        for (pair, value) in self.lists.gone.iter().zip(values) {
            let pair = *pair as usize;
            let weight = if exact {
                1.0
            } else {
                buffers.host.weights[pair]
            };
            dp[[pair / top_k, pair % top_k]] = weight * value;
        }
        Ok(())
    }
}

/// dp of every pair that is not masked.
fn all_dots<T: FfnElement>(
    dy: ArrayView2<'_, T>,
    outputs: &Array2<T>,
    expert_ids: &Array2<i32>,
    mut dp: ArrayViewMut2<'_, f32>,
) {
    let (mut of_token, mut of_pair) = (Array1::zeros(dy.ncols()), Array1::zeros(dy.ncols()));
    let top_k = expert_ids.ncols();
    for (token, dy) in dy.rows().into_iter().enumerate() {
        of_token.zip_mut_with(&dy, |wide, dy| *wide = dy.to_f32());
        for slot in 0..top_k {
            dp[[token, slot]] = 0.0;
            if expert_ids[[token, slot]] >= 0 {
                let output = outputs.row(token * top_k + slot);
                of_pair.zip_mut_with(&output, |wide, output| *wide = output.to_f32());
                dp[[token, slot]] = of_token.dot(&of_pair);
            }
        }
    }
}
