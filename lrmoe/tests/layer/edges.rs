//! Routing that leaves ranks or experts empty, or piles everything on one.

use lrmoe::error::Error;
use lrmoe::layer::{LayerConfig, MoeLayer};
use lrmoe::policy::{DxWeight, Policy, RouterGradient, Scope, Selecting};
use lrmoe_comm::{Collective, Solo};
use lrmoe_kernels::{Cpu, HostBuffer, Memory};
use lrmoe_metric::{Method, Rescale, Score};
use lrmoe_plan::{QuotaPolicy, Stash};
use ndarray::s;

use super::bits;
use super::common::{Batch, Stepped, lrmoe, on_ranks, split, step, steps};
use super::stash::MODES;

pub(super) fn all_policies() -> Vec<Policy> {
    let select = |retention, score, method, quotas| {
        Policy::Lrmoe(Selecting {
            retention,
            score,
            method,
            quotas,
            ..Selecting::default()
        })
    };
    vec![
        Policy::Dropless,
        Policy::Symi {
            capacity_factor: 1.0,
        },
        select(
            0.5,
            Score::DownGrad,
            Method::Priority,
            QuotaPolicy::Proportional,
        ),
        select(0.25, Score::Forward, Method::Priority, QuotaPolicy::Blend),
        select(0.5, Score::Gate, Method::Top, QuotaPolicy::Value),
        select(0.5, Score::Random, Method::Top, QuotaPolicy::Proportional),
        select(0.4, Score::InputGrad, Method::Priority, QuotaPolicy::Neyman),
        select(0.4, Score::FullGrad, Method::Top, QuotaPolicy::Value),
        lrmoe(0.0),
        select(
            0.0,
            Score::Forward,
            Method::Priority,
            QuotaPolicy::Proportional,
        ),
        select(
            1.0,
            Score::Forward,
            Method::Priority,
            QuotaPolicy::Proportional,
        ),
        Policy::Lrmoe(Selecting {
            score: Score::OutNorm,
            method: Method::Top,
            quotas: QuotaPolicy::Blend,
            recalibration: 0.5,
            rescale: Rescale::Mass,
            ..Selecting::default()
        }),
        Policy::Lrmoe(Selecting {
            score: Score::GateGrad,
            scope: Scope::Wgrad,
            ..Selecting::default()
        }),
        Policy::Lrmoe(Selecting {
            dx_weight: DxWeight::One,
            router_gradient: RouterGradient::All,
            ..Selecting::default()
        }),
    ]
}

fn assert_trains_through(
    batch: &Batch,
    config: &LayerConfig,
    shares: &[std::ops::Range<usize>],
    what: &str,
) {
    for stash in MODES {
        let late = |policy: &Policy| match policy {
            Policy::Lrmoe(selecting) => {
                selecting.score.needs_dy() && selecting.scope == Scope::Pair
            }
            _ => false,
        };
        if stash == Stash::ForwardSelect && late(&config.policy) {
            continue;
        }
        let config = LayerConfig {
            stash,
            ..config.clone()
        };
        let what = format!("{what}, {stash}");
        let stepped = steps(batch, &config, shares, 3);
        assert_whole(&stepped, batch, &config.policy, &what);
    }
}

/// Everything is finite, and every pair that was to run did.
pub(super) fn assert_whole(stepped: &[Stepped], batch: &Batch, policy: &Policy, what: &str) {
    let runs_all = matches!(policy, Policy::Lrmoe(selecting) if selecting.scope == Scope::Wgrad);
    for (number, step) in stepped.iter().enumerate() {
        let all = step
            .y
            .iter()
            .chain(&step.dx)
            .chain(&step.dp)
            .chain(&step.gradient);
        assert!(
            all.into_iter().all(|v| v.is_finite()),
            "{what}: step {number} is not finite"
        );
        let stats = &step.stats[0];
        let kept: u64 = stats.quotas.iter().map(|quota| u64::from(*quota)).sum();
        let routed = stats.loads.iter().map(|load| u64::from(*load)).sum();
        assert_eq!(
            stats.backward_rows.sum(),
            if runs_all { routed } else { kept },
            "{what}: step {number} ran another number of pairs backward than planned"
        );
        assert_eq!(step.retained.len() as u64, kept, "{what}: step {number}");
        assert_eq!(
            stats.loads.iter().sum::<u32>(),
            batch.expert_ids.iter().filter(|id| **id >= 0).count() as u32,
            "{what}"
        );
        assert_eq!(
            stats.forward_rows.sum() + u64::from(stats.dropped),
            u64::from(stats.loads.iter().sum::<u32>()),
            "{what}"
        );
    }
}

#[test]
fn trains_through_ranks_without_tokens() {
    let batch = Batch::random(24, (8, 12), (6, 2), 5);
    for policy in all_policies() {
        let config = batch.config(4, policy);
        for shares in [
            [0..24, 24..24, 24..24, 24..24],
            [0..0, 0..1, 1..1, 1..24],
            [0..0, 0..0, 0..0, 0..24],
        ] {
            assert_trains_through(
                &batch,
                &config,
                &shares,
                &format!("{} over {shares:?}", config.policy.name()),
            );
        }
    }
}

#[test]
fn trains_through_no_tokens_at_all() {
    let batch = Batch::random(0, (8, 12), (6, 2), 5);
    for policy in all_policies() {
        let config = batch.config(2, policy);
        assert_trains_through(&batch, &config, &[0..0, 0..0], config.policy.name());
    }
}

#[test]
fn trains_through_experts_without_tokens_and_all_on_one_expert() {
    let mut batch = Batch::random(40, (8, 12), (8, 1), 6);
    for expert in [0, 7] {
        batch.expert_ids.fill(expert);
        for policy in all_policies() {
            let config = batch.config(4, policy);
            assert_trains_through(
                &batch,
                &config,
                &split(40, 4),
                &format!("{} on expert {expert}", config.policy.name()),
            );
        }
    }
}

#[test]
fn trains_through_every_token_at_every_expert() {
    let batch = Batch::random(20, (8, 12), (5, 5), 7);
    for policy in all_policies() {
        let config = batch.config(3, policy);
        assert_trains_through(&batch, &config, &split(20, 3), config.policy.name());
    }
}

#[test]
fn masked_pairs_add_nothing() {
    let mut batch = Batch::random(30, (8, 12), (6, 3), 8);
    for (pair, id) in batch.expert_ids.iter_mut().enumerate() {
        if pair % 4 == 1 || pair / 3 == 10 {
            *id = -1;
        }
    }
    let masked: Vec<bool> = batch.expert_ids.iter().map(|id| *id < 0).collect();
    let clean = Batch {
        gate_weights: batch.gate_weights.clone(),
        ..batch.clone()
    };
    for (p, masked) in batch.gate_weights.iter_mut().zip(&masked) {
        if *masked {
            *p = f32::NAN;
        }
    }
    for policy in all_policies() {
        let config = batch.config(3, policy);
        assert_trains_through(&batch, &config, &split(30, 3), config.policy.name());
        let (poisoned, plain) = (step(&batch, &config), step(&clean, &config));
        assert_eq!(bits(&poisoned.gradient), bits(&plain.gradient));
        assert!(
            poisoned
                .dp
                .iter()
                .zip(&masked)
                .all(|(dp, masked)| !masked || *dp == 0.0)
        );
        assert!(
            poisoned.y.row(10).iter().all(|y| *y == 0.0),
            "a token without pairs"
        );
    }
}

#[test]
fn trains_through_more_ranks_than_experts() {
    let batch = Batch::random(24, (8, 12), (3, 2), 15);
    for policy in all_policies() {
        let config = batch.config(5, policy);
        assert_trains_through(&batch, &config, &split(24, 5), config.policy.name());
    }
}

#[test]
fn memory_bounds_what_runs_backward() {
    let batch = Batch::random(60, (8, 12), (6, 2), 18);
    let bounded = |policy| LayerConfig {
        capacities: Some(vec![20, 5, 12]),
        ..batch.config(3, policy)
    };
    let stepped = step(&batch, &bounded(lrmoe(1.0)));
    let received = |rank: usize| stepped.stats[0].backward_rows.column(rank).sum();
    assert!(received(0) <= 20 && received(1) <= 5 && received(2) <= 12);
    assert_eq!(
        stepped.stats[0].quotas.iter().sum::<u32>(),
        37,
        "120 pairs fill all the room there is"
    );
    // What retains everything has no other choice than to refuse.
    let refused = on_ranks(3, |comm| {
        let mut layer = MoeLayer::new(bounded(Policy::Dropless), comm.rank(), |expert| {
            batch.parameters(expert)
        })
        .expect("a layer");
        let rows = s![comm.rank() * 20..(comm.rank() + 1) * 20, ..];
        let (x, ids) = (batch.x.slice(rows), batch.expert_ids.slice(rows));
        let p = batch.gate_weights.slice(rows);
        layer.forward(comm, x, ids, p, Some(1)).expect("forward");
        layer.backward(comm, batch.dy.slice(rows)).is_err()
    });
    assert_eq!(refused, [true; 3]);
}

#[test]
fn an_array_of_gradients_needs_the_inputs_of_an_array() {
    let batch = Batch::random(6, (8, 4), (2, 1), 3);
    let config = batch.config(1, Policy::Dropless);
    let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
    let (x, ids, p) = (
        batch.x.view(),
        batch.expert_ids.view(),
        batch.gate_weights.view(),
    );
    layer
        .forward(&mut Solo, x, ids, p, Some(1))
        .expect("forward");
    let rows = Cpu.upload(batch.x.as_slice().expect("standard layout"));
    let (rows, mut y) = (rows.expect("memory"), HostBuffer::default());
    layer
        .forward_rows(&mut Solo, &rows, ids, p, Some(2), &mut y)
        .expect("forward");
    // The layer has the x of step 1 alone, so it must not go on with that.
    let refused = layer.backward(&mut Solo, batch.dy.view());
    assert!(matches!(refused, Err(Error::NoForward)), "{refused:?}");
}
