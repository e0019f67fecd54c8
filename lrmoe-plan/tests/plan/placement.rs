//! Placements and the policies that make them.

use crate::oracle::largest_load;
use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{
    Error, Fixed, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest, Symi, Topology,
    symi_capacity, symi_replicas,
};
use proptest::prelude::*;

fn one_rank_loads(per_expert: &[u32]) -> Loads {
    Loads::new(Array2::from_shape_vec((1, per_expert.len()), per_expert.to_vec()).unwrap()).unwrap()
}

fn experts(placement: &Placement) -> Vec<&[u32]> {
    (0..placement.ranks())
        .map(|r| placement.local_experts(r))
        .collect()
}

#[test]
fn instances_are_numbered_by_rank_and_expert() {
    let placement = Placement::new(3, vec![vec![2, 0], vec![], vec![1, 2]]).unwrap();
    assert_eq!(
        (
            placement.ranks(),
            placement.experts(),
            placement.instances()
        ),
        (3, 3, 4)
    );
    assert_eq!(experts(&placement), [&[0, 2][..], &[], &[1, 2]]);
    assert_eq!([0, 1, 2].map(|r| placement.on_rank(r)), [0..2, 2..2, 2..4]);
    assert_eq!([0, 1, 2, 3].map(|i| placement.expert_of(i)), [0, 2, 1, 2]);
    assert_eq!([0, 1, 2, 3].map(|i| placement.rank_of(i)), [0, 0, 2, 2]);
    assert_eq!(placement.instances_of(2), [1, 3]);
    assert_eq!(placement.instance_on(2, 2), Some(3));
    assert_eq!(placement.instance_on(1, 2), None);
}

#[test]
fn bad_placements() {
    let new = Placement::new;
    assert!(matches!(new(1, vec![]), Err(Error::NoRanks)));
    assert!(matches!(new(0, vec![vec![]]), Err(Error::NoExperts)));
    assert!(matches!(
        new(2, vec![vec![0]]),
        Err(Error::MissingExpert { expert: 1 })
    ));
    assert!(matches!(
        new(usize::MAX, vec![vec![0, 2], vec![1, 0]]),
        Err(Error::MissingExpert { expert: 3 })
    ));
    assert!(matches!(
        new(1, vec![vec![0], vec![0, 0]]),
        Err(Error::DuplicateExpert { rank: 1, expert: 0 })
    ));
    let error = new(2, vec![vec![0, 1], vec![7]]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "expert 7 on rank 1 is out of range: there are 2 experts"
    );
}

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
    let policies: [&dyn PlacementPolicy; 3] = [&Fixed, &Symi, &Lrmoe::default()];
    for policy in policies {
        let error = policy.place(&request).unwrap_err();
        assert_eq!(
            error.to_string(),
            "4 slots cannot hold 5 experts",
            "{}",
            policy.name()
        );
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
fn lrmoe_balances_a_skewed_layer() {
    let per_expert: Vec<u32> = (1..=64).map(|e| 100_000 / e).collect();
    let loads = one_rank_loads(&per_expert);
    let request = PlacementRequest {
        loads: &loads,
        previous: &Fixed::placement(64, 8).unwrap(),
        slots: &[10; 8],
        topology: &Topology::new(8, 4).unwrap(),
    };
    let placement = Lrmoe::default().place(&request).unwrap();
    let mean = u64::from(loads.total()).div_ceil(8);
    let largest = placement.largest_load(&per_expert).unwrap();
    assert!(largest * 100 <= mean * 101, "{largest} > {mean}");
    let previous = &placement;
    let again = Lrmoe::default().place(&PlacementRequest {
        previous,
        ..request
    });
    assert_eq!(again.unwrap(), placement);
}

#[test]
fn lrmoe_moves_only_what_gains() {
    // Expert 0 is too much for one rank; the free slot on rank 1 takes its replica and nothing else changes.
    let loads = one_rank_loads(&[100, 10, 10, 10, 10]);
    let previous = Placement::new(5, vec![vec![0, 1], vec![2], vec![3, 4]]).unwrap();
    let request = PlacementRequest {
        loads: &loads,
        previous: &previous,
        slots: &[2, 2, 2],
        topology: &Topology::single_node(3).unwrap(),
    };
    let placement = Lrmoe::default().place(&request).unwrap();
    assert_eq!(placement.largest_load(loads.per_expert()).unwrap(), 60);
    assert_eq!(experts(&placement), [&[0, 1][..], &[0, 2], &[3, 4]]);
    let reluctant = Lrmoe::new(0.5).unwrap().place(&request).unwrap();
    assert_eq!(reluctant, previous);
}

/// Loads, slots that hold every expert, a previous placement within the slots, ranks per node.
fn cases() -> impl Strategy<Value = (Vec<u32>, Vec<u32>, Placement, usize)> {
    (1usize..=5, 1usize..=8).prop_flat_map(|(ranks, experts)| {
        (
            prop::collection::vec(prop_oneof![0u32..5, 0u32..1000], experts),
            prop::collection::vec(0u32..5, ranks),
            prop::collection::vec(any::<prop::sample::Index>(), experts + 6),
            1usize..4,
        )
            .prop_map(move |(loads, mut slots, picks, per_node)| {
                let missing = (experts as u32).saturating_sub(slots.iter().sum());
                slots[ranks / 2] += missing;
                let mut by_rank = vec![Vec::new(); ranks];
                for (i, pick) in picks.iter().enumerate() {
                    let expert = (i % experts) as u32;
                    let open: Vec<usize> = (0..ranks)
                        .filter(|&r| {
                            by_rank[r].len() < slots[r] as usize && !by_rank[r].contains(&expert)
                        })
                        .collect();
                    if !open.is_empty() {
                        by_rank[*pick.get(&open)].push(expert);
                    }
                }
                (
                    loads,
                    slots,
                    Placement::new(experts, by_rank).unwrap(),
                    per_node,
                )
            })
    })
}

/// Greedy replication by load per replica, then longest processing time first.
fn greedy(loads: &[u32], slots: &[u32]) -> Placement {
    let slots: Vec<usize> = slots.iter().map(|&s| loads.len().min(s as usize)).collect();
    let usable = slots.iter().filter(|&&s| s > 0).count();
    let mut replicas = vec![1; loads.len()];
    let share = |replicas: &[usize], e: usize| f64::from(loads[e]) / replicas[e] as f64;
    while replicas.iter().sum::<usize>() < slots.iter().sum() {
        let mut best: Option<usize> = None;
        for e in 0..loads.len() {
            let better = |b| share(&replicas, e) > share(&replicas, b);
            if replicas[e] < usable && best.is_none_or(better) {
                best = Some(e);
            }
        }
        match best {
            Some(e) => replicas[e] += 1,
            None => break,
        }
    }
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by(|&a, &b| share(&replicas, b).total_cmp(&share(&replicas, a)));
    let mut by_rank = vec![Vec::new(); slots.len()];
    let mut rank_loads = vec![0.0; slots.len()];
    for expert in order {
        for _ in 0..replicas[expert] {
            let mut best: Option<usize> = None;
            for rank in 0..slots.len() {
                let open =
                    by_rank[rank].len() < slots[rank] && !by_rank[rank].contains(&(expert as u32));
                if open && best.is_none_or(|b| rank_loads[rank] < rank_loads[b]) {
                    best = Some(rank);
                }
            }
            if let Some(rank) = best {
                by_rank[rank].push(expert as u32);
                rank_loads[rank] += share(&replicas, expert);
            }
        }
    }
    Placement::new(loads.len(), by_rank).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn largest_load_is_the_max_flow_bound((loads, _, placement, _) in cases()) {
        prop_assert_eq!(placement.largest_load(&loads).unwrap(), largest_load(&placement, &loads));
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

    #[test]
    fn placements_keep_their_promises((loads, slots, previous, per_node) in cases()) {
        let counts = one_rank_loads(&loads);
        let request = PlacementRequest {
            loads: &counts,
            previous: &previous,
            slots: &slots,
            topology: &Topology::new(slots.len(), per_node).unwrap(),
        };
        let within = |p: &Placement| {
            (0..p.ranks()).all(|r| p.on_rank(r).len() <= slots[r] as usize)
        };
        prop_assert!(within(&Symi.place(&request).unwrap()));

        let before = largest_load(&previous, &loads);
        let packed = largest_load(&greedy(&loads, &slots), &loads);
        let eager = Lrmoe::new(0.0).unwrap().place(&request).unwrap();
        prop_assert!(within(&eager));
        let after = largest_load(&eager, &loads);
        prop_assert!(after <= before && after <= packed);
        prop_assert!(after < before || eager == previous);

        let steady = Lrmoe::default().place(&request).unwrap();
        let after = largest_load(&steady, &loads) as f64;
        prop_assert!(after < 0.95 * before as f64 || steady == previous);
        prop_assert!(after <= before as f64 && 0.95 * after <= packed as f64);
        prop_assert_eq!(&Lrmoe::default().place(&request).unwrap(), &steady);
    }

    #[test]
    fn a_previous_placement_that_does_not_fit_is_replaced((loads, slots, _, _) in cases()) {
        let all = vec![(0..loads.len() as u32).collect(); slots.len()];
        let placement = Lrmoe::default().place(&PlacementRequest {
            loads: &one_rank_loads(&loads),
            previous: &Placement::new(loads.len(), all).unwrap(),
            slots: &slots,
            topology: &Topology::single_node(slots.len()).unwrap(),
        });
        let placement = placement.unwrap();
        prop_assert!((0..slots.len()).all(|r| placement.on_rank(r).len() <= slots[r] as usize));
        prop_assert!(largest_load(&placement, &loads) <= largest_load(&greedy(&loads, &slots), &loads));
    }
}

#[test]
fn mismatched_loads_are_refused() {
    let placement = Fixed::placement(3, 2).unwrap();
    let loads = Loads::new(array![[1, 2]]).unwrap();
    let result = placement.largest_load(loads.per_expert());
    assert!(matches!(
        result,
        Err(Error::Mismatch {
            expected: 3,
            got: 2,
            ..
        })
    ));
}
