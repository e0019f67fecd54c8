use std::fmt;

use super::{Cpu, HostBuffer, element::Storage, kernel::VECTOR, sums::HiddenSums};
use crate::{Error, Memory};

/// Buffers that calls reuse: scratch for each thread, and what the backward pass keeps of every row.
///
/// They grow to what the largest call so far needed and stay until dropped. Content never matters to a later call.
#[derive(Default)]
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
    pub(super) fn scratch(&mut self, words: usize) -> Result<&mut [Buffer], Error> {
        Ok(self.for_backward::<f32>(words, 0, 0)?.0)
    }

    /// Scratch as above, and the buffers that outlive a tile, of these many elements.
    pub(super) fn for_backward<T: Storage>(
        &mut self,
        scratch: usize,
        pre: usize,
        hidden: usize,
    ) -> Result<(&mut [Buffer], &mut [T], &mut [T]), Error> {
        let threads = rayon::current_num_threads();
        if self.scratch.len() < threads {
            self.scratch.resize_with(threads, Buffer::default);
        }
        let threads = &mut self.scratch[..threads];
        for buffer in threads.iter_mut() {
            buffer.grow(scratch)?;
        }
        Ok((
            threads,
            self.pre.elements(pre)?,
            self.hidden.elements(hidden)?,
        ))
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
        buffers.map(|buffer| buffer.0.bytes()).sum::<usize>()
            + self.scratch.capacity() * size_of::<Buffer>()
            + self.sums.as_ref().map_or(0, HiddenSums::bytes)
    }
}

impl Clone for Workspace {
    /// An empty one, as content never matters.
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// Words in whole cache lines, in huge pages where they are many: rows of weights and of tiles lie pages apart.
#[derive(Default)]
pub(super) struct Buffer(HostBuffer<u32>);

impl Buffer {
    fn grow(&mut self, words: usize) -> Result<(), Error> {
        if self.0.len() < words {
            Cpu.resize(&mut self.0, words.next_multiple_of(VECTOR))?;
        }
        Ok(())
    }

    /// All of it.
    pub(super) fn words(&mut self) -> &mut [u32] {
        &mut self.0
    }

    /// The first elements, grown where needed, with any content.
    fn elements<T: Storage>(&mut self, count: usize) -> Result<&mut [T], Error> {
        self.grow(count.div_ceil(T::PER_WORD))?;
        Ok(&mut bytemuck::cast_slice_mut(&mut self.0[..])[..count])
    }
}
