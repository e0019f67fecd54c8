use std::borrow::Cow;

use lrmoe_metric::{
    Draw, Exchange, Method, Pairs, Score, Scores, SquaredNorm, keys_from_scores, score, select,
    select_keys, squared_norms,
};

use super::{Cpu, rows};
use crate::{Error, Kept, KeptKeys, Memory, SelectPairs};

impl SelectPairs for Cpu {
    type Pairs<'a> = Pairs<'a>;
    type Scores = Scores;

    fn pairs<'a>(&self, pairs: &Pairs<'a>) -> Result<Pairs<'a>, Error> {
        Ok(*pairs)
    }

    fn squared_norms(
        &self,
        values: &Vec<f32>,
        shape: [usize; 2],
        norms: &mut Vec<SquaredNorm>,
    ) -> Result<(), Error> {
        let rows = rows("rows", values, shape)?;
        self.resize(norms, shape[0])?;
        Ok(squared_norms(rows, norms)?)
    }

    fn score<E: Exchange>(
        &self,
        kind: Score,
        pairs: &Pairs<'_>,
        dy: Option<&Vec<SquaredNorm>>,
        h: Option<&Vec<SquaredNorm>>,
        exchange: &mut E,
    ) -> Result<Scores, Error> {
        let [dy, h] = [dy, h].map(|norms| norms.map(Vec::as_slice));
        Ok(score(kind, pairs, dy, h, exchange)?)
    }

    fn host_scores<'a>(&self, scores: &'a Scores) -> Result<Cow<'a, Scores>, Error> {
        Ok(Cow::Borrowed(scores))
    }

    fn keys_from_scores(&self, pairs: &Pairs<'_>, scores: &Vec<f32>) -> Result<Vec<u32>, Error> {
        Ok(keys_from_scores(pairs, scores)?)
    }

    fn select_keys<E: Exchange>(
        &self,
        pairs: &Pairs<'_>,
        keys: &Vec<u32>,
        quotas: &[u32],
        exchange: &mut E,
    ) -> Result<KeptKeys<Self>, Error> {
        let kept = select_keys(pairs, keys, quotas, exchange)?;
        Ok(KeptKeys {
            pairs: kept.pairs,
            next: kept.next,
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
            pairs: kept.pairs,
            weights: kept.weights,
        })
    }
}
