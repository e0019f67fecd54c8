use std::array;

use super::{Ahead, Start, VECTOR};

/// A [`Block`](super::Block) without its lifetimes, rows of A in bytes.
#[derive(Debug)]
pub(in super::super) struct Raw {
    pub(super) a: *const u8,
    pub(super) a_row: usize,
    pub(super) m: usize,
    pub(super) b: *const u32,
    pub(super) lanes: usize,
    pub(super) k: usize,
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Whole lines that take the result instead of C; C itself if `streams` is not set.
    pub(super) to: *mut f32,
    pub(super) to_row: usize,
    pub(super) streams: bool,
    pub(super) start: Start,
    pub(super) ahead: Option<Ahead>,
}

/// Multiply-add of words on vectors of one instruction set.
pub(super) trait Op {
    /// Sums, one for each lane.
    type Sums: Copy;
    /// Words of B, or one word of A in every lane.
    type Words: Copy;
    /// Lanes of a vector.
    const LANES: usize;

    fn zero() -> Self::Sums;
    /// # Safety
    ///
    /// `LANES` values are readable at `from`.
    unsafe fn load(from: *const f32) -> Self::Sums;
    /// # Safety
    ///
    /// `LANES` values are writable at `to`.
    unsafe fn store(to: *mut f32, sums: Self::Sums);
    /// Past the caches where the instruction set can.
    ///
    /// # Safety
    ///
    /// `LANES` values are writable at `to`, which is aligned to them.
    unsafe fn stream(to: *mut f32, sums: Self::Sums);
    /// # Safety
    ///
    /// `LANES` words are readable at `from`.
    unsafe fn words(from: *const u32) -> Self::Words;
    fn splat(word: u32) -> Self::Words;
    fn add(a: Self::Sums, b: Self::Sums) -> Self::Sums;
    fn multiply_add(sums: Self::Sums, a: Self::Words, b: Self::Words) -> Self::Sums;
    /// Into the first cache.
    fn prefetch_near(at: *const u8);
    /// Into the second cache.
    fn prefetch(at: *const u8);
}

/// Words of k between prefetches: one line of A.
const CHUNK: usize = 16;
/// Words of k that follow each other without a branch.
const UNROLLED: usize = 4;

/// `R` rows from `row` on and `V` vectors of lanes from `lane` on. `S` is `raw.lanes` where that is known, or else 0.
///
/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say, and these rows and lanes are within them.
#[inline(always)]
unsafe fn tile<O: Op, const R: usize, const V: usize, const S: usize>(
    raw: &Raw,
    row: usize,
    lane: usize,
) {
    let mut sums = [[O::zero(); V]; R];
    let lanes = if S > 0 { S } else { raw.lanes };
    // SAFETY: rows row..row + R and lanes lane..lane + V * LANES are in A, B and C, as the caller promises; all reads and
    // writes below are of these, at k < raw.k.
    unsafe {
        let c = raw.c.add(row * raw.c_row + lane);
        if raw.start == Start::Chain {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sums) in sums.iter_mut().enumerate() {
                    *sums = O::load(c.add(r * raw.c_row + v * O::LANES));
                }
            }
        }
        let mut b = raw.b.add(lane);
        let mut a: [*const u32; R] = array::from_fn(|r| raw.a.add((row + r) * raw.a_row).cast());
        let chunks = raw.k / CHUNK;
        let mut ahead = raw
            .ahead
            .as_ref()
            .map(|ahead| (ahead, ahead.cursor(row * chunks, raw.m * chunks)));
        for _ in 0..chunks {
            if let Some((ahead, cursor)) = &mut ahead {
                for a in a {
                    O::prefetch_near(a.cast::<u8>().wrapping_add(R * raw.a_row));
                }
                cursor.fetch::<O>(R, ahead);
            }
            for _ in 0..CHUNK / UNROLLED {
                step::<O, R, V>(&mut sums, &a, 0, b);
                step::<O, R, V>(&mut sums, &a, 1, b.add(lanes));
                step::<O, R, V>(&mut sums, &a, 2, b.add(2 * lanes));
                step::<O, R, V>(&mut sums, &a, 3, b.add(3 * lanes));
                a = a.map(|a| a.add(UNROLLED));
                b = b.wrapping_add(UNROLLED * lanes);
            }
        }
        for k in 0..raw.k % CHUNK {
            step::<O, R, V>(&mut sums, &a, k, b);
            b = b.wrapping_add(lanes);
        }
        if raw.start == Start::Add {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sums) in sums.iter_mut().enumerate() {
                    *sums = O::add(O::load(c.add(r * raw.c_row + v * O::LANES)), *sums);
                }
            }
        }
        let to = raw.to.add(row * raw.to_row + lane);
        for (r, sums) in sums.iter().enumerate() {
            for (v, sums) in sums.iter().enumerate() {
                let to = to.add(r * raw.to_row + v * O::LANES);
                if raw.streams {
                    O::stream(to, *sums);
                } else {
                    O::store(to, *sums);
                }
            }
        }
    }
}

/// One word of k: of each row at `a` the word `k`, and the lanes at `b`.
///
/// # Safety
///
/// These can be read.
#[inline(always)]
unsafe fn step<O: Op, const R: usize, const V: usize>(
    sums: &mut [[O::Sums; V]; R],
    a: &[*const u32; R],
    k: usize,
    b: *const u32,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let words: [O::Words; V] = array::from_fn(|v| O::words(b.add(v * O::LANES)));
        for (sums, a) in sums.iter_mut().zip(a) {
            let word = O::splat(a.add(k).read_unaligned());
            for (sum, words) in sums.iter_mut().zip(words) {
                *sum = O::multiply_add(*sum, word, words);
            }
        }
    }
}

/// As many steps of `R` rows as are left from `row` on.
///
/// # Safety
///
/// That of [`tile`].
#[inline(always)]
unsafe fn sweep<O: Op, const R: usize, const V: usize, const S: usize>(
    raw: &Raw,
    row: &mut usize,
    lane: usize,
) {
    while *row + R <= raw.m {
        // SAFETY: passed on.
        unsafe { tile::<O, R, V, S>(raw, *row, lane) }
        *row += R;
    }
}

/// Sums in 24 of 32 registers of 16 lanes.
///
/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say.
#[inline(always)]
pub(super) unsafe fn wide<O: Op>(raw: &Raw) {
    const { assert!(O::LANES == VECTOR, "one vector of lanes") };
    let row = &mut 0;
    macro_rules! sweeps {
        ($v:literal: $($r:literal)*) => {
            // SAFETY: lanes 0..16 v are in B and C; the rest is passed on.
            unsafe { $( sweep::<O, $r, $v, { $v * VECTOR }>(raw, row, 0); )* }
        };
    }
    match raw.lanes / VECTOR {
        4 => sweeps!(4: 6 5 4 3 2 1),
        3 => sweeps!(3: 8 4 2 1),
        2 => sweeps!(2: 8 4 2 1),
        _ => sweeps!(1: 8 4 2 1),
    }
}

/// Sums in 12 of 16 registers of 8 lanes.
///
/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say.
#[inline(always)]
pub(super) unsafe fn narrow<O: Op>(raw: &Raw) {
    const { assert!(2 * O::LANES == VECTOR, "two vectors of lanes") };
    for lane in (0..raw.lanes).step_by(VECTOR) {
        let row = &mut 0;
        // SAFETY: lanes come in whole vectors; the rest is passed on.
        unsafe {
            sweep::<O, 6, 2, 0>(raw, row, lane);
            sweep::<O, 4, 2, 0>(raw, row, lane);
            sweep::<O, 2, 2, 0>(raw, row, lane);
            sweep::<O, 1, 2, 0>(raw, row, lane);
        }
    }
}

/// Sums in arrays that the compiler lays out as it can.
///
/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say.
#[inline(always)]
pub(super) unsafe fn plain<O: Op>(raw: &Raw) {
    const { assert!(O::LANES == VECTOR, "one vector of lanes") };
    for lane in (0..raw.lanes).step_by(VECTOR) {
        let row = &mut 0;
        // SAFETY: lanes come in whole vectors; the rest is passed on.
        unsafe {
            sweep::<O, 4, 1, 0>(raw, row, lane);
            sweep::<O, 1, 1, 0>(raw, row, lane);
        }
    }
}
