use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
};

use super::Cpu;
use crate::{Element, Error, Memory, error::check_length};

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

/// Where buffers begin: at the start of a cache line, so that a row does not share one with others where it takes whole lines.
const ALIGNMENT: usize = 64;
/// Allocations from this size on are in huge pages, if the system has them.
const HUGE_BYTES: usize = 4 << 20;

impl<T: Element> HostBuffer<T> {
    /// Makes it hold so many elements, of any content.
    fn resize(&mut self, len: usize) -> Result<(), Error> {
        let capacity = self.allocation.as_ref().map_or(0, |a| a.capacity);
        if len > capacity {
            // The old memory goes first: its elements are not kept.
            *self = Self::default();
            *self = Self::zeroed(len)?;
        }
        self.len = len;
        Ok(())
    }

    fn zeroed(len: usize) -> Result<Self, Error> {
        const LIMIT: usize = isize::MAX as usize - ALIGNMENT;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&b| b <= LIMIT);
        let bytes = bytes.ok_or(Error::TooLarge {
            what: "a buffer",
            bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
            limit: LIMIT as u64,
        })?;
        if bytes == 0 {
            return Ok(Self::default());
        }
        // Room to align within, as zeroed memory of a large alignment would be written to at once.
        let layout = Layout::from_size_align(bytes + ALIGNMENT, align_of::<T>());
        let layout = layout.expect("the size is within the limit");
        // SAFETY: the layout's size is not 0.
        let raw = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::OutOfMemory {
            operation: "allocating a buffer",
            bytes: bytes as u64,
        })?;
        let offset = raw.addr().get().wrapping_neg() % ALIGNMENT;
        advise_huge_pages(raw.as_ptr(), layout.size());
        Ok(Self {
            // SAFETY: the offset is below the alignment, which the layout has room for.
            start: unsafe { raw.add(offset) }.cast(),
            len,
            allocation: Some(Allocation {
                raw,
                layout,
                capacity: len,
            }),
        })
    }
}

/// Asks for huge pages in a range of memory.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
fn advise_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_BYTES {
        const PAGE: usize = 1 << 12;
        let skipped = start.addr().wrapping_neg() % PAGE;
        let pages = (bytes - skipped) / PAGE;
        // SAFETY: whole pages of an allocation; the advice does not change what is in them. It may be refused.
        unsafe {
            libc::madvise(start.add(skipped).cast(), pages * PAGE, libc::MADV_HUGEPAGE);
        }
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
}
