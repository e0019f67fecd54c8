use std::borrow::Cow;

use lrmoe_metric::{
    Draw, Error as MetricError, Exchange, Method, Score, Scores as HostScores, SquaredNorm,
};

use super::{Buffer, Cuda, score::Factors};
use crate::{Error, FfnElement, Kept, KeptKeys, Memory, SelectPairs, cuts::settle};

/// The routed pairs of a rank in the memory of the device.
#[derive(Debug)]
pub struct Pairs {
    /// `[tokens * top_k]`, as the gate weights.
    pub(super) ids: Buffer<i32>,
    pub(super) gates: Buffer<f32>,
    pub(super) top_k: usize,
    first_pair: u64,
    /// Unmasked pairs of each expert, `[experts]`, on the host.
    pub(super) loads: Vec<u32>,
}

impl Pairs {
    pub(super) fn len(&self) -> usize {
        Cuda::len(&self.ids)
    }

    pub(super) fn experts(&self) -> usize {
        self.loads.len()
    }

    /// Global id of a local pair.
    pub(super) fn global(&self, pair: usize) -> u64 {
        self.first_pair + pair as u64
    }

    pub(super) fn tokens(&self) -> usize {
        self.len() / self.top_k
    }
}

/// Squared scores of all pairs of a rank in the memory of the device; see [`lrmoe_metric::Scores`].
#[derive(Debug)]
pub struct Scores {
    pub(super) kind: Score,
    /// `[tokens * top_k]`
    pub(super) squared: Buffer<f32>,
    exponent: i32,
}

impl SelectPairs for Cuda {
    type Pairs<'a> = Pairs;
    type Scores = Scores;

    fn pairs<'a>(&self, pairs: &lrmoe_metric::Pairs<'a>) -> Result<Pairs, Error> {
        Ok(Pairs {
            ids: self.upload(pairs.expert_ids())?,
            gates: self.upload(pairs.gate_weights())?,
            top_k: pairs.top_k(),
            first_pair: pairs.first_pair(),
            loads: pairs.loads(),
        })
    }

    fn squared_norms<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        shape: [usize; 2],
        norms: &mut Buffer<SquaredNorm>,
    ) -> Result<(), Error> {
        self.norms_of(rows, shape, norms)
    }

    fn score<E: Exchange>(
        &self,
        score: Score,
        pairs: &Pairs,
        dy: Option<&Buffer<SquaredNorm>>,
        rows: Option<&Buffer<SquaredNorm>>,
        exchange: &mut E,
    ) -> Result<Scores, Error> {
        let local = Factors::new(score, pairs, dy, rows)
            .and_then(|factors| Ok((self.largest_scales(&factors)?, factors)));
        let mut shared = match &local {
            Ok(([dy, rows], _)) => [*dy, *rows, 0],
            Err(_) => [0, 0, 1],
        };
        exchange.max(&mut shared).map_err(MetricError::Exchange)?;
        let [dy_scale, rows_scale, failed] = shared;
        let (_, factors) = settle(local, failed)?;
        Ok(Scores {
            kind: score,
            squared: self.squared_scores(&factors, [dy_scale, rows_scale])?,
            exponent: factors.exponent([dy_scale, rows_scale]),
        })
    }

    fn host_scores<'a>(&self, scores: &'a Scores) -> Result<Cow<'a, HostScores>, Error> {
        let squared = self.download(&scores.squared)?;
        let (kind, exponent) = (scores.kind, scores.exponent);
        let scores = HostScores::from_squared(kind, squared, exponent)?;
        Ok(Cow::Owned(scores))
    }

    fn keys_from_scores(&self, pairs: &Pairs, scores: &Buffer<f32>) -> Result<Buffer<u32>, Error> {
        self.score_keys(pairs, scores)
    }

    fn select_keys<E: Exchange>(
        &self,
        pairs: &Pairs,
        keys: &Buffer<u32>,
        quotas: &[u32],
        exchange: &mut E,
    ) -> Result<KeptKeys<Self>, Error> {
        self.select_checked(pairs, Ok(keys), quotas, exchange)
    }

    fn select<E: Exchange>(
        &self,
        method: Method,
        pairs: &Pairs,
        scores: &Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
    ) -> Result<Kept<Self>, Error> {
        // A failure here has to reach the other ranks.
        let (keys, failure) = match self.method_keys(method, pairs, scores, draw) {
            Ok(keys) => (keys, None),
            Err(error) => (Buffer::default(), Some(error)),
        };
        let keys = failure.map_or(Ok(&keys), Err);
        let kept = self.select_checked(pairs, keys, quotas, exchange)?;
        let weights = self.weights(method, pairs, scores, &kept)?;
        Ok(Kept {
            pairs: kept.pairs,
            weights,
        })
    }
}

/// As [`lrmoe_metric`] refuses lengths.
pub(super) fn check_length(what: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Metric(MetricError::Length {
        what,
        found,
        expected,
    }))
}
