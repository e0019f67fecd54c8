//! Devices, and their errors as values.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ::wgpu::{
    Adapter, AdapterInfo, Backends, BufferDescriptor, BufferUsages, Device, DeviceDescriptor,
    ErrorFilter, Instance, InstanceDescriptor, InstanceFlags, Limits, PollType, PowerPreference,
    Queue, RequestAdapterOptions,
};
use pollster::block_on;

use super::{Shared, Wgpu, kernel::Pipelines};
use crate::Error;

/// OpenGL is left out: it lacks what the shaders need on many devices.
const BACKENDS: Backends = Backends::VULKAN
    .union(Backends::METAL)
    .union(Backends::DX12);
/// Most words of a binding, whatever the device allows: numbers of words, and of rows twice as many words, fit in u32.
const MOST_WORDS: u64 = 1 << 30;

impl Wgpu {
    /// The fastest device of this machine, with all that it allows.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`]; those of [`from_device`](Self::from_device).
    pub fn new() -> Result<Self, Error> {
        Self::with_limits(|limits| limits)
    }

    /// As [`new`](Self::new), with limits no better than the device's own: these go in, the wanted ones come out.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_limits(limits: impl FnOnce(Limits) -> Limits) -> Result<Self, Error> {
        let options = RequestAdapterOptions {
            power_preference: PowerPreference::HighPerformance,
            ..RequestAdapterOptions::default()
        };
        let adapter = block_on(instance()?.request_adapter(&options)).map_err(none)?;
        let (device, queue) = open(&adapter, limits(adapter.limits()))?;
        let lost = Lost::default();
        let to = lost.clone();
        device.set_device_lost_callback(move |_, message| *to.reason() = Some(message));
        Self::with_lost(device, queue, lost)
    }

    /// All devices of this machine, with their limits.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] where this build has no backend for the platform.
    pub fn adapters() -> Result<Vec<(AdapterInfo, Limits)>, Error> {
        let adapters = block_on(instance()?.enumerate_adapters(BACKENDS));
        Ok(adapters
            .iter()
            .map(|adapter| (adapter.get_info(), adapter.limits()))
            .collect())
    }

    pub(super) fn with_lost(device: Device, queue: Queue, lost: Lost) -> Result<Self, Error> {
        const OPERATION: &str = "compiling shaders";
        if is_lost(&device) {
            return Err(lost.error(OPERATION));
        }
        let limits = device.limits();
        let alignment = u64::from(limits.min_storage_buffer_offset_alignment)
            .max(limits.min_uniform_buffer_offset_alignment.into());
        let bytes = limits
            .max_storage_buffer_binding_size
            .min(limits.max_buffer_size);
        // A binding begins up to one alignment before its first element.
        let words = (bytes.saturating_sub(alignment) / 4).min(MOST_WORDS);
        let (pipelines, nothing) = scoped(&device, &lost, OPERATION, 0, || {
            let pipelines = Pipelines::new(&device, &lost)?;
            let nothing = device.create_buffer(&BufferDescriptor {
                label: Some("nothing"),
                size: 16,
                usage: BufferUsages::STORAGE,
                mapped_at_creation: false,
            });
            Ok((pipelines, nothing))
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                device,
                queue,
                pipelines,
                most_words: words as usize,
                most_groups: limits.max_compute_workgroups_per_dimension as usize,
                alignment,
                nothing,
                staging: Mutex::default(),
                lost,
                owner: Arc::default(),
            }),
        })
    }

    /// Runs commands of this device, which report their errors out of band; `bytes` is what they ask memory for.
    pub(super) fn scoped<T>(
        &self,
        operation: &'static str,
        bytes: u64,
        commands: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Shared { device, lost, .. } = &*self.shared;
        scoped(device, lost, operation, bytes, commands)
    }

    /// The error of a command that failed without a reason: only a lost device does that.
    pub(super) fn lost(&self, operation: &'static str) -> Error {
        self.shared.lost.error(operation)
    }

    /// Waits until the device has done all that was queued.
    pub(super) fn wait(&self, operation: &'static str) -> Result<(), Error> {
        // wgpu panics where the driver reports a lost device to this call, and only there.
        let wait = || self.shared.device.poll(PollType::wait_indefinitely());
        match catch_unwind(AssertUnwindSafe(wait)) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Error::Refused {
                operation,
                reason: error.to_string(),
            }),
            Err(_) => Err(self.lost(operation)),
        }
    }
}

fn instance() -> Result<Instance, Error> {
    if Instance::enabled_backend_features().is_empty() {
        return Err(none("this platform has neither Vulkan, Metal nor DX12"));
    }
    Ok(Instance::new(InstanceDescriptor {
        backends: BACKENDS,
        flags: InstanceFlags::empty(),
        ..InstanceDescriptor::new_without_display_handle()
    }))
}

fn open(adapter: &Adapter, limits: Limits) -> Result<(Device, Queue), Error> {
    let descriptor = DeviceDescriptor {
        label: Some("lrmoe"),
        required_limits: limits,
        ..DeviceDescriptor::default()
    };
    block_on(adapter.request_device(&descriptor)).map_err(none)
}

fn none(reason: impl ToString) -> Error {
    Error::NoDevice {
        backend: "wgpu",
        reason: reason.to_string(),
    }
}

/// Runs commands and turns the first error that they report into a value.
pub(super) fn scoped<T>(
    device: &Device,
    lost: &Lost,
    operation: &'static str,
    bytes: u64,
    commands: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let result = commands();
    // In reverse order.
    let internal = block_on(internal.pop());
    let validation = block_on(validation.pop());
    let memory = block_on(memory.pop());
    if memory.is_some() {
        return Err(Error::OutOfMemory { operation, bytes });
    }
    match validation.or(internal) {
        // What is done on a lost device is refused, too.
        Some(_) if is_lost(device) => Err(lost.error(operation)),
        Some(error) => Err(Error::Refused {
            operation,
            reason: error.to_string(),
        }),
        None => result,
    }
}

/// Whether the device gives no memory any more and has no other reason not to.
fn is_lost(device: &Device) -> bool {
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let probe = device.create_buffer(&BufferDescriptor {
        label: Some("probe"),
        size: 4,
        usage: BufferUsages::COPY_SRC,
        mapped_at_creation: true,
    });
    let mapped = probe.get_mapped_range_mut(..).is_ok();
    block_on(memory.pop()).is_none() && !mapped
}

/// What the driver said when the device was lost, if that is known here.
#[derive(Clone, Debug, Default)]
pub(super) struct Lost(Arc<Mutex<Option<String>>>);

impl Lost {
    fn reason(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn error(&self, operation: &'static str) -> Error {
        let reason = self.reason().clone();
        Error::DeviceLost {
            operation,
            reason: reason.unwrap_or_else(|| "the driver gives no reason".into()),
        }
    }
}
