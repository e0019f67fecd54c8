mod fewest;

use arbitrary::Arbitrary;
use lrmoe_route::{Array2, Error, Placement, RoutingTable, Topology, shrink};

use crate::hosts;
use fewest::{fewest_crossings, room_of, smallest_largest, worst_set};

#[derive(Arbitrary, Debug)]
struct Input {
    ranks: u8,
    experts: u8,
    per_node: u8,
    counts: Vec<u8>,
    hosts: Vec<u8>,
    capacities: Option<Vec<u16>>,
    columns_first: bool,
    /// In what order a rank has its pairs.
    order: Vec<u8>,
    chunk_rows: u16,
}

/// A request whose parts belong together.
pub(crate) struct Case {
    counts: Array2<u32>,
    placement: Placement,
    topology: Topology,
    /// Ranks of each expert.
    hosts: Vec<Vec<usize>>,
    /// Without capacities more than any load.
    room: Vec<u64>,
}

/// Routing tables: the largest load against Hall's condition for every set of experts, the crossings against the cheapest paths of a plain flow,
/// dealing and chunks against plain loops, and where there is no room the shortfall, and what `shrink` leaves out.
pub fn route(data: &[u8]) {
    let Some(input) = crate::input::of::<Input>(data) else {
        return;
    };
    let (ranks, experts) = (
        usize::from(input.ranks % 4) + 1,
        usize::from(input.experts % 5) + 1,
    );
    let count = |(rank, expert): (usize, usize)| {
        let count = input.counts.get(rank * experts + expert);
        u32::from(count.copied().unwrap_or(0))
    };
    let counts = Array2::from_shape_fn((ranks, experts), count);
    let placement = hosts::placement(experts, ranks, &input.hosts);
    let topology = Topology::new(ranks, usize::from(input.per_node) % ranks + 1);
    let topology = topology.expect("neither is 0");
    let given = input.capacities.as_ref();
    let capacities: Option<Vec<u64>> =
        given.map(|rows| rows.iter().map(|&rows| rows.into()).collect());
    let routed = |counts: &Array2<u32>| {
        lrmoe_route::route(counts.view(), &placement, &topology, capacities.as_deref())
    };
    if let Some(found) = capacities.as_ref().map(Vec::len).filter(|n| *n != ranks) {
        let (what, expected) = ("capacities", ranks);
        let got = found;
        assert_eq!(
            routed(&counts),
            Err(Error::Mismatch {
                what,
                expected,
                got
            })
        );
        return;
    }
    if input.columns_first && ranks > 1 && experts > 1 {
        let columns_first = counts.t().as_standard_layout().into_owned().reversed_axes();
        assert_eq!(routed(&columns_first), Err(Error::Layout));
        return;
    }
    let result = routed(&counts);
    let unlimited = u64::from(counts.sum());
    let case = Case {
        hosts: hosts::hosts(&placement),
        room: capacities.unwrap_or(vec![unlimited; ranks]),
        counts,
        placement,
        topology,
    };
    match result {
        Ok(table) => {
            check_table(&case, &table);
            check_chunks(&case, &table, input.chunk_rows.into());
            check_dealing(&case, &table, &input.order);
            assert_eq!(check_shrunk(&case, &input.order), 0);
        }
        Err(Error::NoRoom {
            experts,
            ranks,
            pairs,
            room,
            shortfall,
        }) => {
            assert_eq!(shortfall, worst_set(&case));
            assert_eq!(pairs, room + shortfall);
            let load = |expert: &u32| case.load(*expert as usize);
            assert_eq!(experts.iter().map(load).sum::<u64>(), pairs);
            let rows = |rank: &u32| case.room[*rank as usize];
            assert_eq!(ranks.iter().map(rows).sum::<u64>(), room);
            for expert in experts {
                let mut hosts = case.hosts[expert as usize].iter();
                assert!(hosts.all(|rank| ranks.contains(&(*rank as u32))));
            }
            assert_eq!(check_shrunk(&case, &input.order), shortfall);
        }
        Err(other) => panic!("{other}"),
    }
}

impl Case {
    fn load(&self, expert: usize) -> u64 {
        self.counts.column(expert).sum().into()
    }
}

fn check_table(case: &Case, table: &RoutingTable) {
    let (ranks, experts) = case.counts.dim();
    assert_eq!(table.counts().dim(), (ranks, case.placement.instances()));
    let mut loads = vec![0; ranks];
    let (mut across_ranks, mut across_nodes) = (0, 0);
    let mut sent = Array2::<u32>::zeros((ranks, experts));
    for ((source, instance), &pairs) in table.counts().indexed_iter() {
        let rank = case.placement.rank_of(instance);
        sent[[source, case.placement.expert_of(instance)]] += pairs;
        loads[rank] += u64::from(pairs);
        if rank != source {
            across_ranks += u64::from(pairs);
        }
        if case.topology.node_of(rank) != case.topology.node_of(source) {
            across_nodes += u64::from(pairs);
        }
    }
    assert_eq!(sent, case.counts, "every pair goes to its expert");
    assert_eq!(table.rank_loads(), loads);
    assert!(
        loads
            .iter()
            .zip(&case.room)
            .all(|(rows, room)| rows <= room)
    );
    let largest = loads.into_iter().max().unwrap_or(0);
    assert_eq!(largest, smallest_largest(case));
    let crossings = table.crossings(&case.topology);
    assert_eq!(
        (crossings.ranks, crossings.nodes),
        (across_ranks, across_nodes)
    );
    let fewest = fewest_crossings(case, &room_of(case, largest));
    assert_eq!((across_nodes, across_ranks), fewest);
}

/// Rows by (instance, source), cut into rounds.
fn check_chunks(case: &Case, table: &RoutingTable, chunk_rows: u64) {
    let rows_of_round = chunk_rows.max(1);
    let rounds = table.rounds(chunk_rows);
    for rank in 0..case.placement.ranks() {
        let here = case.placement.on_rank(rank);
        let mut expected = vec![Array2::<u32>::zeros((case.placement.ranks(), here.len())); rounds];
        let mut row = 0;
        for (local, instance) in here.enumerate() {
            for source in 0..case.placement.ranks() {
                for _ in 0..table.counts()[[source, instance]] {
                    expected[(row / rows_of_round) as usize][[source, local]] += 1;
                    row += 1;
                }
            }
        }
        for (round, expected) in expected.iter().enumerate() {
            assert_eq!(table.chunk(rank, round, chunk_rows), expected);
        }
        assert_eq!(table.chunk(rank, rounds, chunk_rows).sum(), 0);
    }
    let largest = table.rank_loads().into_iter().max().unwrap_or(0);
    assert_eq!(rounds as u64, largest.div_ceil(rows_of_round));
}

/// The experts of a rank's pairs in an order of the input, masked pairs among them, and the ids of those that are not.
fn local_pairs(case: &Case, source: usize, order: &[u8]) -> (Vec<i32>, Vec<u32>) {
    let counts = (0..).zip(case.counts.row(source));
    let mut ids: Vec<i32> = counts
        .flat_map(|(expert, &pairs)| std::iter::repeat_n(expert, pairs as usize))
        .collect();
    ids.extend(std::iter::repeat_n(-1, order.len() % 5));
    let mut keyed: Vec<(u8, i32)> = crate::input::cycled(order, 0).zip(ids).collect();
    keyed.sort_by_key(|(key, _)| *key);
    let ids: Vec<i32> = keyed.into_iter().map(|(_, id)| id).collect();
    let unmasked = (0..).zip(&ids).filter(|(_, id)| **id >= 0);
    let unmasked = unmasked.map(|(pair, _)| pair).collect();
    (ids, unmasked)
}

fn check_dealing(case: &Case, table: &RoutingTable, order: &[u8]) {
    for source in 0..case.placement.ranks() {
        let (ids, pairs) = local_pairs(case, source, order);
        // Of the pairs of an expert the first go to its lowest instance.
        let mut dealt = Vec::new();
        for instance in 0..case.placement.instances() {
            let expert = case.placement.expert_of(instance);
            let lower = case.placement.instances_of(expert).iter();
            let before: u32 = lower
                .filter(|lower| (**lower as usize) < instance)
                .map(|lower| table.counts()[[source, *lower as usize]])
                .sum();
            let own = pairs
                .iter()
                .filter(|pair| ids[**pair as usize] == expert as i32);
            let count = table.counts()[[source, instance]];
            dealt.extend(own.skip(before as usize).take(count as usize).copied());
        }
        assert_eq!(table.deal(source, &ids, &pairs).as_ref(), Ok(&dealt));

        let Some((last, fewer)) = pairs.split_last() else {
            continue;
        };
        let expert = ids[*last as usize] as usize;
        let expected = u64::from(case.counts[[source, expert]]);
        let (source_rank, got) = (source, expected - 1);
        let refused = Error::PairCount {
            source_rank,
            expert,
            expected,
            got,
        };
        assert_eq!(table.deal(source, &ids, fewer), Err(refused));
        if let Some(pair) = ids.iter().position(|id| *id < 0) {
            let (pair, expert, experts) = (pair as u32, -1, case.placement.experts());
            let refused = Error::ExpertOutOfRange {
                pair,
                expert,
                experts,
            };
            let mut with_masked = pairs.clone();
            with_masked.push(pair);
            with_masked.sort_unstable();
            assert_eq!(table.deal(source, &ids, &with_masked), Err(refused));
        }
    }
}

/// How many pairs had to leave; what stays can be routed.
fn check_shrunk(case: &Case, order: &[u8]) -> u64 {
    let shrunk = shrink(case.counts.view(), &case.placement, &case.room).expect("parts that fit");
    assert_eq!(&shrunk.counts + &shrunk.left, case.counts);
    for (expert, &quota) in shrunk.quotas.iter().enumerate() {
        assert_eq!(shrunk.counts.column(expert).sum(), quota);
    }
    let view = shrunk.counts.view();
    let routed = lrmoe_route::route(view, &case.placement, &case.topology, Some(&case.room));
    routed.expect("what stays has room");
    for source in 0..case.placement.ranks() {
        let (ids, pairs) = local_pairs(case, source, order);
        let (stay, left) = shrunk
            .split(source, &ids, &pairs)
            .expect("the pairs counted");
        // Of each expert the first stay.
        for (expert, &count) in shrunk.counts.row(source).iter().enumerate() {
            let own = |pairs: &[u32]| -> Vec<u32> {
                let own = pairs
                    .iter()
                    .filter(|pair| ids[**pair as usize] == expert as i32);
                own.copied().collect()
            };
            let all = own(&pairs);
            assert_eq!(own(&stay), all[..count as usize]);
            assert_eq!(own(&left), all[count as usize..]);
        }
    }
    shrunk.left.sum().into()
}
