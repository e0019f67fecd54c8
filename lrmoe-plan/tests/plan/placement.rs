//! Placements and their largest rank load.

use lrmoe_plan::ndarray::array;
use lrmoe_plan::{Error, Fixed, Loads, Placement};
use proptest::prelude::*;

use crate::case::{cases, experts};
use crate::oracle::largest_load;

#[test]
fn instances_are_numbered_by_rank_and_expert() {
    let placement = Placement::new(3, vec![vec![2, 0], vec![], vec![1, 2]]).unwrap();
    assert_eq!(
        (
            placement.ranks(),
            placement.experts(),
            placement.instances()
        ),
        (3, 3, 4)
    );
    assert_eq!(experts(&placement), [&[0, 2][..], &[], &[1, 2]]);
    assert_eq!([0, 1, 2].map(|r| placement.on_rank(r)), [0..2, 2..2, 2..4]);
    assert_eq!([0, 1, 2, 3].map(|i| placement.expert_of(i)), [0, 2, 1, 2]);
    assert_eq!([0, 1, 2, 3].map(|i| placement.rank_of(i)), [0, 0, 2, 2]);
    assert_eq!(placement.instances_of(2), [1, 3]);
    assert_eq!(placement.instance_on(2, 2), Some(3));
    assert_eq!(placement.instance_on(1, 2), None);
}

#[test]
fn bad_placements() {
    let new = Placement::new;
    assert!(matches!(new(1, vec![]), Err(Error::NoRanks)));
    assert!(matches!(new(0, vec![vec![]]), Err(Error::NoExperts)));
    assert!(matches!(
        new(2, vec![vec![0]]),
        Err(Error::MissingExpert { expert: 1 })
    ));
    assert!(matches!(
        new(usize::MAX, vec![vec![0, 2], vec![1, 0]]),
        Err(Error::MissingExpert { expert: 3 })
    ));
    assert!(matches!(
        new(1, vec![vec![0], vec![0, 0]]),
        Err(Error::DuplicateExpert { rank: 1, expert: 0 })
    ));
    let error = new(2, vec![vec![0, 1], vec![7]]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "expert 7 on rank 1 is out of range: there are 2 experts"
    );
}

#[test]
fn mismatched_loads_are_refused() {
    let placement = Fixed::placement(3, 2).unwrap();
    let loads = Loads::new(array![[1, 2]]).unwrap();
    let result = placement.largest_load(loads.per_expert());
    assert!(matches!(
        result,
        Err(Error::Mismatch {
            expected: 3,
            got: 2,
            ..
        })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn largest_load_is_the_max_flow_bound((loads, _, placement, _) in cases()) {
        prop_assert_eq!(placement.largest_load(&loads).unwrap(), largest_load(&placement, &loads));
    }
}
