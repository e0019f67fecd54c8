use std::array;

use super::{
    VECTOR,
    generic::{Op, Raw, plain},
};

type Vector = [f32; VECTOR];

/// Fused where that is one instruction.
#[inline(always)]
fn fused(a: f32, b: f32, sum: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, sum)
    } else {
        sum + a * b
    }
}

#[inline(always)]
fn fused_vectors(sums: Vector, a: Vector, b: Vector) -> Vector {
    array::from_fn(|lane| fused(a[lane], b[lane], sums[lane]))
}

/// The f32 whose upper half is the first of two bf16, and that of the second.
#[inline(always)]
fn widened(word: u32) -> [f32; 2] {
    [
        f32::from_bits(word << 16),
        f32::from_bits(word & 0xffff_0000),
    ]
}

macro_rules! sums {
    () => {
        type Sums = Vector;
        const LANES: usize = VECTOR;

        #[inline(always)]
        fn zero() -> Vector {
            [0.0; VECTOR]
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Vector {
            // SAFETY: as the caller promises; any f32 are an array of them.
            unsafe { from.cast::<Vector>().read() }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, sums: Vector) {
            // SAFETY: as the caller promises.
            unsafe { to.cast::<Vector>().write(sums) }
        }

        #[inline(always)]
        unsafe fn stream(to: *mut f32, sums: Vector) {
            // SAFETY: as the caller promises.
            unsafe { Self::store(to, sums) }
        }

        #[inline(always)]
        fn add(a: Vector, b: Vector) -> Vector {
            array::from_fn(|lane| a[lane] + b[lane])
        }

        #[inline(always)]
        fn prefetch_near(_: *const u8) {}

        #[inline(always)]
        fn prefetch(_: *const u8) {}
    };
}

struct F32;

impl Op for F32 {
    sums!();
    type Words = Vector;

    #[inline(always)]
    unsafe fn words(from: *const u32) -> Vector {
        // SAFETY: as the caller promises; any 32 bits are an f32.
        unsafe { from.cast::<Vector>().read() }
    }

    #[inline(always)]
    fn splat(word: u32) -> Vector {
        [f32::from_bits(word); VECTOR]
    }

    #[inline(always)]
    fn multiply_add(sums: Vector, a: Vector, b: Vector) -> Vector {
        fused_vectors(sums, a, b)
    }
}

struct Bf16;

impl Op for Bf16 {
    sums!();
    type Words = [Vector; 2];

    #[inline(always)]
    unsafe fn words(from: *const u32) -> [Vector; 2] {
        // SAFETY: as the caller promises.
        let words = unsafe { from.cast::<[u32; VECTOR]>().read() };
        array::from_fn(|half| array::from_fn(|lane| widened(words[lane])[half]))
    }

    #[inline(always)]
    fn splat(word: u32) -> [Vector; 2] {
        widened(word).map(|half| [half; VECTOR])
    }

    #[inline(always)]
    fn multiply_add(sums: Vector, a: [Vector; 2], b: [Vector; 2]) -> Vector {
        fused_vectors(fused_vectors(sums, a[0], b[0]), a[1], b[1])
    }
}

/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say.
pub(in super::super) unsafe fn portable_f32(raw: &Raw) {
    // SAFETY: passed on.
    unsafe { plain::<F32>(raw) }
}

/// # Safety
///
/// The pointers of `raw` reach as many elements as its sizes say.
pub(in super::super) unsafe fn portable_bf16(raw: &Raw) {
    // SAFETY: passed on.
    unsafe { plain::<Bf16>(raw) }
}
