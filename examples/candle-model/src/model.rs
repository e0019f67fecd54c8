//! A classifier of points in the plane: linear, one MoE layer with a residual, linear.

use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor, Var};

use crate::rows::{ByExpert, Combine, Dispatch};

const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const WIDTH: usize = 32;
const HIDDEN: usize = 32;

pub struct Model {
    input: Var,
    pub moe: Moe,
    output: Var,
}

/// `y_t = sum of p * down_e relu(up_e x_t)` over the experts e that token t is sent to, with gate weights p.
pub struct Moe {
    /// `[width, experts]`
    router: Var,
    /// `[width, hidden]` of each expert
    up: Vec<Var>,
    /// `[hidden, width]` of each expert
    down: Vec<Var>,
}

impl Model {
    /// With weights drawn by `draw`, which gives a matrix of `(inputs, outputs)`.
    pub fn new(
        inputs: usize,
        classes: usize,
        draw: &mut impl FnMut(usize, usize) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut weights = |inputs, outputs| Var::from_tensor(&draw(inputs, outputs)?);
        Ok(Self {
            input: weights(inputs, WIDTH)?,
            moe: Moe {
                router: weights(WIDTH, EXPERTS)?,
                up: (0..EXPERTS)
                    .map(|_| weights(WIDTH, HIDDEN))
                    .collect::<Result<_>>()?,
                down: (0..EXPERTS)
                    .map(|_| weights(HIDDEN, WIDTH))
                    .collect::<Result<_>>()?,
            },
            output: weights(WIDTH, classes)?,
        })
    }

    /// Logits `[tokens, classes]` of `x` (`[tokens, inputs]`).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.matmul(&self.input)?;
        let x = (&x + self.moe.forward(&x)?)?;
        x.matmul(&self.output)
    }

    pub fn parameters(&self) -> impl Iterator<Item = &Var> {
        let experts = self.moe.up.iter().chain(&self.moe.down);
        [&self.input, &self.moe.router, &self.output]
            .into_iter()
            .chain(experts)
    }
}

impl Moe {
    /// `[tokens, width]` to `[tokens, width]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (expert_ids, gate_weights) = self.route(x)?;
        let order = Arc::new(ByExpert::new(&expert_ids, TOP_K, EXPERTS));
        // Rows lie by expert, so that each expert has one product over rows without gaps.
        let rows = x.contiguous()?.apply_op1(Dispatch(order.clone()))?;
        let mut outputs = Vec::new();
        for (expert, ends) in order.offsets.windows(2).enumerate() {
            if ends[0] < ends[1] {
                let rows = rows.narrow(0, ends[0], ends[1] - ends[0])?;
                outputs.push(self.expert(expert, &rows)?);
            }
        }
        let pairs = Tensor::new(order.pairs.as_slice(), x.device())?;
        let gate_weights = gate_weights.flatten_all()?.index_select(&pairs, 0)?;
        let outputs = Tensor::cat(&outputs, 0)?.broadcast_mul(&gate_weights.unsqueeze(1)?)?;
        outputs.apply_op1(Combine(order))
    }

    /// Expert of each pair `[tokens * top_k]`, and its gate weight `[tokens, top_k]`: the largest router probabilities of each token, over
    /// their sum.
    fn route(&self, x: &Tensor) -> Result<(Vec<u32>, Tensor)> {
        let logits = x.matmul(&self.router)?;
        let ids = logits
            .arg_sort_last_dim(false)?
            .narrow(1, 0, TOP_K)?
            .contiguous()?;
        // The softmax over the chosen: the sum over all experts would cancel.
        let chosen = logits.gather(&ids, D::Minus1)?;
        let chosen = chosen
            .broadcast_sub(&chosen.max_keepdim(D::Minus1)?.detach())?
            .exp()?;
        let gate_weights = chosen.broadcast_div(&chosen.sum_keepdim(D::Minus1)?)?;
        Ok((ids.flatten_all()?.to_vec1()?, gate_weights))
    }

    fn expert(&self, expert: usize, rows: &Tensor) -> Result<Tensor> {
        rows.matmul(&self.up[expert])?
            .relu()?
            .matmul(&self.down[expert])
    }
}

/// Mean cross entropy of `logits` (`[tokens, classes]`) for `labels` (`[tokens]`, u32).
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let logits = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let sums = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let own = logits.gather(&labels.unsqueeze(1)?, D::Minus1)?;
    (sums - own)?.mean_all()
}

/// Share of `labels` that have the largest logit.
pub fn accuracy(logits: &Tensor, labels: &Tensor) -> Result<f32> {
    let right = logits.argmax(D::Minus1)?.eq(labels)?;
    right.to_dtype(DType::F32)?.mean_all()?.to_scalar()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The same layer without moving rows: every expert on every token, most with gate weight 0.
    fn dense(moe: &Moe, x: &Tensor) -> Result<Tensor> {
        let (expert_ids, gate_weights) = moe.route(x)?;
        let ids = Tensor::from_vec(expert_ids, gate_weights.shape(), x.device())?;
        let mut sum = x.zeros_like()?;
        for expert in 0..EXPERTS {
            let here = ids.eq(expert as u32)?.to_dtype(DType::F32)?;
            let gate_weight = (here * &gate_weights)?.sum_keepdim(D::Minus1)?;
            sum = (sum + moe.expert(expert, x)?.broadcast_mul(&gate_weight)?)?;
        }
        Ok(sum)
    }

    #[test]
    fn values_and_gradients_are_those_of_every_expert_on_every_token() -> Result<()> {
        let model = crate::model()?;
        let x = Var::from_tensor(&crate::uniform(&mut crate::random(2), (50, WIDTH))?)?;
        let dy = crate::uniform(&mut crate::random(3), (50, WIDTH))?;
        let gradients = |y: Tensor| -> Result<_> {
            let store = (&y * &dy)?.sum_all()?.backward()?;
            Ok((y, store))
        };
        let (y, sparse) = gradients(model.moe.forward(&x)?)?;
        let (expected, exact) = gradients(dense(&model.moe, &x)?)?;
        let near = |a: &Tensor, b: &Tensor| -> Result<()> {
            let error = (a - b)?.abs()?.max_all()?.to_scalar::<f32>()?;
            let size = b.abs()?.max_all()?.to_scalar::<f32>()?;
            // Sums of at most 50 rows and 64 products in another order.
            assert!(size > 0.0 && error < 1e-5 * size, "{error} of {size}");
            Ok(())
        };
        near(&y, &expected)?;
        let moe = [&x, &model.moe.router].into_iter();
        for parameter in moe.chain(&model.moe.up).chain(&model.moe.down) {
            let [a, b] =
                [&sparse, &exact].map(|store| store.get(parameter).expect("it has a gradient"));
            near(a, b)?;
        }
        Ok(())
    }

    #[test]
    fn experts_without_tokens_are_left_out() -> Result<()> {
        let model = crate::model()?;
        let x = Tensor::ones((3, WIDTH), DType::F32, &Device::Cpu)?;
        // Equal tokens choose the same two of eight experts.
        let y = model.moe.forward(&x)?;
        let error = (y - dense(&model.moe, &x)?)?
            .abs()?
            .max_all()?
            .to_scalar::<f32>()?;
        assert!(error < 1e-5, "{error}");
        Ok(())
    }
}
