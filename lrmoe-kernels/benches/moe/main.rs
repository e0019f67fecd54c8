//! One SwiGLU MoE layer, forward and forward + backward, gather and combine included. Prints one JSON line.
//!
//! `cargo bench -p lrmoe-kernels --bench moe -- [--dtype f32|bf16] [--tokens N] [--zipf S] [--stash true] [--reps N] [--threads N]
//! [--experts E] [--top-k K] [--width D] [--hidden F]`
//!
//! The routing is that of a peer in the same setting: top-k of Zipf weights with Gumbel noise. `executed` counts the products that
//! run, 11 of a row with recompute and 9 without; `gflops` counts 9 in both, as a layer without recompute would. The canary is the rate of
//! fused multiply-adds on all threads right before and after.

mod arguments;
mod meters;
mod routing;

use std::error::Error;

use lrmoe_kernels::{
    Activation, BackwardRows, Cpu, ExpertFfn, FfnElement, FfnShape, SquaredNorm, StashFfn,
    WeightGradients, Weights, Workspace,
    half::bf16,
    ndarray::{Array2, Array3},
};
use rayon::prelude::*;

use arguments::Arguments;
use meters::{Times, canary, median, peak_bytes, timed};
use routing::{Random, Routing, route};

#[derive(Debug)]
struct Settings {
    dtype: String,
    tokens: usize,
    zipf: f64,
    stash: bool,
    reps: usize,
    threads: usize,
    experts: usize,
    top_k: usize,
    shape: FfnShape,
}

impl Settings {
    fn parse() -> Result<Self, Box<dyn Error + Send + Sync>> {
        let given = Arguments::parse()?;
        let number = |name, default| given.value::<usize>(name, default);
        Ok(Self {
            dtype: given.text("dtype", "f32").to_owned(),
            tokens: number("tokens", "4096")?,
            zipf: given.value("zipf", "0")?,
            stash: given.value("stash", "false")?,
            reps: number("reps", "3")?,
            threads: number("threads", "2")?,
            experts: number("experts", "128")?,
            top_k: number("top-k", "8")?,
            shape: FfnShape {
                width: number("width", "2048")?,
                hidden: number("hidden", "768")?,
                activation: Activation::SwiGlu,
            },
        })
    }
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let settings = Settings::parse()?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(settings.threads)
        .build()?;
    pool.install(|| match settings.dtype.as_str() {
        "f32" => measure::<f32>(&settings, |x| x, |x| x),
        "bf16" => measure(&settings, bf16::from_f32, bf16::to_f32),
        other => Err(format!("dtype {other}, expected f32 or bf16").into()),
    })
}

struct Layer<T> {
    shape: FfnShape,
    routing: Routing,
    gate: Array3<T>,
    up: Array3<T>,
    down: Array3<T>,
    gradients: [Array3<f32>; 3],
    /// Of tokens.
    x: Array2<T>,
    dy: Array2<T>,
    y: Array2<T>,
    dx: Array2<T>,
    /// Of rows.
    row_x: Array2<T>,
    row_y: Array2<T>,
    row_dy: Array2<T>,
    row_dx: Array2<T>,
    stash: Option<Array2<T>>,
    gate_weights: Vec<f32>,
    ones: Vec<f32>,
    /// Gradients are written, not added to.
    write_over: Vec<bool>,
    dp: Vec<f32>,
    norms: Vec<SquaredNorm>,
    workspace: Workspace,
}

fn gather<T: Copy + Send + Sync>(from: &Array2<T>, tokens: &[usize], to: &mut Array2<T>) {
    let width = from.ncols();
    let to = to.as_slice_mut().expect("standard layout");
    to.par_chunks_exact_mut(width)
        .zip(tokens)
        .with_min_len(16)
        .for_each(|(to, &token)| {
            to.copy_from_slice(from.row(token).as_slice().expect("standard layout"));
        });
}

/// Between f32 and what is stored.
#[derive(Clone, Copy)]
struct Convert<T> {
    narrow: fn(f32) -> T,
    widen: fn(T) -> f32,
}

/// Each token's rows times their weights, added in the order of slots.
fn combine<T: Copy + Send + Sync>(
    from: &Array2<T>,
    rows: &[usize],
    weights: &[f32],
    to: &mut Array2<T>,
    convert: Convert<T>,
) {
    let (width, top_k) = (from.ncols(), rows.len() / to.nrows());
    let from = from.as_slice().expect("standard layout");
    let to = to.as_slice_mut().expect("standard layout");
    to.par_chunks_exact_mut(width)
        .zip(rows.par_chunks_exact(top_k))
        .with_min_len(4)
        .for_each(|(to, rows)| {
            let mut sums = vec![0.0; width];
            for &row in rows {
                for (sum, &x) in sums.iter_mut().zip(&from[row * width..]) {
                    *sum += weights[row] * (convert.widen)(x);
                }
            }
            to.iter_mut()
                .zip(sums)
                .for_each(|(to, sum)| *to = (convert.narrow)(sum));
        });
}

impl<T: FfnElement + std::fmt::Debug> Layer<T> {
    fn new(settings: &Settings, narrow: fn(f32) -> T) -> Self {
        let Settings {
            shape,
            tokens,
            experts,
            top_k,
            ..
        } = *settings;
        let FfnShape { width, hidden, .. } = shape;
        let mut random = Random(1);
        let routing = route([tokens, experts, top_k], settings.zipf, &mut random);
        let rows = routing.tokens.len();
        let zeros = |rows: usize| Array2::from_elem((rows, width), narrow(0.0));
        let mut matrices = |outputs, inputs| {
            Array3::from_shape_simple_fn((experts, outputs, inputs), || {
                narrow((random.unit() as f32 - 0.5) * 0.07)
            })
        };
        let (gate, up, down) = (
            matrices(hidden, width),
            matrices(hidden, width),
            matrices(width, hidden),
        );
        let gradients = [[hidden, width], [hidden, width], [width, hidden]];
        let mut tokens_of = |scale: f32| {
            Array2::from_shape_simple_fn((tokens, width), || narrow(random.normal() * scale))
        };
        Self {
            shape,
            gate,
            up,
            down,
            gradients: gradients.map(|[a, b]| Array3::from_elem((experts, a, b), 0.0)),
            x: tokens_of(1.0),
            dy: tokens_of(0.01),
            y: zeros(tokens),
            dx: zeros(tokens),
            row_x: zeros(rows),
            row_y: zeros(rows),
            row_dy: zeros(rows),
            row_dx: zeros(rows),
            stash: settings
                .stash
                .then(|| Array2::from_elem((rows, 2 * hidden), narrow(0.0))),
            gate_weights: vec![1.0 / top_k as f32; rows],
            ones: vec![1.0; rows],
            write_over: vec![false; experts],
            dp: vec![0.0; rows],
            norms: vec![SquaredNorm::default(); rows],
            workspace: Workspace::new(),
            routing,
        }
    }

    fn forward(&mut self, keep: bool, convert: Convert<T>) -> Result<(), lrmoe_kernels::Error> {
        let weights = Weights {
            gate: Some(self.gate.view()),
            up: self.up.view(),
            down: self.down.view(),
        };
        gather(&self.x, &self.routing.tokens, &mut self.row_x);
        let (offsets, x, out) = (
            &self.routing.offsets,
            self.row_x.view(),
            self.row_y.view_mut(),
        );
        let (workspace, norms) = (&mut self.workspace, Some(&mut self.norms[..]));
        match &mut self.stash {
            Some(stash) if keep => {
                Cpu.forward_stash(
                    &self.shape,
                    &weights,
                    offsets,
                    x,
                    workspace,
                    out,
                    norms,
                    stash.view_mut(),
                )?;
            }
            _ => Cpu.forward(&self.shape, &weights, offsets, x, workspace, out, norms)?,
        }
        combine(
            &self.row_y,
            &self.routing.rows,
            &self.gate_weights,
            &mut self.y,
            convert,
        );
        Ok(())
    }

    fn backward(&mut self, convert: Convert<T>) -> Result<(), lrmoe_kernels::Error> {
        let weights = Weights {
            gate: Some(self.gate.view()),
            up: self.up.view(),
            down: self.down.view(),
        };
        let [gate, up, down] = &mut self.gradients;
        let mut gradients = WeightGradients {
            gate: Some(gate.view_mut()),
            up: up.view_mut(),
            down: down.view_mut(),
        };
        gather(&self.dy, &self.routing.tokens, &mut self.row_dy);
        let rows = BackwardRows {
            x: self.row_x.view(),
            dy: self.row_dy.view(),
            gate_weights: &self.gate_weights,
            weights: &self.ones,
        };
        let (offsets, workspace) = (&self.routing.offsets, &mut self.workspace);
        let dx = self.row_dx.view_mut();
        match &self.stash {
            Some(stash) => Cpu.backward_stash(
                &self.shape,
                &weights,
                offsets,
                &rows,
                stash.view(),
                workspace,
                dx,
                &mut self.dp,
                &mut gradients,
                &self.write_over,
            )?,
            None => Cpu.backward(
                &self.shape,
                &weights,
                offsets,
                &rows,
                workspace,
                dx,
                &mut self.dp,
                &mut gradients,
                &self.write_over,
            )?,
        }
        combine(
            &self.row_dx,
            &self.routing.rows,
            &self.ones,
            &mut self.dx,
            convert,
        );
        Ok(())
    }
}

fn measure<T: FfnElement + std::fmt::Debug>(
    settings: &Settings,
    narrow: fn(f32) -> T,
    widen: fn(T) -> f32,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let convert = Convert { narrow, widen };
    let mut layer = Layer::new(settings, narrow);
    layer.forward(true, convert)?;
    layer.backward(convert)?;
    let (mut forward, mut both, mut canaries) = (vec![], vec![], vec![canary()]);
    for _ in 0..settings.reps {
        let (result, times) = timed(|| layer.forward(false, convert));
        result?;
        forward.push(times);
        let (result, times) = timed(|| {
            layer
                .forward(true, convert)
                .and_then(|()| layer.backward(convert))
        });
        result?;
        both.push(times);
        canaries.push(canary());
    }
    let product =
        2 * settings.tokens * settings.top_k * settings.shape.width * settings.shape.hidden;
    let gflop = |products: usize| (products * product) as f64 / 1e9;
    let wall = |times: &[Times]| median(times.iter().map(|t| t.wall).collect());
    let cpu = |times: &[Times]| median(times.iter().map(|t| t.cpu).collect());
    let best = |times: &[Times]| times.iter().map(|t| t.wall).fold(f64::INFINITY, f64::min);
    let executed = if settings.stash { 9 } else { 11 };
    println!(
        "{{\"ours\": \"lrmoe\", \"dtype\": \"{}\", \"stash\": {}, \"tokens\": {}, \"zipf\": {}, \"threads\": {}, \
         \"forward_s\": {:.4}, \"forward_gflops\": {:.1}, \"forward_backward_s\": {:.4}, \"forward_backward_best_s\": {:.4}, \
         \"forward_backward_gflops\": {:.1}, \"executed_gflops\": {:.1}, \"forward_cpu_s\": {:.3}, \"forward_backward_cpu_s\": {:.3}, \
         \"canary_gflops\": {:?}, \"workspace_bytes\": {}, \"rss_peak_bytes\": {}}}",
        settings.dtype,
        settings.stash,
        settings.tokens,
        settings.zipf,
        settings.threads,
        wall(&forward),
        gflop(3) / wall(&forward),
        wall(&both),
        best(&both),
        gflop(9) / wall(&both),
        gflop(executed) / wall(&both),
        cpu(&forward),
        cpu(&both),
        canaries,
        layer.workspace.bytes(),
        peak_bytes(),
    );
    Ok(())
}
