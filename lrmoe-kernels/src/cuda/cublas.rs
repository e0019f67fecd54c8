//! Calls of cuBLAS.

use std::ffi::{c_int, c_void};

use cudarc::{
    cublas::{
        result::{self, CublasError},
        sys::{
            self, cublasComputeType_t, cublasGemmGroupedBatchedEx_64, cublasOperation_t,
            cudaDataType_t, libraryPropertyType_t,
        },
    },
    driver::CudaStream,
};

use super::gemm::Gemm;
use crate::Error;

/// First version with grouped products (major, minor).
const OLDEST: (c_int, c_int) = (12, 5);

/// A handle of cuBLAS that works on one stream.
#[derive(Debug)]
pub(super) struct Library(sys::cublasHandle_t);

// SAFETY: a handle may be used by any thread, if by one at a time; `Library` is used under a lock, and not shared otherwise.
unsafe impl Send for Library {}

impl Library {
    /// The context of the stream is that of this thread, and lives on.
    pub(super) fn new(stream: &CudaStream) -> Result<Self, Error> {
        // Its functions panic without.
        // SAFETY: loading cuBLAS runs nothing but its initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_library("the library of cuBLAS is not found"));
        }
        let failed = |error: CublasError| no_library(error.to_string());
        let property = |which| {
            let mut value: c_int = 0;
            // SAFETY: an integer is written.
            unsafe { sys::cublasGetProperty(which, &mut value) }
                .result()
                .map(|()| value)
        };
        let major = property(libraryPropertyType_t::MAJOR_VERSION).map_err(failed)?;
        let minor = property(libraryPropertyType_t::MINOR_VERSION).map_err(failed)?;
        if (major, minor) < OLDEST {
            return Err(no_library(format!(
                "cuBLAS {major}.{minor} has no grouped products, {}.{} has",
                OLDEST.0, OLDEST.1
            )));
        }
        let library = Self(result::create_handle().map_err(failed)?);
        // SAFETY: the handle was just made; the stream lives as long as the card that holds both.
        unsafe { result::set_stream(library.0, stream.cu_stream().cast()) }.map_err(failed)?;
        Ok(library)
    }

    /// Queues the products on the stream; `pointers`, in the card's memory, are where the products' a, b and c begin: all a, all b, all c.
    ///
    /// # Safety
    ///
    /// The matrices of the products are in memory of the card, and no result is part of another or of an operand.
    pub(super) unsafe fn multiply(&self, products: &[Gemm], pointers: u64) -> Result<(), Error> {
        let count = products.len();
        let all = |of: fn(&Gemm) -> usize| -> Vec<i64> {
            products.iter().map(|product| of(product) as i64).collect()
        };
        let operations = |operand: usize| -> Vec<_> {
            let operation = |product: &Gemm| match product.transposed[operand] {
                true => cublasOperation_t::CUBLAS_OP_T,
                false => cublasOperation_t::CUBLAS_OP_N,
            };
            products.iter().map(operation).collect()
        };
        let (of_a, of_b) = (operations(0), operations(1));
        let [m, n, k] = [all(|p| p.m), all(|p| p.n), all(|p| p.k)];
        let apart: [Vec<i64>; 3] = [
            all(|p| p.columns_apart[0]),
            all(|p| p.columns_apart[1]),
            all(|p| p.columns_apart[2]),
        ];
        let betas: Vec<f32> = products.iter().map(|product| product.beta).collect();
        let (ones, single) = (vec![1.0_f32; count], vec![1_i64; count]);
        let pointers_of =
            |operand: usize| (pointers as usize + 8 * operand * count) as *const *const c_void;
        let f32 = cudaDataType_t::CUDA_R_32F;
        // SAFETY: every list has an entry for each of `count` groups of one product; the rest is promised.
        let queued = unsafe {
            cublasGemmGroupedBatchedEx_64(
                self.0,
                of_a.as_ptr(),
                of_b.as_ptr(),
                m.as_ptr(),
                n.as_ptr(),
                k.as_ptr(),
                ones.as_ptr().cast(),
                pointers_of(0),
                f32,
                apart[0].as_ptr(),
                pointers_of(1),
                f32,
                apart[1].as_ptr(),
                betas.as_ptr().cast(),
                pointers_of(2).cast::<*mut c_void>(),
                f32,
                apart[2].as_ptr(),
                count as i64,
                single.as_ptr(),
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
            )
        };
        queued.result().map_err(|error| Error::Refused {
            operation: "multiplying by cuBLAS",
            reason: error.to_string(),
        })
    }
}

/// There is none that can be used.
fn no_library(reason: impl Into<String>) -> Error {
    Error::NoDevice {
        backend: "cublas",
        reason: reason.into(),
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // Of no use to anyone if it fails.
        // SAFETY: the handle is not used any more.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}
