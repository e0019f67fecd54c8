use std::ops::Range;

use lrmoe_metric::{Error as MetricError, Row, Score, SquaredNorm};

use super::{
    Buffer, Pairs, Wgpu,
    batch::{Batch, Binding},
    buffer::Window,
    kernel::Kernel,
    metric::check_length,
};
use crate::{Error, Memory};

/// Threads of a workgroup.
const THREADS: usize = 256;

/// Which parameter says where squared scores go.
const SQUARED_BASE: usize = 13;

/// The factors of a score that are in use.
pub(super) struct Factors<'a> {
    pairs: &'a Pairs,
    uses_gate: bool,
    dy: Option<&'a Buffer<SquaredNorm>>,
    rows: Option<&'a Buffer<SquaredNorm>>,
    /// Pairs that share a norm of `rows`.
    pairs_of_row: usize,
}

impl<'a> Factors<'a> {
    pub(super) fn new(
        score: Score,
        pairs: &'a Pairs,
        dy: Option<&'a Buffer<SquaredNorm>>,
        rows: Option<&'a Buffer<SquaredNorm>>,
    ) -> Result<Self, Error> {
        let norms = |what: Option<&'static str>, norms: Option<&'a Buffer<SquaredNorm>>, length| {
            let Some(what) = what else {
                return Ok(None);
            };
            let norms = norms.ok_or(MetricError::MissingNorms { score, what })?;
            check_length("squared norms", Wgpu::len(norms), length)?;
            Ok::<_, Error>(Some(norms))
        };
        let row = score.row();
        let pairs_of_row = match row.is_some_and(Row::is_per_token) {
            true => pairs.top_k,
            false => 1,
        };
        Ok(Self {
            pairs,
            uses_gate: score.has_gate(),
            dy: norms(score.has_dy().then_some("dy"), dy, pairs.tokens())?,
            rows: norms(row.map(Row::name), rows, pairs.len() / pairs_of_row)?,
            pairs_of_row,
        })
    }

    /// The exponent of scores relative to these scales of dy and rows.
    pub(super) fn exponent(&self, scales: [u32; 2]) -> i32 {
        [self.dy, self.rows]
            .iter()
            .zip(scales)
            .filter(|(norms, scale)| norms.is_some() && *scale > 0)
            .map(|(_, scale)| scale as i32 - 128)
            .sum()
    }
}

impl Wgpu {
    /// Largest scales of the finite norms of dy and of rows that unmasked pairs use; an error for the first pair whose score is NaN.
    pub(super) fn largest_scales(&self, factors: &Factors<'_>) -> Result<[u32; 2], Error> {
        let pairs = factors.pairs;
        let found: Buffer<u32> = self.upload(&[0; 3])?;
        let mut batch = Batch::new(self);
        for range in self.token_ranges(pairs)? {
            let (parameters, mut bindings) = self.bind(factors, range.clone(), [0; 2]);
            bindings.push((5, self.window(&found, 0..3).into()));
            let groups = range.len().div_ceil(THREADS);
            batch.dispatch(Kernel::ScanFactors, groups, &parameters, &bindings);
        }
        batch.submit()?;
        let mut values = [0; 3];
        self.read(&found, &mut values)?;
        let [not_a_number, dy, rows] = values;
        if not_a_number == 0 {
            return Ok([dy, rows]);
        }
        let pair = !not_a_number as usize;
        let mut ids = vec![0; pairs.len()];
        self.read(&pairs.ids, &mut ids)?;
        Err(Error::Metric(MetricError::NanScore {
            pair: pairs.global(pair),
            expert: ids[pair] as usize,
        }))
    }

    /// Squared scores of all pairs, none of which is NaN.
    pub(super) fn squared_scores(
        &self,
        factors: &Factors<'_>,
        scales: [u32; 2],
    ) -> Result<Buffer<f32>, Error> {
        let pairs = factors.pairs;
        let mut squared = Buffer::default();
        self.resize(&mut squared, pairs.len())?;
        let mut batch = Batch::new(self);
        for range in self.token_ranges(pairs)? {
            let (mut parameters, mut bindings) = self.bind(factors, range.clone(), scales);
            let to = self.window(&squared, range.clone());
            parameters[SQUARED_BASE] = to.base;
            bindings.push((6, to.into()));
            let groups = range.len().div_ceil(THREADS);
            batch.dispatch(Kernel::SquaredScores, groups, &parameters, &bindings);
        }
        batch.submit()?;
        Ok(squared)
    }

    /// Pairs of whole tokens, so many at a time that what is known of them fits in a binding.
    fn token_ranges(
        &self,
        pairs: &Pairs,
    ) -> Result<impl Iterator<Item = Range<usize>> + use<>, Error> {
        let step = pairs.top_k * self.per_window("a token's norms", 2 * pairs.top_k)?;
        let len = pairs.len();
        Ok((0..len)
            .step_by(step)
            .map(move |start| start..len.min(start + step)))
    }

    /// Parameters and bindings of these pairs, but for where results go.
    fn bind<'a>(
        &self,
        factors: &Factors<'a>,
        range: Range<usize>,
        scales: [u32; 2],
    ) -> (Vec<u32>, Vec<(u32, Binding<'a>)>) {
        let (pairs, top_k) = (factors.pairs, factors.pairs.top_k);
        let of_norms = |norms: Option<&'a Buffer<SquaredNorm>>, range| {
            norms.map_or(Window::NOTHING, |norms| self.window(norms, range))
        };
        let ids = self.window(&pairs.ids, range.clone());
        let gates = self.window(&pairs.gates, range.clone());
        let dy = of_norms(factors.dy, range.start / top_k..range.end / top_k);
        let pairs_of_row = factors.pairs_of_row;
        let rows = of_norms(
            factors.rows,
            range.start / pairs_of_row..range.end / pairs_of_row,
        );
        let parameters = vec![
            range.len() as u32,
            range.start as u32,
            top_k as u32,
            pairs_of_row as u32,
            factors.uses_gate.into(),
            factors.dy.is_some().into(),
            factors.rows.is_some().into(),
            scales[0],
            scales[1],
            ids.base,
            gates.base,
            dy.base,
            rows.base,
            0,
        ];
        let windows = [(1, ids), (2, gates), (3, dy), (4, rows)];
        let bindings = windows.map(|(number, window)| (number, window.into()));
        (parameters, bindings.into())
    }
}
