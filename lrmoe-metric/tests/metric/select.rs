//! The selection methods: weights, bias, determinism.

use lrmoe_metric::{
    Draw, Error, Exchange, Method, Pairs, Score, Scores, Selection, Selector, Solo, SquaredNorm,
    early_keys, score, score_into, select,
};
use ndarray::{Array2, s};

const DRAW: Draw = Draw {
    seed: 7,
    step: 3,
    layer: 1,
};

/// Gate weights over several orders of magnitude, one zero among them.
fn gates(pairs: usize) -> Array2<f32> {
    Array2::from_shape_fn((pairs, 1), |(pair, _)| (pair * pair * pair) as f32 / 100.0)
}

/// Runs on the pairs of one expert with their gate weights as scores.
fn with_gates<T>(gates: &Array2<f32>, run: impl FnOnce(&Pairs<'_>, &Scores) -> T) -> T {
    let ids = Array2::zeros(gates.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    run(
        &pairs,
        &score(Score::Gate, &pairs, None, None, &mut Solo).unwrap(),
    )
}

/// Largest distance, in standard errors, of the mean of `weight * kept` from 1 over the pairs.
fn bias(weight: impl Fn(f32) -> f64) -> f64 {
    const DRAWS: u32 = 20_000;
    const QUOTA: u32 = 8;
    let gates = gates(24);
    let mut sums = vec![(0.0, 0.0); gates.len()];
    with_gates(&gates, |pairs, scores| {
        for step in 0..DRAWS {
            let draw = Draw { step, ..DRAW };
            let kept = select(Method::Priority, pairs, scores, &[QUOTA], draw, &mut Solo).unwrap();
            assert_eq!(kept.pairs.len() as u32, QUOTA);
            for (pair, &found) in kept.pairs.iter().zip(&kept.weights) {
                let value = weight(found);
                let (sum, squares) = &mut sums[*pair as usize];
                *sum += value;
                *squares += value * value;
            }
        }
    });
    let draws = f64::from(DRAWS);
    // Pairs with the smallest scores are kept too rarely for the mean to be normal; 1e-4 allows for the rounding of 1/u.
    let tested = sums.iter().skip(8);
    tested
        .map(|(sum, squares)| {
            let mean = sum / draws;
            let error = ((squares / draws - mean * mean) / draws).sqrt();
            (mean - 1.0).abs() / (error + 1e-4)
        })
        .fold(0.0, f64::max)
}

#[test]
fn priority_is_unbiased() {
    let found = bias(f64::from);
    assert!(found < 4.0, "{found} standard errors");
}

#[test]
fn a_wrong_weight_would_show() {
    for (name, found) in [
        ("1", bias(|_| 1.0)),
        ("n/q", bias(|_| 3.0)),
        (
            "the square of the score",
            bias(|weight| f64::from(weight).powi(2)),
        ),
        ("5 % too large", bias(|weight| 1.05 * f64::from(weight))),
    ] {
        assert!(found > 6.0, "weight {name}: {found} standard errors");
    }
}

/// Estimates of a total from the kept pairs, with weights, are near it.
#[test]
fn weighted_scores_sum_to_the_total() {
    let gates = Array2::from_shape_fn((4000, 1), |(pair, _)| 1.0 + (pair % 97) as f32);
    let total: f32 = gates.sum();
    with_gates(&gates, |pairs, scores| {
        let kept = select(Method::Priority, pairs, scores, &[1000], DRAW, &mut Solo).unwrap();
        let weighted = kept.pairs.iter().zip(&kept.weights);
        let estimate: f32 = weighted
            .map(|(&pair, weight)| gates[[pair as usize, 0]] * weight)
            .sum();
        assert!(
            (estimate / total - 1.0).abs() < 0.02,
            "{estimate} for {total}"
        );
        assert!(kept.weights.iter().all(|&weight| weight >= 1.0));
    });
}

#[test]
fn random_samples_uniformly() {
    let ids = Array2::zeros((4000, 1));
    let gates = Array2::zeros((4000, 1));
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let scores = score(Score::Random, &pairs, None, None, &mut Solo).unwrap();
    let priority = select(Method::Priority, &pairs, &scores, &[1000], DRAW, &mut Solo).unwrap();
    assert!(
        priority
            .weights
            .iter()
            .all(|weight| (weight / 4.0 - 1.0).abs() < 0.1)
    );
    let top = select(Method::Top, &pairs, &scores, &[1000], DRAW, &mut Solo).unwrap();
    assert_eq!(top.weights, [1.0; 1000]);
    let low = top.pairs.iter().filter(|&&pair| pair < 2000).count();
    assert!(
        (400..600).contains(&low),
        "{low} of 1000 from the lower half"
    );
    // Priority keeps the smallest u, top the largest: with all others left to priority, they meet in a tie of 1/u at most.
    let others = select(Method::Priority, &pairs, &scores, &[3000], DRAW, &mut Solo).unwrap();
    let both = top.pairs.iter().filter(|pair| others.pairs.contains(pair));
    let both = both.count();
    assert!(both <= 2, "{both} pairs are kept for large and for small u");
    let other = select(
        Method::Top,
        &pairs,
        &scores,
        &[1000],
        Draw { layer: 2, ..DRAW },
        &mut Solo,
    );
    assert_ne!(top, other.unwrap());
}

#[test]
fn weights_of_extreme_scores_are_one() {
    let gates = Array2::from_shape_vec((4, 1), vec![0.0, f32::INFINITY, 0.0, 0.0]).unwrap();
    with_gates(&gates, |pairs, scores| {
        let kept = select(Method::Priority, pairs, scores, &[3], DRAW, &mut Solo).unwrap();
        assert_eq!(
            kept,
            Selection {
                pairs: vec![0, 1, 2],
                weights: vec![1.0; 3]
            }
        );
    });
    let gates = Array2::from_elem((3, 1), f32::INFINITY);
    with_gates(&gates, |pairs, scores| {
        let kept = select(Method::Priority, pairs, scores, &[2], DRAW, &mut Solo).unwrap();
        assert_eq!(
            kept,
            Selection {
                pairs: vec![0, 1],
                weights: vec![1.0; 2]
            }
        );
    });
}

#[test]
fn keeping_all_has_weight_one() {
    with_gates(&gates(50), |pairs, scores| {
        for method in [Method::Priority, Method::Top] {
            let kept = select(method, pairs, scores, &[50], DRAW, &mut Solo).unwrap();
            assert_eq!(
                kept,
                Selection {
                    pairs: (0..50).collect(),
                    weights: vec![1.0; 50]
                }
            );
            let none = select(method, pairs, scores, &[0], DRAW, &mut Solo).unwrap();
            assert_eq!(none, Selection::default());
        }
    });
}

/// Pairs of all ranks with their weights.
fn spread(method: Method, kind: Score, ranks: usize, threads: usize) -> Vec<(u32, f32)> {
    let tokens = 9000;
    let ids = Array2::from_shape_fn((tokens, 4), |(t, slot)| ((t * 5 + slot * 7) % 28) as i32);
    let gates = Array2::from_shape_fn((tokens, 4), |(t, slot)| ((t * 31 + slot) % 101) as f32);
    let quotas: Vec<_> = (0..28).map(|expert| expert * 60).collect();
    let rows = crate::common::even(tokens, ranks);
    let found = crate::common::run(ranks, |exchange| {
        let rows = rows[exchange.rank()].clone();
        let first = rows.start * 4;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let kept = pool.install(|| {
            let ids = ids.slice(s![rows.clone(), ..]);
            let pairs = Pairs::new(ids, gates.slice(s![rows, ..]), 28, first as u64).unwrap();
            let scores = score(kind, &pairs, None, None, exchange).unwrap();
            select(method, &pairs, &scores, &quotas, DRAW, exchange).unwrap()
        });
        let global = kept.pairs.into_iter().map(move |pair| pair + first as u32);
        global.zip(kept.weights).collect::<Vec<_>>()
    });
    found.concat()
}

#[test]
fn ranks_and_threads_change_nothing() {
    for method in [Method::Priority, Method::Top] {
        for kind in [Score::Gate, Score::Random] {
            let alone = spread(method, kind, 1, 1);
            for (ranks, threads) in [(1, 2), (1, 5), (2, 2), (4, 1), (8, 5)] {
                assert_eq!(
                    spread(method, kind, ranks, threads),
                    alone,
                    "{method} {kind}"
                );
            }
        }
    }
}

/// The largest global ids there are.
#[test]
fn the_last_pairs_have_ids() {
    let ids = Array2::zeros((300, 1));
    let gates = Array2::from_elem((300, 1), 1.0);
    let kept = |first| {
        let pairs = Pairs::new(ids.view(), gates.view(), 1, first).unwrap();
        let scores = score(Score::Random, &pairs, None, None, &mut Solo).unwrap();
        select(Method::Priority, &pairs, &scores, &[150], DRAW, &mut Solo).unwrap()
    };
    let last = kept(u64::MAX - 300);
    assert_eq!(last.pairs.len(), 150);
    // The same pairs under the ids before: all but one are in both.
    let before = kept(u64::MAX - 301);
    let moved = before.pairs.iter().filter_map(|pair| pair.checked_sub(1));
    let both = moved.filter(|pair| last.pairs.contains(pair)).count();
    assert!(both >= 148, "{both} of 150");
}

#[test]
fn scores_of_other_pairs_are_refused() {
    let foreign = with_gates(&gates(3), |_, scores| scores.clone());
    with_gates(&gates(2), |pairs, _| {
        let error = select(Method::Top, pairs, &foreign, &[1], DRAW, &mut Solo).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Length {
                    found: 3,
                    expected: 2,
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn names_are_read_and_written() {
    for method in [Method::Priority, Method::Top] {
        assert_eq!(method.to_string().parse::<Method>().unwrap(), method);
    }
    let error = "best".parse::<Method>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`best` is no selection method; methods are priority, top"
    );
}

/// Whatever was scored and selected before: more pairs or fewer, other experts, ties that fill the lists.
#[test]
fn memory_that_is_kept_changes_nothing() {
    let (mut scores, mut selector) = (Scores::default(), Selector::default());
    for (step, (tokens, experts)) in [(40_000, 9), (10, 3), (20_000, 64), (0, 3), (40_000, 5)]
        .into_iter()
        .enumerate()
    {
        let ids = Array2::from_shape_fn((tokens, 2), |(token, slot)| {
            if token % 11 == 0 {
                -1
            } else {
                ((token * 7 / 3 + slot) % experts) as i32
            }
        });
        let gates = Array2::from_shape_fn((tokens, 2), |(token, _)| (token % 1009) as f32);
        let pairs = Pairs::new(ids.view(), gates.view(), experts, 5).unwrap();
        let quotas: Vec<u32> = pairs.loads().iter().map(|load| load / 3).collect();
        let draw = Draw {
            step: step as u32,
            ..DRAW
        };
        for kind in [Score::Gate, Score::Random] {
            let fresh = score(kind, &pairs, None, None, &mut Solo).unwrap();
            score_into(kind, &pairs, None, None, &mut Solo, &mut scores).unwrap();
            assert!(scores == fresh, "{kind} of {tokens} tokens");
            for method in [Method::Priority, Method::Top] {
                let fresh = select(method, &pairs, &fresh, &quotas, draw, &mut Solo).unwrap();
                let again = selector.select(method, &pairs, &scores, &quotas, draw, &mut Solo);
                assert!(
                    *again.unwrap() == fresh,
                    "{kind} {method} of {tokens} tokens"
                );
            }
        }
    }
}

/// Before the scale of the layer is known, rows are in the order of the keys that they get.
#[test]
fn early_orders_are_those_of_the_keys() {
    let pairs = 400;
    // Norms over many scales, some equal, some zero, as some gate weights are.
    let h: Vec<_> = (0..pairs)
        .map(|pair| match pair % 7 {
            0 => SquaredNorm::of(&[0.0]),
            1 => SquaredNorm::of(&[1.5, 2.0]),
            _ => SquaredNorm::of(&[(pair as f32 - 170.0) * 2_f32.powi(pair % 40 - 20), 1e-3]),
        })
        .collect();
    let gates = Array2::from_shape_fn((pairs as usize, 1), |(pair, _)| (pair % 11) as f32);
    let ids = Array2::zeros(gates.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 5).unwrap();
    let scores = score(Score::Forward, &pairs, None, Some(&h), &mut Solo).unwrap();
    for method in [Method::Priority, Method::Top] {
        let mut keys = Vec::new();
        early_keys(method, &pairs, DRAW, &mut keys);
        let orders: Vec<_> = keys.iter().zip(&h).map(|(key, h)| key.order(*h)).collect();
        for quota in [1, 20, 150, 399] {
            let kept = select(method, &pairs, &scores, &[quota], DRAW, &mut Solo).unwrap();
            let mut by_order: Vec<u32> = (0..pairs.len() as u32).collect();
            by_order.sort_by_key(|&pair| (std::cmp::Reverse(orders[pair as usize]), pair));
            by_order.truncate(quota as usize);
            by_order.sort_unstable();
            assert_eq!(kept.pairs, by_order, "{method}, {quota}");
        }
    }
}

#[test]
fn early_keys_of_nothing_come_last() {
    let gates = Array2::from_shape_vec((2, 1), vec![0.0, 1e-10]).unwrap();
    with_gates(&gates, |pairs, _| {
        let mut keys = Vec::new();
        early_keys(Method::Top, pairs, DRAW, &mut keys);
        let order = |pair: usize, scale| {
            let significand = 1.0;
            keys[pair].order(SquaredNorm { significand, scale })
        };
        assert_eq!(order(0, 9), 0);
        assert!(order(1, 0) > 0);
    });
}
