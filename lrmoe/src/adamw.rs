//! AdamW on flat slices, for the dense parameters and for a rank's shard of the experts.

use rayon::prelude::*;

/// Settings of AdamW (Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f32,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        }
    }
}

/// Parameters with their moments; the three slices have one length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Exponential mean of the gradient.
    pub first: Vec<f32>,
    /// Exponential mean of the squared gradient.
    pub second: Vec<f32>,
}

impl Moments {
    /// Zero moments of `len` parameters.
    pub fn zeros(len: usize) -> Self {
        Self {
            first: vec![0.0; len],
            second: vec![0.0; len],
        }
    }
}

/// Elements a thread takes at a time; also the block of the blockwise sums, so it must not depend on the thread count.
const BLOCK: usize = 16 * 1024;

impl AdamW {
    /// One update. `step` counts from 1. Gradients are multiplied by `scale` first (clipping).
    /// Every element is computed on its own, so the result does not depend on the number of threads.
    pub fn update(
        &self,
        parameters: &mut [f32],
        gradients: &[f32],
        moments: &mut Moments,
        step: u32,
        learning_rate: f32,
        scale: f32,
    ) {
        let correction1 = 1.0 - f64::from(self.beta1).powf(f64::from(step));
        let correction2 = 1.0 - f64::from(self.beta2).powf(f64::from(step));
        let rate = (f64::from(learning_rate) / correction1) as f32;
        let root = correction2.sqrt() as f32;
        let keep = 1.0 - learning_rate * self.weight_decay;
        let blocks = parameters
            .par_chunks_mut(BLOCK)
            .zip(gradients.par_chunks(BLOCK));
        let moments = moments
            .first
            .par_chunks_mut(BLOCK)
            .zip(moments.second.par_chunks_mut(BLOCK));
        blocks
            .zip(moments)
            .for_each(|((parameters, gradients), (first, second))| {
                for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(first).zip(second)
                {
                    let g = g * scale;
                    *m = self.beta1 * *m + (1.0 - self.beta1) * g;
                    *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
                    *p = *p * keep - rate * *m / (v.sqrt() / root + self.epsilon);
                }
            });
    }
}

/// Sum of squares in f64, blocks in order: the same for any number of threads.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let block = |values: &[f32]| {
        values
            .iter()
            .map(|v| f64::from(*v) * f64::from(*v))
            .sum::<f64>()
    };
    values
        .par_chunks(BLOCK)
        .map(block)
        .collect::<Vec<f64>>()
        .iter()
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The textbook form, in f64.
    fn reference(adamw: &AdamW, p: f64, gradients: &[f64], rate: f64) -> f64 {
        let (b1, b2) = (f64::from(adamw.beta1), f64::from(adamw.beta2));
        let (mut p, mut m, mut v) = (p, 0.0, 0.0);
        for (i, g) in gradients.iter().enumerate() {
            let t = (i + 1) as i32;
            p -= rate * f64::from(adamw.weight_decay) * p;
            m = b1 * m + (1.0 - b1) * g;
            v = b2 * v + (1.0 - b2) * g * g;
            p -= rate * (m / (1.0 - b1.powi(t)))
                / ((v / (1.0 - b2.powi(t))).sqrt() + f64::from(adamw.epsilon));
        }
        p
    }

    #[test]
    fn follows_the_textbook() {
        let adamw = AdamW::default();
        let gradients = [0.5, -0.25, 0.125, 3.0, -1e-3];
        let (mut p, mut moments) = (vec![0.75_f32; BLOCK + 1], Moments::zeros(BLOCK + 1));
        for (i, g) in gradients.iter().enumerate() {
            let doubled = vec![2.0 * *g as f32; p.len()];
            adamw.update(&mut p, &doubled, &mut moments, i as u32 + 1, 0.01, 0.5);
        }
        let expected = reference(&adamw, 0.75, &gradients, 0.01);
        assert!(
            p.iter().all(|p| (f64::from(*p) - expected).abs() < 1e-6),
            "{} against {expected}",
            p[0]
        );
    }

    #[test]
    fn squares_are_summed_alike_for_any_number_of_threads() {
        let values: Vec<f32> = (0..3 * BLOCK + 7).map(|i| (i as f32).sin()).collect();
        let sums: Vec<f64> = [1, 2, 5]
            .map(|threads| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .expect("a pool")
            })
            .map(|pool| pool.install(|| sum_of_squares(&values)))
            .to_vec();
        assert_eq!(sums[0].to_bits(), sums[1].to_bits());
        assert_eq!(sums[0].to_bits(), sums[2].to_bits());
        let plain: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        assert!((sums[0] - plain).abs() < 1e-9 * plain);
    }
}
