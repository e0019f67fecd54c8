//! One layer on a device.

use lrmoe::layer::{Backend, LayerConfig};
use lrmoe::policy::{DxWeight, Policy, RouterGradient, Scope, Selecting};
use lrmoe_metric::{Method, Rescale, Row, Score};
use lrmoe_plan::Stash;

use super::common::{Batch, Stepped, lrmoe, relative_error, split, steps, steps_on};

/// f32 sums of a few dozen terms in another order, and another exponential, relative to the norm of a tensor.
const ROUNDING: f64 = 1e-5;

fn pairs(stepped: &Stepped) -> Vec<u32> {
    stepped.retained.iter().map(|(pair, _)| *pair).collect()
}

fn assert_close(device: &Stepped, cpu: &Stepped, tolerance: f64, what: &str) {
    let of = |step: &Stepped| {
        let weights = step
            .retained
            .iter()
            .map(|(_, weight)| f32::from_bits(*weight));
        [
            step.y.iter().copied().collect(),
            step.dx.iter().copied().collect(),
            step.dp.iter().copied().collect(),
            step.gradient.clone(),
            weights.collect::<Vec<_>>(),
        ]
    };
    let names = ["y", "dx", "dp", "gradient", "weights"];
    for ((name, a), b) in names.iter().zip(of(device)).zip(of(cpu)) {
        let error = relative_error(&a, &b);
        assert!(error < tolerance, "{what}: {name} is off by {error}");
    }
}

/// The same pairs, by scores that are the same to the bit and by scores that are the same within rounding; and all that follows.
pub(super) fn selections<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(96, (16, 24), (8, 3), 3);
    let on_devices = |score: &Score| *score != Score::FullGrad;
    for score in Score::ALL.into_iter().filter(on_devices) {
        for method in [Method::Priority, Method::Top] {
            let policy = Policy::Lrmoe(Selecting {
                retention: 0.4,
                score,
                method,
                ..Selecting::default()
            });
            for ranks in [1, 3] {
                let what = format!("{score} {method} on {ranks} ranks");
                let config = batch.config(ranks, policy.clone());
                let shares = split(96, ranks);
                let cpu = &steps(&batch, &config, &shares, 1)[0];
                let device = &steps_on(backend, &batch, &config, &shares, 1)[0];
                assert_eq!(pairs(device), pairs(cpu), "{what}");
                // Of what every device is given the same.
                if !matches!(score.row(), Some(Row::Hidden | Row::Output)) {
                    assert_eq!(device.retained, cpu.retained, "{what}");
                }
                assert_close(device, cpu, ROUNDING, &what);
                let checksum = |step: &Stepped| {
                    let parts = step.stats.iter().map(|stats| stats.selection);
                    parts.fold(0, u64::wrapping_add)
                };
                assert_eq!(checksum(device), checksum(cpu), "{what}");
            }
        }
    }
}

/// Steps with updates and moving experts.
pub(super) fn policies<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(60, (16, 20), (6, 2), 21);
    let policies = [
        Policy::Dropless,
        Policy::Symi {
            capacity_factor: 1.0,
        },
        lrmoe(0.0),
        Policy::Lrmoe(Selecting {
            score: Score::Gate,
            dx_weight: DxWeight::One,
            router_gradient: RouterGradient::All,
            ..Selecting::default()
        }),
        Policy::Lrmoe(Selecting {
            score: Score::OutNorm,
            method: Method::Top,
            rescale: Rescale::Mass,
            recalibration: 0.5,
            ..Selecting::default()
        }),
        Policy::Lrmoe(Selecting {
            score: Score::InputGrad,
            scope: Scope::Wgrad,
            ..Selecting::default()
        }),
    ];
    for policy in policies {
        for ranks in [1, 2, 4] {
            let what = format!("{} on {ranks} ranks", policy.name());
            let config = batch.config(ranks, policy.clone());
            let shares = split(60, ranks);
            let cpu = steps(&batch, &config, &shares, 3);
            let device = steps_on(backend, &batch, &config, &shares, 3);
            for (number, (device, cpu)) in device.iter().zip(&cpu).enumerate() {
                // Rounding grows through the updates.
                let tolerance = ROUNDING * 10_f64.powi(number as i32);
                assert_close(device, cpu, tolerance, &format!("{what}, step {number}"));
            }
        }
    }
}

/// Ranks without tokens, no tokens at all, masked pairs, one expert for all, chunks of any size.
pub(super) fn edges<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(24, (8, 12), (6, 2), 5);
    let nothing = Batch::random(0, (8, 12), (6, 2), 5);
    let mut masked = batch.clone();
    masked
        .expert_ids
        .iter_mut()
        .step_by(3)
        .for_each(|id| *id = -1);
    let mut all_masked = batch.clone();
    all_masked.expert_ids.fill(-1);
    let mut one = Batch::random(24, (8, 12), (6, 1), 6);
    one.expert_ids.fill(2);
    let cases = [
        (&batch, vec![0..0, 0..1, 1..1, 1..24], 13),
        (&batch, split(24, 1), 1),
        (&nothing, vec![0..0, 0..0], 13),
        (&masked, vec![0..10, 10..24], 7),
        (&masked, split(24, 1), u64::MAX),
        (&all_masked, split(24, 1), 13),
        (&one, vec![0..12, 12..24], 13),
    ];
    for (number, (batch, shares, chunk_rows)) in cases.into_iter().enumerate() {
        for policy in [Policy::Dropless, lrmoe(0.5)] {
            let config = LayerConfig {
                chunk_rows,
                ..batch.config(shares.len(), policy)
            };
            let cpu = &steps(batch, &config, &shares, 1)[0];
            let device = &steps_on(backend, batch, &config, &shares, 1)[0];
            let what = format!("case {number}, {}", config.policy.name());
            assert_eq!(pairs(device), pairs(cpu), "{what}");
            assert_close(device, cpu, ROUNDING, &what);
            if shares.len() == 1 {
                continue;
            }
            let config = LayerConfig {
                overlap: true,
                ..config
            };
            let overlapping = &steps_on(backend, batch, &config, &shares, 1)[0];
            assert_eq!(pairs(overlapping), pairs(device), "{what}");
            for (on, off) in [
                (&overlapping.y, &device.y),
                (&overlapping.dx, &device.dx),
                (&overlapping.dp, &device.dp),
            ] {
                assert_eq!(on, off, "{what}");
            }
            assert_eq!(overlapping.gradient, device.gradient, "{what}");
        }
    }
}

/// Rows that stay at their instances: as on the CPU, and to the bit what sending x again gives.
pub(super) fn stash_modes<B: Backend + Clone + Sync>(backend: &B) {
    let batch = Batch::random(96, (16, 24), (8, 3), 41);
    for score in [Score::Gate, Score::Forward] {
        for ranks in [1, 2] {
            let of = |stash| {
                let policy = Policy::Lrmoe(Selecting {
                    retention: 0.4,
                    score,
                    ..Selecting::default()
                });
                // Without replicas, so that pairs run where they ran.
                let config = LayerConfig {
                    stash,
                    slots: vec![(8 / ranks) as u32; ranks],
                    ..batch.config(ranks, policy)
                };
                let shares = split(96, ranks);
                let cpu = steps(&batch, &config, &shares, 1).swap_remove(0);
                let device = steps_on(backend, &batch, &config, &shares, 1).swap_remove(0);
                let what = format!("{stash}, {score} on {ranks} ranks");
                assert_eq!(pairs(&device), pairs(&cpu), "{what}");
                assert_close(&device, &cpu, ROUNDING, &what);
                let bits =
                    |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                let found = [
                    device.y.iter().copied().collect(),
                    device.dx.iter().copied().collect(),
                    device.dp.iter().copied().collect(),
                    device.gradient,
                ];
                (device.retained, found.map(bits))
            };
            let again = of(Stash::Recompute);
            for stash in [Stash::Full, Stash::ForwardSelect] {
                assert_eq!(of(stash), again, "{stash}, {score} on {ranks} ranks");
            }
        }
    }
}
