//! The emulator as a driver: the kernels compiled by c++, run on the CPU.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use super::{
    Cuda,
    driver::{Allocation, Driver},
    gemm::Gemm,
    kernel::Kernel,
};
use crate::Error;

unsafe extern "C" {
    fn lrmoe_emu_allocate(bytes: usize) -> *mut c_void;
    fn lrmoe_emu_free(memory: *mut c_void, bytes: usize);
    fn lrmoe_emu_launch(
        name: *const c_char,
        blocks: c_uint,
        parameters: *const c_void,
        bytes: usize,
        reason: *mut c_char,
        reason_bytes: usize,
    ) -> c_int;
}

impl Cuda {
    /// The kernels on the CPU, for tests: each thread of a block as a fiber, with barriers, exchanges between lanes and shared memory.
    ///
    /// A launch whose threads diverge at a barrier or in an exchange is [`Error::Refused`]; an access past the end of a buffer, or one that is not
    /// aligned, ends the program with the kernel, the block and the thread.
    pub fn emulated() -> Self {
        Self::with_driver(Box::new(Emulator))
    }
}

#[derive(Debug)]
struct Emulator;

#[derive(Debug)]
struct HostMemory {
    address: u64,
    bytes: usize,
}

impl Driver for Emulator {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Allocation>, Error> {
        // SAFETY: any number of bytes is allowed.
        let memory = unsafe { lrmoe_emu_allocate(bytes) };
        if memory.is_null() {
            return Err(Error::OutOfMemory {
                operation: "allocating a buffer",
                bytes: bytes as u64,
            });
        }
        let address = memory as u64;
        Ok(Box::new(HostMemory { address, bytes }))
    }

    unsafe fn write(&self, bytes: &[u8], to: u64) -> Result<(), Error> {
        // SAFETY: as promised; memory of the emulator is no Rust value, so that it is not in `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        // SAFETY: as for `write`; the emulator fills what it allocates.
        unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        // SAFETY: as promised.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, at: u64, bytes: usize) -> Result<(), Error> {
        // SAFETY: as promised.
        unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, kernel: Kernel, blocks: u32, parameters: &[u64]) -> Result<(), Error> {
        // SAFETY: as promised.
        unsafe { launch(kernel.entry().1, blocks, parameters) }
    }

    fn find_library(&self) -> Result<(), Error> {
        Ok(())
    }

    unsafe fn multiply(&self, products: &[Gemm]) -> Result<(), Error> {
        for product in products {
            // SAFETY: as promised.
            unsafe { multiply(product) };
        }
        Ok(())
    }
}

/// A product by its definition.
///
/// # Safety
///
/// As for [`Driver::multiply`].
unsafe fn multiply(product: &Gemm) {
    let element = |operand: usize, row: usize, column: usize| {
        let at = column * product.columns_apart[operand] + row;
        (product.at[operand] + 4 * at as u64) as *mut f32
    };
    // op(a) or op(b) at this place.
    let value = |operand: usize, row: usize, column: usize| {
        let at = if product.transposed[operand] {
            element(operand, column, row)
        } else {
            element(operand, row, column)
        };
        // SAFETY: as promised.
        f64::from(unsafe { *at })
    };
    for column in 0..product.n {
        for row in 0..product.m {
            let sum: f64 = (0..product.k)
                .map(|k| value(0, row, k) * value(1, k, column))
                .sum();
            let to = element(2, row, column);
            // As in BLAS, nothing is read where nothing is added to.
            let before = if product.beta == 0.0 {
                0.0
            } else {
                // SAFETY: as promised.
                f64::from(product.beta * unsafe { *to })
            };
            // SAFETY: as promised.
            unsafe { *to = (sum + before) as f32 };
        }
    }
}

/// # Safety
///
/// As for [`Driver::launch`].
unsafe fn launch(name: &str, blocks: u32, parameters: &[u64]) -> Result<(), Error> {
    let refused = |reason| Error::Refused {
        operation: "launching a kernel",
        reason,
    };
    let name = CString::new(name).map_err(|error| refused(error.to_string()))?;
    let mut reason: [c_char; 256] = [0; 256];
    // SAFETY: the emulator checks the name and the number of parameters, and writes a string that ends within `reason`; the rest is promised.
    let code = unsafe {
        lrmoe_emu_launch(
            name.as_ptr(),
            blocks,
            parameters.as_ptr().cast(),
            size_of_val(parameters),
            reason.as_mut_ptr(),
            reason.len(),
        )
    };
    if code == 0 {
        return Ok(());
    }
    // SAFETY: as above.
    let reason = unsafe { CStr::from_ptr(reason.as_ptr()) };
    Err(refused(reason.to_string_lossy().into_owned()))
}

impl Allocation for HostMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: this memory was allocated with as many bytes, and nothing works on it: launches end before they return.
        unsafe { lrmoe_emu_free(self.address as *mut c_void, self.bytes) };
    }
}

#[cfg(test)]
mod tests;
