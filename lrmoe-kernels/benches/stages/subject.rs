//! A rank's part of a layer on a backend, and its stages.

use std::time::Instant;

use lrmoe_kernels::{
    CompactRows, ComputeExperts, Error, ExpertBuffers, Memory, RowBuffers, SelectPairs,
    SquaredNorm,
    lrmoe_metric::{Draw, Method, Pairs, Score, Solo},
    ndarray::Array2,
};

use super::{
    floor::{STAGES, Sizes},
    meters::median,
    routing::{Random, route},
};

/// All that a layer needs of a backend.
pub(super) trait Backend: SelectPairs + CompactRows + ComputeExperts {}

impl<B: SelectPairs + CompactRows + ComputeExperts> Backend for B {}

/// Times calls, queued one after the other until the device is waited for.
struct Clock<'a, B: Backend> {
    backend: &'a B,
    /// An element to read.
    last: B::Buffer<u32>,
    calls: usize,
    rounds: usize,
}

impl<B: Backend> Clock<'_, B> {
    fn time(&self, mut stage: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        let wait = || self.backend.read(&self.last, &mut [0]);
        // Kernels are compiled, and memory is taken.
        stage()?;
        wait()?;
        let mut seconds = Vec::new();
        for _ in 0..self.rounds {
            let start = Instant::now();
            (0..self.calls).try_for_each(|_| stage())?;
            wait()?;
            seconds.push(start.elapsed().as_secs_f64() / self.calls as f64);
        }
        Ok(median(seconds))
    }
}

/// Normal numbers of this scale.
fn normal<B: Memory>(backend: &B, count: usize, scale: f32) -> Result<B::Buffer<f32>, Error> {
    let mut random = Random(count as u64);
    // As many different ones as a cache holds.
    let some: Vec<f32> = (0..count.min(1 << 16))
        .map(|_| random.normal() * scale)
        .collect();
    let all: Vec<f32> = some.iter().copied().cycle().take(count).collect();
    backend.upload(&all)
}

/// Experts' matrices, or their gradients.
fn matrices<B: Memory>(backend: &B, sizes: &Sizes) -> Result<ExpertBuffers<B>, Error> {
    let (width, hidden) = (sizes.shape.width, sizes.shape.hidden);
    let count = sizes.experts * width * hidden;
    let of = |columns: usize| normal(backend, count, (columns as f32).sqrt().recip());
    Ok(ExpertBuffers {
        gate: Some(of(width)?),
        up: of(width)?,
        down: of(hidden)?,
    })
}

/// Seconds a call of every stage, in the order of [`Sizes::stages`].
pub(super) fn measure<B: Backend>(
    backend: &B,
    sizes: &Sizes,
    calls: usize,
    rounds: usize,
) -> Result<[f64; STAGES], Error> {
    let (tokens, width) = (sizes.tokens, sizes.shape.width);
    let clock = Clock {
        backend,
        last: backend.upload(&[0])?,
        calls,
        rounds,
    };
    let routing = route([tokens, sizes.experts, sizes.top_k], 0.0, &mut Random(1));
    let instance = |row: usize| routing.offsets.partition_point(|&offset| offset <= row) - 1;
    let ids = routing.rows.iter().map(|&row| instance(row) as i32);
    let ids = Array2::from_shape_vec((tokens, sizes.top_k), ids.collect()).expect("an id a pair");
    let gates = Array2::from_elem(ids.dim(), 1.0 / sizes.top_k as f32);
    let pairs = Pairs::new(ids.view(), gates.view(), sizes.experts, 0)?;
    let pairs = backend.pairs(&pairs)?;

    let dy = normal(backend, tokens * width, 1.0)?;
    let (mut dy_norms, mut h_norms) = Default::default();
    let norms = clock.time(|| backend.squared_norms(&dy, [tokens, width], &mut dy_norms))?;

    // Rows of all pairs, and the experts' outputs.
    let index: Vec<u32> = routing.tokens.iter().map(|&token| token as u32).collect();
    let index = backend.row_index(&index, tokens)?;
    let mut x = B::Buffer::default();
    let gather = clock.time(|| backend.gather(&dy, width, &index, &mut x))?;
    let (weights, mut scratch, mut y) = (
        matrices(backend, sizes)?,
        B::Scratch::default(),
        B::Buffer::default(),
    );
    let forward = clock.time(|| {
        let norms = Some(&mut h_norms);
        let offsets = &routing.offsets;
        backend.forward(
            &sizes.shape,
            &weights,
            offsets,
            &x,
            &mut scratch,
            &mut y,
            norms,
            None,
        )
    })?;

    // Norms are by row, scores by pair.
    let by_row: Vec<SquaredNorm> = backend.download(&h_norms)?;
    let by_pair: Vec<_> = routing.rows.iter().map(|&row| by_row[row]).collect();
    let h_norms = backend.upload(&by_pair)?;
    let score = || {
        let factors = (Some(&dy_norms), Some(&h_norms));
        backend.score(Score::DownGrad, &pairs, factors.0, factors.1, &mut Solo)
    };
    let scoring = clock.time(|| score().map(drop))?;
    let loads = routing.offsets.windows(2).map(|ends| ends[1] - ends[0]);
    let kept = kept_of(sizes, loads);
    let quotas: Vec<u32> = kept
        .windows(2)
        .map(|ends| (ends[1] - ends[0]) as u32)
        .collect();
    let draw = Draw {
        seed: 1,
        step: 0,
        layer: 0,
    };
    let scores = score()?;
    let selection = clock.time(|| {
        let method = Method::Priority;
        let kept = backend.select(method, &pairs, &scores, &quotas, draw, &mut Solo)?;
        drop(kept);
        Ok(())
    })?;

    // Row by row, the pair it is of.
    let mut of_rows = vec![0_u32; routing.rows.len()];
    for (pair, &row) in routing.rows.iter().enumerate() {
        of_rows[row] = pair as u32;
    }
    let places = backend.pair_rows(&of_rows, tokens, sizes.top_k)?;
    let (p, mut sums) = (
        normal(backend, of_rows.len(), 1.0)?,
        backend.upload(&[0.0])?,
    );
    backend.zero(&mut sums, tokens * width)?;
    let scatter = clock.time(|| backend.scatter_add(&y, width, &places, Some(&p), &mut sums))?;

    let rows = *kept.last().expect("experts");
    let (x, dy) = (
        normal(backend, rows * width, 1.0)?,
        normal(backend, rows * width, 1.0)?,
    );
    let (p, w) = (normal(backend, rows, 1.0)?, normal(backend, rows, 1.0)?);
    let inputs = RowBuffers::<B> {
        x: &x,
        dy: &dy,
        gate_weights: &p,
        weights: &w,
    };
    let (mut dx, mut dp) = Default::default();
    let mut gradients = matrices(backend, sizes)?;
    let accumulate = vec![false; sizes.experts];
    let backward = clock.time(|| {
        let (shape, gradients) = (&sizes.shape, &mut gradients);
        backend.backward(
            shape,
            &weights,
            &kept,
            &inputs,
            None,
            &mut scratch,
            &mut dx,
            &mut dp,
            gradients,
            &accumulate,
        )
    })?;
    Ok([
        norms, scoring, selection, gather, scatter, forward, backward,
    ])
}

/// Where each expert's kept rows begin: its share of what is kept, by its load.
fn kept_of(sizes: &Sizes, loads: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut before = 0;
    let share = |before: usize| before * sizes.kept / (sizes.tokens * sizes.top_k);
    let ends = loads.map(|load| {
        before += load;
        share(before)
    });
    std::iter::once(0).chain(ends).collect()
}
