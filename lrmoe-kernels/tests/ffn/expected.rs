//! What a problem should give, by plain loops in f64.

use crate::problem::Problem;
use lrmoe_kernels::{Activation, ndarray::Array3};

/// act(x) in f64, from its textbook formula.
pub(crate) fn act(activation: Activation, x: f64) -> f64 {
    let relu = x.max(0.0);
    match activation {
        Activation::SwiGlu | Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GegluErf | Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / 2_f64.sqrt())),
        Activation::GegluTanh => {
            let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + z.tanh())
        }
        Activation::ReGlu => relu,
        Activation::Relu2 => relu * relu,
    }
}

/// act'(x) from a difference: no formula shared with the crate.
fn slope(activation: Activation, x: f64) -> f64 {
    const STEP: f64 = 1e-6;
    if x == 0.0 && matches!(activation, Activation::ReGlu | Activation::Relu2) {
        return 0.0;
    }
    (act(activation, x + STEP) - act(activation, x - STEP)) / (2.0 * STEP)
}

#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) out: Vec<f64>,
    pub(crate) h_norms: Vec<f64>,
    pub(crate) dx: Vec<f64>,
    pub(crate) dp: Vec<f64>,
    pub(crate) dgate: Option<Array3<f64>>,
    pub(crate) dup: Array3<f64>,
    pub(crate) ddown: Array3<f64>,
}

pub(crate) fn oracle(problem: &Problem) -> Expected {
    let (width, hidden) = (problem.shape.width, problem.shape.hidden);
    let activation = problem.shape.activation;
    let zeros = |like: &Array3<f32>| Array3::<f64>::zeros(like.raw_dim());
    let mut expected = Expected {
        out: vec![],
        h_norms: vec![],
        dx: vec![],
        dp: vec![],
        dgate: problem.gate.as_ref().map(zeros),
        dup: zeros(&problem.up),
        ddown: zeros(&problem.down),
    };
    for row in 0..problem.rows() {
        let e = problem.instance_of(row);
        let x = |d: usize| f64::from(problem.x[[row, d]]);
        let dy = |d: usize| f64::from(problem.dy[[row, d]]);
        let (p, w) = (f64::from(problem.p[row]), f64::from(problem.w[row]));
        let project = |matrix: &Array3<f32>, f: usize| -> f64 {
            (0..width)
                .map(|d| f64::from(matrix[[e, f, d]]) * x(d))
                .sum()
        };
        let down = |d: usize, f: usize| f64::from(problem.down[[e, d, f]]);
        let (mut h, mut dp, mut dx) = (vec![0.0; hidden], 0.0, vec![0.0; width]);
        for f in 0..hidden {
            let up = project(&problem.up, f);
            let b: f64 = (0..width).map(|d| down(d, f) * dy(d)).sum();
            let (dgate, dup) = if let Some(weights) = &problem.gate {
                let gate = project(weights, f);
                h[f] = act(activation, gate) * up;
                (
                    p * b * up * slope(activation, gate),
                    p * b * act(activation, gate),
                )
            } else {
                h[f] = act(activation, up);
                (0.0, p * b * slope(activation, up))
            };
            dp += b * h[f];
            for d in 0..width {
                dx[d] += f64::from(problem.up[[e, f, d]]) * dup;
                expected.dup[[e, f, d]] += w * dup * x(d);
                expected.ddown[[e, d, f]] += w * p * dy(d) * h[f];
                if let (Some(weights), Some(gradient)) = (&problem.gate, &mut expected.dgate) {
                    dx[d] += f64::from(weights[[e, f, d]]) * dgate;
                    gradient[[e, f, d]] += w * dgate * x(d);
                }
            }
        }
        let out = |d: usize| -> f64 { (0..hidden).map(|f| down(d, f) * h[f]).sum() };
        expected.out.extend((0..width).map(out));
        expected
            .h_norms
            .push(h.iter().map(|h| h * h).sum::<f64>().sqrt());
        expected.dx.extend(dx);
        expected.dp.push(dp);
    }
    expected
}
