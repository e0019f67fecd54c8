//! How elements are written for the device where its arithmetic is not that of this crate.

use half::bf16;

use crate::{Element, Reduction};

/// What the device takes a value for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    U32,
    U64,
    F32,
    Bf16,
}

impl Kind {
    pub(crate) fn of<T: Element>() -> Self {
        match T::NAME {
            "u32" => Self::U32,
            "f32" => Self::F32,
            _ => Self::Bf16,
        }
    }

    /// In bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::U64 => 8,
            Self::U32 | Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// What values are written as to be reduced: sums of `u32` in 64 bits, which do not wrap; largest
/// values as `u32` keys in the order of the values, so that a NaN is the largest of all.
pub(crate) fn reduced_as<T: Element>(reduction: Reduction) -> Kind {
    match (Kind::of::<T>(), reduction) {
        (Kind::U32, Reduction::Sum) => Kind::U64,
        (_, Reduction::Max) => Kind::U32,
        (kind, Reduction::Sum) => kind,
    }
}

/// The bytes of the values in that form.
pub(crate) fn write<T: Element>(values: &[T], reduction: Reduction) -> Vec<u8> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    match (Kind::of::<T>(), reduction) {
        (Kind::U32, Reduction::Sum) => {
            let words: &[u32] = bytemuck::cast_slice(bytes);
            let words = words.iter().flat_map(|&word| u64::from(word).to_ne_bytes());
            words.collect()
        }
        (Kind::F32, Reduction::Max) => {
            let floats: &[f32] = bytemuck::cast_slice(bytes);
            keys(floats.iter().copied())
        }
        (Kind::Bf16, Reduction::Max) => {
            let floats: &[bf16] = bytemuck::cast_slice(bytes);
            keys(floats.iter().map(|value| value.to_f32()))
        }
        _ => bytes.to_vec(),
    }
}

/// Values from that form; `Err` is the first that is out of range.
pub(crate) fn read<T: Element>(
    bytes: &[u8],
    reduction: Reduction,
    values: &mut [T],
) -> Result<(), usize> {
    let values: &mut [u8] = bytemuck::cast_slice_mut(values);
    match (Kind::of::<T>(), reduction) {
        (Kind::U32, Reduction::Sum) => {
            let words: &mut [u32] = bytemuck::cast_slice_mut(values);
            let (sums, _) = bytes.as_chunks();
            for (index, (word, &sum)) in words.iter_mut().zip(sums).enumerate() {
                *word = u32::try_from(u64::from_ne_bytes(sum)).map_err(|_| index)?;
            }
        }
        (Kind::F32, Reduction::Max) => {
            let floats: &mut [f32] = bytemuck::cast_slice_mut(values);
            floats
                .iter_mut()
                .zip(floats_of(bytes))
                .for_each(|(to, value)| *to = value);
        }
        (Kind::Bf16, Reduction::Max) => {
            let floats: &mut [bf16] = bytemuck::cast_slice_mut(values);
            let of_key = |(to, value): (&mut bf16, f32)| *to = bf16::from_f32(value);
            floats.iter_mut().zip(floats_of(bytes)).for_each(of_key);
        }
        _ => values.copy_from_slice(bytes),
    }
    Ok(())
}

/// The sign bit set for positive values, all bits turned for negative ones.
fn keys(values: impl Iterator<Item = f32>) -> Vec<u8> {
    let key = |value: f32| match value.to_bits() {
        _ if value.is_nan() => u32::MAX,
        bits if value.is_sign_negative() => !bits,
        bits => bits | 1 << 31,
    };
    values.flat_map(|value| key(value).to_ne_bytes()).collect()
}

fn floats_of(keys: &[u8]) -> impl Iterator<Item = f32> {
    let (keys, _) = keys.as_chunks();
    keys.iter().map(|&key| match u32::from_ne_bytes(key) {
        key if key >> 31 == 0 => f32::from_bits(!key),
        key => f32::from_bits(key & !(1 << 31)),
    })
}
