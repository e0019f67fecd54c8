//! What every public entry point does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: shapes, layouts and totals of what is routed, pairs that are dealt (`table.rs`), and shares within capacities
//! (`shrink.rs`).

use lrmoe_route::{Array2, Crossings, Error, Placement, Topology, route, shrink};
use ndarray::{array, s};

fn alone(experts: u32) -> Placement {
    Placement::new(experts as usize, vec![(0..experts).collect()]).unwrap()
}

#[test]
fn counts_of_nothing_and_in_odd_layouts() {
    let (placement, topology) = (alone(2), Topology::single_node(1).unwrap());
    let wide = array![[1, 9, 2, 9], [8, 8, 8, 8]];
    let mismatch = |what, expected, got| {
        Err(Error::Mismatch {
            what,
            expected,
            got,
        })
    };
    let cases = [
        (
            "nothing",
            wide.slice(s![..0, ..0]),
            mismatch("source ranks", 1, 0),
        ),
        (
            "no experts",
            wide.slice(s![..1, ..0]),
            mismatch("experts", 2, 0),
        ),
        (
            "every second column",
            wide.slice(s![..1, ..;2]),
            Err(Error::Layout),
        ),
        ("backwards", wide.slice(s![..1, ..2;-1]), Err(Error::Layout)),
        (
            "the first columns of one row",
            wide.slice(s![..1, ..2]),
            Ok(vec![10]),
        ),
    ];
    for (case, counts, expected) in cases {
        let found = route(counts, &placement, &topology, None).map(|table| table.rank_loads());
        assert_eq!(found, expected, "{case}");
        let shrunk =
            shrink(counts, &placement, &[u64::MAX]).map(|shrunk| vec![shrunk.counts.sum().into()]);
        assert_eq!(shrunk, expected, "{case}, shrunk");
    }
}

#[test]
fn capacities_of_0_and_of_all_there_is() {
    let (placement, topology) = (alone(2), Topology::single_node(1).unwrap());
    let counts = array![[u32::MAX - 1, 1]];
    let no_room = |room| {
        Err(Error::NoRoom {
            experts: vec![0, 1],
            ranks: vec![0],
            pairs: u32::MAX.into(),
            room,
            shortfall: u64::from(u32::MAX) - room,
        })
    };
    let cases = [
        (0, no_room(0)),
        (1, no_room(1)),
        (u64::from(u32::MAX) - 1, no_room(u64::from(u32::MAX) - 1)),
        (u32::MAX.into(), Ok(vec![u32::MAX.into()])),
        (u64::MAX, Ok(vec![u32::MAX.into()])),
    ];
    for (rows, expected) in cases {
        let found = route(counts.view(), &placement, &topology, Some(&[rows]));
        assert_eq!(
            found.map(|table| table.rank_loads()),
            expected,
            "{rows} rows"
        );
        let shrunk = shrink(counts.view(), &placement, &[rows]).unwrap();
        let kept: u64 = shrunk.quotas.iter().map(|&quota| u64::from(quota)).sum();
        assert_eq!(kept, rows.min(u32::MAX.into()), "{rows} rows");
    }
    let mismatch = Err(Error::Mismatch {
        what: "capacities",
        expected: 1,
        got: 2,
    });
    assert_eq!(shrink(counts.view(), &placement, &[1, 1]), mismatch);
    let others = array![[1, 2, 3]];
    let experts = Err(Error::Mismatch {
        what: "experts",
        expected: 2,
        got: 3,
    });
    assert_eq!(shrink(others.view(), &placement, &[1]), experts);
}

#[test]
fn ids_at_the_ends_of_their_types() {
    let (placement, topology) = (alone(1), Topology::single_node(1).unwrap());
    let counts = array![[1]];
    let table = route(counts.view(), &placement, &topology, None).unwrap();
    let shrunk = shrink(counts.view(), &placement, &[1]).unwrap();
    let expert = |expert| {
        Err(Error::ExpertOutOfRange {
            pair: 0,
            expert,
            experts: 1,
        })
    };
    let pair = |pair, pairs| Err(Error::PairOutOfRange { pair, pairs });
    let rank = Err(Error::RankOutOfRange {
        rank: usize::MAX,
        ranks: 1,
    });
    let missing = Err(Error::PairCount {
        source_rank: 0,
        expert: 0,
        expected: 1,
        got: 0,
    });
    type Case<'a> = (usize, &'a [i32], &'a [u32], Result<Vec<u32>, Error>);
    let cases: [Case<'_>; 7] = [
        (0, &[i32::MIN], &[0], expert(i32::MIN)),
        (0, &[i32::MAX], &[0], expert(i32::MAX)),
        (0, &[-1], &[0], expert(-1)),
        (0, &[], &[0], pair(0, 0)),
        (0, &[0], &[u32::MAX], pair(u32::MAX, 1)),
        (usize::MAX, &[0], &[0], rank),
        (0, &[], &[], missing),
    ];
    for (source, ids, pairs, expected) in cases {
        assert_eq!(
            table.deal(source, ids, pairs),
            expected,
            "{ids:?} {pairs:?}"
        );
        let split = shrunk.split(source, ids, pairs).map(|(stay, _)| stay);
        assert_eq!(split, expected, "{ids:?} {pairs:?}, split");
    }
    // A source of fewer experts than the placement has, and one that has nothing.
    assert_eq!(table.deal(0, &[-1, 0, -1], &[1]), Ok(vec![1]));
}

#[test]
fn rounds_of_any_size() {
    let (placement, topology) = (alone(1), Topology::single_node(1).unwrap());
    let table = route(array![[5]].view(), &placement, &topology, None).unwrap();
    assert_eq!(
        [0, 1, 4, 5, u64::MAX].map(|rows| table.rounds(rows)),
        [5, 5, 2, 1, 1]
    );
    let chunk = |round, rows| table.chunk(0, round, rows).sum();
    assert_eq!([chunk(0, 0), chunk(4, 0), chunk(5, 0)], [1, 1, 0]);
    assert_eq!(
        [
            chunk(usize::MAX, 1),
            chunk(usize::MAX, u64::MAX),
            chunk(0, u64::MAX)
        ],
        [0, 0, 5]
    );
}

/// More experts than a byte counts, more pairs than 16 bits count, replicas of every expert.
#[test]
fn many_experts_and_pairs() {
    let (ranks, experts) = (3, 300);
    let all: Vec<u32> = (0..experts).collect();
    let placement = Placement::new(experts as usize, vec![all; ranks]).unwrap();
    let topology = Topology::new(ranks, 2).unwrap();
    let counts = Array2::from_shape_fn((ranks, experts as usize), |(rank, expert)| {
        (400 * (rank == 0) as u32 + expert as u32 % 7) * 2
    });
    let table = route(counts.view(), &placement, &topology, None).unwrap();
    let total = u64::from(counts.sum());
    assert!(total > 1 << 16);
    assert_eq!(
        table.rank_loads().iter().copied().max(),
        Some(total.div_ceil(3))
    );
    // All pairs start on rank 0 or are few: every rank keeps its own, and rank 0 keeps as many as it may.
    let away = u64::from(counts.row(0).sum()) - total.div_ceil(3);
    let Crossings {
        ranks: crossing, ..
    } = table.crossings(&topology);
    assert_eq!(crossing, away);
}
