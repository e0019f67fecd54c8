//! One rank's experts of the size of Qwen3-30B-A3B: 8 instances, D = 2048, F = 768.

use divan::{Bencher, counter::ItemsCount};
use lrmoe_kernels::{
    Activation, BackwardRows, Cpu, ExpertFfn, FfnShape, WeightGradients, Weights, Workspace,
    ndarray::{Array2, Array3},
};

const INSTANCES: usize = 8;
const SHAPE: FfnShape = FfnShape {
    width: 2048,
    hidden: 768,
    activation: Activation::SwiGlu,
};
/// Rows of each instance.
const ROWS: [usize; 4] = [1, 16, 64, 256];

fn main() {
    divan::main();
}

fn matrices(outputs: usize, inputs: usize) -> Array3<f32> {
    let value = |(e, o, i)| ((e * 31 + o * 17 + i * 7) % 23) as f32 * 0.002 - 0.022;
    Array3::from_shape_fn((INSTANCES, outputs, inputs), value)
}

fn rows(each: usize) -> Array2<f32> {
    let value = |(r, d)| ((r * 13 + d * 5) % 19) as f32 * 0.1 - 0.9;
    Array2::from_shape_fn((INSTANCES * each, SHAPE.width), value)
}

fn offsets(each: usize) -> Vec<usize> {
    (0..=INSTANCES).map(|i| i * each).collect()
}

/// Multiply-adds of one product of a row with each of the three matrices, counted as items.
fn products(each: usize) -> ItemsCount {
    ItemsCount::new(INSTANCES * each * SHAPE.width * SHAPE.hidden * 3)
}

#[divan::bench(args = ROWS, sample_count = 10)]
fn forward(bencher: Bencher<'_, '_>, each: usize) {
    let (inner, outer) = (
        matrices(SHAPE.hidden, SHAPE.width),
        matrices(SHAPE.width, SHAPE.hidden),
    );
    let weights = Weights {
        gate: Some(inner.view()),
        up: inner.view(),
        down: outer.view(),
    };
    let (offsets, x) = (offsets(each), rows(each));
    let (mut out, mut workspace) = (x.clone(), Workspace::new());
    bencher.counter(products(each)).bench_local(|| {
        let out = out.view_mut();
        Cpu.forward(
            &SHAPE,
            &weights,
            &offsets,
            x.view(),
            &mut workspace,
            out,
            None,
        )
    });
}

/// 8/3 of the multiply-adds counted: gate and up once more, then three products each for dgrad and wgrad.
#[divan::bench(args = ROWS, sample_count = 10)]
fn backward(bencher: Bencher<'_, '_>, each: usize) {
    let (inner, outer) = (
        matrices(SHAPE.hidden, SHAPE.width),
        matrices(SHAPE.width, SHAPE.hidden),
    );
    let weights = Weights {
        gate: Some(inner.view()),
        up: inner.view(),
        down: outer.view(),
    };
    let (mut gate, mut up, mut down) = (inner.clone(), inner.clone(), outer.clone());
    let mut gradients = WeightGradients {
        gate: Some(gate.view_mut()),
        up: up.view_mut(),
        down: down.view_mut(),
    };
    let (offsets, x, ones) = (offsets(each), rows(each), vec![1.0; INSTANCES * each]);
    let inputs = BackwardRows {
        x: x.view(),
        dy: x.view(),
        gate_weights: &ones,
        weights: &ones,
    };
    let (mut dx, mut dp, mut workspace) = (x.clone(), ones.clone(), Workspace::new());
    bencher.counter(products(each)).bench_local(|| {
        let (dx, gradients) = (dx.view_mut(), &mut gradients);
        Cpu.backward(
            &SHAPE,
            &weights,
            &offsets,
            &inputs,
            &mut workspace,
            dx,
            &mut dp,
            gradients,
            &[false; INSTANCES],
        )
    });
}
