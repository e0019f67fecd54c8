use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::prelude::*;

use crate::view::{elements, elements_mut, rows_per_task};
use crate::{Argument, Error};

/// Marks a slot without a row. Rows are distinct pairs, of which there are at most `u32::MAX`, so
/// none has this number.
const NO_ROW: u32 = u32::MAX;

/// Adds the rows of pairs to their tokens, with a scratch that is kept from call to call.
///
/// The scratch holds 4 bytes for every pair of the largest call so far.
#[derive(Clone, Debug, Default)]
pub struct ScatterAdd {
    /// The row of every pair, by pair id.
    row_of: Vec<u32>,
}

impl ScatterAdd {
    /// An empty scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `weights[i] * rows[i]` (without weights `rows[i]`) to `into[t]`, t being the token of
    /// pair `pairs[i]`.
    ///
    /// `rows` is `[n, width]`, `into` is `[tokens, width]`, and pair `t * top_k + j` is slot j of
    /// token t. The pairs are distinct and in any order. A token's rows are added one after the
    /// other in ascending slot order, each product and each sum rounded to `f32`; a token without
    /// rows is not touched.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Layout`] or [`Error::Length`] if an array does not fit,
    /// [`Error::TooManyPairs`] if `tokens * top_k` is past `u32::MAX`, [`Error::PairOutOfRange`]
    /// and [`Error::DuplicatePair`] for such pairs.
    pub fn add(
        &mut self,
        rows: ArrayView2<'_, f32>,
        pairs: &[u32],
        weights: Option<&[f32]>,
        top_k: usize,
        mut into: ArrayViewMut2<'_, f32>,
    ) -> Result<(), Error> {
        let count = rows.nrows();
        let (tokens, width) = into.dim();
        let rows = elements(Argument::Rows, &rows, [count, width])?;
        let into = elements_mut(Argument::Into, &mut into, [tokens, width])?;
        check_length(Argument::Pairs, pairs.len(), count)?;
        check_length(
            Argument::Weights,
            weights.map_or(count, <[f32]>::len),
            count,
        )?;
        self.find_rows(pairs, tokens, top_k)?;
        if width == 0 || top_k == 0 {
            return Ok(());
        }
        into.par_chunks_exact_mut(width)
            .zip(self.row_of.par_chunks_exact(top_k))
            .with_min_len(rows_per_task::<f32>(width))
            .for_each(|(into, slots)| {
                for row in slots
                    .iter()
                    .filter(|&&row| row != NO_ROW)
                    .map(|&row| row as usize)
                {
                    add_row(
                        into,
                        &rows[row * width..][..width],
                        weights.map(|weights| weights[row]),
                    );
                }
            });
        Ok(())
    }

    /// Fills the scratch for these pairs.
    fn find_rows(&mut self, pairs: &[u32], tokens: usize, top_k: usize) -> Result<(), Error> {
        let slots = tokens
            .checked_mul(top_k)
            .filter(|&slots| u32::try_from(slots).is_ok());
        let slots = slots.ok_or(Error::TooManyPairs { tokens, top_k })?;
        self.row_of.clear();
        self.row_of.resize(slots, NO_ROW);
        for (row, &pair) in pairs.iter().enumerate() {
            let Some(found) = self.row_of.get_mut(pair as usize) else {
                return Err(Error::PairOutOfRange {
                    row,
                    pair,
                    tokens,
                    top_k,
                });
            };
            if *found != NO_ROW {
                return Err(Error::DuplicatePair {
                    pair,
                    first: *found as usize,
                    second: row,
                });
            }
            *found = row as u32;
        }
        Ok(())
    }
}

fn add_row(into: &mut [f32], row: &[f32], weight: Option<f32>) {
    match weight {
        Some(weight) => into
            .iter_mut()
            .zip(row)
            .for_each(|(sum, &value)| *sum += weight * value),
        None => into
            .iter_mut()
            .zip(row)
            .for_each(|(sum, &value)| *sum += value),
    }
}

fn check_length(argument: Argument, found: usize, rows: usize) -> Result<(), Error> {
    if found == rows {
        return Ok(());
    }
    Err(Error::Length {
        argument,
        found,
        rows,
    })
}
