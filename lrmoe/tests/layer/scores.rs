//! Every score, and what is done with scores: recalibration, rescaling, the scope of a selection.

use lrmoe::config::ConfigError;
use lrmoe::error::Error;
use lrmoe::layer::{LayerConfig, MoeLayer};
use lrmoe::policy::{Policy, RouterGradient, Scope, Selecting};
use lrmoe_metric::{Method, Rescale, Score};
use lrmoe_plan::QuotaPolicy;
use ndarray::{Array1, Array2, ArrayView1, Axis};

use super::common::{Batch, Stepped, on_ranks, relative_error, split, step, steps};
use super::{ROUNDING, bits};
use lrmoe_comm::Collective;

fn square(row: &Array1<f64>) -> f64 {
    row.dot(row)
}

/// Squared scores of all pairs in f64, one pair after the other.
fn expected(batch: &Batch, score: Score) -> Vec<f64> {
    let wide = |row: ArrayView1<'_, f32>| row.mapv(f64::from);
    let of_expert = |all: &ndarray::Array3<f32>, expert: usize| -> Array2<f64> {
        all.index_axis(Axis(0), expert).mapv(f64::from)
    };
    let mut scores = Vec::new();
    for ((token, slot), id) in batch.expert_ids.indexed_iter() {
        let (x, dy) = (wide(batch.x.row(token)), wide(batch.dy.row(token)));
        let p = f64::from(batch.gate_weights[[token, slot]]);
        let expert = *id as usize;
        let gate = of_expert(batch.gate.as_ref().expect("gated"), expert).dot(&x);
        let up = of_expert(&batch.up, expert).dot(&x);
        let down = of_expert(&batch.down, expert);
        let sigmoid = gate.mapv(|a| 1.0 / (1.0 + (-a).exp()));
        let h = &gate * &sigmoid * &up;
        let dh = down.t().dot(&dy) * p;
        let slope = &sigmoid * &(1.0 + &gate * &(1.0 - &sigmoid));
        let (dgate, dup) = (&dh * &up * slope, &dh * &gate * &sigmoid);
        scores.push(match score {
            Score::DownGrad => p * p * square(&dy) * square(&h),
            Score::Forward => p * p * square(&h),
            Score::FullGrad => {
                p * p * square(&dy) * square(&h) + (square(&dgate) + square(&dup)) * square(&x)
            }
            Score::InputGrad => p * p * square(&dy) * square(&x),
            Score::GateGrad => p * p * square(&dy),
            Score::OutNorm => p * p * square(&down.dot(&h)),
            Score::Gate => p * p,
            Score::Random => 1.0,
        });
    }
    scores
}

/// The scores that a layer goes by, on one rank and on several, are what their formula says of each pair.
#[test]
fn scores_are_those_of_their_formulas() {
    let batch = Batch::random(40, (16, 24), (6, 2), 41);
    for score in Score::ALL {
        let expected = expected(&batch, score);
        for ranks in [1, 3] {
            let policy = Policy::Lrmoe(Selecting {
                score,
                ..Selecting::default()
            });
            let config = batch.config(ranks, policy);
            let shares = split(40, ranks);
            let found = on_ranks(ranks, |comm| {
                let rank = comm.rank();
                let rows = ndarray::s![shares[rank].clone(), ..];
                let of = |expert| batch.parameters(expert);
                let mut layer = MoeLayer::new(config.clone(), rank, of).expect("a layer");
                layer.keep_scores(true);
                let (x, ids) = (batch.x.slice(rows), batch.expert_ids.slice(rows));
                let p = batch.gate_weights.slice(rows);
                layer.forward(comm, x, ids, p, Some(1)).expect("forward");
                layer
                    .backward(comm, batch.dy.slice(rows))
                    .expect("backward");
                let scores = layer.scores().expect("kept");
                let scale = 4_f64.powi(scores.exponent());
                let squared = scores.squared().iter();
                squared.map(|s| f64::from(*s) * scale).collect::<Vec<_>>()
            });
            for (pair, (found, expected)) in found.concat().iter().zip(&expected).enumerate() {
                assert!(
                    (found / expected - 1.0).abs() < 1e-4,
                    "{score} of pair {pair} on {ranks} ranks: {found}, expected {expected}"
                );
            }
        }
    }
}

fn top(rescale: Rescale, quotas: QuotaPolicy) -> Selecting {
    Selecting {
        retention: 0.4,
        method: Method::Top,
        rescale,
        quotas,
        ..Selecting::default()
    }
}

/// Weights are the factors of experts, the same pairs are kept, and gradients are those of the pairs times the factors.
#[test]
fn rescaling_makes_up_for_what_top_leaves_out() {
    let batch = Batch::random(96, (16, 24), (8, 3), 3);
    let plain = step(
        &batch,
        &batch.config(1, Policy::Lrmoe(top(Rescale::None, QuotaPolicy::Blend))),
    );
    let loads = &plain.stats[0].loads;
    for rescale in [Rescale::Count, Rescale::Mass] {
        let policy = Policy::Lrmoe(top(rescale, QuotaPolicy::Blend));
        let one = step(&batch, &batch.config(1, policy.clone()));
        for ((pair, weight), (expected, _)) in one.retained.iter().zip(&plain.retained) {
            assert_eq!(pair, expected);
            let expert = batch.expert_ids[[*pair as usize / 3, *pair as usize % 3]] as usize;
            let count = loads[expert] as f32 / one.stats[0].quotas[expert] as f32;
            let weight = f32::from_bits(*weight);
            // Pairs that were kept have more than their share of the mass.
            match rescale {
                Rescale::Count => assert_eq!(weight, count),
                _ => assert!(weight >= 1.0 && weight <= count, "{weight}, {count}"),
            }
        }
        assert!(relative_error(&one.gradient, &plain.gradient) > 0.1);
        for ranks in [2, 4] {
            let many = step(&batch, &batch.config(ranks, policy.clone()));
            assert_eq!(many.retained, one.retained, "{rescale} on {ranks} ranks");
            assert!(relative_error(&many.gradient, &one.gradient) < ROUNDING);
            assert!(relative_error(&many.dx, &one.dx) < ROUNDING);
        }
    }
}

/// An expert whose scores are far larger gets all of the quota by value, and no more than the others with recalibration.
#[test]
fn recalibration_evens_out_experts() {
    let mut batch = Batch::random(128, (16, 24), (4, 1), 42);
    for (token, mut id) in batch.expert_ids.rows_mut().into_iter().enumerate() {
        id.fill((token % 4) as i32);
    }
    // The scores of an expert grow with its hidden rows.
    let mut first = batch.up.index_axis_mut(Axis(0), 0);
    first.mapv_inplace(|w| 4096.0 * w);
    let quotas = |recalibration| {
        let policy = Policy::Lrmoe(Selecting {
            retention: 0.25,
            quotas: QuotaPolicy::Value,
            recalibration,
            ..Selecting::default()
        });
        // The profile is that of the step before.
        let done = |ranks| {
            let stepped = steps(
                &batch,
                &batch.config(ranks, policy.clone()),
                &split(128, ranks),
                2,
            );
            stepped[1].stats[0].quotas.clone()
        };
        let one = done(1);
        assert_eq!(done(4), one, "{recalibration}");
        one
    };
    assert_eq!(quotas(0.0)[0], 29, "all but the floors");
    let even = quotas(1.0);
    assert!(even.iter().all(|quota| (4..13).contains(quota)), "{even:?}");
    let half = quotas(0.5)[0];
    assert!(even[0] < half && half <= 29, "{half} of expert 0, {even:?}");
}

fn wgrad(retention: f64) -> Selecting {
    Selecting {
        retention,
        scope: Scope::Wgrad,
        ..Selecting::default()
    }
}

fn assert_same(a: &Stepped, b: &Stepped, what: &str) {
    assert_eq!(bits(&a.dx), bits(&b.dx), "{what}: dx");
    assert_eq!(bits(&a.dp), bits(&b.dp), "{what}: dp");
}

/// dx and dp are those of dropless training to the bit, dW is that of the selected pairs.
#[test]
fn wgrad_leaves_out_nothing_but_weight_gradients() {
    let batch = Batch::random(64, (16, 24), (8, 2), 43);
    for ranks in [1, 3] {
        for retention in [0.0, 0.3, 1.0] {
            let what = format!("retention {retention} on {ranks} ranks");
            let run = |policy| step(&batch, &batch.config(ranks, policy));
            let full = run(Policy::Dropless);
            let part = run(Policy::Lrmoe(wgrad(retention)));
            // Replicas are where they were in the first step, but pairs go to other instances of an expert.
            match ranks {
                1 => assert_same(&part, &full, &what),
                _ => assert!(relative_error(&part.dx, &full.dx) < ROUNDING, "{what}"),
            }
            let pairs = run(Policy::Lrmoe(Selecting {
                scope: Scope::Pair,
                ..wgrad(retention)
            }));
            assert_eq!(part.retained, pairs.retained, "{what}");
            assert!(
                relative_error(&part.gradient, &pairs.gradient) < ROUNDING,
                "{what}"
            );
            let stats = &part.stats[0];
            assert_eq!(stats.backward_rows.sum(), 128, "{what}");
            assert_eq!(
                stats.quotas.iter().sum::<u32>(),
                (128.0 * retention).round() as u32
            );
            // All outputs would give the router's gradient again.
            let all = run(Policy::Lrmoe(Selecting {
                router_gradient: RouterGradient::All,
                ..wgrad(retention)
            }));
            assert_same(&all, &part, &what);
        }
    }
}

/// Memory that cannot take all rows refuses them, as of dropless training; it does not lower the quotas.
#[test]
fn wgrad_needs_memory_for_all_rows() {
    let batch = Batch::random(60, (8, 12), (6, 2), 18);
    let refused = on_ranks(3, |comm| {
        let config = LayerConfig {
            capacities: Some(vec![20, 5, 12]),
            ..batch.config(3, Policy::Lrmoe(wgrad(0.5)))
        };
        let of = |expert| batch.parameters(expert);
        let mut layer = MoeLayer::new(config, comm.rank(), of).expect("a layer");
        let rows = ndarray::s![comm.rank() * 20..(comm.rank() + 1) * 20, ..];
        let (x, ids) = (batch.x.slice(rows), batch.expert_ids.slice(rows));
        let p = batch.gate_weights.slice(rows);
        layer.forward(comm, x, ids, p, Some(1)).expect("forward");
        assert_eq!(layer.stats().quotas.iter().sum::<u32>(), 60);
        layer.backward(comm, batch.dy.slice(rows))
    });
    for error in refused {
        let error = error.expect_err("120 rows do not fit");
        assert!(matches!(error, Error::Route(_)), "{error}");
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let batch = Batch::random(4, (8, 12), (6, 2), 18);
    let rescaled = Selecting {
        rescale: Rescale::Mass,
        ..Selecting::default()
    };
    let past = Selecting {
        recalibration: 1.5,
        ..Selecting::default()
    };
    for (selecting, message) in [
        (
            rescaled,
            "rescale mass is for select top: the weights of priority already make up for the pairs left out",
        ),
        (past, "recalibration 1.5 is out of range, must be 0 to 1"),
    ] {
        let of = |expert| batch.parameters(expert);
        let policy = Policy::Lrmoe(selecting);
        let error = MoeLayer::new(batch.config(1, policy.clone()), 0, of).unwrap_err();
        assert!(matches!(
            error,
            Error::Config(ConfigError::Rescale { .. } | ConfigError::OutOfRange { .. })
        ));
        assert_eq!(error.to_string(), message);
        let mut layer = MoeLayer::new(batch.config(1, Policy::Dropless), 0, of).expect("a layer");
        assert_eq!(layer.set_policy(policy).unwrap_err().to_string(), message);
        assert_eq!(layer.config().policy, Policy::Dropless);
    }
}
