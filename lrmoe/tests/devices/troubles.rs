//! Troubles that other MoE systems have had, each a test with the trouble's name, on every backend. Where a trouble belongs to one part alone, its
//! test is there:
//!
//! | trouble | test |
//! |---|---|
//! | a rank with no tokens skips a collective and the others hang | `layer`: `edges::a_rank_without_tokens_skips_no_collective`; `layer::edges` here |
//! | an empty expert leaves its weight gradient unwritten | here |
//! | padded tail rows leak garbage into gradients | here |
//! | int32 overflow at 38,000 tokens x 8 x 7168 | lrmoe-compact: `int32_holds_38000_tokens_of_8_slots_of_width_7168` |
//! | grid limits at T * k > 65,535 | here |
//! | NaN logits select expert 0 eight times | `model::router`: `nan_logits_do_not_select_expert_0_eight_times` |
//! | near-ties flip between forward and recompute | here |
//! | padding tokens eat capacity | here |
//! | all tokens to one expert at capacity factor 1 | `layer`: `all_tokens_to_one_expert_at_capacity_factor_1` |
//! | bf16 rounding before top-k makes ties | `model::router`: `bf16_rounding_before_top_k_makes_no_ties` |
//! | gradients doubled with expert parallelism | `layer`: `expert_parallelism_does_not_double_gradients` |
//! | loads counted twice under recomputation | here |
//! | resume changes the loss | `cli`: `resume_does_not_change_the_loss` |
//! | non-deterministic order within an expert | here |

use libtest_mimic::Trial;
use lrmoe::adamw::AdamW;
use lrmoe::layer::{Backend, LayerConfig, MoeLayer};
use lrmoe::policy::{Policy, Selecting};
use lrmoe_comm::Solo;
use lrmoe_metric::{Method, Score};
use lrmoe_plan::Stash;
use ndarray::{Array2, Axis};

use super::Candidate;
use super::common::{Batch, Stepped, lrmoe, split, steps, steps_on};
use super::layer::{ROUNDING, assert_close, pairs};

pub(super) fn trials<B: Backend + Clone + Sync>(candidate: &Candidate<B>) -> Vec<Trial> {
    let trial = |name: &str, body: fn(&B)| candidate.trial(&format!("troubles::{name}"), body);
    vec![
        trial(
            "an_empty_expert_leaves_no_weight_gradient_unwritten",
            an_empty_expert_leaves_no_weight_gradient_unwritten,
        ),
        trial(
            "padded_tail_rows_leak_no_garbage_into_gradients",
            padded_tail_rows_leak_no_garbage_into_gradients,
        ),
        trial(
            "grids_hold_more_than_65535_pairs",
            grids_hold_more_than_65535_pairs,
        ),
        trial(
            "near_ties_do_not_flip_between_forward_and_recompute",
            near_ties_do_not_flip_between_forward_and_recompute,
        ),
        trial(
            "padding_tokens_eat_no_capacity",
            padding_tokens_eat_no_capacity,
        ),
        trial(
            "loads_are_not_counted_twice_under_recomputation",
            loads_are_not_counted_twice_under_recomputation,
        ),
        trial(
            "order_within_an_expert_is_deterministic",
            order_within_an_expert_is_deterministic,
        ),
    ]
}

const MODES: [Stash; 3] = [Stash::Recompute, Stash::Full, Stash::ForwardSelect];

/// Half of the pairs.
fn by(score: Score, method: Method) -> Policy {
    Policy::Lrmoe(Selecting {
        score,
        method,
        ..Selecting::default()
    })
}

fn alone<B: Backend + Clone>(
    backend: &B,
    batch: &Batch,
    policy: Policy,
    stash: Stash,
) -> MoeLayer<B> {
    let config = LayerConfig {
        stash,
        ..batch.config(1, policy)
    };
    let of = |expert| batch.parameters(expert);
    MoeLayer::on(backend.clone(), config, 0, of).expect("a layer")
}

fn forward<B: Backend>(layer: &mut MoeLayer<B>, batch: &Batch, step: Option<u32>) -> Array2<f32> {
    let (x, ids, p) = (&batch.x, &batch.expert_ids, &batch.gate_weights);
    let y = layer.forward(&mut Solo, x.view(), ids.view(), p.view(), step);
    y.expect("forward")
}

/// Bits of dx, dp and the gradients of all experts, and the pairs that ran backward with the bits of their weights.
type Passed = ([Vec<u32>; 3], Vec<(u32, u32)>);

fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    values.into_iter().map(|value| value.to_bits()).collect()
}

fn backward<B: Backend>(layer: &mut MoeLayer<B>, batch: &Batch) -> Passed {
    let (dx, dp) = layer
        .backward(&mut Solo, batch.dy.view())
        .expect("backward");
    layer.reduce_gradients(&mut Solo).expect("reduction");
    let kept = layer.selection().expect("a selection");
    let kept = kept.pairs.iter().zip(&kept.weights);
    let kept = kept.map(|(pair, weight)| (*pair, weight.to_bits()));
    let values = [bits(&dx), bits(&dp), bits(layer.shard_gradient())];
    (values, kept.collect())
}

/// Tokens at expert e as many as `loads[e]`, one slot each.
fn with_loads(loads: &[usize], seed: u64) -> Batch {
    let tokens = loads.iter().sum();
    let mut batch = Batch::random(tokens, (16, 24), (loads.len(), 1), seed);
    let experts = (0..).zip(loads);
    let ids = experts.flat_map(|(expert, &load)| std::iter::repeat_n(expert, load));
    batch
        .expert_ids
        .iter_mut()
        .zip(ids)
        .for_each(|(id, expert)| *id = expert);
    batch
}

/// Weight gradients lie where those of the step before lay, in which every expert had tokens.
fn an_empty_expert_leaves_no_weight_gradient_unwritten<B: Backend + Clone + Sync>(backend: &B) {
    let (full, half) = (
        with_loads(&[9, 16, 20, 3], 41),
        with_loads(&[48, 0, 0, 0], 41),
    );
    for policy in [Policy::Dropless, by(Score::Gate, Method::Top)] {
        for stash in MODES {
            let mut layer = alone(backend, &full, policy.clone(), stash);
            forward(&mut layer, &full, Some(1));
            backward(&mut layer, &full);
            assert!(layer.shard_gradient().iter().filter(|d| **d != 0.0).count() > 4000);
            forward(&mut layer, &half, Some(2));
            backward(&mut layer, &half);
            // Gate, up and down; within each, expert by expert.
            for matrix in layer.shard_gradient().chunks_exact(4 * 16 * 24) {
                let (first, empty) = matrix.split_at(16 * 24);
                assert!(first.iter().any(|d| *d != 0.0));
                assert_eq!(
                    bits(empty),
                    vec![0; empty.len()],
                    "{}, {stash}",
                    policy.name()
                );
            }
        }
    }
}

/// Every buffer of the layer has held NaN before, and no group fills its last tile.
fn padded_tail_rows_leak_no_garbage_into_gradients<B: Backend + Clone + Sync>(backend: &B) {
    let batch = with_loads(&[1, 15, 17, 33], 42);
    let mut poison = with_loads(&[64, 64, 64, 64], 42);
    poison.x.fill(f32::NAN);
    poison.dy.fill(f32::NAN);
    for stash in MODES {
        for chunk_rows in [13, u64::MAX] {
            let of = || {
                let config = LayerConfig {
                    stash,
                    chunk_rows,
                    ..batch.config(1, Policy::Dropless)
                };
                let of = |expert| batch.parameters(expert);
                MoeLayer::on(backend.clone(), config, 0, of).expect("a layer")
            };
            let mut fresh = of();
            let y = forward(&mut fresh, &batch, Some(2));
            let clean = backward(&mut fresh, &batch);
            assert!(
                clean
                    .0
                    .iter()
                    .flatten()
                    .all(|bits| f32::from_bits(*bits).is_finite())
            );
            let mut layer = of();
            forward(&mut layer, &poison, Some(1));
            let (values, _) = backward(&mut layer, &poison);
            assert!(f32::from_bits(values[2][0]).is_nan());
            let what = format!("{stash}, chunks of {chunk_rows}");
            assert_eq!(
                bits(&forward(&mut layer, &batch, Some(2))),
                bits(&y),
                "{what}"
            );
            assert_eq!(backward(&mut layer, &batch), clean, "{what}");
        }
    }
}

/// One workgroup for each pair would be more than a dimension of a grid has.
fn grids_hold_more_than_65535_pairs<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(33_000, (4, 4), (3, 2), 43);
    let config = |chunk_rows| LayerConfig {
        chunk_rows,
        ..batch.config(1, by(Score::InputGrad, Method::Priority))
    };
    let shares = split(33_000, 1);
    let cpu = &steps(&batch, &config(20_000), &shares, 1)[0];
    let whole = &steps_on(backend, &batch, &config(u64::MAX), &shares, 1)[0];
    assert_eq!(pairs(whole).len(), 33_000);
    assert_eq!(pairs(whole), pairs(cpu));
    // Sums of 22,000 terms.
    assert_close(whole, cpu, 100.0 * ROUNDING, "66,000 pairs");
}

/// Tokens that are equal, or apart by the last bit of a gate weight. What the forward pass has chosen holds, whatever is computed between it and
/// the backward pass: other pairs in an evaluation, the same ones again as activation checkpointing does.
fn near_ties_do_not_flip_between_forward_and_recompute<B: Backend + Clone + Sync>(backend: &B) {
    let mut batch = Batch::random(60, (16, 24), (4, 2), 44);
    let (x, dy) = (batch.x.row(0).to_owned(), batch.dy.row(0).to_owned());
    batch
        .x
        .rows_mut()
        .into_iter()
        .for_each(|mut row| row.assign(&x));
    batch
        .dy
        .rows_mut()
        .into_iter()
        .for_each(|mut row| row.assign(&dy));
    for (pair, p) in batch.gate_weights.iter_mut().enumerate() {
        *p = f32::from_bits(0.5_f32.to_bits() + (pair % 3) as u32);
    }
    let mut others = batch.clone();
    others.expert_ids.mapv_inplace(|id| (id + 1) % 4);
    for policy in [
        Policy::Dropless,
        by(Score::Forward, Method::Top),
        by(Score::Forward, Method::Priority),
    ] {
        for stash in MODES {
            let what = format!("{}, {stash}", policy.name());
            let mut layer = alone(backend, &batch, policy.clone(), stash);
            let y = forward(&mut layer, &batch, Some(1));
            let plain = backward(&mut layer, &batch);
            let mut layer = alone(backend, &batch, policy.clone(), stash);
            forward(&mut layer, &batch, Some(1));
            forward(&mut layer, &others, None);
            assert_eq!(
                backward(&mut layer, &batch),
                plain,
                "{what}, an evaluation between"
            );
            let mut layer = alone(backend, &batch, policy.clone(), stash);
            forward(&mut layer, &batch, Some(1));
            assert_eq!(
                bits(&forward(&mut layer, &batch, Some(1))),
                bits(&y),
                "{what}"
            );
            assert_eq!(
                backward(&mut layer, &batch),
                plain,
                "{what}, forward once more"
            );
        }
    }
}

/// As many padding tokens as others, before each of them; they name no expert.
fn padding_tokens_eat_no_capacity<B: Backend + Clone + Sync>(backend: &B) {
    let mut real = Batch::random(40, (16, 24), (4, 1), 45);
    // Expert 0 has more than its capacity.
    real.expert_ids.iter_mut().step_by(2).for_each(|id| *id = 0);
    let twice = |rows: &Array2<f32>| {
        Array2::from_shape_fn((80, rows.ncols()), |(row, column)| rows[[row / 2, column]])
    };
    let padded = Batch {
        x: twice(&real.x),
        dy: twice(&real.dy),
        gate_weights: twice(&real.gate_weights),
        expert_ids: Array2::from_shape_fn((80, 1), |(row, _)| match row % 2 {
            0 => -1,
            _ => real.expert_ids[[row / 2, 0]],
        }),
        ..real.clone()
    };
    let symi = Policy::Symi {
        capacity_factor: 1.0,
    };
    for policy in [symi, by(Score::Gate, Method::Top)] {
        for ranks in [1, 2] {
            let of = |batch: &Batch| {
                let config = batch.config(ranks, policy.clone());
                let shares = split(batch.tokens(), ranks);
                steps_on(backend, batch, &config, &shares, 1).remove(0)
            };
            let (with, without) = (of(&padded), of(&real));
            let what = format!("{} on {ranks} ranks", policy.name());
            assert_eq!(with.stats[0].quotas, without.stats[0].quotas, "{what}");
            assert_eq!(with.stats[0].dropped, without.stats[0].dropped, "{what}");
            let kept: Vec<u32> = pairs(&without).iter().map(|pair| 2 * pair + 1).collect();
            assert_eq!(pairs(&with), kept, "{what}");
            for (row, y) in with.y.rows().into_iter().enumerate() {
                match row % 2 {
                    0 => assert!(y.iter().all(|y| *y == 0.0), "{what}"),
                    _ => assert_eq!(bits(y), bits(without.y.row(row / 2)), "{what}"),
                }
            }
            if policy.name() == "symi" {
                assert!(with.stats[0].dropped > 0, "expert 0 has too many");
            }
        }
    }
}

/// The forward pass once more, as activation checkpointing does, and evaluations: none of it counts.
fn loads_are_not_counted_twice_under_recomputation<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(60, (16, 24), (6, 2), 46);
    for policy in [
        by(Score::Forward, Method::Top),
        Policy::Symi {
            capacity_factor: 1.0,
        },
    ] {
        for stash in MODES {
            let run = |again: bool| {
                let mut layer = alone(backend, &batch, policy.clone(), stash);
                for step in 1..=3 {
                    if again {
                        forward(&mut layer, &batch, None);
                        forward(&mut layer, &batch, Some(step));
                    }
                    forward(&mut layer, &batch, Some(step));
                    backward(&mut layer, &batch);
                    let loads = layer.loads().expect("loads").total();
                    assert_eq!(loads, 120);
                    assert_eq!(layer.stats().loads.iter().sum::<u32>(), 120);
                    let (adamw, number) = (AdamW::default(), step);
                    layer
                        .update(&mut Solo, &adamw, number, 1e-3, 1.0)
                        .expect("update");
                }
                layer.export(&mut Solo).expect("exported").expect("rank 0")
            };
            // Parameters, placement, and what is known of scores and popularity.
            assert!(run(true) == run(false), "{}, {stash}", policy.name());
        }
    }
}

/// Two experts with a hundred rows each, so large and small that another order of the sums has other bits.
fn order_within_an_expert_is_deterministic<B: Backend + Clone + Sync>(backend: &B) {
    let mut batch = Batch::random(200, (16, 24), (2, 1), 47);
    for (token, mut row) in batch.dy.rows_mut().into_iter().enumerate() {
        row.mapv_inplace(|dy| dy * 10_f32.powi((token * 7 % 9) as i32 - 4));
    }
    let values = |stepped: &Stepped| {
        let rows = [&stepped.y, &stepped.dx, &stepped.dp].map(bits);
        (rows, bits(&stepped.gradient), stepped.retained.clone())
    };
    for policy in [Policy::Dropless, lrmoe(0.5)] {
        for ranks in [1, 3] {
            let config = batch.config(ranks, policy.clone());
            let shares = split(200, ranks);
            let run = || values(&steps_on(backend, &batch, &config, &shares, 1)[0]);
            let first = run();
            for _ in 0..3 {
                assert_eq!(run(), first, "{} on {ranks} ranks", policy.name());
            }
        }
    }
    // Another order would show.
    let last_first: Vec<usize> = (0..200).rev().collect();
    let turned = Batch {
        x: batch.x.select(Axis(0), &last_first),
        dy: batch.dy.select(Axis(0), &last_first),
        expert_ids: batch.expert_ids.select(Axis(0), &last_first),
        gate_weights: batch.gate_weights.select(Axis(0), &last_first),
        ..batch.clone()
    };
    let [one, other] = [&batch, &turned].map(|batch| {
        let config = batch.config(1, Policy::Dropless);
        let shares = split(200, 1);
        bits(&steps_on(backend, batch, &config, &shares, 1)[0].gradient)
    });
    assert_ne!(one, other);
}
