use super::LayerError;

/// What can go wrong in the language model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A size is zero or beyond what the model supports.
    #[error("{name} {value} is out of range, must be between 1 and {most}")]
    OutOfRange {
        /// Name of the size, as on the command line.
        name: &'static str,
        /// Its value.
        value: usize,
        /// Largest value supported.
        most: usize,
    },
    /// A token cannot be sent to more experts than there are.
    #[error("top-k {top_k} exceeds the number of experts, {experts}")]
    TopK {
        /// Experts per token.
        top_k: usize,
        /// Experts.
        experts: usize,
    },
    /// The rotary encoding turns pairs of values, so heads need an even size.
    #[error("{heads} heads do not divide width {width} into heads of an even size")]
    Heads {
        /// Model width.
        width: usize,
        /// Attention heads.
        heads: usize,
    },
    /// The model needs one MoE layer per transformer layer.
    #[error("{given} MoE layers were given to a model of {layers} layers")]
    LayerCount {
        /// MoE layers given.
        given: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// The parameters belong to a model of other sizes.
    #[error("parameter {name} of shape {expected:?} is missing or has another shape")]
    Parameter {
        /// Name of the parameter.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
    },
    /// A flat copy of the parameters has the wrong length.
    #[error("{got} parameter values were given, the model has {expected}")]
    ParameterCount {
        /// Values given.
        got: usize,
        /// Values of the model.
        expected: usize,
    },
    /// Inputs or targets are not `[sequences, length]` with a length up to the context.
    #[error(
        "{name} have shape {shape:?}, must be [sequences, length] with length 1 to {context} and inputs and targets alike"
    )]
    Shape {
        /// `inputs` or `targets`.
        name: &'static str,
        /// Their shape.
        shape: Vec<usize>,
        /// Context of the model.
        context: usize,
    },
    /// A target is not a byte.
    #[error("target {value} is not a byte")]
    Target {
        /// The value given.
        value: u32,
    },
    /// The router's probabilities are not numbers: training has diverged.
    #[error("router of layer {layer} gives NaN for token {token}")]
    NanProbability {
        /// Layer of the model.
        layer: usize,
        /// Token within this rank's batch, `sequence * length + position`.
        token: usize,
    },
    /// A MoE layer failed.
    #[error("layer {layer}: {source}")]
    Layer {
        /// Layer of the model.
        layer: usize,
        /// The layer's own error.
        source: LayerError,
    },
    /// A MoE layer returned an array that does not fit its input.
    #[error("layer {layer} returned {name} of shape {got:?}, must be {expected:?}")]
    LayerShape {
        /// Layer of the model.
        layer: usize,
        /// Which result.
        name: &'static str,
        /// Shape returned.
        got: Vec<usize>,
        /// Shape that fits.
        expected: Vec<usize>,
    },
    /// A thread panicked while it used a MoE layer.
    #[error("layer {layer} cannot be used after a panic")]
    LayerPoisoned {
        /// Layer of the model.
        layer: usize,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(candle_core::Error),
}

impl ModelError {
    /// Wraps the error so that it survives the way through candle as a type.
    pub(super) fn into_candle(self) -> candle_core::Error {
        candle_core::Error::Io(std::io::Error::other(self))
    }
}

/// Unwraps a model error that travelled through candle, so `loss.backward()?` returns it as it was.
impl From<candle_core::Error> for ModelError {
    fn from(error: candle_core::Error) -> Self {
        use candle_core::Error;
        match error {
            Error::Io(io) => match io.downcast::<ModelError>() {
                Ok(own) => own,
                Err(io) => Self::Candle(Error::Io(io)),
            },
            Error::Context { inner, context } => match Self::from(*inner) {
                Self::Candle(inner) => Self::Candle(inner.context(context)),
                own => own,
            },
            other => Self::Candle(other),
        }
    }
}
