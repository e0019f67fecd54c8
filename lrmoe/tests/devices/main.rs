//! Layers and training on every device of this build and this machine, against the CPU.
//!
//! A missing device shows as ignored. `LRMOE_REQUIRE` is a comma-separated list of devices for which it is a failure.

#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "wgpu")]
mod layer;
#[cfg(feature = "wgpu")]
mod training;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

#[cfg(feature = "wgpu")]
fn trials() -> Vec<Trial> {
    let wgpu = lrmoe_kernels::Wgpu::new().map_err(|error| error.to_string());
    let trial = |test: &str, body: fn(&lrmoe_kernels::Wgpu)| {
        let wgpu = wgpu.clone();
        let ignored = wgpu.is_err() && !is_required();
        Trial::test(format!("wgpu::{test}"), move || {
            body(&wgpu?);
            Ok(())
        })
        .with_ignored_flag(ignored)
    };
    vec![
        trial("layer::selections", layer::selections),
        trial("layer::policies", layer::policies),
        trial("layer::edges", layer::edges),
        trial("training::first_steps", training::first_steps),
    ]
}

#[cfg(not(feature = "wgpu"))]
fn trials() -> Vec<Trial> {
    let trial = Trial::test("wgpu::built", || {
        Err("built without the feature wgpu".into())
    });
    vec![trial.with_ignored_flag(!is_required())]
}

fn is_required() -> bool {
    let required = std::env::var("LRMOE_REQUIRE").unwrap_or_default();
    required.split(',').any(|device| device.trim() == "wgpu")
}

fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials()).exit_code()
}
