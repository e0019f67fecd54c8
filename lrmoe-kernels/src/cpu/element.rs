use half::bf16;

use super::{
    isa::Isa,
    kernel::{self, Raw},
};
use crate::Element;

/// What weights and rows are stored as: [`f32`], or [`bf16`]. Sums are f32.
#[expect(
    private_bounds,
    reason = "sealed: only the kernels know what an element must do"
)]
pub trait FfnElement: Element + Storage {}

impl FfnElement for f32 {}
impl FfnElement for bf16 {}

pub(super) trait Storage: bytemuck::Pod + Copy + Default + Send + Sync + 'static {
    /// Consecutive elements that the kernels take at once.
    const PER_WORD: usize;

    /// # Safety
    ///
    /// The pointers of `raw` reach as many elements as its sizes say, and the machine has `isa`.
    unsafe fn multiply(isa: Isa, raw: &Raw);

    /// Rounded to nearest even.
    fn narrowed(value: f32) -> Self;

    fn widened(self) -> f32;

    /// The bits; in the lower half where two make a word.
    fn bits(self) -> u32;
}

impl Storage for f32 {
    const PER_WORD: usize = 1;

    unsafe fn multiply(isa: Isa, raw: &Raw) {
        // SAFETY: passed on.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => kernel::avx2_f32(raw),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => kernel::avx512_f32(raw),
                _ => kernel::portable_f32(raw),
            }
        }
    }

    #[inline(always)]
    fn narrowed(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Storage for bf16 {
    const PER_WORD: usize = 2;

    unsafe fn multiply(isa: Isa, raw: &Raw) {
        // SAFETY: passed on. `Isa::for_sizes` and the padding of rows keep AMX to whole tiles.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => kernel::avx2_bf16(raw),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => kernel::avx512_bf16_widened(raw),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 => kernel::avx512_bf16_dot(raw),
                #[cfg(target_arch = "x86_64")]
                Isa::Amx => kernel::amx_bf16(raw),
                _ => kernel::portable_bf16(raw),
            }
        }
    }

    /// Without branches, so that loops of it are vectorised.
    #[inline(always)]
    fn narrowed(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }

    #[inline(always)]
    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}
