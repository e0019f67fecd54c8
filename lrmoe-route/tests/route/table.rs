//! Routing tables: conservation, capacities, sending order, rounds and errors.

use crate::case::{Case, Limits};
use lrmoe_route::{Array2, Crossings, Error, Placement, RoutingTable, Topology, route};
use ndarray::array;
use proptest::prelude::*;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

const LARGE: Limits = Limits {
    ranks: 20,
    experts: 30,
    pairs: 3_000,
};

fn two_ranks() -> (Placement, Topology) {
    let placement = Placement::new(2, vec![vec![0], vec![0, 1]]).unwrap();
    (placement, Topology::single_node(2).unwrap())
}

fn table_of(case: &Case) -> RoutingTable {
    route(case.counts.view(), &case.placement, &case.topology, None).unwrap()
}

/// Expert ids of one rank's pairs, shuffled, every third pair masked.
pub(crate) fn expert_ids(case: &Case, source: usize) -> Vec<i32> {
    let row = case.counts.row(source);
    let ids = row
        .iter()
        .zip(0..)
        .flat_map(|(&n, expert)| std::iter::repeat_n(expert, n as usize));
    let mut ids: Vec<i32> = ids.collect();
    ids.extend(vec![-1; ids.len() / 2]);
    ids.shuffle(&mut ChaCha8Rng::seed_from_u64(source as u64));
    ids
}

pub(crate) fn unmasked(expert_ids: &[i32]) -> Vec<u32> {
    let pairs = expert_ids
        .iter()
        .zip(0..)
        .filter(|(expert, _)| **expert >= 0);
    pairs.map(|(_, pair)| pair).collect()
}

/// The largest of ceil(pairs of S / ranks that host an expert of S) over all sets S of experts.
fn largest_over_sets(case: &Case) -> u64 {
    let experts = case.placement.experts();
    let bound = |set: u32| {
        let inside = (0..experts).filter(|expert| set >> expert & 1 == 1);
        let pairs: u32 = inside
            .clone()
            .map(|expert| case.counts.column(expert).sum())
            .sum();
        let mut hosts: Vec<usize> = inside.flat_map(|expert| case.hosts(expert)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        u64::from(pairs.div_ceil(hosts.len() as u32))
    };
    (1..1 << experts).map(bound).max().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn largest_load_is_the_bound_over_sets(seed: u64) {
        let case = Case::random(seed, Limits { ranks: 12, experts: 8, pairs: 500 });
        let largest = table_of(&case).rank_loads().into_iter().max();
        prop_assert_eq!(largest, Some(largest_over_sets(&case)));
    }

    #[test]
    fn every_pair_is_routed_once_to_its_expert(seed: u64) {
        let case = Case::random(seed, LARGE);
        let table = table_of(&case);
        prop_assert_eq!(table.placement(), &case.placement);
        let mut sums = Array2::<u32>::zeros(case.counts.raw_dim());
        for ((source, instance), &n) in table.counts().indexed_iter() {
            sums[[source, case.placement.expert_of(instance)]] += n;
        }
        prop_assert_eq!(&sums, &case.counts);
        prop_assert_eq!(table.rank_loads().into_iter().sum::<u64>(), u64::from(case.counts.sum()));
    }

    #[test]
    fn deals_in_sending_order(seed: u64) {
        let case = Case::random(seed, LARGE);
        let table = table_of(&case);
        let mut order = Vec::new();
        for source in 0..case.placement.ranks() {
            let ids = expert_ids(&case, source);
            let pairs = unmasked(&ids);
            // The plainest dealing: each instance takes the first pairs of its expert that are left.
            let mut left = pairs.clone();
            let mut expected = Vec::new();
            for (instance, &n) in table.counts().row(source).iter().enumerate() {
                let expert = case.placement.expert_of(instance) as i32;
                let mine = left.iter().copied().filter(|&pair| ids[pair as usize] == expert);
                let mine: Vec<u32> = mine.take(n as usize).collect();
                left.retain(|pair| !mine.contains(pair));
                expected.extend(mine);
            }
            prop_assert!(left.is_empty());
            table.deal_into(source, &ids, &pairs, &mut order).unwrap();
            prop_assert_eq!(&order, &expected);
            prop_assert_eq!(table.deal(source, &ids, &pairs).unwrap(), expected);
        }
    }

    #[test]
    fn rounds_deliver_rows_in_order(seed: u64, chunk_rows in 1_u64..50) {
        let case = Case::random(seed, Limits { ranks: 6, experts: 6, pairs: 300 });
        let table = table_of(&case);
        let rounds = table.rounds(chunk_rows);
        let largest = table.rank_loads().into_iter().max().unwrap();
        prop_assert!(rounds as u64 * chunk_rows >= largest);
        prop_assert!(rounds == 0 || (rounds as u64 - 1) * chunk_rows < largest);
        for rank in 0..case.placement.ranks() {
            let here = case.placement.on_rank(rank);
            // (source, local instance) of each row received.
            let mut rows = here.clone().flat_map(|instance| {
                let column = table.counts().column(instance).to_vec();
                let first = here.start;
                column.into_iter().enumerate().flat_map(move |(source, n)| {
                    std::iter::repeat_n([source, instance - first], n as usize)
                })
            });
            for round in 0..rounds + 1 {
                let mut expected = Array2::zeros((case.placement.ranks(), here.len()));
                for row in rows.by_ref().take(chunk_rows as usize) {
                    expected[row] += 1;
                }
                prop_assert_eq!(table.chunk(rank, round, chunk_rows), expected);
            }
            prop_assert!(rows.next().is_none());
        }
    }
}

#[test]
fn stays_on_the_node_before_it_stays_on_the_rank() {
    // Nodes {0, 1} and {2, 3}. Expert 0 lives on ranks 1 and 2, expert 1 on rank 1 and fills it.
    let placement = Placement::new(3, vec![vec![2], vec![0, 1], vec![0], vec![2]]).unwrap();
    let topology = Topology::new(4, 2).unwrap();
    let counts = array![[4, 0, 0], [0, 0, 0], [4, 0, 0], [0, 0, 0]];
    let table = route(counts.view(), &placement, &topology, None).unwrap();
    assert_eq!(table.rank_loads(), [0, 4, 4, 0]);
    assert_eq!(table.crossings(&topology), Crossings { ranks: 4, nodes: 0 });

    let counts = array![[4, 0, 0], [0, 2, 0], [2, 0, 0], [0, 0, 0]];
    let table = route(counts.view(), &placement, &topology, None).unwrap();
    assert_eq!(table.rank_loads(), [0, 4, 4, 0]);
    assert_eq!(table.crossings(&topology), Crossings { ranks: 4, nodes: 2 });
}

#[test]
fn ranks_without_room_get_nothing() {
    let (placement, topology) = two_ranks();
    let table = route(
        array![[5, 1], [2, 0]].view(),
        &placement,
        &topology,
        Some(&[0, 8]),
    )
    .unwrap();
    assert_eq!(table.counts(), array![[0, 5, 1], [0, 2, 0]]);
    let table = route(
        array![[5, 1], [2, 0]].view(),
        &placement,
        &topology,
        Some(&[u64::MAX, 1]),
    )
    .unwrap();
    assert_eq!(table.counts(), array![[5, 0, 1], [2, 0, 0]]);
}

#[test]
fn nothing_to_route() {
    let (placement, topology) = two_ranks();
    let table = route(
        Array2::zeros((2, 2)).view(),
        &placement,
        &topology,
        Some(&[0, 0]),
    )
    .unwrap();
    assert_eq!(table.counts().sum(), 0);
    assert_eq!(table.rounds(16), 0);
    assert_eq!(table.chunk(1, 0, 16), Array2::<u32>::zeros((2, 2)));
    assert!(table.deal(0, &[-1, -1], &[]).unwrap().is_empty());
}

#[test]
fn names_experts_without_room() {
    // Experts 1 and 2 share rank 1; expert 0 could leave it and does.
    let placement = Placement::new(3, vec![vec![0], vec![0, 1, 2]]).unwrap();
    let topology = Topology::single_node(2).unwrap();
    let counts = array![[9, 3, 1], [0, 4, 2]];
    let error = route(counts.view(), &placement, &topology, Some(&[9, 8])).unwrap_err();
    let expected = Error::NoRoom {
        experts: vec![1, 2],
        ranks: vec![1],
        pairs: 10,
        room: 8,
        shortfall: 2,
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "10 pairs of experts [1, 2] exceed the 8 rows of the ranks [1] that host them by 2"
    );

    let error = route(counts.view(), &placement, &topology, Some(&[8, 10])).unwrap_err();
    let expected = Error::NoRoom {
        experts: vec![0, 1, 2],
        ranks: vec![0, 1],
        pairs: 19,
        room: 18,
        shortfall: 1,
    };
    assert_eq!(error, expected);
}

#[test]
fn as_many_pairs_as_fit_in_u32() {
    let (placement, topology) = two_ranks();
    let most = array![[u32::MAX - 1, 0], [1, 0]];
    let table = route(most.view(), &placement, &topology, None).unwrap();
    assert_eq!(table.rank_loads(), [1 << 31, (1 << 31) - 1]);
    assert_eq!(
        table.rounds(0),
        1 << 31,
        "a chunk of no rows counts as one row"
    );
    assert_eq!(table.chunk(0, 1, u64::MAX).sum(), 0);
    let error = route(
        array![[u32::MAX, 0], [1, 0]].view(),
        &placement,
        &topology,
        None,
    )
    .unwrap_err();
    assert_eq!(error, Error::TooManyPairs { pairs: 1 << 32 });
}

/// Costs, sums and offsets at the limit: every pair crosses nodes, over several instances and with bounds that bind.
#[test]
fn as_many_crossings_as_fit_in_u32() {
    let placement = Placement::new(2, vec![vec![], vec![], vec![0, 1], vec![0, 1]]).unwrap();
    let topology = Topology::new(4, 2).unwrap();
    let half = u32::MAX / 2;
    let counts = array![[half, 1], [0, half], [0, 0], [0, 0]];
    let table = route(
        counts.view(),
        &placement,
        &topology,
        Some(&[0, 0, u64::MAX, 7]),
    )
    .unwrap();
    assert_eq!(table.rank_loads(), [0, 0, u64::from(u32::MAX) - 7, 7]);
    let all = u32::MAX.into();
    assert_eq!(
        table.crossings(&topology),
        Crossings {
            ranks: all,
            nodes: all
        }
    );
    assert_eq!(table.chunk(2, usize::MAX, u64::MAX).sum(), 0);
    assert_eq!(table.chunk(2, 0, u64::MAX).sum(), u32::MAX - 7);
    let last = table.rounds(1) - 1;
    assert_eq!(
        (
            table.chunk(2, last, 1).sum(),
            table.chunk(2, last + 1, 1).sum()
        ),
        (1, 0)
    );

    for at in [[0, 1], [3, 0]] {
        let mut counts = counts.clone();
        counts[at] += 1;
        let error = route(counts.view(), &placement, &topology, None).unwrap_err();
        assert_eq!(error, Error::TooManyPairs { pairs: 1 << 32 });
    }
}

#[test]
fn refuses_inputs_that_do_not_belong_together() {
    let (placement, topology) = two_ranks();
    let counts = array![[1, 2], [3, 4]];
    let mismatch = |what, expected, got| {
        Err(Error::Mismatch {
            what,
            expected,
            got,
        })
    };
    let rows = Array2::zeros((3, 2));
    assert_eq!(
        route(rows.view(), &placement, &topology, None),
        mismatch("source ranks", 2, 3)
    );
    let columns = Array2::zeros((2, 3));
    assert_eq!(
        route(columns.view(), &placement, &topology, None),
        mismatch("experts", 2, 3)
    );
    let one = route(counts.view(), &placement, &topology, Some(&[1]));
    assert_eq!(one, mismatch("capacities", 2, 1));
    let three = Topology::new(3, 1).unwrap();
    assert_eq!(
        route(counts.view(), &placement, &three, None),
        mismatch("ranks of the topology", 2, 3)
    );
    assert_eq!(
        route(counts.t(), &placement, &topology, None),
        Err(Error::Layout)
    );
}

#[test]
fn refuses_to_deal_other_pairs() {
    let (placement, topology) = two_ranks();
    let table = route(array![[2, 1], [0, 0]].view(), &placement, &topology, None).unwrap();
    let ids = [0, 1, -1, 0, 2];
    assert_eq!(table.deal(0, &ids, &[0, 1, 3]).unwrap(), [0, 3, 1]);
    let error = |source, pairs: &[u32]| table.deal(source, &ids, pairs).unwrap_err();
    assert_eq!(error(2, &[]), Error::RankOutOfRange { rank: 2, ranks: 2 });
    assert_eq!(
        error(0, &[0, 1, 5]),
        Error::PairOutOfRange { pair: 5, pairs: 5 }
    );
    assert_eq!(
        error(0, &[0, 3, 1]),
        Error::PairOrder { pair: 1, before: 3 }
    );
    assert_eq!(
        error(0, &[0, 0, 1]),
        Error::PairOrder { pair: 0, before: 0 }
    );
    assert_eq!(
        error(0, &[0, 1, 2]),
        Error::ExpertOutOfRange {
            pair: 2,
            expert: -1,
            experts: 2
        }
    );
    assert_eq!(
        error(0, &[0, 1, 4]),
        Error::ExpertOutOfRange {
            pair: 4,
            expert: 2,
            experts: 2
        }
    );
    assert_eq!(
        error(0, &[0, 1]),
        Error::PairCount {
            source_rank: 0,
            expert: 0,
            expected: 2,
            got: 1
        }
    );
    assert_eq!(
        error(1, &[0, 1]),
        Error::PairCount {
            source_rank: 1,
            expert: 0,
            expected: 0,
            got: 1
        }
    );
}
