//! What every backend must do, as generic functions, run for each: `cpu`; `wgpu`, where this build and this machine have one;
//! `wgpu-split`, the same device with limits so low that work takes many bindings and dispatches; `cuda`, likewise; and `cuda-emu`, the kernels of CUDA on the CPU.
//! `cublas` and `cublas-emu` are the experts on these with the products of cuBLAS, the latter's by their definition. `nvrtc` are trials of what compiles these
//! kernels.
//!
//! A missing device shows as ignored. `LRMOE_REQUIRE` is a comma-separated list of backends for which it is a failure.

mod compact;
#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
mod cuda;
#[cfg(feature = "wgpu")]
mod device;
#[path = "../ffn/expected.rs"]
mod expected;
mod experts;
mod golden;
mod gradient_norms;
mod kept;
mod memory;
mod norms;
mod parts;
mod passes;
#[path = "../ffn/problem.rs"]
#[expect(dead_code, reason = "what other tests need of it")]
mod problem;
mod puts;
mod random;
#[path = "../../../lrmoe-metric/tests/common/mod.rs"]
mod ranks;
mod score;
mod select;

use std::{env, process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Trial};
use lrmoe_kernels::{CompactRows, ComputeExperts, Cpu, SelectPairs, half::bf16};

/// All that a layer needs of a backend.
trait Backend: SelectPairs + CompactRows + ComputeExperts + Send + Sync + 'static {}

impl<B: SelectPairs + CompactRows + ComputeExperts + Send + Sync + 'static> Backend for B {}

/// A backend and its name, or why there is none.
struct Candidate<B> {
    name: &'static str,
    backend: Result<Arc<B>, String>,
}

impl<B: Send + Sync + 'static> Candidate<B> {
    fn trial(&self, test: impl std::fmt::Display, body: impl FnOnce(&B) + Send + 'static) -> Trial {
        let backend = self.backend.clone();
        let ignored = backend.is_err() && !is_required(self.name);
        Trial::test(format!("{}::{test}", self.name), move || {
            body(&*backend?);
            Ok(())
        })
        .with_ignored_flag(ignored)
    }
}

/// Whether the environment asks for a backend; for that of `wgpu-split` with `wgpu`.
fn is_required(name: &str) -> bool {
    let required = env::var("LRMOE_REQUIRE").unwrap_or_default();
    let name = name.strip_suffix("-split").unwrap_or(name);
    required.split(',').any(|backend| backend.trim() == name)
}

/// Not where limits are low: a row has to fit in a binding.
const MANY_TERMS: &str = "experts::many_terms";

/// Of cuBLAS.
#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
fn cublas_trials<B: Backend>(candidate: &Candidate<B>) -> Vec<Trial> {
    let mut trials = expert_trials(candidate);
    trials.push(candidate.trial("experts::parts_within_rounding", parts::close));
    trials
}

/// Of the experts within rounding.
fn expert_trials<B: Backend>(candidate: &Candidate<B>) -> Vec<Trial> {
    vec![
        candidate.trial(
            "experts::every_activation",
            experts::every_activation::<_, f32>,
        ),
        candidate.trial("experts::sizes", experts::sizes::<_, f32>),
        candidate.trial("experts::long_sums", experts::long_sums::<_, f32>),
        candidate.trial(
            "experts::ends_of_activations",
            experts::ends_of_activations::<_, f32>,
        ),
        candidate.trial("experts::empty_groups", experts::empty_groups::<_, f32>),
        candidate.trial("experts::large_matrices", experts::large_matrices::<_, f32>),
        candidate.trial("experts::kept", |backend: &B| {
            kept::as_recomputed::<_, f32>(backend, true);
        }),
        candidate.trial("experts::misuse", experts::misuse),
    ]
}

/// Of the experts in bf16.
fn bf16_trials<B: ComputeExperts<bf16> + CompactRows + Send + Sync + 'static>(
    candidate: &Candidate<B>,
) -> Vec<Trial> {
    vec![
        candidate.trial(
            "experts_bf16::every_activation",
            experts::every_activation::<_, bf16>,
        ),
        candidate.trial("experts_bf16::sizes", experts::sizes::<_, bf16>),
        candidate.trial("experts_bf16::long_sums", experts::long_sums::<_, bf16>),
        candidate.trial(
            "experts_bf16::ends_of_activations",
            experts::ends_of_activations::<_, bf16>,
        ),
        candidate.trial(
            "experts_bf16::empty_groups",
            experts::empty_groups::<_, bf16>,
        ),
        candidate.trial(
            "experts_bf16::large_matrices",
            experts::large_matrices::<_, bf16>,
        ),
        candidate.trial("experts_bf16::company", experts::company::<_, bf16>),
        candidate.trial("experts_bf16::parts", parts::equal_bf16),
        candidate.trial("experts_bf16::kept", |backend: &B| {
            kept::as_recomputed::<_, bf16>(backend, false);
        }),
        candidate.trial("experts_bf16::chosen", kept::chosen::<_, bf16>),
    ]
}

fn trials<B: Backend>(candidate: &Candidate<B>) -> Vec<Trial> {
    let mut trials = expert_trials(candidate);
    trials.extend([
        candidate.trial("memory::zeros", memory::zeros),
        candidate.trial("memory::copies", memory::copies),
        candidate.trial("memory::borrows", memory::borrows),
        candidate.trial("norms::special_rows", norms::special_rows),
        candidate.trial("norms::any_bits", norms::any_bits),
        candidate.trial("score::any_factors", score::any_factors),
        candidate.trial("score::bad_factors", score::bad_factors),
        candidate.trial("score::over_ranks", score::over_ranks),
        candidate.trial("score::many_tokens", score::many_tokens),
        candidate.trial("select::any_keys", select::any_keys),
        candidate.trial("select::any_keys_over_ranks", select::any_keys_over_ranks),
        candidate.trial("select::ties", select::ties),
        candidate.trial("select::block_edges", select::block_edges),
        candidate.trial("select::many_experts", select::many_experts),
        candidate.trial("select::all_on_one_expert", select::all_on_one_expert),
        candidate.trial("select::nothing", select::nothing),
        candidate.trial("select::methods", select::methods),
        candidate.trial("select::methods_over_ranks", select::methods_over_ranks),
        candidate.trial("select::extreme_weights", select::extreme_weights),
        candidate.trial("select::bad_scores", select::bad_scores),
        candidate.trial("select::errors_on_one_rank", select::errors_on_one_rank),
        candidate.trial("compact::puts", puts::puts),
        candidate.trial("compact::gathers", compact::gathers),
        candidate.trial("compact::groups", compact::groups),
        candidate.trial("compact::adds", compact::adds),
        candidate.trial("compact::bits_are_kept", compact::bits_are_kept),
        candidate.trial("compact::moves_bf16", compact::moves_bf16),
        candidate.trial("compact::large_rows", compact::large_rows),
        candidate.trial("compact::misuse", compact::misuse),
        candidate.trial("experts::company", experts::company::<_, f32>),
        candidate.trial("experts::parts", parts::equal),
        candidate.trial("experts::chosen", kept::chosen::<_, f32>),
        candidate.trial("experts::bad_choices", kept::bad_choices),
    ]);
    trials.extend(golden::trials(candidate));
    trials
}

#[cfg(feature = "wgpu")]
fn wgpu_trials() -> Vec<Trial> {
    use lrmoe_kernels::{Wgpu, wgpu::Limits};

    let open = |name, device: Result<Wgpu, lrmoe_kernels::Error>| Candidate {
        name,
        backend: device.map(Arc::new).map_err(|error| error.to_string()),
    };
    let plain = open("wgpu", Wgpu::new());
    let split = Wgpu::with_limits(|limits| Limits {
        max_storage_buffer_binding_size: 1 << 16,
        max_compute_workgroups_per_dimension: 16,
        ..limits
    });
    let mut all = trials(&plain);
    all.extend(device::trials(&plain));
    all.push(plain.trial(MANY_TERMS, experts::many_terms));
    all.push(plain.trial("gradient_norms::refused", gradient_norms::refused));
    all.extend(trials(&open("wgpu-split", split)));
    all
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_trials() -> Vec<Trial> {
    vec![not_built("wgpu")]
}

#[cfg(feature = "cuda")]
fn cuda_trials() -> Vec<Trial> {
    use lrmoe_kernels::{Cuda, Error, cuda::Products};

    let open = |name, card: Result<Cuda, Error>| Candidate {
        name,
        backend: card.map(Arc::new).map_err(|error| error.to_string()),
    };
    let card = open("cuda", Cuda::new(0));
    let mut all = trials(&card);
    all.extend(bf16_trials(&card));
    all.extend(cuda::trials(&card, || Cuda::new(0).unwrap()));
    all.push(card.trial(MANY_TERMS, experts::many_terms));
    all.push(card.trial("gradient_norms::refused", gradient_norms::refused));
    let cublas = Cuda::new(0).and_then(|card| card.with_products(Products::CuBlas));
    all.extend(cublas_trials(&open("cublas", cublas)));
    all.extend(cuda::nvrtc_trials());
    all
}

#[cfg(not(feature = "cuda"))]
fn cuda_trials() -> Vec<Trial> {
    vec![not_built("cuda")]
}

#[cfg(feature = "cuda-emu")]
fn cuda_emu_trials() -> Vec<Trial> {
    use lrmoe_kernels::{Cuda, cuda::Products};

    let open = |name, device| Candidate {
        name,
        backend: Ok(Arc::new(device)),
    };
    let emulated = open("cuda-emu", Cuda::emulated());
    let mut all = trials(&emulated);
    all.extend(bf16_trials(&emulated));
    all.push(emulated.trial("gradient_norms::refused", gradient_norms::refused));
    all.extend(cuda::trials(&emulated, Cuda::emulated));
    let cublas = Cuda::emulated().with_products(Products::CuBlas).unwrap();
    all.extend(cublas_trials(&open("cublas-emu", cublas)));
    all
}

#[cfg(not(feature = "cuda-emu"))]
fn cuda_emu_trials() -> Vec<Trial> {
    vec![not_built("cuda-emu")]
}

/// Stands for the trials of a backend that is not in this build.
#[cfg(not(all(feature = "wgpu", feature = "cuda", feature = "cuda-emu")))]
fn not_built(name: &'static str) -> Trial {
    let missing = Candidate::<Cpu> {
        name,
        backend: Err(format!("built without the feature {name}")),
    };
    missing.trial("built", |_| ())
}

fn main() -> ExitCode {
    #[cfg(feature = "wgpu")]
    if env::args().nth(1).as_deref() == Some(device::EXHAUST_MEMORY) {
        device::exhaust_memory();
        return ExitCode::SUCCESS;
    }
    let cpu = Candidate {
        name: "cpu",
        backend: Ok(Arc::new(Cpu)),
    };
    let mut all = trials(&cpu);
    all.extend(bf16_trials(&cpu));
    all.push(cpu.trial(MANY_TERMS, experts::many_terms));
    all.push(cpu.trial("gradient_norms::of_rows", gradient_norms::of_rows));
    all.extend(wgpu_trials());
    all.extend(cuda_trials());
    all.extend(cuda_emu_trials());
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}
