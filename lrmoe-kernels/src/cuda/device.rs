//! Cards.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, LaunchConfig, PushKernelArg,
        result::{self, DriverError},
        sys::{self, CUresult},
    },
    nvrtc::Ptx,
};

use super::{
    Cuda,
    cards::find_driver,
    compile::{architecture_for, compile_source, find_nvrtc},
    cublas::Library,
    driver::{Allocation, Driver},
    gemm::Gemm,
    kernel::{Kernel, Source, THREADS},
};
use crate::Error;

impl Cuda {
    /// The card of this number, with a stream of its own.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] without a driver, without such a card or without NVRTC; those of [`from_stream`](Self::from_stream).
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        find_driver()?;
        find_nvrtc()?;
        let reason = |error| none(explain(error));
        let context = CudaContext::new(ordinal).map_err(reason)?;
        // SAFETY: buffers are used on one stream only, whose order is all that they need.
        unsafe { context.disable_event_tracking() };
        Self::from_stream(context.new_stream().map_err(reason)?)
    }

    /// Works on a host program's stream, in its order: stages run after what the program has queued there, and before what it queues later.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] without NVRTC or if that does not compile for the card; [`Error::DeviceLost`].
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self, Error> {
        find_nvrtc()?;
        let failed = |error| refused("asking for the card", 0, error);
        let capability = stream.context().compute_capability().map_err(failed)?;
        Ok(Self::with_driver(Box::new(Card {
            name: stream.context().name().map_err(failed)?,
            architecture: architecture_for(capability)?,
            stream,
            modules: Mutex::default(),
            functions: Mutex::default(),
            library: Mutex::default(),
        })))
    }
}

/// A stream of a card, and what was compiled for it.
struct Card {
    name: String,
    architecture: String,
    stream: Arc<CudaStream>,
    modules: Mutex<HashMap<Source, Arc<CudaModule>>>,
    functions: Mutex<HashMap<Kernel, CudaFunction>>,
    /// Of those who ask for it.
    library: Mutex<Option<Library>>,
}

impl Card {
    /// Makes the card's context that of this thread.
    fn bind(&self, operation: &'static str) -> Result<(), Error> {
        let bound = self.stream.context().bind_to_thread();
        bound.map_err(|error| refused(operation, 0, error))
    }

    /// A kernel, whose source is compiled when the first of its kernels is asked for.
    fn function(&self, kernel: Kernel) -> Result<CudaFunction, Error> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&kernel) {
            return Ok(function.clone());
        }
        let (source, entry) = kernel.entry();
        let function = self.module(source)?.load_function(entry);
        let function = function.map_err(|error| shader(source, error))?;
        functions.insert(kernel, function.clone());
        Ok(function)
    }

    /// cuBLAS, which is looked for when it is first asked for.
    fn with_library<T>(&self, work: impl FnOnce(&Library) -> Result<T, Error>) -> Result<T, Error> {
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        self.bind("asking for cuBLAS")?;
        let library = match library.take() {
            Some(found) => library.insert(found),
            None => library.insert(Library::new(&self.stream)?),
        };
        work(library)
    }

    fn module(&self, source: Source) -> Result<Arc<CudaModule>, Error> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&source) {
            return Ok(Arc::clone(module));
        }
        let compiled = compile_source(source, &self.architecture)?;
        let context = self.stream.context();
        let module = context.load_module(Ptx::from_binary(compiled.image));
        let module = module.map_err(|error| shader(source, error))?;
        modules.insert(source, Arc::clone(&module));
        Ok(module)
    }
}

impl Driver for Card {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Allocation>, Error> {
        // SAFETY: any content is allowed.
        let memory = unsafe { self.stream.alloc::<u8>(bytes) };
        let memory = memory.map_err(|error| refused("allocating a buffer", bytes, error))?;
        let address = address_of(&memory);
        Ok(Box::new(CardMemory { memory, address }))
    }

    unsafe fn write(&self, bytes: &[u8], to: u64) -> Result<(), Error> {
        const OPERATION: &str = "writing a buffer";
        self.bind(OPERATION)?;
        let failed = |error| refused(OPERATION, bytes.len(), error);
        // SAFETY: as promised.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) }.map_err(failed)?;
        // The driver has taken a copy of memory that it knows nothing of; other memory must not change before the card has read it.
        if is_known(bytes) {
            self.stream.synchronize().map_err(failed)?;
        }
        Ok(())
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        const OPERATION: &str = "reading a buffer";
        self.bind(OPERATION)?;
        let len = bytes.len();
        let failed = |error| refused(OPERATION, len, error);
        // SAFETY: as promised; the copy has ended before `bytes` is used.
        let copied = unsafe { result::memcpy_dtoh_async(bytes, from, self.stream.cu_stream()) };
        let ended = self.stream.synchronize();
        copied.and(ended).map_err(failed)
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        const OPERATION: &str = "copying a buffer";
        self.bind(OPERATION)?;
        // SAFETY: as promised.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) };
        copied.map_err(|error| refused(OPERATION, bytes, error))
    }

    unsafe fn clear(&self, at: u64, bytes: usize) -> Result<(), Error> {
        const OPERATION: &str = "clearing a buffer";
        self.bind(OPERATION)?;
        // SAFETY: as promised.
        let cleared = unsafe { result::memset_d8_async(at, 0, bytes, self.stream.cu_stream()) };
        cleared.map_err(|error| refused(OPERATION, bytes, error))
    }

    unsafe fn launch(&self, kernel: Kernel, blocks: u32, parameters: &[u64]) -> Result<(), Error> {
        let function = self.function(kernel)?;
        let words = Parameters::new(parameters);
        let mut launch = self.stream.launch_builder(&function);
        launch.arg(&words.0);
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: as promised; a kernel takes one struct, of which the driver reads as many words as there are.
        let launched = unsafe { launch.launch(config) };
        launched
            .map(drop)
            .map_err(|error| refused("launching a kernel", 0, error))
    }

    fn find_library(&self) -> Result<(), Error> {
        self.with_library(|_| Ok(()))
    }

    unsafe fn multiply(&self, products: &[Gemm]) -> Result<(), Error> {
        let of = |operand: usize| products.iter().map(move |product| product.at[operand]);
        let pointers: Vec<u64> = of(0).chain(of(1)).chain(of(2)).collect();
        // Freed in the order of the stream, after the products.
        let list = self.allocate(size_of_val(&pointers[..]))?;
        // SAFETY: the list has room for the pointers.
        unsafe { self.write(bytemuck::cast_slice(&pointers), list.address()) }?;
        // SAFETY: as promised; the list is that of the products.
        self.with_library(|library| unsafe { library.multiply(products, list.address()) })
    }
}

/// Room for the struct of any kernel.
struct Parameters([u64; Self::MOST]);

impl Parameters {
    const MOST: usize = 16;

    fn new(words: &[u64]) -> Self {
        let mut all = [0; Self::MOST];
        all[..words.len()].copy_from_slice(words);
        Self(all)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let library = self
            .library
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        // It ends in the context of its stream, which ends later; of no use to anyone if that fails.
        if library.is_some() {
            let _ = self.stream.context().bind_to_thread();
            *library = None;
        }
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Card")
            .field("name", &self.name)
            .field("ordinal", &self.stream.context().ordinal())
            .field("architecture", &self.architecture)
            .finish_non_exhaustive()
    }
}

/// Freed in the order of its stream.
#[derive(Debug)]
struct CardMemory {
    #[expect(dead_code, reason = "frees the memory when dropped")]
    memory: CudaSlice<u8>,
    address: u64,
}

impl Allocation for CardMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

fn address_of(memory: &CudaSlice<u8>) -> u64 {
    use cudarc::driver::DevicePtr;

    let (address, _) = memory.device_ptr(memory.stream());
    address
}

/// Whether the driver knows of this memory of the host, so that copies from it may still be under way when they return.
fn is_known(bytes: &[u8]) -> bool {
    let mut kind: u32 = 0;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: a u32 is written for this attribute; any address may be asked about.
    let found = unsafe {
        sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, bytes.as_ptr() as u64)
    };
    found == CUresult::CUDA_SUCCESS
}

pub(super) fn none(reason: impl Into<String>) -> Error {
    Error::NoDevice {
        backend: "cuda",
        reason: reason.into(),
    }
}

/// What the driver says.
pub(super) fn explain(error: DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy());
    match text {
        Ok(text) => format!("{text} ({:?})", error.0),
        Err(_) => format!("{:?}", error.0),
    }
}

fn shader(source: Source, error: DriverError) -> Error {
    Error::Shader {
        shader: source.name(),
        reason: explain(error),
    }
}

/// After some errors nothing can be done with the context any more; they may be those of an earlier launch.
fn refused(operation: &'static str, bytes: usize, error: DriverError) -> Error {
    use CUresult::*;

    let bytes = bytes as u64;
    match error.0 {
        CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { operation, bytes },
        CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_EXTERNAL_DEVICE
        | CUDA_ERROR_UNKNOWN => Error::DeviceLost {
            operation,
            reason: explain(error),
        },
        _ => Error::Refused {
            operation,
            reason: explain(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is no card of this number, nor a driver on most machines that run this.
    #[test]
    fn a_missing_card_is_an_error() {
        let error = Cuda::new(usize::MAX).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }), "{error}");
        assert!(error.to_string().starts_with("no device for cuda: "));
    }
}
