//! Stores past the caches, for what is written once and read much later. A plain store reads the line that it misses; these write whole
//! lines unread, which on machines where memory is the limit takes less than half the time.
//!
//! Other cores see them after [`finish`].

use super::kernel::VECTOR;

/// A cache line.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line([u32; VECTOR]);

// SAFETY: 16 words fill the alignment, so there is no padding; zeros are valid.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above, and any bits are 16 words.
unsafe impl bytemuck::Pod for Line {}

/// Bytes of a cache line.
pub(super) const LINE: usize = size_of::<Line>();

/// Copies; where `to` has no whole lines, through the caches.
pub(super) fn copy(from: &[f32], to: &mut [f32]) {
    let (to_first, to_lines, to_rest) = bytemuck::pod_align_to_mut::<f32, Line>(to);
    let (from_first, from) = from.split_at(to_first.len());
    let (from_lines, from_rest) = from.split_at(from.len() - to_rest.len());
    assert_eq!(size_of_val(from_lines), size_of_val(to_lines));
    to_first.copy_from_slice(from_first);
    // SAFETY: both have so many lines, by the assertion; those written are whole ones.
    unsafe {
        lines(
            from_lines.as_ptr().cast(),
            to_lines.as_mut_ptr().cast(),
            to_lines.len(),
        );
    }
    to_rest.copy_from_slice(from_rest);
}

/// Writes zeros.
pub(super) fn zero(to: &mut [f32]) {
    const ZEROS: [f32; 1024] = [0.0; 1024];
    for to in to.chunks_mut(ZEROS.len()) {
        copy(&ZEROS[..to.len()], to);
    }
}

/// Elements before the first whole line.
pub(super) fn before_lines(values: &[f32]) -> usize {
    bytemuck::pod_align_to::<f32, Line>(values).0.len()
}

/// Copies so many lines.
///
/// # Safety
///
/// Both pointers reach so many lines; `to` is aligned to one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn lines(from: *const u8, to: *mut u8, count: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    const PARTS: usize = LINE / size_of::<__m128i>();
    let (from, to) = (from.cast::<__m128i>(), to.cast::<__m128i>());
    for line in 0..count {
        for part in 0..PARTS {
            let at = line * PARTS + part;
            // SAFETY: SSE2 is part of x86-64, and the line is in bounds and aligned.
            unsafe { _mm_stream_si128(to.add(at), _mm_loadu_si128(from.add(at))) };
        }
    }
}

/// # Safety
///
/// Both pointers reach so many lines.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn lines(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: as the caller says.
    unsafe { to.copy_from_nonoverlapping(from, count * LINE) };
}

/// Makes what this thread stored visible to whom it tells so.
pub(super) fn finish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86_64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
