//! Arguments that do not fit are typed errors, and then nothing is written.

use std::collections::HashSet;

use lrmoe_compact::{Argument, Error, Grouping, ScatterAdd, gather};
use ndarray::{Array2, array, s};

fn rows(count: usize, width: usize) -> Array2<f32> {
    Array2::from_shape_fn((count, width), |(row, column)| {
        (row * width + column) as f32
    })
}

#[test]
fn gather_misuse() {
    let rows = rows(4, 3);
    let mut out = Array2::from_elem((2, 3), 5.0);
    assert_eq!(
        gather(rows.view(), &[3, 4], out.view_mut()),
        Err(Error::IndexOutOfRange {
            position: 1,
            index: 4,
            rows: 4
        })
    );
    assert_eq!(
        gather(rows.view(), &[1], out.view_mut()),
        Err(Error::Shape {
            argument: Argument::Out,
            found: [2, 3],
            expected: [1, 3]
        })
    );
    assert_eq!(
        gather(rows.slice(s![.., ..2]), &[1, 1], out.slice_mut(s![.., ..2])),
        Err(Error::Layout {
            argument: Argument::Rows
        })
    );
    assert_eq!(
        gather(
            rows.slice(s![..2, ..]),
            &[1, 1, 0],
            Array2::zeros((3, 3)).view_mut().reversed_axes()
        ),
        Err(Error::Layout {
            argument: Argument::Out
        })
    );
    assert_eq!(out, Array2::from_elem((2, 3), 5.0), "nothing is written");
}

#[test]
fn grouping_misuse() {
    assert_eq!(
        Grouping::new(array![[1]].view(), 0).unwrap_err(),
        Error::ZeroMultiple
    );
    let multiple = usize::MAX / 2 + 1;
    assert_eq!(
        Grouping::new(array![[1, 0, 1]].view(), multiple).unwrap_err(),
        Error::TooManyRows {
            instance: 2,
            multiple
        }
    );

    let grouping = Grouping::new(array![[2, 1]].view(), 2).unwrap();
    let mut received = Array2::from_elem((3, 2), 5.0);
    let mut grouped = Array2::from_elem((4, 2), 5.0);
    let shape = |argument, found, expected| {
        Err(Error::Shape {
            argument,
            found,
            expected,
        })
    };
    assert_eq!(
        grouping.group(received.slice(s![..2, ..]), grouped.view_mut()),
        shape(Argument::Received, [2, 2], [3, 2])
    );
    assert_eq!(
        grouping.group(received.view(), grouped.slice_mut(s![..3, ..])),
        shape(Argument::Grouped, [3, 2], [4, 2])
    );
    assert_eq!(
        grouping.ungroup(Array2::zeros((4, 1)).view(), received.view_mut()),
        shape(Argument::Received, [3, 2], [3, 1])
    );
    assert_eq!(
        grouping.ungroup(grouped.slice(s![..;-1, ..]), received.view_mut()),
        Err(Error::Layout {
            argument: Argument::Grouped
        })
    );
    assert!(
        received.iter().chain(&grouped).all(|&value| value == 5.0),
        "nothing is written"
    );
}

#[test]
fn scatter_misuse() {
    let rows = rows(3, 2);
    let mut scatter = ScatterAdd::new();
    let mut into = Array2::from_elem((2, 2), 5.0);
    let mut add = |pairs: &[u32], weights: Option<&[f32]>, top_k| {
        scatter.add(rows.view(), pairs, weights, top_k, into.view_mut())
    };
    assert_eq!(
        add(&[0, 1, 4], None, 2),
        Err(Error::PairOutOfRange {
            row: 2,
            pair: 4,
            tokens: 2,
            top_k: 2
        })
    );
    assert_eq!(
        add(&[0, 1, 2], None, 0),
        Err(Error::PairOutOfRange {
            row: 0,
            pair: 0,
            tokens: 2,
            top_k: 0
        })
    );
    assert_eq!(
        add(&[3, 1, 3], None, 2),
        Err(Error::DuplicatePair {
            pair: 3,
            first: 0,
            second: 2
        })
    );
    assert_eq!(
        add(&[0, 1], None, 2),
        Err(Error::Length {
            argument: Argument::Pairs,
            found: 2,
            rows: 3
        })
    );
    assert_eq!(
        add(&[0, 1, 2], Some(&[1.0; 4]), 2),
        Err(Error::Length {
            argument: Argument::Weights,
            found: 4,
            rows: 3
        })
    );
    let top_k = u32::MAX as usize;
    assert_eq!(
        add(&[0, 1, 2], None, top_k),
        Err(Error::TooManyPairs { tokens: 2, top_k })
    );
    assert_eq!(into, Array2::from_elem((2, 2), 5.0), "nothing is written");

    let mut wide = Array2::zeros((2, 3));
    assert_eq!(
        scatter.add(rows.view(), &[0, 1, 2], None, 2, wide.view_mut()),
        Err(Error::Shape {
            argument: Argument::Rows,
            found: [3, 2],
            expected: [3, 3]
        })
    );
    assert_eq!(
        scatter.add(
            rows.view(),
            &[0, 1, 2],
            None,
            2,
            wide.slice_mut(s![.., ..2])
        ),
        Err(Error::Layout {
            argument: Argument::Into
        })
    );
    // The scratch is good after errors.
    scatter
        .add(rows.view(), &[0, 1, 3], None, 2, into.view_mut())
        .unwrap();
    assert_eq!(into[[1, 1]], 5.0 + rows[[2, 1]]);
}

#[test]
fn errors_state_the_values() {
    let messages: HashSet<String> = [
        Error::Shape {
            argument: Argument::Out,
            found: [2, 3],
            expected: [1, 3],
        },
        Error::Layout {
            argument: Argument::Into,
        },
        Error::TooManyPairs {
            tokens: 2,
            top_k: 9,
        },
    ]
    .map(|error| error.to_string())
    .into();
    let expected = [
        "out has shape [2, 3], expected [1, 3]",
        "into is not in standard layout (row-major, no gaps)",
        "2 tokens of 9 slots are more than 4294967295 pairs",
    ];
    assert_eq!(messages, expected.map(String::from).into());
}
