use std::fmt;

use lrmoe_compact::{Error as CompactError, Grouping};
use ndarray::{Array1, ArrayViewMut1, Axis};

use crate::{Element, Error, FfnElement, Memory, error::check_length};

/// Rows from place to place in a backend's memory: [`lrmoe_compact`], bit for bit.
///
/// Indices are checked once, on the host, where they come from: routing tables are made there. A device may take subnormal sums for zero.
pub trait CompactRows: Memory {
    /// The two orders of received rows.
    type Grouping: fmt::Debug;

    /// Takes up row numbers to read `rows` rows by.
    ///
    /// # Errors
    ///
    /// [`Error::Compact`] for a number that is not below `rows`; those of [`Memory::resize`].
    fn row_index(&self, index: &[u32], rows: usize) -> Result<RowIndex<Self>, Error> {
        let mut new = RowIndex::default();
        self.row_index_into(index, rows, &mut new)?;
        Ok(new)
    }

    /// As [`row_index`](Self::row_index), in the memory of an earlier one.
    ///
    /// # Errors
    ///
    /// As for [`row_index`](Self::row_index).
    fn row_index_into(
        &self,
        index: &[u32],
        rows: usize,
        into: &mut RowIndex<Self>,
    ) -> Result<(), Error> {
        check_index(index, rows)?;
        self.write(index, &mut into.index)?;
        into.rows = rows;
        Ok(())
    }

    /// Takes up the pairs that rows are of, row by row: distinct, of `tokens` tokens with `top_k` slots.
    ///
    /// # Errors
    ///
    /// [`Error::Compact`] as [`lrmoe_compact::ScatterAdd::add`] refuses pairs; those of [`Memory::resize`].
    fn pair_rows(
        &self,
        pairs: &[u32],
        tokens: usize,
        top_k: usize,
    ) -> Result<PairRows<Self>, Error> {
        let mut new = PairRows::default();
        self.pair_rows_into(pairs, [tokens, top_k], &mut new)?;
        Ok(new)
    }

    /// As [`pair_rows`](Self::pair_rows), of `[tokens, top_k]`, in the memory of an earlier one.
    ///
    /// # Errors
    ///
    /// As for [`pair_rows`](Self::pair_rows).
    fn pair_rows_into(
        &self,
        pairs: &[u32],
        [tokens, top_k]: [usize; 2],
        into: &mut PairRows<Self>,
    ) -> Result<(), Error> {
        rows_by_pair(pairs, tokens, top_k, &mut into.list)?;
        self.write(&into.list, &mut into.table)?;
        (into.rows, into.tokens, into.top_k) = (pairs.len(), tokens, top_k);
        Ok(())
    }

    /// Takes up a grouping.
    ///
    /// # Errors
    ///
    /// Those of [`Memory::resize`].
    fn grouping(&self, grouping: &Grouping) -> Result<Self::Grouping, Error>;

    /// Copies row `index[i]` of `rows` `[n, width]` to row i of `out` `[index, width]`; see [`lrmoe_compact::gather`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `rows` is not of the index's rows; those of [`Memory::resize`].
    fn gather<T: Element>(
        &self,
        rows: &Self::Buffer<T>,
        width: usize,
        index: &RowIndex<Self>,
        out: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;

    /// Copies row `index[i]` of `rows` `[n, width]` to row `places[i]` of `out` `[m, width]`, whose other rows stay as they are. Places ascend.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if a buffer is not of its index's rows or the indices have different lengths; where the host has the places,
    /// [`Error::PlaceOrder`] if they do not ascend.
    fn put<T: Element>(
        &self,
        rows: &Self::Buffer<T>,
        width: usize,
        index_and_places: [&RowIndex<Self>; 2],
        out: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;

    /// Orders `received` `[received rows, width]` by instance; see [`Grouping::group`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there are other rows than the grouping says; those of [`Memory::resize`].
    fn group<T: Element>(
        &self,
        grouping: &Self::Grouping,
        received: &Self::Buffer<T>,
        width: usize,
        grouped: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;

    /// The inverse of [`group`](Self::group); see [`Grouping::ungroup`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there are other rows than the grouping says; those of [`Memory::resize`].
    fn ungroup<T: Element>(
        &self,
        grouping: &Self::Grouping,
        grouped: &Self::Buffer<T>,
        width: usize,
        received: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;

    /// Adds `weights[i] * rows[i]` (without weights `rows[i]`) to the token of row i in `into` `[tokens, width]`, in ascending slot order;
    /// see [`lrmoe_compact::ScatterAdd::add`]. Products and sums are f32.
    ///
    /// For tokens whose rows come in several parts; [`narrow`](Self::narrow) rounds the finished sums.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if buffers do not fit the pairs; those of [`Memory::resize`].
    fn scatter_add<T: FfnElement>(
        &self,
        rows: &Self::Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Self::Buffer<f32>>,
        into: &mut Self::Buffer<f32>,
    ) -> Result<(), Error>;

    /// Makes `out` `[tokens, width]` the sums that [`scatter_add`](Self::scatter_add) leaves in zeros, each rounded once to `T`, to nearest even.
    ///
    /// # Errors
    ///
    /// As for [`scatter_add`](Self::scatter_add).
    fn combine<T: FfnElement>(
        &self,
        rows: &Self::Buffer<T>,
        width: usize,
        pairs: &PairRows<Self>,
        weights: Option<&Self::Buffer<f32>>,
        out: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;

    /// Makes `out` the values rounded to `T`, to nearest even; a NaN stays one.
    ///
    /// # Errors
    ///
    /// Those of [`Memory::resize`].
    fn narrow<T: FfnElement>(
        &self,
        values: &Self::Buffer<f32>,
        out: &mut Self::Buffer<T>,
    ) -> Result<(), Error>;
}

/// Numbers of existing rows, from [`CompactRows::row_index`].
#[derive(Debug)]
pub struct RowIndex<B: Memory + ?Sized> {
    pub(crate) index: B::Buffer<u32>,
    /// The places of `index` in the order in which the backend fills them; empty if that is their own.
    pub(crate) order: B::Buffer<u32>,
    /// By what a host finds the order.
    pub(crate) ends: Vec<u32>,
    pub(crate) rows: usize,
}

/// The pairs that rows are of, from [`CompactRows::pair_rows`].
#[derive(Debug)]
pub struct PairRows<B: Memory + ?Sized> {
    /// The table as the host makes it.
    list: Vec<u32>,
    /// Row of every pair, [`NO_ROW`] where there is none, `[tokens * top_k]`.
    pub(crate) table: B::Buffer<u32>,
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) top_k: usize,
}

impl<B: Memory + ?Sized> Default for RowIndex<B> {
    fn default() -> Self {
        Self {
            index: Default::default(),
            order: Default::default(),
            ends: Vec::new(),
            rows: 0,
        }
    }
}

impl<B: Memory + ?Sized> Default for PairRows<B> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            table: Default::default(),
            rows: 0,
            tokens: 0,
            top_k: 0,
        }
    }
}

/// Stands for no row.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// Checks that an index names rows below `rows`.
pub(crate) fn check_index(index: &[u32], rows: usize) -> Result<(), Error> {
    let outside = index.iter().position(|&index| index as usize >= rows);
    outside.map_or(Ok(()), |position| {
        Err(Error::Compact(CompactError::IndexOutOfRange {
            position,
            index: index[position],
            rows,
        }))
    })
}

/// Checks that places on the host ascend.
pub(crate) fn check_order(places: &[u32]) -> Result<(), Error> {
    match first_descent(places) {
        Some((position, [before, place])) => Err(Error::PlaceOrder {
            position,
            place,
            before,
        }),
        None => Ok(()),
    }
}

/// The first number that is not above the one before it: its position, and both.
pub(crate) fn first_descent(numbers: &[u32]) -> Option<(usize, [u32; 2])> {
    let mut pairs = numbers.array_windows().zip(1..);
    pairs.find_map(|(&[before, number], position)| {
        (number <= before).then_some((position, [before, number]))
    })
}

/// Checks the sizes of [`CompactRows::put`].
pub(crate) fn check_put<B: Memory, T: Element>(
    rows: &B::Buffer<T>,
    width: usize,
    [index, places]: [&RowIndex<B>; 2],
    out: &B::Buffer<T>,
) -> Result<(), Error> {
    check_length("rows", B::len(rows), index.rows.saturating_mul(width))?;
    check_length("out", B::len(out), places.rows.saturating_mul(width))?;
    check_length("places", B::len(&places.index), B::len(&index.index))
}

/// Of each grouped row the received one, [`NO_ROW`] for padding; and of each received row the grouped one.
pub(crate) fn grouping_tables(grouping: &Grouping) -> Result<[Vec<u32>; 2], Error> {
    let numbers = |rows: usize| Array1::from_iter(1..=rows as u32).insert_axis(Axis(1));
    let (received, grouped) = (grouping.received_rows(), grouping.grouped_rows());
    // Before anything as long as these is allocated.
    check_row_numbers(received.max(grouped))?;
    // Rows are numbered from 1, so that padding, which is 0, becomes NO_ROW.
    let mut to_grouped = vec![0_u32; grouped];
    let mut to_received = vec![0_u32; received];
    let column = |numbers| ArrayViewMut1::from(numbers).insert_axis(Axis(1));
    grouping.group(numbers(received).view(), column(&mut to_grouped[..]))?;
    grouping.ungroup(numbers(grouped).view(), column(&mut to_received[..]))?;
    for number in to_grouped.iter_mut().chain(&mut to_received) {
        *number = number.wrapping_sub(1);
    }
    Ok([to_grouped, to_received])
}

/// Checks that rows can be numbered in 32 bits, with a number left to stand for none.
pub(crate) fn check_row_numbers(rows: usize) -> Result<(), Error> {
    if rows < NO_ROW as usize {
        return Ok(());
    }
    Err(Error::TooLarge {
        what: "a table of rows",
        bytes: (rows as u64).saturating_mul(4),
        limit: u64::from(u32::MAX) * 4,
    })
}

/// Makes `rows` the rows by pair id (`[tokens * top_k]`), [`NO_ROW`] where there is none.
fn rows_by_pair(
    pairs: &[u32],
    tokens: usize,
    top_k: usize,
    rows: &mut Vec<u32>,
) -> Result<(), CompactError> {
    let slots = tokens
        .checked_mul(top_k)
        .filter(|&slots| u32::try_from(slots).is_ok())
        .ok_or(CompactError::TooManyPairs { tokens, top_k })?;
    rows.clear();
    rows.resize(slots, NO_ROW);
    for (row, &pair) in pairs.iter().enumerate() {
        match rows.get_mut(pair as usize) {
            Some(found) if *found == NO_ROW => *found = row as u32,
            Some(found) => {
                return Err(CompactError::DuplicatePair {
                    pair,
                    first: *found as usize,
                    second: row,
                });
            }
            None => {
                return Err(CompactError::PairOutOfRange {
                    row,
                    pair,
                    tokens,
                    top_k,
                });
            }
        }
    }
    Ok(())
}
