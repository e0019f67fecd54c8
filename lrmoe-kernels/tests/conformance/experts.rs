//! The expert FFN against plain loops in f64, in f32 or bf16.

use lrmoe_kernels::{
    Activation, ComputeExperts, ExpertBuffers, FfnElement, FfnShape, PreActivationBuffers,
    RowBuffers, ndarray::Array3,
};

use crate::{
    expected::{act, oracle},
    passes::{rounded, run},
    problem::Problem,
    random::bits,
};

/// In f32, sums of up to a thousand terms in one chain come within 1e-6, and a device's exp within a few units in the last place. In bf16 each
/// rounding is within 2^-9, and what a row gives passes a few of them.
fn tolerance<T: FfnElement>() -> f64 {
    if size_of::<T>() == 2 { 1e-2 } else { 3e-6 }
}

/// `|found - expected| <= tolerance |expected|` over the whole.
#[track_caller]
pub(crate) fn assert_close<T: FfnElement>(
    what: &str,
    found: impl IntoIterator<Item = f64>,
    expected: impl IntoIterator<Item = f64>,
) {
    let (mut error, mut size) = (0.0, 0.0);
    for (found, expected) in found.into_iter().zip(expected) {
        error += (found - expected).powi(2);
        size += expected.powi(2);
    }
    let (error, size): (f64, f64) = (f64::sqrt(error), f64::sqrt(size));
    assert!(
        error <= tolerance::<T>() * size,
        "{what}: {error} of {size}"
    );
}

fn check<B: ComputeExperts<T>, T: FfnElement>(backend: &B, problem: Problem) {
    let problem = &rounded::<T>(problem);
    let found = run(backend, problem, &mut B::Scratch::default());
    let expected = oracle(problem);
    let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
    assert_close::<T>("out", wide(&found.out), expected.out);
    let norms = found.h_norms.iter().map(|norm| norm.value().sqrt());
    assert_close::<T>("h norms", norms, expected.h_norms);
    assert_close::<T>("dx", wide(&found.dx), expected.dx);
    assert_close::<T>("dp", wide(&found.dp), expected.dp);
    assert_close::<T>("up gradients", wide(&found.dup), expected.dup);
    assert_close::<T>("down gradients", wide(&found.ddown), expected.ddown);
    if let (Some(found), Some(expected)) = (&found.dgate, expected.dgate) {
        assert_close::<T>("gate gradients", wide(found), expected);
    }
}

pub(crate) fn every_activation<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    for activation in Activation::ALL {
        check(
            backend,
            Problem::random(activation, 33, 50, &[0, 70, 1, 0, 16, 3]),
        );
    }
}

pub(crate) fn sizes<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    for (width, hidden) in [
        (1, 1),
        (1, 5),
        (5, 1),
        (16, 15),
        (63, 65),
        (64, 64),
        (65, 17),
    ] {
        for activation in [Activation::SwiGlu, Activation::Relu2] {
            check(
                backend,
                Problem::random(activation, width, hidden, &[1, 0, 2, 63, 64, 65]),
            );
        }
    }
    check(
        backend,
        Problem::random(Activation::SwiGlu, 3, 2, &[1; 512]),
    );
    check(
        backend,
        Problem::random(Activation::SwiGlu, 9, 6, &[0, 0, 300, 0]),
    );
}

pub(crate) fn long_sums<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    check(
        backend,
        Problem::random(Activation::SwiGlu, 1100, 20, &[10]),
    );
    check(backend, Problem::random(Activation::Gelu, 20, 1100, &[10]));
    check(
        backend,
        Problem::random(Activation::GegluTanh, 9, 6, &[1100, 3]),
    );
    check(
        backend,
        Problem::random(Activation::Silu, 60, 40, &[900, 3, 0, 400]),
    );
}

/// Sums of more terms than the loops of some drivers have rounds, exact in any order.
pub(crate) fn many_terms<B: ComputeExperts>(backend: &B) {
    const TERMS: usize = 9 << 13;
    for (width, hidden, rows) in [(TERMS, 1, 2), (1, TERMS, 2), (1, 1, TERMS)] {
        let mut problem = Problem::random(Activation::Relu2, width, hidden, &[rows]);
        problem.x.fill(if width > 1 { 1.0 / 1024.0 } else { 1.0 });
        problem.dy.fill(1.0);
        problem.p.fill(1.0);
        problem.w.fill(1.0);
        problem.up.fill(1.0);
        problem.down.fill(1.0);
        let found = run(backend, &problem, &mut B::Scratch::default());
        let (width, hidden, rows) = (width as f32, hidden as f32, rows as f32);
        let pre = problem.x[[0, 0]] * width;
        let h = pre * pre;
        let all = |values: &[f32], expected: f32| values.iter().all(|&value| value == expected);
        assert!(all(&found.out, h * hidden));
        assert!(all(&found.ddown, h * rows));
        // dh is the sum of dy, and the slope of the activation twice the pre-activation.
        assert!(all(&found.dx, width * 2.0 * pre * hidden));
        assert!(all(
            &found.dup,
            width * 2.0 * pre * rows * problem.x[[0, 0]]
        ));
        assert!(all(&found.dp, width * h * hidden));
    }
}

/// Matrices that take several bindings where limits are low.
pub(crate) fn large_matrices<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    check(
        backend,
        Problem::random(Activation::SwiGlu, 150, 140, &[3, 0, 140]),
    );
    check(backend, Problem::random(Activation::Gelu, 140, 150, &[130]));
}

pub(crate) fn empty_groups<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    let problem = Problem::random(Activation::SwiGlu, 4, 3, &[0, 2, 0]);
    let found = run(backend, &problem, &mut B::Scratch::default());
    for gradients in [found.dgate.as_ref().unwrap(), &found.dup, &found.ddown] {
        for instance in [0, 2] {
            assert_eq!(bits(&gradients[instance * 12..][..12]), [0; 12]);
        }
    }
    let nothing = Problem::random(Activation::Gelu, 4, 3, &[0, 0]);
    let found = run(backend, &nothing, &mut B::Scratch::default());
    assert!(found.out.is_empty() && found.dp.is_empty());
    assert_eq!(bits(&[found.dup, found.ddown].concat()), [0; 48]);
    let none = Problem::random(Activation::Gelu, 4, 3, &[]);
    assert!(
        run(backend, &none, &mut B::Scratch::default())
            .dup
            .is_empty()
    );
}

/// Far out, where naive formulas cancel, overflow or make NaN of infinity times zero.
pub(crate) fn ends_of_activations<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    let values = [
        -1e30, -1e15, -100.0, -40.0, -12.0, -5.0, -2.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 5.0, 12.0,
        40.0, 1e15,
    ];
    for activation in Activation::ALL {
        let mut problem = Problem::random(activation, 1, 1, &[values.len()]);
        for (row, value) in values.into_iter().enumerate() {
            problem.x[[row, 0]] = value;
        }
        problem.dy.fill(1.0);
        problem.p.fill(1.0);
        problem.w.fill(1.0);
        problem
            .up
            .fill(if activation.is_gated() { 0.0 } else { 1.0 });
        problem.gate.iter_mut().for_each(|gate| gate.fill(1.0));
        // So that squares stay in range.
        problem.down.fill(1e-30);
        let problem = rounded::<T>(problem);
        let found = run(backend, &problem, &mut B::Scratch::default());
        for (row, value) in values.into_iter().enumerate() {
            let out = found.out[row];
            assert!(out.is_finite(), "{activation} of {value}: {out}");
            assert!(found.dx[row].is_finite(), "{activation} of {value}");
            if !activation.is_gated() && value.abs() < 6.0 {
                let (x, down) = (problem.x[[row, 0]], problem.down[[0, 0, 0]]);
                let expected = act(activation, f64::from(x)) * f64::from(down);
                let error = (f64::from(out) - expected).abs();
                assert!(
                    error <= tolerance::<T>() * expected.abs(),
                    "{activation} of {value}: {out}, expected {expected}"
                );
            }
        }
    }
}

/// What a row gives depends neither on the others nor on its place, nor on what the scratch held.
pub(crate) fn company<B: ComputeExperts<T>, T: FfnElement>(backend: &B) {
    let mut scratch = B::Scratch::default();
    for (width, hidden) in [(5, 7), (64, 65)] {
        let problem = Problem::random(Activation::SwiGlu, width, hidden, &[70, 3]);
        let all = run(backend, &problem, &mut scratch);
        let mut reversed: Vec<_> = (0..problem.rows()).rev().collect();
        reversed.sort_by_key(|&row| problem.instance_of(row));
        for rows in [reversed, vec![0], vec![69, 72], (20..73).collect()] {
            let some = run(backend, &problem.only(&rows), &mut scratch);
            for (place, &row) in rows.iter().enumerate() {
                for (all, some) in [(&all.out, &some.out), (&all.dx, &some.dx)] {
                    let (all, some) = (&all[row * width..], &some[place * width..]);
                    assert_eq!(bits(&all[..width]), bits(&some[..width]), "row {row}");
                }
                assert_eq!(all.h_norms[row], some.h_norms[place], "row {row}");
                assert_eq!(all.dp[row].to_bits(), some.dp[place].to_bits(), "row {row}");
            }
        }
    }
}

pub(crate) fn misuse<B: ComputeExperts>(backend: &B) {
    let problem = Problem::random(Activation::SwiGlu, 4, 6, &[2, 3]);
    let matrices = |values: &Array3<f32>| backend.upload(values.as_slice().unwrap()).unwrap();
    let mut weights = ExpertBuffers::<B> {
        gate: problem.gate.as_ref().map(matrices),
        up: matrices(&problem.up),
        down: matrices(&problem.down),
    };
    let x = backend.upload(problem.x.as_slice().unwrap()).unwrap();
    let message = |shape: &FfnShape, weights: &ExpertBuffers<B>, offsets: &[usize]| {
        let (mut scratch, mut out) = (B::Scratch::default(), Default::default());
        let result = backend.forward(
            shape,
            weights,
            offsets,
            &x,
            &mut scratch,
            &mut out,
            None,
            None,
        );
        result.unwrap_err().to_string()
    };
    let shape = problem.shape;
    let expected = "shape of row offsets is [2], expected [3]";
    assert_eq!(message(&shape, &weights, &[0, 5]), expected);
    assert_eq!(
        message(&shape, &weights, &[1, 2, 5]),
        "row offsets begin at 1, not 0"
    );
    let expected = "row offset 5 of instance 1 is below its start 6";
    assert_eq!(message(&shape, &weights, &[0, 6, 5]), expected);
    let expected = "row offsets end at 4, but there are 5 rows";
    assert_eq!(message(&shape, &weights, &[0, 2, 4]), expected);
    let narrow = FfnShape { width: 3, ..shape };
    let expected = "shape of down weights is [48], expected [36]";
    weights.up = backend.upload(&[0.0; 36]).unwrap();
    assert_eq!(message(&narrow, &weights, &[0, 2, 5]), expected);
    weights.up = matrices(&problem.up);
    let endless = FfnShape {
        width: usize::MAX,
        ..shape
    };
    let expected = "shape of up weights is [48], expected [0]";
    assert_eq!(message(&endless, &weights, &[0, 2, 5]), expected);
    let inputs = RowBuffers::<B> {
        x: &x,
        dy: &x,
        gate_weights: &backend.upload(&problem.p).unwrap(),
        weights: &backend.upload(&problem.w).unwrap(),
    };
    let message_kept = |kept: Option<&mut PreActivationBuffers<B>>, accumulate: &[bool]| {
        let (mut scratch, mut dx, mut dp) = Default::default();
        let mut gradients = ExpertBuffers::<B> {
            gate: Some(Default::default()),
            up: Default::default(),
            down: Default::default(),
        };
        let result = backend.backward(
            &shape,
            &weights,
            &[0, 2, 5],
            &inputs,
            kept,
            &mut scratch,
            &mut dx,
            &mut dp,
            &mut gradients,
            accumulate,
        );
        result.unwrap_err().to_string()
    };
    let message_back = |accumulate: &[bool]| message_kept(None, accumulate);
    let mut kept = PreActivationBuffers::<B>::default();
    let expected = "shape of gate pre-activations is [0], expected [30]";
    assert_eq!(message_kept(Some(&mut kept), &[false; 2]), expected);
    kept.gate = backend.upload(&[0.0; 30]).unwrap();
    let expected = "shape of up pre-activations is [0], expected [30]";
    assert_eq!(message_kept(Some(&mut kept), &[false; 2]), expected);
    let expected = "shape of accumulate is [3], expected [2]";
    assert_eq!(message_back(&[false; 3]), expected);
    let expected = "shape of gate gradients is [0], expected [48]";
    assert_eq!(message_back(&[false, true]), expected);
    weights.gate = None;
    let expected = "swiglu is gated, but there are no gate weights";
    assert_eq!(message(&shape, &weights, &[0, 2, 5]), expected);
}
