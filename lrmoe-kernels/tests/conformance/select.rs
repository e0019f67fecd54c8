//! Selections, to the bit: on keys against a sort, by scores against `lrmoe_metric::select`.

use std::{cmp::Reverse, ops::Range};

use lrmoe_kernels::{
    Error, SquaredNorm,
    lrmoe_metric::{
        self, Draw, Error as MetricError, Exchange, MASKED, Method, Pairs, Score, Solo,
    },
    ndarray::{Array2, s},
};
use proptest::{collection::vec, prelude::*};

use crate::{
    Backend,
    random::{bits, check, ids, numbers, quotas, sizes, telling},
    ranks,
    score::{Factors, factors, rows_of},
};

#[derive(Clone, Debug)]
struct Case {
    ids: Array2<i32>,
    keys: Vec<u32>,
    quotas: Vec<u32>,
}

impl Case {
    /// Kept pairs, and the key that follows in each expert: sorts every expert's pairs.
    fn expected(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut kept, mut next) = (Vec::new(), Vec::new());
        for (expert, &quota) in self.quotas.iter().enumerate() {
            let all = self.ids.iter().enumerate();
            let mut pairs: Vec<_> = all
                .filter(|&(_, &id)| id == expert as i32)
                .map(|(pair, _)| pair as u32)
                .collect();
            let key = |pair: u32| self.keys[pair as usize];
            pairs.sort_by_key(|&pair| Reverse(key(pair)));
            kept.extend(pairs.iter().take(quota as usize));
            next.push(pairs.get(quota as usize).map_or(0, |&pair| key(pair)));
        }
        kept.sort_unstable();
        (kept, next)
    }

    fn check<B: Backend>(&self, backend: &B, ranks: usize) -> Result<(), TestCaseError> {
        let (expected, expected_next) = self.expected();
        let gates = Array2::zeros(self.ids.dim());
        let (tokens, top_k) = self.ids.dim();
        let rows: Vec<Range<usize>> = ranks::even(tokens, ranks);
        let found = ranks::run(ranks, |exchange| {
            let rows = rows[exchange.rank()].clone();
            let first = rows.start * top_k;
            let keys = backend.upload(&self.keys[first..rows.end * top_k]).unwrap();
            let ids = self.ids.slice(s![rows.clone(), ..]);
            let gates = gates.slice(s![rows, ..]);
            let pairs = Pairs::new(ids, gates, self.quotas.len(), first as u64).unwrap();
            let on = backend.pairs(&pairs).unwrap();
            let kept = backend
                .select_keys(&on, &keys, &self.quotas, exchange)
                .unwrap();
            let pairs = backend.download(&kept.pairs).unwrap();
            let global = pairs
                .iter()
                .map(|&pair| first as u32 + pair)
                .collect::<Vec<_>>();
            (global, backend.download(&kept.next).unwrap())
        });
        let kept: Vec<_> = found.iter().flat_map(|(pairs, _)| pairs).copied().collect();
        prop_assert_eq!(kept, expected);
        for (_, next) in found {
            prop_assert_eq!(&next, &expected_next);
        }
        Ok(())
    }
}

fn keys(pairs: usize) -> impl Strategy<Value = Vec<u32>> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    prop_oneof![
        any::<u32>().prop_map(move |key| vec![key; pairs]),
        vec(prop::sample::select(vec![6, 7]), pairs),
        vec(
            prop::sample::select(vec![0, 1, 0x3f80_0000, INFINITY]),
            pairs
        ),
        vec((0.0..1.0f32).prop_map(f32::to_bits), pairs),
        vec(prop_oneof![any::<u32>(), Just(u32::MAX)], pairs),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    sizes()
        .prop_flat_map(|(experts, tokens, top_k)| {
            let ids = ids(experts, tokens, top_k);
            (ids, keys(tokens * top_k), Just(experts))
        })
        .prop_flat_map(|(ids, keys, experts)| {
            let quotas = quotas(&ids, experts);
            (Just((ids, keys)), quotas)
        })
        .prop_map(|((ids, keys), quotas)| Case { ids, keys, quotas })
}

pub(crate) fn any_keys<B: Backend>(backend: &B) {
    check(60, case(), |case| case.check(backend, 1));
}

pub(crate) fn any_keys_over_ranks<B: Backend>(backend: &B) {
    check(20, (case(), 2..5usize), |(case, ranks)| {
        case.check(backend, ranks)
    });
}

/// Every token takes `top_k` consecutive experts from a random one on; one pair in 16 is masked; half of an expert's pairs are kept.
fn large(tokens: usize, top_k: usize, experts: usize, key_end: u64) -> Case {
    let mut number = numbers(experts as u64);
    let mut first = 0;
    let ids = Array2::from_shape_fn((tokens, top_k), |(_, slot)| {
        if slot == 0 {
            first = number() as usize;
        }
        match number().is_multiple_of(16) {
            true => MASKED,
            false => ((first + slot) % experts) as i32,
        }
    });
    let keys = ids.iter().map(|_| (u64::from(number()) % key_end) as u32);
    let load = |expert| ids.iter().filter(|&&id| id == expert).count() as u32;
    Case {
        keys: keys.collect(),
        quotas: (0..experts as i32).map(|expert| load(expert) / 2).collect(),
        ids,
    }
}

pub(crate) fn ties<B: Backend>(backend: &B) {
    for key_end in [1, 2, 5] {
        for ranks in [1, 3] {
            large(500, 4, 9, key_end).check(backend, ranks).unwrap();
        }
    }
}

pub(crate) fn block_edges<B: Backend>(backend: &B) {
    for pairs in [1, 2, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049] {
        for key_end in [3, 1 << 32] {
            large(pairs, 1, 2, key_end).check(backend, 1).unwrap();
        }
    }
}

pub(crate) fn many_experts<B: Backend>(backend: &B) {
    for key_end in [3, 1 << 32] {
        large(1000, 10, 512, key_end).check(backend, 1).unwrap();
    }
    large(500, 8, 512, 1 << 32).check(backend, 2).unwrap();
}

pub(crate) fn all_on_one_expert<B: Backend>(backend: &B) {
    for key_end in [1, 1 << 20] {
        large(70_000, 1, 1, key_end).check(backend, 1).unwrap();
    }
}

pub(crate) fn nothing<B: Backend>(backend: &B) {
    for experts in [0, 3] {
        let case = Case {
            ids: Array2::zeros((0, 2)),
            keys: vec![],
            quotas: vec![1; experts],
        };
        case.check(backend, 1).unwrap();
        case.check(backend, 2).unwrap();
    }
    let masked = Case {
        ids: Array2::from_elem((5, 2), MASKED),
        keys: vec![9; 10],
        quotas: vec![0, 2],
    };
    masked.check(backend, 1).unwrap();
}

/// What a method keeps, pairs and weights, on each of the ranks.
fn check_method<B: Backend>(
    backend: &B,
    factors: &Factors,
    quotas: &[u32],
    draw: Draw,
    ranks: usize,
) {
    let (tokens, top_k) = factors.ids.dim();
    let rows = ranks::even(tokens, ranks);
    ranks::run(ranks, |exchange| {
        let rows = rows[exchange.rank()].clone();
        let local = rows.start * top_k..rows.end * top_k;
        let ids = factors.ids.slice(s![rows.clone(), ..]);
        let gates = factors.gates.slice(s![rows.clone(), ..]);
        // Global ids that pass 32 bits among the pairs.
        let first = u64::from(u32::MAX) - 3 + local.start as u64;
        let pairs = Pairs::new(ids, gates, factors.experts, first).unwrap();
        let on = backend.pairs(&pairs).unwrap();
        let (dy, h) = (&factors.dy[rows], &factors.h[local]);
        let dy_on = backend.upload(dy).unwrap();
        for kind in Score::ALL {
            let rows = rows_of(kind, h, top_k);
            let scores =
                lrmoe_metric::score(kind, &pairs, Some(dy), Some(&rows), exchange).unwrap();
            let rows = backend.upload(&rows).unwrap();
            let scores_on = backend
                .score(kind, &on, Some(&dy_on), Some(&rows), exchange)
                .unwrap();
            for method in [Method::Priority, Method::Top] {
                let expected =
                    lrmoe_metric::select(method, &pairs, &scores, quotas, draw, exchange).unwrap();
                let found = backend
                    .select(method, &on, &scores_on, quotas, draw, exchange)
                    .unwrap();
                let weights = backend.download(&found.weights).unwrap();
                let found = backend.download(&found.pairs).unwrap();
                assert_eq!(found, expected.pairs, "{method} by {kind}");
                assert_eq!(
                    bits(&weights),
                    bits(&expected.weights),
                    "{method} by {kind}"
                );
            }
        }
    });
}

fn draw() -> impl Strategy<Value = Draw> {
    (any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(seed, step, layer)| Draw {
        seed,
        step,
        layer,
    })
}

fn selections(
    value: impl Strategy<Value = f32> + Clone,
) -> impl Strategy<Value = (Factors, Vec<u32>, Draw)> {
    factors(value).prop_flat_map(|factors| {
        let quotas = quotas(&factors.ids, factors.experts);
        (Just(factors), quotas, draw())
    })
}

pub(crate) fn methods<B: Backend>(backend: &B) {
    check(30, selections(0.0..4.0f32), |(factors, quotas, draw)| {
        check_method(backend, &factors, &quotas, draw, 1);
        Ok(())
    });
    let finite = telling().prop_map(|x| if x.is_infinite() { 1.0 } else { x });
    check(30, selections(finite), |(factors, quotas, draw)| {
        check_method(backend, &factors, &quotas, draw, 1);
        Ok(())
    });
}

pub(crate) fn methods_over_ranks<B: Backend>(backend: &B) {
    check(
        10,
        (selections(0.0..4.0f32), 2..4usize),
        |((factors, quotas, draw), ranks)| {
            check_method(backend, &factors, &quotas, draw, ranks);
            Ok(())
        },
    );
}

/// Scores so far apart that weights pass f32, at every place of the significand; a score of 0 and one that is infinite.
pub(crate) fn extreme_weights<B: Backend>(backend: &B) {
    let mut number = numbers(3);
    let (tokens, experts) = (4000, 2);
    let mut gates = Array2::from_shape_simple_fn((tokens, 1), || {
        let exponent = number() % 122 + 66;
        f32::from_bits(exponent << 23 | number() >> 9)
    });
    gates[[5, 0]] = 0.0;
    gates[[6, 0]] = f32::INFINITY;
    let factors = Factors {
        ids: Array2::from_shape_fn((tokens, 1), |(token, _)| (token % experts) as i32),
        experts,
        gates,
        dy: vec![SquaredNorm::of(&[1.0]); tokens],
        h: (0..tokens)
            .map(|token| SquaredNorm::of(&[1.0 + (token % 77) as f32 / 77.0]))
            .collect(),
    };
    for (seed, quota) in [(1, 1900), (2, 1999), (3, 10)] {
        let draw = Draw {
            seed,
            step: 2,
            layer: 3,
        };
        check_method(backend, &factors, &[quota; 2], draw, 1);
    }
}

pub(crate) fn bad_scores<B: Backend>(backend: &B) {
    let ids = Array2::from_shape_vec((2, 2), vec![2, MASKED, 1, 0]).unwrap();
    let gates = Array2::zeros(ids.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 3, 100).unwrap();
    let on = backend.pairs(&pairs).unwrap();
    let keys = |scores: &[f32]| {
        let scores = backend.upload(scores).unwrap();
        let keys = backend.keys_from_scores(&on, &scores);
        keys.map(|keys| backend.download(&keys).unwrap())
    };
    for scores in [
        [0.0, f32::NAN, f32::INFINITY, 1.0],
        [-0.0, -1.0, f32::from_bits(0x007f_ffff), f32::MIN_POSITIVE],
        [f32::MAX, 1.0, -0.0, 0.5],
    ] {
        let expected = lrmoe_metric::keys_from_scores(&pairs, &scores).unwrap();
        assert_eq!(keys(&scores).unwrap(), expected);
    }
    for scores in [
        [0.0, 0.0, f32::NAN, -1.0],
        [0.0, f32::NAN, 1.0, -f32::NAN],
        [-1.5, 0.0, f32::NAN, 0.0],
        [0.0, 0.0, f32::from_bits(0x8000_0001), f32::NEG_INFINITY],
    ] {
        let expected = lrmoe_metric::keys_from_scores(&pairs, &scores).unwrap_err();
        assert_eq!(keys(&scores).unwrap_err().to_string(), expected.to_string());
    }
}

pub(crate) fn errors_on_one_rank<B: Backend>(backend: &B) {
    let ids = Array2::from_shape_vec((1, 2), vec![0, 1]).unwrap();
    let gates = Array2::from_elem(ids.dim(), 1.0);
    let found = ranks::run(3, |exchange| {
        let first = 2 * exchange.rank() as u64;
        let pairs = Pairs::new(ids.view(), gates.view(), 2, first).unwrap();
        let on = backend.pairs(&pairs).unwrap();
        let keys: &[u32] = if exchange.rank() == 1 { &[1] } else { &[1, 2] };
        let keys = backend.upload(keys).unwrap();
        let keys = backend
            .select_keys(&on, &keys, &[1, 1], exchange)
            .unwrap_err();
        let nan = [1.0, f32::NAN].map(|norm| SquaredNorm::of(&[norm]));
        let h = if exchange.rank() == 2 {
            nan
        } else {
            [nan[0]; 2]
        };
        let h = backend.upload(&h).unwrap();
        let score = backend.score(Score::Forward, &on, None, Some(&h), exchange);
        (keys, score.unwrap_err())
    });
    let elsewhere = |error: &Error| matches!(error, Error::Metric(MetricError::Elsewhere));
    for (rank, (keys, score)) in found.iter().enumerate() {
        assert_eq!(elsewhere(keys), rank != 1, "{keys}");
        assert_eq!(elsewhere(score), rank != 2, "{score}");
    }
    assert_eq!(found[1].0.to_string(), "1 keys, expected 2");
    let expected = "the score of pair 5 with expert 1 is not a number";
    assert_eq!(found[2].1.to_string(), expected);
    let pairs = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap();
    let on = backend.pairs(&pairs).unwrap();
    let keys = backend.upload(&[1, 2]).unwrap();
    let error = backend
        .select_keys(&on, &keys, &[1], &mut Solo)
        .unwrap_err();
    assert_eq!(error.to_string(), "1 quotas, expected 2");
}
