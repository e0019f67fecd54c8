//! The layer with rows and working weights in bf16.

use lrmoe::adamw::AdamW;
use lrmoe::layer::{LayerConfig, MoeLayer};
use lrmoe::policy::{Policy, RouterGradient, Selecting};
use lrmoe_comm::Solo;
use lrmoe_kernels::half::bf16;
use lrmoe_kernels::{Activation, Cpu};
use lrmoe_metric::{Method, Score};
use ndarray::{Array2, ArrayView1, ArrayView2, Axis};

use super::common::{Batch, Stepped, lrmoe, rank_step, relative_error, split, steps, steps_in};
use super::edges::{all_policies, assert_whole};
use super::{bits, strip_clock};

/// Rounding to 8 bits in rows, hidden rows and their gradients, relative to the norm of a tensor.
const ROUNDING: f64 = 1e-2;

pub(super) fn bf16_step(batch: &Batch, config: &LayerConfig) -> Stepped {
    bf16_steps(batch, config, 1).pop().expect("one step")
}

fn bf16_steps(batch: &Batch, config: &LayerConfig, count: u32) -> Vec<Stepped> {
    let shares = split(batch.tokens(), config.topology.ranks());
    steps_in::<Cpu, bf16>(&Cpu, batch, config, &shares, count)
}

fn rounded(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// The batch as a layer in bf16 sees it.
fn rounded_batch(batch: &Batch) -> Batch {
    Batch {
        x: batch.x.mapv(rounded),
        dy: batch.dy.mapv(rounded),
        gate: batch.gate.as_ref().map(|m| m.mapv(rounded)),
        up: batch.up.mapv(rounded),
        down: batch.down.mapv(rounded),
        ..batch.clone()
    }
}

/// What a step gives, in f64, one pair after the other.
struct Oracle {
    y: Array2<f64>,
    dx: Array2<f64>,
    dp: Array2<f64>,
    /// Gate, up, down; within each, expert by expert.
    gradient: [Vec<f64>; 3],
}

fn wide(row: ArrayView1<'_, f32>) -> Vec<f64> {
    row.iter().map(|v| f64::from(*v)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `matrix` `[out, in]` times `x` `[in]`.
fn times(matrix: ArrayView2<'_, f32>, x: &[f64]) -> Vec<f64> {
    let rows = matrix.rows().into_iter();
    rows.map(|row| dot(&wide(row), x)).collect()
}

/// Adds `scale` times the outer product to a matrix `[out, in]`.
fn add_outer(matrix: &mut [f64], scale: f64, out: &[f64], x: &[f64]) {
    for (row, out) in matrix.chunks_exact_mut(x.len()).zip(out) {
        for (sum, x) in row.iter_mut().zip(x) {
            *sum += scale * out * x;
        }
    }
}

impl Oracle {
    /// `retained` has the pairs that run backward, with their weights as bits; `all_dp` says that every pair has a dp.
    fn new(batch: &Batch, retained: &[(u32, u32)], all_dp: bool) -> Self {
        let (experts, hidden, width) = batch.up.dim();
        let (tokens, top_k) = batch.expert_ids.dim();
        let mut new = Self {
            y: Array2::zeros((tokens, width)),
            dx: Array2::zeros((tokens, width)),
            dp: Array2::zeros((tokens, top_k)),
            gradient: std::array::from_fn(|_| vec![0.0; experts * hidden * width]),
        };
        let gate = batch.gate.as_ref().expect("a gated layer");
        for token in 0..tokens {
            let [x, dy] = [&batch.x, &batch.dy].map(|all| wide(all.row(token)));
            for slot in 0..top_k {
                let expert = batch.expert_ids[[token, slot]];
                if expert < 0 {
                    continue;
                }
                let expert = expert as usize;
                let [w_gate, w_up, w_down] =
                    [gate, &batch.up, &batch.down].map(|m| m.index_axis(Axis(0), expert));
                let p = f64::from(batch.gate_weights[[token, slot]]);
                let (a, u) = (times(w_gate, &x), times(w_up, &x));
                let silu = |a: f64| a / (1.0 + (-a).exp());
                let h: Vec<f64> = a.iter().zip(&u).map(|(a, u)| silu(*a) * u).collect();
                let f = times(w_down, &h);
                let mut y = new.y.row_mut(token);
                y.iter_mut().zip(&f).for_each(|(y, f)| *y += p * f);

                let pair = (token * top_k + slot) as u32;
                let kept = retained.iter().find(|(kept, _)| *kept == pair);
                let w = kept.map(|(_, weight)| f64::from(f32::from_bits(*weight)));
                if all_dp {
                    new.dp[[token, slot]] = dot(&dy, &f);
                }
                let Some(w) = w else { continue };
                if !all_dp {
                    new.dp[[token, slot]] = w * dot(&dy, &f);
                }
                let dh: Vec<f64> = times(w_down.t(), &dy).iter().map(|b| p * b).collect();
                let slope = |a: f64| {
                    let sigmoid = 1.0 / (1.0 + (-a).exp());
                    sigmoid * (1.0 + a * (1.0 - sigmoid))
                };
                let inner = a.iter().zip(&u).zip(&dh);
                let da: Vec<f64> = inner.map(|((a, u), dh)| dh * u * slope(*a)).collect();
                let du: Vec<f64> = a.iter().zip(&dh).map(|(a, dh)| dh * silu(*a)).collect();
                let back = [times(w_gate.t(), &da), times(w_up.t(), &du)];
                for (sum, (a, b)) in new
                    .dx
                    .row_mut(token)
                    .iter_mut()
                    .zip(back[0].iter().zip(&back[1]))
                {
                    *sum += w * (a + b);
                }
                let block = expert * hidden * width..(expert + 1) * hidden * width;
                let [g_gate, g_up, g_down] = &mut new.gradient;
                add_outer(&mut g_gate[block.clone()], w, &da, &x);
                add_outer(&mut g_up[block.clone()], w, &du, &x);
                add_outer(&mut g_down[block], w * p, &dy, &h);
            }
        }
        new
    }

    fn check(&self, step: &Stepped, what: &str) {
        let single = |values: &mut dyn Iterator<Item = &f64>| -> Vec<f32> {
            values.map(|v| *v as f32).collect()
        };
        let pairs = [
            (
                "y",
                single(&mut self.y.iter()),
                step.y.iter().copied().collect(),
            ),
            (
                "dx",
                single(&mut self.dx.iter()),
                step.dx.iter().copied().collect(),
            ),
            (
                "dp",
                single(&mut self.dp.iter()),
                step.dp.iter().copied().collect(),
            ),
            (
                "gradient",
                single(&mut self.gradient.iter().flatten()),
                step.gradient.clone(),
            ),
        ];
        for (name, expected, found) in pairs {
            assert_eq!(found.len(), expected.len(), "{what}: {name}");
            let error = relative_error(&found, &expected);
            assert!(error < ROUNDING, "{what}: {name} is off by {error}");
        }
    }
}

#[test]
fn bf16_agrees_with_f64_on_rounded_inputs() {
    // 96 rows of an expert on average: some groups are above the small kernels, and most sizes are no multiples of a vector.
    let mut batch = Batch::random(256, (72, 40), (8, 3), 31);
    batch
        .expert_ids
        .iter_mut()
        .step_by(11)
        .for_each(|id| *id = -1);
    let seen = rounded_batch(&batch);
    let policies = [
        (Policy::Dropless, false),
        (lrmoe(0.5), false),
        (
            Policy::Lrmoe(Selecting {
                retention: 0.3,
                router_gradient: RouterGradient::All,
                ..Selecting::default()
            }),
            true,
        ),
    ];
    for (policy, all_dp) in policies {
        for (ranks, chunk_rows) in [(1, u64::MAX), (1, 50), (3, 64), (4, 7)] {
            let config = LayerConfig {
                chunk_rows,
                ..batch.config(ranks, policy.clone())
            };
            let step = bf16_step(&batch, &config);
            let what = format!(
                "{} on {ranks} ranks in chunks of {chunk_rows}",
                policy.name()
            );
            Oracle::new(&seen, &step.retained, all_dp).check(&step, &what);
            assert!(
                step.y.iter().chain(&step.dx).all(|v| *v == rounded(*v)),
                "{what}: y and dx are bf16"
            );
        }
    }
}

#[test]
fn bf16_at_retention_one_is_dropless_bit_for_bit_on_one_rank() {
    let batch = Batch::random(64, (16, 24), (8, 2), 1);
    let full = bf16_step(&batch, &batch.config(1, Policy::Dropless));
    for method in [Method::Priority, Method::Top] {
        let policy = Policy::Lrmoe(Selecting {
            retention: 1.0,
            method,
            ..Selecting::default()
        });
        let kept = bf16_step(&batch, &batch.config(1, policy));
        assert!(bits(&kept.y) == bits(&full.y), "y by {method}");
        assert!(bits(&kept.dx) == bits(&full.dx), "dx by {method}");
        assert!(bits(&kept.dp) == bits(&full.dp), "dp by {method}");
        assert!(
            bits(&kept.gradient) == bits(&full.gradient),
            "gradient by {method}"
        );
    }
}

#[test]
fn bf16_selections_do_not_depend_on_the_number_of_ranks() {
    let batch = Batch::random(96, (16, 24), (8, 3), 3);
    for score in Score::ALL {
        for method in [Method::Priority, Method::Top] {
            let policy = Policy::Lrmoe(Selecting {
                retention: 0.4,
                score,
                method,
                ..Selecting::default()
            });
            let one = bf16_step(&batch, &batch.config(1, policy.clone()));
            assert_eq!(one.retained.len(), (0.4_f64 * 96.0 * 3.0).round() as usize);
            for ranks in [2, 4, 8] {
                let many = bf16_step(&batch, &batch.config(ranks, policy.clone()));
                let what = format!("{score} {method} on {ranks} ranks");
                assert_eq!(many.retained, one.retained, "{what}");
                for (name, a, b) in [
                    ("y", &many.y, &one.y),
                    ("dx", &many.dx, &one.dx),
                    ("dp", &many.dp, &one.dp),
                ] {
                    assert!(relative_error(a, b) < ROUNDING, "{what}: {name}");
                }
                assert!(
                    relative_error(&many.gradient, &one.gradient) < ROUNDING,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn nothing_in_bf16_depends_on_the_number_of_threads() {
    let batch = Batch::random(80, (33, 20), (8, 2), 4);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("a pool").install(|| {
            let config = batch.config(1, lrmoe(0.5));
            let layer = MoeLayer::<Cpu, bf16>::on(Cpu, config, 0, |e| batch.parameters(e));
            let mut layer = layer.expect("a layer");
            (1..=3)
                .map(|number| rank_step(&batch, &mut layer, &mut Solo, 0..80, number))
                .map(|step| format!("{:?}", strip_clock(step)))
                .collect::<Vec<_>>()
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(5));
}

#[test]
fn bf16_trains_through_empty_ranks_and_masked_pairs() {
    let mut batch = Batch::random(24, (8, 12), (6, 2), 5);
    for activation in [Activation::SwiGlu, Activation::Relu2] {
        batch.activation = activation;
        if !activation.is_gated() {
            batch.gate = None;
        }
        batch
            .expert_ids
            .iter_mut()
            .step_by(5)
            .for_each(|id| *id = -1);
        for policy in all_policies() {
            for (ranks, shares) in [(4, [0..0, 0..1, 1..1, 1..24].to_vec()), (1, split(24, 1))] {
                let config = batch.config(ranks, policy.clone());
                let stepped = steps_in::<Cpu, bf16>(&Cpu, &batch, &config, &shares, 3);
                assert_whole(&stepped, &batch, &config.policy, config.policy.name());
            }
        }
    }
}

#[test]
fn bf16_halves_what_travels() {
    let batch = Batch::random(64, (16, 24), (8, 2), 9);
    // Without |h|^2 beside the rows.
    let config = batch.config(4, Policy::Dropless);
    let half = bf16_step(&batch, &config);
    let full = &steps(&batch, &config, &split(64, 4), 1)[0];
    for (half, full) in half.stats.iter().zip(&full.stats) {
        assert_eq!(half.forward_rows, full.forward_rows);
        assert_eq!(2 * half.forward_bytes, full.forward_bytes);
        assert!(half.backward_bytes > full.backward_bytes / 2);
        assert!(half.backward_bytes < full.backward_bytes * 3 / 5);
        assert_eq!(half.reduction_bytes, full.reduction_bytes);
        let delivered = |bytes: &[u64]| bytes.iter().sum::<u64>();
        assert_eq!(
            2 * delivered(&half.delivery_bytes),
            delivered(&full.delivery_bytes)
        );
    }
}

/// Updates far below the precision of the working weights are not lost: the master weights gather them.
#[test]
fn small_updates_of_bf16_weights_add_up() {
    let batch = Batch::random(32, (8, 12), (4, 2), 12);
    let config = batch.config(1, Policy::Dropless);
    let layer = MoeLayer::<Cpu, bf16>::on(Cpu, config, 0, |e| batch.parameters(e));
    let mut layer = layer.expect("a layer");
    let [x, dy] = [&batch.x, &batch.dy].map(|rows| rows.mapv(bf16::from_f32));
    let (ids, p) = (batch.expert_ids.view(), batch.gate_weights.view());
    let mut outputs = Vec::new();
    let mut masters = Vec::new();
    for step in 1..=200 {
        let y = layer
            .forward(&mut Solo, x.view(), ids, p, Some(step))
            .expect("forward");
        outputs.push(y);
        masters.push(
            layer
                .export(&mut Solo)
                .expect("a state")
                .expect("rank 0")
                .parameters,
        );
        layer.backward(&mut Solo, dy.view()).expect("backward");
        layer.reduce_gradients(&mut Solo).expect("reduction");
        // A step of 1e-6; neighbours of weights around 0.3 are 1e-3 apart.
        let adamw = AdamW {
            weight_decay: 0.0,
            ..AdamW::default()
        };
        layer
            .update(&mut Solo, &adamw, step, 1e-6, 1.0)
            .expect("update");
    }
    assert_eq!(bits(&masters[0]).len(), 3 * 4 * 8 * 12);
    let moved = masters[0]
        .iter()
        .zip(&masters[1])
        .filter(|(a, b)| a != b)
        .count();
    assert!(
        moved > masters[0].len() / 2,
        "{moved} master weights moved in a step"
    );
    assert_eq!(
        masters[0],
        batch_parameters(&batch),
        "master weights are not rounded"
    );
    assert!(
        outputs[199] != outputs[0],
        "and in the end working weights do"
    );
}

fn batch_parameters(batch: &Batch) -> Vec<f32> {
    let gate = batch.gate.as_ref().expect("a gated layer");
    [gate, &batch.up, &batch.down]
        .into_iter()
        .flatten()
        .copied()
        .collect()
}
