use std::fmt;

use super::{element::Storage, kernel::VECTOR, sums::HiddenSums};

/// Buffers that calls reuse: scratch for each thread, and what the backward pass keeps of every row.
///
/// They grow to what the largest call so far needed and stay until dropped. Content never matters to a later call.
#[derive(Clone, Default)]
pub struct Workspace {
    /// One for each thread.
    scratch: Vec<Buffer>,
    /// Gradients of the pre-activations, times w, as columns.
    pre: Buffer,
    /// Input of the down projection, times w p, as rows.
    hidden: Buffer,
    /// Sums over the rows of the last call, if they are wanted.
    pub(super) sums: Option<HiddenSums>,
}

impl Workspace {
    /// Holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Scratch of this many words for each thread of the current pool.
    ///
    /// All of it is grown here: which thread gets which tile differs from call to call.
    pub(super) fn scratch(&mut self, words: usize) -> &mut [Buffer] {
        self.for_backward::<f32>(words, 0, 0).0
    }

    /// Scratch as above, and the buffers that outlive a tile, of these many elements.
    pub(super) fn for_backward<T: Storage>(
        &mut self,
        scratch: usize,
        pre: usize,
        hidden: usize,
    ) -> (&mut [Buffer], &mut [T], &mut [T]) {
        let threads = rayon::current_num_threads();
        if self.scratch.len() < threads {
            self.scratch.resize(threads, Buffer::default());
        }
        let threads = &mut self.scratch[..threads];
        for buffer in threads.iter_mut() {
            buffer.grow(scratch);
        }
        (
            threads,
            self.pre.elements(pre),
            self.hidden.elements(hidden),
        )
    }

    /// Whether calls from now on sum up the hidden values of their rows: forward each row once, backward times its selection weight.
    pub fn sum_hidden(&mut self, wanted: bool) {
        let sums = self.sums.take().unwrap_or_default();
        self.sums = wanted.then_some(sums);
    }

    /// Those of the last call, if they were wanted.
    pub fn hidden_sums(&self) -> Option<&HiddenSums> {
        self.sums.as_ref()
    }

    /// Bytes held on the heap.
    pub fn bytes(&self) -> usize {
        let buffers = self.scratch.iter().chain([&self.pre, &self.hidden]);
        buffers
            .map(|b| b.0.capacity() * size_of::<Line>())
            .sum::<usize>()
            + self.scratch.capacity() * size_of::<Buffer>()
            + self.sums.as_ref().map_or(0, HiddenSums::bytes)
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// A cache line, so that vectors never straddle two.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct Line([u32; VECTOR]);

// SAFETY: 16 words fill the alignment, so there is no padding; zeros are valid.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above, and any bits are 16 words.
unsafe impl bytemuck::Pod for Line {}

/// Words in whole cache lines.
#[derive(Clone, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    fn grow(&mut self, words: usize) {
        let lines = words.div_ceil(VECTOR);
        if self.0.len() < lines {
            self.0.resize(lines, Line::default());
        }
    }

    /// All of it.
    pub(super) fn words(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }

    /// The first elements, grown where needed, with any content.
    fn elements<T: Storage>(&mut self, count: usize) -> &mut [T] {
        self.grow(count.div_ceil(T::PER_WORD));
        &mut bytemuck::cast_slice_mut(&mut self.0)[..count]
    }
}
