//! Gather, regroup and scatter-add against plain loops, with several thread counts.

use lrmoe_compact::{Grouping, ScatterAdd, gather};
use ndarray::{Array2, ArrayView2, array, s};
use proptest::collection::vec;
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

const THREADS: [usize; 3] = [1, 2, 5];
const POISON: f32 = f32::NAN;

fn with_threads<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
        .install(body)
}

fn bits(array: &Array2<f32>) -> Array2<u32> {
    array.map(|value| value.to_bits())
}

/// Different values of many magnitudes, so that the order of a sum shows.
fn rows(count: usize, width: usize) -> Array2<f32> {
    Array2::from_shape_fn((count, width), |(row, column)| {
        let hash = ((row * 31 + column * 17 + 1) as u32).wrapping_mul(0x9E37_79B9);
        hash as i32 as f32 * 2f32.powi((hash % 24) as i32 - 43)
    })
}

/// A hash of `index` below `limit`.
fn pick(index: usize, limit: usize) -> usize {
    ((index as u32).wrapping_mul(0x85EB_CA6B) >> 7) as usize % limit
}

fn check_gather(count: usize, width: usize, index: &[u32]) {
    let rows = rows(count, width);
    let expected = Array2::from_shape_fn((index.len(), width), |(i, column)| {
        rows[[index[i] as usize, column]]
    });
    for threads in THREADS {
        let mut out = Array2::from_elem((index.len(), width), POISON);
        with_threads(threads, || gather(rows.view(), index, out.view_mut())).unwrap();
        assert_eq!(bits(&out), bits(&expected), "{threads} threads");
    }
}

/// Groups by pushing the rows of every (instance, source) and then the padding, and ungroups again.
fn check_grouping(counts: ArrayView2<'_, u32>, multiple: usize, width: usize) {
    let received = rows(counts.iter().map(|&count| count as usize).sum(), width);
    let (sources, instances) = counts.dim();
    let (mut expected, mut offsets) = (Vec::new(), vec![0]);
    for instance in 0..instances {
        let mut group = Vec::new();
        for source in 0..sources {
            let before: usize = counts
                .iter()
                .take(source * instances + instance)
                .map(|&count| count as usize)
                .sum();
            for row in 0..counts[[source, instance]] as usize {
                group.push(received.row(before + row).to_vec());
            }
        }
        while group.len() % multiple != 0 {
            group.push(vec![0.0; width]);
        }
        expected.extend(group);
        offsets.push(expected.len());
    }

    let grouping = Grouping::new(counts, multiple).unwrap();
    assert_eq!(grouping.offsets(), offsets);
    assert_eq!(grouping.received_rows(), received.nrows());
    assert_eq!(grouping.grouped_rows(), expected.len());
    let expected = Array2::from_shape_fn((expected.len(), width), |(row, column)| {
        expected[row][column]
    });
    for threads in THREADS {
        let mut grouped = Array2::from_elem(expected.dim(), POISON);
        let mut back = Array2::from_elem(received.dim(), POISON);
        with_threads(threads, || {
            grouping.group(received.view(), grouped.view_mut()).unwrap();
            grouping.ungroup(grouped.view(), back.view_mut()).unwrap();
        });
        assert_eq!(bits(&grouped), bits(&expected), "{threads} threads");
        assert_eq!(bits(&back), bits(&received), "{threads} threads");
    }
}

/// Adds slot by slot, looking each pair up in the whole list.
fn check_scatter(
    tokens: usize,
    top_k: usize,
    width: usize,
    pairs: &[u32],
    weights: Option<&[f32]>,
) {
    let rows = rows(pairs.len(), width);
    // Tokens without rows must keep even a NaN.
    let before = Array2::from_shape_fn((tokens, width), |(token, column)| {
        let has_rows = pairs.iter().any(|&pair| pair as usize / top_k == token);
        if has_rows {
            (token + column) as f32 * 0.1
        } else {
            POISON
        }
    });
    let mut expected = before.clone();
    for pair in 0..tokens * top_k {
        if let Some(row) = pairs.iter().position(|&other| other as usize == pair) {
            for column in 0..width {
                let value = rows[[row, column]];
                expected[[pair / top_k, column]] +=
                    weights.map_or(value, |weights| weights[row] * value);
            }
        }
    }
    for threads in THREADS {
        let mut scatter = ScatterAdd::new();
        // A larger call before, whose rows must leave no trace.
        let mut other = Array2::zeros((tokens + 1, 1));
        scatter
            .add(
                array![[1.0], [2.0]].view(),
                &[0, 1],
                None,
                top_k + 1,
                other.view_mut(),
            )
            .unwrap();
        for _ in 0..2 {
            let mut into = before.clone();
            with_threads(threads, || {
                scatter.add(rows.view(), pairs, weights, top_k, into.view_mut())
            })
            .unwrap();
            assert_eq!(bits(&into), bits(&expected), "{threads} threads");
        }
    }
}

fn weights(count: usize) -> Vec<f32> {
    (0..count)
        .map(|row| 0.1 + pick(row, 100) as f32 / 7.0)
        .collect()
}

/// Every third pair is left out, and the others are in a mixed order.
fn some_pairs(count: usize) -> Vec<u32> {
    let mut pairs: Vec<u32> = (0..count as u32).filter(|pair| pair % 3 != 1).collect();
    pairs.sort_by_key(|&pair| pick(pair as usize, 1 << 20));
    pairs
}

#[test]
fn gather_at_task_borders() {
    for (count, width, len) in [
        (1, 1, 0),
        (1, 1, 1),
        (7, 3, 5),
        (300, 1, 40_001),
        (33, 513, 97),
        (3, 20_000, 4),
        (5, 0, 9),
    ] {
        let index: Vec<u32> = (0..len).map(|i| pick(i, count) as u32).collect();
        check_gather(count, width, &index);
    }
    check_gather(0, 4, &[]);
}

#[test]
fn grouping_at_task_borders() {
    for multiple in [1, 2, 7, 64] {
        for width in [0, 1, 3, 129] {
            check_grouping(
                array![[5, 0, 1], [0, 0, 9], [2, 0, 0]].view(),
                multiple,
                width,
            );
            check_grouping(array![[1]].view(), multiple, width);
            check_grouping(array![[0, 0], [0, 0]].view(), multiple, width);
        }
        // One run longer than many tasks, among short ones.
        check_grouping(array![[1, 40_000], [3, 0], [0, 129]].view(), multiple, 2);
        check_grouping(Array2::zeros((0, 3)).view(), multiple, 2);
        check_grouping(Array2::zeros((3, 0)).view(), multiple, 2);
    }
}

#[test]
fn scatter_at_task_borders() {
    for (tokens, top_k, width) in [
        (1, 1, 1),
        (3, 2, 5),
        (700, 3, 97),
        (5, 8, 0),
        (3, 4, 20_000),
    ] {
        let pairs = some_pairs(tokens * top_k);
        check_scatter(tokens, top_k, width, &pairs, None);
        check_scatter(tokens, top_k, width, &pairs, Some(&weights(pairs.len())));
    }
    check_scatter(4, 2, 3, &[], None);
    check_scatter(0, 2, 3, &[], Some(&[]));
    let mut nothing = Array2::zeros((3, 2));
    ScatterAdd::new()
        .add(
            Array2::zeros((0, 2)).view(),
            &[],
            None,
            0,
            nothing.view_mut(),
        )
        .unwrap();
}

#[test]
fn other_element_types() {
    let ids = array![[7u64], [8], [9]];
    let mut out = Array2::zeros((2, 1));
    gather(ids.view(), &[2, 0], out.view_mut()).unwrap();
    assert_eq!(out, array![[9], [7]]);

    let grouping = Grouping::new(array![[1, 2]].view(), 2).unwrap();
    let mut grouped = Array2::from_elem((4, 1), u64::MAX);
    grouping.group(ids.view(), grouped.view_mut()).unwrap();
    assert_eq!(grouped, array![[7], [0], [8], [9]]);
}

/// Rows and indices of them.
fn case_of_index() -> impl Strategy<Value = (usize, Vec<u32>)> {
    (1..50usize).prop_flat_map(|count| (Just(count), vec(0..count as u32, 0..200)))
}

/// Numbers of sources and instances, and the counts of each two.
fn case_of_counts() -> impl Strategy<Value = ((usize, usize), Vec<u32>)> {
    let dim = (0..6usize, 0..6usize);
    dim.prop_flat_map(|dim| {
        (
            Just(dim),
            vec(prop_oneof![Just(0), 0..30u32], dim.0 * dim.1),
        )
    })
}

/// Tokens, slots and some of the pairs in any order.
fn case_of_pairs() -> impl Strategy<Value = (usize, usize, Vec<u32>)> {
    (1..40usize, 1..6usize).prop_flat_map(|(tokens, top_k)| {
        let all: Vec<u32> = (0..(tokens * top_k) as u32).collect();
        let some = proptest::sample::subsequence(all.clone(), 0..=all.len()).prop_shuffle();
        (Just(tokens), Just(top_k), some)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn gather_is_a_loop(
        (count, index) in case_of_index(),
        width in 0..20usize,
    ) {
        check_gather(count, width, &index);
    }

    #[test]
    fn grouping_is_a_loop(
        (dim, counts) in case_of_counts(),
        multiple in 1..20usize,
        width in 0..10usize,
    ) {
        check_grouping(Array2::from_shape_vec(dim, counts).unwrap().view(), multiple, width);
    }

    #[test]
    fn scatter_is_a_loop(
        (tokens, top_k, pairs) in case_of_pairs(),
        width in 0..10usize,
        weighted: bool,
    ) {
        let weights = weights(pairs.len());
        check_scatter(tokens, top_k, width, &pairs, weighted.then_some(&weights));
    }
}

/// Counts may be a part of a larger table.
#[test]
fn counts_in_any_layout() {
    let table = array![[1, 2, 3, 4], [5, 6, 7, 8]];
    check_grouping(table.slice(s![.., 1..3]), 4, 2);
    check_grouping(table.t(), 4, 2);
}
