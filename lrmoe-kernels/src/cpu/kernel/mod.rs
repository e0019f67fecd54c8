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

use super::{element::Storage, isa::Isa};

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
    /// What the sums begin with.
    pub(super) start: Start,
    /// What will be read next; `None` where the processor itself sees the pattern.
    pub(super) ahead: Option<Ahead>,
}

/// Lines to fetch into the second cache during a product, evenly over it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Where the first row begins; only ever prefetched, so it need not be valid.
    pub(super) start: *const u8,
    /// Bytes from one row to the next.
    pub(super) row: usize,
    /// Binary logarithm of the lines of a row.
    pub(super) lines: u32,
    /// Lines of all rows.
    pub(super) count: usize,
}

impl Ahead {
    /// Whole rows for each of `count` blocks.
    pub(super) fn parts(self, count: usize) -> impl Iterator<Item = Self> {
        let rows = (self.count >> self.lines).div_ceil(count);
        (0..count).map(move |i| Self {
            start: self.start.wrapping_add(i * rows * self.row),
            count: rows << self.lines,
            ..self
        })
    }

    /// Lines of a step, in units of 2^-16, when all take `steps` of them.
    #[inline(always)]
    fn rate(&self, steps: usize) -> usize {
        (self.count << 16) / steps.max(1)
    }

    #[inline(always)]
    fn prefetch<O: generic::Op>(&self, step: usize, rate: usize) {
        let line = (step * rate) >> 16;
        let (row, line) = (line >> self.lines, line & ((1 << self.lines) - 1));
        O::prefetch(self.start.wrapping_add(row * self.row + line * 64));
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
            ..
        } = &self;
        if *m == 0 {
            return;
        }
        assert!(
            lanes.is_multiple_of(VECTOR) && *lanes <= LANES && *lanes > 0,
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
        let raw = generic::Raw {
            a: self.a.as_ptr().cast(),
            a_row: self.a_row * size_of::<T>(),
            m: self.m,
            b: self.b.as_ptr(),
            lanes: self.lanes,
            k: self.k,
            c: self.c.as_mut_ptr(),
            c_row: self.c_row,
            start: self.start,
            ahead: self.ahead,
        };
        // SAFETY: by the assertions above, rows of A, B and C of these lengths lie in the slices. C is borrowed mutably. The
        // machine has the instruction set, as `Isa` says.
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
