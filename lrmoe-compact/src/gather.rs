use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::prelude::*;

use crate::view::{elements, elements_mut, rows_per_task};
use crate::{Argument, Error};

/// Copies row `index[i]` of `rows` (`[n, width]`) to row i of `out` (`[index.len(), width]`).
///
/// An index may occur any number of times.
///
/// # Errors
/// [`Error::Shape`] or [`Error::Layout`] if an array does not fit, [`Error::IndexOutOfRange`] if an
/// index is not a row.
pub fn gather<T: Copy + Send + Sync>(
    rows: ArrayView2<'_, T>,
    index: &[u32],
    mut out: ArrayViewMut2<'_, T>,
) -> Result<(), Error> {
    let (count, width) = rows.dim();
    let rows = elements(Argument::Rows, &rows, [count, width])?;
    let out = elements_mut(Argument::Out, &mut out, [index.len(), width])?;
    if let Some(position) = index.iter().position(|&index| index as usize >= count) {
        return Err(Error::IndexOutOfRange {
            position,
            index: index[position],
            rows: count,
        });
    }
    if width == 0 {
        return Ok(());
    }
    out.par_chunks_exact_mut(width)
        .zip(index)
        .with_min_len(rows_per_task::<T>(width))
        .for_each(|(out, &index)| out.copy_from_slice(&rows[index as usize * width..][..width]));
    Ok(())
}
