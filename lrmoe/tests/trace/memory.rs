//! The largest piece of memory that a thread asks for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system allocator as it is.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending no longer counts.
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above and so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Bytes of the largest allocation of `call` on this thread.
pub(super) fn largest<T>(call: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.set(0);
    let result = call();
    (result, LARGEST.get())
}
