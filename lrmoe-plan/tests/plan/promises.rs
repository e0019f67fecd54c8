//! Whole plans under the checker, and the smallest budgets.

use crate::checker::check;
use crate::request::{Case, cluster};
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    Error, ExpertShape, Fixed, FixedReplicas, FlexMoe, Loads, Lrmoe, MemoryModel, PlacementPolicy,
    Profile, QuotaPolicy, Stash, Symi, Topology, plan,
};
use proptest::prelude::*;

fn policy(index: usize) -> Box<dyn PlacementPolicy> {
    match index {
        0 => Box::new(Fixed),
        1 => Box::new(FixedReplicas),
        2 => Box::new(Symi),
        3 => Box::new(FlexMoe),
        _ => Box::new(Lrmoe::default()),
    }
}
const POLICIES: usize = 5;

prop_compose! {
    fn memory()(
        (width, hidden, gated) in (1usize..20, 1usize..20, any::<bool>()),
        bytes in prop_oneof![Just(2usize), Just(4)],
        (top_k, tokens) in (1usize..4, 0usize..60),
        chunk_rows in prop_oneof![Just(u64::MAX), 1u64..200],
        stash in prop_oneof![Just(Stash::Recompute), Just(Stash::Full), Just(Stash::ForwardSelect)],
        (overlap, keeps_outputs, fixed) in (any::<bool>(), any::<bool>(), 0u64..1000),
    ) -> MemoryModel {
        MemoryModel {
            shape: ExpertShape { width, hidden, gated, bytes },
            top_k, tokens, chunk_rows, overlap, stash, keeps_outputs, fixed,
        }
    }
}

fn counts(ranks: usize, experts: usize) -> impl Strategy<Value = Loads> {
    let count = prop_oneof![2 => Just(0u32), 6 => 0u32..20, 1 => 0u32..400];
    prop::collection::vec(count, ranks * experts).prop_map(move |counts| {
        Loads::new(Array2::from_shape_vec((ranks, experts), counts).unwrap()).unwrap()
    })
}

fn profile(experts: usize) -> impl Strategy<Value = Profile> {
    let score = (
        0..experts,
        prop_oneof![Just(0usize), 100usize..140],
        0.0..9.0f32,
    );
    prop::collection::vec(score, 0..30).prop_map(move |scores| {
        let mut counts = vec![0.0; experts * Profile::BUCKETS];
        for (expert, bucket, count) in scores {
            counts[expert * Profile::BUCKETS + bucket] += count;
        }
        Profile::from_counts(experts, counts).unwrap()
    })
}

/// Requests, with budgets from far too little to plenty.
fn cases() -> impl Strategy<Value = Case> {
    let policies = [
        QuotaPolicy::Proportional,
        QuotaPolicy::Blend,
        QuotaPolicy::Value,
        QuotaPolicy::Neyman,
    ];
    (1usize..=4, 1usize..=8).prop_flat_map(move |(ranks, experts)| {
        (
            (counts(ranks, experts), memory()),
            prop::collection::vec(0.0..1.5f64, ranks),
            prop_oneof![Just(1.0), Just(0.2)],
            prop::option::of(prop::collection::vec(0..=experts as u32, ranks)),
            (0..POLICIES, 1usize..=ranks),
            prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0],
            (
                prop::sample::select(policies.to_vec()),
                prop::option::of(profile(experts)),
                0u32..5,
            ),
            prop::option::of(0.0..0.3f64),
        )
            .prop_map(
                move |(
                    inputs,
                    shares,
                    spread,
                    slots,
                    (index, per_node),
                    retention,
                    quota,
                    seconds,
                )| {
                    let (loads, memory) = inputs;
                    let rough = rough_bytes(&memory, &loads);
                    let share = |share: f64| (spread * share + (1.0 - spread)) * rough;
                    Case {
                        loads,
                        memory,
                        previous: Fixed::placement(experts, ranks).unwrap(),
                        topology: Topology::new(ranks, per_node).unwrap(),
                        cluster: cluster(),
                        budget: shares.into_iter().map(|s| share(s) as u64).collect(),
                        slots,
                        placement: policy(index),
                        retention,
                        quota_policy: quota.0,
                        profile: quota.1,
                        floor: quota.2,
                        seconds,
                    }
                },
            )
    })
}

/// What a rank needs if it holds half of the experts and half of the rows.
fn rough_bytes(memory: &MemoryModel, loads: &Loads) -> f64 {
    let half = |n: usize| n.div_ceil(2) as u64;
    let rows = u64::from(loads.total()).div_ceil(2);
    let all = half(loads.experts()) * memory.shape.slot_bytes()
        + rows.min(memory.chunk_rows) * memory.forward_row_bytes()
        + rows * memory.backward_row_bytes()
        + memory.stash_bytes(rows, rows)
        + memory.optimizer_bytes(loads.experts(), loads.ranks())
        + memory.fixed;
    all as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn plans_keep_their_promises(case in cases()) {
        let request = case.request();
        match plan(&request) {
            Ok(found) => {
                check(&request, &found);
                prop_assert_eq!(plan(&request).unwrap(), found);
            }
            Err(Error::BudgetTooSmall { rank, budget, missing, smallest }) => {
                prop_assert_eq!(budget, case.budget[rank]);
                prop_assert!(missing > 0 && budget + missing <= smallest);
                prop_assert!(case.plan_with(smallest).is_ok());
                // One byte less, and far less, do not do.
                for less in [1, 1 + smallest / 10] {
                    let result = case.plan_with(smallest - less);
                    let Err(Error::BudgetTooSmall { missing, smallest: again, .. }) = result else {
                        panic!("{result:?}");
                    };
                    prop_assert_eq!((missing, again), (less, smallest));
                }
            }
            Err(Error::TooFewSlots { .. } | Error::RankSlots { .. }) => {
                prop_assert!(case.slots.is_some());
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn budgets_from_the_smallest_on_work(mut case in cases(), more in prop::collection::vec(0u64..5000, 4)) {
        case.slots = None;
        case.budget.fill(0);
        let Err(Error::BudgetTooSmall { smallest, .. }) = plan(&case.request()) else {
            panic!("something in nothing");
        };
        for (budget, more) in case.budget.iter_mut().zip(more) {
            *budget = smallest + more;
        }
        check(&case.request(), &plan(&case.request()).unwrap());
    }
}
