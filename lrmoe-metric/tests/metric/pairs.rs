//! What pairs are refused.

use lrmoe_metric::{Error, MASKED, Pairs};
use ndarray::{Array2, array};

fn error(ids: &Array2<i32>, experts: usize) -> Error {
    let gates = Array2::zeros(ids.dim());
    Pairs::new(ids.view(), gates.view(), experts, 0).unwrap_err()
}

#[test]
fn pairs_are_flat_and_counted() {
    let ids = array![[1, 0], [MASKED, 1], [MASKED, MASKED]];
    let gates = array![[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]];
    let pairs = Pairs::new(ids.view(), gates.view(), 3, 40).unwrap();
    assert_eq!((pairs.tokens(), pairs.top_k(), pairs.experts()), (3, 2, 3));
    assert_eq!(
        (pairs.len(), pairs.is_empty(), pairs.first_pair()),
        (6, false, 40)
    );
    assert_eq!(pairs.expert_ids(), [1, 0, -1, 1, -1, -1]);
    assert_eq!(pairs.gate_weights(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
    assert_eq!(pairs.loads(), [1, 2, 0]);
    let (ids, gates) = (Array2::zeros((0, 2)), Array2::zeros((0, 2)));
    let none = Pairs::new(ids.view(), gates.view(), 3, 40).unwrap();
    assert_eq!((none.tokens(), none.len(), none.is_empty()), (0, 0, true));
}

#[test]
fn bad_ids_are_named() {
    let high = error(&array![[0, 1], [1, 2]], 2);
    assert_eq!(
        high.to_string(),
        "expert id 2 in slot 1 of token 1 is neither -1 nor in 0..2"
    );
    let low = error(&array![[-2]], 2);
    assert_eq!(
        low.to_string(),
        "expert id -2 in slot 0 of token 0 is neither -1 nor in 0..2"
    );
    let twice = error(&array![[0, 1, 2], [2, -1, 2]], 3);
    assert_eq!(twice.to_string(), "token 1 names expert 2 more than once");
}

#[test]
fn the_first_bad_token_is_named() {
    let mut ids = Array2::zeros((200_000, 1));
    ids[[199_999, 0]] = 5;
    ids[[150_000, 0]] = 7;
    let first = error(&ids, 1);
    assert!(
        matches!(
            first,
            Error::ExpertId {
                token: 150_000,
                id: 7,
                ..
            }
        ),
        "{first}"
    );
}

/// A number of slots that does not divide the pairs of a parallel task.
#[test]
fn a_bad_token_is_found_in_any_part() {
    for token in [0, 5460, 5461, 5462, 60_000, 99_999] {
        let mut ids = Array2::from_shape_fn((100_000, 3), |(_, slot)| slot as i32);
        ids[[token, 2]] = 3;
        let found = error(&ids, 3);
        assert!(
            matches!(found, Error::ExpertId { token: at, slot: 2, .. } if at == token),
            "{found}, expected token {token}"
        );
    }
}

#[test]
fn bad_shapes_are_refused() {
    let ids = array![[0, 1], [1, 0]];
    let gates = Array2::zeros((2, 3));
    let shape = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap_err();
    assert_eq!(
        shape.to_string(),
        "gate weights have shape [2, 3], expert ids [2, 2]"
    );
    let gates = Array2::zeros((2, 2));
    let layout = Pairs::new(ids.t(), gates.view(), 2, 0).unwrap_err();
    assert_eq!(
        layout.to_string(),
        "expert ids are not in standard (row-major) layout"
    );
    let layout = Pairs::new(ids.view(), gates.t(), 2, 0).unwrap_err();
    assert_eq!(
        layout.to_string(),
        "gate weights are not in standard (row-major) layout"
    );
    assert!(matches!(error(&Array2::zeros((3, 0)), 2), Error::NoSlots));
    let most = Pairs::new(ids.view(), gates.view(), 2, u64::MAX - 3).unwrap_err();
    assert!(matches!(most, Error::PairIds { pairs: 4, .. }), "{most}");
}
