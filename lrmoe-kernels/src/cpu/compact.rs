use lrmoe_compact::Grouping as HostGrouping;
use rayon::prelude::*;

use super::{
    Cpu, HostBuffer,
    copy::{RowCopy, Stores, copy_rows},
    isa::{Isa, vectorised},
    tile::share,
};
use crate::{
    CompactRows, Element, Error, FfnElement, Memory, PairRows, RowIndex,
    compact::{NO_ROW, check_index, check_order, check_put, grouping_tables},
    error::check_length,
};

/// Columns that are summed at a time, in registers.
const BLOCK: usize = 64;
/// About as many bytes of sums make a task.
const TASK_BYTES: usize = 1 << 17;
/// Values that one task rounds.
const TASK_VALUES: usize = 1 << 16;

/// The two orders of received rows; see [`lrmoe_compact::Grouping`].
#[derive(Clone, Debug)]
pub struct Grouping {
    /// Of each grouped row the received one, [`NO_ROW`] for padding.
    to_grouped: Vec<u32>,
    /// Of each received row the grouped one.
    to_received: Vec<u32>,
}

impl CompactRows for Cpu {
    type Grouping = Grouping;

    fn row_index_into(
        &self,
        index: &[u32],
        rows: usize,
        into: &mut RowIndex<Self>,
    ) -> Result<(), Error> {
        check_index(index, rows)?;
        self.write(index, &mut into.index)?;
        self.resize(&mut into.order, order_len(index, rows))?;
        order_by_source(index, rows, &mut into.ends, &mut into.order);
        into.rows = rows;
        Ok(())
    }

    fn grouping(&self, grouping: &HostGrouping) -> Result<Grouping, Error> {
        let [to_grouped, to_received] = grouping_tables(grouping)?;
        Ok(Grouping {
            to_grouped,
            to_received,
        })
    }

    fn gather<T: Element>(
        &self,
        from: &HostBuffer<T>,
        width: usize,
        index: &RowIndex<Self>,
        out: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        check_length("rows", from.len(), index.rows.saturating_mul(width))?;
        self.resize(out, index.index.len() * width)?;
        // SAFETY: `order_by_source` made the order.
        unsafe { copy_rows(from, width, &index.index, &index.order, out) };
        Ok(())
    }

    fn put<T: Element>(
        &self,
        rows: &HostBuffer<T>,
        width: usize,
        [index, places]: [&RowIndex<Self>; 2],
        out: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        check_put::<Self, T>(rows, width, [index, places], out)?;
        check_order(&places.index)?;
        if width == 0 || index.index.is_empty() {
            return Ok(());
        }
        put_rows(rows, width, (&index.index, &places.index), 0, out);
        Ok(())
    }

    fn group<T: Element>(
        &self,
        grouping: &Grouping,
        received: &HostBuffer<T>,
        width: usize,
        grouped: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        let rows = grouping.to_received.len();
        check_length("received", received.len(), rows.saturating_mul(width))?;
        self.resize(grouped, grouping.to_grouped.len() * width)?;
        // SAFETY: the order is the index's own.
        unsafe { copy_rows(received, width, &grouping.to_grouped, &[], grouped) };
        Ok(())
    }

    fn ungroup<T: Element>(
        &self,
        grouping: &Grouping,
        grouped: &HostBuffer<T>,
        width: usize,
        received: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        let rows = grouping.to_grouped.len();
        check_length("grouped", grouped.len(), rows.saturating_mul(width))?;
        self.resize(received, grouping.to_received.len() * width)?;
        // SAFETY: the order is the index's own.
        unsafe { copy_rows(grouped, width, &grouping.to_received, &[], received) };
        Ok(())
    }

    fn scatter_add<T: FfnElement>(
        &self,
        rows: &HostBuffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&HostBuffer<f32>>,
        into: &mut HostBuffer<f32>,
    ) -> Result<(), Error> {
        let terms = Terms::new(rows, width, pairs, weights)?;
        check_length("into", into.len(), pairs.tokens.saturating_mul(width))?;
        if width == 0 || pairs.top_k == 0 {
            return Ok(());
        }
        let isa = Isa::detect();
        let tokens = tokens_per_task(width);
        into.par_chunks_mut(tokens * width)
            .enumerate()
            .for_each_init(
                || Slots::new(pairs.top_k),
                |slots, (task, into)| {
                    for (place, sums) in into.chunks_exact_mut(width).enumerate() {
                        slots.find(&terms, task * tokens + place);
                        if !slots.of_token.is_empty() {
                            add_rows(
                                isa,
                                terms.rows,
                                width,
                                &slots.of_token,
                                &slots.of_next,
                                sums,
                            );
                        }
                    }
                },
            );
        Ok(())
    }

    fn combine<T: FfnElement>(
        &self,
        rows: &HostBuffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&HostBuffer<f32>>,
        out: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        let terms = Terms::new(rows, width, pairs, weights)?;
        let len = pairs.tokens.saturating_mul(width);
        self.resize(out, len)?;
        if len == 0 {
            return Ok(());
        }
        let isa = Isa::detect();
        let (tokens, row_bytes) = (tokens_per_task(width), width * size_of::<T>());
        let stores = Stores::for_output(pairs.tokens, row_bytes);
        let room = || {
            let rounded = vec![T::default(); width];
            (Slots::new(pairs.top_k), vec![0.0; width], rounded)
        };
        let mut rooms: Vec<_> = (0..rayon::current_num_threads()).map(|_| room()).collect();
        let tasks = out.chunks_mut(tokens * width).enumerate();
        share(&mut rooms, tasks, |(slots, sums, rounded), (task, out)| {
            for (place, out) in out.chunks_exact_mut(width).enumerate() {
                slots.find(&terms, task * tokens + place);
                sums.fill(0.0);
                add_rows(
                    isa,
                    terms.rows,
                    width,
                    &slots.of_token,
                    &slots.of_next,
                    sums,
                );
                round(isa, sums, rounded);
                let row = RowCopy {
                    from: rounded.as_ptr().cast(),
                    to: out.as_mut_ptr().cast(),
                };
                // SAFETY: both have `width` elements, and no other task has this part of the output.
                unsafe { stores.copy(&[row], row_bytes) };
            }
            stores.finish();
        });
        Ok(())
    }

    fn narrow<T: FfnElement>(
        &self,
        values: &HostBuffer<f32>,
        out: &mut HostBuffer<T>,
    ) -> Result<(), Error> {
        self.resize(out, values.len())?;
        let isa = Isa::detect();
        out.par_chunks_mut(TASK_VALUES)
            .zip(values.par_chunks(TASK_VALUES))
            .for_each(|(out, values)| round(isa, values, out));
        Ok(())
    }
}

/// Copies rows to places that ascend, in halves down to what a task takes; `out` begins with place `first`.
fn put_rows<T: Element>(
    rows: &[T],
    width: usize,
    (index, places): (&[u32], &[u32]),
    first: u32,
    out: &mut [T],
) {
    if index.len() * width * size_of::<T>() <= TASK_BYTES || index.len() == 1 {
        for (&row, &place) in index.iter().zip(places) {
            let to = &mut out[(place - first) as usize * width..][..width];
            to.copy_from_slice(&rows[row as usize * width..][..width]);
        }
        return;
    }
    let half = index.len() / 2;
    let ((index, later_index), (places, later)) = (index.split_at(half), places.split_at(half));
    let (out, later_out) = out.split_at_mut((later[0] - first) as usize * width);
    rayon::join(
        || put_rows(rows, width, (index, places), first, out),
        || put_rows(rows, width, (later_index, later), later[0], later_out),
    );
}

/// Length of the order in which the places of an index are filled: none if it is their own, or few rows are named twice.
fn order_len(index: &[u32], rows: usize) -> usize {
    if index.is_sorted() || index.len() < rows {
        0
    } else {
        index.len()
    }
}

/// Makes `order` the places of an index by the rows they name, so that a row that is copied to several places is read once; if it is not empty.
fn order_by_source(index: &[u32], rows: usize, ends: &mut Vec<u32>, order: &mut [u32]) {
    if order.is_empty() {
        return;
    }
    ends.clear();
    ends.resize(rows + 1, 0);
    for &row in index {
        ends[row as usize + 1] += 1;
    }
    for row in 0..rows {
        ends[row + 1] += ends[row];
    }
    for (place, &row) in index.iter().enumerate() {
        let at = &mut ends[row as usize];
        order[*at as usize] = place as u32;
        *at += 1;
    }
}

fn tokens_per_task(width: usize) -> usize {
    (TASK_BYTES / (width * size_of::<f32>())).max(1)
}

/// Rows to add up by token.
struct Terms<'a, T> {
    rows: &'a [T],
    weights: Option<&'a [f32]>,
    /// Row of every pair, `[tokens, top_k]`.
    table: &'a [u32],
    top_k: usize,
}

impl<'a, T> Terms<'a, T> {
    fn new(
        rows: &'a [T],
        width: usize,
        pairs: &'a PairRows<Cpu>,
        weights: Option<&'a HostBuffer<f32>>,
    ) -> Result<Self, Error> {
        check_length("rows", rows.len(), pairs.rows.saturating_mul(width))?;
        let weights = weights.map(|weights| &**weights);
        weights.map_or(Ok(()), |weights| {
            check_length("weights", weights.len(), pairs.rows)
        })?;
        Ok(Self {
            rows,
            weights,
            table: &pairs.table,
            top_k: pairs.top_k,
        })
    }
}

/// A row and its weight.
type Term = (usize, f32);

/// The rows of a token and of the one after it, in ascending slot order.
struct Slots {
    of_token: Vec<Term>,
    of_next: Vec<Term>,
    next: usize,
}

impl Slots {
    fn new(top_k: usize) -> Self {
        Self {
            of_token: Vec::with_capacity(top_k),
            of_next: Vec::with_capacity(top_k),
            next: usize::MAX,
        }
    }

    fn find<T>(&mut self, terms: &Terms<'_, T>, token: usize) {
        let find = |slots: &mut Vec<Term>, token: usize| {
            slots.clear();
            let table = terms
                .table
                .get(token * terms.top_k..(token + 1) * terms.top_k);
            let rows = table.into_iter().flatten().filter(|&&row| row != NO_ROW);
            slots.extend(rows.map(|&row| {
                let row = row as usize;
                (row, terms.weights.map_or(1.0, |weights| weights[row]))
            }));
        };
        if self.next == token {
            std::mem::swap(&mut self.of_token, &mut self.of_next);
        } else {
            find(&mut self.of_token, token);
        }
        self.next = token + 1;
        find(&mut self.of_next, token + 1);
    }
}

vectorised! {
/// Adds rows times their weights to `sums`, each sum in the order of the rows; asks for those of `next` ahead of time.
fn add_rows<T: FfnElement>(rows: &[T], width: usize, terms: &[Term], next: &[Term], sums: &mut [f32]) {
    let (blocks, rest) = sums.as_chunks_mut::<BLOCK>();
    let whole = blocks.len() * BLOCK;
    for (block, sums) in blocks.iter_mut().enumerate() {
        let column = block * BLOCK;
        let mut block = *sums;
        for &(row, weight) in terms {
            let values: &[T; BLOCK] = rows[row * width + column..].first_chunk().expect("a block of the row");
            for (sum, &value) in block.iter_mut().zip(values) {
                *sum += weight * value.widened();
            }
        }
        for &(row, _) in next {
            prefetch(&rows[row * width + column..][..BLOCK]);
        }
        *sums = block;
    }
    for &(row, weight) in terms {
        let values = &rows[row * width + whole..][..rest.len()];
        for (sum, &value) in rest.iter_mut().zip(values) {
            *sum += weight * value.widened();
        }
    }
}

fn round<T: FfnElement>(values: &[f32], out: &mut [T]) {
    for (out, &value) in out.iter_mut().zip(values) {
        *out = T::narrowed(value);
    }
}
}

/// Asks for these elements' cache lines.
#[inline(always)]
fn prefetch<T>(elements: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for element in elements.iter().step_by(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const *element).cast()) };
    }
}
