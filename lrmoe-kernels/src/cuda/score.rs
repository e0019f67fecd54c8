use lrmoe_metric::{Error as MetricError, Row, Score, SquaredNorm};

use super::{
    Buffer, Cuda, Pairs,
    kernel::{Kernel, THREADS},
    metric::check_length,
};
use crate::{Error, Memory};

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
            check_length("squared norms", Cuda::len(norms), length)?;
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

impl Cuda {
    /// Largest scales of the finite norms of dy and of rows that unmasked pairs use; an error for the first pair whose score is NaN.
    pub(super) fn largest_scales(&self, factors: &Factors<'_>) -> Result<[u32; 2], Error> {
        let pairs = factors.pairs;
        let found: Buffer<u32> = self.upload(&[0; 3])?;
        self.launch_score(Kernel::ScanFactors, factors, &found, None, [0; 2])?;
        let mut values = [0; 3];
        self.read(&found, &mut values)?;
        let [not_a_number, dy, rows] = values;
        if not_a_number == 0 {
            return Ok([dy, rows]);
        }
        let pair = !not_a_number as usize;
        let ids = self.download(&pairs.ids)?;
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
        let mut squared = Buffer::default();
        self.resize(&mut squared, factors.pairs.len())?;
        let (kernel, nothing) = (Kernel::SquaredScores, Buffer::default());
        self.launch_score(kernel, factors, &nothing, Some(&squared), scales)?;
        Ok(squared)
    }

    fn launch_score(
        &self,
        kernel: Kernel,
        factors: &Factors<'_>,
        found: &Buffer<u32>,
        squared: Option<&Buffer<f32>>,
        scales: [u32; 2],
    ) -> Result<(), Error> {
        let pairs = factors.pairs;
        let address =
            |norms: Option<&Buffer<SquaredNorm>>| norms.map_or(Ok(0), |norms| self.address(norms));
        let parameters = [
            self.address(&pairs.ids)?,
            self.address(&pairs.gates)?,
            address(factors.dy)?,
            address(factors.rows)?,
            self.address(found)?,
            squared.map_or(Ok(0), |squared| self.address(squared))?,
            pairs.len() as u64,
            pairs.top_k as u64,
            factors.pairs_of_row as u64,
            factors.uses_gate.into(),
            scales[0].into(),
            scales[1].into(),
        ];
        // SAFETY: as in score.cu; `Factors` has checked that there are norms for all tokens and pairs, and the kernel's own output is given.
        unsafe { self.launch(kernel, pairs.len().div_ceil(THREADS), &parameters) }
    }
}
