//! The factors of a score: which they are, the sizes at which they vanish, and those of pairs far from the first.

use lrmoe_metric::{Error, Pairs, Profile, Row, Score, Scores, Solo, SquaredNorm, score};
use ndarray::Array2;

#[test]
fn each_score_has_its_factors() {
    for kind in Score::ALL {
        let (gate, dy, row) = match kind {
            Score::DownGrad => (true, true, Some(Row::Hidden)),
            Score::Forward => (true, false, Some(Row::Hidden)),
            Score::FullGrad => (false, false, Some(Row::Gradient)),
            Score::InputGrad => (true, true, Some(Row::Input)),
            Score::GateGrad => (true, true, None),
            Score::OutNorm => (true, false, Some(Row::Output)),
            Score::Gate => (true, false, None),
            Score::Random => (false, false, None),
        };
        assert_eq!(
            (kind.has_gate(), kind.has_dy(), kind.row()),
            (gate, dy, row)
        );
        assert_eq!(kind.needs_h(), row == Some(Row::Hidden), "{kind}");
        // The pair's own gradients come of dy.
        assert_eq!(kind.needs_dy(), dy || row == Some(Row::Gradient), "{kind}");
    }
    let per_token = [Row::Input, Row::Hidden, Row::Output, Row::Gradient];
    assert_eq!(
        per_token.map(Row::is_per_token),
        [true, false, false, false]
    );
}

/// Scores of one token whose pairs have these gate weights and rows h.
fn forward(gates: &[f32], h: &[&[f32]]) -> Scores {
    let ids = Array2::from_shape_fn((1, gates.len()), |(_, slot)| slot as i32);
    let gates = Array2::from_shape_vec(ids.dim(), gates.to_vec()).unwrap();
    let pairs = Pairs::new(ids.view(), gates.view(), ids.len(), 0).unwrap();
    let h: Vec<_> = h.iter().map(|row| SquaredNorm::of(row)).collect();
    score(Score::Forward, &pairs, None, Some(&h), &mut Solo).unwrap()
}

fn power(exponent: i32) -> f32 {
    2_f32.powi(exponent)
}

#[test]
fn what_is_too_small_counts_as_zero() {
    // Rows of norm 1 have a squared norm of 4 after scaling. Gate weights vanish below 2^-62, whatever their square.
    let scores = forward(&[power(-62), 0.9 * power(-62)], &[&[1.0], &[1.0]]);
    assert_eq!(scores.squared(), [power(-122), 0.0]);
    // Beside a row of 2^64, [1, 1] with its squared norm of 8 comes to 2^-125, which is the least there is, and [1] to half of that.
    let scores = forward(&[1.0; 3], &[&[power(64)], &[1.0, 1.0], &[1.0]]);
    assert_eq!(scores.squared(), [4.0, power(-125), 0.0]);
    // So do products.
    let scores = forward(
        &[1.0, power(-61), power(-61)],
        &[&[power(3)], &[1.0, 1.0], &[1.0]],
    );
    assert_eq!(scores.squared(), [4.0, power(-125), 0.0]);
}

#[test]
fn nothing_but_zeros_has_no_scale() {
    let scores = forward(&[1.0, f32::MAX], &[&[0.0], &[0.0]]);
    assert_eq!((scores.squared(), scores.exponent()), (&[0.0; 2][..], 0));
}

/// Pairs enough for several parallel tasks.
const TOKENS: usize = 40_000;

#[test]
fn the_last_pair_counts_as_the_first() {
    let ids = Array2::from_shape_fn((TOKENS, 2), |(token, slot)| ((token + slot) % 3) as i32);
    let gates = Array2::from_elem(ids.dim(), 1.0);
    let pairs = Pairs::new(ids.view(), gates.view(), 3, 5).unwrap();
    for far in [0, 16_383, 16_384, 50_000, 2 * TOKENS - 1] {
        let mut h = vec![SquaredNorm::of(&[1.0]); pairs.len()];
        let scored = |h: &[SquaredNorm]| score(Score::Forward, &pairs, None, Some(h), &mut Solo);
        h[far] = SquaredNorm::of(&[4.0]);
        let scores = scored(&h).unwrap();
        assert_eq!(
            (scores.exponent(), scores.squared()[far]),
            (1, 4.0),
            "pair {far}"
        );
        assert_eq!(scores.squared()[(far + 1) % pairs.len()], 0.25);
        h[far] = SquaredNorm::of(&[f32::NAN]);
        let error = scored(&h).unwrap_err();
        assert!(
            matches!(error, Error::NanScore { pair, .. } if pair == 5 + far as u64),
            "{error}"
        );
    }
}

#[test]
fn threads_do_not_change_a_profile() {
    let ids = Array2::from_shape_fn((TOKENS, 2), |(token, slot)| ((token + slot) % 3) as i32 - 1);
    let gates = Array2::from_shape_fn(ids.dim(), |(token, _)| power(token as i32 % 7));
    let pairs = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap();
    let scores = score(Score::Gate, &pairs, None, None, &mut Solo).unwrap();
    let mut counts = vec![0.0; 2 * Profile::BUCKETS];
    for ((token, _), id) in ids.indexed_iter().filter(|(_, id)| **id >= 0) {
        // The exponent field of the squared gate weight.
        counts[*id as usize * Profile::BUCKETS + 127 + 2 * (token % 7)] += 1.0;
    }
    for threads in [1, 2, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let mut profile = Profile::new(2);
        pool.unwrap()
            .install(|| profile.observe(&pairs, &scores, 0.5, &mut Solo))
            .unwrap();
        assert_eq!(profile.to_counts(), counts, "{threads} threads");
    }
}
