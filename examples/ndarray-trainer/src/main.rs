//! A trainer in plain ndarray whose MoE layer runs half of its pairs backward. `lrmoe-metric` says which, and with what weights, so that the
//! gradient stays unbiased: `cargo run` shows the mean of many draws come near the gradient of all pairs, and then trains with both.

mod layer;

use layer::{Expert, Forward, Layer, random};
use lrmoe_metric::{
    Draw, Error, Method, Pairs, Score, Selection, Solo, SquaredNorm, score, select, squared_norms,
};
use ndarray::Array2;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const WIDTH: usize = 16;
const HIDDEN: usize = 32;
const TOKENS: usize = 256;
const STEPS: u32 = 400;
const LEARNING_RATE: f32 = 40.0;

fn main() -> Result<(), Error> {
    println!("error of the mean gradient of M draws of half of the pairs, by the gradient of all");
    println!("{:>5}  {:>8}  {:>11}", "M", "weighted", "all times 2");
    for draws in [1, 4, 16, 64, 256] {
        let [weighted, plain] = errors(draws)?;
        println!("{draws:>5}  {weighted:>8.3}  {plain:>11.3}");
    }
    println!("\nheld-out loss");
    println!("{:>5}  {:>9}  {:>9}", "step", "all pairs", "half");
    let (all, half) = (train(false)?, train(true)?);
    for ((step, all), (_, half)) in all.iter().zip(&half) {
        println!("{step:>5}  {all:>9.6}  {half:>9.6}");
    }
    Ok(())
}

/// Half of the pairs of each expert. For a pair with gate weight p and input h of the down projection, `p |dy| |h|` is the norm of its term
/// in that projection's gradient, so a pair with a larger one is likelier to be kept.
fn select_half(forward: &Forward, dy: &Array2<f32>, step: u32) -> Result<Selection, Error> {
    let norms_of = |rows: &Array2<f32>| {
        let mut norms = vec![SquaredNorm::default(); rows.nrows()];
        squared_norms(rows.view(), &mut norms).map(|()| norms)
    };
    let (dy, h) = (norms_of(dy)?, norms_of(&forward.h)?);
    let (expert_ids, gate_weights) = (forward.expert_ids.view(), forward.gate_weights.view());
    let pairs = Pairs::new(expert_ids, gate_weights, EXPERTS, 0)?;
    // One rank, so that there is nobody to exchange with: `Solo`.
    let scores = score(Score::DownGrad, &pairs, Some(&dy), Some(&h), &mut Solo)?;
    let quotas: Vec<u32> = pairs.loads().iter().map(|load| load.div_ceil(2)).collect();
    let draw = Draw {
        seed: 1,
        step,
        layer: 0,
    };
    select(Method::Priority, &pairs, &scores, &quotas, draw, &mut Solo)
}

/// Relative errors of the mean of `draws` gradients from half of the pairs: with the weights of the selection, and with a weight of 2 for all.
/// What is unbiased falls as one over the square root of the draws; the other favours pairs with large terms, however many draws there are.
fn errors(draws: u32) -> Result<[f32; 2], Error> {
    let (student, teacher, mut rng) = setup();
    let batch = Batch::new(&teacher, &mut rng);
    let forward = student.forward(&batch.x);
    let dy = batch.gradient(&forward.y);
    let every_pair: Vec<u32> = (0..(TOKENS * TOP_K) as u32).collect();
    let backward =
        |pairs: &[u32], weights: &[f32]| student.backward(&batch.x, &forward, &dy, pairs, weights);
    let exact = flat(&backward(&every_pair, &vec![1.0; every_pair.len()]));

    let mut means = [vec![0.0; exact.len()], vec![0.0; exact.len()]];
    for draw in 0..draws {
        let kept = select_half(&forward, &dy, draw)?;
        for (mean, weights) in means
            .iter_mut()
            .zip([&kept.weights, &vec![2.0; kept.pairs.len()]])
        {
            for (mean, gradient) in mean.iter_mut().zip(flat(&backward(&kept.pairs, weights))) {
                *mean += gradient / draws as f32;
            }
        }
    }
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let size = norm(&mut exact.iter().copied());
    Ok(means
        .map(|mean| norm(&mut mean.iter().zip(&exact).map(|(mean, exact)| mean - exact)) / size))
}

/// Trains by plain gradient descent, and gives the loss on a batch that is not trained on, every 80 steps.
fn train(half: bool) -> Result<Vec<(u32, f32)>, Error> {
    let (mut student, teacher, mut rng) = setup();
    let held_out = Batch::new(&teacher, &mut rng);
    let every_pair = Selection {
        pairs: (0..(TOKENS * TOP_K) as u32).collect(),
        weights: vec![1.0; TOKENS * TOP_K],
    };
    let mut losses = Vec::new();
    for step in 0..=STEPS {
        if step % 80 == 0 {
            losses.push((step, held_out.loss(&student.forward(&held_out.x).y)));
        }
        let batch = Batch::new(&teacher, &mut rng);
        let forward = student.forward(&batch.x);
        let dy = batch.gradient(&forward.y);
        let kept = if half {
            select_half(&forward, &dy, step)?
        } else {
            every_pair.clone()
        };
        let gradients = student.backward(&batch.x, &forward, &dy, &kept.pairs, &kept.weights);
        for (expert, gradient) in student.experts.iter_mut().zip(gradients) {
            expert.up.scaled_add(-LEARNING_RATE, &gradient.up);
            expert.down.scaled_add(-LEARNING_RATE, &gradient.down);
        }
    }
    Ok(losses)
}

/// A student, a teacher with the same router and other experts, and random numbers for data.
fn setup() -> (Layer, Layer, ChaCha8Rng) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let router = random((EXPERTS, WIDTH), 1.0, &mut rng);
    let mut layer = || Layer {
        router: router.clone(),
        experts: (0..EXPERTS)
            .map(|_| Expert {
                up: random((HIDDEN, WIDTH), 0.4, &mut rng),
                down: random((WIDTH, HIDDEN), 0.3, &mut rng),
            })
            .collect(),
        top_k: TOP_K,
    };
    let (student, teacher) = (layer(), layer());
    (student, teacher, rng)
}

/// Tokens and what the teacher makes of them, both `[tokens, width]`.
struct Batch {
    x: Array2<f32>,
    target: Array2<f32>,
}

impl Batch {
    fn new(teacher: &Layer, rng: &mut ChaCha8Rng) -> Self {
        let x = random((TOKENS, WIDTH), 1.0, rng);
        let target = teacher.forward(&x).y;
        Self { x, target }
    }

    /// Half of the mean square of the error.
    fn loss(&self, y: &Array2<f32>) -> f32 {
        let error = y - &self.target;
        (&error * &error).sum() / (2.0 * error.len() as f32)
    }

    /// Gradient of the loss in y.
    fn gradient(&self, y: &Array2<f32>) -> Array2<f32> {
        (y - &self.target) / y.len() as f32
    }
}

fn flat(experts: &[Expert]) -> Vec<f32> {
    let each = experts.iter();
    each.flat_map(|expert| expert.up.iter().chain(&expert.down).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_is_the_slope_of_the_loss() {
        let (student, teacher, mut rng) = setup();
        let batch = Batch::new(&teacher, &mut rng);
        let forward = student.forward(&batch.x);
        let every_pair: Vec<u32> = (0..(TOKENS * TOP_K) as u32).collect();
        let weights = vec![1.0; every_pair.len()];
        let dy = batch.gradient(&forward.y);
        let gradients = student.backward(&batch.x, &forward, &dy, &every_pair, &weights);
        let square: f32 = flat(&gradients).iter().map(|g| g * g).sum();
        // Along the gradient the loss changes by its square; the step is small against the weights and large against rounding.
        let moved = |by: f32| {
            let mut moved = student.clone();
            for (expert, gradient) in moved.experts.iter_mut().zip(&gradients) {
                expert.up.scaled_add(by, &gradient.up);
                expert.down.scaled_add(by, &gradient.down);
            }
            batch.loss(&moved.forward(&batch.x).y)
        };
        let slope = (moved(0.1) - moved(-0.1)) / 0.2;
        assert!((slope / square - 1.0).abs() < 0.01, "{slope} for {square}");
    }

    #[test]
    fn the_mean_of_draws_is_the_gradient_of_all_pairs() {
        let [[one, _], [many, plain]] = [1, 256].map(|draws| errors(draws).unwrap());
        // One sixteenth is expected of 256 draws.
        assert!(many < one / 10.0, "{many} after {one}");
        assert!(plain > 0.3, "{plain}: it is biased");
    }

    #[test]
    fn half_of_the_pairs_train_the_layer() {
        let [all, half] = [false, true].map(|half| train(half).unwrap());
        let ((_, start), (_, all), (_, half)) = (all[0], all[all.len() - 1], half[half.len() - 1]);
        assert!(all < start / 15.0, "{all} after {start}");
        assert!(
            half < 1.1 * all,
            "{half} with half of the pairs, {all} with all"
        );
    }
}
