//! After the first call nothing proportional to rows is allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use lrmoe_compact::{Grouping, ScatterAdd, gather};
use ndarray::{Array2, array};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above and so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes allocated by the second of two calls.
fn second_call(mut call: impl FnMut()) -> usize {
    call();
    let before = BYTES.load(Ordering::Relaxed);
    call();
    BYTES.load(Ordering::Relaxed) - before
}

/// A byte for every row would be seen; the pool's queues are allowed their fixed-size blocks.
#[test]
fn the_second_call_allocates_nothing_that_grows_with_rows() {
    const ROWS: usize = 200_000;
    let rows = Array2::from_elem((ROWS, 4), 1.0f32);
    let mut out = Array2::zeros((ROWS, 4));
    let index: Vec<u32> = (0..ROWS as u32).rev().collect();
    let grouping = Grouping::new(
        array![[ROWS as u32 / 2, 0], [10, ROWS as u32 / 2 - 10]].view(),
        1,
    )
    .unwrap();
    let mut scatter = ScatterAdd::new();

    let bytes = [
        second_call(|| gather(rows.view(), &index, out.view_mut()).unwrap()),
        second_call(|| grouping.group(rows.view(), out.view_mut()).unwrap()),
        second_call(|| grouping.ungroup(rows.view(), out.view_mut()).unwrap()),
        second_call(|| {
            scatter
                .add(rows.view(), &index, None, 1, out.view_mut())
                .unwrap()
        }),
    ];
    assert!(
        bytes.iter().all(|&bytes| bytes < ROWS / 10),
        "{bytes:?} bytes"
    );
}
