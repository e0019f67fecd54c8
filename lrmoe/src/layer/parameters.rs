//! First weights of the experts.

use lrmoe_kernels::FfnShape;

use crate::error::Error;

/// One expert's matrices, row-major: gate and up `[hidden, width]`, down `[width, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertParameters {
    /// Gate projection; `None` where the activation is not gated.
    pub gate: Option<Vec<f32>>,
    /// Up projection.
    pub up: Vec<f32>,
    /// Down projection.
    pub down: Vec<f32>,
}

/// The vector of all experts' parameters: matrix by matrix (gate, up, down), expert by expert.
pub(super) fn all_parameters(
    shape: &FfnShape,
    experts: usize,
    mut init: impl FnMut(usize) -> ExpertParameters,
) -> Result<Vec<f32>, Error> {
    let matrices = matrices(shape);
    let factors = [
        size_of::<f32>(),
        matrices,
        experts,
        shape.width,
        shape.hidden,
    ];
    let bytes = factors
        .iter()
        .fold(1, |all: u128, &factor| all.saturating_mul(factor as u128));
    if bytes > isize::MAX as u128 {
        return Err(Error::Memory { bytes });
    }
    let block = shape.width * shape.hidden;
    let mut all = vec![0.0; matrices * experts * block];
    for expert in 0..experts {
        let ExpertParameters { gate, up, down } = init(expert);
        let given: Vec<Vec<f32>> = gate.into_iter().chain([up, down]).collect();
        if given.len() != matrices || given.iter().any(|m| m.len() != block) {
            let lengths = given.iter().map(Vec::len).collect();
            return Err(Error::ExpertParameters {
                expert,
                matrices,
                block,
                given: lengths,
            });
        }
        for (matrix, values) in given.iter().enumerate() {
            all[(matrix * experts + expert) * block..][..block].copy_from_slice(values);
        }
    }
    Ok(all)
}

/// Matrices of one expert.
pub(super) fn matrices(shape: &FfnShape) -> usize {
    if shape.activation.is_gated() { 3 } else { 2 }
}
