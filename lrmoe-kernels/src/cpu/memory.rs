use rayon::prelude::*;

use super::Cpu;
use crate::{Element, Error, Memory, error::check_length, memory::check_room};

/// Elements that one task copies.
const TASK: usize = 1 << 16;

impl Memory for Cpu {
    type Buffer<T: Element> = Vec<T>;

    fn len<T: Element>(buffer: &Vec<T>) -> usize {
        buffer.len()
    }

    fn resize<T: Element>(&self, buffer: &mut Vec<T>, len: usize) -> Result<(), Error> {
        buffer.resize(len, T::default());
        Ok(())
    }

    fn write<T: Element>(&self, values: &[T], buffer: &mut Vec<T>) -> Result<(), Error> {
        buffer.clear();
        buffer.extend_from_slice(values);
        Ok(())
    }

    fn read<T: Element>(&self, buffer: &Vec<T>, values: &mut [T]) -> Result<(), Error> {
        check_length("values", values.len(), buffer.len())?;
        values.copy_from_slice(buffer);
        Ok(())
    }

    fn zero<T: Element>(&self, buffer: &mut Vec<T>, len: usize) -> Result<(), Error> {
        if buffer.capacity() < len {
            // Fresh memory is zero without being touched.
            *buffer = vec![T::default(); len];
            return Ok(());
        }
        buffer.truncate(len);
        buffer
            .par_chunks_mut(TASK)
            .for_each(|part| part.fill(T::default()));
        buffer.resize(len, T::default());
        Ok(())
    }

    fn copy<T: Element>(&self, from: &Vec<T>, to: &mut Vec<T>, at: usize) -> Result<(), Error> {
        check_room(from.len(), at, to.len())?;
        to[at..][..from.len()]
            .par_chunks_mut(TASK)
            .zip(from.par_chunks(TASK))
            .for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn host<T: Element>(buffer: &Vec<T>) -> Option<&[T]> {
        Some(buffer)
    }

    fn host_mut<T: Element>(buffer: &mut Vec<T>) -> Option<&mut [T]> {
        Some(buffer)
    }

    fn into_host<T: Element>(&self, buffer: Vec<T>) -> Result<Vec<T>, Error> {
        Ok(buffer)
    }
}
