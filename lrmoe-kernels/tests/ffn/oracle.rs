//! Against plain loops in f64, for every activation, with poisoned buffers.

use crate::{
    expected::{act, oracle},
    problem::{Problem, poisoned},
};
use lrmoe_kernels::{Activation, Workspace, ndarray::Array3};

/// `|got - expected| <= 1e-6 |expected|` over the whole; f32 sums of a few hundred terms come within 3e-7.
#[track_caller]
fn assert_close(
    what: &str,
    got: impl IntoIterator<Item = f64>,
    expected: impl IntoIterator<Item = f64>,
) {
    let (mut error, mut size) = (0.0, 0.0);
    for (got, expected) in got.into_iter().zip(expected) {
        error += (got - expected).powi(2);
        size += expected.powi(2);
    }
    assert!(
        error.sqrt() <= 1e-6 * size.sqrt(),
        "{what}: {} of {}",
        error.sqrt(),
        size.sqrt()
    );
}

fn wide(values: &Array3<f32>) -> impl Iterator<Item = f64> {
    values.iter().map(|&v| f64::from(v))
}

fn check(problem: &Problem) {
    let expected = oracle(problem);
    let got = problem.run(&mut poisoned(problem));
    let f64s = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
    assert_close("out", f64s(got.out.as_slice().unwrap()), expected.out);
    assert_close(
        "h norms",
        got.h_norms.iter().map(|n| n.value().sqrt()),
        expected.h_norms,
    );
    assert_close("dx", f64s(got.dx.as_slice().unwrap()), expected.dx);
    assert_close("dp", f64s(&got.dp), expected.dp);
    assert_close("up gradients", wide(&got.dup), expected.dup);
    assert_close("down gradients", wide(&got.ddown), expected.ddown);
    if let (Some(got), Some(expected)) = (&got.dgate, expected.dgate) {
        assert_close("gate gradients", wide(got), expected);
    }
}

#[test]
fn every_activation() {
    for activation in Activation::ALL {
        check(&Problem::random(activation, 33, 50, &[0, 70, 1, 0, 16, 3]));
    }
}

#[test]
fn sizes_about_one() {
    for (width, hidden) in [(1, 1), (1, 5), (5, 1), (2, 2)] {
        for activation in [Activation::SwiGlu, Activation::Relu2] {
            check(&Problem::random(activation, width, hidden, &[1, 0, 2, 65]));
        }
    }
}

#[test]
fn long_sums() {
    check(&Problem::random(Activation::SwiGlu, 1100, 20, &[10]));
    check(&Problem::random(Activation::Gelu, 20, 1100, &[10]));
    check(&Problem::random(Activation::GegluTanh, 9, 6, &[1100, 3]));
}

#[test]
fn groups_without_rows_get_zeros() {
    let problem = Problem::random(Activation::SwiGlu, 4, 3, &[0, 2, 0]);
    let got = problem.run(&mut poisoned(&problem));
    for e in [0, 2] {
        for gradient in [got.dgate.as_ref().unwrap(), &got.dup, &got.ddown] {
            assert!(
                gradient
                    .outer_iter()
                    .nth(e)
                    .unwrap()
                    .iter()
                    .all(|g| g.to_bits() == 0)
            );
        }
    }
    let nothing = Problem::random(Activation::Gelu, 4, 3, &[0, 0]);
    let got = nothing.run(&mut Workspace::new());
    assert!(got.dup.iter().chain(&got.ddown).all(|g| g.to_bits() == 0));
    Problem::random(Activation::Gelu, 4, 3, &[]).run(&mut Workspace::new());
}

/// Far out, where naive formulas cancel, overflow or make NaN of infinity times zero.
#[test]
fn activations_at_the_ends() {
    for activation in Activation::ALL {
        for x in [
            -1e30, -1e15, -40.0, -12.0, -5.0, -1.0, 0.0, 1.0, 5.0, 12.0, 40.0, 1e15,
        ] {
            // down = 1e-30 keeps squares in range; dy = 1 and p = 1, so that dx is the slope times 1e-30.
            let mut problem = Problem::random(activation, 1, 1, &[1]);
            problem.x.fill(x);
            problem.dy.fill(1.0);
            (problem.p, problem.w) = (vec![1.0], vec![1.0]);
            problem
                .up
                .fill(if activation.is_gated() { 0.0 } else { 1.0 });
            problem.gate.iter_mut().for_each(|gate| gate.fill(1.0));
            problem.down.fill(1e-30);
            let got = problem.run(&mut Workspace::new());
            assert!(
                got.out[[0, 0]].is_finite() || activation == Activation::Relu2,
                "{activation} {x}"
            );
            assert!(!got.dx[[0, 0]].is_nan(), "{activation} {x}");
            if !activation.is_gated() && x.abs() < 6.0 {
                let (f, x) = (f64::from(got.out[[0, 0]]), f64::from(x));
                let expected = act(activation, x) * 1e-30;
                assert!(
                    (f - expected).abs() <= 1e-6 * expected.abs(),
                    "{activation} {x}"
                );
            }
        }
    }
}

#[test]
fn a_workspace_stops_growing() {
    let problem = Problem::random(Activation::SwiGlu, 16, 24, &[100, 5, 30]);
    let mut workspace = Workspace::new();
    assert_eq!(workspace.bytes(), 0);
    problem.run(&mut workspace);
    let bytes = workspace.bytes();
    assert!(bytes > 0);
    problem.only(&[3, 110]).run(&mut workspace);
    problem.run(&mut workspace);
    assert_eq!(workspace.bytes(), bytes);
}
