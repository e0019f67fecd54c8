use super::ModelError;

/// Sizes of the language model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Width D of the residual stream.
    pub width: usize,
    /// Attention heads; divides `width` into heads of an even size.
    pub heads: usize,
    /// Transformer layers, each with one MoE layer.
    pub layers: usize,
    /// Longest sequence, in bytes.
    pub context: usize,
    /// Experts E of each MoE layer.
    pub experts: usize,
    /// Experts k that each token is sent to.
    pub top_k: usize,
    /// Width F inside an expert.
    pub hidden: usize,
}

impl ModelConfig {
    /// Checks that a model of these sizes can be built.
    ///
    /// # Errors
    ///
    /// A size out of its range, `top_k` above `experts`, or heads that do not divide the width into
    /// parts of an even size.
    pub fn validate(&self) -> Result<(), ModelError> {
        let ranges = [
            ("width", self.width, 1 << 16),
            ("heads", self.heads, 1 << 16),
            ("layers", self.layers, 1 << 10),
            ("context", self.context, 1 << 20),
            ("experts", self.experts, 1 << 16),
            ("top-k", self.top_k, 1 << 16),
            ("hidden", self.hidden, 1 << 20),
        ];
        for (name, value, most) in ranges {
            if !(1..=most).contains(&value) {
                return Err(ModelError::OutOfRange { name, value, most });
            }
        }
        if self.top_k > self.experts {
            return Err(ModelError::TopK {
                top_k: self.top_k,
                experts: self.experts,
            });
        }
        if !self.width.is_multiple_of(2 * self.heads) {
            return Err(ModelError::Heads {
                width: self.width,
                heads: self.heads,
            });
        }
        Ok(())
    }

    /// Values of each attention head.
    pub(super) fn head_size(&self) -> usize {
        self.width / self.heads
    }
}
