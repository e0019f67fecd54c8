//! Pairs, shares of quotas, and names.

use lrmoe_metric::{Error, Method, Pairs, Rescale, Score, local_quotas};
use ndarray::{Array2, array};

use super::{expect, length};

#[test]
fn pairs_of_nothing_and_of_extreme_ids() {
    let new = |ids: &Array2<i32>, experts, first| {
        let gates = Array2::from_elem(ids.dim(), f32::NAN);
        let pairs = Pairs::new(ids.view(), gates.view(), experts, first);
        pairs.map(|pairs| (pairs.len(), pairs.loads()))
    };
    let id = |id, experts| {
        Err(Error::ExpertId {
            token: 0,
            slot: 0,
            id,
            experts,
        })
    };
    let nothing = Array2::zeros((0, 8));
    let cases = [
        (
            "no tokens, no experts",
            new(&nothing, 0, 0),
            Ok((0, vec![])),
        ),
        (
            "no tokens, last ids",
            new(&nothing, 1, u64::MAX),
            Ok((0, vec![0])),
        ),
        (
            "all masked, no experts",
            new(&array![[-1, -1]], 0, 0),
            Ok((2, vec![])),
        ),
        ("an id without experts", new(&array![[0]], 0, 0), id(0, 0)),
        (
            "smallest id",
            new(&array![[i32::MIN]], 9, 0),
            id(i32::MIN, 9),
        ),
        (
            "largest id",
            new(&array![[i32::MAX]], 9, 0),
            id(i32::MAX, 9),
        ),
        (
            "past the last id",
            new(&array![[300]], 300, 0),
            id(300, 300),
        ),
        (
            "more slots than experts",
            new(&array![[0, 1, 0]], 2, 0),
            Err(Error::RepeatedExpert {
                token: 0,
                expert: 0,
            }),
        ),
        (
            "ids past 64 bits",
            new(&array![[0]], 1, u64::MAX),
            Err(Error::PairIds {
                first_pair: u64::MAX,
                pairs: 1,
            }),
        ),
    ];
    for (case, found, expected) in cases {
        expect(case, found, expected);
    }
}

#[test]
fn shares_of_quotas() {
    let shares =
        |quotas: &[u32], loads: Array2<u32>, rank| local_quotas(quotas, loads.view(), rank);
    let cases = [
        (
            "no ranks",
            shares(&[], Array2::zeros((0, 0)), 0),
            Err(Error::Rank { rank: 0, ranks: 0 }),
        ),
        (
            "no experts",
            shares(&[], Array2::zeros((1, 0)), 0),
            Ok(vec![]),
        ),
        (
            "no pairs",
            shares(&[u32::MAX], array![[0], [0]], 1),
            Ok(vec![0]),
        ),
        (
            "last rank there is",
            shares(&[1], array![[1]], usize::MAX),
            Err(Error::Rank {
                rank: usize::MAX,
                ranks: 1,
            }),
        ),
        (
            "quotas",
            shares(&[1, 1, 1], array![[1, 1]], 0),
            length("quotas", 3, 2),
        ),
    ];
    for (case, found, expected) in cases {
        expect(case, found, expected);
    }
    // Columns of a transposed view are as good as others.
    let loads = array![[3, 7], [1, 1]];
    assert_eq!(local_quotas(&[5, 1], loads.t(), 1).unwrap(), [3, 0]);
}

#[test]
fn names_of_nothing() {
    for name in ["", " top", "TOP", "down_grad"] {
        let named = || name.to_owned();
        expect(
            name,
            name.parse::<Score>(),
            Err(Error::UnknownScore { name: named() }),
        );
        expect(
            name,
            name.parse::<Method>(),
            Err(Error::UnknownMethod { name: named() }),
        );
        expect(
            name,
            name.parse::<Rescale>(),
            Err(Error::UnknownRescale { name: named() }),
        );
    }
}
