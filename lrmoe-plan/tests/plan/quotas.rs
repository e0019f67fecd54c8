//! Quotas by hand and their invariants.

use crate::brute::{POLICIES, sum};
use crate::oracle::routable;
use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{
    Error, Loads, Placement, Profile, QuotaPolicy, QuotaRequest, Quotas, Topology, quotas,
};
use proptest::prelude::*;

/// Largest remainder apportionment, straight from the definition.
fn largest_remainder(seats: u32, loads: &[u32]) -> Vec<u32> {
    let total = u64::from(sum(loads)).max(1);
    let product = |n: u32| u64::from(seats) * u64::from(n);
    let mut shares: Vec<u32> = loads.iter().map(|&n| (product(n) / total) as u32).collect();
    let mut given = vec![false; loads.len()];
    while sum(&shares) < seats.min(sum(loads)) {
        let mut best = None;
        for e in 0..loads.len() {
            let remainder = product(loads[e]) % total;
            if !given[e] && best.is_none_or(|(_, most)| remainder > most) {
                best = Some((e, remainder));
            }
        }
        let (e, _) = best.unwrap();
        given[e] = true;
        shares[e] += 1;
    }
    shares
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn proportional_is_largest_remainder(
        n in prop::collection::vec(0u32..1000, 1..20),
        retention in 0.0..=1.0f64,
    ) {
        let experts = n.len();
        let loads = Loads::new(Array2::from_shape_vec((1, experts), n.clone()).unwrap()).unwrap();
        let placement = Placement::new(experts, vec![(0..experts as u32).collect()]).unwrap();
        let wanted = (retention * f64::from(loads.total())).round() as u32;
        let mut request = QuotaRequest {
            loads: &loads,
            placement: &placement,
            capacities: &[u64::MAX],
            retention,
            policy: QuotaPolicy::Proportional,
            profile: None,
            floor: 0,
        };
        let expected = largest_remainder(wanted, &n);
        for policy in POLICIES {
            request.policy = policy;
            let q = quotas(&request).unwrap();
            prop_assert_eq!(q.as_slice(), &expected);
            prop_assert_eq!(q.total(), wanted);
        }
        request.floor = 7;
        request.retention = 1.0;
        prop_assert_eq!(quotas(&request).unwrap(), Quotas::all(&loads));
        request.retention = 0.0;
        prop_assert_eq!(quotas(&request).unwrap().total(), 0);
    }
}

#[test]
fn experts_that_share_a_full_rank_get_alike() {
    let loads = Loads::new(array![[640, 320, 0, 64]]).unwrap();
    let placement = Placement::new(4, vec![vec![0, 1], vec![2, 3]]).unwrap();
    let q = quotas(&QuotaRequest {
        loads: &loads,
        placement: &placement,
        capacities: &[480, 64],
        retention: 1.0,
        policy: QuotaPolicy::Proportional,
        profile: None,
        floor: 0,
    });
    let q = q.unwrap();
    let q = q.as_slice();
    assert_eq!((q[0] + q[1], q[2], q[3]), (480, 0, 64));
    // Twice as much for twice the load.
    assert_eq!(q[0], 320);
}

#[test]
fn replicas_make_room_for_others() {
    // Expert 0 may run on both ranks and has to leave rank 0 to expert 1.
    let loads = Loads::new(array![[50, 50]]).unwrap();
    let placement = Placement::new(2, vec![vec![0, 1], vec![0]]).unwrap();
    let q = quotas(&QuotaRequest {
        loads: &loads,
        placement: &placement,
        capacities: &[50, 50],
        retention: 1.0,
        policy: QuotaPolicy::Proportional,
        profile: None,
        floor: 0,
    });
    assert_eq!(q.unwrap(), Quotas::all(&loads));
}

#[test]
fn unseen_experts_take_the_pooled_histogram() {
    let mut counts = vec![0.0; 3 * Profile::BUCKETS];
    counts[130] = 1.0;
    counts[Profile::BUCKETS + 120] = 1.0;
    let profile = Profile::from_counts(3, counts).unwrap();
    let loads = Loads::new(array![[10, 10, 10]]).unwrap();
    let placement = Placement::new(3, vec![vec![0, 1, 2]]).unwrap();
    let by = |policy| {
        let q = quotas(&QuotaRequest {
            loads: &loads,
            placement: &placement,
            capacities: &[100],
            retention: 0.5,
            policy,
            profile: Some(&profile),
            floor: 0,
        });
        q.unwrap().as_slice().to_vec()
    };
    assert_eq!(by(QuotaPolicy::Value), [10, 0, 5]);
    // Mean squares of 1024, 1 and (1024 + 1) / 2: roots of 32, 1 and 22.6, which share 15 as 8.63, 0.27 and 6.10.
    assert_eq!(by(QuotaPolicy::Neyman), [9, 0, 6]);
}

#[test]
fn large_skewed_layer_within_capacities() {
    let (experts, ranks) = (128u32, 8usize);
    let counts = Array2::from_shape_fn((ranks, experts as usize), |(r, e)| {
        (20_000 / (e + 1) + 3 * r) as u32
    });
    let loads = Loads::new(counts).unwrap();
    let by_rank = (0..ranks as u32).map(|rank| {
        (0..experts)
            .filter(|e| e % 8 == rank || (e / 3) % 8 == rank)
            .collect()
    });
    let placement = Placement::new(experts as usize, by_rank.collect()).unwrap();
    let capacities: Vec<u64> = (0..8).map(|rank| 20_000 + 9_000 * rank).collect();
    let q = quotas(&QuotaRequest {
        loads: &loads,
        placement: &placement,
        capacities: &capacities,
        retention: 0.5,
        policy: QuotaPolicy::Blend,
        profile: None,
        floor: 16,
    })
    .unwrap();
    assert!(routable(&placement, q.as_slice(), &capacities));
    let free = largest_remainder(
        (f64::from(loads.total()) / 2.0).round() as u32,
        loads.per_expert(),
    );
    assert!(!routable(&placement, &free, &capacities));
    let more = |e: usize| {
        let mut more = q.as_slice().to_vec();
        more[e] += 1;
        more[e] <= loads.per_expert()[e] && routable(&placement, &more, &capacities)
    };
    let full = q.total() == sum(&free);
    assert!(full || !(0..experts as usize).any(more));
}

#[test]
fn bad_requests() {
    let loads = Loads::new(array![[1, 2]]).unwrap();
    let placement = Placement::new(2, vec![vec![0, 1]]).unwrap();
    let profile = Profile::new(3);
    let good = QuotaRequest {
        loads: &loads,
        placement: &placement,
        capacities: &[3],
        retention: 1.0,
        policy: QuotaPolicy::Value,
        profile: None,
        floor: 0,
    };
    for retention in [-0.1, 1.1, f64::NAN] {
        let result = quotas(&QuotaRequest { retention, ..good });
        assert!(matches!(result, Err(Error::OutOfRange { .. })));
    }
    let capacities = &[1, 2];
    let result = quotas(&QuotaRequest { capacities, ..good });
    assert_eq!(
        result.unwrap_err().to_string(),
        "capacities: expected 1, got 2"
    );
    let profile = Some(&profile);
    let result = quotas(&QuotaRequest { profile, ..good });
    assert!(matches!(
        result,
        Err(Error::Mismatch {
            expected: 2,
            got: 3,
            ..
        })
    ));
    assert!("most".parse::<QuotaPolicy>().is_err());
    for policy in POLICIES {
        assert_eq!(policy.to_string().parse::<QuotaPolicy>().unwrap(), policy);
    }
}

#[test]
fn loads_and_topology() {
    let loads = Loads::new(array![[1, 2], [3, 4], [5, 6]]).unwrap();
    assert_eq!((loads.ranks(), loads.experts(), loads.total()), (3, 2, 21));
    assert_eq!(loads.per_expert(), [9, 12]);
    assert_eq!(
        (loads.before(0, 1), loads.before(2, 0), loads.before(2, 1)),
        (0, 4, 6)
    );
    let many = Loads::new(array![[u32::MAX], [1]]);
    assert!(matches!(
        many,
        Err(Error::TooManyPairs {
            pairs: 4_294_967_296
        })
    ));
    assert!(matches!(
        Loads::new(Array2::zeros((0, 2))),
        Err(Error::NoRanks)
    ));
    assert!(matches!(
        Loads::new(Array2::zeros((2, 0))),
        Err(Error::NoExperts)
    ));

    let topology = Topology::new(5, 2).unwrap();
    assert_eq!((topology.ranks(), topology.nodes()), (5, 3));
    assert_eq!([0, 1, 2, 4].map(|r| topology.node_of(r)), [0, 0, 1, 2]);
    assert_eq!(Topology::single_node(5).unwrap().nodes(), 1);
    assert!(matches!(Topology::new(0, 1), Err(Error::NoRanks)));
    assert!(matches!(Topology::single_node(0), Err(Error::NoRanks)));
    assert!(matches!(Topology::new(1, 0), Err(Error::NoRanksPerNode)));
}

/// Quotas of everything, lowered to what ranks can hold of pairs that stay where they were routed.
#[test]
fn quotas_are_held_where_pairs_stay() {
    // Expert 0 has instances on both ranks, 1 and 2 on one each.
    let placement = Placement::new(3, vec![vec![0, 1], vec![0, 2]]).unwrap();
    let loads = Loads::new(array![[20, 10, 10]]).unwrap();
    let held = |capacities: &[u64]| {
        let quotas = Quotas::all(&loads);
        let rows = [12, 10, 8, 10];
        let held = quotas.held(&placement, &rows, capacities).unwrap();
        held.as_slice().to_vec()
    };
    assert_eq!(held(&[22, 18]), [20, 10, 10]);
    // 11 rows for 12 and 10: 6 and 5. The quota of 6 leaves both instances of expert 0 with at most 6.
    assert_eq!(held(&[11, 18]), [6, 5, 10]);
    assert_eq!(held(&[11, 8]), [3, 5, 5]);
    assert_eq!(held(&[0, 18]), [0, 0, 10]);
    // Rank 1 has room for all 8 pairs of expert 0 there, whatever its quota.
    assert_eq!(held(&[22, 17]), [20, 10, 9]);
    let error = Quotas::all(&loads)
        .held(&placement, &[0; 3], &[0; 2])
        .unwrap_err();
    assert_eq!(error.to_string(), "rows of instances: expected 4, got 3");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_rank_is_left_with_more_than_it_holds(
        rows in prop::collection::vec((0u64..50, 0u64..50), 1..8),
        capacities in prop::array::uniform2(0u64..200),
    ) {
        // Every expert on both ranks.
        let experts = rows.len();
        let all: Vec<u32> = (0..experts as u32).collect();
        let placement = Placement::new(experts, vec![all.clone(), all]).unwrap();
        let loads: Vec<u32> = rows.iter().map(|(a, b)| (a + b) as u32).collect();
        let loads = Loads::new(Array2::from_shape_vec((1, experts), loads).unwrap()).unwrap();
        let by_instance: Vec<u64> = rows.iter().map(|r| r.0).chain(rows.iter().map(|r| r.1)).collect();
        let held = Quotas::all(&loads).held(&placement, &by_instance, &capacities).unwrap();
        for (rank, capacity) in capacities.into_iter().enumerate() {
            let here = &by_instance[rank * experts..][..experts];
            let most: u64 = here.iter().zip(held.as_slice()).map(|(n, q)| (*n).min((*q).into())).sum();
            prop_assert!(most <= capacity);
        }
        if capacities.iter().all(|&capacity| capacity >= by_instance.iter().sum::<u64>()) {
            prop_assert_eq!(held.as_slice(), loads.per_expert());
        }
    }
}
