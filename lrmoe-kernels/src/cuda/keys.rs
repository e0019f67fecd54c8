use lrmoe_metric::{Draw, Error as MetricError, Method, Score};

use super::{
    Buffer, Cuda, Pairs, Scores,
    kernel::{Kernel, THREADS},
    metric::check_length,
};
use crate::{Error, Memory};

// What keys come from; as in keys.cu.
const BY_SCORE: u64 = 0;
const BY_PRIORITY: u64 = 1;
const AT_RANDOM: u64 = 2;

impl Cuda {
    /// Keys of a method.
    pub(super) fn method_keys(
        &self,
        method: Method,
        pairs: &Pairs,
        scores: &Scores,
        draw: Draw,
    ) -> Result<Buffer<u32>, Error> {
        let by = match (method, scores.kind) {
            (Method::Priority, _) => BY_PRIORITY,
            (Method::Top, Score::Random) => AT_RANDOM,
            (Method::Top, _) => BY_SCORE,
        };
        let bad = Buffer::default();
        self.keys(
            Kernel::MethodKeys,
            pairs,
            &scores.squared,
            &bad,
            (by, Some(draw)),
        )
    }

    /// Keys of a caller's scores.
    pub(super) fn score_keys(
        &self,
        pairs: &Pairs,
        scores: &Buffer<f32>,
    ) -> Result<Buffer<u32>, Error> {
        let bad: Buffer<u32> = self.upload(&[0])?;
        let keys = self.keys(Kernel::ScoreKeys, pairs, scores, &bad, (BY_SCORE, None))?;
        let mut found = [0];
        self.read(&bad, &mut found)?;
        match found[0] {
            0 => Ok(keys),
            found => Err(self.bad_score(pairs, scores, !found as usize)?),
        }
    }

    fn keys(
        &self,
        kernel: Kernel,
        pairs: &Pairs,
        scores: &Buffer<f32>,
        bad: &Buffer<u32>,
        (by, draw): (u64, Option<Draw>),
    ) -> Result<Buffer<u32>, Error> {
        check_length("scores", Self::len(scores), pairs.len())?;
        let mut keys = Buffer::default();
        self.resize(&mut keys, pairs.len())?;
        let parameters = [
            self.address(&pairs.ids)?,
            self.address(scores)?,
            self.address(&keys)?,
            self.address(bad)?,
            pairs.len() as u64,
            pairs.global(0),
            by,
            draw.map_or(0, |draw| draw.seed),
            draw.map_or(0, |draw| draw.step.into()),
            draw.map_or(0, |draw| draw.layer.into()),
        ];
        // SAFETY: as in keys.cu; there is a score and a key for each pair, and a word for what `score_keys` finds.
        unsafe { self.launch(kernel, pairs.len().div_ceil(THREADS), &parameters) }?;
        Ok(keys)
    }

    fn bad_score(&self, pairs: &Pairs, scores: &Buffer<f32>, at: usize) -> Result<Error, Error> {
        let (expert, score) = (self.download(&pairs.ids)?[at], self.download(scores)?[at]);
        let (pair, expert) = (pairs.global(at), expert as usize);
        Ok(Error::Metric(if score.is_nan() {
            MetricError::NanScore { pair, expert }
        } else {
            MetricError::NegativeScore {
                pair,
                expert,
                score,
            }
        }))
    }
}
