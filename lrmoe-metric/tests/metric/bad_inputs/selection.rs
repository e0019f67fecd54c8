//! Selection, and what follows it.

use lrmoe_metric::{
    Draw, Error, Exchange, ExchangeError, KeySelection, MASKED, Method, Pairs, Profile, Rescale,
    Score, Scores, Selection, Selector, Solo, keys_from_scores, rescale, score, score_into, select,
    select_keys,
};
use ndarray::Array2;

use super::{expect, length, norm, with_pairs};

const DRAW: Draw = Draw {
    seed: u64::MAX,
    step: u32::MAX,
    layer: u32::MAX,
};

/// A communicator whose every call fails.
struct Broken;

impl Exchange for Broken {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> usize {
        2
    }
    fn sum(&mut self, _: &mut [u32]) -> Result<(), ExchangeError> {
        Err("no sum".into())
    }
    fn max(&mut self, _: &mut [u32]) -> Result<(), ExchangeError> {
        Err("no max".into())
    }
    fn all_gather(&mut self, _: &[u32], _: &mut [u32]) -> Result<(), ExchangeError> {
        Err("no gather".into())
    }
}

#[test]
fn lists_of_other_pairs() {
    with_pairs(|pairs| {
        let good = score(Score::Gate, pairs, None, None, &mut Solo).unwrap();
        let short = Scores::from_squared(Score::Gate, vec![1.0; 3], 0).unwrap();
        let chosen = |scores, quotas: &[u32]| {
            select(Method::Priority, pairs, scores, quotas, DRAW, &mut Solo)
        };
        expect("scores", chosen(&short, &[1, 1]), length("scores", 3, 4));
        expect("no quotas", chosen(&good, &[]), length("quotas", 0, 2));
        expect(
            "a quota too many",
            chosen(&good, &[1; 3]),
            length("quotas", 3, 2),
        );
        let keyed = |keys: &[u32], quotas: &[u32]| select_keys(pairs, keys, quotas, &mut Solo);
        expect("keys", keyed(&[1; 5], &[1, 1]), length("keys", 5, 4));
        expect(
            "quotas of keys",
            keyed(&[1; 4], &[1]),
            length("quotas", 1, 2),
        );
        expect(
            "scores of keys",
            keys_from_scores(pairs, &[1.0; 5]),
            length("scores", 5, 4),
        );

        // What was there before is left alone.
        let mut scores = good.clone();
        let dy = [norm(4.0, 128)];
        let found = score_into(
            Score::GateGrad,
            pairs,
            Some(&dy),
            None,
            &mut Solo,
            &mut scores,
        );
        expect("norms of dy", found, length("squared norms", 1, 2));
        assert_eq!(scores, good);

        let mut profile = Profile::new(2);
        let found = profile.observe(pairs, &short, 0.5, &mut Solo);
        expect("scores of a profile", found, length("scores", 3, 4));
        assert!(profile.is_empty());

        let kept = |pairs: &[u32], weights: usize| Selection {
            pairs: pairs.to_vec(),
            weights: vec![2.0; weights],
        };
        let rescaled = |scores, mut kept: Selection| {
            rescale(Rescale::Mass, pairs, scores, &mut kept, &mut Solo).map(|()| kept)
        };
        expect(
            "scores to rescale",
            rescaled(&short, kept(&[0], 1)),
            length("scores", 3, 4),
        );
        expect(
            "weights to rescale",
            rescaled(&good, kept(&[0], 2)),
            length("weights", 2, 1),
        );
        expect(
            "a masked pair",
            rescaled(&good, kept(&[3], 1)),
            length("kept pairs", 1, 0),
        );
        expect(
            "a pair past the end",
            rescaled(&good, kept(&[u32::MAX], 1)),
            length("kept pairs", 1, 0),
        );
        expect(
            "nothing kept",
            rescaled(&good, kept(&[], 0)),
            Ok(kept(&[], 0)),
        );
    });
}

#[test]
fn quotas_of_any_size() {
    with_pairs(|pairs| {
        let scores = score(Score::Gate, pairs, None, None, &mut Solo).unwrap();
        let mut selector = Selector::default();
        let cases: [(&str, [u32; 2], &[u32]); 4] = [
            ("nothing", [0, 0], &[]),
            ("above the load", [u32::MAX, u32::MAX], &[0, 1, 2]),
            ("above it by one", [2, 3], &[0, 1, 2]),
            ("of one expert, tie to the smaller id", [0, 1], &[1]),
        ];
        for (case, quotas, expected) in cases {
            let kept = selector.select(Method::Top, pairs, &scores, &quotas, DRAW, &mut Solo);
            assert_eq!(kept.unwrap().pairs, expected, "{case}");
            let kept = select_keys(pairs, &[7; 4], &quotas, &mut Solo).unwrap();
            assert_eq!(kept.pairs, expected, "{case}, by keys");
        }
    });
}

/// More experts than a byte counts and more pairs than 16 bits count, through scores; the oracle sorts.
#[test]
fn many_experts_and_pairs() {
    let (tokens, experts) = (35_000, 300);
    let ids = Array2::from_shape_fn((tokens, 2), |(token, slot)| match token % 13 {
        0 => MASKED,
        _ => ((token * 7 + slot * 150) % experts) as i32,
    });
    let gates = Array2::from_shape_fn((tokens, 2), |(token, slot)| {
        ((token * 31 + slot) % 97) as f32
    });
    let pairs = Pairs::new(ids.view(), gates.view(), experts, 0).unwrap();
    let scores = score(Score::Gate, &pairs, None, None, &mut Solo).unwrap();
    let quotas: Vec<u32> = (0..experts as u32).collect();
    let kept = select(Method::Top, &pairs, &scores, &quotas, DRAW, &mut Solo).unwrap();
    let mut expected = Vec::new();
    for (expert, &quota) in (0..).zip(&quotas) {
        let mine = pairs
            .expert_ids()
            .iter()
            .zip(0_u32..)
            .filter(|(id, _)| **id == expert);
        let mut mine: Vec<u32> = mine.map(|(_, pair)| pair).collect();
        mine.sort_by(|&a, &b| {
            let gate = |pair: u32| pairs.gate_weights()[pair as usize];
            gate(b).total_cmp(&gate(a)).then(a.cmp(&b))
        });
        expected.extend(mine.into_iter().take(quota as usize));
    }
    expected.sort_unstable();
    assert_eq!(kept.pairs, expected);
}

/// A failing communicator is an error of every call that uses one, and nothing else changes.
#[test]
fn exchanges_that_fail() {
    let failed = |what: &str| Error::Exchange(what.into());
    with_pairs(|pairs| {
        let good = score(Score::Gate, pairs, None, None, &mut Solo).unwrap();
        let found = score(Score::Gate, pairs, None, None, &mut Broken);
        expect("score", found, Err(failed("no max")));
        let found = select(Method::Top, pairs, &good, &[1, 1], DRAW, &mut Broken);
        expect("select", found, Err(failed("no sum")));
        let found: Result<KeySelection, Error> = select_keys(pairs, &[1; 4], &[1, 1], &mut Broken);
        expect("select_keys", found, Err(failed("no sum")));
        let mut profile = Profile::new(2);
        let found = profile.observe(pairs, &good, 0.5, &mut Broken);
        expect("observe", found, Err(failed("no sum")));
        assert!(profile.is_empty());
        let mut kept = Selection {
            pairs: vec![0],
            weights: vec![3.0],
        };
        let found = rescale(Rescale::Count, pairs, &good, &mut kept, &mut Broken);
        expect("rescale", found, Err(failed("no max")));
        assert_eq!(kept.weights, [3.0]);
    });
    let gather = Solo.all_gather(&[1, 2], &mut [0]).unwrap_err();
    assert_eq!(gather.to_string(), "gather of 2 values into 1");
}
