//! Random problems and what the crate makes of them.

use lrmoe_kernels::{
    Activation, BackwardRows, Cpu, ExpertFfn, FfnShape, SquaredNorm, WeightGradients, Weights,
    Workspace,
    ndarray::{Array2, Array3},
};

#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) shape: FfnShape,
    pub(crate) offsets: Vec<usize>,
    pub(crate) gate: Option<Array3<f32>>,
    pub(crate) up: Array3<f32>,
    pub(crate) down: Array3<f32>,
    pub(crate) x: Array2<f32>,
    pub(crate) dy: Array2<f32>,
    pub(crate) p: Vec<f32>,
    pub(crate) w: Vec<f32>,
}

/// All results, every buffer NaN before the call.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    pub(crate) out: Array2<f32>,
    pub(crate) h_norms: Vec<SquaredNorm>,
    pub(crate) dx: Array2<f32>,
    pub(crate) dp: Vec<f32>,
    pub(crate) dgate: Option<Array3<f32>>,
    pub(crate) dup: Array3<f32>,
    pub(crate) ddown: Array3<f32>,
}

impl Problem {
    pub(crate) fn random(
        activation: Activation,
        width: usize,
        hidden: usize,
        groups: &[usize],
    ) -> Self {
        let mut random = Random(0x5eed);
        let (instances, rows) = (groups.len(), groups.iter().sum());
        let mut cube = |a, b: usize, c| {
            Array3::from_shape_simple_fn((a, b, c), || random.symmetric() * 1.7 / (c as f32).sqrt())
        };
        let gate = activation
            .is_gated()
            .then(|| cube(instances, hidden, width));
        let (up, down) = (
            cube(instances, hidden, width),
            cube(instances, width, hidden),
        );
        let mut rows_of =
            |scale| Array2::from_shape_simple_fn((rows, width), || random.symmetric() * scale);
        let (x, dy) = (rows_of(3.0), rows_of(1.0));
        let p = (0..rows).map(|_| random.unit()).collect();
        let w = (0..rows)
            .map(|_| 1.0 + 200.0 * random.unit().powi(4))
            .collect();
        let ends = groups.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        let offsets = std::iter::once(0).chain(ends).collect();
        let shape = FfnShape {
            width,
            hidden,
            activation,
        };
        Self {
            shape,
            offsets,
            gate,
            up,
            down,
            x,
            dy,
            p,
            w,
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.p.len()
    }

    pub(crate) fn instance_of(&self, row: usize) -> usize {
        (0..).find(|&i| row < self.offsets[i + 1]).unwrap()
    }

    /// The same experts with these rows only, in this order, which must ascend by instance.
    pub(crate) fn only(&self, rows: &[usize]) -> Self {
        let select = |all: &Array2<f32>| {
            Array2::from_shape_fn((rows.len(), self.shape.width), |(i, d)| all[[rows[i], d]])
        };
        let pick = |all: &[f32]| rows.iter().map(|&row| all[row]).collect();
        let offsets = (0..self.offsets.len())
            .map(|i| rows.iter().filter(|&&row| row < self.offsets[i]).count())
            .collect();
        let (x, dy, p, w) = (
            select(&self.x),
            select(&self.dy),
            pick(&self.p),
            pick(&self.w),
        );
        Self {
            offsets,
            x,
            dy,
            p,
            w,
            ..self.clone()
        }
    }

    pub(crate) fn weights(&self) -> Weights<'_> {
        let gate = self.gate.as_ref().map(|gate| gate.view());
        Weights {
            gate,
            up: self.up.view(),
            down: self.down.view(),
        }
    }

    pub(crate) fn backward_rows(&self) -> BackwardRows<'_> {
        let (x, dy) = (self.x.view(), self.dy.view());
        BackwardRows {
            x,
            dy,
            gate_weights: &self.p,
            weights: &self.w,
        }
    }

    pub(crate) fn run(&self, workspace: &mut Workspace) -> Results {
        let nan = |like: &Array3<f32>| Array3::from_elem(like.raw_dim(), f32::NAN);
        let rows = Array2::from_elem(self.x.raw_dim(), f32::NAN);
        let mut r = Results {
            out: rows.clone(),
            h_norms: vec![
                SquaredNorm {
                    significand: f32::NAN,
                    scale: 255
                };
                self.rows()
            ],
            dx: rows,
            dp: vec![f32::NAN; self.rows()],
            dgate: self.gate.as_ref().map(nan),
            dup: nan(&self.up),
            ddown: nan(&self.down),
        };
        let (weights, offsets, norms) = (self.weights(), &self.offsets, Some(&mut r.h_norms[..]));
        Cpu.forward(
            &self.shape,
            &weights,
            offsets,
            self.x.view(),
            workspace,
            r.out.view_mut(),
            norms,
        )
        .unwrap();
        let mut gradients = WeightGradients {
            gate: r.dgate.as_mut().map(|gate| gate.view_mut()),
            up: r.dup.view_mut(),
            down: r.ddown.view_mut(),
        };
        let (inputs, dx) = (self.backward_rows(), r.dx.view_mut());
        Cpu.backward(
            &self.shape,
            &weights,
            offsets,
            &inputs,
            workspace,
            dx,
            &mut r.dp,
            &mut gradients,
            &vec![false; offsets.len() - 1],
        )
        .unwrap();
        r
    }
}

/// A workspace whose buffers hold NaN wherever problems of up to this size look.
pub(crate) fn poisoned(problem: &Problem) -> Workspace {
    let mut workspace = Workspace::new();
    let mut nan = problem.clone();
    nan.x.fill(f32::NAN);
    nan.dy.fill(f32::NAN);
    nan.run(&mut workspace);
    workspace
}

/// splitmix64.
struct Random(u64);

impl Random {
    /// Uniform in [0, 1).
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Uniform in [-1, 1).
    fn symmetric(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }
}
