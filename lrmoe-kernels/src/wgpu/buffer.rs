//! Buffers, and the windows of them that are bound.

use std::{
    fmt,
    marker::PhantomData,
    ops::Range,
    sync::{Arc, PoisonError},
};

use ::wgpu::{BufferDescriptor, BufferUsages, CommandEncoderDescriptor, MapMode};

use super::{Wgpu, batch::Batch};
use crate::{Element, Error, Memory, error::check_length, memory::check_room};

/// Elements in the memory of the device, for the [`Wgpu`] that made it and its clones.
pub struct Buffer<T> {
    /// Nothing while the capacity is 0.
    raw: Option<Raw>,
    len: usize,
    element: PhantomData<T>,
}

/// A buffer and whose it is: the driver's names for things are of no use to tell devices apart.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) buffer: ::wgpu::Buffer,
    owner: Arc<()>,
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Self {
            raw: None,
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
    /// The raw buffer, if there is one.
    pub(super) fn raw(&self) -> Option<&Raw> {
        self.raw.as_ref()
    }

    /// Takes elements off the end.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    pub(super) fn bytes(&self) -> u64 {
        bytes::<T>(self.len)
    }
}

fn bytes<T: Element>(len: usize) -> u64 {
    (len as u64).saturating_mul(4 * T::COUNT as u64)
}

/// A part of a buffer as it is bound, or nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window<'a> {
    pub(super) raw: Option<&'a Raw>,
    pub(super) offset: u64,
    pub(super) size: u64,
    /// Words from the start of the binding to the first that was asked for.
    pub(super) base: u32,
}

impl Window<'_> {
    pub(super) const NOTHING: Self = Self {
        raw: None,
        offset: 0,
        size: 0,
        base: 0,
    };
}

impl Wgpu {
    /// Checks that a buffer was made here.
    pub(super) fn check_own(&self, raw: &Raw) -> Result<(), Error> {
        if Arc::ptr_eq(&raw.owner, &self.shared.owner) {
            return Ok(());
        }
        Err(Error::OtherDevice)
    }

    /// A window of `elements`, at most [`most_words`](Self::most_words) words of them.
    pub(super) fn window<'a, T: Element>(
        &self,
        buffer: &'a Buffer<T>,
        elements: Range<usize>,
    ) -> Window<'a> {
        if elements.is_empty() || buffer.raw.is_none() {
            return Window::NOTHING;
        }
        let [start, end] = [elements.start, elements.end].map(bytes::<T>);
        let offset = start - start % self.shared.alignment;
        Window {
            raw: buffer.raw.as_ref(),
            offset,
            size: end - offset,
            base: ((start - offset) / 4) as u32,
        }
    }

    /// All elements, which fit in one binding or are refused.
    pub(super) fn whole<'a, T: Element>(
        &self,
        what: &'static str,
        buffer: &'a Buffer<T>,
    ) -> Result<Window<'a>, Error> {
        self.per_window(what, buffer.bytes() as usize / 4)?;
        Ok(self.window(buffer, 0..buffer.len))
    }

    /// How many rows of so many words fit in one binding: at least 1, or the row is refused.
    pub(super) fn per_window(&self, what: &'static str, words: usize) -> Result<usize, Error> {
        match self.shared.most_words / words.max(1) {
            0 => Err(Error::TooLarge {
                what,
                bytes: words as u64 * 4,
                limit: self.shared.most_words as u64 * 4,
            }),
            rows => Ok(rows),
        }
    }

    /// Copies of the first elements on the host, after all that was queued.
    fn read_words<T: Element>(&self, buffer: &Buffer<T>, values: &mut [T]) -> Result<(), Error> {
        const OPERATION: &str = "reading a buffer";
        let Some(raw) = buffer.raw.as_ref().filter(|_| buffer.len > 0) else {
            return Ok(());
        };
        self.check_own(raw)?;
        let (device, size) = (&self.shared.device, buffer.bytes());
        let mut staging = self
            .shared
            .staging
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let result = self.scoped(OPERATION, size, || {
            let usage = BufferUsages::COPY_DST | BufferUsages::MAP_READ;
            let to = match staging.take() {
                Some(staging) if staging.size() >= size => staging,
                _ => device.create_buffer(&BufferDescriptor {
                    label: Some("staging"),
                    size,
                    usage,
                    mapped_at_creation: false,
                }),
            };
            let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(&raw.buffer, 0, &to, 0, size);
            self.shared.queue.submit([encoder.finish()]);
            let slice = to.slice(..size);
            slice.map_async(MapMode::Read, |_| ());
            self.wait(OPERATION)?;
            let mapped = slice.get_mapped_range().map_err(|_| self.lost(OPERATION))?;
            T::take_words(bytemuck::cast_slice(&mapped), values);
            drop(mapped);
            to.unmap();
            Ok(to)
        });
        *staging = Some(result?);
        Ok(())
    }
}

impl Memory for Wgpu {
    type Buffer<T: Element> = Buffer<T>;

    fn len<T: Element>(buffer: &Buffer<T>) -> usize {
        buffer.len
    }

    fn resize<T: Element>(&self, buffer: &mut Buffer<T>, len: usize) -> Result<(), Error> {
        const OPERATION: &str = "allocating a buffer";
        let size = bytes::<T>(len);
        let fits = |raw: &Raw| raw.buffer.size() >= size && self.check_own(raw).is_ok();
        if size > 0 && !buffer.raw.as_ref().is_some_and(fits) {
            let limit = self.limits().max_buffer_size;
            if size > limit {
                return Err(Error::TooLarge {
                    what: "a buffer",
                    bytes: size,
                    limit,
                });
            }
            *buffer = Buffer::default();
            let created = self.scoped(OPERATION, size, || {
                Ok(self.shared.device.create_buffer(&BufferDescriptor {
                    label: None,
                    size,
                    usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                }))
            })?;
            buffer.raw = Some(Raw {
                buffer: created,
                owner: Arc::clone(&self.shared.owner),
            });
        }
        buffer.len = len;
        Ok(())
    }

    fn write<T: Element>(&self, values: &[T], buffer: &mut Buffer<T>) -> Result<(), Error> {
        self.resize(buffer, values.len())?;
        let Some(raw) = buffer.raw.as_ref().filter(|_| !values.is_empty()) else {
            return Ok(());
        };
        let words = T::to_words(values);
        self.scoped("writing a buffer", buffer.bytes(), || {
            let queue = &self.shared.queue;
            queue.write_buffer(&raw.buffer, 0, bytemuck::cast_slice(&words));
            Ok(())
        })
    }

    fn read<T: Element>(&self, buffer: &Buffer<T>, values: &mut [T]) -> Result<(), Error> {
        check_length("values", values.len(), buffer.len)?;
        self.read_words(buffer, values)
    }

    fn zero<T: Element>(&self, buffer: &mut Buffer<T>, len: usize) -> Result<(), Error> {
        self.resize(buffer, len)?;
        let mut batch = Batch::new(self);
        batch.clear(buffer);
        batch.submit()
    }

    fn copy<T: Element>(
        &self,
        from: &Buffer<T>,
        to: &mut Buffer<T>,
        at: usize,
    ) -> Result<(), Error> {
        check_room(from.len, at, to.len)?;
        let (Some(source), Some(target)) = (&from.raw, &to.raw) else {
            return Ok(());
        };
        self.check_own(source)?;
        self.check_own(target)?;
        self.scoped("copying a buffer", 0, || {
            let device = &self.shared.device;
            let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
            let (at, size) = (bytes::<T>(at), from.bytes());
            encoder.copy_buffer_to_buffer(&source.buffer, 0, &target.buffer, at, size);
            self.shared.queue.submit([encoder.finish()]);
            Ok(())
        })
    }

    fn host<T: Element>(_: &Buffer<T>) -> Option<&[T]> {
        None
    }

    fn host_mut<T: Element>(_: &mut Buffer<T>) -> Option<&mut [T]> {
        None
    }
}
