//! Both passes of the experts over a problem, with every output NaN before.

use lrmoe_kernels::{
    ComputeExperts, ExpertBuffers, FfnElement, PreActivationBuffers, RowBuffers, SquaredNorm,
    ndarray::Array3,
};

use crate::problem::Problem;

/// Inputs rounded to what `T` holds.
pub(crate) fn rounded<T: FfnElement>(mut problem: Problem) -> Problem {
    let round = |value: &mut f32| *value = T::from_f32(*value).to_f32();
    for matrices in [&mut problem.up, &mut problem.down]
        .into_iter()
        .chain(&mut problem.gate)
    {
        matrices.iter_mut().for_each(round);
    }
    problem.x.iter_mut().for_each(round);
    problem.dy.iter_mut().for_each(round);
    problem
}

/// All results, laid out as in the problem.
pub(crate) struct Found {
    pub(crate) out: Vec<f32>,
    pub(crate) h_norms: Vec<SquaredNorm>,
    pub(crate) dx: Vec<f32>,
    pub(crate) dp: Vec<f32>,
    pub(crate) dgate: Option<Vec<f32>>,
    pub(crate) dup: Vec<f32>,
    pub(crate) ddown: Vec<f32>,
}

/// Gradients of the problem's matrices, NaN.
pub(crate) fn no_gradients<B: ComputeExperts<T>, T: FfnElement>(
    backend: &B,
    problem: &Problem,
) -> ExpertBuffers<B> {
    let nan = |len: usize| backend.upload(&vec![f32::NAN; len]).unwrap();
    ExpertBuffers {
        gate: problem.gate.as_ref().map(|gate| nan(gate.len())),
        up: nan(problem.up.len()),
        down: nan(problem.down.len()),
    }
}

/// Runs both passes, every output NaN before.
pub(crate) fn run<B: ComputeExperts<T>, T: FfnElement>(
    backend: &B,
    problem: &Problem,
    scratch: &mut B::Scratch,
) -> Found {
    let gradients = &mut no_gradients(backend, problem);
    let accumulate = vec![false; problem.offsets.len() - 1];
    run_into(backend, problem, scratch, gradients, &accumulate)
}

/// Runs both passes, outputs of rows NaN before.
pub(crate) fn run_into<B: ComputeExperts<T>, T: FfnElement>(
    backend: &B,
    problem: &Problem,
    scratch: &mut B::Scratch,
    gradients: &mut ExpertBuffers<B>,
    accumulate: &[bool],
) -> Found {
    run_keeping(backend, problem, scratch, None, gradients, accumulate)
}

/// The same with pre-activations that the forward pass keeps, where there is room for them.
pub(crate) fn run_keeping<B: ComputeExperts<T>, T: FfnElement>(
    backend: &B,
    problem: &Problem,
    scratch: &mut B::Scratch,
    kept: Option<&mut PreActivationBuffers<B, T>>,
    gradients: &mut ExpertBuffers<B>,
    accumulate: &[bool],
) -> Found {
    let upload = |values: &[f32]| {
        let values: Vec<_> = values.iter().map(|&value| T::from_f32(value)).collect();
        backend.upload(&values).unwrap()
    };
    let matrices = |values: &Array3<f32>| upload(values.as_slice().unwrap());
    let nan = |len: usize| upload(&vec![f32::NAN; len]);
    let (rows, width) = (problem.rows(), problem.shape.width);
    let weights = ExpertBuffers::<B, T> {
        gate: problem.gate.as_ref().map(matrices),
        up: matrices(&problem.up),
        down: matrices(&problem.down),
    };
    let (x, dy) = (
        upload(problem.x.as_slice().unwrap()),
        upload(problem.dy.as_slice().unwrap()),
    );
    let of_rows = |values: &[f32]| backend.upload(values).unwrap();
    let (p, w) = (of_rows(&problem.p), of_rows(&problem.w));
    let (mut out, mut dx) = (nan(rows * width), nan(rows * width));
    let mut dp = of_rows(&vec![f32::NAN; rows]);
    let mut h_norms = Default::default();
    let (shape, offsets) = (&problem.shape, &problem.offsets);
    let norms = Some(&mut h_norms);
    let mut kept = kept;
    let pre = kept.as_deref_mut();
    backend
        .forward(shape, &weights, offsets, &x, scratch, &mut out, norms, pre)
        .unwrap();
    let inputs = RowBuffers::<B, T> {
        x: &x,
        dy: &dy,
        gate_weights: &p,
        weights: &w,
    };
    backend
        .backward(
            shape, &weights, offsets, &inputs, kept, scratch, &mut dx, &mut dp, gradients,
            accumulate,
        )
        .unwrap();
    let download = |buffer: &B::Buffer<f32>| backend.download(buffer).unwrap();
    let widened = |buffer: &B::Buffer<T>| {
        let values = backend.download(buffer).unwrap();
        values.into_iter().map(T::to_f32).collect()
    };
    Found {
        out: widened(&out),
        h_norms: backend.download(&h_norms).unwrap(),
        dx: widened(&dx),
        dp: download(&dp),
        dgate: gradients.gate.as_ref().map(download),
        dup: download(&gradients.up),
        ddown: download(&gradients.down),
    }
}
