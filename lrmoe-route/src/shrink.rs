use lrmoe_plan::Placement;
use ndarray::{Array2, ArrayView2};

use crate::balance::{Stuck, bounds};
use crate::request::Request;
use crate::table::experts_of;
use crate::{Error, error};

/// Counts that fit the capacities, and what had to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shrunk {
    /// Pairs that stay, over all ranks, `[experts]`.
    pub quotas: Vec<u32>,
    /// Pairs that stay, `[source ranks, experts]`: what to [`route`](crate::route()).
    pub counts: Array2<u32>,
    /// Pairs that left, `[source ranks, experts]`: of each rank and expert the last in order of pair id.
    pub left: Array2<u32>,
}

/// Reduces `counts`, `[source ranks, experts]`, until the ranks have room for all of them: the explicit
/// alternative to [`Error::NoRoom`].
///
/// As few pairs leave as possible. Experts that compete for room keep equal shares of their pairs, by largest
/// remainder; so do the source ranks of an expert. Ties go to the lower id. Pairs are not told apart here: to
/// choose them by value, plan quotas within the capacities, or select again with the quotas returned.
///
/// # Errors
///
/// [`Error::Mismatch`] if the inputs differ in ranks or experts, [`Error::Layout`], or [`Error::TooManyPairs`].
pub fn shrink(
    counts: ArrayView2<'_, u32>,
    placement: &Placement,
    capacities: &[u64],
) -> Result<Shrunk, Error> {
    let request = Request::new(counts, placement, Some(capacities))?;
    let quotas = fair_quotas(&request);
    let mut kept = Array2::zeros(counts.raw_dim());
    for (expert, &quota) in quotas.iter().enumerate() {
        let shares = shares(counts.column(expert).iter().copied(), quota.into());
        for (kept, share) in kept.column_mut(expert).iter_mut().zip(shares) {
            *kept = share;
        }
    }
    let left = &counts - &kept;
    Ok(Shrunk {
        quotas,
        counts: kept,
        left,
    })
}

impl Shrunk {
    /// Splits ascending local pair ids of one source rank into those that stay and those that left.
    ///
    /// `expert_ids` are the experts of all local pairs of the rank.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`], [`Error::PairOutOfRange`], [`Error::PairOrder`], [`Error::ExpertOutOfRange`]
    /// (also for masked pairs), or [`Error::PairCount`] if the pairs are not as many, expert by expert, as were
    /// counted.
    pub fn split(
        &self,
        source: usize,
        expert_ids: &[i32],
        pairs: &[u32],
    ) -> Result<(Vec<u32>, Vec<u32>), Error> {
        let (ranks, experts) = self.counts.dim();
        if source >= ranks {
            return Err(Error::RankOutOfRange {
                rank: source,
                ranks,
            });
        }
        let experts_of_pairs = experts_of(expert_ids, pairs, experts)?;
        let mut seen = vec![0_u64; experts];
        let (mut stay, mut left) = (Vec::new(), Vec::new());
        for (&pair, expert) in pairs.iter().zip(experts_of_pairs) {
            let expert = expert?;
            let stays = seen[expert] < self.counts[[source, expert]].into();
            if stays { &mut stay } else { &mut left }.push(pair);
            seen[expert] += 1;
        }
        for (expert, got) in seen.into_iter().enumerate() {
            let expected =
                u64::from(self.counts[[source, expert]]) + u64::from(self.left[[source, expert]]);
            error::expect_pairs(source, expert, expected, got)?;
        }
        Ok((stay, left))
    }
}

/// Pairs that each expert keeps.
///
/// Decomposition of a polymatroid: give each expert its share of all room. Where that does not fit, the minimum cut
/// marks ranks and the experts that live only there; these share the room there, and the others share the rest.
fn fair_quotas(request: &Request<'_>) -> Vec<u32> {
    let mut quotas = vec![0; request.per_expert.len()];
    let all = (vec![true; request.ranks()], vec![true; quotas.len()]);
    let mut work = vec![all];
    while let Some((ranks, experts)) = work.pop() {
        let room = keep(&request.room, &ranks);
        let total = room.iter().map(|&rows| rows as u64).sum();
        let demand = shares(keep(&request.per_expert, &experts), total);
        match bounds(request, &demand, &room) {
            Ok(_) => {
                for (quota, share) in quotas.iter_mut().zip(demand) {
                    *quota += share;
                }
            }
            Err(Stuck(stuck)) => {
                // Whether all instances of an expert that are in play are stuck.
                let confined = |expert: usize| {
                    let mut instances = request.placement.instances_of(expert).iter();
                    instances.all(|&instance| {
                        let rank = request.rank_of(instance);
                        stuck[rank] || !ranks[rank]
                    })
                };
                for inside in [false, true] {
                    let here = (0..ranks.len()).map(|i| ranks[i] && stuck[i] == inside);
                    let sharing = (0..experts.len()).map(|i| experts[i] && confined(i) == inside);
                    work.push((here.collect(), sharing.collect()));
                }
            }
        }
    }
    quotas
}

/// The values marked, and 0 for the others.
fn keep<T: Copy + Default>(values: &[T], marked: &[bool]) -> Vec<T> {
    let kept = values
        .iter()
        .zip(marked)
        .map(|(&value, &marked)| if marked { value } else { T::default() });
    kept.collect()
}

/// Shares of `total` in proportion to `weights`, by largest remainder, at most the weights themselves.
fn shares(weights: impl IntoIterator<Item = u32>, total: u64) -> Vec<u32> {
    let weights: Vec<u32> = weights.into_iter().collect();
    let sum: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
    if total >= sum {
        return weights;
    }
    let product = |weight: u32| u64::from(weight) * total;
    let mut shares: Vec<u32> = weights
        .iter()
        .map(|&weight| (product(weight) / sum) as u32)
        .collect();
    let given: u64 = shares.iter().map(|&share| u64::from(share)).sum();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(product(weights[i]) % sum));
    for &i in &order[..(total - given) as usize] {
        shares[i] += 1;
    }
    shares
}
