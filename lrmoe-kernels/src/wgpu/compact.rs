use lrmoe_compact::Grouping as HostGrouping;

use super::{Buffer, Wgpu, batch::Batch, buffer::Window, kernel::Kernel};
use crate::{
    CompactRows, Element, Error, Memory, PairRows, RowIndex,
    compact::{check_row_numbers, grouping_tables, rows_by_pair},
    error::check_length,
};

/// Threads of a workgroup.
const THREADS: usize = 256;

/// The two orders of received rows in the memory of the device; see [`lrmoe_compact::Grouping`].
#[derive(Debug)]
pub struct Grouping {
    /// Of each grouped row the received one, `u32::MAX` for padding.
    to_grouped: Buffer<u32>,
    /// Of each received row the grouped one.
    to_received: Buffer<u32>,
}

impl CompactRows for Wgpu {
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
        let (rows_step, tokens_step) = (
            self.per_window("a row", width)?,
            self.per_window("a token", width.max(pairs.top_k))?,
        );
        // Where rows take several bindings, slot after slot keeps the order of a token's sum.
        let slots_step = if pairs.rows <= rows_step {
            pairs.top_k
        } else {
            1
        };
        let mut batch = Batch::new(self);
        for token in (0..pairs.tokens).step_by(tokens_step) {
            let tokens = token..pairs.tokens.min(token + tokens_step);
            let table = tokens.start * pairs.top_k..tokens.end * pairs.top_k;
            let table = self.window(&pairs.table, table);
            let to = self.window(into, tokens.start * width..tokens.end * width);
            for slot in (0..pairs.top_k).step_by(slots_step) {
                for row in (0..pairs.rows).step_by(rows_step) {
                    let taken = row..pairs.rows.min(row + rows_step);
                    let from = self.window(rows, taken.start * width..taken.end * width);
                    let of_rows = weights.map_or(Window::NOTHING, |weights| {
                        self.window(weights, taken.clone())
                    });
                    let parameters = [
                        tokens.len(),
                        width,
                        taken.start,
                        taken.end,
                        pairs.top_k,
                        slot,
                        slot + slots_step,
                        weights.is_some().into(),
                    ];
                    let mut parameters = parameters.map(|number| number as u32).to_vec();
                    parameters.extend([from.base, table.base, of_rows.base, to.base]);
                    let windows = [(1, from), (2, table), (3, to), (4, of_rows)];
                    batch.dispatch(
                        Kernel::ScatterAdd,
                        (tokens.len() * width).div_ceil(THREADS),
                        &parameters,
                        &windows.map(|(number, window)| (number, window.into())),
                    );
                }
            }
        }
        batch.submit()
    }
}

impl Wgpu {
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
        self.resize(out, len * width)?;
        if width == 0 {
            return Ok(());
        }
        let words = width * T::COUNT;
        let step = self.per_window("a row", words)?;
        let mut batch = Batch::new(self);
        for start in (0..len).step_by(step) {
            let written = start..len.min(start + step);
            let to = self.window(out, written.start * width..written.end * width);
            let places = self.window(index, written.clone());
            // Without rows to read there may still be padding to write.
            for first in (0..count.max(1)).step_by(step) {
                let taken = first..count.min(first + step);
                let from = self.window(rows, taken.start * width..taken.end * width);
                let parameters = [written.len(), words, taken.start, taken.end, 0, 0, 0, 0];
                let mut parameters = parameters.map(|number| number as u32).to_vec();
                parameters.extend([from.base, places.base, 0, to.base]);
                let groups = (written.len() * words).div_ceil(THREADS);
                let bindings = [(1, from.into()), (2, places.into()), (3, to.into())];
                batch.dispatch(Kernel::Gather, groups, &parameters, &bindings);
            }
        }
        batch.submit()
    }
}
