use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};
use ndarray::{Array2, ArrayView2};

use super::ModelError;
use super::ops::{tensor, view, with_values};

/// Any error of a [`SparseLayer`]; downcast it to the layer's own type.
pub type LayerError = Box<dyn std::error::Error + Send + Sync>;

/// A MoE layer as the model holds it: one object per layer, reached from candle's graph.
pub type SharedLayer = Arc<Mutex<dyn SparseLayer>>;

/// What the language model needs of a MoE layer.
pub trait SparseLayer: Send {
    /// Output `[tokens, D]` for rows `x` `[tokens, D]` sent to `expert_ids` `[tokens, k]`
    /// (-1 = masked) with `gate_weights` `[tokens, k]`.
    ///
    /// `training` says that [`backward`](Self::backward) may follow, once.
    ///
    /// # Errors
    ///
    /// Whatever the layer cannot do; it stops the step.
    fn forward(
        &mut self,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        training: bool,
    ) -> Result<Array2<f32>, LayerError>;

    /// Gradients `(dx [tokens, D], dgate_weights [tokens, k])` for the gradient `dy` `[tokens, D]`
    /// of the last forward pass in training.
    ///
    /// # Errors
    ///
    /// Whatever the layer cannot do; it stops the step.
    fn backward(
        &mut self,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), LayerError>;

    /// Pairs of each expert `[experts]` in the last forward pass, summed over all ranks.
    fn loads(&self) -> &[u32];
}

/// Locks a layer.
pub(super) fn lock(
    layer: usize,
    shared: &SharedLayer,
) -> Result<MutexGuard<'_, dyn SparseLayer + 'static>, ModelError> {
    shared
        .lock()
        .map_err(|_| ModelError::LayerPoisoned { layer })
}

/// The layer as a candle op over rows `x` `[tokens, D]` and gate weights `[tokens, k]`.
pub(super) struct SparseOp {
    pub(super) layer: usize,
    pub(super) shared: SharedLayer,
    /// `[tokens, k]`
    pub(super) expert_ids: Array2<i32>,
    pub(super) training: bool,
}

impl SparseOp {
    fn run_forward(
        &self,
        x: ArrayView2<'_, f32>,
        gate_weights: ArrayView2<'_, f32>,
    ) -> Result<Vec<f32>, ModelError> {
        let y = lock(self.layer, &self.shared)?
            .forward(x, self.expert_ids.view(), gate_weights, self.training)
            .map_err(|source| self.failed(source))?;
        self.checked("y", y, x.dim())
    }

    fn run_backward(&self, dy: ArrayView2<'_, f32>) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        let (dx, dgate) = lock(self.layer, &self.shared)?
            .backward(dy)
            .map_err(|source| self.failed(source))?;
        Ok((
            self.checked("dx", dx, dy.dim())?,
            self.checked("dgate_weights", dgate, self.expert_ids.dim())?,
        ))
    }

    fn failed(&self, source: LayerError) -> ModelError {
        ModelError::Layer {
            layer: self.layer,
            source,
        }
    }

    fn checked(
        &self,
        name: &'static str,
        array: Array2<f32>,
        expected: (usize, usize),
    ) -> Result<Vec<f32>, ModelError> {
        if array.dim() != expected {
            return Err(ModelError::LayerShape {
                layer: self.layer,
                name,
                got: array.shape().to_vec(),
                expected: vec![expected.0, expected.1],
            });
        }
        Ok(if array.is_standard_layout() {
            array.into_raw_vec_and_offset().0
        } else {
            array.iter().copied().collect()
        })
    }
}

impl CustomOp2 for SparseOp {
    fn name(&self) -> &'static str {
        "sparse-layer"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gate_weights: &CpuStorage,
        gate_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let y = self
            .run_forward(
                view(x, x_layout, self.name())?,
                view(gate_weights, gate_layout, self.name())?,
            )
            .map_err(ModelError::into_candle)?;
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gate_weights: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let shape = x.dims2()?;
        let gradients = with_values([dy], |[dy]| {
            let dy = ArrayView2::from_shape(shape, dy).map_err(candle_core::Error::wrap)?;
            self.run_backward(dy).map_err(ModelError::into_candle)
        });
        let (dx, dgate) = gradients??;
        Ok((
            Some(tensor(dx, x.shape())?),
            Some(tensor(dgate, gate_weights.shape())?),
        ))
    }
}
