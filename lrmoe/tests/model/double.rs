//! Stand-ins for the MoE layer.

use std::sync::{Arc, Mutex};

use lrmoe::model::{LayerError, ModelConfig, SharedLayer, SparseLayer};
use ndarray::{Array2, ArrayView2};

/// Experts that are one matrix each: `y_t = sum_j p_tj W_e x_t`, in plain loops.
pub(crate) struct LinearExperts {
    /// `[experts, D, D]`
    pub(crate) weights: Vec<f32>,
    width: usize,
    loads: Vec<u32>,
    seen: Option<(Array2<f32>, Array2<i32>, Array2<f32>)>,
}

/// Weights of a layer's experts: fixed numbers between -0.5 and 0.5.
pub(crate) fn expert_weights(config: &ModelConfig, layer: usize) -> Vec<f32> {
    (0..config.experts * config.width * config.width)
        .map(|i| ((i * 7919 + layer * 104_729) % 1009) as f32 / 1009.0 - 0.5)
        .collect()
}

impl LinearExperts {
    pub(crate) fn new(config: &ModelConfig, layer: usize) -> Self {
        Self {
            weights: expert_weights(config, layer),
            width: config.width,
            loads: vec![0; config.experts],
            seen: None,
        }
    }

    fn weight(&self, expert: i32, row: usize, column: usize) -> f32 {
        self.weights[(expert as usize * self.width + row) * self.width + column]
    }
}

impl SparseLayer for LinearExperts {
    fn forward(
        &mut self,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        training: bool,
    ) -> Result<Array2<f32>, LayerError> {
        self.loads.fill(0);
        let mut y = Array2::zeros(x.dim());
        for ((t, j), &expert) in expert_ids.indexed_iter() {
            self.loads[expert as usize] += 1;
            for row in 0..self.width {
                for column in 0..self.width {
                    y[[t, row]] +=
                        gate_weights[[t, j]] * self.weight(expert, row, column) * x[[t, column]];
                }
            }
        }
        self.seen =
            training.then(|| (x.to_owned(), expert_ids.to_owned(), gate_weights.to_owned()));
        Ok(y)
    }

    fn backward(
        &mut self,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), LayerError> {
        let (x, expert_ids, gate_weights) = self.seen.take().ok_or("backward without forward")?;
        let mut dx = Array2::zeros(x.dim());
        let mut dgate = Array2::zeros(gate_weights.dim());
        for ((t, j), &expert) in expert_ids.indexed_iter() {
            for row in 0..self.width {
                for column in 0..self.width {
                    let weight = self.weight(expert, row, column);
                    dx[[t, column]] += gate_weights[[t, j]] * weight * dy[[t, row]];
                    dgate[[t, j]] += weight * x[[t, column]] * dy[[t, row]];
                }
            }
        }
        Ok((dx, dgate))
    }

    fn loads(&self) -> &[u32] {
        &self.loads
    }
}

pub(crate) fn linear_layers(config: &ModelConfig) -> Vec<SharedLayer> {
    (0..config.layers)
        .map(|layer| Arc::new(Mutex::new(LinearExperts::new(config, layer))) as SharedLayer)
        .collect()
}

/// What a [`Faulty`] layer does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Forward,
    Backward,
    Shape,
    Panic,
}

#[derive(Debug, thiserror::Error)]
#[error("rank {rank} is gone")]
pub(crate) struct PeerGone {
    pub(crate) rank: usize,
}

/// A layer that passes rows through until its fault.
pub(crate) struct Faulty {
    pub(crate) fault: Fault,
    pub(crate) loads: Vec<u32>,
}

impl SparseLayer for Faulty {
    fn forward(
        &mut self,
        x: ArrayView2<'_, f32>,
        _expert_ids: ArrayView2<'_, i32>,
        _gate_weights: ArrayView2<'_, f32>,
        _training: bool,
    ) -> Result<Array2<f32>, LayerError> {
        match self.fault {
            Fault::Forward => Err(Box::new(PeerGone { rank: 3 })),
            Fault::Shape => Ok(Array2::zeros((1, 1))),
            Fault::Panic => panic!("the layer panics on purpose"),
            Fault::Backward => Ok(x.to_owned()),
        }
    }

    fn backward(
        &mut self,
        _dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), LayerError> {
        Err(Box::new(PeerGone { rank: 3 }))
    }

    fn loads(&self) -> &[u32] {
        &self.loads
    }
}
