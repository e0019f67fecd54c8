//! What the machine allows: plain loops over memory.

use std::{convert::Infallible, error::Error};

use lrmoe_kernels::FfnElement;
use rayon::prelude::*;

use super::Report;

/// Bytes that one task handles.
const TASK: usize = 1 << 20;

/// Times stores, reads and copies of the bytes of these elements.
pub(super) fn measure<T: FfnElement>(
    report: &Report<'_>,
    rows: &mut [T],
    others: &mut [T],
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rows: &mut [u8] = bytemuck::cast_slice_mut(rows);
    let others: &mut [u8] = bytemuck::cast_slice_mut(others);
    let len = rows.len();
    let half = len / 2;
    let time = |work: &str, bytes, run: &mut dyn FnMut()| {
        report.time(&format!("floor: {work}"), bytes, || {
            run();
            Ok::<_, Infallible>(())
        })
    };
    let mut byte = 0_u8;
    time("stores", len, &mut || {
        byte = byte.wrapping_add(1);
        rows.par_chunks_mut(TASK).for_each(|part| part.fill(byte));
    })?;
    time("reads", len, &mut || {
        let sum = |part: &[u8]| {
            let (words, _) = part.as_chunks::<64>();
            let mut sums = [0_u8; 64];
            for word in words {
                for (sum, byte) in sums.iter_mut().zip(word) {
                    *sum ^= byte;
                }
            }
            sums[0]
        };
        let all = rows.par_chunks(TASK).map(sum).reduce(|| 0, |a, b| a ^ b);
        std::hint::black_box(all);
    })?;
    time("copy of half", 2 * half, &mut || {
        others[..half]
            .par_chunks_mut(TASK)
            .zip(rows[..half].par_chunks(TASK))
            .for_each(|(to, from)| to.copy_from_slice(from));
    })?;
    #[cfg(target_arch = "x86_64")]
    {
        time("streaming stores", len, &mut || {
            rows.par_chunks_mut(TASK).for_each(stream);
        })?;
        time("string stores", len, &mut || {
            rows.par_chunks_mut(TASK).for_each(store_string);
        })?;
        time("streaming copy of half", 2 * half, &mut || {
            others[..half]
                .par_chunks_mut(TASK)
                .zip(rows[..half].par_chunks(TASK))
                .for_each(|(to, from)| stream_copy(from, to));
        })?;
    }
    Ok(())
}

/// Stores past the caches.
#[cfg(target_arch = "x86_64")]
fn stream(part: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_set1_epi8, _mm_sfence, _mm_stream_si128};

    // SAFETY: any bytes are a vector.
    let (_, vectors, _) = unsafe { part.align_to_mut::<__m128i>() };
    // SAFETY: SSE2 is part of x86-64, and the vectors are aligned.
    unsafe {
        let value = _mm_set1_epi8(1);
        for vector in vectors {
            _mm_stream_si128(vector, value);
        }
        _mm_sfence();
    }
}

/// Copies past the caches.
#[cfg(target_arch = "x86_64")]
fn stream_copy(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    // SAFETY: any bytes are a vector.
    let (start, vectors, _) = unsafe { to.align_to_mut::<__m128i>() };
    let from = from[start.len()..].chunks_exact(size_of::<__m128i>());
    // SAFETY: SSE2 is part of x86-64, the vectors to write are aligned, and chunks are as long as those to read.
    unsafe {
        for (to, from) in vectors.iter_mut().zip(from) {
            _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast()));
        }
        _mm_sfence();
    }
}

/// Stores by the processor's string instruction.
#[cfg(target_arch = "x86_64")]
fn store_string(part: &mut [u8]) {
    // SAFETY: the instruction writes so many bytes from the start of the part on.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rdi") part.as_mut_ptr() => _,
            inout("rcx") part.len() => _,
            in("al") 2_u8,
            options(nostack, preserves_flags),
        );
    }
}
