use candle_core::{D, Tensor};
use ndarray::Array2;

use super::ModelError;
use super::ops::{self, with_values};

/// Where the tokens of one rank go in one layer.
pub(super) struct Routing {
    /// Router softmax `[tokens, experts]`.
    pub(super) probabilities: Tensor,
    /// Chosen experts `[tokens, k]`, most probable first.
    pub(super) expert_ids: Array2<i32>,
    /// Their probabilities, renormalised to sum to 1, `[tokens, k]`.
    pub(super) gate_weights: Tensor,
}

/// Routes rows `x` `[tokens, D]` by the router's weight `[experts, D]`.
pub(super) fn route(
    layer: usize,
    x: &Tensor,
    weight: &Tensor,
    top_k: usize,
) -> Result<Routing, ModelError> {
    let probabilities = ops::softmax(&x.matmul(&weight.t()?)?)?;
    let (tokens, experts) = probabilities.dims2()?;
    let chosen = with_values([&probabilities], |[p]| top_k_of_rows(p, experts, top_k))?
        .map_err(|token| ModelError::NanProbability { layer, token })?;
    let expert_ids = chosen.iter().map(|&expert| expert as i32).collect();
    let expert_ids = Array2::from_shape_vec((tokens, top_k), expert_ids)
        .expect("k experts are chosen for every token");
    let index = Tensor::from_vec(chosen, (tokens, top_k), x.device())?;
    let kept = probabilities.gather(&index, D::Minus1)?;
    let gate_weights = kept.broadcast_div(&kept.sum_keepdim(D::Minus1)?)?;
    Ok(Routing {
        probabilities,
        expert_ids,
        gate_weights,
    })
}

/// Switch-style balance loss: `E * sum_e fraction_e * mean probability_e`, 1 when routing is uniform.
///
/// `fraction` is each expert's share of all ranks' pairs and a constant; the probabilities are those
/// of this rank's tokens, so the mean over ranks is the loss of the global batch.
pub(super) fn balance_loss(probabilities: &Tensor, loads: &[u32]) -> Result<Tensor, ModelError> {
    let (tokens, experts) = probabilities.dims2()?;
    let total: u64 = loads.iter().map(|&load| u64::from(load)).sum();
    let scale = experts as f64 / (total.max(1) as f64 * tokens.max(1) as f64);
    let weights: Vec<f32> = loads
        .iter()
        .map(|&load| (f64::from(load) * scale) as f32)
        .collect();
    let weights = Tensor::from_vec(weights, experts, probabilities.device())?;
    Ok(probabilities.sum(0)?.mul(&weights)?.sum_all()?)
}

/// The `k` largest of each row of `experts` values, largest first, ties to the lower id; the row
/// number of a NaN is the error.
fn top_k_of_rows(rows: &[f32], experts: usize, k: usize) -> Result<Vec<u32>, usize> {
    let mut chosen = Vec::with_capacity(rows.len() / experts * k);
    for (token, row) in rows.chunks_exact(experts).enumerate() {
        if row.iter().any(|p| p.is_nan()) {
            return Err(token);
        }
        let first = chosen.len();
        for _ in 0..k {
            let mut best: Option<usize> = None;
            for (expert, p) in row.iter().enumerate() {
                let taken = chosen[first..].contains(&(expert as u32));
                if !taken && best.is_none_or(|best| *p > row[best]) {
                    best = Some(expert);
                }
            }
            chosen.extend(best.map(|expert| expert as u32));
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use lrmoe_kernels::half::bf16;

    use super::top_k_of_rows;

    #[test]
    fn largest_first_and_ties_to_the_lower_id() {
        let rows = [
            0.1, 0.4, 0.1, 0.4, 0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 1.0, 0.0,
        ];
        assert_eq!(
            top_k_of_rows(&rows, 4, 3),
            Ok(vec![1, 3, 0, 0, 1, 2, 2, 0, 1])
        );
        assert_eq!(top_k_of_rows(&rows[..4], 4, 4), Ok(vec![1, 3, 0, 2]));
        assert_eq!(top_k_of_rows(&[], 4, 2), Ok(vec![]));
    }

    #[test]
    fn nan_logits_do_not_select_expert_0_eight_times() {
        assert_eq!(top_k_of_rows(&[0.5, 0.5, f32::NAN, 0.5], 2, 1), Err(1));
        let nan = [f32::NAN; 16];
        assert_eq!(top_k_of_rows(&nan, 16, 8), Err(0));
        let mut last = [0.0; 16];
        last[15] = f32::NAN;
        assert_eq!(top_k_of_rows(&last, 16, 8), Err(0));
    }

    /// Probabilities are compared as f32, whatever the rows are stored in.
    #[test]
    fn bf16_rounding_before_top_k_makes_no_ties() {
        let rows = [0.25, 0.25 + 1e-4, 0.25 - 1e-4, 0.25];
        assert_eq!(top_k_of_rows(&rows, 4, 2), Ok(vec![1, 0]));
        // Rounded, all are alike, and the lower ids would have it.
        let rounded = rows.map(|p| bf16::from_f32(p).to_f32());
        assert_eq!(top_k_of_rows(&rounded, 4, 2), Ok(vec![0, 1]));
    }
}
