//! Checked access to the caller's arrays.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::{Argument, Error};

/// About what one task should move: enough to outweigh starting it, little enough to share work
/// out.
const TASK_BYTES: usize = 1 << 16;

/// How many rows of `width` elements make one task.
pub(crate) fn rows_per_task<T>(width: usize) -> usize {
    (TASK_BYTES / (width * size_of::<T>()).max(1)).max(1)
}

/// The elements of an array, which must have this shape.
pub(crate) fn elements<'a, T>(
    argument: Argument,
    array: &'a ArrayView2<'_, T>,
    expected: [usize; 2],
) -> Result<&'a [T], Error> {
    check_shape(argument, array.dim().into(), expected)?;
    array.as_slice().ok_or(Error::Layout { argument })
}

/// The elements of an array to write to, which must have this shape.
pub(crate) fn elements_mut<'a, T>(
    argument: Argument,
    array: &'a mut ArrayViewMut2<'_, T>,
    expected: [usize; 2],
) -> Result<&'a mut [T], Error> {
    check_shape(argument, array.dim().into(), expected)?;
    array.as_slice_mut().ok_or(Error::Layout { argument })
}

fn check_shape(argument: Argument, found: [usize; 2], expected: [usize; 2]) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape {
        argument,
        found,
        expected,
    })
}
