//! The default policy.

use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{
    Fixed, FixedReplicas, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest, Topology,
};
use proptest::prelude::*;

use crate::case::{cases, experts, one_rank_loads};
use crate::oracle::{greedy, largest_load};

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

#[test]
fn the_minimum_gain_is_not_enough() {
    // From 100 pairs to 50 on the rank with most.
    let previous = Placement::new(2, vec![vec![0], vec![1]]).unwrap();
    let request = PlacementRequest {
        loads: &one_rank_loads(&[100, 0]),
        previous: &previous,
        slots: &[2, 2],
        topology: &Topology::single_node(2).unwrap(),
    };
    let stays = |gain| Lrmoe::new(gain).unwrap().place(&request).unwrap() == previous;
    assert!(stays(0.5) && !stays(0.49));
}

#[test]
fn replicas_spread_over_nodes() {
    // Both nodes send half of the pairs of expert 0; ranks 1, 2 and 3 have as much room.
    let loads = Loads::new(Array2::from_shape_fn((4, 4), |(_, e)| [50, 20, 20, 20][e])).unwrap();
    let previous = Placement::new(4, vec![vec![0], vec![1], vec![2], vec![3]]).unwrap();
    let placement = Lrmoe::default().place(&PlacementRequest {
        loads: &loads,
        previous: &previous,
        slots: &[2; 4],
        topology: &Topology::new(4, 2).unwrap(),
    });
    let placement = placement.unwrap();
    assert_eq!(placement.largest_load(loads.per_expert()).unwrap(), 110);
    assert_eq!(placement.local_experts(2), [0, 2]);
}

#[test]
fn experts_come_to_the_node_of_their_pairs() {
    let loads = Loads::new(array![
        [0, 0, 9, 1],
        [0, 0, 8, 2],
        [9, 9, 0, 0],
        [7, 1, 0, 5]
    ])
    .unwrap();
    // Too much for the slots, so that everything is placed anew.
    let previous = Placement::new(4, vec![vec![0, 1, 2, 3]; 4]).unwrap();
    let placement = Lrmoe::default().place(&PlacementRequest {
        loads: &loads,
        previous: &previous,
        slots: &[2; 4],
        topology: &Topology::new(4, 2).unwrap(),
    });
    let placement = placement.unwrap();
    let node = |rank| rank / 2;
    assert_eq!(placement.largest_load(loads.per_expert()).unwrap(), 13);
    for (expert, home) in [(0, 1), (1, 1), (2, 0)] {
        let instances = placement.instances_of(expert).iter();
        let at_home = |&&i: &&u32| node(placement.rank_of(i as usize)) == home;
        assert!(
            instances.clone().filter(at_home).count() * 2 >= instances.count(),
            "{placement:?}"
        );
    }
}

#[test]
fn drifting_loads_move_few_instances() {
    let (experts, ranks) = (256, 64);
    let slots = vec![6; ranks];
    let mut placement = Fixed::placement(experts, ranks).unwrap();
    let mut moved = 0;
    for step in 0..=10 {
        let load = |e: usize| 1_000_000 / (1 + e * 7 % experts) * (100 + (e * 31 + step * 17) % 5);
        let per_expert: Vec<u32> = (0..experts).map(|e| load(e) as u32).collect();
        let loads = one_rank_loads(&per_expert);
        let next = Lrmoe::default().place(&PlacementRequest {
            loads: &loads,
            previous: &placement,
            slots: &slots,
            topology: &Topology::new(ranks, 8).unwrap(),
        });
        let next = next.unwrap();
        let mean = u64::from(loads.total()).div_ceil(ranks as u64);
        assert_eq!(next.largest_load(&per_expert).unwrap(), mean);
        if step > 0 {
            let new = |r: usize| {
                let before = placement.local_experts(r);
                next.local_experts(r)
                    .iter()
                    .filter(|e| !before.contains(e))
                    .count()
            };
            moved += (0..ranks).map(new).sum::<usize>();
        }
        placement = next;
    }
    assert!(
        moved <= 10 * ranks,
        "{moved} of {} instances moved in 10 steps",
        placement.instances()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn promises((loads, slots, previous, per_node) in cases(), gain in 0.0..0.5) {
        let counts = one_rank_loads(&loads);
        let request = PlacementRequest {
            loads: &counts,
            previous: &previous,
            slots: &slots,
            topology: &Topology::new(slots.len(), per_node).unwrap(),
        };
        let place = |policy: &dyn PlacementPolicy| {
            let placement = policy.place(&request).unwrap();
            let largest = largest_load(&placement, &loads);
            assert!((0..slots.len()).all(|r| placement.on_rank(r).len() <= slots[r] as usize));
            assert_eq!(placement, policy.place(&request).unwrap());
            (placement, largest)
        };
        let before = largest_load(&previous, &loads);
        let packed = largest_load(&greedy(&loads, &slots), &loads);
        let (_, fixed) = place(&FixedReplicas);

        let (eager, after) = place(&Lrmoe::default());
        prop_assert!(after <= before && after <= packed && after <= fixed);
        prop_assert!(after < before || eager == previous);

        let (steady, after) = place(&Lrmoe::new(gain).unwrap());
        prop_assert!(steady == previous || (after as f64) < (1.0 - gain) * before as f64);
        prop_assert!((1.0 - gain) * after as f64 <= packed as f64);
    }

    /// With one slot a rank to spare every rank can bear the mean.
    #[test]
    fn one_slot_to_spare_is_enough(
        (slots, loads) in (1usize..7, 2usize..6).prop_flat_map(|(ranks, slots)| {
            let experts = 1..=(slots - 1) * ranks + 1;
            let load = prop_oneof![0u32..10, 0u32..100_000];
            (Just(vec![slots as u32; ranks]), prop::collection::vec(load, experts))
        }),
        per_node in 1usize..4,
        fits in any::<bool>(),
    ) {
        let ranks = slots.len();
        let previous = match fits {
            true => Fixed::placement(loads.len(), ranks),
            false => Placement::new(loads.len(), vec![(0..loads.len() as u32).collect(); ranks]),
        };
        let loads = one_rank_loads(&loads);
        let placement = Lrmoe::default().place(&PlacementRequest {
            loads: &loads,
            previous: &previous.unwrap(),
            slots: &slots,
            topology: &Topology::new(ranks, per_node).unwrap(),
        });
        let largest = placement.unwrap().largest_load(loads.per_expert()).unwrap();
        prop_assert_eq!(largest, u64::from(loads.total()).div_ceil(ranks as u64));
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
