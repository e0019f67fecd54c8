//! `lrmoe doctor`.

mod cuda;

use std::fmt;

use clap::Args;
use lrmoe_kernels::Cpu;
use serde::Serialize;

use super::model::GIB;
use crate::calibrate::{available_bytes, memory_bytes};
use crate::error::Error;
use cuda::Cuda;

/// Say what this machine offers: instruction sets, threads, memory, devices, and what is missing.
///
/// Missing parts are listed with the command that would install them; they are no error of this command, which exits with 0.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  lrmoe doctor           for people
  lrmoe doctor --json    the same as one JSON object")]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(crate) fn run(self) -> Result<(), Error> {
        let report = Report::new();
        if self.json {
            let json = serde_json::to_string_pretty(&report);
            println!("{}", json.expect("a report has only string keys"));
        } else {
            print!("{report}");
        }
        Ok(())
    }
}

/// What was found.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    cpu: Processor,
    wgpu: Devices,
    cuda: Cuda,
    missing: Vec<Missing>,
}

#[derive(Serialize)]
struct Processor {
    /// As the system calls it, where it says.
    name: Option<String>,
    threads: usize,
    /// What the kernels run on.
    f32_instructions: &'static str,
    bf16_instructions: &'static str,
    memory_bytes: Option<u64>,
    available_bytes: Option<u64>,
}

/// Devices that wgpu finds.
#[derive(Default, Serialize)]
struct Devices {
    /// Whether this program has the backend.
    built: bool,
    adapters: Vec<Adapter>,
    /// Why none can be used.
    problem: Option<String>,
}

#[derive(Serialize)]
struct Adapter {
    name: String,
    kind: &'static str,
    backend: String,
    driver: String,
    /// Whether `--device wgpu` takes this one.
    used: bool,
    max_storage_binding_bytes: u64,
    max_buffer_bytes: u64,
    max_workgroups: u32,
    max_workgroup_threads: u32,
    workgroup_memory_bytes: u32,
    subgroup_sizes: [u32; 2],
}

/// A part that would make more possible.
#[derive(Serialize)]
struct Missing {
    what: String,
    command: &'static str,
}

impl Report {
    fn new() -> Self {
        let wgpu = devices();
        let mut missing = Vec::new();
        if !wgpu.built {
            missing.push(Missing {
                what: "the wgpu backend, which this program was built without".into(),
                command: "cargo build --release -p lrmoe --features wgpu",
            });
        } else if wgpu.adapters.is_empty() && cfg!(target_os = "linux") {
            missing.push(Missing {
                what: "a Vulkan driver: that of the GPU's vendor, or Mesa's, which has one in software".into(),
                command: "apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1",
            });
        }
        let cuda = Cuda::new();
        missing.extend(cuda.missing());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cpu: processor(),
            wgpu,
            cuda,
            missing,
        }
    }
}

fn processor() -> Processor {
    let instructions = Cpu::instruction_sets();
    let name = std::fs::read_to_string("/proc/cpuinfo").ok();
    let name = name.and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        Some(line?.trim_start_matches([' ', '\t', ':']).to_owned())
    });
    Processor {
        name,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        f32_instructions: instructions.f32,
        bf16_instructions: instructions.bf16,
        memory_bytes: memory_bytes().ok(),
        available_bytes: available_bytes().ok(),
    }
}

#[cfg(not(feature = "wgpu"))]
fn devices() -> Devices {
    Devices::default()
}

#[cfg(feature = "wgpu")]
fn devices() -> Devices {
    use lrmoe_kernels::Wgpu;

    let opened = Wgpu::new();
    let used = opened.as_ref().ok().map(Wgpu::adapter_info);
    let (found, problem) = match Wgpu::adapters() {
        Ok(found) => (found, opened.err()),
        Err(error) => (Vec::new(), Some(error)),
    };
    let adapters = found.into_iter().map(|(info, limits)| Adapter {
        used: used
            .as_ref()
            .is_some_and(|used| (&used.name, used.backend) == (&info.name, info.backend)),
        kind: kind(info.device_type),
        backend: format!("{:?}", info.backend).to_lowercase(),
        driver: format!("{} {}", info.driver, info.driver_info)
            .trim()
            .to_owned(),
        name: info.name,
        max_storage_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_workgroups: limits.max_compute_workgroups_per_dimension,
        max_workgroup_threads: limits.max_compute_invocations_per_workgroup,
        workgroup_memory_bytes: limits.max_compute_workgroup_storage_size,
        subgroup_sizes: [info.subgroup_min_size, info.subgroup_max_size],
    });
    Devices {
        built: true,
        adapters: adapters.collect(),
        problem: problem.map(|error| error.to_string()),
    }
}

#[cfg(feature = "wgpu")]
fn kind(kind: lrmoe_kernels::wgpu::DeviceType) -> &'static str {
    use lrmoe_kernels::wgpu::DeviceType;
    match kind {
        DeviceType::IntegratedGpu => "integrated GPU",
        DeviceType::DiscreteGpu => "GPU",
        DeviceType::VirtualGpu => "virtual GPU",
        DeviceType::Cpu => "software",
        DeviceType::Other => "device",
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "lrmoe {}\n", self.version)?;
        write!(f, "{}\n{}\n{}", self.cpu, self.wgpu, self.cuda)?;
        if self.missing.is_empty() {
            return writeln!(f, "\nnothing is missing");
        }
        writeln!(f, "\nmissing")?;
        for Missing { what, command } in &self.missing {
            writeln!(f, "  {what}\n    {command}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().unwrap_or("unknown");
        writeln!(f, "cpu")?;
        writeln!(f, "  processor     {name}")?;
        writeln!(f, "  threads       {}", self.threads)?;
        let [f32, bf16] = [self.f32_instructions, self.bf16_instructions];
        writeln!(f, "  kernels       f32 on {f32}, bf16 on {bf16}")?;
        match (self.memory_bytes, self.available_bytes) {
            (Some(all), Some(free)) => {
                let [all, free] = [all, free].map(|bytes| bytes as f64 / GIB);
                writeln!(
                    f,
                    "  memory        {all:.1} GiB, {free:.1} GiB of it available"
                )
            }
            _ => writeln!(f, "  memory        unknown"),
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.built, self.adapters.is_empty()) {
            (false, _) => ": not in this program",
            (true, true) => ": no device",
            (true, false) => "",
        };
        writeln!(f, "wgpu{state}")?;
        if let Some(problem) = &self.problem {
            writeln!(f, "  problem       {problem}")?;
        }
        self.adapters.iter().try_for_each(|adapter| adapter.fmt(f))
    }
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = if self.used {
            ", taken by --device wgpu"
        } else {
            ""
        };
        let [least, most] = self.subgroup_sizes;
        let mib = |bytes: u64| bytes >> 20;
        writeln!(f, "  {} ({}){used}", self.name, self.kind)?;
        writeln!(f, "    driver      {}, {}", self.backend, self.driver)?;
        writeln!(
            f,
            "    memory      storage bindings of {} MiB, buffers of {} MiB",
            mib(self.max_storage_binding_bytes),
            mib(self.max_buffer_bytes)
        )?;
        writeln!(
            f,
            "    dispatches  {} workgroups of at most {} threads and {} KiB, subgroups of {least} to {most}",
            self.max_workgroups,
            self.max_workgroup_threads,
            self.workgroup_memory_bytes >> 10
        )
    }
}
