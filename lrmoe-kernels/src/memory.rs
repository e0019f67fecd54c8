use std::{borrow::Cow, fmt};

use half::bf16;
use lrmoe_metric::SquaredNorm;

use crate::Error;

/// What a buffer can hold: `f32`, [`bf16`], `u32`, `i32`, [`SquaredNorm`].
pub trait Element: Copy + Default + fmt::Debug + Send + Sync + 'static + words::Words {}

impl Element for f32 {}
impl Element for bf16 {}
impl Element for u32 {}
impl Element for i32 {}
impl Element for SquaredNorm {}

/// Elements as the 32-bit words that devices hold.
pub(crate) mod words {
    use super::{Cow, SquaredNorm, bf16};

    /// Sealed: elements are words on every backend, and none of their bytes is padding.
    pub trait Words: Sized {
        /// Words of one element.
        const COUNT: usize;
        /// The words of these elements.
        fn to_words(values: &[Self]) -> Cow<'_, [u32]>;
        /// Takes elements from as many words.
        fn take_words(words: &[u32], values: &mut [Self]);
    }

    macro_rules! word {
        ($($element:ty),*) => {$(
            impl Words for $element {
                const COUNT: usize = 1;
                fn to_words(values: &[Self]) -> Cow<'_, [u32]> {
                    Cow::Borrowed(bytemuck::cast_slice(values))
                }
                fn take_words(words: &[u32], values: &mut [Self]) {
                    values.copy_from_slice(bytemuck::cast_slice(words));
                }
            }
        )*};
    }
    word!(f32, u32, i32);

    /// Widened to f32.
    impl Words for bf16 {
        const COUNT: usize = 1;
        fn to_words(values: &[Self]) -> Cow<'_, [u32]> {
            let widened = |value: &Self| u32::from(value.to_bits()) << 16;
            values.iter().map(widened).collect()
        }
        fn take_words(words: &[u32], values: &mut [Self]) {
            for (value, &word) in values.iter_mut().zip(words) {
                *value = Self::from_bits((word >> 16) as u16);
            }
        }
    }

    impl Words for SquaredNorm {
        const COUNT: usize = 2;
        fn to_words(values: &[Self]) -> Cow<'_, [u32]> {
            let words = values.iter();
            words
                .flat_map(|norm| [norm.significand.to_bits(), norm.scale])
                .collect()
        }
        fn take_words(words: &[u32], values: &mut [Self]) {
            let (words, _) = words.as_chunks();
            for (value, &[significand, scale]) in values.iter_mut().zip(words) {
                *value = Self {
                    significand: f32::from_bits(significand),
                    scale,
                };
            }
        }
    }
}

/// Where a backend computes: buffers that stay there between stages, and the ways in and out.
pub trait Memory: fmt::Debug {
    /// Elements of one type. The default is empty; a buffer is reused by giving it to another call, and grows when that needs more.
    type Buffer<T: Element>: Default + fmt::Debug + Send + Sync;

    /// Number of elements.
    fn len<T: Element>(buffer: &Self::Buffer<T>) -> usize;

    /// Makes room for `len` elements, of any content.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    fn resize<T: Element>(&self, buffer: &mut Self::Buffer<T>, len: usize) -> Result<(), Error>;

    /// Makes `buffer` hold these elements.
    ///
    /// # Errors
    ///
    /// As for [`resize`](Self::resize).
    fn write<T: Element>(&self, values: &[T], buffer: &mut Self::Buffer<T>) -> Result<(), Error>;

    /// Copies all elements to `values`, after waiting for the stages that write them.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `values` has another length; [`Error::OutOfMemory`], [`Error::DeviceLost`].
    fn read<T: Element>(&self, buffer: &Self::Buffer<T>, values: &mut [T]) -> Result<(), Error>;

    /// Makes `buffer` hold `len` zeros.
    ///
    /// # Errors
    ///
    /// As for [`resize`](Self::resize).
    fn zero<T: Element>(&self, buffer: &mut Self::Buffer<T>, len: usize) -> Result<(), Error>;

    /// Copies all elements of `from` into `to`, from its element `at` on.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `to` ends before them; [`Error::OutOfMemory`], [`Error::DeviceLost`].
    fn copy<T: Element>(
        &self,
        from: &Self::Buffer<T>,
        to: &mut Self::Buffer<T>,
        at: usize,
    ) -> Result<(), Error>;

    /// The elements, where they are in the host's memory, so that nobody copies what he can borrow.
    fn host<T: Element>(buffer: &Self::Buffer<T>) -> Option<&[T]>;

    /// As [`host`](Self::host), to write to.
    fn host_mut<T: Element>(buffer: &mut Self::Buffer<T>) -> Option<&mut [T]>;

    /// A new buffer with these elements.
    ///
    /// # Errors
    ///
    /// As for [`resize`](Self::resize).
    fn upload<T: Element>(&self, values: &[T]) -> Result<Self::Buffer<T>, Error> {
        let mut buffer = Self::Buffer::default();
        self.write(values, &mut buffer)?;
        Ok(buffer)
    }

    /// All elements, after waiting for the stages that write them.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, Error> {
        let mut values = vec![T::default(); Self::len(buffer)];
        self.read(buffer, &mut values)?;
        Ok(values)
    }
}

/// Checks that `len` elements from `at` on end within `within`.
pub(crate) fn check_room(len: usize, at: usize, within: usize) -> Result<(), Error> {
    if at.checked_add(len).is_some_and(|end| end <= within) {
        return Ok(());
    }
    Err(Error::Shape {
        what: "to",
        got: vec![within],
        expected: vec![at.saturating_add(len)],
    })
}
