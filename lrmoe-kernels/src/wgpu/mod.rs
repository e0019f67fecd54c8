//! The `wgpu` backend: f32 on any Vulkan, Metal or DX12 device, for checking the others and for people without NVIDIA hardware.
//!
//! | stage | trait | equal to [`Cpu`](crate::Cpu) |
//! |---|---|---|
//! | norms, scores, keys, selections, weights | [`SelectPairs`](crate::SelectPairs) | to the bit |
//! | gather, grouping, scatter-add | [`CompactRows`](crate::CompactRows) | to the bit (a device may take subnormal sums for zero) |
//! | expert FFN, forward and backward | [`ComputeExperts`](crate::ComputeExperts) | within 1e-5 of the f64 result, relative to a tensor's norm |
//!
//! **What it asks for.** Compute shaders with 256 threads and 16 KiB of shared memory a workgroup, 8 storage buffers a stage: the defaults of
//! WebGPU. No subgroups, no 64-bit integers, no f16; f32 products and sums rounded to nearest, as devices do though WGSL leaves the mode open. What
//! they do not do alike is avoided on the way to a key: division, square roots, subnormals, overflow; and a sum cannot be contracted with the
//! product before it, as between them stands a word that only the host knows to be 0.
//!
//! **Work.** Shaders are compiled once for a [`Wgpu`], which is cheap to clone. Stages are queued; only [`Memory::read`](crate::Memory::read), a
//! score (12 bytes: a NaN is an error, and scales are exchanged) and exchanges between several ranks wait for the device. Work larger than a
//! storage binding or a dispatch of the device is split; a buffer larger than the device allows is [`Error::TooLarge`].
//!
//! **Errors.** A lost device, full memory and whatever the driver refuses are typed errors of the call that meets them. As a device works behind
//! the queue, the loss may show only in a later call, at the latest in the next read.
//!
//! ```
//! use lrmoe_kernels::{CompactRows, Error, Memory, Wgpu};
//!
//! let device = match Wgpu::new() {
//!     Ok(device) => device,
//!     Err(Error::NoDevice { .. }) => return Ok(()), // this machine has no Vulkan, Metal or DX12 driver
//!     Err(error) => return Err(error),
//! };
//! let x = device.upload(&[1.0_f32, 2.0, 3.0, 4.0])?;
//! let index = device.row_index(&[1, 0, 1], 2)?;
//! let mut rows = Default::default();
//! device.gather(&x, 2, &index, &mut rows)?;
//! assert_eq!(device.download(&rows)?, [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), Error>(())
//! ```

mod batch;
mod buffer;
mod compact;
mod device;
mod ffn;
mod kept;
mod kernel;
mod keys;
mod metric;
mod norm;
mod score;
mod select;
mod weights;

use std::{
    fmt,
    sync::{Arc, Mutex},
};

pub use ::wgpu::{AdapterInfo, Device, DeviceType, Limits, Queue};
pub use buffer::Buffer;
pub use compact::Grouping;
pub use ffn::Scratch;
pub use metric::{Pairs, Scores};

use crate::Error;
use device::Lost;
use kernel::Pipelines;

/// A device that runs the stages; clones share it.
#[derive(Clone)]
pub struct Wgpu {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    queue: Queue,
    pipelines: Pipelines,
    /// Most words of a storage binding that any element can begin, and most workgroups of a dispatch.
    most_words: usize,
    most_groups: usize,
    /// Bytes that the offset of a binding must be a multiple of.
    alignment: u64,
    /// Bound where a stage has nothing to bind.
    nothing: ::wgpu::Buffer,
    /// Where reads go by.
    staging: Mutex<Option<::wgpu::Buffer>>,
    /// What the driver said when the device was lost.
    lost: Lost,
    /// Tells this from others.
    owner: Arc<()>,
}

impl Wgpu {
    /// Works on a host program's device, whose limits it keeps to.
    ///
    /// The program keeps its callbacks for lost devices and uncaptured errors.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::TooLarge`] if the device's limits are below those above; [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn from_device(device: Device, queue: Queue) -> Result<Self, Error> {
        Self::with_lost(device, queue, Lost::default())
    }

    /// The device, for a program that has work of its own for it.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The queue that stages go to.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    /// Name, driver and kind of the device.
    pub fn adapter_info(&self) -> AdapterInfo {
        self.shared.device.adapter_info()
    }

    /// The limits that the device keeps to.
    pub fn limits(&self) -> Limits {
        self.shared.device.limits()
    }
}

impl fmt::Debug for Wgpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.adapter_info();
        f.debug_struct("Wgpu")
            .field("adapter", &info.name)
            .field("backend", &info.backend)
            .finish_non_exhaustive()
    }
}
