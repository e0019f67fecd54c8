//! Policies other than the default one.

use lrmoe_plan::{
    Error, Fixed, FixedReplicas, FlexMoe, Lrmoe, Placement, PlacementPolicy, PlacementRequest,
    Symi, Topology, symi_capacity, symi_replicas,
};
use proptest::prelude::*;

use crate::case::{cases, experts, one_rank_loads};
use crate::oracle::greedy;

#[test]
fn fixed_splits_evenly() {
    assert_eq!(
        experts(&Fixed::placement(5, 2).unwrap()),
        [&[0, 1][..], &[2, 3, 4]]
    );
    assert_eq!(
        experts(&Fixed::placement(2, 3).unwrap()),
        [&[][..], &[0], &[1]]
    );
    let loads = one_rank_loads(&[1; 5]);
    let request = PlacementRequest {
        loads: &loads,
        previous: &Fixed::placement(5, 2).unwrap(),
        slots: &[3, 2],
        topology: &Topology::single_node(2).unwrap(),
    };
    assert!(matches!(
        Fixed.place(&request),
        Err(Error::RankSlots {
            rank: 1,
            slots: 2,
            needed: 3
        })
    ));
}

#[test]
fn too_few_slots_state_the_numbers() {
    let loads = one_rank_loads(&[1; 5]);
    let request = PlacementRequest {
        loads: &loads,
        previous: &Fixed::placement(5, 2).unwrap(),
        slots: &[2, 2],
        topology: &Topology::single_node(2).unwrap(),
    };
    let policies: [(&dyn PlacementPolicy, &str); 5] = [
        (&Fixed, "fixed"),
        (&FixedReplicas, "fixed-replicas"),
        (&Symi, "symi"),
        (&FlexMoe, "flexmoe"),
        (&Lrmoe::default(), "lrmoe"),
    ];
    for (policy, name) in policies {
        assert_eq!(policy.name(), name);
        let error = policy.place(&request).unwrap_err();
        assert_eq!(error.to_string(), "4 slots cannot hold 5 experts", "{name}");
        let slots = &[5];
        let error = policy
            .place(&PlacementRequest { slots, ..request })
            .unwrap_err();
        assert!(matches!(
            error,
            Error::Mismatch {
                expected: 2,
                got: 1,
                ..
            }
        ));
    }
    assert!(Lrmoe::new(-0.1).is_err() && Lrmoe::new(f64::NAN).is_err());
}

#[test]
fn symi_by_hand() {
    // Goals 3.6, 2.8, 1.6: floors 3, 2, 1; two more to expert 1 (0.8 short), then 0 (0.6, tie with 2).
    assert_eq!(symi_replicas(&[45, 35, 20], 8).unwrap(), [4, 3, 1]);
    // Goals 7.2, 0.4, 0.4, 0: 7, 1, 1, 1, two too many.
    assert_eq!(symi_replicas(&[90, 5, 5, 0], 8).unwrap(), [5, 1, 1, 1]);
    assert_eq!(symi_replicas(&[0, 0, 0], 7).unwrap(), [3, 2, 2]);
    assert_eq!(
        symi_capacity(&[4, 3, 1], 1.0, 1000, 8).unwrap(),
        [500, 375, 125]
    );
    assert_eq!(symi_capacity(&[1, 2], 0.7, 10, 1).unwrap(), [7, 14]);
    assert_eq!(
        symi_capacity(&[u32::MAX], 1e9, u32::MAX.into(), 1).unwrap(),
        [u32::MAX]
    );
    assert!(matches!(
        symi_capacity(&[1], 1.0, 1 << 32, 1),
        Err(Error::TooManyPairs { .. })
    ));
    assert!(matches!(
        symi_capacity(&[1], f64::NAN, 1, 1),
        Err(Error::OutOfRange { .. })
    ));
    assert!(matches!(
        symi_capacity(&[1], 1.0, 1, 0),
        Err(Error::TooFewSlots { .. })
    ));
    assert!(matches!(
        symi_replicas(&[1, 1], 1),
        Err(Error::TooFewSlots {
            slots: 1,
            experts: 2
        })
    ));

    let loads = one_rank_loads(&[45, 35, 20]);
    let placement = Symi.place(&PlacementRequest {
        loads: &loads,
        previous: &Fixed::placement(3, 4).unwrap(),
        slots: &[2, 3, 2, 1],
        topology: &Topology::single_node(4).unwrap(),
    });
    assert_eq!(
        experts(&placement.unwrap()),
        [&[0][..], &[0, 1], &[1], &[2]]
    );
}

#[test]
fn fixed_replicas_by_hand() {
    // Shares 50, 50, 40, 30, 20, 10: the second replica of expert 0 lies on the other rank.
    let loads = one_rank_loads(&[10, 100, 40, 30, 20]);
    let placement = FixedReplicas.place(&PlacementRequest {
        loads: &loads,
        previous: &Fixed::placement(5, 2).unwrap(),
        slots: &[3, 3],
        topology: &Topology::single_node(2).unwrap(),
    });
    assert_eq!(experts(&placement.unwrap()), [&[0, 1, 2][..], &[1, 3, 4]]);
}

#[test]
fn flexmoe_by_hand() {
    let place = |per_expert: &[u32], previous: &[&[u32]], slots: &[u32]| {
        let by_rank = previous.iter().map(|here| here.to_vec()).collect();
        let placement = FlexMoe.place(&PlacementRequest {
            loads: &one_rank_loads(per_expert),
            previous: &Placement::new(per_expert.len(), by_rank).unwrap(),
            slots,
            topology: &Topology::single_node(previous.len()).unwrap(),
        });
        placement.unwrap()
    };
    // Expand into the free slot: 100 and 20 become 50 and 70; a further exchange would not help.
    let expanded = place(&[100, 20], &[&[0], &[1]], &[1, 2]);
    assert_eq!(experts(&expanded), [&[0][..], &[0, 1]]);
    // Shrink expert 1 to expand expert 0: 110, 40, 20 become 70, 80, 20; then exchange 0 for 3: 70, 50, 50.
    let shrunk = place(&[100, 20, 30, 20], &[&[0, 1], &[1, 2], &[3]], &[2, 2, 1]);
    assert_eq!(experts(&shrunk), [&[0, 1][..], &[2, 3], &[0]]);
    // Nothing to expand or shrink: 90 and 30 become 60 and 60.
    let migrated = place(&[50, 40, 20, 10], &[&[0, 1], &[2, 3]], &[2, 2]);
    assert_eq!(experts(&migrated), [&[1, 2][..], &[0, 3]]);
}

/// The largest rank load if all instances of an expert have equal shares.
fn largest_equal_share(placement: &Placement, loads: &[u32]) -> f64 {
    let share = |&e: &u32| {
        let replicas = placement.instances_of(e as usize).len();
        f64::from(loads[e as usize]) / replicas as f64
    };
    let ranks = 0..placement.ranks();
    let rank_loads = ranks.map(|r| placement.local_experts(r).iter().map(share).sum());
    rank_loads.fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn all_keep_to_the_slots((loads, slots, previous, per_node) in cases()) {
        // Shares of up to five replicas are whole numbers.
        let loads: Vec<u32> = loads.iter().map(|n| 60 * n).collect();
        let request = PlacementRequest {
            loads: &one_rank_loads(&loads),
            previous: &previous,
            slots: &slots,
            topology: &Topology::new(slots.len(), per_node).unwrap(),
        };
        let place = |policy: &dyn PlacementPolicy| {
            let placement = policy.place(&request).unwrap();
            assert!((0..slots.len()).all(|r| placement.on_rank(r).len() <= slots[r] as usize));
            assert_eq!(placement, policy.place(&request).unwrap());
            placement
        };
        place(&Symi);
        prop_assert_eq!(place(&FixedReplicas), greedy(&loads, &slots));
        let flexible = place(&FlexMoe);
        let before = largest_equal_share(&previous, &loads);
        prop_assert!(flexible == previous || largest_equal_share(&flexible, &loads) <= before);
    }

    #[test]
    fn flexmoe_replaces_what_does_not_fit((loads, slots, _, _) in cases()) {
        let all = vec![(0..loads.len() as u32).collect(); slots.len()];
        let placement = FlexMoe.place(&PlacementRequest {
            loads: &one_rank_loads(&loads),
            previous: &Placement::new(loads.len(), all).unwrap(),
            slots: &slots,
            topology: &Topology::single_node(slots.len()).unwrap(),
        });
        let placement = placement.unwrap();
        prop_assert!((0..slots.len()).all(|r| placement.on_rank(r).len() <= slots[r] as usize));
    }

    #[test]
    fn symi_uses_all_slots_in_proportion(
        loads in prop::collection::vec(prop_oneof![0u32..5, 0u32..100_000], 1..20),
        spare in 0u32..40,
    ) {
        let slots = loads.len() as u32 + spare;
        let replicas = symi_replicas(&loads, slots).unwrap();
        prop_assert!(replicas.iter().all(|&r| r >= 1));
        prop_assert_eq!(replicas.iter().sum::<u32>(), slots);
        for (a, &more) in loads.iter().enumerate() {
            for (b, &fewer) in loads.iter().enumerate() {
                prop_assert!(more < fewer || replicas[a] + 1 >= replicas[b]);
            }
        }
        let capacity = symi_capacity(&replicas, 1.0, 1_000_003, slots).unwrap();
        prop_assert!(capacity.iter().map(|&c| u64::from(c)).sum::<u64>() <= 1_000_003);
    }
}
