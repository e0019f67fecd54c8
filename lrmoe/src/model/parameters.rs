use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution, StandardNormal};

use super::ops::with_values;
use super::{ModelConfig, ModelError, VOCABULARY};

/// The dense parameters, the same on every rank: named tensors in a fixed order.
#[derive(Debug)]
pub struct DenseParameters {
    names: Vec<String>,
    variables: Vec<Var>,
}

/// How a tensor starts.
enum Start {
    Ones,
    Normal { deviation: f64 },
}

impl DenseParameters {
    /// Initial parameters. Each tensor has its own random numbers, drawn by `seed` and its name.
    ///
    /// The embedding starts with deviation 1 and so leads the residual stream; each layer adds a
    /// little, its last matrix being scaled by `1 / sqrt(2 * layers)`.
    ///
    /// # Errors
    ///
    /// Those of [`ModelConfig::validate`].
    pub fn new(config: &ModelConfig, seed: u64) -> Result<Self, ModelError> {
        config.validate()?;
        let width = config.width;
        let mut parameters = Self {
            names: Vec::new(),
            variables: Vec::new(),
        };
        let normal = |deviation| Start::Normal { deviation };
        let by_input = input_deviation(width);
        parameters.add(
            seed,
            "token.weight".into(),
            &[VOCABULARY, width],
            normal(1.0),
        )?;
        for layer in 0..config.layers {
            let name = |part: &str| format!("blocks.{layer}.{part}");
            let small = normal(by_input * residual_scale(config));
            let qkv = [3 * width, width];
            let router = [config.experts, width];
            parameters.add(seed, name("norm_attention.scale"), &[width], Start::Ones)?;
            parameters.add(seed, name("attention.qkv.weight"), &qkv, normal(by_input))?;
            parameters.add(seed, name("attention.out.weight"), &[width, width], small)?;
            parameters.add(seed, name("norm_moe.scale"), &[width], Start::Ones)?;
            parameters.add(seed, name("moe.router.weight"), &router, normal(by_input))?;
        }
        parameters.add(seed, "norm.scale".into(), &[width], Start::Ones)?;
        parameters.add(
            seed,
            "head.weight".into(),
            &[VOCABULARY, width],
            normal(0.02),
        )?;
        Ok(parameters)
    }

    fn add(
        &mut self,
        seed: u64,
        name: String,
        shape: &[usize],
        start: Start,
    ) -> Result<(), ModelError> {
        let values = match start {
            Start::Ones => Tensor::ones(shape, DType::F32, &Device::Cpu)?,
            Start::Normal { deviation } => {
                let values = normal_values(seed, &name, shape.iter().product(), deviation);
                Tensor::from_vec(values, shape, &Device::Cpu)?
            }
        };
        self.variables.push(Var::from_tensor(&values)?);
        self.names.push(name);
        Ok(())
    }

    /// Names, in the order of the flat copies.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Shapes, in the same order.
    pub fn shapes(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.variables.iter().map(|variable| variable.dims())
    }

    /// Number of values over all tensors: the length of the flat copies.
    #[expect(clippy::len_without_is_empty, reason = "there is always an embedding")]
    pub fn len(&self) -> usize {
        self.variables
            .iter()
            .map(|variable| variable.elem_count())
            .sum()
    }

    /// The variable of a name and shape.
    pub(super) fn variable(&self, name: &str, shape: &[usize]) -> Result<Var, ModelError> {
        self.names
            .iter()
            .zip(&self.variables)
            .find(|(known, variable)| *known == name && variable.dims() == shape)
            .map(|(_, variable)| variable.clone())
            .ok_or_else(|| ModelError::Parameter {
                name: name.into(),
                expected: shape.to_vec(),
            })
    }

    /// Copies all values into one vector, tensor after tensor.
    ///
    /// # Errors
    ///
    /// Those of candle.
    pub fn flatten(&self) -> Result<Vec<f32>, ModelError> {
        let mut flat = Vec::with_capacity(self.len());
        for variable in &self.variables {
            with_values([variable], |[values]| flat.extend_from_slice(values))?;
        }
        Ok(flat)
    }

    /// Sets all values, given as [`flatten`](Self::flatten) returns them. A model built on these
    /// parameters sees the new values.
    ///
    /// # Errors
    ///
    /// [`ModelError::ParameterCount`] if `flat` has another length.
    pub fn load(&self, flat: &[f32]) -> Result<(), ModelError> {
        if flat.len() != self.len() {
            return Err(ModelError::ParameterCount {
                got: flat.len(),
                expected: self.len(),
            });
        }
        let mut rest = flat;
        for variable in &self.variables {
            let (values, after) = rest.split_at(variable.elem_count());
            variable.set(&Tensor::from_slice(values, variable.dims(), &Device::Cpu)?)?;
            rest = after;
        }
        Ok(())
    }

    /// The gradients in the order of [`flatten`](Self::flatten); zeros where a tensor has none.
    ///
    /// # Errors
    ///
    /// Those of candle.
    pub fn gradients(&self, store: &GradStore) -> Result<Vec<f32>, ModelError> {
        let mut flat = Vec::with_capacity(self.len());
        for variable in &self.variables {
            match store.get(variable) {
                Some(gradient) => {
                    with_values([gradient], |[values]| flat.extend_from_slice(values))?;
                }
                None => flat.resize(flat.len() + variable.elem_count(), 0.0),
            }
        }
        Ok(flat)
    }
}

/// The weights of one expert, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWeights {
    /// Gate projection `[F, D]`; experts without a gate leave it out.
    pub gate: Vec<f32>,
    /// Up projection `[F, D]`.
    pub up: Vec<f32>,
    /// Down projection `[D, F]`.
    pub down: Vec<f32>,
}

/// Initial weights of an expert: a function of layer, expert and seed alone, whichever rank asks.
pub fn expert_init(config: &ModelConfig, layer: usize, expert: usize, seed: u64) -> ExpertWeights {
    let count = config.hidden * config.width;
    let into = input_deviation(config.width);
    let down = input_deviation(config.hidden) * residual_scale(config);
    let values = |part: &str, deviation| {
        let name = format!("blocks.{layer}.moe.experts.{expert}.{part}");
        normal_values(seed, &name, count, deviation)
    };
    ExpertWeights {
        gate: values("gate", into),
        up: values("up", into),
        down: values("down", down),
    }
}

/// Deviation that keeps the size of values through a matrix with this many inputs.
fn input_deviation(inputs: usize) -> f64 {
    (inputs as f64).powf(-0.5)
}

/// Factor of a matrix that ends a residual branch, of which there are two a layer.
fn residual_scale(config: &ModelConfig) -> f64 {
    (2.0 * config.layers as f64).powf(-0.5)
}

/// `count` normal numbers from the stream of this seed and name.
fn normal_values(seed: u64, name: &str, count: usize, deviation: f64) -> Vec<f32> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&fnv1a(name).to_le_bytes());
    let mut random = ChaCha12Rng::from_seed(key);
    (0..count)
        .map(|_| {
            let value: f64 = StandardNormal.sample(&mut random);
            (value * deviation) as f32
        })
        .collect()
}

/// FNV-1a hash, 64 bits.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
