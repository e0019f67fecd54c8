use std::ops::Range;

use bytemuck::Pod;
use half::bf16;

use crate::Reduction;
use sealed::Arithmetic;

/// What a collective moves: `u32`, `f32` or [`bf16`]. Sealed.
pub trait Element: Pod + Send + Sync + Arithmetic {}

impl Element for u32 {}
impl Element for f32 {}
impl Element for bf16 {}

pub(crate) mod sealed {
    use std::ops::AddAssign;

    pub trait Arithmetic: Copy {
        /// Wide enough that the sum over any number of ranks is exact (integers) or rounded in one
        /// way (floats).
        type Sum: Copy + Default + From<Self> + AddAssign;
        const NAME: &'static str;
        /// Whether a sum can be out of range.
        const BOUNDED: bool;
        /// The sum as an element, `None` if out of range.
        fn narrow(sum: Self::Sum) -> Option<Self>;
        /// Whether `self` takes the place of `largest`, the largest value so far.
        fn exceeds(self, largest: Self) -> bool;
    }
}

impl Arithmetic for u32 {
    type Sum = u64;
    const NAME: &'static str = "u32";
    const BOUNDED: bool = true;

    fn narrow(sum: u64) -> Option<Self> {
        Self::try_from(sum).ok()
    }

    fn exceeds(self, largest: Self) -> bool {
        self > largest
    }
}

impl Arithmetic for f32 {
    type Sum = f32;
    const NAME: &'static str = "f32";
    const BOUNDED: bool = false;

    fn narrow(sum: f32) -> Option<Self> {
        Some(sum)
    }

    fn exceeds(self, largest: Self) -> bool {
        self > largest || (self.is_nan() && !largest.is_nan())
    }
}

impl Arithmetic for bf16 {
    type Sum = f32;
    const NAME: &'static str = "bf16";
    const BOUNDED: bool = false;

    fn narrow(sum: f32) -> Option<Self> {
        Some(Self::from_f32(sum))
    }

    fn exceeds(self, largest: Self) -> bool {
        f32::from(self).exceeds(f32::from(largest))
    }
}

/// The part of `len` elements that `rank` reduces; together they are all of them, in rank order.
pub(crate) fn slice(len: usize, ranks: usize, rank: usize) -> Range<usize> {
    let most = len.div_ceil(ranks);
    let start = len.min(rank * most);
    start..len.min(start + most)
}

/// Room for `len` elements in words, which any element's alignment divides; it grows as needed.
pub(crate) fn room<T: Element>(words: &mut Vec<u32>, len: usize) -> &mut [T] {
    let needed = (len * size_of::<T>()).div_ceil(size_of::<u32>());
    if words.len() < needed {
        words.resize(needed, 0);
    }
    &mut bytemuck::cast_slice_mut(words)[..len]
}

/// Elements that are summed at a time, so that the sums stay in the first-level cache.
const BLOCK: usize = 512;

/// `out[i]` becomes the reduction of element i of every source, in the order of the sources. A
/// source holds the bytes of `out.len()` elements, at any alignment; source `own` is what `out` holds
/// before. `Err(i)`: i is the lowest element whose sum is out of range.
pub(crate) fn reduce<T: Element>(
    sources: &[&[u8]],
    own: usize,
    reduction: Reduction,
    out: &mut [T],
) -> Result<(), usize> {
    let mut before = [T::zeroed(); BLOCK];
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let start = block * BLOCK;
        let bytes = start * size_of::<T>()..(start + out.len()) * size_of::<T>();
        let before = &mut before[..out.len()];
        before.copy_from_slice(out);
        let before: &[u8] = bytemuck::cast_slice(before);
        let blocks = sources.iter().enumerate().map(|(rank, source)| {
            if rank == own {
                before
            } else {
                &source[bytes.clone()]
            }
        });
        match reduction {
            Reduction::Sum => sum(blocks, out).map_err(|index| start + index)?,
            Reduction::Max => largest(blocks, out),
        }
    }
    Ok(())
}

fn sum<'a, T: Element>(
    sources: impl Iterator<Item = &'a [u8]>,
    out: &mut [T],
) -> Result<(), usize> {
    let mut sums = [T::Sum::default(); BLOCK];
    let sums = &mut sums[..out.len()];
    for (rank, source) in sources.enumerate() {
        for (sum, value) in sums.iter_mut().zip(elements::<T>(source)) {
            // The first value is not added to 0, which would turn a sum of -0.0 into 0.0.
            match rank {
                0 => *sum = value.into(),
                _ => *sum += value.into(),
            }
        }
    }
    for (index, (out, &sum)) in out.iter_mut().zip(&*sums).enumerate() {
        *out = T::narrow(sum).ok_or(index)?;
    }
    Ok(())
}

fn largest<'a, T: Element>(sources: impl Iterator<Item = &'a [u8]>, out: &mut [T]) {
    for (rank, source) in sources.enumerate() {
        for (out, value) in out.iter_mut().zip(elements::<T>(source)) {
            if rank == 0 || value.exceeds(*out) {
                *out = value;
            }
        }
    }
}

fn elements<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
}
