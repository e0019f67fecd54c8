//! Norms, scores and the profile of them.

use lrmoe_metric::{
    Error, Exchange, MASKED, Pairs, Profile, Score, Solo, SquaredNorm, largest_scale, score,
    squared_norms,
};
use ndarray::{Array2, array, s};
use proptest::prelude::*;

fn norm(value: f32) -> SquaredNorm {
    SquaredNorm::of(&[value])
}

/// Scores of one token with distinct experts.
fn squared(kind: Score, gates: &[f32], dy: f32, h: &[f32]) -> Result<Vec<f64>, Error> {
    let ids = Array2::from_shape_fn((1, gates.len()), |(_, slot)| slot as i32);
    let gates = Array2::from_shape_vec(ids.dim(), gates.to_vec()).unwrap();
    let pairs = Pairs::new(ids.view(), gates.view(), ids.len(), 10).unwrap();
    let h: Vec<_> = h.iter().copied().map(norm).collect();
    let scores = score(kind, &pairs, Some(&[norm(dy)]), Some(&h), &mut Solo)?;
    let scale = 4f64.powi(scores.exponent());
    Ok(scores
        .squared()
        .iter()
        .map(|&squared| f64::from(squared) * scale)
        .collect())
}

proptest! {
    #[test]
    fn norms_are_those_in_f64(
        row in prop::collection::vec(-1.0..1.0f32, 0..200),
        exponent in -100..100i32,
    ) {
        let row: Vec<_> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let exact: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
        let found = SquaredNorm::of(&row);
        prop_assert!((found.value() - exact).abs() <= 1e-6 * exact);
        if exact > 0.0 {
            prop_assert!((4.0..16.0 * row.len() as f32).contains(&found.significand));
        }
    }

    #[test]
    fn a_power_of_two_moves_the_scale_alone(
        row in prop::collection::vec(prop_oneof![0.5..1.0f32, -1.0..-0.5f32], 1..100),
        exponent in -120..120i32,
    ) {
        let moved: Vec<_> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let [before, after] = [&row, &moved].map(|row| SquaredNorm::of(row));
        prop_assert_eq!(before.significand, after.significand);
        prop_assert_eq!(before.scale as i32 + exponent, after.scale as i32);
    }
}

#[test]
fn sums_run_in_32_lanes_then_pairwise() {
    let row: Vec<f32> = (0..77).map(|i| 1.0 + (i * i % 31) as f32 / 32.0).collect();
    let mut lanes = [0f32; 32];
    for (i, x) in row.iter().enumerate() {
        lanes[i % 32] += (2.0 * x) * (2.0 * x);
    }
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    assert_eq!(
        SquaredNorm::of(&row),
        SquaredNorm {
            significand: lanes[0],
            scale: 127
        }
    );
}

#[test]
fn norms_of_extreme_rows() {
    let zero = SquaredNorm::default();
    let subnormal = f32::from_bits(0x007f_ffff);
    assert_eq!(SquaredNorm::of(&[]), zero);
    assert_eq!(SquaredNorm::of(&[0.0, -0.0, subnormal, -subnormal]), zero);
    assert_eq!(
        norm(f32::MIN_POSITIVE),
        SquaredNorm {
            significand: 4.0,
            scale: 1
        }
    );
    assert_eq!(norm(-f32::MAX).scale, 254);
    assert_eq!(
        norm(f32::MAX).value(),
        f64::from(f32::MAX).powi(2) * (1.0 - 2f64.powi(-48))
    );
    assert_eq!(
        norm(f32::NEG_INFINITY),
        SquaredNorm {
            significand: f32::INFINITY,
            scale: 255
        }
    );
    let nan = SquaredNorm::of(&[f32::INFINITY, f32::NAN]);
    assert!(nan.significand.is_nan() && nan.scale == 255);
    // A subnormal counts as zero next to a normal that is barely larger.
    assert_eq!(
        SquaredNorm::of(&[f32::MIN_POSITIVE, subnormal]),
        norm(f32::MIN_POSITIVE)
    );
}

#[test]
fn norms_of_rows() {
    let rows = array![[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]];
    let mut norms = [SquaredNorm::default(); 3];
    squared_norms(rows.view(), &mut norms).unwrap();
    assert_eq!(norms.map(SquaredNorm::value), [25.0, 0.0, 1.0]);
    assert_eq!(largest_scale(&norms), 129);
    assert_eq!(largest_scale(&[]), 0);
    squared_norms(Array2::zeros((3, 0)).view(), &mut norms).unwrap();
    assert_eq!(norms, [SquaredNorm::default(); 3]);
    assert!(matches!(
        squared_norms(rows.t(), &mut norms[..2]),
        Err(Error::Layout { .. })
    ));
    assert!(matches!(
        squared_norms(rows.view(), &mut norms[..2]),
        Err(Error::Length { .. })
    ));
}

#[test]
fn scores_are_products() {
    let (gates, dy, h) = ([0.5, -0.25], 3.0, [2.0, 5.0]);
    assert_eq!(
        squared(Score::DownGrad, &gates, dy, &h).unwrap(),
        [9.0, 14.0625]
    );
    assert_eq!(
        squared(Score::Forward, &gates, dy, &h).unwrap(),
        [1.0, 1.5625]
    );
    assert_eq!(
        squared(Score::Gate, &gates, dy, &h).unwrap(),
        [0.25, 0.0625]
    );
    assert_eq!(
        squared(Score::OutNorm, &gates, dy, &h).unwrap(),
        [1.0, 1.5625]
    );
    // x is that of the token.
    assert_eq!(
        squared(Score::InputGrad, &gates, dy, &h[..1]).unwrap(),
        [9.0, 2.25]
    );
    assert_eq!(
        squared(Score::GateGrad, &gates, dy, &[]).unwrap(),
        [2.25, 0.5625]
    );
    assert_eq!(
        squared(Score::FullGrad, &gates, dy, &h).unwrap(),
        [4.0, 25.0]
    );
    assert_eq!(squared(Score::Random, &gates, dy, &h).unwrap(), [1.0, 1.0]);
}

#[test]
fn scores_neither_vanish_nor_overflow() {
    for size in [1e-30, 1e-10, 1e30] {
        let found = squared(Score::DownGrad, &[0.5, 0.5], size, &[size, 3.0 * size]).unwrap();
        let exact = (0.5 * f64::from(size).powi(2)).powi(2);
        assert!((found[0] / exact - 1.0).abs() < 1e-6 && (found[1] / exact - 9.0).abs() < 1e-5);
    }
    // Below 2^-62 gate weights count as zero, and norms beside the largest vanish.
    let found = squared(
        Score::DownGrad,
        &[1e-20, 1.0, 1.0],
        1.0,
        &[1.0, 1e-15, 1e-20],
    )
    .unwrap();
    let small = found[1] / f64::from(1e-15f32).powi(2);
    assert!(found[0] == 0.0 && (small - 1.0).abs() < 1e-6 && found[2] == 0.0);
    let huge = squared(Score::Gate, &[f32::MAX], 1.0, &[1.0]).unwrap();
    assert_eq!(huge, [f64::from(f32::MAX)]);
}

#[test]
fn infinities_and_nans() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let infinite = squared(Score::DownGrad, &[0.5, 0.5], 1.0, &[inf, 3.0]).unwrap();
    assert_eq!(infinite, [f64::INFINITY, 2.25]);
    // The finite factor is so small beside another that it vanishes, but it is no zero.
    let infinite = squared(Score::DownGrad, &[inf, 0.5], 1.0, &[1e-30, 1e30]).unwrap();
    assert_eq!(infinite[0], f64::INFINITY);
    let cases: [(&[f32], f32, &[f32]); 5] = [
        (&[0.5, nan], 1.0, &[1.0, 1.0]),
        (&[0.5, 0.5], 1.0, &[1.0, nan]),
        (&[0.5, 0.0], 1.0, &[1.0, inf]),
        (&[0.5, inf], 1.0, &[1.0, 0.0]),
        (&[0.0, 1.0], inf, &[1.0, 1.0]),
    ];
    for (at, (gates, dy, h)) in cases.into_iter().enumerate() {
        let error = squared(Score::DownGrad, gates, dy, h).unwrap_err();
        let expected = if at == 4 { 10 } else { 11 };
        assert!(
            matches!(error, Error::NanScore { pair, .. } if pair == expected),
            "{at}: {error}"
        );
    }
    assert!(squared(Score::Random, &[nan], nan, &[nan]).is_ok());
    assert!(squared(Score::Gate, &[1.0], nan, &[nan]).is_ok());
}

#[test]
fn masked_pairs_do_not_count() {
    let ids = array![[0, MASKED], [MASKED, MASKED]];
    let gates = array![[1.0, f32::NAN], [f32::INFINITY, 0.0]];
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let dy = [norm(1e-20), norm(f32::NAN)];
    let h = [norm(1e-20), norm(1e30), norm(f32::INFINITY), norm(0.0)];
    let scores = score(Score::DownGrad, &pairs, Some(&dy), Some(&h), &mut Solo).unwrap();
    assert!(scores.squared()[0] >= 16.0);
    assert_eq!(scores.squared()[1..], [0.0; 3]);
}

#[test]
fn missing_and_short_norms() {
    let ids = array![[0]];
    let gates = array![[1.0]];
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let missing = score(Score::DownGrad, &pairs, Some(&[norm(1.0)]), None, &mut Solo).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "score down-grad needs the squared norms of h"
    );
    for (kind, what) in [
        (Score::FullGrad, "the pairs' gradients"),
        (Score::InputGrad, "x"),
        (Score::GateGrad, "dy"),
        (Score::OutNorm, "f(x)"),
    ] {
        let missing = score(kind, &pairs, None, None, &mut Solo);
        let missing = match kind {
            Score::InputGrad => score(kind, &pairs, Some(&[norm(1.0)]), None, &mut Solo),
            _ => missing,
        };
        assert_eq!(
            missing.unwrap_err().to_string(),
            format!("score {kind} needs the squared norms of {what}")
        );
    }
    let short = score(Score::DownGrad, &pairs, Some(&[]), None, &mut Solo).unwrap_err();
    assert_eq!(short.to_string(), "0 squared norms, expected 1");
}

#[test]
fn ranks_share_the_scale_and_the_errors() {
    let ids = array![[0], [0]];
    let gates = array![[1.0], [1.0]];
    let body = |h: [f32; 2]| {
        // Rank 0 has no tokens.
        let rows = crate::common::even(2, 3);
        crate::common::run(3, |exchange| {
            let rows = rows[exchange.rank()].clone();
            let first = rows.start as u64;
            let h = h.map(norm);
            let ids = ids.slice(s![rows.clone(), ..]);
            let pairs = Pairs::new(ids, gates.slice(s![rows.clone(), ..]), 1, first).unwrap();
            score(Score::Forward, &pairs, None, Some(&h[rows]), exchange)
        })
    };
    let scores: Vec<_> = body([1.0, 8.0]).into_iter().map(Result::unwrap).collect();
    assert!(scores.iter().all(|scores| scores.exponent() == 2));
    assert!(scores[0].squared().is_empty());
    assert_eq!(scores[1].squared(), [1.0 / 16.0]);
    assert_eq!(scores[2].squared(), [4.0]);
    let errors: Vec<_> = body([1.0, f32::NAN])
        .into_iter()
        .map(Result::unwrap_err)
        .collect();
    assert!(matches!(errors[0], Error::Elsewhere));
    assert!(matches!(errors[1], Error::Elsewhere));
    assert!(matches!(errors[2], Error::NanScore { pair: 1, expert: 0 }));
}

#[test]
fn names_are_read_and_written() {
    for kind in Score::ALL {
        assert_eq!(kind.to_string().parse::<Score>().unwrap(), kind);
    }
    let error = "norm".parse::<Score>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`norm` is no score; scores are down-grad, forward, full-grad, input-grad, gate-grad, out-norm, gate, random"
    );
}

#[test]
fn profile_averages_over_steps_and_ranks() {
    let profiles = crate::common::run(2, |exchange| {
        let ids = array![[0, 1], [1, MASKED]];
        let gates = [
            array![[1.0, 0.0], [0.5, 9.0]],
            array![[2.0, f32::INFINITY], [1e-15, 0.0]],
        ];
        let gates = gates[exchange.rank()].view();
        let pairs = Pairs::new(ids.view(), gates, 3, 4 * exchange.rank() as u64).unwrap();
        let scores = score(Score::Gate, &pairs, None, None, exchange).unwrap();
        let mut profile = Profile::new(3);
        assert!(profile.is_empty());
        profile.observe(&pairs, &scores, 0.75, exchange).unwrap();
        profile.observe(&pairs, &scores, 0.75, exchange).unwrap();
        profile
    });
    assert_eq!(profiles[0], profiles[1]);
    let profile = &profiles[0];
    assert!(!profile.is_empty());
    let filled = |expert: usize| {
        let counts = profile.counts(expert).iter().enumerate();
        counts
            .filter(|(_, count)| **count > 0.0)
            .map(|(at, count)| (at, *count))
            .collect::<Vec<_>>()
    };
    assert_eq!(filled(0), [(127, 1.0), (129, 1.0)]);
    assert_eq!(filled(1), [(0, 1.0), (27, 1.0), (125, 1.0), (255, 1.0)]);
    assert_eq!(filled(2), []);
    let stored = Profile::from_counts(3, profile.to_counts().to_vec()).unwrap();
    assert_eq!(stored, *profile);
}

#[test]
fn profile_buckets_are_of_true_scores() {
    for value in [1e-15, 0.3, 7.0, 1e12] {
        let ids = array![[0, 1]];
        let gates = array![[1.0, 1.0]];
        let pairs = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap();
        // The other pair sets the scale.
        let h = [norm(value), norm(1e9 * value)];
        let scores = score(Score::Forward, &pairs, None, Some(&h), &mut Solo).unwrap();
        let mut profile = Profile::new(2);
        profile.observe(&pairs, &scores, 0.0, &mut Solo).unwrap();
        let bucket = profile
            .counts(0)
            .iter()
            .position(|&count| count == 1.0)
            .unwrap();
        let ratio = Profile::bucket_score(bucket) / f64::from(value);
        assert!((0.84..=1.19).contains(&ratio), "{value}: {ratio}");
    }
    assert_eq!(Profile::bucket_score(0), 0.0);
}

#[test]
fn profile_refuses_what_does_not_fit() {
    let ids = array![[0]];
    let gates = array![[1.0]];
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let scores = score(Score::Gate, &pairs, None, None, &mut Solo).unwrap();
    for decay in [-0.1, 1.0, f32::NAN] {
        let error = Profile::new(1)
            .observe(&pairs, &scores, decay, &mut Solo)
            .unwrap_err();
        assert!(matches!(error, Error::Decay { .. }));
    }
    let error = Profile::new(2)
        .observe(&pairs, &scores, 0.5, &mut Solo)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "profile of 2 experts met pairs of 1 experts"
    );
    assert!(matches!(
        Profile::from_counts(1, vec![]),
        Err(Error::Length { .. })
    ));
    let mut counts = vec![0.0; 512];
    counts[300] = f32::NAN;
    let error = Profile::from_counts(2, counts).unwrap_err();
    assert_eq!(
        error.to_string(),
        "count NaN in bucket 44 of expert 1 is negative or not finite"
    );
}
