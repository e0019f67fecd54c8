use lrmoe_compact::Grouping as HostGrouping;

use super::{
    Buffer, Cuda,
    kernel::{Kernel, LANES, THREADS},
};
use crate::{
    CompactRows, Element, Error, Memory, PairRows, RowIndex,
    compact::{check_row_numbers, grouping_tables, rows_by_pair},
    error::check_length,
};

/// Rows of a block: a warp has one.
const ROWS: usize = THREADS / LANES;

/// The two orders of received rows in the memory of the device; see [`lrmoe_compact::Grouping`].
#[derive(Debug)]
pub struct Grouping {
    /// Of each grouped row the received one, `u32::MAX` for padding.
    to_grouped: Buffer<u32>,
    /// Of each received row the grouped one.
    to_received: Buffer<u32>,
}

impl CompactRows for Cuda {
    type Grouping = Grouping;

    fn pair_rows(
        &self,
        pairs: &[u32],
        tokens: usize,
        top_k: usize,
    ) -> Result<PairRows<Self>, Error> {
        Ok(PairRows {
            table: self.upload(&rows_by_pair(pairs, tokens, top_k)?)?,
            rows: pairs.len(),
            tokens,
            top_k,
        })
    }

    fn grouping(&self, grouping: &HostGrouping) -> Result<Grouping, Error> {
        let [to_grouped, to_received] = grouping_tables(grouping)?;
        Ok(Grouping {
            to_grouped: self.upload(&to_grouped)?,
            to_received: self.upload(&to_received)?,
        })
    }

    fn gather<T: Element>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        index: &RowIndex<Self>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        self.take("rows", rows, [index.rows, width], &index.index, out)
    }

    fn group<T: Element>(
        &self,
        grouping: &Grouping,
        received: &Buffer<T>,
        width: usize,
        grouped: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let shape = [Self::len(&grouping.to_received), width];
        self.take("received", received, shape, &grouping.to_grouped, grouped)
    }

    fn ungroup<T: Element>(
        &self,
        grouping: &Grouping,
        grouped: &Buffer<T>,
        width: usize,
        received: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let shape = [Self::len(&grouping.to_grouped), width];
        self.take("grouped", grouped, shape, &grouping.to_received, received)
    }

    fn scatter_add(
        &self,
        rows: &Buffer<f32>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        into: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        check_length("rows", Self::len(rows), pairs.rows.saturating_mul(width))?;
        check_length("into", Self::len(into), pairs.tokens.saturating_mul(width))?;
        weights.map_or(Ok(()), |weights| {
            check_length("weights", Self::len(weights), pairs.rows)
        })?;
        if width == 0 || pairs.top_k == 0 || pairs.rows == 0 {
            return Ok(());
        }
        let parameters = [
            self.address(rows)?,
            self.address(&pairs.table)?,
            weights.map_or(Ok(0), |weights| self.address(weights))?,
            self.address(into)?,
            pairs.tokens as u64,
            pairs.top_k as u64,
            width as u64,
        ];
        let blocks = pairs.tokens.div_ceil(ROWS);
        // SAFETY: as in compact.cu; the table has a row below `pairs.rows`, or none, for each slot of each token.
        unsafe { self.launch(Kernel::ScatterAdd, blocks, &parameters) }
    }
}

impl Cuda {
    /// Copies row `index[i]` of `rows`, of this shape, to row i of `out`; zeros for `u32::MAX`.
    fn take<T: Element>(
        &self,
        what: &'static str,
        rows: &Buffer<T>,
        [count, width]: [usize; 2],
        index: &Buffer<u32>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        check_length(what, Self::len(rows), count.saturating_mul(width))?;
        check_row_numbers(count)?;
        let len = Self::len(index);
        self.resize(out, len.saturating_mul(width))?;
        if width == 0 {
            return Ok(());
        }
        let parameters = [
            self.address(rows)?,
            self.address(index)?,
            self.address(out)?,
            len as u64,
            (width * T::COUNT) as u64,
        ];
        // SAFETY: as in compact.cu; indices are below `count`, or none, as checked where they were made.
        unsafe { self.launch(Kernel::Gather, len.div_ceil(ROWS), &parameters) }
    }
}
