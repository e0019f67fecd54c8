//! One Mixture-of-Experts layer in plain ndarray. Pair `t * top_k + j` is token t at the expert in its slot j, and
//! `y_t = sum of p * down_e relu(up_e x_t)` over the pairs of token t, p the gate weight and e the expert of a pair.

use ndarray::{Array2, ArrayView1, Axis};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Weights of an expert, or their gradients.
#[derive(Clone)]
pub struct Expert {
    /// `[hidden, width]`
    pub up: Array2<f32>,
    /// `[width, hidden]`
    pub down: Array2<f32>,
}

#[derive(Clone)]
pub struct Layer {
    /// `[experts, width]`. It is not trained here: its gradient needs no row of an expert's backward pass.
    pub router: Array2<f32>,
    pub experts: Vec<Expert>,
    pub top_k: usize,
}

/// What a forward pass gives, and leaves for the backward pass.
pub struct Forward {
    /// `[tokens, top_k]`
    pub expert_ids: Array2<i32>,
    /// `[tokens, top_k]`
    pub gate_weights: Array2<f32>,
    /// Input of the down projection, a row for each pair: `[tokens * top_k, hidden]`.
    pub h: Array2<f32>,
    /// `[tokens, width]`
    pub y: Array2<f32>,
}

/// Numbers between -`size` and `size`.
pub fn random(shape: (usize, usize), size: f32, rng: &mut ChaCha8Rng) -> Array2<f32> {
    Array2::from_shape_simple_fn(shape, || rng.random_range(-size..size))
}

impl Layer {
    pub fn forward(&self, x: &Array2<f32>) -> Forward {
        let (expert_ids, gate_weights) = self.route(x);
        let pairs = expert_ids.len();
        let mut h = Array2::zeros((pairs, self.experts[0].up.nrows()));
        let mut y = Array2::zeros(x.raw_dim());
        for (pair, (&expert, &p)) in expert_ids.iter().zip(&gate_weights).enumerate() {
            let (token, expert) = (pair / self.top_k, &self.experts[expert as usize]);
            let hidden = expert.up.dot(&x.row(token)).mapv_into(|x| x.max(0.0));
            y.row_mut(token).scaled_add(p, &expert.down.dot(&hidden));
            h.row_mut(pair).assign(&hidden);
        }
        Forward {
            expert_ids,
            gate_weights,
            h,
            y,
        }
    }

    /// Gradients of the experts from `dy` (`[tokens, width]`) and these pairs alone, each pair's term times its weight.
    pub fn backward(
        &self,
        x: &Array2<f32>,
        forward: &Forward,
        dy: &Array2<f32>,
        pairs: &[u32],
        weights: &[f32],
    ) -> Vec<Expert> {
        let mut gradients = self.experts.clone();
        for gradient in &mut gradients {
            gradient.up.fill(0.0);
            gradient.down.fill(0.0);
        }
        for (&pair, &weight) in pairs.iter().zip(weights) {
            let (token, slot) = (pair as usize / self.top_k, pair as usize % self.top_k);
            let expert = forward.expert_ids[[token, slot]] as usize;
            let h = forward.h.row(pair as usize);
            let d_out = &dy.row(token) * (weight * forward.gate_weights[[token, slot]]);
            let mut dh = self.experts[expert].down.t().dot(&d_out);
            dh.zip_mut_with(&h, |dh, &h| *dh = if h > 0.0 { *dh } else { 0.0 });
            add_outer(&mut gradients[expert].down, d_out.view(), h);
            add_outer(&mut gradients[expert].up, dh.view(), x.row(token));
        }
        gradients
    }

    /// The `top_k` experts of each token by router score, and the softmax of these scores.
    fn route(&self, x: &Array2<f32>) -> (Array2<i32>, Array2<f32>) {
        let scores = x.dot(&self.router.t());
        let mut expert_ids = Array2::zeros((x.nrows(), self.top_k));
        let mut gate_weights = Array2::zeros(expert_ids.raw_dim());
        for (token, scores) in scores.axis_iter(Axis(0)).enumerate() {
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            for (slot, &expert) in order[..self.top_k].iter().enumerate() {
                expert_ids[[token, slot]] = expert as i32;
                gate_weights[[token, slot]] = scores[expert].exp();
            }
        }
        let sums = gate_weights.sum_axis(Axis(1)).insert_axis(Axis(1));
        (expert_ids, gate_weights / sums)
    }
}

/// Adds `a b^T` to `sum`.
fn add_outer(sum: &mut Array2<f32>, a: ArrayView1<'_, f32>, b: ArrayView1<'_, f32>) {
    for (mut row, &a) in sum.axis_iter_mut(Axis(0)).zip(a) {
        row.scaled_add(a, &b);
    }
}
