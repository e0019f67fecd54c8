use std::{borrow::Cow, fmt};

use lrmoe_metric::{
    Draw, Exchange, Method, Pairs, Score, Scores, Selection, Selector, SquaredNorm,
};

use crate::{Error, FfnElement, Memory};

/// Squared norms, scores and selections in a backend's memory: [`lrmoe_metric`], bit for bit.
///
/// Nothing that grows with the rows goes to the host. Across ranks, histograms and counts per expert are exchanged by the host.
pub trait SelectPairs: Memory {
    /// The pairs of a rank.
    type Pairs<'a>: fmt::Debug;
    /// Squared scores of all pairs of a rank.
    type Scores: fmt::Debug + Send;

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

    /// Scores of all pairs from norms of dy and of the score's rows; see [`lrmoe_metric::score`].
    ///
    /// # Errors
    ///
    /// [`Error::Metric`] for what that function refuses; those of [`Memory`].
    fn score<E: Exchange>(
        &self,
        score: Score,
        pairs: &Self::Pairs<'_>,
        dy: Option<&Self::Buffer<SquaredNorm>>,
        rows: Option<&Self::Buffer<SquaredNorm>>,
        exchange: &mut E,
    ) -> Result<Self::Scores, Error>;

    /// As [`score`](Self::score), in the memory of earlier scores where the backend can.
    ///
    /// # Errors
    ///
    /// As for [`score`](Self::score).
    fn score_into<E: Exchange>(
        &self,
        score: Score,
        pairs: &Self::Pairs<'_>,
        [dy, rows]: [Option<&Self::Buffer<SquaredNorm>>; 2],
        exchange: &mut E,
        scores: &mut Option<Self::Scores>,
    ) -> Result<(), Error> {
        *scores = Some(self.score(score, pairs, dy, rows, exchange)?);
        Ok(())
    }

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

    /// As [`select`](Self::select), to the host: into the `selection` of `selector`.
    ///
    /// # Errors
    ///
    /// As for [`select`](Self::select).
    #[expect(
        clippy::too_many_arguments,
        reason = "those of `select`, and where it goes"
    )]
    fn select_to_host<E: Exchange>(
        &self,
        method: Method,
        pairs: &Self::Pairs<'_>,
        scores: &Self::Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
        selector: &mut Selector,
    ) -> Result<(), Error> {
        let kept = self.select(method, pairs, scores, quotas, draw, exchange)?;
        let Selection { pairs, weights } = &mut selector.selection;
        pairs.resize(Self::len(&kept.pairs), 0);
        self.read(&kept.pairs, pairs)?;
        weights.resize(Self::len(&kept.weights), 0.0);
        self.read(&kept.weights, weights)
    }
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
