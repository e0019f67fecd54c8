//! The `cuda` backend: NVIDIA cards.
//!
//! | stage | trait | equal to [`Cpu`](crate::Cpu) |
//! |---|---|---|
//! | norms, scores, keys, selections, weights | [`SelectPairs`](crate::SelectPairs) | to the bit |
//! | gather, grouping, scatter-add | [`CompactRows`](crate::CompactRows) | to the bit |
//! | expert FFN, forward and backward | [`ComputeExperts`](crate::ComputeExperts) | within 1e-5 of the f64 result, relative to a tensor's norm; in bf16 within 1e-2 |
//!
//! **What it asks for.** Building needs no CUDA. At run time it looks for the driver (libcuda) and for NVRTC 13 or 12 (libnvrtc, in the toolkit or from PyPI
//! as `nvidia-cuda-nvrtc`); without one of them [`Cuda::new`] is [`Error::NoDevice`](crate::Error::NoDevice). Sources are compiled for the card when
//! the first of their kernels is launched, once for a [`Cuda`] and its clones.
//!
//! **Work.** Stages are queued on one stream. The host waits for the card in [`Memory::read`](crate::Memory::read), in a score (12 bytes: a NaN is an error,
//! and scales are exchanged), in keys of a caller's scores (4 bytes), and where a selection exchanges with other ranks. Memory is taken from the
//! card's pool in the order of the stream, where the card has one.
//!
//! **Products.** The experts' grouped products are kernels of this crate; [`Cuda::with_products`] leaves those of f32 to cuBLAS. Those of bf16 run on tensor
//! cores; hidden rows lie in memory in bf16 between them, where [`Cpu`](crate::Cpu) has pre-activations and their gradients in f32.
//!
//! **Errors.** As a card works behind the stream, what goes wrong there may show only in a later call, at the latest in the next read.
//!
//! **Without a card.** The feature `cuda-emu` has the same kernels compiled by c++ and run on the CPU, for tests: `Cuda::emulated`.

mod buffer;
#[cfg(feature = "cuda")]
mod cards;
mod compact;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod device;
mod driver;
#[cfg(feature = "cuda-emu")]
mod emu;
mod ffn;
mod gemm;
mod kernel;
mod keys;
mod metric;
mod norm;
mod score;
mod select;
mod weights;

use std::{fmt, sync::Arc};

pub use buffer::Buffer;
#[cfg(feature = "cuda")]
pub use cards::{CardInfo, cards, find_driver};
pub use compact::Grouping;
#[cfg(feature = "cuda")]
pub use compile::{Compiled, compile, find_nvrtc};
#[cfg(feature = "cuda")]
pub use cudarc::{self, driver::CudaStream};
pub use ffn::Scratch;
pub use gemm::Products;
pub use metric::{Pairs, Scores};

use driver::Driver;

/// A device that runs the stages; clones share it.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    products: Products,
}

#[derive(Debug)]
struct Shared {
    driver: Box<dyn Driver>,
}

impl Cuda {
    fn with_driver(driver: Box<dyn Driver>) -> Self {
        Self {
            shared: Arc::new(Shared { driver }),
            products: Products::default(),
        }
    }

    /// The same device and memory, where experts' products are left to what is named.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the library is not found or too old.
    pub fn with_products(&self, products: Products) -> Result<Self, crate::Error> {
        if products == Products::CuBlas {
            self.shared.driver.find_library()?;
        }
        Ok(Self {
            shared: Arc::clone(&self.shared),
            products,
        })
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cuda").field(&self.shared.driver).finish()
    }
}
