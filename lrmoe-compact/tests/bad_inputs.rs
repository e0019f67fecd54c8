//! What every public entry point does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: shapes, layouts, indices and pairs that do not fit (`misuse.rs`).

use lrmoe_compact::{Argument, Error, Grouping, ScatterAdd, gather};
use ndarray::{Array2, array, s};

#[test]
fn gathers_of_nothing() {
    let gathered = |rows: Array2<f32>, index: &[u32]| {
        let mut out = Array2::from_elem((index.len(), rows.ncols()), 5.0);
        gather(rows.view(), index, out.view_mut()).map(|()| out)
    };
    let outside = |index| {
        Err(Error::IndexOutOfRange {
            position: 0,
            index,
            rows: 0,
        })
    };
    let cases = [
        (
            "no index",
            gathered(Array2::zeros((3, 2)), &[]),
            Ok(Array2::zeros((0, 2))),
        ),
        (
            "no rows",
            gathered(Array2::zeros((0, 2)), &[]),
            Ok(Array2::zeros((0, 2))),
        ),
        (
            "a row of none",
            gathered(Array2::zeros((0, 2)), &[0]),
            outside(0),
        ),
        (
            "the last index of none",
            gathered(Array2::zeros((0, 0)), &[u32::MAX]),
            outside(u32::MAX),
        ),
        (
            "no width",
            gathered(Array2::zeros((3, 0)), &[2, 2]),
            Ok(Array2::zeros((2, 0))),
        ),
    ];
    for (case, found, expected) in cases {
        assert_eq!(found, expected, "{case}");
    }
    // Whatever the numbers are, they are copied.
    let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, f32::from_bits(1)];
    let rows = Array2::from_shape_vec((4, 1), odd.to_vec()).unwrap();
    let found = gathered(rows, &[3, 0, 1, 2]).unwrap();
    let bits: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
    assert_eq!(bits, [odd[3], odd[0], odd[1], odd[2]].map(f32::to_bits));
}

#[test]
fn groupings_of_nothing_and_of_all_there_is() {
    let most = u32::MAX as usize;
    let of = |counts: Array2<u32>, multiple| {
        let grouping = Grouping::new(counts.view(), multiple);
        grouping.map(|grouping| (grouping.offsets().to_vec(), grouping.received_rows()))
    };
    let too_many = |instance, multiple| Err(Error::TooManyRows { instance, multiple });
    let cases = [
        (
            "no sources",
            of(Array2::zeros((0, 2)), 16),
            Ok((vec![0, 0, 0], 0)),
        ),
        (
            "no instances",
            of(Array2::zeros((2, 0)), 16),
            Ok((vec![0], 0)),
        ),
        ("nothing", of(Array2::zeros((0, 0)), 1), Ok((vec![0], 0))),
        (
            "no rows",
            of(Array2::zeros((2, 2)), usize::MAX),
            Ok((vec![0, 0, 0], 0)),
        ),
        (
            "multiple of 0",
            of(Array2::zeros((0, 0)), 0),
            Err(Error::ZeroMultiple),
        ),
        (
            "past 32 bits",
            of(array![[u32::MAX], [u32::MAX]], 1),
            Ok((vec![0, 2 * most], 2 * most)),
        ),
        (
            "padded to all",
            of(array![[1]], usize::MAX),
            Ok((vec![0, usize::MAX], 1)),
        ),
        (
            "past all",
            of(array![[1, 1]], usize::MAX),
            too_many(1, usize::MAX),
        ),
    ];
    for (case, found, expected) in cases {
        assert_eq!(found, expected, "{case}");
    }
    // Counts may lie in any order.
    let counts = array![[2, 9, 1], [3, 9, 0]];
    let grouping = Grouping::new(counts.slice(s![.., ..;2]), 4).unwrap();
    assert_eq!(
        (grouping.offsets(), grouping.received_rows()),
        (&[0, 8, 12][..], 6)
    );
    let turned = Grouping::new(counts.slice(s![.., ..;2]).t(), 1).unwrap();
    assert_eq!(turned.offsets(), [0, 3, 6]);

    let empty = Grouping::new(Array2::zeros((0, 1)).view(), 8).unwrap();
    let mut out = Array2::<f32>::zeros((0, 3));
    assert_eq!(
        empty.group(Array2::zeros((0, 3)).view(), out.view_mut()),
        Ok(())
    );
    assert_eq!(
        empty.ungroup(Array2::zeros((0, 3)).view(), out.view_mut()),
        Ok(())
    );
    // Of rows that nobody could hold, a buffer that somebody has is too small.
    let huge = Grouping::new(array![[u32::MAX]].view(), 1).unwrap();
    let found = huge.group(Array2::<f32>::zeros((1, 3)).view(), out.view_mut());
    let expected = Err(Error::Shape {
        argument: Argument::Received,
        found: [1, 3],
        expected: [most, 3],
    });
    assert_eq!(found, expected);
}

#[test]
fn sums_of_nothing_and_of_no_numbers() {
    let mut scatter = ScatterAdd::new();
    let mut added = |rows: &Array2<f32>,
                     pairs: &[u32],
                     weights: Option<&[f32]>,
                     top_k,
                     shape: (usize, usize)| {
        let mut into = Array2::from_elem(shape, 1.0);
        scatter
            .add(rows.view(), pairs, weights, top_k, into.view_mut())
            .map(|()| into)
    };
    let outside = |pair, tokens, top_k| {
        Err(Error::PairOutOfRange {
            row: 0,
            pair,
            tokens,
            top_k,
        })
    };
    let (none, one) = (Array2::zeros((0, 2)), array![[2.0, 3.0]]);
    let ones = |shape| Ok(Array2::ones(shape));
    let cases = [
        ("no rows", added(&none, &[], None, 2, (3, 2)), ones((3, 2))),
        (
            "no rows, weights of none",
            added(&none, &[], Some(&[]), 2, (3, 2)),
            ones((3, 2)),
        ),
        (
            "no tokens",
            added(&none, &[], None, usize::MAX, (0, 2)),
            ones((0, 2)),
        ),
        (
            "a pair of no tokens",
            added(&one, &[0], None, 2, (0, 2)),
            outside(0, 0, 2),
        ),
        (
            "a pair of no slots",
            added(&one, &[0], None, 0, (3, 2)),
            outside(0, 3, 0),
        ),
        (
            "the last pair",
            added(&one, &[u32::MAX], None, 1, (3, 2)),
            outside(u32::MAX, 3, 1),
        ),
        (
            "slots past usize",
            added(&none, &[], None, usize::MAX, (3, 2)),
            Err(Error::TooManyPairs {
                tokens: 3,
                top_k: usize::MAX,
            }),
        ),
        (
            "no width",
            added(&Array2::zeros((1, 0)), &[4], None, 2, (3, 0)),
            ones((3, 0)),
        ),
        (
            "weight of 0",
            added(&one, &[2], Some(&[0.0]), 1, (3, 2)),
            ones((3, 2)),
        ),
    ];
    for (case, found, expected) in cases {
        assert_eq!(found, expected, "{case}");
    }
    // Pairs past 32 bits, of rows without numbers, which take no memory.
    let tokens = 1 << 33;
    let mut into = Array2::<f32>::zeros((tokens, 0));
    let found = scatter.add(Array2::zeros((0, 0)).view(), &[], None, 1, into.view_mut());
    assert_eq!(found, Err(Error::TooManyPairs { tokens, top_k: 1 }));

    // NaN and infinity reach their own token and no other, whatever the weight.
    let rows = array![[f32::NAN], [f32::INFINITY]];
    let mut into = Array2::ones((3, 1));
    scatter
        .add(rows.view(), &[0, 2], Some(&[0.0, -1.0]), 1, into.view_mut())
        .unwrap();
    assert!(into[[0, 0]].is_nan());
    assert_eq!([into[[1, 0]], into[[2, 0]]], [1.0, f32::NEG_INFINITY]);
}

/// More pairs than 16 bits count, of the last token's last slots.
#[test]
fn many_pairs() {
    let (tokens, top_k) = (40_000, 4);
    let pairs: Vec<u32> = (0..tokens as u32 * 4).rev().step_by(2).collect();
    let rows = Array2::from_shape_fn((pairs.len(), 1), |(row, _)| pairs[row] as f32);
    let mut into = Array2::zeros((tokens, 1));
    ScatterAdd::new()
        .add(rows.view(), &pairs, None, top_k, into.view_mut())
        .unwrap();
    let expected = |token: usize| (2 * 4 * token + 1 + 3) as f32;
    assert!((0..tokens).all(|token| into[[token, 0]] == expected(token)));
}

/// Elements past `i32::MAX`, of bytes that nobody has written and that so take no memory, but for the last row.
#[test]
fn int32_holds_38000_tokens_of_8_slots_of_width_7168() {
    let (pairs, width) = (38_000 * 8, 7168);
    assert!(pairs * width > i32::MAX as usize);
    let mut rows = Array2::<u8>::zeros((pairs, width));
    let last = pairs - 1;
    rows.row_mut(last)
        .iter_mut()
        .zip(0..)
        .for_each(|(value, column)| *value = (column % 251) as u8);
    let mut out = Array2::<u8>::ones((2, width));
    gather(rows.view(), &[last as u32, 0], out.view_mut()).unwrap();
    assert_eq!(out.row(0), rows.row(last));
    assert!(out.row(1).iter().all(|&value| value == 0));
    // The same rows as one source's last and first.
    let grouping = Grouping::new(array![[1, last as u32], [0, 0]].view(), 16).unwrap();
    assert_eq!(grouping.offsets(), [0, 16, 16 + pairs]);
    assert_eq!(grouping.received_rows(), pairs);
}
