//! Settings, first weights, policies and states.

use lrmoe::adamw::Moments;
use lrmoe::config::ConfigError;
use lrmoe::error::Error;
use lrmoe::layer::{ExpertParameters, LayerConfig, LayerState, MoeLayer};
use lrmoe::policy::{Policy, Selecting};
use lrmoe_comm::Solo;
use lrmoe_metric::Error as MetricError;
use lrmoe_plan::Error as PlanError;

use super::{batch, expect, layer, lrmoe};

#[test]
fn settings() {
    let batch = batch();
    let with = |change: &dyn Fn(&mut LayerConfig)| {
        let mut config = batch.config(1, lrmoe(0.5));
        change(&mut config);
        let made = MoeLayer::new(config, 0, |expert| batch.parameters(expert));
        made.map(|layer| layer.placement().instances())
    };
    let per_rank = |what, len| {
        Err(Error::PerRank {
            what,
            len,
            ranks: 1,
        })
    };
    let top_k = |top_k, experts| Err(Error::TopK { top_k, experts });
    let empty = |width, hidden| {
        Err(Error::Kernels(lrmoe_kernels::Error::EmptyExpert {
            width,
            hidden,
        }))
    };
    let slots = |slots| Err(Error::Plan(PlanError::TooFewSlots { slots, experts: 5 }));
    let range = |value: f64| {
        let Policy::Lrmoe(selecting) = lrmoe(value) else {
            unreachable!("that is what it makes");
        };
        selecting.check().map(|()| 0).map_err(Error::Config)
    };
    expect("as it should be", with(&|_| ()), Ok(5));
    expect("no slots", with(&|c| c.slots.clear()), per_rank("slots", 0));
    expect(
        "slots of two ranks",
        with(&|c| c.slots = vec![5, 5]),
        per_rank("slots", 2),
    );
    expect("slots for none", with(&|c| c.slots = vec![0]), slots(0));
    expect("a slot short", with(&|c| c.slots = vec![4]), slots(4));
    expect(
        "all slots there are",
        with(&|c| c.slots = vec![u32::MAX]),
        Ok(5),
    );
    expect(
        "capacities",
        with(&|c| c.capacities = Some(vec![])),
        per_rank("capacities", 0),
    );
    expect("no slots per token", with(&|c| c.top_k = 0), top_k(0, 5));
    expect(
        "more than experts",
        with(&|c| c.top_k = usize::MAX),
        top_k(usize::MAX, 5),
    );
    expect("no experts", with(&|c| c.experts = 0), top_k(2, 0));
    expect(
        "chunks of nothing",
        with(&|c| c.chunk_rows = 0),
        Err(Error::NoChunk),
    );
    expect("chunks of all", with(&|c| c.chunk_rows = u64::MAX), Ok(5));
    expect("no width", with(&|c| c.shape.width = 0), empty(0, 4));
    expect(
        "no hidden units",
        with(&|c| c.shape.hidden = 0),
        empty(8, 0),
    );
    let bytes = (usize::MAX as u128) * 5 * 3 * 4 * 4;
    expect(
        "a width past memory",
        with(&|c| c.shape.width = usize::MAX),
        Err(Error::Memory { bytes }),
    );
    for retention in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
        let found = with(&|c| c.policy = lrmoe(retention));
        assert!(
            matches!(found, Err(Error::Config(ConfigError::OutOfRange { .. }))),
            "{found:?}"
        );
        expect("retention", found, range(retention));
    }
    let other = MoeLayer::new(batch.config(1, lrmoe(0.5)), 1, |e| batch.parameters(e));
    expect(
        "rank",
        other.map(drop),
        Err(Error::NoSuchRank { rank: 1, ranks: 1 }),
    );
}

#[test]
fn first_weights() {
    let batch = batch();
    let with = |change: fn(&mut ExpertParameters)| {
        let made = MoeLayer::new(batch.config(1, lrmoe(0.5)), 0, |expert| {
            let mut parameters = batch.parameters(expert);
            if expert == 3 {
                change(&mut parameters);
            }
            parameters
        });
        made.map(drop)
    };
    let refused = |given: &[usize]| {
        Err(Error::ExpertParameters {
            expert: 3,
            matrices: 3,
            block: 32,
            given: given.to_vec(),
        })
    };
    expect("no gate", with(|p| p.gate = None), refused(&[32, 32]));
    expect("nothing", with(|p| p.up.clear()), refused(&[32, 0, 32]));
    expect(
        "a number too many",
        with(|p| p.down.push(0.0)),
        refused(&[32, 32, 33]),
    );
}

#[test]
fn policies_that_cannot_be() {
    let batch = batch();
    let mut config = batch.config(2, lrmoe(0.5));
    config.slots = vec![u32::MAX; 2];
    let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
    let symi = Policy::Symi {
        capacity_factor: 1.0,
    };
    let too_many = PlanError::OutOfRange {
        what: "slots over all ranks",
        value: 2.0 * f64::from(u32::MAX),
        range: "0 to 4294967295",
    };
    expect("slots", layer.set_policy(symi), Err(Error::Plan(too_many)));
    assert_eq!(layer.config().policy.name(), "lrmoe", "as it was");
    let found = layer.set_policy(lrmoe(2.0));
    assert!(
        matches!(found, Err(Error::Config(ConfigError::OutOfRange { .. }))),
        "{found:?}"
    );
    let kept = Selecting::default();
    layer.set_policy(Policy::Lrmoe(kept)).expect("a policy");

    // Room for no row at all runs nothing backward; room for all there is, what was asked for.
    for (rows, expected) in [(0, 0), (3, 3), (u64::MAX, 6)] {
        let config = LayerConfig {
            capacities: Some(vec![rows]),
            ..batch.config(1, lrmoe(0.5))
        };
        let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
        let (ids, p) = (batch.expert_ids.view(), batch.gate_weights.view());
        layer
            .forward(&mut Solo, batch.x.view(), ids, p, Some(1))
            .expect("forward");
        layer
            .backward(&mut Solo, batch.dy.view())
            .expect("backward");
        assert_eq!(
            layer.selection().expect("a selection").pairs.len(),
            expected,
            "{rows} rows"
        );
    }
}

#[test]
fn states_of_other_layers() {
    let batch = batch();
    let mut layer = layer(&batch, lrmoe(0.5));
    let good = layer.export(&mut Solo).expect("exported").expect("rank 0");
    let mut with = |change: &dyn Fn(&mut LayerState)| {
        let mut state = good.clone();
        change(&mut state);
        layer.restore(&state)
    };
    let length = |what, len, expected| {
        Err(Error::StateLength {
            what,
            len,
            expected,
        })
    };
    let placement = |what| {
        Err(Error::PerRank {
            what,
            len: 2,
            ranks: 1,
        })
    };
    let all = 5 * 3 * 32;
    expect("as it was", with(&|_| ()), Ok(()));
    expect(
        "parameters",
        with(&|s| s.parameters.clear()),
        length("parameters", 0, all),
    );
    expect(
        "first",
        with(&|s| s.moments.first.push(0.0)),
        length("first moments", all + 1, all),
    );
    expect(
        "second",
        with(&|s| {
            s.moments = Moments {
                second: vec![],
                ..s.moments.clone()
            }
        }),
        length("second moments", 0, all),
    );
    expect(
        "ranks",
        with(&|s| s.placement.push(vec![])),
        placement("placement"),
    );
    expect(
        "replicas",
        with(&|s| s.replicas = vec![1]),
        length("replicas", 1, 0),
    );
    let missing = Err(Error::Plan(PlanError::MissingExpert { expert: 2 }));
    expect(
        "an expert lost",
        with(&|s| s.placement = vec![vec![0, 1, 3, 4]]),
        missing,
    );
    let counts = Err(Error::Metric(MetricError::Length {
        what: "profile counts",
        found: 3,
        expected: 1280,
    }));
    expect("profile", with(&|s| s.profile = vec![0.0; 3]), counts);
    let bad = MetricError::ProfileCount {
        expert: 1,
        bucket: 2,
        count: f32::INFINITY,
    };
    expect(
        "counts",
        with(&|s| s.profile[258] = f32::INFINITY),
        Err(Error::Metric(bad)),
    );
}
