//! Compensation by moments against its formula, pair by pair in f64.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use lrmoe::layer::LayerConfig;
use lrmoe::policy::{Compensation, Policy, Selecting};
use lrmoe_kernels::Activation;
use lrmoe_metric::{Method, Score};
use ndarray::{Array1, Array2, Array3, Axis};

use crate::bits;
use crate::common::{Batch, Stepped, relative_error, step};

fn policy(retention: f64, (method, score): (Method, Score), compensation: Compensation) -> Policy {
    Policy::Lrmoe(Selecting {
        retention,
        method,
        score,
        compensation,
        floor: 0,
        ..Selecting::default()
    })
}

/// Value and derivative of what a gate or, with plain activations, up goes through.
fn curve(activation: Activation, x: f64) -> [f64; 2] {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu | Activation::Silu => {
            let s = sigmoid(x);
            [x * s, s * (1.0 + x * (1.0 - s))]
        }
        Activation::GegluErf | Activation::Gelu => {
            let phi = 0.5 * libm::erfc(-x * FRAC_1_SQRT_2);
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            [x * phi, phi + x * density]
        }
        Activation::GegluTanh => {
            let scale = (2.0 / PI).sqrt();
            let t = (scale * (x + 0.044_715 * x.powi(3))).tanh();
            let slope = scale * (1.0 + 3.0 * 0.044_715 * x * x);
            [
                0.5 * x * (1.0 + t),
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope,
            ]
        }
        Activation::ReGlu => [x.max(0.0), f64::from(u8::from(x > 0.0))],
        Activation::Relu2 => [x.max(0.0).powi(2), 2.0 * x.max(0.0)],
    }
}

/// A pair's vectors: a = p dy, x, h, and dh by each pre-activation.
struct Pair {
    weight: f64,
    a: Array1<f64>,
    x: Array1<f64>,
    h: Array1<f64>,
    slopes: Vec<Array1<f64>>,
}

fn matrix(all: &Array3<f32>, expert: usize) -> Array2<f64> {
    all.index_axis(Axis(0), expert).mapv(f64::from)
}

fn pairs_of(batch: &Batch, expert: usize, retained: &[(u32, u32)]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for ((token, slot), id) in batch.expert_ids.indexed_iter() {
        if *id != expert as i32 {
            continue;
        }
        let number = (token * batch.expert_ids.ncols() + slot) as u32;
        let weight = retained.iter().find(|(pair, _)| *pair == number);
        let x = batch.x.row(token).mapv(f64::from);
        let up = matrix(&batch.up, expert).dot(&x);
        let of = |v: &Array1<f64>, part: usize| v.mapv(|v| curve(batch.activation, v)[part]);
        let (h, slopes) = match &batch.gate {
            Some(gate) => {
                let gate = matrix(gate, expert).dot(&x);
                let value = of(&gate, 0);
                (&value * &up, vec![of(&gate, 1) * &up, value])
            }
            None => (of(&up, 0), vec![of(&up, 1)]),
        };
        pairs.push(Pair {
            weight: weight.map_or(0.0, |(_, bits)| f64::from(f32::from_bits(*bits))),
            a: batch.dy.row(token).mapv(f64::from) * f64::from(batch.gate_weights[[token, slot]]),
            x,
            h,
            slopes,
        });
    }
    pairs
}

fn outer(column: &Array1<f64>, row: &Array1<f64>) -> Array2<f64> {
    let column = column.view().insert_axis(Axis(1));
    column.dot(&row.view().insert_axis(Axis(0)))
}

/// Sum over pairs of a factor times a vector.
fn sum(
    pairs: &[Pair],
    factor: impl Fn(&Pair) -> f64,
    of: impl Fn(&Pair) -> &Array1<f64>,
) -> Array1<f64> {
    let zero = Array1::zeros(of(&pairs[0]).len());
    pairs
        .iter()
        .fold(zero, |sum, pair| sum + of(pair) * factor(pair))
}

/// Weight gradients of an expert without and with compensation: gate (if gated), up, down.
fn expected(pairs: &[Pair], down: &Array2<f64>, method: Method) -> [Vec<Array2<f64>>; 2] {
    let back = |v: &Array1<f64>| down.t().dot(v);
    let parts = pairs[0].slopes.len();
    let mut plain: Vec<Array2<f64>> = vec![outer(&pairs[0].h, &pairs[0].x) * 0.0; parts];
    plain.push(outer(&pairs[0].a, &pairs[0].h) * 0.0);
    for pair in pairs {
        for (gradient, c) in plain.iter_mut().zip(&pair.slopes) {
            *gradient += &(outer(&(c * &back(&pair.a)), &pair.x) * pair.weight);
        }
        plain[parts] += &(outer(&pair.a, &pair.h) * pair.weight);
    }
    let mut with = plain.clone();
    let n = pairs.len() as f64;
    let dropped = |pair: &Pair| f64::from(u8::from(pair.weight == 0.0));
    let missing: f64 = pairs.iter().map(dropped).sum();
    if missing == 0.0 {
        return [plain, with];
    }
    match method {
        Method::Priority => {
            let mean = |of: &dyn Fn(&Pair) -> &Array1<f64>| sum(pairs, |_| 1.0 / n, of);
            let weighted = |of: &dyn Fn(&Pair) -> &Array1<f64>| sum(pairs, |pair| pair.weight, of);
            let s_w: f64 = pairs.iter().map(|pair| pair.weight).sum();
            let (a, h, x) = (mean(&|p| &p.a), mean(&|p| &p.h), mean(&|p| &p.x));
            let (s_a, s_h, s_x) = (
                weighted(&|p| &p.a),
                weighted(&|p| &p.h),
                weighted(&|p| &p.x),
            );
            with[parts] += &(outer(&a, &h) * n);
            with[parts] -= &outer(&a, &(s_h - &h * s_w));
            with[parts] -= &outer(&s_a, &h);
            for (part, gradient) in with[..parts].iter_mut().enumerate() {
                let c = mean(&|p| &p.slopes[part]);
                let d = &c * &back(&a);
                *gradient += &(outer(&d, &x) * n);
                *gradient -= &outer(&d, &(&s_x - &(&x * s_w)));
                *gradient -= &outer(&(&c * &back(&s_a)), &x);
            }
        }
        Method::Top => {
            let share = |pair: &Pair| dropped(pair) / missing;
            let a = sum(pairs, dropped, |p| &p.a);
            with[parts] += &outer(&a, &sum(pairs, share, |p| &p.h));
            for (part, gradient) in with[..parts].iter_mut().enumerate() {
                let c = sum(pairs, share, |p| &p.slopes[part]);
                *gradient += &outer(&(c * back(&a)), &sum(pairs, share, |p| &p.x));
            }
        }
    }
    [plain, with]
}

/// The vector of all experts' gradients: matrix by matrix, expert by expert.
fn all_expected(batch: &Batch, stepped: &Stepped, method: Method) -> [Vec<f32>; 2] {
    let matrices = 2 + usize::from(batch.gate.is_some());
    let block = batch.up.len() / batch.experts();
    let mut all = [(); 2].map(|()| vec![0.0; matrices * batch.experts() * block]);
    for expert in 0..batch.experts() {
        let pairs = pairs_of(batch, expert, &stepped.retained);
        if pairs.is_empty() {
            continue;
        }
        let both = expected(&pairs, &matrix(&batch.down, expert), method);
        for (all, gradients) in all.iter_mut().zip(both) {
            for (kind, gradient) in gradients.iter().enumerate() {
                let at = (kind * batch.experts() + expert) * block;
                let to = all[at..at + block].iter_mut();
                to.zip(gradient).for_each(|(to, value)| *to = *value as f32);
            }
        }
    }
    all
}

fn batch(activation: Activation, seed: u64) -> Batch {
    let mut batch = Batch::random(90, (17, 21), (6, 2), seed);
    batch.activation = activation;
    if !activation.is_gated() {
        batch.gate = None;
    }
    // Means that are not nearly zero, masked pairs, and an expert of one pair.
    batch.x += 0.3;
    batch.dy += 0.2;
    for id in batch.expert_ids.iter_mut().filter(|id| **id == 5).skip(1) {
        *id = -1;
    }
    batch
}

/// All sums are of f32 values in f64 or of few f32 terms.
const ROUNDING: f64 = 1e-5;

#[test]
fn moments_follow_their_formula() {
    let forms = [
        (Method::Priority, Score::DownGrad),
        (Method::Priority, Score::Random),
        (Method::Top, Score::Forward),
    ];
    for (seed, activation) in (0..).zip(Activation::ALL) {
        let batch = batch(activation, seed);
        for (ranks, chunk_rows) in [(1, 1000), (2, 13), (3, 1000), (4, 7)] {
            for form in forms {
                let run = |compensation| {
                    let policy = policy(0.3, form, compensation);
                    let config = LayerConfig {
                        chunk_rows,
                        ..batch.config(ranks, policy)
                    };
                    step(&batch, &config)
                };
                let (with, without) = (run(Compensation::Moments), run(Compensation::None));
                let what = format!("{activation} {form:?} on {ranks} ranks");
                assert_eq!(with.retained, without.retained, "{what}");
                assert_eq!(bits(&with.dx), bits(&without.dx), "{what}");
                assert_eq!(bits(&with.dp), bits(&without.dp), "{what}");
                let [plain, compensated] = all_expected(&batch, &with, form.0);
                let error = relative_error(&without.gradient, &plain);
                assert!(error < ROUNDING, "{what}: {error} without");
                let error = relative_error(&with.gradient, &compensated);
                assert!(error < ROUNDING, "{what}: {error}");
                let added = relative_error(&compensated, &plain);
                assert!(
                    added > 0.05,
                    "{what}: the correction is as small as {added}"
                );
                let difference = |a: &[f32], b: &[f32]| -> Vec<f32> {
                    a.iter().zip(b).map(|(a, b)| a - b).collect()
                };
                let error = relative_error(
                    &difference(&with.gradient, &without.gradient),
                    &difference(&compensated, &plain),
                );
                assert!(error < ROUNDING, "{what}: {error} of the correction");
            }
        }
    }
}

#[test]
fn moments_vanish_where_every_pair_is_retained() {
    let batch = batch(Activation::SwiGlu, 40);
    for method in [Method::Priority, Method::Top] {
        for ranks in [1, 3] {
            let run = |compensation| {
                let policy = policy(1.0, (method, Score::DownGrad), compensation);
                step(&batch, &batch.config(ranks, policy)).gradient
            };
            let (with, without) = (run(Compensation::Moments), run(Compensation::None));
            assert_eq!(bits(&with), bits(&without), "{method} on {ranks} ranks");
        }
    }
}

#[test]
fn frozen_experts_stay_frozen() {
    let batch = batch(Activation::SwiGlu, 41);
    let form = (Method::Priority, Score::DownGrad);
    let stepped = step(
        &batch,
        &batch.config(2, policy(0.0, form, Compensation::Moments)),
    );
    assert!(stepped.gradient.iter().all(|g| *g == 0.0));
}
