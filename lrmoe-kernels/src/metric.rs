use std::{borrow::Cow, fmt};

use lrmoe_metric::{Draw, Exchange, Method, Pairs, Score, Scores, SquaredNorm};

use crate::{Error, FfnElement, Memory};

/// Squared norms, scores and selections in a backend's memory: [`lrmoe_metric`], bit for bit.
///
/// Nothing that grows with the rows goes to the host. Across ranks, histograms and counts per expert are exchanged by the host.
pub trait SelectPairs: Memory {
    /// The pairs of a rank.
    type Pairs<'a>: fmt::Debug;
    /// Squared scores of all pairs of a rank.
    type Scores: fmt::Debug;

    /// Takes up checked pairs.
    ///
    /// # Errors
    ///
    /// Those of [`Memory::resize`].
    fn pairs<'a>(&self, pairs: &Pairs<'a>) -> Result<Self::Pairs<'a>, Error>;

    /// The squared norm of each of the rows of this shape, `[n, width]`, into `norms` `[n]`; see [`lrmoe_metric::squared_norms`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `rows` has another number of elements; those of [`Memory::resize`].
    fn squared_norms<T: FfnElement>(
        &self,
        rows: &Self::Buffer<T>,
        shape: [usize; 2],
        norms: &mut Self::Buffer<SquaredNorm>,
    ) -> Result<(), Error>;

    /// Scores of all pairs; see [`lrmoe_metric::score`].
    ///
    /// # Errors
    ///
    /// [`Error::Metric`] for what that function refuses; those of [`Memory`].
    fn score<E: Exchange>(
        &self,
        score: Score,
        pairs: &Self::Pairs<'_>,
        dy: Option<&Self::Buffer<SquaredNorm>>,
        h: Option<&Self::Buffer<SquaredNorm>>,
        exchange: &mut E,
    ) -> Result<Self::Scores, Error>;

    /// The scores on the host, for a [profile](lrmoe_metric::Profile).
    ///
    /// # Errors
    ///
    /// Those of [`Memory::read`].
    fn host_scores<'a>(&self, scores: &'a Self::Scores) -> Result<Cow<'a, Scores>, Error>;

    /// Keys of a caller's scores `[tokens * top_k]`; see [`lrmoe_metric::keys_from_scores`].
    ///
    /// # Errors
    ///
    /// [`Error::Metric`] for what that function refuses; those of [`Memory`].
    fn keys_from_scores(
        &self,
        pairs: &Self::Pairs<'_>,
        scores: &Self::Buffer<f32>,
    ) -> Result<Self::Buffer<u32>, Error>;

    /// Keeps the pairs with the largest keys; see [`lrmoe_metric::select_keys`].
    ///
    /// # Errors
    ///
    /// [`Error::Metric`] for what that function refuses; those of [`Memory`].
    fn select_keys<E: Exchange>(
        &self,
        pairs: &Self::Pairs<'_>,
        keys: &Self::Buffer<u32>,
        quotas: &[u32],
        exchange: &mut E,
    ) -> Result<KeptKeys<Self>, Error>;

    /// Keeps pairs by their scores; see [`lrmoe_metric::select`].
    ///
    /// # Errors
    ///
    /// [`Error::Metric`] for what that function refuses; those of [`Memory`].
    fn select<E: Exchange>(
        &self,
        method: Method,
        pairs: &Self::Pairs<'_>,
        scores: &Self::Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
    ) -> Result<Kept<Self>, Error>;
}

/// Pairs that were kept by their keys, as [`lrmoe_metric::KeySelection`].
#[derive(Debug)]
pub struct KeptKeys<B: Memory + ?Sized> {
    /// Local pair ids, ascending.
    pub pairs: B::Buffer<u32>,
    /// Per expert the key that follows the kept ones over all ranks, 0 if there is none.
    pub next: B::Buffer<u32>,
}

/// Pairs that were kept, as [`lrmoe_metric::Selection`].
#[derive(Debug)]
pub struct Kept<B: Memory + ?Sized> {
    /// Local pair ids, ascending.
    pub pairs: B::Buffer<u32>,
    /// Weight of each kept pair's term in the weight gradients, at least 1.
    pub weights: B::Buffer<f32>,
}
