//! Test values, and their sum and maximum as they should be.

use std::fmt::Debug;

use lrmoe_comm::{Element, Reduction, bf16};

/// An element with test values, and with sum and maximum as they should be.
pub(crate) trait Sample: Element + Debug + PartialEq {
    fn poison() -> Self;
    fn from_hash(hash: u32) -> Self;
    fn sum(values: &[Self]) -> Self;
    fn max(values: &[Self]) -> Self;
}

impl Sample for u32 {
    fn poison() -> Self {
        0xDEAD_BEEF
    }
    fn from_hash(hash: u32) -> Self {
        hash >> 4
    }
    fn sum(values: &[Self]) -> Self {
        values.iter().sum()
    }
    fn max(values: &[Self]) -> Self {
        *values.iter().max().unwrap()
    }
}

impl Sample for f32 {
    fn poison() -> Self {
        f32::NAN
    }
    /// Magnitudes from 2^-16 to 2^16 and both signs, so that the order of a sum shows.
    fn from_hash(hash: u32) -> Self {
        (hash as i32 as f32) * 2f32.powi((hash % 32) as i32 - 47)
    }
    fn sum(values: &[Self]) -> Self {
        values
            .iter()
            .copied()
            .reduce(|sum, value| sum + value)
            .unwrap()
    }
    fn max(values: &[Self]) -> Self {
        values.iter().copied().reduce(f32::max).unwrap()
    }
}

impl Sample for bf16 {
    fn poison() -> Self {
        bf16::NAN
    }
    fn from_hash(hash: u32) -> Self {
        bf16::from_f32(f32::from_hash(hash))
    }
    fn sum(values: &[Self]) -> Self {
        bf16::from_f32(Sample::sum(
            &values
                .iter()
                .map(|value| value.to_f32())
                .collect::<Vec<_>>(),
        ))
    }
    fn max(values: &[Self]) -> Self {
        bf16::from_f32(Sample::max(
            &values
                .iter()
                .map(|value| value.to_f32())
                .collect::<Vec<_>>(),
        ))
    }
}

pub(crate) fn sample<T: Sample>(seed: u32, rank: usize, index: usize) -> T {
    let mut hash =
        seed ^ (rank as u32).wrapping_mul(0x9E37_79B9) ^ (index as u32).wrapping_mul(0x85EB_CA6B);
    for _ in 0..3 {
        hash = (hash ^ (hash >> 15)).wrapping_mul(0x2C1B_3C6D);
    }
    T::from_hash(hash ^ (hash >> 13))
}

pub(crate) fn samples<T: Sample>(seed: u32, rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| sample(seed, rank, index)).collect()
}

#[track_caller]
pub(crate) fn assert_same<T: Sample>(found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(
            bytemuck::bytes_of(found),
            bytemuck::bytes_of(expected),
            "element {index}: {found:?}, {expected:?}"
        );
    }
}

pub(crate) fn reduced<T: Sample>(seed: u32, ranks: usize, index: usize, reduction: Reduction) -> T {
    let values: Vec<T> = (0..ranks).map(|rank| sample(seed, rank, index)).collect();
    match reduction {
        Reduction::Sum => T::sum(&values),
        Reduction::Max => T::max(&values),
    }
}
