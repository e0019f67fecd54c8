//! Stash modes: the same gradients, from what was kept.

use lrmoe::error::Error;
use lrmoe::layer::{LayerConfig, MoeLayer};
use lrmoe::policy::{DxWeight, Policy, RouterGradient, Selecting};
use lrmoe_comm::Solo;
use lrmoe_metric::{Method, Score};
use lrmoe_plan::Stash;
use ndarray::s;

use super::common::{Batch, Stepped, on_ranks, relative_error, split, step, steps};
use super::precision::bf16_step;
use super::{assert_close, bits};

pub(super) const MODES: [Stash; 3] = [Stash::Recompute, Stash::Full, Stash::ForwardSelect];
/// Scores that are known in the forward pass.
const EARLY: [Score; 3] = [Score::Forward, Score::Gate, Score::Random];

fn by(score: Score, method: Method, retention: f64) -> Policy {
    Policy::Lrmoe(Selecting {
        retention,
        score,
        method,
        ..Selecting::default()
    })
}

/// No replicas: the pairs of an expert run where they ran, whatever the mode.
fn alone(batch: &Batch, ranks: usize, policy: Policy, stash: Stash) -> LayerConfig {
    LayerConfig {
        slots: vec![batch.experts().div_ceil(ranks) as u32; ranks],
        stash,
        ..batch.config(ranks, policy)
    }
}

fn assert_same(a: &Stepped, b: &Stepped, what: &str) {
    assert_eq!(a.retained, b.retained, "{what}: selection");
    assert_eq!(bits(&a.y), bits(&b.y), "{what}: y");
    assert_eq!(bits(&a.dx), bits(&b.dx), "{what}: dx");
    assert_eq!(bits(&a.dp), bits(&b.dp), "{what}: dp");
    assert_eq!(bits(&a.gradient), bits(&b.gradient), "{what}: gradient");
}

#[test]
fn all_modes_give_the_same_bits() {
    let mut batch = Batch::random(96, (33, 20), (12, 3), 31);
    for id in batch.expert_ids.iter_mut().step_by(7) {
        *id = -1;
    }
    for ranks in [1, 2, 3, 4] {
        for score in EARLY {
            for method in [Method::Priority, Method::Top] {
                let of = |stash| step(&batch, &alone(&batch, ranks, by(score, method, 0.4), stash));
                let again = of(Stash::Recompute);
                for stash in [Stash::Full, Stash::ForwardSelect] {
                    let what = format!("{stash}, {score} {method} on {ranks} ranks");
                    assert_same(&of(stash), &again, &what);
                }
            }
        }
        for policy in [
            Policy::Dropless,
            Policy::Symi {
                capacity_factor: 1.0,
            },
            by(Score::DownGrad, Method::Priority, 0.4),
        ] {
            let of = |stash| step(&batch, &alone(&batch, ranks, policy.clone(), stash));
            let what = format!("{} on {ranks} ranks", policy.name());
            assert_same(&of(Stash::Full), &of(Stash::Recompute), &what);
        }
    }
}

#[test]
fn settings_of_the_gradients_hold_in_all_modes() {
    let batch = Batch::random(64, (16, 24), (8, 2), 32);
    for (dx_weight, router_gradient) in [
        (DxWeight::One, RouterGradient::Retained),
        (DxWeight::Selection, RouterGradient::All),
    ] {
        let policy = Policy::Lrmoe(Selecting {
            score: Score::Forward,
            dx_weight,
            router_gradient,
            ..Selecting::default()
        });
        let of = |stash| step(&batch, &alone(&batch, 2, policy.clone(), stash));
        let again = of(Stash::Recompute);
        for stash in [Stash::Full, Stash::ForwardSelect] {
            assert_same(
                &of(stash),
                &again,
                &format!("{stash}, {dx_weight} {router_gradient}"),
            );
        }
    }
}

/// With replicas a mode decides where pairs run backward, and with it the order of the sums of weight gradients alone.
#[test]
fn replicas_change_nothing_but_rounding() {
    let batch = Batch::random(90, (16, 24), (6, 2), 33);
    for score in [Score::Gate, Score::Forward] {
        let of = |stash| {
            let policy = by(score, Method::Priority, 0.3);
            let config = LayerConfig {
                stash,
                slots: vec![4; 3],
                ..batch.config(3, policy)
            };
            steps(&batch, &config, &split(90, 3), 2)
        };
        let again = of(Stash::Recompute);
        assert!(again[1].stats[0].instances.iter().sum::<u32>() > 6);
        for stash in [Stash::Full, Stash::ForwardSelect] {
            let kept = of(stash);
            for (number, (kept, again)) in kept.iter().zip(&again).enumerate() {
                let what = format!("{stash}, {score}, step {number}");
                let pairs = |step: &Stepped| {
                    let pairs = step.retained.iter().map(|(pair, _)| *pair);
                    pairs.collect::<Vec<_>>()
                };
                if number == 0 {
                    assert_eq!(pairs(kept), pairs(again), "{what}");
                    assert_close(kept, again, &what);
                }
                // Rounding grows through the update, and may decide a near tie.
                assert!(relative_error(&kept.y, &again.y) < 1e-3, "{what}");
            }
        }
    }
}

#[test]
fn chunks_do_not_change_what_is_kept() {
    let batch = Batch::random(64, (16, 24), (8, 3), 34);
    for ranks in [1, 3] {
        for stash in MODES {
            let of = |chunk_rows| {
                let policy = by(Score::Forward, Method::Priority, 0.4);
                let config = LayerConfig {
                    chunk_rows,
                    stash,
                    ..batch.config(ranks, policy)
                };
                step(&batch, &config)
            };
            let whole = of(u64::MAX);
            for chunk_rows in [1, 5, 32] {
                let what = format!("{stash} in chunks of {chunk_rows} on {ranks} ranks");
                let chunked = of(chunk_rows);
                assert_eq!(chunked.retained, whole.retained, "{what}");
                assert_eq!(bits(&chunked.dx), bits(&whole.dx), "{what}");
                assert_eq!(bits(&chunked.gradient), bits(&whole.gradient), "{what}");
            }
        }
    }
}

/// Scores so far apart that the small ones count as zero beside the largest: the order in which rows were compared before is not that of the keys.
#[test]
fn scores_that_vanish_beside_others_are_chosen_alike() {
    let mut batch = Batch::random(80, (8, 12), (4, 1), 35);
    for (token, (mut x, id)) in
        (batch.x.rows_mut().into_iter().zip(&mut batch.expert_ids)).enumerate()
    {
        *id = (token % 4) as i32;
        // The hidden rows are about quadratic in x.
        x *= if token % 4 == 3 {
            2_f32.powi(20)
        } else {
            2_f32.powi(-30)
        };
    }
    for ranks in [1, 2] {
        for method in [Method::Priority, Method::Top] {
            let policy = by(Score::Forward, method, 0.3);
            let of = |stash| step(&batch, &alone(&batch, ranks, policy.clone(), stash));
            let (chosen, again) = (of(Stash::ForwardSelect), of(Stash::Recompute));
            assert_same(&chosen, &again, &format!("{method} on {ranks} ranks"));
        }
    }
}

#[test]
fn rows_in_bf16_differ_by_their_rounding() {
    let batch = Batch::random(96, (32, 64), (8, 2), 36);
    for ranks in [1, 2] {
        let of = |stash| {
            let policy = by(Score::Forward, Method::Priority, 0.5);
            bf16_step(&batch, &alone(&batch, ranks, policy, stash))
        };
        let again = of(Stash::Recompute);
        for stash in [Stash::Full, Stash::ForwardSelect] {
            let kept = of(stash);
            assert_eq!(kept.retained, again.retained);
            assert_eq!(bits(&kept.y), bits(&again.y));
            // Pre-activations are kept in 8 bits of precision.
            for (what, a, b) in [
                ("dx", kept.dx.iter().collect(), again.dx.iter().collect()),
                ("dp", kept.dp.iter().collect(), again.dp.iter().collect()),
                (
                    "gradient",
                    kept.gradient.iter().collect(),
                    again.gradient.iter().collect(),
                ),
            ] {
                let (a, b): (Vec<&f32>, Vec<&f32>) = (a, b);
                let error = relative_error(a, b);
                assert!(error < 1e-2, "{stash}: {what} is off by {error}");
            }
        }
    }
}

#[test]
fn less_is_sent_and_held() {
    let batch = Batch::random(256, (32, 16), (8, 2), 37);
    let [again, full, chosen] = MODES.map(|stash| {
        let config = LayerConfig {
            chunk_rows: 32,
            ..alone(&batch, 2, by(Score::Gate, Method::Priority, 0.25), stash)
        };
        step(&batch, &config).stats[0].clone()
    });
    let rows = again.backward_rows.row(0).sum() - again.backward_rows[[0, 0]];
    // Without the row of x; where pairs are not chosen in the forward pass with the number of the row.
    assert_eq!(
        again.backward_bytes - full.backward_bytes,
        rows * (32 * 4 - 4)
    );
    assert_eq!(again.backward_bytes - chosen.backward_bytes, rows * 32 * 4);
    assert_eq!(chosen.forward_bytes - again.forward_bytes, rows * 4);
    assert!(chosen.buffer_bytes < full.buffer_bytes);
}

#[test]
fn memory_bounds_what_stays_at_instances() {
    let batch = Batch::random(60, (8, 12), (6, 2), 18);
    let capacities = [20, 5, 12];
    for stash in [Stash::Full, Stash::ForwardSelect] {
        let bounded = |policy| LayerConfig {
            capacities: Some(capacities.to_vec()),
            stash,
            ..batch.config(3, policy)
        };
        for score in EARLY {
            let stepped = step(&batch, &bounded(by(score, Method::Priority, 1.0)));
            let received = &stepped.stats[0].backward_rows;
            for (rank, capacity) in capacities.into_iter().enumerate() {
                let rows = received.column(rank).sum();
                assert!(
                    rows <= capacity,
                    "{stash} by {score}: {rows} rows on rank {rank}"
                );
            }
            // Not all that would fit with another division, but nothing near nothing.
            assert!(received.sum() >= 18, "{stash} by {score}: {received}");
        }
        let refused = on_ranks(3, |comm| {
            let rank = lrmoe_comm::Collective::rank(comm);
            let layer = MoeLayer::new(bounded(Policy::Dropless), rank, |e| batch.parameters(e));
            let mut layer = layer.expect("a layer");
            let rows = s![rank * 20..(rank + 1) * 20, ..];
            let (x, ids) = (batch.x.slice(rows), batch.expert_ids.slice(rows));
            let p = batch.gate_weights.slice(rows);
            layer.forward(comm, x, ids, p, Some(1)).expect("forward");
            layer.backward(comm, batch.dy.slice(rows)).err()
        });
        for error in refused {
            let full = Some(Error::Route(lrmoe_route::Error::RankFull {
                rank: 0,
                rows: 0,
                capacity: 20,
            }));
            let same = |error: &Option<Error>| error.as_ref().map(std::mem::discriminant);
            assert_eq!(same(&error), same(&full), "{error:?}");
        }
    }
}

#[test]
fn a_score_of_dy_cannot_be_chosen_by_in_the_forward_pass() {
    let batch = Batch::random(8, (8, 4), (2, 1), 3);
    let config = alone(
        &batch,
        1,
        by(Score::DownGrad, Method::Priority, 0.5),
        Stash::ForwardSelect,
    );
    let refused = MoeLayer::new(config, 0, |e| batch.parameters(e));
    let error = refused.expect_err("down-grad needs dy").to_string();
    assert!(error.contains("score down-grad is not known"), "{error}");
    let config = alone(&batch, 1, Policy::Dropless, Stash::ForwardSelect);
    let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
    let policy = by(Score::DownGrad, Method::Priority, 0.5);
    assert!(matches!(
        layer.set_policy(policy.clone()),
        Err(Error::Stash(_))
    ));
    layer.set_stash(Stash::Full).expect("any policy can");
    layer.set_policy(policy).expect("in this mode");
    assert!(matches!(
        layer.set_stash(Stash::ForwardSelect),
        Err(Error::Stash(_))
    ));
}

/// What is evaluated between the passes of a step changes nothing, and scores are there after the forward pass.
#[test]
fn the_choice_outlives_an_evaluation() {
    let batch = Batch::random(40, (8, 12), (4, 2), 38);
    let (x, ids, p) = (&batch.x, &batch.expert_ids, &batch.gate_weights);
    for score in EARLY {
        let run = |evaluates: bool| {
            let policy = by(score, Method::Priority, 0.5);
            let config = alone(&batch, 1, policy, Stash::ForwardSelect);
            let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
            layer.keep_scores(true);
            let forward = layer.forward(&mut Solo, x.view(), ids.view(), p.view(), Some(1));
            forward.expect("forward");
            assert!(layer.scores().is_some());
            if evaluates {
                let some = s![..7, ..];
                let (x, ids, p) = (x.slice(some), ids.slice(some), p.slice(some));
                layer.forward(&mut Solo, x, ids, p, None).expect("forward");
            }
            layer
                .backward(&mut Solo, batch.dy.view())
                .expect("backward")
        };
        assert_eq!(run(true), run(false), "{score}");
    }
}
