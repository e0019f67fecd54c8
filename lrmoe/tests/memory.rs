//! What a step of the layer asks the heap for, on the CPU.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe::layer::{ExpertParameters, LayerConfig, LayerElement, MoeLayer};
use lrmoe::policy::{Policy, Selecting};
use lrmoe_comm::Solo;
use lrmoe_kernels::half::bf16;
use lrmoe_kernels::{Activation, Cpu, FfnShape, HostBuffer, Memory};
use lrmoe_metric::Score;
use lrmoe_plan::{Stash, Topology};
use ndarray::Array2;

struct Counting;

/// Bytes allocated so far, bytes held now, and the most that were held.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    ALLOCATED.fetch_add(bytes, Relaxed);
    MOST.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is passed on to the system allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `pointer` came from `alloc` above and so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Sizes of a layer and of its batch.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    width: usize,
    hidden: usize,
    experts: usize,
    top_k: usize,
    chunk_rows: u64,
}

const SMALL: Sizes = Sizes {
    tokens: 4096,
    width: 64,
    hidden: 32,
    experts: 16,
    top_k: 4,
    chunk_rows: 512,
};

struct Step<T: LayerElement> {
    layer: MoeLayer<Cpu, T>,
    x: HostBuffer<T>,
    dy: HostBuffer<T>,
    y: HostBuffer<T>,
    dx: HostBuffer<T>,
    dp: Array2<f32>,
    expert_ids: Array2<i32>,
    gate_weights: Array2<f32>,
    number: u32,
}

impl<T: LayerElement> Step<T> {
    fn new(sizes: &Sizes, policy: Policy, stash: Stash) -> Self {
        let &Sizes {
            tokens,
            width,
            hidden,
            experts,
            top_k,
            chunk_rows,
        } = sizes;
        let config = LayerConfig {
            layer: 0,
            seed: 1,
            shape: FfnShape {
                width,
                hidden,
                activation: Activation::SwiGlu,
            },
            experts,
            top_k,
            topology: Topology::new(1, 1).expect("one rank"),
            slots: vec![experts as u32],
            chunk_rows,
            overlap: false,
            capacities: None,
            policy,
            stash,
            profile_decay: 0.9,
        };
        let matrix = || vec![0.01; width * hidden];
        let init = |_| ExpertParameters {
            gate: Some(matrix()),
            up: matrix(),
            down: matrix(),
        };
        let rows = |scale: f32| {
            let value = |i: usize| T::from_f32(scale * ((i * 37 % 101) as f32 - 50.0));
            let values: Vec<T> = (0..tokens * width).map(value).collect();
            Cpu.upload(&values).expect("memory")
        };
        Self {
            layer: MoeLayer::on(Cpu, config, 0, init).expect("a layer"),
            x: rows(0.01),
            dy: rows(0.001),
            y: HostBuffer::default(),
            dx: HostBuffer::default(),
            dp: Array2::zeros((tokens, top_k)),
            expert_ids: Array2::from_shape_fn((tokens, top_k), |(token, slot)| {
                ((token * 7 + slot * 5) % experts) as i32
            }),
            gate_weights: Array2::from_elem((tokens, top_k), 0.25),
            number: 0,
        }
    }

    fn run(&mut self) {
        self.number += 1;
        let (ids, p) = (self.expert_ids.view(), self.gate_weights.view());
        let step = Some(self.number);
        self.layer
            .forward_rows(&mut Solo, &self.x, ids, p, step, &mut self.y)
            .expect("forward");
        let dp = self.dp.view_mut();
        self.layer
            .backward_rows(&mut Solo, &self.x, &self.dy, &mut self.dx, dp)
            .expect("backward");
    }
}

fn lrmoe(retention: f64) -> Policy {
    Policy::Lrmoe(Selecting {
        retention,
        ..Selecting::default()
    })
}

/// Policies in the stash modes that they have.
fn cases() -> [(Policy, Stash); 6] {
    let early = |score| {
        Policy::Lrmoe(Selecting {
            score,
            ..Selecting::default()
        })
    };
    [
        (Policy::Dropless, Stash::Recompute),
        (lrmoe(0.5), Stash::Recompute),
        (Policy::Dropless, Stash::Full),
        (lrmoe(0.5), Stash::Full),
        (early(Score::Gate), Stash::ForwardSelect),
        (early(Score::Forward), Stash::ForwardSelect),
    ]
}

/// Bytes that a step allocates once the buffers have their sizes; on one thread, which makes them repeat.
fn later_step<T: LayerElement>(sizes: &Sizes, (policy, stash): &(Policy, Stash)) -> usize {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    pool.expect("a thread").install(|| {
        let mut step = Step::<T>::new(sizes, policy.clone(), *stash);
        step.run();
        step.run();
        let before = ALLOCATED.load(Relaxed);
        step.run();
        ALLOCATED.load(Relaxed) - before
    })
}

/// No row is allocated anew, however wide, but for two that each thread works in.
fn later_steps_allocate_no_rows<T: LayerElement>() -> Result<(), Failed> {
    for case in cases() {
        let wide = Sizes {
            width: 512,
            ..SMALL
        };
        let bytes = [&SMALL, &wide].map(|sizes| later_step::<T>(sizes, &case));
        let name = format!("{} {}", case.0.name(), case.1);
        println!("{name}: {bytes:?} bytes at widths 64 and 512");
        if bytes[0].abs_diff(bytes[1]) > 16 << 10 {
            return Err(format!("{name}: {bytes:?} bytes").into());
        }
    }
    Ok(())
}

/// Nor is a list of pairs: eight times the rows, in chunks eight times as large, take what the rows took.
fn later_steps_allocate_no_lists<T: LayerElement>() -> Result<(), Failed> {
    let few = Sizes {
        tokens: 8192,
        width: 16,
        hidden: 8,
        chunk_rows: 4096,
        ..SMALL
    };
    let many = Sizes {
        tokens: 8 * few.tokens,
        chunk_rows: 8 * few.chunk_rows,
        ..few
    };
    // Selection counts keys in two tables of at most 2^14 numbers each, how many of which it needs depends on the scores.
    for case in cases() {
        let tables = if case.0 == Policy::Dropless {
            0
        } else {
            8 << 14
        };
        let bytes = [&few, &many].map(|sizes| later_step::<T>(sizes, &case));
        let name = format!("{} {}", case.0.name(), case.1);
        let added = (many.tokens - few.tokens) * few.top_k;
        println!("{name}: {bytes:?} bytes, {added} pairs more");
        if bytes[1] > bytes[0] + tables {
            return Err(format!("{name}: {bytes:?} bytes, {added} pairs more").into());
        }
    }
    Ok(())
}

/// Qwen3-30B-A3B's layer at 4,096 tokens, but for the number of experts, on which token buffers do not depend, in chunks of 1,280
/// rows. With 128 experts PyTorch's grouped_mm takes 0.82 GB above weights and gradients in f32.
fn a_step_takes_little<T: LayerElement>(bounds: [usize; 2]) -> Result<(), Failed> {
    let sizes = Sizes {
        tokens: 4096,
        width: 2048,
        hidden: 768,
        experts: 16,
        top_k: 8,
        chunk_rows: 1280,
    };
    for (policy, most) in [Policy::Dropless, lrmoe(0.5)].into_iter().zip(bounds) {
        let mut step = Step::<T>::new(&sizes, policy.clone(), Stash::Recompute);
        let before = HELD.load(Relaxed);
        MOST.store(before, Relaxed);
        step.run();
        let taken = MOST.load(Relaxed) - before;
        println!("{}: {:.1} MB", policy.name(), taken as f64 / 1e6);
        if taken > most {
            return Err(format!("{}: {taken} bytes", policy.name()).into());
        }
    }
    Ok(())
}

fn trials<T: LayerElement>(dtype: &str, bounds: [usize; 2]) -> [Trial; 3] {
    let trial =
        |name, run: fn() -> Result<(), Failed>| Trial::test(format!("{dtype}::{name}"), run);
    [
        trial(
            "later_steps_allocate_no_rows",
            later_steps_allocate_no_rows::<T>,
        ),
        trial(
            "later_steps_allocate_no_lists",
            later_steps_allocate_no_lists::<T>,
        ),
        Trial::test(
            format!("{dtype}::a_step_takes_half_the_memory_of_pytorch"),
            move || a_step_takes_little::<T>(bounds),
        ),
    ]
}

fn main() -> ExitCode {
    // The counts are those of the process: one test at a time.
    let arguments = Arguments {
        test_threads: Some(1),
        ..Arguments::from_args()
    };
    let [f32, bf16] = [
        trials::<f32>("f32", [410_000_000, 280_000_000]),
        trials::<bf16>("bf16", [240_000_000, 180_000_000]),
    ];
    let trials = f32.into_iter().chain(bf16).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
