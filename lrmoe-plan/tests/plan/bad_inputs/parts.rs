//! Placements, loads, quotas and names alone.

use crate::case::{experts, one_rank_loads};
use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{
    ClusterSpec, Error, Fixed, FixedReplicas, FlexMoe, Loads, Lrmoe, ModelSpec, Placement,
    PlacementPolicy, PlacementRequest, Profile, QuotaPolicy, QuotaRequest, Stash, Symi, Topology,
    quotas, symi_capacity, symi_replicas,
};

use super::{expect, mismatch, outside};

#[test]
fn placements_of_extreme_sizes() {
    let sizes = |experts, ranks| Fixed::placement(experts, ranks).map(|p| p.instances());
    let many = |experts| Err(Error::TooManyExperts { experts });
    expect("no ranks", sizes(1, 0), Err(Error::NoRanks));
    expect("no experts", sizes(0, 3), Err(Error::NoExperts));
    expect("more ranks than experts", sizes(1, 1000), Ok(1));
    expect(
        "ids past 32 bits",
        sizes((1 << 32) + 1, 2),
        many((1 << 32) + 1),
    );
    expect(
        "all there are",
        sizes(usize::MAX, usize::MAX),
        many(usize::MAX),
    );

    let placement = Placement::new(1, vec![vec![0]]).unwrap();
    assert_eq!(placement.instance_on(0, usize::MAX), None);
    expect(
        "largest load",
        placement.largest_load(&[u32::MAX]),
        Ok(u32::MAX.into()),
    );
    let pair = Fixed::placement(2, 1).unwrap();
    expect(
        "loads past 32 bits",
        pair.largest_load(&[u32::MAX; 2]),
        Ok(2 * u64::from(u32::MAX)),
    );

    let (loads, topology) = (
        one_rank_loads(&[7, 0]),
        Topology::new(2, usize::MAX).unwrap(),
    );
    let policies: [&dyn PlacementPolicy; 5] =
        [&Fixed, &FixedReplicas, &Symi, &FlexMoe, &Lrmoe::default()];
    for policy in policies {
        let place = |slots: &[u32]| {
            policy.place(&PlacementRequest {
                loads: &loads,
                previous: &Fixed::placement(2, 2).unwrap(),
                slots,
                topology: &topology,
            })
        };
        let all = place(&[u32::MAX; 2]).map(|placement| experts(&placement).concat().len());
        if policy.name() == "symi" {
            let slots = 2.0 * f64::from(u32::MAX);
            expect(
                "symi",
                all,
                outside("slots over all ranks", slots, "0 to 4294967295"),
            );
        } else {
            assert!((2..=4).contains(&all.unwrap()), "{}", policy.name());
        }
        expect(
            policy.name(),
            place(&[0, 0]).map(drop),
            Err(Error::TooFewSlots {
                slots: 0,
                experts: 2,
            }),
        );
    }
}

#[test]
fn loads_in_any_layout() {
    let columns = array![[1, 2], [3, 4], [5, 6]].reversed_axes();
    let loads = Loads::new(columns.clone()).unwrap();
    assert_eq!(loads.counts(), columns);
    assert!(loads.counts().is_standard_layout());
    assert_eq!(loads.per_expert(), [3, 7, 11]);
    assert_eq!(loads.before(1, 2), 5);
}

#[test]
fn quotas_above_loads_and_of_many_experts() {
    let loads = one_rank_loads(&[3, 0, u32::MAX - 3]);
    let placement = Fixed::placement(3, 2).unwrap();
    let with = |capacities: &[u64], retention, floor| {
        let request = QuotaRequest {
            loads: &loads,
            placement: &placement,
            capacities,
            retention,
            policy: QuotaPolicy::Proportional,
            profile: None,
            floor,
        };
        quotas(&request).map(|quotas| quotas.as_slice().to_vec())
    };
    let most = u32::MAX - 3;
    expect(
        "floors above loads",
        with(&[u64::MAX; 2], 1.0, u32::MAX),
        Ok(vec![3, 0, most]),
    );
    expect(
        "floors above the sum",
        with(&[u64::MAX; 2], 0.0, u32::MAX),
        Ok(vec![0; 3]),
    );
    expect("no room", with(&[0, 0], 1.0, 9), Ok(vec![0; 3]));
    expect(
        "room on one rank",
        with(&[u64::MAX, 5], 1.0, 0),
        Ok(vec![3, 0, 5]),
    );
    expect(
        "capacities",
        with(&[1], 1.0, 0),
        mismatch("capacities", 2, 1),
    );
    expect(
        "retention",
        with(&[1, 1], f64::NEG_INFINITY, 0),
        outside("retention", f64::NEG_INFINITY, "0 to 1"),
    );

    let loads = Loads::new(Array2::from_elem((2, 300), 120)).unwrap();
    let placement = Fixed::placement(300, 2).unwrap();
    let found = quotas(&QuotaRequest {
        loads: &loads,
        placement: &placement,
        capacities: &[u64::MAX, 10],
        retention: 0.25,
        policy: QuotaPolicy::Proportional,
        profile: None,
        floor: 0,
    });
    let found = found.unwrap();
    let [left, right] = [&found.as_slice()[..150], &found.as_slice()[150..]];
    // 18,000 of 72,000 pairs, of which rank 1 takes ten.
    assert!(
        left.iter().all(|&quota| quota == 119 || quota == 120),
        "{left:?}"
    );
    assert_eq!(
        (left.iter().sum::<u32>(), right.iter().sum::<u32>()),
        (17_990, 10)
    );
}

#[test]
fn profiles_with_the_largest_counts() {
    let loads = one_rank_loads(&[10, 30]);
    let placement = Fixed::placement(2, 1).unwrap();
    let profile = Profile::from_counts(2, vec![f32::MAX; 2 * Profile::BUCKETS]).unwrap();
    for policy in [
        QuotaPolicy::Proportional,
        QuotaPolicy::Blend,
        QuotaPolicy::Value,
        QuotaPolicy::Neyman,
    ] {
        let found = quotas(&QuotaRequest {
            loads: &loads,
            placement: &placement,
            capacities: &[u64::MAX],
            retention: 0.5,
            policy,
            profile: Some(&profile),
            floor: 0,
        });
        // Both experts look alike, so that every policy goes by load.
        assert_eq!(found.unwrap().as_slice(), [5, 15], "{policy}");
    }
}

#[test]
fn symi_of_extreme_numbers() {
    expect("no experts", symi_replicas(&[], 3), Err(Error::NoExperts));
    expect(
        "loads past 32 bits",
        symi_replicas(&[u32::MAX, 1], 2),
        Err(Error::TooManyPairs { pairs: 1 << 32 }),
    );
    expect(
        "all slots",
        symi_replicas(&[u32::MAX], u32::MAX),
        Ok(vec![u32::MAX]),
    );
    expect("no replicas", symi_capacity(&[], 1.0, 10, 1), Ok(vec![]));
    expect("no pairs", symi_capacity(&[1], 1.0, 0, 1), Ok(vec![0]));
    expect("factor 0", symi_capacity(&[1], 0.0, 10, 1), Ok(vec![0]));
    let range = "0 to 1e9";
    for factor in [-1.0, f64::INFINITY, 1.1e9] {
        expect(
            "factor",
            symi_capacity(&[1], factor, 1, 1),
            outside("capacity factor", factor, range),
        );
    }
}

#[test]
fn names_of_nothing() {
    for name in ["", "Value", " value"] {
        assert!(matches!(
            name.parse::<QuotaPolicy>(),
            Err(Error::UnknownName {
                what: "quota policy",
                ..
            })
        ));
        assert!(matches!(
            name.parse::<Stash>(),
            Err(Error::UnknownName {
                what: "stash mode",
                ..
            })
        ));
        assert!(matches!(
            ClusterSpec::preset(name),
            Err(Error::UnknownName {
                what: "cluster",
                ..
            })
        ));
        assert!(matches!(
            ModelSpec::preset(name),
            Err(Error::UnknownName { what: "model", .. })
        ));
    }
    assert!(matches!(
        ClusterSpec::from_toml(""),
        Err(Error::ClusterToml(_))
    ));
}
