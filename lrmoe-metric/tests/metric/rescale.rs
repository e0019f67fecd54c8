//! Weights that make up for what `top` leaves out, and recalibrated profiles.

use lrmoe_metric::{
    Draw, Error, Exchange, MASKED, Method, Pairs, Profile, Rescale, Score, Scores, Selection, Solo,
    rescale, score, select,
};
use ndarray::{Array2, array, s};

const DRAW: Draw = Draw {
    seed: 7,
    step: 3,
    layer: 1,
};

/// Weights by global pair id after `top` and a rescaling, on so many ranks.
fn weights(kind: Score, how: Rescale, ranks: usize) -> Vec<(u64, f32)> {
    let (tokens, experts) = (300, 5);
    let ids = Array2::from_shape_fn((tokens, 2), |(token, slot)| match (token % 7, slot) {
        (0, 0) => MASKED,
        _ => ((token * token / 3 + slot) % experts) as i32,
    });
    // Expert 4 has scores of 0 alone, which say nothing.
    let gates = Array2::from_shape_fn((tokens, 2), |(token, slot)| match ids[[token, slot]] {
        4 => 0.0,
        _ => ((token * 31 + slot) % 101 + 1) as f32 / 7.0,
    });
    let rows = crate::common::even(tokens, ranks);
    let found = crate::common::run(ranks, |exchange| {
        let rows = rows[exchange.rank()].clone();
        let first = 2 * rows.start as u64;
        let (ids, gates) = (ids.slice(s![rows.clone(), ..]), gates.slice(s![rows, ..]));
        let pairs = Pairs::new(ids, gates, experts, first).unwrap();
        let scores = score(kind, &pairs, None, None, exchange).unwrap();
        let quotas = [40, 30, 0, 20, 10];
        let mut kept = select(Method::Top, &pairs, &scores, &quotas, DRAW, exchange).unwrap();
        rescale(how, &pairs, &scores, &mut kept, exchange).unwrap();
        let global = kept.pairs.iter().map(|pair| first + u64::from(*pair));
        global.zip(kept.weights).collect::<Vec<_>>()
    });
    let found = found.concat();

    // The same from sums in f64.
    for expert in 0..experts as i32 {
        let of_expert = |pair: &u64| {
            let at = [*pair as usize / 2, *pair as usize % 2];
            (ids[at] == expert).then_some(f64::from(gates[at]))
        };
        let all: Vec<f64> = (0..2 * tokens as u64)
            .filter_map(|p| of_expert(&p))
            .collect();
        let kept: Vec<_> = found
            .iter()
            .filter(|(p, _)| of_expert(p).is_some())
            .collect();
        let mass = |scores: &mut dyn Iterator<Item = f64>| scores.sum::<f64>();
        let expected = match (how, kind) {
            (Rescale::None, _) => 1.0,
            (Rescale::Mass, Score::Gate) if expert == 4 => 1.0,
            (Rescale::Mass, Score::Gate) => {
                mass(&mut all.iter().copied())
                    / mass(&mut kept.iter().filter_map(|(p, _)| of_expert(p)))
            }
            // Random scores are all alike.
            _ => all.len() as f64 / kept.len() as f64,
        };
        for (pair, weight) in kept {
            let error = (f64::from(*weight) / expected - 1.0).abs();
            assert!(
                error < 1e-6,
                "{how} by {kind}: {weight} of pair {pair}, expected {expected}"
            );
        }
    }
    found
}

#[test]
fn factors_are_those_in_f64_on_any_number_of_ranks() {
    for kind in [Score::Gate, Score::Random] {
        for how in [Rescale::None, Rescale::Count, Rescale::Mass] {
            let alone = weights(kind, how, 1);
            for ranks in [2, 3, 8] {
                assert_eq!(weights(kind, how, ranks), alone, "{how} by {kind}");
            }
        }
    }
}

/// Scores of one expert that differ by so much that most of them weigh nothing, and one that is infinite.
#[test]
fn extreme_scores_have_a_mass() {
    let (ids, gates) = (Array2::zeros((4, 1)), Array2::ones((4, 1)));
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let factor = |squared: [f32; 4]| {
        let scores = Scores::from_squared(Score::Gate, squared.to_vec(), 0).unwrap();
        let mut kept = select(Method::Top, &pairs, &scores, &[1], DRAW, &mut Solo).unwrap();
        rescale(Rescale::Mass, &pairs, &scores, &mut kept, &mut Solo).unwrap();
        kept.weights[0]
    };
    assert_eq!(factor([1e-37, f32::MAX, 1e-37, 0.0]), 1.0);
    assert_eq!(factor([f32::MAX; 4]), 4.0);
    assert_eq!(factor([2e-38; 4]), 4.0);
    assert_eq!(factor([4.0, 1.0, 1.0, 0.0]), 2.0);
    assert_eq!(factor([f32::INFINITY, 1.0, 1.0, 0.0]), 1.0);
    assert_eq!(factor([f32::INFINITY, f32::INFINITY, 1.0, 0.0]), 1.0);
    assert_eq!(factor([0.0; 4]), 1.0);
}

#[test]
fn selections_of_other_pairs_are_refused() {
    let (ids, gates) = (array![[0], [MASKED]], Array2::ones((2, 1)));
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let scores = score(Score::Gate, &pairs, None, None, &mut Solo).unwrap();
    for foreign in [vec![2], vec![1]] {
        let mut selection = Selection {
            pairs: foreign,
            weights: vec![1.0],
        };
        let refused = rescale(Rescale::Count, &pairs, &scores, &mut selection, &mut Solo);
        assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
        assert_eq!(selection.weights, [1.0]);
    }
    let found = crate::common::run(2, |exchange| {
        let mut kept = Selection::default();
        let scores = match exchange.rank() {
            0 => Scores::default(),
            _ => scores.clone(),
        };
        rescale(Rescale::Mass, &pairs, &scores, &mut kept, exchange).unwrap_err()
    });
    assert!(matches!(found[0], Error::Length { .. }), "{}", found[0]);
    assert!(matches!(found[1], Error::Elsewhere), "{}", found[1]);
}

#[test]
fn names_are_read_and_written() {
    for how in [Rescale::None, Rescale::Count, Rescale::Mass] {
        assert_eq!(how.to_string().parse::<Rescale>().unwrap(), how);
    }
    let error = "all".parse::<Rescale>().unwrap_err();
    let expected = "`all` is no rescaling; they are none, count, mass";
    assert_eq!(error.to_string(), expected);
}

/// A profile of these (expert, bucket, count).
fn profile(experts: usize, counts: &[(usize, usize, f32)]) -> Profile {
    let mut all = vec![0.0; experts * Profile::BUCKETS];
    for (expert, bucket, count) in counts {
        all[expert * Profile::BUCKETS + bucket] = *count;
    }
    Profile::from_counts(experts, all).unwrap()
}

#[test]
fn recalibration_divides_by_a_power_of_the_sum() {
    // The scores of expert 1 are an eighth of those of expert 0, the loads are alike; of expert 2 nothing is known.
    let seen = profile(
        3,
        &[(0, 120, 3.0), (0, 130, 1.0), (1, 114, 3.0), (1, 124, 1.0)],
    );
    let moved = |loads, alpha| seen.recalibrated(loads, alpha).unwrap();
    assert_eq!(moved(&[100, 100, 5], 0.0), seen);
    let halved = [(0, 120, 3.0), (0, 130, 1.0), (1, 117, 3.0), (1, 127, 1.0)];
    assert_eq!(moved(&[100, 100, 5], 0.5), profile(3, &halved));
    let alike = [(0, 120, 3.0), (0, 130, 1.0), (1, 120, 3.0), (1, 130, 1.0)];
    assert_eq!(moved(&[100, 100, 5], 1.0), profile(3, &alike));
    // With half of the load its pairs are worth twice as much.
    let twice = [(0, 120, 3.0), (0, 130, 1.0), (1, 122, 3.0), (1, 132, 1.0)];
    assert_eq!(moved(&[100, 50, 5], 1.0), profile(3, &twice));
    // Half a bucket is two halves; zeros, infinities and experts without pairs stay.
    let seen = profile(
        2,
        &[(0, 120, 1.0), (1, 0, 2.0), (1, 119, 1.0), (1, 255, 3.0)],
    );
    assert_eq!(seen.recalibrated(&[8, 0], 1.0).unwrap(), seen);
    let seen = profile(2, &[(0, 120, 1.0), (1, 118, 1.0)]);
    let quarter = profile(2, &[(0, 120, 1.0), (1, 118, 0.5), (1, 119, 0.5)]);
    assert_eq!(seen.recalibrated(&[8, 8], 0.25).unwrap(), quarter);
}

/// By the load of the step and the mean of what was observed, however much that was.
#[test]
fn recalibration_goes_by_the_mean_score() {
    let seen = profile(2, &[(0, 120, 4.0), (1, 116, 1.0)]);
    let alike = profile(2, &[(0, 120, 4.0), (1, 120, 1.0)]);
    assert_eq!(seen.recalibrated(&[8, 8], 1.0).unwrap(), alike);
}

#[test]
fn recalibration_moves_all_but_zeros_and_infinities() {
    // The loads differ by a factor of four, which is four buckets.
    let buckets = [(0, 1.0), (118, 1.0), (253, 1.0), (254, 1.0), (255, 3.0)];
    let of = |expert| buckets.map(|(bucket, count)| (expert, bucket, count));
    let seen = profile(2, &[of(0), of(1)].concat());
    let moved = |alpha, of_1: &[(usize, usize, f32)]| {
        let expected = profile(2, &[&of(0)[..], of_1].concat());
        assert_eq!(seen.recalibrated(&[8, 2], alpha).unwrap(), expected);
    };
    moved(
        1.0,
        &[(1, 0, 1.0), (1, 122, 1.0), (1, 254, 2.0), (1, 255, 3.0)],
    );
    let parts = [(1, 0, 1.0), (1, 120, 0.75), (1, 121, 0.25)];
    moved(
        0.5625,
        &[&parts[..], &[(1, 254, 2.0), (1, 255, 3.0)]].concat(),
    );
}

#[test]
fn recalibration_refuses_what_does_not_fit() {
    let seen = Profile::new(2);
    for alpha in [-0.1, 1.1, f64::NAN] {
        let error = seen.recalibrated(&[1, 1], alpha).unwrap_err();
        assert!(matches!(error, Error::Recalibration { .. }), "{error}");
    }
    let error = seen.recalibrated(&[1], 1.0).unwrap_err();
    assert_eq!(error.to_string(), "1 loads, expected 2");
}
