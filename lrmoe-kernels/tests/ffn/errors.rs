//! Bad input is refused with a message that states the values.

use crate::problem::Problem;
use lrmoe_kernels::{
    Activation, BackwardRows, Cpu, Error, ExpertFfn, FfnShape, WeightGradients, Weights, Workspace,
    ndarray::{Array2, ArrayView2, s},
};

fn problem() -> Problem {
    Problem::random(Activation::SwiGlu, 4, 6, &[2, 3])
}

fn forward(p: &Problem, weights: &Weights<'_>, offsets: &[usize], x: ArrayView2<'_, f32>) -> Error {
    let mut out = Array2::zeros((5, 4));
    let workspace = &mut Workspace::new();
    Cpu.forward(
        &p.shape,
        weights,
        offsets,
        x,
        workspace,
        out.view_mut(),
        None,
    )
    .unwrap_err()
}

#[test]
fn offsets() {
    let p = problem();
    let message = |offsets: &[usize]| forward(&p, &p.weights(), offsets, p.x.view()).to_string();
    assert_eq!(
        message(&[0, 5]),
        "shape of row offsets is [2], expected [3]"
    );
    assert_eq!(message(&[1, 2, 5]), "row offsets begin at 1, not 0");
    assert_eq!(
        message(&[0, 6, 5]),
        "row offset 5 of instance 1 is below its start 6"
    );
    assert_eq!(
        message(&[0, 2, 4]),
        "row offsets end at 4, but there are 5 rows"
    );
}

#[test]
fn gates() {
    let mut p = problem();
    let none = Weights {
        gate: None,
        ..p.weights()
    };
    let error = forward(&p, &none, &p.offsets, p.x.view());
    assert_eq!(
        error.to_string(),
        "swiglu is gated, but there are no gate weights"
    );
    p.shape.activation = Activation::Gelu;
    let error = forward(&p, &p.weights(), &p.offsets, p.x.view());
    assert_eq!(
        error.to_string(),
        "gelu is not gated, but there are gate weights"
    );
}

#[test]
fn shapes_and_layouts() {
    let p = problem();
    let fewer = Weights {
        down: p.down.slice(s![..1, .., ..]),
        ..p.weights()
    };
    let error = forward(&p, &fewer, &p.offsets, p.x.view());
    assert_eq!(
        error.to_string(),
        "shape of down weights is [1, 4, 6], expected [2, 4, 6]"
    );
    let narrow = p.x.slice(s![.., ..3]);
    let error = forward(&p, &p.weights(), &p.offsets, narrow);
    assert_eq!(error.to_string(), "shape of x is [5, 3], expected [5, 4]");
    let columns = Array2::zeros((4, 5));
    let error = forward(&p, &p.weights(), &p.offsets, columns.t());
    let expected = "x of shape [5, 4] is not in standard layout, its strides are [1, 5]";
    assert_eq!(error.to_string(), expected);
    let empty = Problem {
        shape: FfnShape {
            hidden: 0,
            ..p.shape
        },
        ..p.clone()
    };
    let error = forward(&empty, &p.weights(), &p.offsets, p.x.view());
    assert!(matches!(
        error,
        Error::EmptyExpert {
            width: 4,
            hidden: 0
        }
    ));
}

#[test]
fn backward_arguments() {
    let p = problem();
    let run = |rows: BackwardRows<'_>, dp: usize, gated: bool, accumulate: &[bool]| {
        let (mut dx, mut dp) = (Array2::zeros((5, 4)), vec![0.0; dp]);
        let (mut gate, mut up, mut down) = (p.up.clone(), p.up.clone(), p.down.clone());
        let mut gradients = WeightGradients {
            gate: gated.then(|| gate.view_mut()),
            up: up.view_mut(),
            down: down.view_mut(),
        };
        let (weights, workspace) = (p.weights(), &mut Workspace::new());
        let dx = dx.view_mut();
        Cpu.backward(
            &p.shape,
            &weights,
            &p.offsets,
            &rows,
            workspace,
            dx,
            &mut dp,
            &mut gradients,
            accumulate,
        )
        .map_err(|error| error.to_string())
    };
    let (rows, all) = (p.backward_rows(), &[false; 2]);
    assert_eq!(run(rows, 5, true, all), Ok(()));
    let missing = "swiglu is gated, but there are no gate gradients";
    assert_eq!(run(rows, 5, false, all).unwrap_err(), missing);
    assert_eq!(
        run(rows, 4, true, all).unwrap_err(),
        "shape of dp is [4], expected [5]"
    );
    let short = BackwardRows {
        weights: &p.w[..3],
        ..rows
    };
    assert_eq!(
        run(short, 5, true, all).unwrap_err(),
        "shape of weights is [3], expected [5]"
    );
    assert_eq!(
        run(rows, 5, true, &[true]).unwrap_err(),
        "shape of accumulate is [1], expected [2]"
    );
}

#[test]
fn names() {
    for activation in Activation::ALL {
        let parsed: Activation = activation.to_string().parse().unwrap();
        assert_eq!(parsed, activation);
    }
    let error = "tanh".parse::<Activation>().unwrap_err();
    let expected = "unknown activation 'tanh', expected one of swiglu, geglu_tanh, geglu_erf, reglu, relu2, gelu, silu";
    assert_eq!(error.to_string(), expected);
}
