use lrmoe_compact::{Grouping, ScatterAdd, gather};

use super::{Cpu, rows, rows_mut};
use crate::{
    CompactRows, Element, Error, Memory, PairRows, RowIndex, compact::rows_by_pair,
    error::check_length,
};

impl CompactRows for Cpu {
    type Grouping = Grouping;

    fn pair_rows(
        &self,
        pairs: &[u32],
        tokens: usize,
        top_k: usize,
    ) -> Result<PairRows<Self>, Error> {
        rows_by_pair(pairs, tokens, top_k)?;
        Ok(PairRows {
            table: pairs.to_vec(),
            rows: pairs.len(),
            tokens,
            top_k,
        })
    }

    fn grouping(&self, grouping: &Grouping) -> Result<Grouping, Error> {
        Ok(grouping.clone())
    }

    fn gather<T: Element>(
        &self,
        from: &Vec<T>,
        width: usize,
        index: &RowIndex<Self>,
        out: &mut Vec<T>,
    ) -> Result<(), Error> {
        let from = rows("rows", from, [index.rows, width])?;
        let shape = [index.index.len(), width];
        self.resize(out, shape[0] * width)?;
        Ok(gather(from, &index.index, rows_mut("out", out, shape)?)?)
    }

    fn group<T: Element>(
        &self,
        grouping: &Grouping,
        received: &Vec<T>,
        width: usize,
        grouped: &mut Vec<T>,
    ) -> Result<(), Error> {
        let received = rows("received", received, [grouping.received_rows(), width])?;
        let shape = [grouping.grouped_rows(), width];
        self.resize(grouped, shape[0] * width)?;
        Ok(grouping.group(received, rows_mut("grouped", grouped, shape)?)?)
    }

    fn ungroup<T: Element>(
        &self,
        grouping: &Grouping,
        grouped: &Vec<T>,
        width: usize,
        received: &mut Vec<T>,
    ) -> Result<(), Error> {
        let grouped = rows("grouped", grouped, [grouping.grouped_rows(), width])?;
        let shape = [grouping.received_rows(), width];
        self.resize(received, shape[0] * width)?;
        Ok(grouping.ungroup(grouped, rows_mut("received", received, shape)?)?)
    }

    fn scatter_add(
        &self,
        from: &Vec<f32>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Vec<f32>>,
        into: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let from = rows("rows", from, [pairs.rows, width])?;
        let into = rows_mut("into", into, [pairs.tokens, width])?;
        weights.map_or(Ok(()), |weights| {
            check_length("weights", weights.len(), pairs.rows)
        })?;
        let weights = weights.map(Vec::as_slice);
        Ok(ScatterAdd::new().add(from, &pairs.table, weights, pairs.top_k, into)?)
    }
}
