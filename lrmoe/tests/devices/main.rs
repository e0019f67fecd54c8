//! Layers and training on every device of this build and this machine, against the CPU: `wgpu`, `cuda`, and `cuda-emu`, the kernels of CUDA on the CPU.
//!
//! A missing device shows as ignored. `LRMOE_REQUIRE` is a comma-separated list of devices for which it is a failure.

#[path = "../common/mod.rs"]
mod common;
mod layer;
mod training;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use lrmoe::layer::Backend;

/// A device and its name, or why there is none.
struct Candidate<B> {
    name: &'static str,
    device: Result<B, String>,
}

impl<B: Clone + Send + 'static> Candidate<B> {
    fn trial(&self, test: &str, body: impl FnOnce(&B) + Send + 'static) -> Trial {
        let device = self.device.clone();
        let ignored = device.is_err() && !is_required(self.name);
        Trial::test(format!("{}::{test}", self.name), move || {
            body(&device?);
            Ok(())
        })
        .with_ignored_flag(ignored)
    }
}

fn trials<B: Backend + Clone + Sync>(candidate: &Candidate<B>) -> Vec<Trial> {
    let trial = |test, body: fn(&B)| candidate.trial(test, body);
    vec![
        trial("layer::selections", layer::selections),
        trial("layer::policies", layer::policies),
        trial("layer::edges", layer::edges),
        trial("layer::stash_modes", layer::stash_modes),
        trial("training::first_steps", training::first_steps),
    ]
}

/// And that the device has its name.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn trials_with_name<B: Backend + Clone + Sync>(
    name: &'static str,
    device: Result<B, lrmoe_kernels::Error>,
) -> Vec<Trial> {
    let device = device.map_err(|error| error.to_string());
    let candidate = Candidate { name, device };
    let mut all = trials(&candidate);
    all.push(candidate.trial("training::by_name", |device| {
        training::by_name(name, device)
    }));
    all
}

fn is_required(name: &str) -> bool {
    let required = std::env::var("LRMOE_REQUIRE").unwrap_or_default();
    required.split(',').any(|device| device.trim() == name)
}

/// Stands for a device that is not in this build.
#[cfg(not(all(feature = "wgpu", feature = "cuda", feature = "cuda-emu")))]
fn not_built(name: &'static str) -> Vec<Trial> {
    let device = Err(format!("built without the feature {name}"));
    trials(&Candidate::<lrmoe_kernels::Cpu> { name, device })
}

fn main() -> ExitCode {
    #[cfg(feature = "wgpu")]
    let mut all = trials_with_name("wgpu", lrmoe_kernels::Wgpu::new());
    #[cfg(not(feature = "wgpu"))]
    let mut all = not_built("wgpu");
    #[cfg(feature = "cuda")]
    all.extend(trials_with_name("cuda", lrmoe_kernels::Cuda::new(0)));
    #[cfg(not(feature = "cuda"))]
    all.extend(not_built("cuda"));
    #[cfg(feature = "cuda-emu")]
    all.extend(trials(&Candidate {
        name: "cuda-emu",
        device: Ok(lrmoe_kernels::Cuda::emulated()),
    }));
    #[cfg(not(feature = "cuda-emu"))]
    all.extend(not_built("cuda-emu"));
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}
