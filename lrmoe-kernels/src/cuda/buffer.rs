//! Buffers, and launches on them.

use std::{fmt, marker::PhantomData, sync::Arc};

use super::{Cuda, Shared, driver::Allocation, kernel::Kernel};
use crate::{Element, Error, Memory, error::check_length, memory::check_room};

/// Elements in the memory of the device, for the [`Cuda`] that made it and its clones.
pub struct Buffer<T> {
    /// Nothing while the capacity is 0.
    memory: Option<Owned>,
    len: usize,
    element: PhantomData<T>,
}

/// Memory and whose it is.
#[derive(Debug)]
struct Owned {
    allocation: Box<dyn Allocation>,
    bytes: usize,
    owner: Arc<Shared>,
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Self {
            memory: None,
            len: 0,
            element: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl<T: Element> Buffer<T> {
    /// Takes elements off the end.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The memory, unless there are no elements.
    fn memory(&self) -> Option<&Owned> {
        self.memory.as_ref().filter(|_| self.len > 0)
    }

    /// Bytes of the memory, which elements need not fill.
    pub(super) fn held(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes)
    }

    /// At most those of the memory.
    fn bytes(&self) -> usize {
        self.len * bytes_of::<T>()
    }
}

/// Bytes of an element: those of its words, but for bf16, whose words are widened.
pub(super) fn bytes_of<T: Element>() -> usize {
    if is_bf16::<T>() { 2 } else { 4 * T::COUNT }
}

/// Whether elements are the upper halves of words.
pub(super) fn is_bf16<T: Element>() -> bool {
    size_of::<T>() == 2
}

impl Cuda {
    /// Where the elements begin, 0 without any; an error for a buffer of another device.
    pub(super) fn address<T: Element>(&self, buffer: &Buffer<T>) -> Result<u64, Error> {
        let Some(memory) = buffer.memory() else {
            return Ok(0);
        };
        if Arc::ptr_eq(&memory.owner, &self.shared) {
            Ok(memory.allocation.address())
        } else {
            Err(Error::OtherDevice)
        }
    }

    /// Copies bytes from buffer to buffer.
    ///
    /// # Safety
    ///
    /// From both addresses on, buffers of this device have as many bytes, which do not overlap.
    pub(super) unsafe fn copy_bytes(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as promised.
        unsafe { self.shared.driver.copy(from, to, bytes) }
    }

    /// Fills bytes with zeros, of which there is at least one.
    ///
    /// # Safety
    ///
    /// From the address on, a buffer of this device has as many bytes.
    pub(super) unsafe fn clear_bytes(&self, at: u64, bytes: usize) -> Result<(), Error> {
        // SAFETY: as promised.
        unsafe { self.shared.driver.clear(at, bytes) }
    }

    /// Runs so many blocks of a kernel, if any.
    ///
    /// # Safety
    ///
    /// `parameters` are those of the kernel, in its order, and what it reaches by them is in buffers of this device.
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        blocks: usize,
        parameters: &[u64],
    ) -> Result<(), Error> {
        if blocks == 0 {
            return Ok(());
        }
        let most = i32::MAX as u32;
        match u32::try_from(blocks) {
            // SAFETY: as promised.
            Ok(blocks) if blocks <= most => unsafe {
                self.shared.driver.launch(kernel, blocks, parameters)
            },
            _ => Err(Error::Refused {
                operation: "launching a kernel",
                reason: format!("{blocks} blocks are more than {most}"),
            }),
        }
    }
}

impl Memory for Cuda {
    type Buffer<T: Element> = Buffer<T>;

    fn len<T: Element>(buffer: &Buffer<T>) -> usize {
        buffer.len
    }

    fn resize<T: Element>(&self, buffer: &mut Buffer<T>, len: usize) -> Result<(), Error> {
        let bytes = len.checked_mul(bytes_of::<T>());
        let bytes = bytes.filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::TooLarge {
            what: "a buffer",
            bytes: (len as u64).saturating_mul(bytes_of::<T>() as u64),
            limit: isize::MAX as u64,
        })?;
        let fits =
            |memory: &Owned| memory.bytes >= bytes && Arc::ptr_eq(&memory.owner, &self.shared);
        if bytes > 0 && !buffer.memory.as_ref().is_some_and(fits) {
            *buffer = Buffer::default();
            buffer.memory = Some(Owned {
                allocation: self.shared.driver.allocate(bytes)?,
                bytes,
                owner: Arc::clone(&self.shared),
            });
        }
        buffer.len = len;
        Ok(())
    }

    fn write<T: Element>(&self, values: &[T], buffer: &mut Buffer<T>) -> Result<(), Error> {
        self.resize(buffer, values.len())?;
        match self.address(buffer)? {
            0 => Ok(()),
            at => {
                let words = T::to_words(values);
                let halves: Vec<u16>;
                let bytes = if is_bf16::<T>() {
                    halves = words.iter().map(|&word| (word >> 16) as u16).collect();
                    bytemuck::cast_slice(&halves)
                } else {
                    bytemuck::cast_slice(&words)
                };
                // SAFETY: the buffer has room for the values.
                unsafe { self.shared.driver.write(bytes, at) }
            }
        }
    }

    fn read<T: Element>(&self, buffer: &Buffer<T>, values: &mut [T]) -> Result<(), Error> {
        check_length("values", values.len(), buffer.len)?;
        match self.address(buffer)? {
            0 => Ok(()),
            at => {
                let mut words = vec![0_u32; values.len() * T::COUNT];
                let all: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
                let bytes = &mut all[..buffer.bytes()];
                // SAFETY: there are as many bytes.
                unsafe { self.shared.driver.read(at, bytes) }?;
                if is_bf16::<T>() {
                    let halves = bytemuck::cast_slice::<u8, u16>(bytes).to_vec();
                    for (word, half) in words.iter_mut().zip(halves) {
                        *word = u32::from(half) << 16;
                    }
                }
                T::take_words(&words, values);
                Ok(())
            }
        }
    }

    fn zero<T: Element>(&self, buffer: &mut Buffer<T>, len: usize) -> Result<(), Error> {
        self.resize(buffer, len)?;
        match self.address(buffer)? {
            0 => Ok(()),
            // SAFETY: there are as many bytes.
            at => unsafe { self.shared.driver.clear(at, buffer.bytes()) },
        }
    }

    fn copy<T: Element>(
        &self,
        from: &Buffer<T>,
        to: &mut Buffer<T>,
        at: usize,
    ) -> Result<(), Error> {
        check_room(from.len, at, to.len)?;
        let (source, target) = (self.address(from)?, self.address(to)?);
        let skipped = (at * bytes_of::<T>()) as u64;
        // SAFETY: checked above; two buffers share no memory.
        unsafe { self.copy_bytes(source, target + skipped, from.bytes()) }
    }

    fn host<T: Element>(_: &Buffer<T>) -> Option<&[T]> {
        None
    }

    fn host_mut<T: Element>(_: &mut Buffer<T>) -> Option<&mut [T]> {
        None
    }
}
