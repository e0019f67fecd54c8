//! Selection of half of 524,288 pairs of 128 experts, k = 8, on one rank and two threads, as in the PyTorch peer.

use divan::Bencher;
use divan::counter::ItemsCount;
use lrmoe_metric::{
    Draw, Method, Pairs, Score, Solo, SquaredNorm, keys_from_scores, score, select, select_keys,
};
use ndarray::Array2;

const TOKENS: usize = 65_536;
const TOP_K: usize = 8;
const EXPERTS: usize = 128;
const DRAW: Draw = Draw {
    seed: 1,
    step: 2,
    layer: 3,
};

fn main() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.expect("two threads can be started")
        .install(divan::main);
}

struct Inputs {
    ids: Array2<i32>,
    gates: Array2<f32>,
}

/// Experts of a token drawn without repetition with probability falling as `1 / (expert + 1)^zipf`, uniform scores.
fn inputs(zipf: f64) -> Inputs {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 24)
    };
    let weights: Vec<_> = (1..=EXPERTS)
        .map(|rank| (rank as f64).powf(-zipf))
        .collect();
    let total: f64 = weights.iter().sum();
    let mut ids = Array2::from_elem((TOKENS, TOP_K), -1);
    for mut token in ids.rows_mut() {
        for slot in 0..TOP_K {
            token[slot] = loop {
                let mut rest = uniform() * total;
                let beyond = |weight: &f64| {
                    rest -= weight;
                    rest <= 0.0
                };
                let expert = weights.iter().position(beyond).unwrap_or(0) as i32;
                if token.iter().take(slot).all(|&taken| taken != expert) {
                    break expert;
                }
            };
        }
    }
    Inputs {
        ids,
        gates: Array2::from_shape_simple_fn((TOKENS, TOP_K), || uniform() as f32),
    }
}

impl Inputs {
    fn pairs(&self) -> Pairs<'_> {
        Pairs::new(self.ids.view(), self.gates.view(), EXPERTS, 0).expect("ids are in range")
    }
}

fn halves(pairs: &Pairs<'_>) -> Vec<u32> {
    pairs.loads().iter().map(|load| load / 2).collect()
}

fn pairs_count() -> ItemsCount {
    ItemsCount::new(TOKENS * TOP_K)
}

#[divan::bench(args = [0.0, 1.0])]
fn check_pairs(bencher: Bencher<'_, '_>, zipf: f64) {
    let inputs = inputs(zipf);
    bencher
        .counter(pairs_count())
        .bench_local(|| inputs.pairs().len());
}

#[divan::bench(args = [0.0, 1.0])]
fn keys(bencher: Bencher<'_, '_>, zipf: f64) {
    let inputs = inputs(zipf);
    let pairs = inputs.pairs();
    let quotas = halves(&pairs);
    let keys = keys_from_scores(&pairs, pairs.gate_weights()).expect("scores are positive");
    bencher
        .counter(pairs_count())
        .bench_local(|| select_keys(&pairs, &keys, &quotas, &mut Solo).expect("lengths agree"));
}

#[divan::bench(args = [0.0, 1.0])]
fn scores(bencher: Bencher<'_, '_>, zipf: f64) {
    let inputs = inputs(zipf);
    let pairs = inputs.pairs();
    let quotas = halves(&pairs);
    bencher.counter(pairs_count()).bench_local(|| {
        let keys = keys_from_scores(&pairs, pairs.gate_weights()).expect("scores are positive");
        select_keys(&pairs, &keys, &quotas, &mut Solo).expect("lengths agree")
    });
}

#[divan::bench]
fn equal_keys(bencher: Bencher<'_, '_>) {
    let inputs = inputs(0.0);
    let pairs = inputs.pairs();
    let quotas = halves(&pairs);
    let keys = vec![1; pairs.len()];
    bencher
        .counter(pairs_count())
        .bench_local(|| select_keys(&pairs, &keys, &quotas, &mut Solo).expect("lengths agree"));
}

#[divan::bench(args = [Method::Priority, Method::Top])]
fn methods(bencher: Bencher<'_, '_>, method: Method) {
    let inputs = inputs(0.0);
    let pairs = inputs.pairs();
    let quotas = halves(&pairs);
    let scores = score(Score::Gate, &pairs, None, None, &mut Solo).expect("gates are finite");
    bencher.counter(pairs_count()).bench_local(|| {
        select(method, &pairs, &scores, &quotas, DRAW, &mut Solo).expect("lengths agree")
    });
}

#[divan::bench]
fn down_grad_scores(bencher: Bencher<'_, '_>) {
    let inputs = inputs(0.0);
    let pairs = inputs.pairs();
    let norms: Vec<_> = pairs
        .gate_weights()
        .iter()
        .map(|&norm| SquaredNorm::of(&[norm]))
        .collect();
    bencher.counter(pairs_count()).bench_local(|| {
        let dy = Some(&norms[..TOKENS]);
        score(Score::DownGrad, &pairs, dy, Some(&norms), &mut Solo).expect("norms are finite")
    });
}

#[divan::bench(args = [768, 2048])]
fn squared_norms(bencher: Bencher<'_, '_>, width: usize) {
    let rows = Array2::from_shape_fn((4096, width), |(row, column)| (row + column) as f32);
    let mut norms = vec![SquaredNorm::default(); rows.nrows()];
    bencher
        .counter(divan::counter::BytesCount::new(rows.len() * 4))
        .bench_local(|| {
            lrmoe_metric::squared_norms(rows.view(), &mut norms).expect("lengths agree")
        });
}
