//! Products of blocks that fit the first caches, for each instruction set.
//!
//! The left factor A `[m, k]` is read as it lies, rows contiguous along k; the right factor B is packed as
//! `[k words, lanes]`. A word is 4 bytes of consecutive k: one f32, or two bf16. So weights `[out, in]` are left factors
//! of products over `in` without being moved.
//!
//! Each element of a block's result is one chain of (fused) multiply-adds in ascending k. It depends on its row of A and its lane of
//! B alone, wherever they stand and however m and the lanes are cut.

#[cfg(target_arch = "x86_64")]
mod amx;
mod generic;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use super::{
    element::Storage,
    isa::Isa,
    stream::{LINE, before_lines},
};

#[cfg(target_arch = "x86_64")]
pub(super) use amx::is_usable as amx_is_usable;

/// Lanes of B come in vectors of this many words, the widest SIMD.
pub(super) const VECTOR: usize = 16;
/// Most lanes of one block.
pub(super) const LANES: usize = 64;

/// What becomes of C's content before a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Nothing: `C = A B`.
    Zero,
    /// Sums go on from it, one chain of multiply-adds however k is cut.
    Chain,
    /// The product is summed by itself and then added, which loses less where many blocks follow each other. Where AMX sums, it is a
    /// chain.
    Add,
}

/// `C = A B`, or added to C.
#[derive(Debug)]
pub(super) struct Block<'a, T> {
    /// `[m, a_row]`; the last row may end after `k`.
    pub(super) a: &'a [T],
    /// Elements from one row of A to the next.
    pub(super) a_row: usize,
    /// Rows of A and C.
    pub(super) m: usize,
    /// `[k, lanes]`.
    pub(super) b: &'a [u32],
    /// A multiple of [`VECTOR`], at most [`LANES`].
    pub(super) lanes: usize,
    /// Words.
    pub(super) k: usize,
    /// `[m, c_row]`; the last row may end after `lanes`.
    pub(super) c: &'a mut [f32],
    /// Elements from one row of C to the next.
    pub(super) c_row: usize,
    /// Where the result goes instead of to C, past the caches: whole lines, and elements from one row to the next.
    pub(super) to: Option<(&'a mut [f32], usize)>,
    /// What the sums begin with.
    pub(super) start: Start,
    /// What will be read next, where it is known.
    pub(super) ahead: Option<Ahead>,
}

/// Lines to fetch into the second cache during a product, evenly over it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Where the first row begins; only ever prefetched, so it need not be valid.
    pub(super) start: *const u8,
    /// Bytes from one row to the next.
    pub(super) row: usize,
    /// Lines of a row, not 0.
    pub(super) lines: usize,
    /// Rows.
    pub(super) rows: usize,
}

impl Ahead {
    /// The rows for a part of `all`.
    pub(super) fn part(self, part: Range<usize>, all: usize) -> Self {
        let (from, to) = (self.rows * part.start / all, self.rows * part.end / all);
        Self {
            start: self.start.wrapping_add(from * self.row),
            rows: to - from,
            ..self
        }
    }

    /// What is left to fetch from `step` on when all lines take `steps` steps.
    fn cursor(&self, step: usize, steps: usize) -> Cursor {
        let of_step = ((self.rows * self.lines) << FRACTION) / steps.max(1);
        let done = step * of_step;
        let (row, line) = (
            (done >> FRACTION) / self.lines,
            (done >> FRACTION) % self.lines,
        );
        Cursor {
            at: self.start.wrapping_add(row * self.row + line * LINE),
            left: self.lines - line,
            due: done & ((1 << FRACTION) - 1),
            of_step,
        }
    }
}

/// Binary digits of the fraction of a line.
const FRACTION: usize = 16;

/// The next one of the lines to fetch.
struct Cursor {
    at: *const u8,
    /// Lines of the row from it on.
    left: usize,
    /// Lines that should have been fetched by now, and those of a step, in units of 2^-[`FRACTION`].
    due: usize,
    of_step: usize,
}

impl Cursor {
    /// Fetches those of so many steps.
    #[inline(always)]
    fn fetch<O: generic::Op>(&mut self, steps: usize, ahead: &Ahead) {
        self.due += steps * self.of_step;
        while self.due >= 1 << FRACTION {
            self.due -= 1 << FRACTION;
            O::prefetch(self.at);
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
            if self.left == 0 {
                self.left = ahead.lines;
                self.at = self
                    .at
                    .wrapping_add(ahead.row)
                    .wrapping_sub(ahead.lines * LINE);
            }
        }
    }
}

impl<T: Storage> Block<'_, T> {
    /// Computes it.
    pub(super) fn multiply(self, isa: Isa) {
        let Self {
            a,
            a_row,
            m,
            b,
            lanes,
            k,
            c,
            c_row,
            to,
            start,
            ahead,
        } = self;
        if m == 0 {
            return;
        }
        assert!(
            lanes.is_multiple_of(VECTOR) && lanes <= LANES && lanes > 0,
            "{lanes} lanes"
        );
        assert!(
            (m - 1) * a_row + k * T::PER_WORD <= a.len(),
            "{m} rows of A in {}",
            a.len()
        );
        assert!(k * lanes <= b.len(), "{k} rows of B in {}", b.len());
        assert!(
            (m - 1) * c_row + lanes <= c.len(),
            "{m} rows of C in {}",
            c.len()
        );
        let streams = to.is_some();
        let c = c.as_mut_ptr();
        let (to, to_row) = match to {
            Some((to, to_row)) => {
                assert!(
                    (m - 1) * to_row + lanes <= to.len(),
                    "{m} rows of results in {}",
                    to.len()
                );
                assert!(
                    to_row.is_multiple_of(VECTOR) && before_lines(to) == 0,
                    "results are whole lines"
                );
                (to.as_mut_ptr(), to_row)
            }
            None => (c, c_row),
        };
        let raw = Raw {
            a: a.as_ptr().cast(),
            a_row: a_row * size_of::<T>(),
            m,
            b: b.as_ptr(),
            lanes,
            k,
            c,
            c_row,
            to,
            to_row,
            streams,
            start,
            ahead,
        };
        // SAFETY: by the assertions above, rows of A, B, C and results of these lengths lie in the slices. C and results are borrowed
        // mutably, the latter aligned. The machine has the instruction set, as `Isa` says.
        unsafe { T::multiply(isa, &raw) }
    }
}

pub(super) use generic::Raw;
pub(super) use portable::{portable_bf16, portable_f32};
#[cfg(target_arch = "x86_64")]
pub(super) use {
    amx::multiply as amx_bf16,
    x86::{avx2_bf16, avx2_f32, avx512_bf16_dot, avx512_bf16_widened, avx512_f32},
};
