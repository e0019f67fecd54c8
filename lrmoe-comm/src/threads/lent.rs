//! The one place of this module that is not safe code: a slice lent from one thread to others.
#![allow(unsafe_code)]

use crate::Element;

/// What a rank sends, lent to the other ranks while it waits for them.
pub(super) struct Lent {
    start: *const u8,
    bytes: usize,
}

// SAFETY: a `Lent` only gives out `&[u8]`, into a slice of elements that are `Sync` and that
// nobody writes as long as the value lives (see `new`); any thread may read them.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    /// # Safety
    /// `elements` must stay borrowed for as long as the value lives.
    pub(super) unsafe fn new<T: Element>(elements: &[T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        Self {
            start: bytes.as_ptr(),
            bytes: bytes.len(),
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` and `bytes` come from a `&[u8]`, which by the contract of `new` is
        // borrowed for as long as `self` lives, and so for as long as the result does.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}
