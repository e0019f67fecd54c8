//! What is left of routed pairs stays where it was routed.

use crate::case::{Case, Limits};
use lrmoe_route::{Array2, Error, KeptPlaces, Placement, RoutingTable, Topology, route};
use ndarray::array;
use proptest::prelude::*;

use crate::table::{expert_ids, unmasked};

const LIMITS: Limits = Limits {
    ranks: 6,
    experts: 8,
    pairs: 300,
};

/// Every pair's instance and its number among the pairs of its source there, from the sending order.
fn places(table: &RoutingTable, source: usize, ids: &[i32]) -> Vec<Option<(usize, u32)>> {
    let order = table.deal(source, ids, &unmasked(ids)).unwrap();
    let mut places = vec![None; ids.len()];
    let mut sent = order.into_iter();
    for (instance, &count) in table.counts().row(source).iter().enumerate() {
        for number in 0..count {
            places[sent.next().unwrap() as usize] = Some((instance, number));
        }
    }
    places
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn kept_pairs_are_found_where_they_were_routed(seed in any::<u64>(), one_in in 1usize..5) {
        let case = Case::random(seed, LIMITS);
        let table = route(case.counts.view(), &case.placement, &case.topology, None).unwrap();
        let ranks = case.placement.ranks();
        let instances = table.counts().ncols();
        let mut counts = Array2::zeros((ranks, instances));
        // What each rank receives: (source, instance, pair id), and the number among all rows of the rank by (instance, source, pair id).
        let mut received = vec![Vec::new(); ranks];
        let mut expected = vec![Vec::new(); ranks];
        for source in 0..ranks {
            let ids = expert_ids(&case, source);
            let kept: Vec<u32> = unmasked(&ids).into_iter().step_by(one_in).collect();
            let mut found = KeptPlaces::default();
            table.places_into(source, &ids, &kept, &mut found).unwrap();
            let all = places(&table, source, &ids);
            let mut own: Vec<_> = kept.iter().map(|&pair| all[pair as usize].unwrap()).collect();
            own.sort_unstable();
            let numbers: Vec<u32> = own.iter().map(|(_, number)| *number).collect();
            prop_assert_eq!(&found.before, &numbers);
            for &(instance, number) in &own {
                counts[[source, instance]] += 1;
                let rank = case.placement.rank_of(instance);
                received[rank].push(number);
                let first = case.placement.on_rank(rank).start;
                let before: u32 = table.counts().indexed_iter()
                    .filter(|((s, i), _)| (first..=instance).contains(i) && (*i, *s) < (instance, source))
                    .map(|(_, n)| n)
                    .sum();
                expected[rank].push(before + number);
            }
            prop_assert_eq!(counts.row(source).to_vec(), found.counts);
        }
        let kept = table.kept(counts, None).unwrap();
        for rank in 0..ranks {
            let mut rows = Vec::new();
            table.kept_rows_into(&kept, rank, &received[rank], &mut rows);
            expected[rank].sort_unstable();
            prop_assert_eq!(&rows, &expected[rank]);
        }
    }
}

#[test]
fn what_cannot_be_left_is_refused() {
    let placement = Placement::new(2, vec![vec![0], vec![0, 1]]).unwrap();
    let topology = Topology::single_node(2).unwrap();
    let counts = array![[3, 2], [1, 0]];
    let table = route(counts.view(), &placement, &topology, None).unwrap();
    let error = table.kept(array![[3, 1, 2], [0, 1, 0]], None).unwrap_err();
    let expected = "rank 0 keeps 1 pairs at instance 1, but 0 were routed there";
    assert_eq!(error.to_string(), expected);
    let error = table
        .kept(table.counts().to_owned(), Some(&[3, 2]))
        .unwrap_err();
    let expected = "3 pairs stay on rank 1, where they were routed, but it can hold 2";
    assert_eq!(error.to_string(), expected);
    let error = table.kept(Array2::zeros((2, 2)), None).unwrap_err();
    assert_eq!(error.to_string(), "instances: expected 3, got 2");
    let error = table.kept(Array2::zeros((1, 3)), None).unwrap_err();
    assert_eq!(error.to_string(), "source ranks: expected 2, got 1");

    let places = |source, ids: &[i32], kept: &[u32]| {
        let places = &mut KeptPlaces::default();
        table.places_into(source, ids, kept, places).unwrap_err()
    };
    let ids = [0, 1, 1, -1, 0, 0];
    assert!(matches!(
        places(2, &ids, &[]),
        Error::RankOutOfRange { rank: 2, ranks: 2 }
    ));
    assert!(matches!(places(0, &ids, &[1, 0]), Error::PairOrder { .. }));
    assert!(matches!(
        places(0, &ids, &[3]),
        Error::ExpertOutOfRange { pair: 3, .. }
    ));
    assert!(matches!(
        places(0, &ids[1..], &[]),
        Error::PairCount { expert: 0, .. }
    ));
    assert!(matches!(
        places(0, &[-2; 6], &[]),
        Error::ExpertOutOfRange { expert: -2, .. }
    ));
    // A pair that is not kept, too.
    assert!(matches!(
        places(0, &[0, 1, 1, -1, 0, 7], &[1]),
        Error::ExpertOutOfRange {
            pair: 5,
            expert: 7,
            ..
        }
    ));
}
