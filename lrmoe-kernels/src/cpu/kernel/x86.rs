#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "every intrinsic below is reached only through the functions at the end, which enable what it needs"
)]

use std::arch::x86_64::*;

use super::generic::{Op, Raw, narrow, wide};

/// The parts of [`Op`] that depend on the vectors alone.
macro_rules! sums {
    ($vector:ty, $zero:ident, $load:ident, $store:ident, $stream:ident, $add:ident) => {
        type Sums = $vector;
        const LANES: usize = size_of::<$vector>() / 4;

        #[inline(always)]
        fn zero() -> $vector {
            unsafe { $zero() }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> $vector {
            unsafe { $load(from) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, sums: $vector) {
            unsafe { $store(to, sums) }
        }

        #[inline(always)]
        unsafe fn stream(to: *mut f32, sums: $vector) {
            unsafe { $stream(to, sums) }
        }

        #[inline(always)]
        fn add(a: $vector, b: $vector) -> $vector {
            unsafe { $add(a, b) }
        }

        #[inline(always)]
        fn prefetch_near(at: *const u8) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }

        #[inline(always)]
        fn prefetch(at: *const u8) {
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    };
}

/// Words are f32.
macro_rules! f32_words {
    ($name:ident, $vector:ty, $zero:ident, $load:ident, $store:ident, $stream:ident, $add:ident, $splat:ident, $fused:ident) => {
        struct $name;

        impl Op for $name {
            sums!($vector, $zero, $load, $store, $stream, $add);
            type Words = $vector;

            #[inline(always)]
            unsafe fn words(from: *const u32) -> $vector {
                unsafe { $load(from.cast()) }
            }

            #[inline(always)]
            fn splat(word: u32) -> $vector {
                unsafe { $splat(f32::from_bits(word)) }
            }

            #[inline(always)]
            fn multiply_add(sums: $vector, a: $vector, b: $vector) -> $vector {
                unsafe { $fused(a, b, sums) }
            }
        }
    };
}

/// Words are pairs of bf16, widened to f32 by a shift and a mask.
macro_rules! widened_words {
    ($name:ident, $vector:ty, $zero:ident, $load:ident, $store:ident, $stream:ident, $add:ident, $fused:ident,
     $load_words:ident, $splat:ident, $shift:ident, $and:ident, $cast:ident) => {
        struct $name;

        impl Op for $name {
            sums!($vector, $zero, $load, $store, $stream, $add);
            type Words = [$vector; 2];

            #[inline(always)]
            unsafe fn words(from: *const u32) -> [$vector; 2] {
                unsafe {
                    let words = $load_words(from.cast());
                    [
                        $cast($shift::<16>(words)),
                        $cast($and(words, $splat(0xffff_0000_u32.cast_signed()))),
                    ]
                }
            }

            #[inline(always)]
            fn splat(word: u32) -> [$vector; 2] {
                unsafe {
                    [
                        $cast($splat((word << 16).cast_signed())),
                        $cast($splat((word & 0xffff_0000).cast_signed())),
                    ]
                }
            }

            #[inline(always)]
            fn multiply_add(sums: $vector, a: [$vector; 2], b: [$vector; 2]) -> $vector {
                unsafe { $fused(a[1], b[1], $fused(a[0], b[0], sums)) }
            }
        }
    };
}

f32_words!(
    Avx2F32,
    __m256,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_stream_ps,
    _mm256_add_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps
);
f32_words!(
    Avx512F32,
    __m512,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_stream_ps,
    _mm512_add_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps
);
widened_words!(
    Avx2Widened,
    __m256,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_stream_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps,
    _mm256_loadu_si256,
    _mm256_set1_epi32,
    _mm256_slli_epi32,
    _mm256_and_si256,
    _mm256_castsi256_ps
);
widened_words!(
    Avx512Widened,
    __m512,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_stream_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps,
    _mm512_loadu_si512,
    _mm512_set1_epi32,
    _mm512_slli_epi32,
    _mm512_and_si512,
    _mm512_castsi512_ps
);

/// Words are pairs of bf16, multiplied and added by one instruction.
struct Avx512Dot;

impl Op for Avx512Dot {
    sums!(
        __m512,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_stream_ps,
        _mm512_add_ps
    );
    type Words = __m512bh;

    #[inline(always)]
    unsafe fn words(from: *const u32) -> __m512bh {
        unsafe { pairs(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    fn splat(word: u32) -> __m512bh {
        unsafe { pairs(_mm512_set1_epi32(word.cast_signed())) }
    }

    #[inline(always)]
    fn multiply_add(sums: __m512, a: __m512bh, b: __m512bh) -> __m512 {
        unsafe { _mm512_dpbf16_ps(sums, a, b) }
    }
}

/// The same 512 bits.
#[inline(always)]
fn pairs(words: __m512i) -> __m512bh {
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}

macro_rules! launcher {
    ($name:ident, $features:literal, $loops:ident::<$op:ty>) => {
        /// # Safety
        ///
        /// The pointers of `raw` reach as many elements as its sizes say, and the machine has the features.
        #[target_feature(enable = $features)]
        pub(in super::super) unsafe fn $name(raw: &Raw) {
            unsafe { $loops::<$op>(raw) }
        }
    };
}

launcher!(avx2_f32, "avx2,fma", narrow::<Avx2F32>);
launcher!(avx2_bf16, "avx2,fma", narrow::<Avx2Widened>);
launcher!(
    avx512_f32,
    "avx512f,avx512bw,avx512dq,avx512vl",
    wide::<Avx512F32>
);
launcher!(
    avx512_bf16_widened,
    "avx512f,avx512bw,avx512dq,avx512vl",
    wide::<Avx512Widened>
);
launcher!(
    avx512_bf16_dot,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16",
    wide::<Avx512Dot>
);
