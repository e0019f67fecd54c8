//! The same in plain loops.

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis, s};

use super::Problem;
use crate::FfnElement;

/// What the results must be, in f64 from the stored values.
pub(super) struct Expected {
    pub(super) out: Array2<f64>,
    pub(super) norms: Array1<f64>,
    pub(super) dx: Array2<f64>,
    pub(super) dp: Array1<f64>,
    pub(super) gradients: [Array3<f64>; 3],
}

pub(super) fn oracle<T: FfnElement>(problem: &Problem<T>) -> Expected {
    let double2 = |a: ArrayView2<'_, T>| a.mapv(|x| f64::from(x.widened()));
    let mut expected = Expected {
        out: double2(problem.x.view()),
        norms: Array1::zeros(problem.x.nrows()),
        dx: double2(problem.x.view()),
        dp: Array1::zeros(problem.x.nrows()),
        gradients: [&problem.gate, &problem.up, &problem.down].map(|m| m.mapv(|_| 0.0)),
    };
    for e in 0..problem.offsets.len() - 1 {
        let [gate, up, down] =
            [&problem.gate, &problem.up, &problem.down].map(|m| double2(m.index_axis(Axis(0), e)));
        for row in problem.offsets[e]..problem.offsets[e + 1] {
            let [x, dy] = [&problem.x, &problem.dy]
                .map(|a| double2(a.slice(s![row..=row, ..])).remove_axis(Axis(0)));
            let (p, w) = (f64::from(problem.p[row]), f64::from(problem.w[row]));
            let (g, u) = (gate.dot(&x), up.dot(&x));
            let sigmoid = g.mapv(|g| 1.0 / (1.0 + (-g).exp()));
            let silu = &g * &sigmoid;
            let slope = &sigmoid * &(1.0 + &g * &(1.0 - &sigmoid));
            let (h, b) = (&silu * &u, down.t().dot(&dy));
            let (dg, du) = (&b * &u * &slope * p, &b * &silu * p);
            expected.out.row_mut(row).assign(&down.dot(&h));
            expected.norms[row] = h.dot(&h).sqrt();
            expected
                .dx
                .row_mut(row)
                .assign(&(gate.t().dot(&dg) + up.t().dot(&du)));
            expected.dp[row] = b.dot(&h);
            let outer = |a: &Array1<f64>, b: &Array1<f64>| {
                a.view()
                    .insert_axis(Axis(1))
                    .dot(&b.view().insert_axis(Axis(0)))
                    * w
            };
            let terms = [outer(&dg, &x), outer(&du, &x), outer(&dy, &h) * p];
            for (gradient, term) in expected.gradients.iter_mut().zip(terms) {
                let mut of_expert = gradient.index_axis_mut(Axis(0), e);
                of_expert += &term;
            }
        }
    }
    expected
}
