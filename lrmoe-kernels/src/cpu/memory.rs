use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
};

use rayon::prelude::*;

use super::Cpu;
use crate::{Element, Error, Memory, error::check_length, memory::check_room};

/// Elements that one task copies or fills.
const TASK: usize = 1 << 16;

/// Elements in the host's memory, the first at the start of a cache line; a slice of them in all but its memory.
///
/// It grows by [`Memory::resize`], which does not keep its elements. Memory that the system has not handed out before is not touched until it is
/// written to; where it is much, Linux is asked for huge pages.
pub struct HostBuffer<T> {
    start: NonNull<T>,
    len: usize,
    allocation: Option<Allocation>,
}

/// Elements from an element's alignment on; all of them are initialised.
#[derive(Debug)]
struct Allocation {
    raw: NonNull<u8>,
    layout: Layout,
    /// Elements that there is room for.
    capacity: usize,
}

/// Bytes of a cache line. A row of whole lines then shares none with others.
const LINE: usize = 64;
/// Bytes of a huge page. Buffers of several begin with one.
const HUGE_PAGE: usize = 2 << 20;

impl<T: Element> HostBuffer<T> {
    /// Makes it hold so many elements, of any content.
    fn resize(&mut self, len: usize) -> Result<(), Error> {
        if len > self.capacity() {
            // The old memory goes first: its elements are not kept.
            *self = Self::default();
            *self = Self::zeroed(len)?;
        }
        self.len = len;
        Ok(())
    }

    /// Elements that there is room for.
    fn capacity(&self) -> usize {
        self.allocation.as_ref().map_or(0, |a| a.capacity)
    }

    /// Bytes held on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.allocation.as_ref().map_or(0, |a| a.layout.size())
    }

    fn zeroed(len: usize) -> Result<Self, Error> {
        const LIMIT: usize = isize::MAX as usize - HUGE_PAGE;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&b| b <= LIMIT);
        let bytes = bytes.ok_or(Error::TooLarge {
            what: "a buffer",
            bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
            limit: LIMIT as u64,
        })?;
        if bytes == 0 {
            return Ok(Self::default());
        }
        let is_huge = bytes >= 4 * HUGE_PAGE;
        let alignment = if is_huge { HUGE_PAGE } else { LINE };
        // Room to align within, as zeroed memory of a large alignment would be written to at once.
        let layout = Layout::from_size_align(bytes + alignment, align_of::<T>());
        let layout = layout.expect("the size is within the limit");
        // SAFETY: the layout's size is not 0.
        let raw = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::OutOfMemory {
            operation: "allocating a buffer",
            bytes: bytes as u64,
        })?;
        let offset = raw.addr().get().wrapping_neg() % alignment;
        // SAFETY: the offset is below the alignment, which the layout has room for.
        let start = unsafe { raw.add(offset) };
        if is_huge {
            // SAFETY: as many bytes follow.
            unsafe { advise_huge_pages(start, bytes) };
        }
        Ok(Self {
            start: start.cast(),
            len,
            allocation: Some(Allocation {
                raw,
                layout,
                capacity: len,
            }),
        })
    }
}

/// Asks for huge pages, where the system has them on demand.
///
/// # Safety
///
/// So many bytes from the start on, which a page begins with, are of one allocation.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
unsafe fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the advice does not change what is in the pages. It may be refused.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::madvise(
            start.as_ptr().cast(),
            bytes / HUGE_PAGE * HUGE_PAGE,
            libc::MADV_HUGEPAGE,
        );
    }
}

impl<T> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        if let Some(Allocation { raw, layout, .. }) = self.allocation.take() {
            // SAFETY: allocated with this layout; elements need no drop, being `Copy`.
            unsafe { dealloc(raw.as_ptr(), layout) };
        }
    }
}

impl<T> Default for HostBuffer<T> {
    fn default() -> Self {
        Self {
            start: NonNull::dangling(),
            len: 0,
            allocation: None,
        }
    }
}

impl<T> Deref for HostBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements from the start on are initialised and borrowed with `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for HostBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: fmt::Debug> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

// SAFETY: the buffer owns its elements, as a vector does.
unsafe impl<T: Send> Send for HostBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for HostBuffer<T> {}

impl Memory for Cpu {
    type Buffer<T: Element> = HostBuffer<T>;

    fn len<T: Element>(buffer: &HostBuffer<T>) -> usize {
        buffer.len
    }

    fn resize<T: Element>(&self, buffer: &mut HostBuffer<T>, len: usize) -> Result<(), Error> {
        buffer.resize(len)
    }

    fn write<T: Element>(&self, values: &[T], buffer: &mut HostBuffer<T>) -> Result<(), Error> {
        buffer.resize(values.len())?;
        buffer.copy_from_slice(values);
        Ok(())
    }

    fn read<T: Element>(&self, buffer: &HostBuffer<T>, values: &mut [T]) -> Result<(), Error> {
        check_length("values", values.len(), buffer.len)?;
        values.copy_from_slice(buffer);
        Ok(())
    }

    fn zero<T: Element>(&self, buffer: &mut HostBuffer<T>, len: usize) -> Result<(), Error> {
        if buffer.capacity() < len {
            *buffer = HostBuffer::default();
            *buffer = HostBuffer::zeroed(len)?;
            return Ok(());
        }
        buffer.resize(len)?;
        buffer
            .par_chunks_mut(TASK)
            .for_each(|part| part.fill(T::default()));
        Ok(())
    }

    fn copy<T: Element>(
        &self,
        from: &HostBuffer<T>,
        to: &mut HostBuffer<T>,
        at: usize,
    ) -> Result<(), Error> {
        check_room(from.len, at, to.len)?;
        to[at..][..from.len]
            .par_chunks_mut(TASK)
            .zip(from.par_chunks(TASK))
            .for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn host<T: Element>(buffer: &HostBuffer<T>) -> Option<&[T]> {
        Some(buffer)
    }

    fn host_mut<T: Element>(buffer: &mut HostBuffer<T>) -> Option<&mut [T]> {
        Some(buffer)
    }
}
