//! One SwiGLU MoE layer, forward and forward + backward, gather and combine included. Prints one JSON line.
//!
//! `cargo bench -p lrmoe-kernels --bench moe -- [--dtype f32|bf16] [--tokens N] [--zipf S] [--stash true] [--reps N] [--threads N]
//! [--experts E] [--top-k K] [--width D] [--hidden F]`
//!
//! The routing is that of a peer in the same setting: top-k of Zipf weights with Gumbel noise. `executed` counts the products that
//! run, 11 of a row with recompute and 9 without; `gflops` counts 9 in both, as a layer without recompute would. The canary is the rate of
//! fused multiply-adds on all threads right before and after; `dot_gflops` that of dot products of pairs of bf16 (AVX-512-BF16), if the
//! machine has them: what AMX does is above it.

mod arguments;
mod meters;
mod routing;

use std::error::Error;

use lrmoe_kernels::{
    Activation, BackwardRows, CompactRows, Cpu, ExpertFfn, FfnElement, FfnShape, HostBuffer,
    Memory, PairRows, PreActivations, PreActivationsMut, RowIndex, SquaredNorm, StashFfn,
    WeightGradients, Weights, Workspace,
    half::bf16,
    ndarray::{ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3},
};

use arguments::Arguments;
use meters::{Times, canary, dot_rate, median, peak_bytes, timed};
use routing::{Random, route};

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
        "f32" => measure::<f32>(&settings, |x| x),
        "bf16" => measure(&settings, bf16::from_f32),
        other => Err(format!("dtype {other}, expected f32 or bf16").into()),
    })
}

/// Of all experts, in the memory that a layer keeps them in.
struct Matrices<T> {
    gate: HostBuffer<T>,
    up: HostBuffer<T>,
    down: HostBuffer<T>,
}

impl<T: FfnElement> Matrices<T> {
    fn filled(len: usize, mut value: impl FnMut() -> T) -> Result<Self, lrmoe_kernels::Error> {
        Ok(Self {
            gate: filled(len, &mut value)?,
            up: filled(len, &mut value)?,
            down: filled(len, &mut value)?,
        })
    }

    fn view(&self, shape: &FfnShape) -> Weights<'_, T> {
        let matrices = |values, [outputs, inputs]: [usize; 2]| {
            let experts = self.up.len() / (outputs * inputs);
            ArrayView3::from_shape((experts, outputs, inputs), values).expect("whole matrices")
        };
        let (inward, outward) = ([shape.hidden, shape.width], [shape.width, shape.hidden]);
        Weights {
            gate: Some(matrices(&self.gate, inward)),
            up: matrices(&self.up, inward),
            down: matrices(&self.down, outward),
        }
    }
}

impl Matrices<f32> {
    fn view_mut(&mut self, shape: &FfnShape) -> WeightGradients<'_> {
        let experts = self.up.len() / (shape.hidden * shape.width);
        let matrices = |values, [outputs, inputs]: [usize; 2]| {
            ArrayViewMut3::from_shape((experts, outputs, inputs), values).expect("whole matrices")
        };
        let (inward, outward) = ([shape.hidden, shape.width], [shape.width, shape.hidden]);
        WeightGradients {
            gate: Some(matrices(&mut self.gate, inward)),
            up: matrices(&mut self.up, inward),
            down: matrices(&mut self.down, outward),
        }
    }
}

struct Layer<T> {
    shape: FfnShape,
    offsets: Vec<usize>,
    /// Token of each row.
    tokens: RowIndex<Cpu>,
    /// Rows of each token.
    pairs: PairRows<Cpu>,
    weights: Matrices<T>,
    gradients: Matrices<f32>,
    /// Of tokens.
    x: HostBuffer<T>,
    dy: HostBuffer<T>,
    y: HostBuffer<T>,
    dx: HostBuffer<T>,
    /// Of rows.
    row_x: HostBuffer<T>,
    row_y: HostBuffer<T>,
    row_dy: HostBuffer<T>,
    row_dx: HostBuffer<T>,
    /// Pre-activations of gate and up.
    stash: Option<[HostBuffer<T>; 2]>,
    gate_weights: HostBuffer<f32>,
    ones: Vec<f32>,
    /// Gradients are written, not added to.
    write_over: Vec<bool>,
    dp: Vec<f32>,
    norms: Vec<SquaredNorm>,
    workspace: Workspace,
}

fn filled<T: FfnElement>(
    len: usize,
    mut value: impl FnMut() -> T,
) -> Result<HostBuffer<T>, lrmoe_kernels::Error> {
    let mut buffer = HostBuffer::default();
    Cpu.resize(&mut buffer, len)?;
    buffer.iter_mut().for_each(|x| *x = value());
    Ok(buffer)
}

fn rows<T>(values: &[T], width: usize) -> ArrayView2<'_, T> {
    ArrayView2::from_shape((values.len() / width, width), values).expect("whole rows")
}

fn rows_mut<T>(values: &mut [T], width: usize) -> ArrayViewMut2<'_, T> {
    ArrayViewMut2::from_shape((values.len() / width, width), values).expect("whole rows")
}

impl<T: FfnElement> Layer<T> {
    fn new(settings: &Settings, narrow: fn(f32) -> T) -> Result<Self, lrmoe_kernels::Error> {
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
        let count = routing.tokens.len();
        let token_of: Vec<_> = routing.tokens.iter().map(|&token| token as u32).collect();
        let mut pairs = vec![0; count];
        for (pair, &row) in routing.rows.iter().enumerate() {
            pairs[row] = pair as u32;
        }
        let one = experts * width * hidden;
        let mut other = Random(2);
        let mut of_tokens = |scale: f32| filled(tokens * width, || narrow(other.normal() * scale));
        let of_hidden = || filled(count * hidden, || narrow(0.0));
        let stash = if settings.stash {
            Some([of_hidden()?, of_hidden()?])
        } else {
            None
        };
        let of_rows = || filled(count * width, || narrow(0.0));
        Ok(Self {
            shape,
            offsets: routing.offsets,
            tokens: Cpu.row_index(&token_of, tokens)?,
            pairs: Cpu.pair_rows(&pairs, tokens, top_k)?,
            weights: Matrices::filled(one, || narrow((random.unit() as f32 - 0.5) * 0.07))?,
            gradients: Matrices::filled(one, || 0.0)?,
            x: of_tokens(1.0)?,
            dy: of_tokens(0.01)?,
            y: HostBuffer::default(),
            dx: HostBuffer::default(),
            row_x: of_rows()?,
            row_y: of_rows()?,
            row_dy: of_rows()?,
            row_dx: of_rows()?,
            stash,
            gate_weights: filled(count, || 1.0 / top_k as f32)?,
            ones: vec![1.0; count],
            write_over: vec![false; experts],
            dp: vec![0.0; count],
            norms: vec![SquaredNorm::default(); count],
            workspace: Workspace::new(),
        })
    }

    fn forward(&mut self, keep: bool) -> Result<(), lrmoe_kernels::Error> {
        let (shape, width) = (&self.shape, self.shape.width);
        Cpu.gather(&self.x, width, &self.tokens, &mut self.row_x)?;
        let weights = self.weights.view(shape);
        let (offsets, workspace) = (&self.offsets, &mut self.workspace);
        let (x, out) = (rows(&self.row_x, width), rows_mut(&mut self.row_y, width));
        let norms = Some(&mut self.norms[..]);
        match &mut self.stash {
            Some(stash) if keep => {
                let [gate, up] = stash.each_mut().map(|rows| rows_mut(rows, shape.hidden));
                let gate = Some(gate);
                let stash = PreActivationsMut { gate, up };
                Cpu.forward_stash(shape, &weights, offsets, x, workspace, out, norms, stash)?;
            }
            _ => Cpu.forward(shape, &weights, offsets, x, workspace, out, norms)?,
        }
        let weights = Some(&self.gate_weights);
        Cpu.combine(&self.row_y, width, &self.pairs, weights, &mut self.y)
    }

    fn backward(&mut self) -> Result<(), lrmoe_kernels::Error> {
        let (shape, width) = (&self.shape, self.shape.width);
        Cpu.gather(&self.dy, width, &self.tokens, &mut self.row_dy)?;
        let weights = self.weights.view(shape);
        let mut gradients = self.gradients.view_mut(shape);
        let of_rows = BackwardRows {
            x: rows(&self.row_x, width),
            dy: rows(&self.row_dy, width),
            gate_weights: &self.gate_weights,
            weights: &self.ones,
        };
        let (offsets, workspace) = (&self.offsets, &mut self.workspace);
        let dx = rows_mut(&mut self.row_dx, width);
        match &self.stash {
            Some([gate, up]) => Cpu.backward_stash(
                shape,
                &weights,
                offsets,
                &of_rows,
                &PreActivations {
                    gate: Some(rows(gate, shape.hidden)),
                    up: rows(up, shape.hidden),
                },
                workspace,
                dx,
                &mut self.dp,
                &mut gradients,
                &self.write_over,
            )?,
            None => Cpu.backward(
                shape,
                &weights,
                offsets,
                &of_rows,
                workspace,
                dx,
                &mut self.dp,
                &mut gradients,
                &self.write_over,
            )?,
        }
        Cpu.combine(&self.row_dx, width, &self.pairs, None, &mut self.dx)
    }
}

fn measure<T: FfnElement>(
    settings: &Settings,
    narrow: fn(f32) -> T,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut layer = Layer::new(settings, narrow)?;
    layer.forward(true)?;
    layer.backward()?;
    let (mut forward, mut both, mut canaries) = (vec![], vec![], vec![canary()]);
    for _ in 0..settings.reps {
        let (result, times) = timed(|| layer.forward(false));
        result?;
        forward.push(times);
        let (result, times) = timed(|| {
            layer.forward(true)?;
            layer.backward()
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
         \"canary_gflops\": {:?}, \"dot_gflops\": {}, \"workspace_bytes\": {}, \"rss_peak_bytes\": {}}}",
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
        dot_rate().map_or_else(|| "null".to_owned(), |rate| rate.to_string()),
        layer.workspace.bytes(),
        peak_bytes(),
    );
    Ok(())
}
