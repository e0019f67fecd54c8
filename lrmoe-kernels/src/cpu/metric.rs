use std::borrow::Cow;

use lrmoe_metric::{
    Draw, Exchange, Method, Pairs, Score, Scores, Selector, SquaredNorm, keys_from_scores, score,
    score_into, select, select_keys,
};
use rayon::prelude::*;

use super::{
    Cpu, HostBuffer,
    isa::{Isa, vectorised},
};
use crate::{Error, FfnElement, Kept, KeptKeys, Memory, SelectPairs, error::check_length};

/// About as many elements make a task.
const TASK_ELEMENTS: usize = 1 << 16;

impl SelectPairs for Cpu {
    type Pairs<'a> = Pairs<'a>;
    type Scores = Scores;

    fn pairs<'a>(&self, pairs: &Pairs<'a>) -> Result<Pairs<'a>, Error> {
        Ok(*pairs)
    }

    fn squared_norms<T: FfnElement>(
        &self,
        rows: &HostBuffer<T>,
        [count, width]: [usize; 2],
        norms: &mut HostBuffer<SquaredNorm>,
    ) -> Result<(), Error> {
        check_length("rows", rows.len(), count.saturating_mul(width))?;
        self.resize(norms, count)?;
        if width == 0 {
            norms.fill(SquaredNorm::default());
            return Ok(());
        }
        let isa = Isa::detect();
        let task = (TASK_ELEMENTS / width).max(1);
        norms
            .par_chunks_mut(task)
            .zip(rows.par_chunks(task * width))
            .for_each(|(norms, rows)| norms_of_rows(isa, rows, width, norms));
        Ok(())
    }

    fn score<E: Exchange>(
        &self,
        kind: Score,
        pairs: &Pairs<'_>,
        dy: Option<&HostBuffer<SquaredNorm>>,
        rows: Option<&HostBuffer<SquaredNorm>>,
        exchange: &mut E,
    ) -> Result<Scores, Error> {
        let [dy, rows] = [dy, rows].map(|norms| norms.map(|norms| &**norms));
        Ok(score(kind, pairs, dy, rows, exchange)?)
    }

    fn score_into<E: Exchange>(
        &self,
        kind: Score,
        pairs: &Pairs<'_>,
        norms: [Option<&HostBuffer<SquaredNorm>>; 2],
        exchange: &mut E,
        scores: &mut Option<Scores>,
    ) -> Result<(), Error> {
        let [dy, rows] = norms.map(|norms| norms.map(|norms| &**norms));
        let scores = scores.get_or_insert_default();
        Ok(score_into(kind, pairs, dy, rows, exchange, scores)?)
    }

    fn host_scores<'a>(&self, scores: &'a Scores) -> Result<Cow<'a, Scores>, Error> {
        Ok(Cow::Borrowed(scores))
    }

    fn keys_from_scores(
        &self,
        pairs: &Pairs<'_>,
        scores: &HostBuffer<f32>,
    ) -> Result<HostBuffer<u32>, Error> {
        self.upload(&keys_from_scores(pairs, scores)?)
    }

    fn select_keys<E: Exchange>(
        &self,
        pairs: &Pairs<'_>,
        keys: &HostBuffer<u32>,
        quotas: &[u32],
        exchange: &mut E,
    ) -> Result<KeptKeys<Self>, Error> {
        let kept = select_keys(pairs, keys, quotas, exchange)?;
        Ok(KeptKeys {
            pairs: self.upload(&kept.pairs)?,
            next: self.upload(&kept.next)?,
        })
    }

    fn select<E: Exchange>(
        &self,
        method: Method,
        pairs: &Pairs<'_>,
        scores: &Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
    ) -> Result<Kept<Self>, Error> {
        let kept = select(method, pairs, scores, quotas, draw, exchange)?;
        Ok(Kept {
            pairs: self.upload(&kept.pairs)?,
            weights: self.upload(&kept.weights)?,
        })
    }

    fn select_to_host<E: Exchange>(
        &self,
        method: Method,
        pairs: &Pairs<'_>,
        scores: &Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
        selector: &mut Selector,
    ) -> Result<(), Error> {
        selector.select(method, pairs, scores, quotas, draw, exchange)?;
        Ok(())
    }
}

vectorised! {
/// The squared norm of each of the rows of this width.
fn norms_of_rows<T: FfnElement>(rows: &[T], width: usize, norms: &mut [SquaredNorm]) {
    for (row, norm) in rows.chunks_exact(width).zip(norms) {
        *norm = SquaredNorm::of_widened(row, T::widened);
    }
}
}
