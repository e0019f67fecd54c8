//! Every path that this machine has, in both types: against plain loops in f64, and row by row.

mod oracle;
mod rows;

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use half::bf16;
use lrmoe_metric::SquaredNorm;
use ndarray::{Array1, Array2, Array3, s};

use oracle::oracle;

use super::{
    Cpu, Workspace,
    element::{FfnElement, Storage},
    isa::{Isa, forced},
};
use crate::{
    Activation, BackwardRows, ExpertFfn, FfnShape, PreActivations, PreActivationsMut, StashFfn,
    WeightGradients, Weights,
};

/// One path at a time: which one is forced is known to all threads.
static ONE_PATH: Mutex<()> = Mutex::new(());

/// With every instruction set of this machine.
pub(super) fn on_every_path(check: impl Fn(Isa)) {
    let _one = ONE_PATH.lock().unwrap_or_else(PoisonError::into_inner);
    for isa in forced::available() {
        forced::set(Some(isa));
        check(isa);
    }
    forced::set(None);
}

#[derive(Clone)]
struct Problem<T> {
    shape: FfnShape,
    offsets: Vec<usize>,
    gate: Array3<T>,
    up: Array3<T>,
    down: Array3<T>,
    x: Array2<T>,
    dy: Array2<T>,
    p: Array1<f32>,
    w: Array1<f32>,
}

/// Everything that a forward and a backward pass write, NaN before.
#[derive(Clone, Debug, PartialEq)]
struct Results {
    out: Array2<f32>,
    norms: Vec<SquaredNorm>,
    dx: Array2<f32>,
    dp: Vec<f32>,
    gradients: [Array3<f32>; 3],
}

fn widened<T: Storage>(rows: &Array2<T>) -> Array2<f32> {
    rows.mapv(T::widened)
}

impl<T: FfnElement> Problem<T> {
    fn new(width: usize, hidden: usize, groups: &[usize]) -> Self {
        let mut state = 0x5eed_u64;
        let mut random = move |scale: f32| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
        };
        let (instances, rows) = (groups.len(), groups.iter().sum());
        let mut cube = |a, b| {
            let scale = 1.7 / (b as f32).sqrt();
            Array3::from_shape_simple_fn((instances, a, b), || T::narrowed(random(scale)))
        };
        let (gate, up, down) = (
            cube(hidden, width),
            cube(hidden, width),
            cube(width, hidden),
        );
        let mut rows_of =
            |scale| Array2::from_shape_simple_fn((rows, width), || T::narrowed(random(scale)));
        let (x, dy) = (rows_of(2.0), rows_of(1.0));
        let ends = groups.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        Self {
            shape: FfnShape {
                width,
                hidden,
                activation: Activation::SwiGlu,
            },
            offsets: std::iter::once(0).chain(ends).collect(),
            gate,
            up,
            down,
            x,
            dy,
            p: Array1::from_shape_simple_fn(rows, || random(0.5) + 0.5),
            w: Array1::from_shape_simple_fn(rows, || random(1.0) + 2.0),
        }
    }

    fn weights(&self) -> Weights<'_, T> {
        Weights {
            gate: Some(self.gate.view()),
            up: self.up.view(),
            down: self.down.view(),
        }
    }

    fn no_gradients(&self) -> [Array3<f32>; 3] {
        [&self.gate, &self.up, &self.down].map(|m| m.mapv(|_| f32::NAN))
    }

    fn run(&self, workspace: &mut Workspace, stashed: bool) -> Results {
        let accumulate = vec![false; self.offsets.len() - 1];
        self.run_into(workspace, stashed, self.no_gradients(), &accumulate)
    }

    fn run_into(
        &self,
        workspace: &mut Workspace,
        stashed: bool,
        mut gradients: [Array3<f32>; 3],
        accumulate: &[bool],
    ) -> Results {
        let nan = T::narrowed(f32::NAN);
        let rows = self.x.nrows();
        let (mut out, mut dx) = (self.x.mapv(|_| nan), self.x.mapv(|_| nan));
        let mut stash = [(); 2].map(|()| Array2::from_elem((rows, self.shape.hidden), nan));
        let mut norms = vec![
            SquaredNorm {
                significand: f32::NAN,
                scale: 255
            };
            rows
        ];
        let mut dp = vec![f32::NAN; rows];
        let [gate, up, down] = &mut gradients;
        let mut to = WeightGradients {
            gate: Some(gate.view_mut()),
            up: up.view_mut(),
            down: down.view_mut(),
        };
        let (shape, weights, offsets, x) =
            (&self.shape, self.weights(), &self.offsets, self.x.view());
        let inputs = BackwardRows {
            x,
            dy: self.dy.view(),
            gate_weights: self.p.as_slice().unwrap(),
            weights: self.w.as_slice().unwrap(),
        };
        let (y, h) = (out.view_mut(), Some(&mut norms[..]));
        if stashed {
            let [gate, up] = &mut stash;
            Cpu.forward_stash(
                shape,
                &weights,
                offsets,
                x,
                workspace,
                y,
                h,
                PreActivationsMut {
                    gate: Some(gate.view_mut()),
                    up: up.view_mut(),
                },
            )
            .unwrap();
            let dx = dx.view_mut();
            let stash = PreActivations {
                gate: Some(gate.view()),
                up: up.view(),
            };
            Cpu.backward_stash(
                shape, &weights, offsets, &inputs, &stash, workspace, dx, &mut dp, &mut to,
                accumulate,
            )
            .unwrap();
        } else {
            Cpu.forward(shape, &weights, offsets, x, workspace, y, h)
                .unwrap();
            Cpu.backward(
                shape,
                &weights,
                offsets,
                &inputs,
                workspace,
                dx.view_mut(),
                &mut dp,
                &mut to,
                accumulate,
            )
            .unwrap();
        }
        Results {
            out: widened(&out),
            norms,
            dx: widened(&dx),
            dp,
            gradients,
        }
    }

    /// These rows alone.
    fn only(&self, rows: Range<usize>) -> Self {
        let of_rows = |all: &Array2<T>| all.slice(s![rows.clone(), ..]).to_owned();
        let of = |values: &Array1<f32>| values.slice(s![rows.clone()]).to_owned();
        let place = |offset: &usize| offset.clamp(&rows.start, &rows.end) - rows.start;
        Self {
            offsets: self.offsets.iter().map(place).collect(),
            x: of_rows(&self.x),
            dy: of_rows(&self.dy),
            p: of(&self.p),
            w: of(&self.w),
            ..self.clone()
        }
    }
}

#[track_caller]
fn assert_close<'a>(
    what: &str,
    got: impl IntoIterator<Item = f64>,
    expected: impl IntoIterator<Item = &'a f64>,
    bound: f64,
) {
    let (mut error, mut size) = (0.0, 0.0);
    for (got, expected) in got.into_iter().zip(expected) {
        error += (got - expected).powi(2);
        size += expected.powi(2);
    }
    let (error, size) = (f64::sqrt(error), f64::sqrt(size));
    assert!(error <= bound * size, "{what}: {error:e} of {size:e}");
}

/// f32 within 1e-6; bf16 within the 2^-8 or so that storing h, its gradients and results loses.
fn check<T: FfnElement>(isa: Isa, width: usize, hidden: usize, groups: &[usize]) {
    let problem = Problem::<T>::new(width, hidden, groups);
    let expected = oracle(&problem);
    let mut workspace = Workspace::new();
    let mut poison = problem.clone();
    poison.x.fill(T::narrowed(f32::NAN));
    poison.run(&mut workspace, false);
    let bound = if T::PER_WORD == 1 { 1e-6 } else { 8e-3 };
    for stashed in [false, true] {
        let got = problem.run(&mut workspace, stashed);
        let name = |what: &str| {
            format!(
                "{what} of {width} x {hidden}, {groups:?}, {} to a word, {isa}",
                T::PER_WORD
            )
        };
        let wide = |values: &Array2<f32>| values.mapv(f64::from);
        assert_close(&name("out"), wide(&got.out), &expected.out, bound);
        assert_close(
            &name("norms"),
            got.norms.iter().map(|n| n.value().sqrt()),
            &expected.norms,
            bound,
        );
        assert_close(&name("dx"), wide(&got.dx), &expected.dx, bound);
        assert_close(
            &name("dp"),
            got.dp.iter().map(|&x| x.into()),
            &expected.dp,
            bound,
        );
        for (got, expected) in got.gradients.iter().zip(&expected.gradients) {
            assert_close(&name("gradients"), got.mapv(f64::from), expected, bound);
        }
    }
}

const SIZES: [(usize, usize, &[usize]); 7] = [
    (1, 1, &[1, 0, 2]),
    (3, 5, &[17, 1]),
    (33, 70, &[0, 70, 1]),
    (64, 32, &[33, 0, 40]),
    (96, 160, &[5, 150]),
    (544, 64, &[31]),
    (32, 288, &[600, 3]),
];

#[test]
fn f32_is_close() {
    on_every_path(|isa| {
        SIZES
            .iter()
            .for_each(|&(width, hidden, groups)| check::<f32>(isa, width, hidden, groups))
    });
}

#[test]
fn bf16_is_close() {
    on_every_path(|isa| {
        SIZES
            .iter()
            .for_each(|&(width, hidden, groups)| check::<bf16>(isa, width, hidden, groups))
    });
}

fn check_invariance<T: FfnElement>(isa: Isa, width: usize, hidden: usize, groups: &[usize]) {
    let problem = Problem::<T>::new(width, hidden, groups);
    let workspace = &mut Workspace::new();
    let all = problem.run(workspace, false);
    for row in (0..problem.x.nrows()).step_by(5) {
        let alone = problem.only(row..row + 1).run(workspace, false);
        let name = format!("row {row} of {width} x {hidden}, {isa}");
        assert_eq!(all.out.row(row), alone.out.row(0), "out, {name}");
        assert_eq!(all.norms[row], alone.norms[0], "norm, {name}");
        assert_eq!(all.dx.row(row), alone.dx.row(0), "dx, {name}");
        assert_eq!(all.dp[row].to_bits(), alone.dp[0].to_bits(), "dp, {name}");
    }
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let got = pool.install(|| problem.run(&mut Workspace::new(), false));
        assert!(got == all, "{threads} threads, {width} x {hidden}, {isa}");
    }
    if T::PER_WORD == 1 {
        assert!(
            problem.run(workspace, true) == all,
            "stash, {width} x {hidden}, {isa}"
        );
    }
}

#[test]
fn rows_and_threads_do_not_matter() {
    on_every_path(|isa| {
        for (width, hidden, groups) in SIZES {
            check_invariance::<f32>(isa, width, hidden, groups);
            check_invariance::<bf16>(isa, width, hidden, groups);
        }
        // Enough rows for tiles of every height.
        check_invariance::<f32>(isa, 32, 64, &[2200, 900, 40]);
        check_invariance::<bf16>(isa, 32, 64, &[2200, 900, 40]);
    });
}

/// Weight gradients of parts of an instance's rows, each going on from the one before, against those of all rows.
fn check_parts<T: FfnElement>(isa: Isa, width: usize, hidden: usize, rows: usize, cuts: &[usize]) {
    let problem = Problem::<T>::new(width, hidden, &[rows]);
    let workspace = &mut Workspace::new();
    let all = problem.run(workspace, false).gradients;
    let mut gradients = problem.no_gradients();
    let ends = cuts.iter().copied().chain([rows]);
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    for (start, end) in starts.zip(ends) {
        let part = problem.only(start..end);
        gradients = part
            .run_into(workspace, false, gradients, &[start > 0])
            .gradients;
    }
    assert!(
        gradients == all,
        "{cuts:?} of {rows} rows, {width} x {hidden}, {isa}"
    );
}

#[test]
fn parts_of_rows_add_up() {
    on_every_path(|isa| {
        for (width, hidden) in [(32, 64), (33, 70), (160, 96)] {
            for cuts in [&[32, 96][..], &[512], &[256, 288, 576]] {
                check_parts::<f32>(isa, width, hidden, 601, cuts);
                check_parts::<bf16>(isa, width, hidden, 601, cuts);
            }
            check_parts::<f32>(isa, width, hidden, 601, &[1, 50, 333]);
        }
    });
}

#[test]
fn fused_paths_agree_to_the_bit() {
    let problem = Problem::<f32>::new(96, 160, &[5, 150]);
    let expected = Mutex::new(None);
    on_every_path(|isa| {
        if isa > Isa::Portable {
            let got = problem.run(&mut Workspace::new(), false);
            let mut expected = expected.lock().unwrap();
            assert!(expected.get_or_insert_with(|| got.clone()) == &got, "{isa}");
        }
    });
}
