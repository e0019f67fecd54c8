use super::Cpu;
use crate::{Element, Error, Memory, error::check_length};

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
}
