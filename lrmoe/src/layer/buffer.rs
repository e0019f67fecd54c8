//! Memory that is kept from step to step.

use ndarray::{ArrayView2, ArrayViewMut2};

/// A vector that only grows, so that a step after the first allocates nothing for rows.
#[derive(Debug)]
pub(super) struct Buffer<T> {
    values: Vec<T>,
    filled: usize,
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            filled: 0,
        }
    }
}

impl<T: Copy + Default> Buffer<T> {
    /// Room for `len` values; what they were before is unspecified.
    pub(super) fn take(&mut self, len: usize) -> &mut [T] {
        if self.values.len() < len {
            self.values.resize(len, T::default());
        }
        self.filled = len;
        &mut self.values[..len]
    }

    /// The values last taken.
    pub(super) fn filled(&self) -> &[T] {
        &self.values[..self.filled]
    }

    pub(super) fn bytes(&self) -> usize {
        self.values.capacity() * size_of::<T>()
    }

    /// Room for `rows` rows of `width`.
    pub(super) fn rows(&mut self, rows: usize, width: usize) -> ArrayViewMut2<'_, T> {
        ArrayViewMut2::from_shape((rows, width), self.take(rows * width))
            .expect("length is rows * width")
    }

    /// The rows last taken.
    pub(super) fn filled_rows(&self, width: usize) -> ArrayView2<'_, T> {
        ArrayView2::from_shape((self.filled / width, width), self.filled())
            .expect("length is rows * width")
    }
}
