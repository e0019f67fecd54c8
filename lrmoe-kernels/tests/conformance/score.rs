//! Scores, to the bit, against `lrmoe_metric::score`.

use lrmoe_kernels::{
    SquaredNorm,
    lrmoe_metric::{self, Exchange, Pairs, Row, Score, Solo},
    ndarray::{Array2, s},
};
use proptest::{collection::vec, prelude::*};

use crate::{
    Backend,
    random::{bits, check, ids, numbers, sizes, telling},
    ranks,
};

#[derive(Clone, Debug)]
pub(crate) struct Factors {
    pub(crate) ids: Array2<i32>,
    pub(crate) experts: usize,
    pub(crate) gates: Array2<f32>,
    /// Per token, per pair.
    pub(crate) dy: Vec<SquaredNorm>,
    pub(crate) h: Vec<SquaredNorm>,
}

/// Norms as a score takes them of its rows: of these, those of `h`, or one for each token of `top_k` slots.
pub(crate) fn rows_of(kind: Score, h: &[SquaredNorm], top_k: usize) -> Vec<SquaredNorm> {
    let step = match kind.row().is_some_and(Row::is_per_token) {
        true => top_k,
        false => 1,
    };
    h.iter().copied().step_by(step).collect()
}

/// Factors made of such values.
pub(crate) fn factors(value: impl Strategy<Value = f32> + Clone) -> impl Strategy<Value = Factors> {
    let norm = vec(value.clone(), 3).prop_map(|row| SquaredNorm::of(&row));
    sizes().prop_flat_map(move |(experts, tokens, top_k)| {
        let pairs = tokens * top_k;
        (
            ids(experts, tokens, top_k),
            vec(value.clone(), pairs),
            vec(norm.clone(), tokens),
            vec(norm.clone(), pairs),
        )
            .prop_map(move |(ids, gates, dy, h)| Factors {
                gates: Array2::from_shape_vec(ids.dim(), gates).unwrap(),
                ids,
                experts,
                dy,
                h,
            })
    })
}

impl Factors {
    fn check<B: Backend>(&self, backend: &B) -> Result<(), TestCaseError> {
        let (ids, gates) = (self.ids.view(), self.gates.view());
        let pairs = Pairs::new(ids, gates, self.experts, 1 << 33).unwrap();
        let on = backend.pairs(&pairs).unwrap();
        let dy = backend.upload(&self.dy).unwrap();
        for kind in Score::ALL {
            let rows = rows_of(kind, &self.h, self.ids.ncols());
            let expected =
                lrmoe_metric::score(kind, &pairs, Some(&self.dy), Some(&rows), &mut Solo);
            let rows = backend.upload(&rows).unwrap();
            let found = backend.score(kind, &on, Some(&dy), Some(&rows), &mut Solo);
            match (expected, found) {
                (Ok(expected), Ok(found)) => {
                    let found = backend.host_scores(&found).unwrap().into_owned();
                    prop_assert_eq!(bits(found.squared()), bits(expected.squared()));
                    prop_assert_eq!(found, expected);
                }
                (Err(expected), Err(found)) => {
                    prop_assert_eq!(found.to_string(), expected.to_string());
                }
                (expected, found) => panic!("{kind}: {found:?}, expected {expected:?}"),
            }
        }
        Ok(())
    }
}

pub(crate) fn any_factors<B: Backend>(backend: &B) {
    check(40, factors(0.0..4.0f32), |factors| factors.check(backend));
    check(60, factors(telling()), |factors| factors.check(backend));
    // Scales so far apart that products vanish, without an infinity that would make a NaN.
    let wide = (-126..127i32).prop_map(|e| 1.75 * (e as f32).exp2());
    check(40, factors(wide), |factors| factors.check(backend));
}

pub(crate) fn bad_factors<B: Backend>(backend: &B) {
    let bad = prop_oneof![20 => 0.5..2.0f32, 1 => Just(f32::NAN), 1 => Just(f32::INFINITY), 1 => Just(0.0)];
    check(60, factors(bad), |factors| factors.check(backend));
    let (ids, gates) = (Array2::zeros((2, 1)), Array2::ones((2, 1)));
    let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
    let on = backend.pairs(&pairs).unwrap();
    let norms = backend.upload(&[SquaredNorm::of(&[1.0])]).unwrap();
    let missing = backend.score(Score::DownGrad, &on, Some(&norms), None, &mut Solo);
    assert_eq!(
        missing.unwrap_err().to_string(),
        "1 squared norms, expected 2"
    );
    let missing = backend.score(Score::Forward, &on, None, None, &mut Solo);
    let expected = "score forward needs the squared norms of h";
    assert_eq!(missing.unwrap_err().to_string(), expected);
}

/// The largest scales are those of all ranks.
pub(crate) fn over_ranks<B: Backend>(backend: &B) {
    let wide = (-60..60i32).prop_map(|e| 1.5 * (e as f32).exp2());
    check(20, factors(wide), |factors| {
        let (tokens, top_k) = factors.ids.dim();
        for ranks in [2, 3] {
            let rows = ranks::even(tokens, ranks);
            ranks::run(ranks, |exchange| {
                let rows = rows[exchange.rank()].clone();
                let ids = factors.ids.slice(s![rows.clone(), ..]);
                let gates = factors.gates.slice(s![rows.clone(), ..]);
                let first = rows.start * top_k;
                let pairs = Pairs::new(ids, gates, factors.experts, first as u64).unwrap();
                let dy = &factors.dy[rows.clone()];
                let dy_on = backend.upload(dy).unwrap();
                let h = &factors.h[first..rows.end * top_k];
                let on = backend.pairs(&pairs).unwrap();
                for kind in Score::ALL {
                    let rows = rows_of(kind, h, top_k);
                    let expected =
                        lrmoe_metric::score(kind, &pairs, Some(dy), Some(&rows), exchange);
                    let rows = backend.upload(&rows).unwrap();
                    let found = backend.score(kind, &on, Some(&dy_on), Some(&rows), exchange);
                    let found = found.unwrap();
                    assert_eq!(*backend.host_scores(&found).unwrap(), expected.unwrap());
                }
            });
        }
        Ok(())
    });
}

/// More than a dispatch or a binding holds where limits are low.
pub(crate) fn many_tokens<B: Backend>(backend: &B) {
    let mut number = numbers(1);
    let mut value = move || (number() % 1000) as f32 / 100.0 + 0.01;
    let (tokens, top_k, experts) = (9001, 3, 3);
    let factors = Factors {
        ids: Array2::from_shape_fn((tokens, top_k), |(token, slot)| {
            ((token + slot) % experts) as i32
        }),
        experts,
        gates: Array2::from_shape_simple_fn((tokens, top_k), &mut value),
        dy: (0..tokens).map(|_| SquaredNorm::of(&[value()])).collect(),
        h: (0..tokens * top_k)
            .map(|_| SquaredNorm::of(&[value(), value()]))
            .collect(),
    };
    factors.check(backend).unwrap();
    let mut late = factors.clone();
    late.gates[[tokens - 2, 1]] = f32::NAN;
    late.gates[[tokens - 1, 0]] = f32::NAN;
    late.check(backend).unwrap();
}
