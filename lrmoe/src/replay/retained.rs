//! Which pairs run backward: really selected where the trace has scores, else dealt in proportion.

use lrmoe_metric::{Draw, Method, Pairs, Profile, Score, Scores, Solo, SquaredNorm, score, select};
use lrmoe_plan::Loads;
use ndarray::{Array2, ArrayView2};

use super::source::ScoredPairs;
use crate::error::Error;

/// Shares of `total` in proportion to `weights` by largest remainder, ties to the lower index; at most the weights.
pub(super) fn apportion(total: u32, weights: &[u32]) -> Vec<u32> {
    let sum: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
    let total = u64::from(total);
    if total >= sum {
        return weights.to_vec();
    }
    let product = |weight: u32| u64::from(weight) * total;
    let shares = weights.iter().map(|&weight| (product(weight) / sum) as u32);
    let mut shares: Vec<u32> = shares.collect();
    let given: u64 = shares.iter().map(|&share| u64::from(share)).sum();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(product(weights[i]) % sum));
    for &i in &order[..(total - given) as usize] {
        shares[i] += 1;
    }
    shares
}

/// Divides each column's total among its rows in proportion to `weights`, `[rows, columns]`.
pub(super) fn apportion_columns(totals: &[u32], weights: ArrayView2<'_, u32>) -> Array2<u32> {
    let mut shares = Array2::zeros(weights.raw_dim());
    for ((&total, weights), mut shares) in totals
        .iter()
        .zip(weights.columns())
        .zip(shares.columns_mut())
    {
        let dealt = apportion(total, &weights.to_vec());
        shares
            .iter_mut()
            .zip(dealt)
            .for_each(|(s, dealt)| *s = dealt);
    }
    shares
}

/// The recorded pairs of one layer in one step, ready for selection.
pub(super) struct Recorded<'a> {
    pairs: Pairs<'a>,
    values: &'a [f32],
    scores: Scores,
    ranks: usize,
}

/// What a selection leaves.
#[derive(Debug)]
pub(super) struct Retained {
    /// Pairs by source rank and expert.
    pub(super) counts: Array2<u32>,
    /// Sum of their scores over that of all pairs; `None` without scores, or if these are all 0.
    pub(super) contribution: Option<f64>,
}

impl<'a> Recorded<'a> {
    /// `gates` is of the pairs' shape and all 1: the score is whole already.
    pub(super) fn new(
        recorded: &'a ScoredPairs,
        gates: ArrayView2<'a, f32>,
        ranks: usize,
        experts: usize,
    ) -> Result<Self, Error> {
        let pairs = Pairs::new(recorded.expert.view(), gates, experts, 0)?;
        let values = recorded
            .score
            .as_slice()
            .expect("selected rows are in standard layout");
        let norms: Vec<SquaredNorm> = values.iter().map(|&s| SquaredNorm::of(&[s])).collect();
        Ok(Self {
            scores: score(Score::Forward, &pairs, None, Some(&norms), &mut Solo)?,
            pairs,
            values,
            ranks,
        })
    }

    /// Feeds the profile.
    pub(super) fn observe(&self, profile: &mut Profile, decay: f32) -> Result<(), Error> {
        Ok(profile.observe(&self.pairs, &self.scores, decay, &mut Solo)?)
    }

    /// Selects within the quotas.
    pub(super) fn select(
        &self,
        method: Method,
        quotas: &[u32],
        draw: Draw,
    ) -> Result<Retained, Error> {
        let kept = select(method, &self.pairs, &self.scores, quotas, draw, &mut Solo)?;
        Ok(self.retained(kept.pairs.into_iter().map(|pair| pair as usize)))
    }

    /// The first pairs of each rank and expert, as many as `kept` says.
    pub(super) fn first(&self, kept: &Loads) -> Retained {
        let mut left = kept.counts().to_owned();
        let kept = (0..self.pairs.len()).filter(|&pair| {
            let Some(expert) = self.expert(pair) else {
                return false;
            };
            let left = &mut left[[self.rank_of(pair), expert]];
            let stays = *left > 0;
            *left -= u32::from(stays);
            stays
        });
        self.retained(kept)
    }

    /// `None` for a masked pair.
    fn expert(&self, pair: usize) -> Option<usize> {
        usize::try_from(self.pairs.expert_ids()[pair]).ok()
    }

    fn rank_of(&self, pair: usize) -> usize {
        pair * self.ranks / self.pairs.len()
    }

    fn retained(&self, kept: impl Iterator<Item = usize>) -> Retained {
        let mut counts = Array2::zeros((self.ranks, self.pairs.experts()));
        let mut sum = 0.0;
        for pair in kept {
            if let Some(expert) = self.expert(pair) {
                counts[[self.rank_of(pair), expert]] += 1;
                sum += f64::from(self.values[pair]);
            }
        }
        let all = (0..self.pairs.len()).filter(|&pair| self.expert(pair).is_some());
        let all: f64 = all.map(|pair| f64::from(self.values[pair])).sum();
        Retained {
            counts,
            contribution: (all > 0.0).then(|| sum / all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lrmoe_metric::local_quotas;
    use ndarray::array;

    #[test]
    fn shares_are_those_of_local_quotas() {
        let loads = array![[3, 1, 0, 9], [7, 1, 0, 9], [4, 5, 2, 9]];
        let quotas = [5, 3, 1, 13];
        let dealt = apportion_columns(&quotas, loads.view());
        for rank in 0..3 {
            let mine = local_quotas(&quotas, loads.view(), rank).expect("three ranks");
            assert_eq!(dealt.row(rank).to_vec(), mine);
        }
    }

    #[test]
    fn no_more_than_the_weights_are_dealt() {
        assert_eq!(apportion(100, &[3, 0, 4]), [3, 0, 4]);
        assert_eq!(apportion(0, &[3, 0, 4]), [0, 0, 0]);
        assert_eq!(apportion(0, &[]), Vec::<u32>::new());
    }

    #[test]
    fn the_first_pairs_of_a_rank_stay() {
        let recorded = ScoredPairs {
            expert: array![[0, 1], [0, -1], [0, 1], [1, 0]],
            score: array![[1.0, 2.0], [3.0, 0.0], [4.0, 5.0], [6.0, 3.0]],
        };
        let gates = Array2::ones((4, 2));
        let recorded = Recorded::new(&recorded, gates.view(), 2, 2).expect("pairs");
        let kept = Loads::new(array![[1, 1], [2, 1]]).expect("loads");
        let retained = recorded.first(&kept);
        assert_eq!(retained.counts, array![[1, 1], [2, 1]]);
        // Of 24 in all: 1 + 2 on the first rank, 4 + 5 + 3 on the second.
        assert_eq!(retained.contribution, Some(15.0 / 24.0));
    }
}
