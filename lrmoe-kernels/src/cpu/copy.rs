//! Copies of rows. An output too large for the caches is written past them: an ordinary store first reads the line that it writes to, and so
//! halves the rate at which memory is written.

use std::{ops::Range, ptr};

use rayon::prelude::*;

use super::stream::{self, LINE};
use crate::{Element, compact::NO_ROW};

/// Outputs from this size on are written past the caches.
const STREAMED_BYTES: usize = 8 << 20;
/// Rows that are streamed in turns: memory serves several rows at a time faster than one after the other.
const AT_ONCE: usize = 8;
/// Lines of a row in a turn.
const TURN: usize = 4;
/// About as many bytes of output make a task.
const TASK_BYTES: usize = 1 << 18;

/// How an output is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    Ordinary,
    /// Past the caches. [`finish`](Self::finish) makes them visible to other threads.
    Streaming,
}

impl Stores {
    /// For an output of so many rows of so many bytes.
    pub(super) fn for_output(rows: usize, row_bytes: usize) -> Self {
        let can = cfg!(target_arch = "x86_64") && row_bytes >= 2 * LINE;
        if can && rows * row_bytes >= STREAMED_BYTES {
            Self::Streaming
        } else {
            Self::Ordinary
        }
    }

    /// Copies rows of `row_bytes` bytes.
    ///
    /// # Safety
    ///
    /// The rows to read are initialised and the rows to write have room, which nobody else has access to.
    pub(super) unsafe fn copy(self, rows: &[RowCopy], row_bytes: usize) {
        match self {
            Self::Ordinary => {
                for row in rows {
                    // SAFETY: as the caller says.
                    unsafe { row.to.copy_from_nonoverlapping(row.from, row_bytes) };
                }
            }
            // SAFETY: as the caller says.
            Self::Streaming => rows
                .chunks(AT_ONCE)
                .for_each(|rows| unsafe { copy_in_turns(rows, row_bytes) }),
        }
    }

    /// Ends a task's stores.
    pub(super) fn finish(self) {
        if self == Self::Streaming {
            stream::finish();
        }
    }
}

/// Where a row is copied from and to.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowCopy {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
}

impl RowCopy {
    const NOWHERE: Self = Self {
        from: ptr::null(),
        to: ptr::null_mut(),
    };
}

/// Copies at most [`AT_ONCE`] rows, whole lines of the output past the caches.
///
/// # Safety
///
/// As for [`Stores::copy`]; and `row_bytes` is at least [`LINE`].
unsafe fn copy_in_turns(rows: &[RowCopy], row_bytes: usize) {
    let mut starts = [0; AT_ONCE];
    for (row, start) in rows.iter().zip(&mut starts) {
        *start = row.to.addr().wrapping_neg() % LINE;
        let end = *start + (row_bytes - *start) / LINE * LINE;
        if end - *start < row_bytes {
            // SAFETY: these are the ends of the rows.
            unsafe {
                row.to.copy_from_nonoverlapping(row.from, *start);
                let (from, to) = (row.from.add(end), row.to.add(end));
                to.copy_from_nonoverlapping(from, row_bytes - end);
            }
        }
    }
    let most = row_bytes / LINE;
    for first in (0..most).step_by(TURN) {
        for (row, start) in rows.iter().zip(starts) {
            let lines = (row_bytes - start) / LINE;
            let count = lines.min(first + TURN).saturating_sub(first);
            let at = start + first * LINE;
            // SAFETY: the row has so many lines from its first whole one, whose address is a multiple of a line's.
            unsafe { stream::lines(row.from.add(at), row.to.add(at), count) };
        }
    }
}

/// An output that tasks write to, each at rows of its own.
struct Output(*mut u8);

// SAFETY: only `copy_rows` has any, and its tasks write to distinct rows.
unsafe impl Sync for Output {}

impl Output {
    /// # Safety
    ///
    /// There is room up to the byte after the row.
    unsafe fn row(&self, place: usize, row_bytes: usize) -> *mut u8 {
        // SAFETY: as the caller says.
        unsafe { self.0.add(place * row_bytes) }
    }
}

/// Fills `out` with the rows `from[index[i]]` of `width` elements, zeros for [`NO_ROW`].
///
/// `order` lists all places of the index in the order in which they are written; empty, it is their own.
///
/// # Panics
///
/// If an index is not that of a row, `out` has other rows than the index, or `order` has neither the index's length nor none.
///
/// # Safety
///
/// `order` lists places of the index, none of them twice.
pub(super) unsafe fn copy_rows<T: Element>(
    from: &[T],
    width: usize,
    index: &[u32],
    order: &[u32],
    out: &mut [T],
) {
    assert!(order.is_empty() || order.len() == index.len());
    assert_eq!(out.len(), index.len() * width);
    if index.is_empty() || width == 0 {
        return;
    }
    let row_bytes = width * size_of::<T>();
    let stores = Stores::for_output(index.len(), row_bytes);
    let to = Output(out.as_mut_ptr().cast());
    let task_rows = (TASK_BYTES / row_bytes).max(AT_ONCE);
    let write = |places: Range<usize>| {
        let mut rows = [RowCopy::NOWHERE; AT_ONCE];
        let mut count = 0;
        for at in places {
            let place = order.get(at).map_or(at, |&place| place as usize);
            // SAFETY: the place is below the index's length, and there is room for as many rows.
            let to = unsafe { to.row(place, row_bytes) };
            if index[place] == NO_ROW {
                // SAFETY: no other task writes the row, and zero bytes are an element.
                unsafe { to.write_bytes(0, row_bytes) };
                continue;
            }
            let from = &from[index[place] as usize * width..][..width];
            rows[count] = RowCopy {
                from: from.as_ptr().cast(),
                to,
            };
            count += 1;
            if count == AT_ONCE {
                // SAFETY: rows of `from` are copied to rows that no other task writes.
                unsafe { stores.copy(&rows, row_bytes) };
                count = 0;
            }
        }
        // SAFETY: as above.
        unsafe { stores.copy(&rows[..count], row_bytes) };
        stores.finish();
    };
    (0..index.len().div_ceil(task_rows))
        .into_par_iter()
        .map(|task| task * task_rows)
        .for_each(|start| write(start..index.len().min(start + task_rows)));
}
