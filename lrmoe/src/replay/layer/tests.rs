use lrmoe_metric::Method;
use lrmoe_plan::{ClusterSpec, ExpertShape, QuotaPolicy, Topology};
use proptest::prelude::*;

use super::*;
use crate::replay::{Model, Settings};

fn settings() -> Settings {
    Settings {
        model: Model {
            name: "small".into(),
            shape: ExpertShape {
                width: 8,
                hidden: 4,
                gated: true,
                bytes: 2,
            },
            sizes: None,
            top_k: Some(1),
            shared_experts: 0,
        },
        model_layers: None,
        cluster: ClusterSpec::preset("8xA100").expect("a preset"),
        budget: u64::MAX,
        contenders: Vec::new(),
        retention: 0.5,
        slots: None,
        ranks: None,
        tokens_per_rank: None,
        steps: None,
        warmup: 0,
        history: 1,
        capacity_factor: 1.0,
        chunk_rows: 16,
        quota_policy: QuotaPolicy::Proportional,
        floor: 1,
        method: Method::Priority,
        seed: 1,
    }
}

/// Two steps of loads on 1 to 4 ranks and 1 to 12 experts.
fn steps() -> impl Strategy<Value = Vec<Loads>> {
    (1..5usize, 1..13usize).prop_flat_map(|(ranks, experts)| {
        let counts = proptest::collection::vec(0..50u32, ranks * experts);
        let loads = counts.prop_map(move |counts| {
            let counts = Array2::from_shape_vec((ranks, experts), counts).expect("as many");
            Loads::new(counts).expect("few pairs")
        });
        proptest::collection::vec(loads, 2)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every pair that is not dropped is sent and received once in each pass that it takes part in.
    #[test]
    fn no_row_is_lost(steps in steps()) {
        let settings = settings();
        let (ranks, experts) = (steps[0].ranks(), steps[0].experts());
        for name in ["fixed", "fixed-replicas", "symi", "flexmoe", "lrmoe", "lrmoe+whole", "lrmoe@0"] {
            let contender = name.parse().expect("a contender");
            let topology = Topology::new(ranks, 2).expect("ranks");
            let rules = Rules::new(&settings, contender, topology, experts, 1, 1);
            let mut layer = Layer::new(0, &rules, &steps[0]).expect("a layer");
            for (step, loads) in (0..).zip(&steps) {
                let before = layer.placement().clone();
                let forward = layer.forward(&rules, loads).expect("routed");
                let capacities = vec![u64::MAX; ranks];
                let done = layer.finish(&rules, step, loads, &forward, None, &capacities).expect("done");
                let kept = u64::from(forward.kept.total());
                prop_assert_eq!(kept + done.dropped, u64::from(loads.total()));
                prop_assert_eq!(forward.rows.iter().sum::<u64>(), kept);
                prop_assert_eq!(rows_between_ranks(&forward.table).sum(), kept);
                prop_assert_eq!(done.backward_rows.iter().sum::<u64>() + done.left_out, kept);
                if rules.is_static() {
                    prop_assert_eq!(layer.placement(), &before);
                }
            }
        }
    }
}
