//! What the launchers need of whatever runs kernels: a card, or the emulator.

use std::fmt;

use super::{gemm::Gemm, kernel::Kernel};
use crate::Error;

/// Memory and kernels, worked on in the order of the calls.
pub(super) trait Driver: fmt::Debug + Send + Sync {
    /// A new allocation of so many bytes, not 0, of any content; it begins at a multiple of 16.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Allocation>, Error>;

    /// Copies bytes to memory.
    ///
    /// # Safety
    ///
    /// From `to` on an allocation of this driver has as many bytes.
    unsafe fn write(&self, bytes: &[u8], to: u64) -> Result<(), Error>;

    /// Copies bytes from memory, after all that is under way.
    ///
    /// # Safety
    ///
    /// From `from` on an allocation of this driver has as many bytes.
    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes within memory.
    ///
    /// # Safety
    ///
    /// From `from` and from `to` on allocations of this driver have as many bytes, which do not overlap.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error>;

    /// Fills memory with zeros.
    ///
    /// # Safety
    ///
    /// From `at` on an allocation of this driver has as many bytes.
    unsafe fn clear(&self, at: u64, bytes: usize) -> Result<(), Error>;

    /// Runs so many blocks of [`THREADS`](super::kernel::THREADS) threads.
    ///
    /// # Safety
    ///
    /// `parameters` are those of the kernel, in its order, and what it reaches by them is in allocations of this driver.
    unsafe fn launch(&self, kernel: Kernel, blocks: u32, parameters: &[u64]) -> Result<(), Error>;

    /// Looks for what [`multiply`](Self::multiply) needs, cuBLAS on a card.
    fn find_library(&self) -> Result<(), Error>;

    /// Multiplies matrices, of which there is at least one, by a library.
    ///
    /// # Safety
    ///
    /// They are in allocations of this driver, and no result is part of another or of an operand.
    unsafe fn multiply(&self, products: &[Gemm]) -> Result<(), Error>;
}

/// Memory of a driver, given back when dropped, after all that is under way.
pub(super) trait Allocation: fmt::Debug + Send + Sync {
    /// Where it begins.
    fn address(&self) -> u64;
}
