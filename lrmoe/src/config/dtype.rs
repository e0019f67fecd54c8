use std::fmt;

use clap::ValueEnum;
use lrmoe_kernels::half::bf16;

/// What weights and rows of a MoE layer are stored as; sums are f32 with both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// 4 bytes.
    #[default]
    F32,
    /// The upper half of an f32: its range, with 8 bits of precision.
    Bf16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}
