//! Norms of rows' terms in the weight gradients, against the gradients of one row at a time.

use lrmoe_kernels::{Activation, ComputeExperts, Error, ExpertBuffers, RowBuffers};

use crate::{passes::run, problem::Problem};

fn norms<B: ComputeExperts>(backend: &B, problem: &Problem) -> Result<Vec<f32>, Error> {
    let upload = |values: &[f32]| backend.upload(values).unwrap();
    let slice = |values: Option<&[f32]>| upload(values.unwrap());
    let weights = ExpertBuffers::<B> {
        gate: problem.gate.as_ref().map(|gate| slice(gate.as_slice())),
        up: slice(problem.up.as_slice()),
        down: slice(problem.down.as_slice()),
    };
    let (x, dy) = (slice(problem.x.as_slice()), slice(problem.dy.as_slice()));
    let (p, w) = (upload(&problem.p), upload(&problem.w));
    let rows = RowBuffers::<B> {
        x: &x,
        dy: &dy,
        gate_weights: &p,
        weights: &w,
    };
    let mut norms = Default::default();
    backend.gradient_norms(
        &problem.shape,
        &weights,
        &problem.offsets,
        &rows,
        &mut norms,
    )?;
    Ok(backend.download(&norms).unwrap())
}

/// On the CPU.
pub(crate) fn of_rows<B: ComputeExperts>(backend: &B) {
    for activation in Activation::ALL {
        let problem = Problem::random(activation, 19, 13, &[5, 0, 67, 1]);
        let found = norms(backend, &problem).unwrap();
        assert_eq!(found.len(), problem.rows());
        for (row, found) in found.into_iter().enumerate() {
            let mut alone = problem.only(&[row]);
            alone.w.fill(1.0);
            let terms = run(backend, &alone, &mut B::Scratch::default());
            let gate = terms.dgate.iter().flatten();
            let squares = gate
                .chain(&terms.dup)
                .chain(&terms.ddown)
                .map(|d| f64::from(*d).powi(2));
            let expected = squares.sum::<f64>().sqrt();
            // Products of f32 of up to 19 terms on both sides.
            let error = (f64::from(found) / expected - 1.0).abs();
            assert!(error < 1e-5, "{activation}, row {row}: {found}, {expected}");
        }
    }
    let mut problem = Problem::random(Activation::SwiGlu, 4, 3, &[2]);
    problem.p.pop();
    let error = norms(backend, &problem).unwrap_err();
    assert_eq!(
        error.to_string(),
        "shape of gate_weights is [1], expected [2]"
    );
}

/// Elsewhere.
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cuda-emu"))]
pub(crate) fn refused<B: ComputeExperts>(backend: &B) {
    let problem = Problem::random(Activation::SwiGlu, 4, 3, &[2]);
    let refused = norms(backend, &problem);
    assert!(
        matches!(refused, Err(Error::NoGradientNorms)),
        "{refused:?}"
    );
}
