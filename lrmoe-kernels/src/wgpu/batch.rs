//! Commands that go to the device together.

use std::ops::Range;

use ::wgpu::{
    BindGroupDescriptor, BindGroupEntry, BindingResource, BufferBinding, BufferDescriptor,
    BufferUsages, CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor,
};

use super::{
    Buffer, Wgpu,
    buffer::{Raw, Window},
    kernel::Kernel,
};
use crate::{Element, Error};

/// What is bound beside the parameters.
#[derive(Clone, Debug)]
pub(super) enum Binding<'a> {
    Window(Window<'a>),
    /// Bytes of the batch's own data.
    Table(Range<u64>),
}

impl<'a> From<Window<'a>> for Binding<'a> {
    fn from(window: Window<'a>) -> Self {
        Self::Window(window)
    }
}

enum Command<'a> {
    Dispatch {
        kernel: Kernel,
        parameters: Range<u64>,
        bindings: Vec<(u32, Binding<'a>)>,
        groups: u32,
    },
    /// Zeros.
    Clear { raw: &'a Raw },
    Copy {
        from: &'a Raw,
        to: &'a Raw,
        bytes: u64,
    },
}

/// Commands in order, each of which sees what those before it wrote.
pub(super) struct Batch<'a> {
    wgpu: &'a Wgpu,
    /// Parameters and tables, each aligned for a binding.
    data: Vec<u8>,
    commands: Vec<Command<'a>>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(wgpu: &'a Wgpu) -> Self {
        Self {
            wgpu,
            data: Vec::new(),
            commands: Vec::new(),
        }
    }

    fn append(&mut self, words: &[u32]) -> Range<u64> {
        let alignment = self.wgpu.shared.alignment as usize;
        self.data
            .resize(self.data.len().next_multiple_of(alignment), 0);
        let start = self.data.len() as u64;
        self.data.extend_from_slice(bytemuck::cast_slice(words));
        start..self.data.len() as u64
    }

    /// A small table that commands of this batch read.
    pub(super) fn table(&mut self, words: &[u32]) -> Binding<'static> {
        Binding::Table(self.append(words))
    }

    /// Fills a buffer with zeros.
    pub(super) fn clear<T: Element>(&mut self, buffer: &'a Buffer<T>) {
        self.commands
            .extend(buffer.raw().map(|raw| Command::Clear { raw }));
    }

    /// Copies all elements of a buffer to another that has room for them.
    pub(super) fn copy<T: Element>(&mut self, from: &'a Buffer<T>, to: &'a Buffer<T>) {
        let bytes = from.bytes();
        let raw = from.raw().zip(to.raw()).filter(|_| bytes > 0);
        let copy = |(from, to)| Command::Copy { from, to, bytes };
        self.commands.extend(raw.map(copy));
    }

    /// Runs `groups` workgroups with these parameters, which follow the first workgroup's number and a zero, and these bindings.
    pub(super) fn dispatch(
        &mut self,
        kernel: Kernel,
        groups: usize,
        parameters: &[u32],
        bindings: &[(u32, Binding<'a>)],
    ) {
        let most = self.wgpu.shared.most_groups;
        for first in (0..groups).step_by(most) {
            let mut words = vec![first as u32, 0];
            words.extend_from_slice(parameters);
            let parameters = self.append(&words);
            self.commands.push(Command::Dispatch {
                kernel,
                parameters,
                bindings: bindings.to_vec(),
                groups: (groups - first).min(most) as u32,
            });
        }
    }

    /// Queues the commands.
    pub(super) fn submit(self) -> Result<(), Error> {
        const OPERATION: &str = "queueing commands";
        if self.commands.is_empty() {
            return Ok(());
        }
        let (wgpu, size) = (self.wgpu, self.data.len() as u64);
        self.check_own()?;
        wgpu.scoped(OPERATION, size, || {
            let device = &wgpu.shared.device;
            let data = device.create_buffer(&BufferDescriptor {
                label: Some("parameters"),
                size: size.next_multiple_of(4).max(4),
                usage: BufferUsages::UNIFORM | BufferUsages::STORAGE,
                mapped_at_creation: true,
            });
            // A lost device is noticed here: it gives no memory.
            data.get_mapped_range_mut(..)
                .map_err(|_| wgpu.lost(OPERATION))?
                .slice(..self.data.len())
                .copy_from_slice(&self.data);
            data.unmap();
            let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor::default());
            self.record(&mut encoder, &data);
            wgpu.shared.queue.submit([encoder.finish()]);
            Ok(())
        })
    }

    fn check_own(&self) -> Result<(), Error> {
        for command in &self.commands {
            match command {
                Command::Clear { raw } => self.wgpu.check_own(raw)?,
                Command::Copy { from, to, .. } => {
                    self.wgpu.check_own(from)?;
                    self.wgpu.check_own(to)?;
                }
                Command::Dispatch { bindings, .. } => {
                    let mut raw = bindings.iter().filter_map(|(_, binding)| match binding {
                        Binding::Window(window) => window.raw,
                        Binding::Table(_) => None,
                    });
                    raw.try_for_each(|raw| self.wgpu.check_own(raw))?;
                }
            }
        }
        Ok(())
    }

    fn record(&self, encoder: &mut CommandEncoder, data: &::wgpu::Buffer) {
        let shared = &self.wgpu.shared;
        let mut pass = None;
        for command in &self.commands {
            let (kernel, parameters, bindings, groups) = match command {
                Command::Clear { raw } => {
                    pass = None;
                    encoder.clear_buffer(&raw.buffer, 0, None);
                    continue;
                }
                Command::Copy { from, to, bytes } => {
                    pass = None;
                    encoder.copy_buffer_to_buffer(&from.buffer, 0, &to.buffer, 0, *bytes);
                    continue;
                }
                Command::Dispatch {
                    kernel,
                    parameters,
                    bindings,
                    groups,
                } => (*kernel, parameters, bindings, *groups),
            };
            let pipeline = shared.pipelines.of(kernel);
            let mut entries = vec![entry(0, data, parameters.start, parameters.end)];
            for (number, binding) in bindings {
                entries.push(match binding {
                    Binding::Table(range) => entry(*number, data, range.start, range.end),
                    Binding::Window(window) => {
                        let (raw, end) = match window.raw {
                            Some(raw) => (&raw.buffer, window.offset + window.size),
                            None => (&shared.nothing, shared.nothing.size()),
                        };
                        entry(*number, raw, window.offset, end)
                    }
                });
            }
            let group = shared.device.create_bind_group(&BindGroupDescriptor {
                label: None,
                layout: &pipeline.layout,
                entries: &entries,
            });
            let pass = pass.get_or_insert_with(|| {
                encoder
                    .begin_compute_pass(&ComputePassDescriptor::default())
                    .forget_lifetime()
            });
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(groups, 1, 1);
        }
    }
}

fn entry(binding: u32, buffer: &::wgpu::Buffer, start: u64, end: u64) -> BindGroupEntry<'_> {
    BindGroupEntry {
        binding,
        resource: BindingResource::Buffer(BufferBinding {
            buffer,
            offset: start,
            size: (end - start).try_into().ok(),
        }),
    }
}
