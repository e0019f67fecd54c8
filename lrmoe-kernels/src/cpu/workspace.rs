use std::fmt;

/// Buffers that calls reuse: scratch for each thread, and what the backward pass keeps of every row.
///
/// They grow to what the largest call so far needed and stay until dropped. Content never matters to a later call.
#[derive(Clone, Default)]
pub struct Workspace {
    /// One for each thread.
    scratch: Vec<Vec<f32>>,
    /// Gradients of the pre-activations, times w: tile after tile, gate (when gated) and up, `[F, lanes]` each.
    pre: Vec<f32>,
    /// Input of the down projection, times w p, `[rows, F]`.
    hidden: Vec<f32>,
}

impl Workspace {
    /// Holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Scratch of this length for each thread of the current pool.
    ///
    /// All of it is grown here: which thread gets which tile differs from call to call.
    pub(super) fn scratch(&mut self, length: usize) -> &mut [Vec<f32>] {
        let threads = sized(&mut self.scratch, rayon::current_num_threads());
        for scratch in threads.iter_mut() {
            sized(scratch, length);
        }
        threads
    }

    /// Scratch as above, and the buffers that outlive a tile, of these lengths.
    pub(super) fn for_backward(
        &mut self,
        scratch: usize,
        pre: usize,
        hidden: usize,
    ) -> (&mut [Vec<f32>], &mut [f32], &mut [f32]) {
        self.scratch(scratch);
        let threads = &mut self.scratch[..rayon::current_num_threads()];
        (
            threads,
            sized(&mut self.pre, pre),
            sized(&mut self.hidden, hidden),
        )
    }

    /// Bytes held on the heap.
    pub fn bytes(&self) -> usize {
        let values = self.scratch.iter().map(Vec::capacity).sum::<usize>()
            + self.pre.capacity()
            + self.hidden.capacity();
        values * size_of::<f32>() + self.scratch.capacity() * size_of::<Vec<f32>>()
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// The first `length` elements of `buffer`, grown where needed, with any content.
fn sized<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) -> &mut [T] {
    if buffer.len() < length {
        buffer.resize(length, T::default());
    }
    &mut buffer[..length]
}
