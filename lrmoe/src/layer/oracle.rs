//! Gradients that a step would have had: with every pair, or with another draw of its selection. The step itself goes on as if nothing had been.

use lrmoe_comm::Collective;
use lrmoe_plan::Stash as StashMode;
use ndarray::{Array2, ArrayView2};

use super::element::LayerElement;
use super::{Backend, MoeLayer};
use crate::error::Error;
use crate::policy::Policy;

/// Gradients of one layer, as one rank has them.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerGradients<T = f32> {
    /// Of the input, `[tokens, width]`.
    pub dx: Array2<T>,
    /// Of the gate weights, `[tokens, top_k]`.
    pub dp: Array2<f32>,
    /// Of the owned part of the experts' parameters, added up over all ranks; see [`MoeLayer::shard_experts`].
    pub shard: Vec<f32>,
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// The exact gradients of the step whose `forward` has been and whose `backward` is to come: of every pair that ran forward. Every rank calls
    /// it, with dL/dy of its tokens, `[tokens, width]`.
    ///
    /// It costs a backward pass and a reduction, with buffers of their own, and leaves the layer as it was, the profile and the figures of the step
    /// included; only what the gradients of the instances and of the shard were before is gone. The bound on retained rows does not apply.
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`reduce_gradients`](Self::reduce_gradients).
    pub fn full_gradient<C: Collective>(
        &mut self,
        comm: &mut C,
        dy: ArrayView2<'_, T>,
    ) -> Result<LayerGradients<T>, Error> {
        let capacities = self.config.capacities.take();
        let policy = std::mem::replace(&mut self.config.policy, Policy::Dropless);
        let gradients = self.gradients_aside(comm, dy);
        self.config.policy = policy;
        self.config.capacities = capacities;
        gradients
    }

    /// As [`full_gradient`](Self::full_gradient), of the pairs that the policy selects when random numbers are those of draw number `draw`,
    /// counted from 1; those of the step itself are draw 0.
    ///
    /// # Errors
    /// As [`full_gradient`](Self::full_gradient).
    pub fn redrawn_gradient<C: Collective>(
        &mut self,
        comm: &mut C,
        dy: ArrayView2<'_, T>,
        draw: u32,
    ) -> Result<LayerGradients<T>, Error> {
        // An odd factor, so that no two draws share a seed.
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let seed = self.config.seed;
        self.config.seed ^= u64::from(draw).wrapping_mul(ODD);
        let gradients = self.gradients_aside(comm, dy);
        self.config.seed = seed;
        gradients
    }

    /// Which expert's parameters the elements of the owned shard are: expert and length of each run of elements, in order.
    pub fn shard_experts(&self) -> impl Iterator<Item = (usize, usize)> + use<B, T> {
        let shape = self.config.shape;
        let (block, experts) = (shape.width * shape.hidden, self.config.experts);
        let mut left = self.experts.shard(self.rank);
        std::iter::from_fn(move || {
            let index = left.start / block;
            let end = left.end.min((index + 1) * block);
            let length = end - left.start;
            left.start = end;
            (length > 0).then_some((index % experts, length))
        })
    }

    /// A backward pass and the reduction of its gradients, after which the layer is where it was before.
    fn gradients_aside<C: Collective>(
        &mut self,
        comm: &mut C,
        dy: ArrayView2<'_, T>,
    ) -> Result<LayerGradients<T>, Error> {
        if self.config.stash != StashMode::Recompute {
            return Err(Error::GradientsAside(self.config.stash));
        }
        let step = self.stash.step;
        let buffers = std::mem::take(&mut self.buffers);
        let lists = std::mem::take(&mut self.lists);
        let selector = std::mem::take(&mut self.selector);
        let stats = std::mem::take(&mut self.stats);
        let scores = self.scores.take();
        let profile = self.profile.clone();
        let has_selection = self.has_selection;
        let keeps_scores = std::mem::replace(&mut self.keeps_scores, false);
        let gradients = self.backward(comm, dy).and_then(|(dx, dp)| {
            self.experts.reduce(&self.backend, comm)?;
            let shard = self.experts.take_shard_gradient();
            Ok(LayerGradients { dx, dp, shard })
        });
        self.keeps_scores = keeps_scores;
        self.has_selection = has_selection;
        self.profile = profile;
        self.scores = scores;
        self.stats = stats;
        self.selector = selector;
        self.lists = lists;
        self.buffers = buffers;
        self.rows.has_x = step.is_some();
        self.stash.step = step;
        gradients
    }
}
