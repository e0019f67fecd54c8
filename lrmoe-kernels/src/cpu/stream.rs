//! Stores past the caches, for what is written once and read much later. A plain store reads the line that it misses; these write whole
//! lines unread, which on machines where memory is the limit takes less than half the time.
//!
//! Other cores see them after [`finish`].

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm_loadu_ps, _mm_sfence, _mm_stream_ps};

use super::{kernel::VECTOR, workspace::Line};

/// Copies; where `to` has no whole lines, through the caches.
pub(super) fn copy(from: &[f32], to: &mut [f32]) {
    let (to_first, to_lines, to_rest) = bytemuck::pod_align_to_mut::<f32, Line>(to);
    let (from_first, from) = from.split_at(to_first.len());
    let (from_lines, from_rest) = from.as_chunks();
    to_first.copy_from_slice(from_first);
    for (to, from) in to_lines.iter_mut().zip(from_lines) {
        store(from, to);
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

#[cfg(target_arch = "x86_64")]
fn store(from: &[f32; VECTOR], to: &mut Line) {
    let to: *mut f32 = std::ptr::from_mut(to).cast();
    for i in (0..VECTOR).step_by(4) {
        // SAFETY: these four elements are in the array and in the line, and at a multiple of 16 bytes in the latter. Every x86_64 has SSE.
        unsafe { _mm_stream_ps(to.add(i), _mm_loadu_ps(from.as_ptr().add(i))) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn store(from: &[f32; VECTOR], to: &mut Line) {
    *to = bytemuck::cast(*from);
}

/// Makes what this thread stored visible to whom it tells so.
pub(super) fn finish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86_64 has SSE.
    unsafe {
        _mm_sfence();
    }
}
