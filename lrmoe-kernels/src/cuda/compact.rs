use lrmoe_compact::Grouping as HostGrouping;

use super::{
    Buffer, Cuda,
    buffer::{bytes_of, is_bf16},
    kernel::{Kernel, LANES, THREADS},
};
use crate::{
    CompactRows, Element, Error, FfnElement, Memory, PairRows, RowIndex,
    compact::{check_put, check_row_numbers, grouping_tables},
    error::check_length,
};

/// Rows of a block: a warp has one.
const ROWS: usize = THREADS / LANES;
/// Values that a block narrows.
const VALUES: usize = 8 * THREADS;

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

    fn put<T: Element>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        [index, places]: [&RowIndex<Self>; 2],
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        check_put::<Self, T>(rows, width, [index, places], out)?;
        let len = Self::len(&index.index);
        if width == 0 {
            return Ok(());
        }
        let parameters = [
            self.address(rows)?,
            self.address(&index.index)?,
            self.address(&places.index)?,
            self.address(out)?,
            len as u64,
            (width * bytes_of::<T>()) as u64,
        ];
        // SAFETY: as in compact.cu; indices and places are those of rows, as checked where they were made.
        unsafe { self.launch(Kernel::Put, len.div_ceil(ROWS), &parameters) }
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

    fn scatter_add<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        into: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        check_length("into", Self::len(into), pairs.tokens.saturating_mul(width))?;
        let kernel = if is_bf16::<T>() {
            Kernel::ScatterAddBf16
        } else {
            Kernel::ScatterAdd
        };
        let into = self.address(into)?;
        self.add_rows(kernel, rows, width, pairs, weights, into)
    }

    fn combine<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        self.resize(out, pairs.tokens.saturating_mul(width))?;
        let kernel = if is_bf16::<T>() {
            Kernel::CombineBf16
        } else {
            Kernel::Combine
        };
        let out = self.address(out)?;
        self.add_rows(kernel, rows, width, pairs, weights, out)
    }

    fn narrow<T: FfnElement>(
        &self,
        values: &Buffer<f32>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let len = Self::len(values);
        self.resize(out, len)?;
        let [from, to] = [self.address(values)?, self.address(out)?];
        if !is_bf16::<T>() {
            // SAFETY: there are as many values in both.
            return unsafe { self.copy_bytes(from, to, len * bytes_of::<T>()) };
        }
        let blocks = len.div_ceil(VALUES);
        // SAFETY: as in compact.cu; there are as many values in both.
        unsafe { self.launch(Kernel::Narrow, blocks, &[from, to, len as u64]) }
    }
}

impl Cuda {
    /// Adds up rows by token at an address that has room for all tokens.
    fn add_rows<T: FfnElement>(
        &self,
        kernel: Kernel,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        to: u64,
    ) -> Result<(), Error> {
        check_length("rows", Self::len(rows), pairs.rows.saturating_mul(width))?;
        weights.map_or(Ok(()), |weights| {
            check_length("weights", Self::len(weights), pairs.rows)
        })?;
        if width == 0 {
            return Ok(());
        }
        let parameters = [
            self.address(rows)?,
            self.address(&pairs.table)?,
            weights.map_or(Ok(0), |weights| self.address(weights))?,
            to,
            pairs.tokens as u64,
            pairs.top_k as u64,
            width as u64,
        ];
        let blocks = pairs.tokens.div_ceil(ROWS);
        // SAFETY: as in compact.cu; the table has a row below `pairs.rows`, or none, for each slot of each token.
        unsafe { self.launch(kernel, blocks, &parameters) }
    }

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
            (width * bytes_of::<T>()) as u64,
        ];
        // SAFETY: as in compact.cu; indices are below `count`, or none, as checked where they were made.
        unsafe { self.launch(Kernel::Gather, len.div_ceil(ROWS), &parameters) }
    }
}
