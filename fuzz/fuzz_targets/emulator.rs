//! The CUDA kernels, run on the CPU under AddressSanitizer, against the CPU's: selection and rows to the bit, the experts within rounding. Run with
//! `cargo +nightly fuzz run emulator`.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use lrmoe_kernels::lrmoe_metric::{Draw, Method, Pairs, Score, Solo};
use lrmoe_kernels::ndarray::Array2;
use lrmoe_kernels::{Activation, CompactRows, ComputeExperts, Cpu, Cuda, ExpertBuffers, FfnShape, RowBuffers, SelectPairs};

#[derive(Arbitrary, Debug)]
struct Input {
    experts: u8,
    top_k: u8,
    /// Of each token the expert of its first pair, from which the others follow; what is out of range is masked.
    tokens: Vec<u8>,
    keys: Vec<u16>,
    quotas: Vec<u8>,
    width: u8,
    hidden: u8,
    activation: u8,
    weighted: bool,
    seed: u32,
}

/// All that a layer needs of a backend.
trait Backend: SelectPairs + CompactRows + ComputeExperts {}
impl<B: SelectPairs + CompactRows + ComputeExperts> Backend for B {}

/// A rank's pairs.
struct Routed {
    experts: usize,
    ids: Array2<i32>,
    gates: Array2<f32>,
    keys: Vec<u32>,
    quotas: Vec<u32>,
    seed: u64,
}

/// What must be the same to the bit: kept pairs and following keys; kept pairs and the bits of their weights.
#[derive(Debug, PartialEq)]
struct Kept(Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>);

impl Routed {
    fn new(input: &Input) -> Self {
        let experts = usize::from(input.experts % 8) + 1;
        let top_k = usize::from(input.top_k) % experts.min(4) + 1;
        let tokens = &input.tokens[..input.tokens.len().min(100)];
        let id = |(token, slot): (usize, usize)| {
            let first = usize::from(tokens[token]) % (experts + 1);
            if first == experts { -1 } else { ((first + slot) % experts) as i32 }
        };
        let ids = Array2::from_shape_fn((tokens.len(), top_k), id);
        let given = |pair: usize| input.keys.get(pair % input.keys.len().max(1)).copied().unwrap_or(7);
        // Keys of every size, many of them alike.
        let keys = (0..ids.len()).map(|pair| u32::from(given(pair)).wrapping_mul(0x0001_0001)).collect();
        let quota = |expert: usize| u32::from(input.quotas.get(expert).copied().unwrap_or(3));
        Self {
            experts,
            gates: ids.mapv(|id| 0.25 + (id.unsigned_abs() % 5) as f32 / 8.0),
            quotas: (0..experts).map(quota).collect(),
            keys,
            ids,
            seed: input.seed.into(),
        }
    }

    fn select<B: Backend>(&self, backend: &B) -> Kept {
        let pairs = Pairs::new(self.ids.view(), self.gates.view(), self.experts, 0).expect("ids are in range");
        let pairs = backend.pairs(&pairs).expect("memory");
        let keys = backend.upload(&self.keys).expect("memory");
        let by_keys = backend.select_keys(&pairs, &keys, &self.quotas, &mut Solo).expect("valid keys");
        let scores = backend.score(Score::Gate, &pairs, None, None, &mut Solo).expect("finite scores");
        let draw = Draw { seed: self.seed, step: 1, layer: 2 };
        let kept = backend.select(Method::Priority, &pairs, &scores, &self.quotas, draw, &mut Solo).expect("finite scores");
        let weights = backend.download(&kept.weights).expect("memory");
        Kept(
            backend.download(&by_keys.pairs).expect("memory"),
            backend.download(&by_keys.next).expect("memory"),
            backend.download(&kept.pairs).expect("memory"),
            weights.into_iter().map(f32::to_bits).collect(),
        )
    }
}

/// Rows of the kept pairs, expert by expert, and the experts that take them.
struct Rows {
    shape: FfnShape,
    tokens: usize,
    top_k: usize,
    /// Kept pairs ordered by expert, and where each expert's begin.
    pairs: Vec<u32>,
    offsets: Vec<usize>,
    weighted: bool,
    seed: u32,
}

/// Rows as they were moved and added up, to the bit; and what experts made of them.
struct Found {
    moved: Vec<u32>,
    computed: Vec<Vec<f32>>,
}

impl Rows {
    fn new(input: &Input, routed: &Routed, kept: &[u32]) -> Self {
        let top_k = routed.ids.ncols();
        let expert = |pair: u32| routed.ids[[pair as usize / top_k, pair as usize % top_k]];
        let mut pairs = kept.to_vec();
        pairs.sort_by_key(|pair| expert(*pair));
        let before = |e: usize| pairs.iter().filter(|pair| (expert(**pair) as usize) < e).count();
        Self {
            shape: FfnShape {
                width: usize::from(input.width % 70) + 1,
                hidden: usize::from(input.hidden % 70) + 1,
                activation: Activation::ALL[usize::from(input.activation) % Activation::ALL.len()],
            },
            tokens: routed.ids.nrows(),
            top_k,
            offsets: (0..=routed.experts).map(before).collect(),
            pairs,
            weighted: input.weighted,
            seed: input.seed,
        }
    }

    /// Numbers within 1 of 0, the same for every backend.
    fn numbers(&self, count: usize, salt: u32) -> Vec<f32> {
        let mut state = self.seed ^ salt;
        let number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(number).take(count).collect()
    }

    fn run<B: Backend>(&self, backend: &B) -> Found {
        let FfnShape { width, hidden, activation } = self.shape;
        let (rows, instances) = (self.pairs.len(), self.offsets.len() - 1);
        let upload = |count: usize, salt: u32| backend.upload(&self.numbers(count, salt)).expect("memory");
        let tokens = upload(self.tokens * width, 1);
        let index: Vec<u32> = self.pairs.iter().map(|pair| pair / self.top_k as u32).collect();
        let index = backend.row_index(&index, self.tokens).expect("rows of tokens");
        let (mut x, mut out, mut sums) = (B::Buffer::default(), B::Buffer::default(), upload(self.tokens * width, 2));
        backend.gather(&tokens, width, &index, &mut x).expect("memory");
        let places = backend.pair_rows(&self.pairs, self.tokens, self.top_k).expect("distinct pairs");
        let p = upload(rows, 3);
        backend.scatter_add(&x, width, &places, self.weighted.then_some(&p), &mut sums).expect("memory");
        let mut moved: Vec<u32> = Vec::new();
        for buffer in [&x, &sums] {
            moved.extend(backend.download(buffer).expect("memory").into_iter().map(f32::to_bits));
        }

        let matrices = instances * width * hidden;
        let matrix = |salt: u32| upload(matrices, salt);
        let weights = ExpertBuffers::<B> { gate: activation.is_gated().then(|| matrix(4)), up: matrix(5), down: matrix(6) };
        let mut gradients = ExpertBuffers::<B> { gate: activation.is_gated().then(|| matrix(7)), up: matrix(8), down: matrix(9) };
        let (dy, w, mut norms) = (upload(rows * width, 10), upload(rows, 11), B::Buffer::default());
        let (mut scratch, mut dx, mut dp) = (B::Scratch::default(), B::Buffer::default(), B::Buffer::default());
        backend
            .forward(&self.shape, &weights, &self.offsets, &x, &mut scratch, &mut out, Some(&mut norms), None)
            .expect("sizes that fit");
        let inputs = RowBuffers { x: &x, dy: &dy, gate_weights: &p, weights: &w };
        // Every other instance adds to what is there.
        let adds: Vec<bool> = (0..instances).map(|instance| instance % 2 == 1).collect();
        backend
            .backward(&self.shape, &weights, &self.offsets, &inputs, None, &mut scratch, &mut dx, &mut dp, &mut gradients, &adds)
            .expect("sizes that fit");
        let mut computed = vec![backend.download(&norms).expect("memory").iter().map(|norm| norm.value() as f32).collect()];
        for buffer in [&out, &dx, &dp, &gradients.up, &gradients.down].into_iter().chain(&gradients.gate) {
            computed.push(backend.download(buffer).expect("memory"));
        }
        Found { moved, computed }
    }
}

fn assert_close(found: &[f32], expected: &[f32], what: usize) {
    assert_eq!(found.len(), expected.len());
    let pairs = || found.iter().zip(expected).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let (error, size) = (pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>(), pairs().map(|(_, b)| b * b).sum::<f64>());
    assert!(error.sqrt() <= 1e-5 * size.sqrt() + 1e-30, "result {what} is off by {} of {}", error.sqrt(), size.sqrt());
}

fuzz_target!(|input: Input| {
    let (routed, emulated) = (Routed::new(&input), Cuda::emulated());
    let kept = routed.select(&Cpu);
    assert_eq!(routed.select(&emulated), kept);
    let rows = Rows::new(&input, &routed, &kept.0);
    let (found, expected) = (rows.run(&emulated), rows.run(&Cpu));
    assert_eq!(found.moved, expected.moved);
    for (what, (found, expected)) in found.computed.iter().zip(&expected.computed).enumerate() {
        assert_close(found, expected, what);
    }
});
