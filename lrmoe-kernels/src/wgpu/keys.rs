use std::ops::Range;

use lrmoe_metric::{Draw, Error as MetricError, Method, Score};

use super::{Buffer, Pairs, Scores, Wgpu, batch::Batch, kernel::Kernel, metric::check_length};
use crate::{Error, Memory};

/// Threads of a workgroup.
const THREADS: usize = 256;

// What keys come from; as in keys.wgsl.
const BY_SCORE: u32 = 0;
const BY_PRIORITY: u32 = 1;
const AT_RANDOM: u32 = 2;

impl Wgpu {
    /// Ranges of pairs for which a word each fits in a binding.
    pub(super) fn pair_ranges(
        &self,
        pairs: usize,
    ) -> Result<impl Iterator<Item = Range<usize>> + Clone + use<>, Error> {
        let most = self.per_window("a pair", 1)?;
        // Whole blocks of a selection, unless a binding does not hold one.
        let step = (most - most % super::select::BLOCK).max(super::select::BLOCK.min(most));
        Ok((0..pairs)
            .step_by(step)
            .map(move |start| start..pairs.min(start + step)))
    }

    /// Keys of a method.
    pub(super) fn method_keys(
        &self,
        method: Method,
        pairs: &Pairs,
        scores: &Scores,
        draw: Draw,
    ) -> Result<Buffer<u32>, Error> {
        check_length("scores", Self::len(&scores.squared), pairs.len())?;
        let by = match (method, scores.kind) {
            (Method::Priority, _) => BY_PRIORITY,
            (Method::Top, Score::Random) => AT_RANDOM,
            (Method::Top, _) => BY_SCORE,
        };
        let mut keys = Buffer::default();
        self.resize(&mut keys, pairs.len())?;
        let mut batch = Batch::new(self);
        for range in self.pair_ranges(pairs.len())? {
            let from = self.window(&scores.squared, range.clone());
            let to = self.window(&keys, range.clone());
            let [global, seed] = [pairs.global(range.start), draw.seed]
                .map(|word| [word as u32, (word >> 32) as u32]);
            let parameters = [
                range.len() as u32,
                range.start as u32,
                global[0],
                global[1],
                by,
                seed[0],
                seed[1],
                draw.step,
                draw.layer,
                0,
                from.base,
                to.base,
            ];
            let groups = range.len().div_ceil(THREADS);
            let bindings = [(2, from.into()), (3, to.into())];
            batch.dispatch(Kernel::MethodKeys, groups, &parameters, &bindings);
        }
        batch.submit()?;
        Ok(keys)
    }

    /// Keys of a caller's scores.
    pub(super) fn score_keys(
        &self,
        pairs: &Pairs,
        scores: &Buffer<f32>,
    ) -> Result<Buffer<u32>, Error> {
        check_length("scores", Self::len(scores), pairs.len())?;
        let mut keys = Buffer::default();
        self.resize(&mut keys, pairs.len())?;
        let bad: Buffer<u32> = self.upload(&[0])?;
        let mut batch = Batch::new(self);
        for range in self.pair_ranges(pairs.len())? {
            let ids = self.window(&pairs.ids, range.clone());
            let from = self.window(scores, range.clone());
            let to = self.window(&keys, range.clone());
            let mut parameters = [0; 12];
            parameters[..2].copy_from_slice(&[range.len() as u32, range.start as u32]);
            parameters[9..].copy_from_slice(&[ids.base, from.base, to.base]);
            let groups = range.len().div_ceil(THREADS);
            let found = self.window(&bad, 0..1);
            let bindings = [
                (1, ids.into()),
                (2, from.into()),
                (3, to.into()),
                (4, found.into()),
            ];
            batch.dispatch(Kernel::ScoreKeys, groups, &parameters, &bindings);
        }
        batch.submit()?;
        let mut found = [0];
        self.read(&bad, &mut found)?;
        match found[0] {
            0 => Ok(keys),
            found => Err(self.bad_score(pairs, scores, !found as usize)?),
        }
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
