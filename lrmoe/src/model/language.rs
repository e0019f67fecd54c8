use std::sync::Arc;

use candle_core::{DType, Tensor, Var};

use super::attention::{RotaryTable, attention};
use super::ops;
use super::router::{self, Routing};
use super::sparse::{SparseOp, lock};
use super::{DenseParameters, ModelConfig, ModelError, SharedLayer, VOCABULARY};

/// The byte-level language model of one rank.
pub struct LanguageModel {
    config: ModelConfig,
    rotary: Arc<RotaryTable>,
    token: Var,
    blocks: Vec<Block>,
    norm: Var,
    head: Var,
}

struct Block {
    norm_attention: Var,
    qkv: Var,
    out: Var,
    norm_moe: Var,
    router: Var,
    layer: SharedLayer,
}

impl std::fmt::Debug for LanguageModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LanguageModel")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// What a batch costs.
#[derive(Debug)]
pub struct Losses {
    /// Mean cross entropy over this rank's tokens, in nats per byte; 0 without tokens.
    pub cross_entropy: Tensor,
    /// What training lowers: the cross entropy plus the weighted balance losses of all layers.
    pub total: Tensor,
}

/// One pass over a batch.
#[derive(Clone, Copy)]
struct Pass {
    length: usize,
    training: bool,
}

impl Pass {
    /// A parameter's tensor; without training it is cut off, so that no graph is kept.
    fn weight(self, variable: &Var) -> Tensor {
        if self.training {
            variable.as_tensor().clone()
        } else {
            variable.as_detached_tensor()
        }
    }

    /// `x W^T` for rows `x` and a weight `[outputs, inputs]`.
    fn linear(self, x: &Tensor, weight: &Var) -> Result<Tensor, ModelError> {
        Ok(x.matmul(&self.weight(weight).t()?)?)
    }
}

impl LanguageModel {
    /// Builds the model on `parameters`, whose later values it follows, with one MoE layer per
    /// transformer layer.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit ([`ModelConfig::validate`]), parameters of a model with other sizes, or
    /// another number of layers than `config` says.
    pub fn new(
        config: &ModelConfig,
        parameters: &DenseParameters,
        layers: Vec<SharedLayer>,
    ) -> Result<Self, ModelError> {
        config.validate()?;
        if layers.len() != config.layers {
            return Err(ModelError::LayerCount {
                given: layers.len(),
                layers: config.layers,
            });
        }
        let width = config.width;
        let block = |(index, layer)| {
            let variable = |part: &str, shape: &[usize]| {
                parameters.variable(&format!("blocks.{index}.{part}"), shape)
            };
            Ok(Block {
                norm_attention: variable("norm_attention.scale", &[width])?,
                qkv: variable("attention.qkv.weight", &[3 * width, width])?,
                out: variable("attention.out.weight", &[width, width])?,
                norm_moe: variable("norm_moe.scale", &[width])?,
                router: variable("moe.router.weight", &[config.experts, width])?,
                layer,
            })
        };
        Ok(Self {
            config: config.clone(),
            rotary: RotaryTable::new(config.context, config.head_size()),
            token: parameters.variable("token.weight", &[VOCABULARY, width])?,
            blocks: layers
                .into_iter()
                .enumerate()
                .map(block)
                .collect::<Result<_, ModelError>>()?,
            norm: parameters.variable("norm.scale", &[width])?,
            head: parameters.variable("head.weight", &[VOCABULARY, width])?,
        })
    }

    /// Logits `[sequences * length, 256]` for bytes `inputs` `[sequences, length]` (u8 or u32, up to
    /// the context long; there may be no sequences).
    ///
    /// # Errors
    ///
    /// Inputs of another shape, a router that gives NaN, and what the MoE layers report.
    pub fn forward(&self, inputs: &Tensor, training: bool) -> Result<Tensor, ModelError> {
        Ok(self.run(inputs, training)?.0)
    }

    /// Loss of predicting `targets` from `inputs`, both `[sequences, length]`.
    ///
    /// Per layer the balance loss is `E * sum over experts of (share of all ranks' pairs) * (mean
    /// probability over this rank's tokens)`, 1 when routing is uniform.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), and targets of another shape than the inputs.
    pub fn loss(
        &self,
        inputs: &Tensor,
        targets: &Tensor,
        balance_weight: f64,
        training: bool,
    ) -> Result<Losses, ModelError> {
        if inputs.dims() != targets.dims() {
            return Err(self.shape_error("targets", targets));
        }
        let (logits, balance) = self.run(inputs, training)?;
        let targets: Vec<u32> = targets.flatten_all()?.to_dtype(DType::U32)?.to_vec1()?;
        if let Some(&value) = targets.iter().find(|&&value| value as usize >= VOCABULARY) {
            return Err(ModelError::Target { value });
        }
        let cross_entropy = ops::cross_entropy(&logits, targets)?;
        let mut total = cross_entropy.clone();
        if balance_weight != 0.0 {
            for loss in balance {
                total = total.add(&loss.affine(balance_weight, 0.0)?)?;
            }
        }
        Ok(Losses {
            cross_entropy,
            total,
        })
    }

    /// Logits and the balance loss of every layer.
    fn run(&self, inputs: &Tensor, training: bool) -> Result<(Tensor, Vec<Tensor>), ModelError> {
        let pass = match *inputs.dims() {
            [_, length] if (1..=self.config.context).contains(&length) => Pass { length, training },
            _ => return Err(self.shape_error("inputs", inputs)),
        };
        let bytes = inputs.flatten_all()?.to_dtype(DType::U32)?;
        let mut x = pass.weight(&self.token).index_select(&bytes, 0)?;
        let mut balance = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let normed = ops::rms_norm(&x, &pass.weight(&block.norm_attention))?;
            x = x.add(&self.attention(pass, block, &normed)?)?;
            let normed = ops::rms_norm(&x, &pass.weight(&block.norm_moe))?;
            let (y, loss) = self.sparse(pass, index, block, normed)?;
            x = x.add(&y)?;
            balance.push(loss);
        }
        let normed = ops::rms_norm(&x, &pass.weight(&self.norm))?;
        Ok((pass.linear(&normed, &self.head)?, balance))
    }

    /// Causal attention over rows `x` `[tokens, D]`.
    fn attention(&self, pass: Pass, block: &Block, x: &Tensor) -> Result<Tensor, ModelError> {
        let qkv = pass.linear(x, &block.qkv)?;
        let mixed = attention(&qkv, &self.rotary, self.config.heads, pass.length)?;
        pass.linear(&mixed, &block.out)
    }

    /// The MoE layer over rows `x` `[tokens, D]`, and its balance loss.
    fn sparse(
        &self,
        pass: Pass,
        index: usize,
        block: &Block,
        x: Tensor,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let Routing {
            probabilities,
            expert_ids,
            gate_weights,
        } = router::route(index, &x, &pass.weight(&block.router), self.config.top_k)?;
        let op = SparseOp {
            layer: index,
            shared: Arc::clone(&block.layer),
            expert_ids,
            training: pass.training,
        };
        let y = x.apply_op2(&gate_weights.contiguous()?, op)?;
        let loss = router::balance_loss(&probabilities, lock(index, &block.layer)?.loads())?;
        Ok((y, loss))
    }

    fn shape_error(&self, name: &'static str, tensor: &Tensor) -> ModelError {
        ModelError::Shape {
            name,
            shape: tensor.dims().to_vec(),
            context: self.config.context,
        }
    }
}
