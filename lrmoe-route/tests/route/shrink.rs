//! What leaves when capacities are too small.

use crate::case::{Case, Limits};
use lrmoe_route::{Error, Placement, route, shrink};
use ndarray::{Axis, array};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn takes_what_does_not_fit_and_no_more(seed: u64) {
        let case = Case::random(seed, Limits { ranks: 10, experts: 12, pairs: 500 });
        let capacities = case.capacities.clone().unwrap_or(vec![u64::MAX; case.placement.ranks()]);
        let shortfall = match route(case.counts.view(), &case.placement, &case.topology, Some(&capacities)) {
            Ok(_) => 0,
            Err(Error::NoRoom { shortfall, .. }) => shortfall,
            Err(error) => panic!("{error}"),
        };
        let shrunk = shrink(case.counts.view(), &case.placement, &capacities).unwrap();
        prop_assert_eq!(&shrunk.counts + &shrunk.left, case.counts.clone());
        prop_assert_eq!(shrunk.counts.sum_axis(Axis(0)).to_vec(), shrunk.quotas.clone());
        prop_assert_eq!(u64::from(shrunk.left.sum()), shortfall);
        let fits = route(shrunk.counts.view(), &case.placement, &case.topology, Some(&capacities));
        prop_assert!(fits.is_ok());
    }
}

#[test]
fn competing_experts_keep_equal_shares() {
    // Experts 1 and 2 compete for rank 1, expert 0 has room on rank 0.
    let placement = Placement::new(3, vec![vec![0], vec![0, 1, 2]]).unwrap();
    let counts = array![[10, 20, 5], [10, 10, 15]];
    let shrunk = shrink(counts.view(), &placement, &[20, 30]).unwrap();
    assert_eq!(shrunk.quotas, [20, 18, 12]);
    assert_eq!(shrunk.counts, array![[10, 12, 3], [10, 6, 9]]);
    assert_eq!(shrunk.left, array![[0, 8, 2], [0, 4, 6]]);
}

#[test]
fn shares_by_largest_remainder_then_lower_id() {
    let placement = Placement::new(3, vec![vec![0, 1, 2]]).unwrap();
    let shrunk = shrink(array![[1, 1, 1]].view(), &placement, &[2]).unwrap();
    assert_eq!(shrunk.quotas, [1, 1, 0]);
    let shrunk = shrink(array![[3, 3, 1]].view(), &placement, &[3]).unwrap();
    assert_eq!(shrunk.quotas, [1, 1, 1]);
    let shrunk = shrink(
        array![[u32::MAX / 2, u32::MAX / 2, 1]].view(),
        &placement,
        &[0],
    )
    .unwrap();
    assert_eq!(shrunk.quotas, [0, 0, 0]);
}

#[test]
fn splits_pairs_by_id() {
    let placement = Placement::new(2, vec![vec![0, 1]]).unwrap();
    let shrunk = shrink(array![[4, 2]].view(), &placement, &[3]).unwrap();
    assert_eq!(shrunk.counts, array![[2, 1]]);
    let ids = [0, -1, 1, 0, 0, 1, 0];
    let (stay, left) = shrunk.split(0, &ids, &[0, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(stay, [0, 2, 3]);
    assert_eq!(left, [4, 5, 6]);

    let error = |source, pairs: &[u32]| shrunk.split(source, &ids, pairs).unwrap_err();
    assert_eq!(error(1, &[]), Error::RankOutOfRange { rank: 1, ranks: 1 });
    assert_eq!(
        error(0, &[0, 1]),
        Error::ExpertOutOfRange {
            pair: 1,
            expert: -1,
            experts: 2
        }
    );
    assert_eq!(
        error(0, &[0, 2]),
        Error::PairCount {
            source_rank: 0,
            expert: 0,
            expected: 4,
            got: 1
        }
    );
}

#[test]
fn refuses_inputs_that_do_not_belong_together() {
    let placement = Placement::new(2, vec![vec![0, 1]]).unwrap();
    let error = shrink(array![[1, 1]].view(), &placement, &[]).unwrap_err();
    assert_eq!(
        error,
        Error::Mismatch {
            what: "capacities",
            expected: 1,
            got: 0
        }
    );
    let error = shrink(array![[u32::MAX, 1]].view(), &placement, &[1]).unwrap_err();
    assert_eq!(error, Error::TooManyPairs { pairs: 1 << 32 });
}
