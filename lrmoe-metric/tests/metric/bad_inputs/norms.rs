//! Norms, and scores from them.

use lrmoe_metric::{Error, Score, Scores, Solo, SquaredNorm, largest_scale, score, squared_norms};
use ndarray::{Array2, s};

use super::{expect, length, norm, with_pairs};

#[test]
fn norms_of_views() {
    let wide = Array2::<f32>::ones((3, 4));
    let norms = |rows: ndarray::ArrayView2<'_, f32>, count| {
        let mut out = vec![norm(f32::NAN, 7); count];
        squared_norms(rows, &mut out).map(|()| out)
    };
    let layout = || Err(Error::Layout { what: "rows" });
    let zero = SquaredNorm::default();
    let cases = [
        (
            "columns of a matrix",
            norms(wide.slice(s![.., ..2]), 3),
            layout(),
        ),
        (
            "every second row",
            norms(wide.slice(s![..;2, ..]), 2),
            layout(),
        ),
        (
            "one row too many",
            norms(wide.view(), 4),
            length("squared norms", 4, 3),
        ),
        ("no rows", norms(wide.slice(s![..0, ..]), 0), Ok(vec![])),
        (
            "no columns",
            norms(wide.slice(s![.., ..0]), 3),
            Ok(vec![zero; 3]),
        ),
    ];
    for (case, found, expected) in cases {
        expect(case, found, expected);
    }
    assert_eq!(largest_scale(&[norm(f32::NAN, 255), zero]), 255);
}

#[test]
fn norms_that_no_row_has() {
    let cases = [
        ("NaN with a scale of finite rows", f32::NAN, 130),
        ("infinity with a scale of finite rows", f32::INFINITY, 254),
        ("negative", -4.0, 128),
        ("more than zero with the scale of zero", 4.0, 0),
        ("finite with the scale of infinities", 4.0, 255),
        ("negative infinity", f32::NEG_INFINITY, 255),
        ("a scale past the exponents", 4.0, 256),
        ("the largest scale", 4.0, u32::MAX),
    ];
    let good = [norm(4.0, 128); 4];
    for (case, significand, scale) in cases {
        let refused = |what, pair| {
            Err(Error::Norm {
                what,
                pair,
                significand,
                scale,
            })
        };
        let mut bad = good;
        bad[1] = norm(significand, scale);
        with_pairs(|pairs| {
            let found = |kind, dy: &[SquaredNorm], rows: &[SquaredNorm]| {
                score(kind, pairs, Some(dy), Some(rows), &mut Solo)
            };
            expect(
                case,
                found(Score::DownGrad, &bad[..2], &good),
                refused("dy", 102),
            );
            expect(
                case,
                found(Score::DownGrad, &good[..2], &bad),
                refused("h", 101),
            );
            expect(
                case,
                found(Score::InputGrad, &good[..2], &bad[..2]),
                refused("x", 102),
            );
            let masked = [good[0], good[0], good[0], norm(significand, scale)];
            let scored = found(Score::DownGrad, &good[..2], &masked);
            assert_eq!(
                scored.unwrap().squared()[3],
                0.0,
                "{case}, of a masked pair"
            );
        });
    }
    // Zeros have any scale of a row, and times an infinity they are nothing.
    with_pairs(|pairs| {
        let (zero, infinite) = (norm(0.0, 128), norm(f32::INFINITY, 255));
        let found = score(
            Score::DownGrad,
            pairs,
            Some(&[zero; 2]),
            Some(&[infinite; 4]),
            &mut Solo,
        );
        expect(
            "0 times infinity",
            found,
            Err(Error::NanScore {
                pair: 100,
                expert: 0,
            }),
        );
    });
}

#[test]
fn scores_of_another_backend() {
    let new = |squared: &[f32], exponent| {
        let scores = Scores::from_squared(Score::Gate, squared.to_vec(), exponent);
        scores.map(|scores| {
            scores
                .squared()
                .iter()
                .map(|s| s.to_bits())
                .collect::<Vec<_>>()
        })
    };
    let refused = |pair, squared| Err(Error::SquaredScore { pair, squared });
    let exponent = |exponent| Err(Error::ScoreExponent { exponent });
    let cases = [
        ("none", new(&[], 254), Ok(vec![])),
        (
            "zeros of both signs",
            new(&[0.0, -0.0], -254),
            Ok(vec![0, 0]),
        ),
        ("infinity", new(&[f32::INFINITY], 0), Ok(vec![0x7f80_0000])),
        ("NaN", new(&[1.0, f32::NAN], 0), refused(1, f32::NAN)),
        (
            "the first bad one",
            new(&[-1.0, f32::NAN], 0),
            refused(0, -1.0),
        ),
        (
            "negative infinity",
            new(&[f32::NEG_INFINITY], 0),
            refused(0, f32::NEG_INFINITY),
        ),
        ("least exponent", new(&[1.0], i32::MIN), exponent(i32::MIN)),
        (
            "largest exponent",
            new(&[1.0], i32::MAX),
            exponent(i32::MAX),
        ),
        ("one past", new(&[1.0], 255), exponent(255)),
    ];
    for (case, found, expected) in cases {
        expect(case, found, expected);
    }
}
