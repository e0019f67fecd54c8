//! Shares of the quotas for each rank.

use std::cmp::Reverse;

use lrmoe_metric::{Error, MASKED, Pairs, Solo, local_quotas, select_keys};
use ndarray::{Array2, Axis, array};
use proptest::prelude::*;

fn shares(quotas: &[u32], loads: &Array2<u32>) -> Array2<u32> {
    let rows: Vec<_> = (0..loads.nrows())
        .map(|rank| local_quotas(quotas, loads.view(), rank).unwrap())
        .collect();
    Array2::from_shape_vec(loads.dim(), rows.concat()).unwrap()
}

/// Deals out of the whole shares first, then one by one in the order of the remainders.
fn by_sorting(quota: u32, loads: &[u32]) -> Vec<u32> {
    let total: u128 = loads.iter().map(|&load| u128::from(load)).sum();
    let quota = u128::from(quota).min(total);
    let product = |rank: usize| u128::from(loads[rank]) * quota;
    let whole = |rank: usize| (product(rank).checked_div(total)).unwrap_or(0) as u32;
    let mut shares: Vec<u32> = (0..loads.len()).map(whole).collect();
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&rank| Reverse(product(rank).checked_rem(total)));
    let given: u128 = shares.iter().map(|&share| u128::from(share)).sum();
    for &rank in &order[..(quota - given) as usize] {
        shares[rank] += 1;
    }
    shares
}

fn load() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0),
        Just(1),
        0..20u32,
        0..1000u32,
        any::<u32>(),
        Just(u32::MAX)
    ]
}

fn case() -> impl Strategy<Value = (Vec<u32>, Array2<u32>)> {
    (1..=64usize, 0..=6usize).prop_flat_map(|(ranks, experts)| {
        let loads = prop::collection::vec(load(), ranks * experts);
        let loads = loads.prop_map(move |loads| Array2::from_shape_vec((ranks, experts), loads));
        (
            prop::collection::vec(load(), experts),
            loads.prop_map(Result::unwrap),
        )
    })
}

proptest! {
    #[test]
    fn sum_to_the_quotas_by_largest_remainder((quotas, loads) in case()) {
        let shares = shares(&quotas, &loads);
        for (expert, &quota) in quotas.iter().enumerate() {
            let loads = loads.column(expert).to_vec();
            let found = shares.column(expert).to_vec();
            let total: u64 = loads.iter().map(|&load| u64::from(load)).sum();
            let sum: u64 = found.iter().map(|&share| u64::from(share)).sum();
            prop_assert_eq!(sum, total.min(quota.into()));
            prop_assert!(found.iter().zip(&loads).all(|(share, load)| share <= load));
            prop_assert_eq!(found, by_sorting(quota, &loads));
        }
    }

    /// Selections of all ranks, each alone, keep as many pairs as one over all ranks.
    #[test]
    fn ranks_alone_keep_the_quotas(
        ids in prop::collection::vec(prop::collection::vec(prop_oneof![Just(MASKED), 0..4i32], 0..40), 1..9),
        quotas in prop::collection::vec(0..50u32, 4),
    ) {
        let count = |ids: &[i32], expert| ids.iter().filter(|&&id| id == expert).count() as u32;
        let loads = Array2::from_shape_fn((ids.len(), 4), |(rank, expert)| count(&ids[rank], expert as i32));
        let mut kept = [0; 4];
        for (rank, ids) in ids.iter().enumerate() {
            let ids = Array2::from_shape_vec((ids.len(), 1), ids.clone()).unwrap();
            let gates = Array2::zeros(ids.dim());
            let pairs = Pairs::new(ids.view(), gates.view(), 4, 0).unwrap();
            let mine = local_quotas(&quotas, loads.view(), rank).unwrap();
            let keys: Vec<u32> = (0..ids.len() as u32).rev().collect();
            let selection = select_keys(&pairs, &keys, &mine, &mut Solo).unwrap();
            selection.pairs.iter().for_each(|&pair| kept[ids[[pair as usize, 0]] as usize] += 1);
        }
        let expected: Vec<u32> = quotas
            .iter()
            .zip(loads.sum_axis(Axis(0)))
            .map(|(&quota, load)| load.min(quota))
            .collect();
        prop_assert_eq!(kept.to_vec(), expected);
    }
}

#[test]
fn ties_go_to_the_lower_rank() {
    let loads = array![[3], [3], [3], [3]];
    assert_eq!(shares(&[6], &loads), array![[2], [2], [1], [1]]);
    assert_eq!(shares(&[0], &loads), array![[0], [0], [0], [0]]);
    assert_eq!(shares(&[12], &loads), loads);
    assert_eq!(shares(&[u32::MAX], &loads), loads);
}

#[test]
fn the_largest_loads_do_not_overflow() {
    let loads = Array2::from_elem((64, 1), u32::MAX);
    let found = shares(&[u32::MAX], &loads);
    let sum: u64 = found.iter().map(|&share| u64::from(share)).sum();
    assert_eq!(sum, u32::MAX.into());
    assert_eq!(
        (found[[0, 0]], found[[63, 0]]),
        (u32::MAX / 64 + 1, u32::MAX / 64)
    );
}

#[test]
fn one_rank_has_all() {
    assert_eq!(
        local_quotas(&[2, 9, 0], array![[5, 4, 3]].view(), 0).unwrap(),
        [2, 4, 0]
    );
}

#[test]
fn inputs_that_do_not_belong_together_are_refused() {
    let loads = array![[1, 2], [3, 4]];
    let rank = local_quotas(&[1, 1], loads.view(), 2).unwrap_err();
    assert!(matches!(rank, Error::Rank { rank: 2, ranks: 2 }));
    assert_eq!(
        rank.to_string(),
        "rank 2 is out of range: there are 2 ranks"
    );
    let length = local_quotas(&[1], loads.view(), 0).unwrap_err();
    assert_eq!(length.to_string(), "1 quotas, expected 2");
}
