//! A candle model whose MoE layer moves its rows with `lrmoe-compact`: rows by expert without gaps before the products, added up in a fixed
//! order after them. `cargo run` trains it to tell two spirals apart; everything but the two ops in `rows.rs` is plain candle.

mod model;
mod rows;

use candle_core::{Device, Result, Tensor};
use model::{Model, accuracy, cross_entropy};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const POINTS: usize = 512;
const STEPS: usize = 300;
const LEARNING_RATE: f64 = 0.5;
/// Coordinates and a constant, which stands for the biases that the model does without.
const INPUTS: usize = 3;

fn main() -> Result<()> {
    println!("{:>5}  {:>7}  {:>17}", "step", "loss", "held-out accuracy");
    for (step, loss, accuracy) in train()? {
        println!("{step:>5}  {loss:>7.4}  {:>15.1} %", 100.0 * accuracy);
    }
    Ok(())
}

/// Step, loss and accuracy on points that are not trained on, every 50 steps.
fn train() -> Result<Vec<(usize, f32, f32)>> {
    let model = model()?;
    let ((x, labels), (held_out, held_out_labels)) = (spirals(1)?, spirals(2)?);
    let mut log = Vec::new();
    for step in 0..=STEPS {
        let loss = cross_entropy(&model.forward(&x)?, &labels)?;
        if step % 50 == 0 {
            let accuracy = accuracy(&model.forward(&held_out)?, &held_out_labels)?;
            log.push((step, loss.to_scalar()?, accuracy));
        }
        let gradients = loss.backward()?;
        for parameter in model.parameters() {
            // An expert that got no token has no gradient.
            if let Some(gradient) = gradients.get(parameter) {
                parameter.set(&(parameter.as_tensor() - (gradient * LEARNING_RATE)?)?)?;
            }
        }
    }
    Ok(log)
}

fn random(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Numbers between -1 and 1.
fn uniform(rng: &mut ChaCha8Rng, shape: (usize, usize)) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.0 * shape.1)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

fn model() -> Result<Model> {
    let mut rng = random(1);
    Model::new(INPUTS, 2, &mut |inputs, outputs| {
        uniform(&mut rng, (inputs, outputs))? * (1.0 / inputs as f64).sqrt()
    })
}

/// Points `[POINTS, INPUTS]` of two spirals wound into each other, and which of them each is on.
fn spirals(seed: u64) -> Result<(Tensor, Tensor)> {
    let mut rng = random(seed);
    let (mut points, mut labels) = (Vec::new(), Vec::new());
    for point in 0..POINTS as u32 {
        let label = point % 2;
        let radius: f32 = rng.random_range(0.1..1.0);
        let angle = 6.0 * radius + std::f32::consts::PI * label as f32;
        points.extend([radius * angle.cos(), radius * angle.sin(), 1.0]);
        labels.push(label);
    }
    let points = Tensor::from_vec(points, (POINTS, INPUTS), &Device::Cpu)?;
    Ok((points, Tensor::from_vec(labels, POINTS, &Device::Cpu)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_tells_the_spirals_apart_and_repeats_to_the_bit() -> Result<()> {
        let log = train()?;
        let (_, loss, accuracy) = log[log.len() - 1];
        assert!(loss < log[0].1 / 5.0, "{loss} after {}", log[0].1);
        assert!(accuracy > 0.97, "{accuracy}");
        assert_eq!(log, train()?);
        Ok(())
    }
}
