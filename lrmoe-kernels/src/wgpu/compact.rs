use lrmoe_compact::Grouping as HostGrouping;

use super::{Buffer, Wgpu, batch::Batch, buffer::Window, kernel::Kernel};
use crate::{
    CompactRows, Element, Error, FfnElement, Memory, PairRows, RowIndex,
    compact::{check_put, check_row_numbers, grouping_tables},
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
        if width == 0 || len == 0 {
            return Ok(());
        }
        let words = width * T::COUNT;
        let step = self.per_window("a row", words)?;
        let in_list = self.per_window("a row number", 1)?;
        let mut batch = Batch::new(self);
        let parts = |count: usize, step: usize| {
            let starts = (0..count).step_by(step);
            starts.map(move |start| start..count.min(start + step))
        };
        for listed in parts(len, in_list) {
            let of_list = |list| self.window(list, listed.clone());
            let (of_index, of_places) = (of_list(&index.index), of_list(&places.index));
            for taken in parts(index.rows, step) {
                let from = self.window(rows, taken.start * width..taken.end * width);
                for written in parts(places.rows, step) {
                    let to = self.window(out, written.start * width..written.end * width);
                    let parameters = [
                        listed.len(),
                        words,
                        taken.start,
                        taken.end,
                        0,
                        written.start,
                        written.end,
                        0,
                    ];
                    let mut parameters = parameters.map(|number| number as u32).to_vec();
                    parameters.extend([from.base, of_index.base, of_places.base, to.base]);
                    let windows = [(1, from), (2, of_index), (3, to), (5, of_places)];
                    batch.dispatch(
                        Kernel::Put,
                        (listed.len() * words).div_ceil(THREADS),
                        &parameters,
                        &windows.map(|(number, window)| (number, window.into())),
                    );
                }
            }
        }
        batch.submit()
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
        self.add_rows(rows, width, pairs, weights, into, Sums::Added)
    }

    fn combine<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        self.check_terms(rows, width, pairs, weights)?;
        self.resize(out, pairs.tokens.saturating_mul(width))?;
        let narrow = is_narrow::<T>();
        self.add_rows(rows, width, pairs, weights, out, Sums::Written { narrow })
    }

    fn narrow<T: FfnElement>(
        &self,
        values: &Buffer<f32>,
        out: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let len = Self::len(values);
        self.resize(out, len)?;
        let step = self.per_window("a value", 1)?;
        let mut batch = Batch::new(self);
        for start in (0..len).step_by(step) {
            let part = start..len.min(start + step);
            let (from, to) = (
                self.window(values, part.clone()),
                self.window(out, part.clone()),
            );
            let mut parameters = [0; 12];
            parameters[0] = part.len() as u32;
            parameters[7] = if is_narrow::<T>() { NARROW } else { 0 };
            parameters[8] = from.base;
            parameters[11] = to.base;
            let bindings = [(1, from.into()), (3, to.into())];
            let groups = part.len().div_ceil(THREADS);
            batch.dispatch(Kernel::Narrow, groups, &parameters, &bindings);
        }
        batch.submit()
    }
}

/// Whether elements are f32 rounded to bf16.
fn is_narrow<T: FfnElement>() -> bool {
    size_of::<T>() < size_of::<f32>()
}

/// What becomes of sums of rows.
#[derive(Clone, Copy, Debug)]
enum Sums {
    /// Added to what the output holds.
    Added,
    /// Written over it, rounded to bf16 or not.
    Written { narrow: bool },
}

/// Flags of compact.wgsl.
const WEIGHTED: u32 = 1;
const OVERWRITE: u32 = 2;
const NARROW: u32 = 4;

impl Wgpu {
    fn check_terms<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
    ) -> Result<(), Error> {
        check_length("rows", Self::len(rows), pairs.rows.saturating_mul(width))?;
        weights.map_or(Ok(()), |weights| {
            check_length("weights", Self::len(weights), pairs.rows)
        })
    }

    /// Adds up rows by token in `to` `[tokens, width]`.
    fn add_rows<T: FfnElement, S: Element>(
        &self,
        rows: &Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Buffer<f32>>,
        to: &Buffer<S>,
        sums: Sums,
    ) -> Result<(), Error> {
        self.check_terms(rows, width, pairs, weights)?;
        let nothing = pairs.top_k == 0 || pairs.rows == 0;
        if width == 0 || (nothing && matches!(sums, Sums::Added)) {
            return Ok(());
        }
        let (rows_step, tokens_step) = (
            self.per_window("a row", width)?,
            self.per_window("a token", width.max(pairs.top_k))?,
        );
        // Where rows take several bindings, slot after slot keeps the order of a token's sum.
        let slots_step = if pairs.rows <= rows_step {
            pairs.top_k.max(1)
        } else {
            1
        };
        let mut batch = Batch::new(self);
        for token in (0..pairs.tokens).step_by(tokens_step) {
            let tokens = token..pairs.tokens.min(token + tokens_step);
            let table = tokens.start * pairs.top_k..tokens.end * pairs.top_k;
            let table = self.window(&pairs.table, table);
            let to = self.window(to, tokens.start * width..tokens.end * width);
            // Without rows there are still sums to write.
            let slots = (0..pairs.top_k.max(1)).step_by(slots_step);
            let parts = slots.flat_map(|slot| {
                let rows = (0..pairs.rows.max(1)).step_by(rows_step);
                rows.map(move |row| (slot, row))
            });
            let last = parts.clone().last();
            for (slot, row) in parts {
                let taken = row..pairs.rows.min(row + rows_step);
                let from = self.window(rows, taken.start * width..taken.end * width);
                let of_rows = weights.map_or(Window::NOTHING, |weights| {
                    self.window(weights, taken.clone())
                });
                let mut flags = if weights.is_some() { WEIGHTED } else { 0 };
                if let Sums::Written { narrow } = sums {
                    flags |= if (slot, row) == (0, 0) { OVERWRITE } else { 0 };
                    flags |= if narrow && Some((slot, row)) == last {
                        NARROW
                    } else {
                        0
                    };
                }
                let parameters = [
                    tokens.len(),
                    width,
                    taken.start,
                    taken.end,
                    pairs.top_k,
                    slot,
                    pairs.top_k.min(slot + slots_step),
                    flags as usize,
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
        batch.submit()
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
