//! One MoE layer timed on one rank: dropless training against LRMoE at several retentions and in several stash modes, in turns.
//!
//! All contenders are the same layer, with the same weights and the same input, under another policy. A round runs a step of each; ratios are
//! taken within a round, so that a machine that grows slower or faster does not change them. Beside every step a canary
//! ([`Report::cores`]) says how many cores the threads had: where they had less than three quarters of what there should be, the round is
//! repeated, and if that does not help, counted.
//!
//! The input: x and dy are normal, gate weights a softmax of normal numbers, and a token's experts the top k of zipf * -ln(e + 1) + Gumbel
//! noise for expert e, so that expert e is drawn with weight (e + 1)^-zipf without replacement.

mod error;
mod measure;
mod meters;
mod report;
mod table;
mod workload;

use lrmoe_kernels::half::bf16;
use lrmoe_kernels::{Cpu, FfnShape};
use lrmoe_metric::Score;
use lrmoe_plan::{ExpertShape, Fixed, MemoryModel, Stash};

pub use error::BenchError;
pub use report::{ContenderReport, Pass, Report, Timing};

use crate::backend::{OnBackend, on_device};
use crate::config::{ConfigError, Device, Dtype};
use crate::error::Error;
use crate::layer::{Backend, LayerElement};
use crate::policy::{Policy, Selecting};
use crate::trace::synth::MOST_ZIPF;
use measure::{Contender, Subject, rounds};

/// What is timed.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Name of the sizes, for the report.
    pub model: String,
    /// Sizes and activation of an expert.
    pub shape: FfnShape,
    /// Type of weights and rows.
    pub dtype: Dtype,
    /// Where the layer computes.
    pub device: Device,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Tokens of a step.
    pub tokens: usize,
    /// Exponent of the experts' popularity; 0 makes them alike.
    pub zipf: f64,
    /// Retentions at which LRMoE runs, each in [0, 1].
    pub retentions: Vec<f64>,
    /// What pairs are judged by.
    pub score: Score,
    /// Stash modes in which each runs.
    pub stashes: Vec<Stash>,
    /// Most rows that the layer takes forward at once.
    pub chunk_rows: u64,
    /// Rounds that count.
    pub steps: usize,
    /// Rounds before them that do not.
    pub warmup: usize,
    /// Seed of weights, input and selection.
    pub seed: u64,
}

impl Settings {
    /// Checks what can be checked before anything is allocated, the memory of this machine included.
    ///
    /// # Errors
    /// [`BenchError::OutOfRange`], [`BenchError::Repeated`], [`BenchError::Stash`], [`BenchError::NoStash`], [`BenchError::RepeatedStash`],
    /// [`BenchError::Dtype`], [`BenchError::Cards`], [`BenchError::Memory`].
    pub fn check(&self) -> Result<(), BenchError> {
        for (name, value) in [
            ("experts", self.experts),
            ("width", self.shape.width),
            ("hidden", self.shape.hidden),
            ("tokens", self.tokens),
            ("steps", self.steps),
        ] {
            error::within(name, value, 1, u32::MAX as usize)?;
        }
        error::within("top-k", self.top_k, 1, self.experts)?;
        let pairs = self.tokens.saturating_mul(self.top_k);
        error::within("tokens times top-k", pairs, 1, u32::MAX as usize)?;
        error::within("chunk-rows", self.chunk_rows, 1, u64::MAX)?;
        error::within("zipf", self.zipf, 0.0, MOST_ZIPF)?;
        for (i, retention) in self.retentions.iter().enumerate() {
            error::within("retention", *retention, 0.0, 1.0)?;
            if self.retentions[..i].contains(retention) {
                return Err(BenchError::Repeated(*retention));
            }
        }
        if self.stashes.is_empty() {
            return Err(BenchError::NoStash);
        }
        for (i, stash) in self.stashes.iter().enumerate() {
            if self.stashes[..i].contains(stash) {
                return Err(BenchError::RepeatedStash(*stash));
            }
            Policy::Lrmoe(self.selecting(1.0)).check_stash(*stash)?;
        }
        if self.dtype != Dtype::F32 && self.device == Device::Wgpu {
            return Err(BenchError::Dtype {
                dtype: self.dtype,
                device: self.device,
            });
        }
        match self.device {
            Device::Cuda(Some(cards)) if cards.numbers().len() > 1 => {
                Err(BenchError::Cards(self.device))
            }
            _ => self.check_memory(),
        }
    }

    /// How pairs are chosen at a retention.
    fn selecting(&self, retention: f64) -> Selecting {
        Selecting {
            retention,
            score: self.score,
            ..Selecting::default()
        }
    }

    fn check_memory(&self) -> Result<(), BenchError> {
        let needed = self.needed_bytes();
        match meters::available_bytes() {
            Some(available) if available < needed.total() => Err(BenchError::Memory {
                weights: needed.weights,
                rows: needed.rows,
                available,
            }),
            _ => Ok(()),
        }
    }

    /// What a dropless step holds, as the memory model counts it, of rows that go both ways in chunks.
    fn needed_bytes(&self) -> Needed {
        let shape = ExpertShape {
            width: self.shape.width,
            hidden: self.shape.hidden,
            gated: self.shape.activation.is_gated(),
            bytes: self.dtype.bytes(),
        };
        let model = MemoryModel {
            shape,
            top_k: self.top_k,
            tokens: self.tokens,
            chunk_rows: self.chunk_rows,
            overlap: false,
            stash: match self.stashes[..] {
                [Stash::Recompute] => Stash::Recompute,
                _ => Stash::Full,
            },
            keeps_outputs: false,
            fixed: 0,
        };
        let rows = (self.tokens * self.top_k) as u64;
        let placement = Fixed::placement(self.experts, 1).expect("there is a rank");
        let chunk = rows.min(self.chunk_rows);
        let memory = model.of_rank(&placement, 0, 0, rows, chunk);
        // Gradients are f32. Of the optimizer's state the master weights alone are touched, as nothing is updated here.
        let bytes = shape.bytes as u64 + 2 * size_of::<f32>() as u64;
        let parameters = shape.parameters().saturating_mul(self.experts as u64);
        let weights = parameters.saturating_mul(bytes);
        // x, y, dy and dx of the trainer, and dx of each pair until all chunks are done.
        let row = (shape.bytes * shape.width) as u64;
        let kept = (4 * self.tokens as u64).saturating_add(rows);
        let buffers = memory.token_buffers().saturating_add(memory.stash);
        Needed {
            weights,
            rows: buffers.saturating_add(kept.saturating_mul(row)),
        }
    }
}

/// Bytes that a run takes.
struct Needed {
    /// Weights, their gradients and the optimizer's copy.
    weights: u64,
    /// Everything that grows with rows.
    rows: u64,
}

impl Needed {
    fn total(&self) -> u64 {
        self.weights.saturating_add(self.rows)
    }
}

/// Threads for a benchmark.
///
/// # Errors
/// [`BenchError::OutOfRange`] for none or more than 4,096, [`BenchError::Threads`].
pub fn pool(threads: usize) -> Result<rayon::ThreadPool, BenchError> {
    error::within("threads", threads, 1, 4096)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|source| BenchError::Threads { threads, source })
}

/// Times the layer on the threads of the current rayon pool. `observe` is told what is being done, and how many of how many rounds are done.
///
/// # Errors
/// What [`Settings::check`] refuses; what the layer refuses; a device that is not there, or not in this program.
pub fn bench(
    settings: &Settings,
    observe: impl FnMut(&str, usize, usize),
) -> Result<Report, Error> {
    settings.check()?;
    match (settings.dtype, settings.device) {
        (Dtype::F32, device) => on_device(device, Run { settings, observe }),
        #[cfg(feature = "cuda")]
        (Dtype::Bf16, Device::Cuda(cards)) => {
            let card = crate::backend::open_cards(cards)?.swap_remove(0);
            bench_on::<_, bf16>(card, settings, observe)
        }
        (Dtype::Bf16, Device::Cpu) => bench_on::<_, bf16>(Cpu, settings, observe),
        (Dtype::Bf16, device) => Err(ConfigError::NotBuilt { device }.into()),
    }
}

/// The arguments of [`bench`].
struct Run<'a, F> {
    settings: &'a Settings,
    observe: F,
}

impl<F: FnMut(&str, usize, usize)> OnBackend for Run<'_, F> {
    type Output = Report;

    fn run<B: Backend + Clone>(self, of_rank: impl Fn(usize) -> B) -> Result<Report, Error> {
        bench_on::<_, f32>(of_rank(0), self.settings, self.observe)
    }
}

fn bench_on<B: Backend<T> + Clone, T: LayerElement>(
    backend: B,
    settings: &Settings,
    mut observe: impl FnMut(&str, usize, usize),
) -> Result<Report, Error> {
    let all = settings.warmup + settings.steps;
    observe("filling the layer", 0, all);
    let mut subject = Subject::<B, T>::new(backend, settings)?;
    let mut contenders = Contender::all(settings);
    let rounds = rounds(settings, &mut subject, &mut contenders, |what, done| {
        observe(what, done, all);
    })?;
    Ok(report::report(
        settings,
        &subject.workload,
        &contenders,
        &rounds,
    ))
}

#[cfg(test)]
mod tests {
    use lrmoe_kernels::Activation;

    use super::*;

    /// A layer that takes milliseconds.
    pub(super) fn tiny() -> Settings {
        Settings {
            model: "tiny".to_owned(),
            shape: FfnShape {
                width: 16,
                hidden: 8,
                activation: Activation::SwiGlu,
            },
            dtype: Dtype::F32,
            device: Device::Cpu,
            experts: 4,
            top_k: 2,
            tokens: 32,
            zipf: 0.0,
            retentions: vec![0.5],
            score: Score::DownGrad,
            stashes: vec![Stash::Recompute],
            chunk_rows: 4096,
            steps: 1,
            warmup: 0,
            seed: 1,
        }
    }

    #[test]
    fn more_memory_than_there_is_is_refused_with_figures() {
        let settings = Settings {
            tokens: 1 << 28,
            shape: FfnShape {
                width: 1 << 20,
                ..tiny().shape
            },
            ..tiny()
        };
        let error = settings.check().expect_err("petabytes").to_string();
        assert!(error.contains("lower --experts"), "{error}");
    }

    #[test]
    fn memory_of_a_real_layer_is_about_what_its_parts_are() {
        let settings = Settings {
            shape: FfnShape {
                width: 2048,
                hidden: 768,
                ..tiny().shape
            },
            experts: 128,
            top_k: 8,
            tokens: 4096,
            ..tiny()
        };
        // Chunks of 4,096 rows of 4 D forward and 5 D + 3 F backward, tokens of 5 D, dx of 32,768 rows.
        let elements = 4096 * (9 * 2048 + 3 * 768) + 4096 * 5 * 2048 + 32_768 * 2048;
        for (dtype, bytes, parameter) in [(Dtype::F32, 4, 12), (Dtype::Bf16, 2, 10)] {
            let needed = Settings {
                dtype,
                ..settings.clone()
            };
            let needed = needed.needed_bytes();
            assert_eq!(needed.weights, parameter * 128 * 3 * 2048 * 768);
            let rows = bytes * elements;
            assert!(
                needed.rows > rows && needed.rows < rows + rows / 50,
                "{} for {rows}",
                needed.rows
            );
        }
    }
}
