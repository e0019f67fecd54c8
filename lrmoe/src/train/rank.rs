//! One rank's training loop, over any communicator.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor};
use lrmoe_comm::{Collective, Counted, Hierarchical, Reduction};
use ndarray::{Array2, ArrayView2};

use super::checkpoint::Checkpoint;
use super::oracle::{self, Oracle};
use super::record::{StepRecord, gather_record};
use super::trace::{RankPairs, StepTrace};
use super::traffic::gather_traffic;
use crate::adamw::{AdamW, Moments, sum_of_squares};
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::{Backend, ExpertParameters, LayerConfig, LayerState, MoeLayer};
use crate::model::{
    DenseParameters, ExpertWeights, LanguageModel, LayerError, Losses, SharedLayer, SparseLayer,
    expert_init,
};
use crate::text::Corpus;

/// A communicator that counts what it sends and knows of nodes.
type InNodes<C> = Hierarchical<Counted<C>>;

/// A layer with the communicator its rank shares among its layers.
#[derive(Debug)]
struct Attached<B: Backend, C> {
    layer: MoeLayer<B>,
    comm: Arc<Mutex<InNodes<C>>>,
    step: u32,
    /// Whether the step's pairs are recorded, and those of the last forward pass.
    records_pairs: bool,
    pairs: Option<(Array2<i32>, Array2<f32>)>,
    /// Draws that the oracle is to look at in this step, 0 if it is not asked, and what it found.
    oracle_draws: u32,
    oracle: Option<Oracle>,
}

impl<B: Backend, C: Collective> SparseLayer for Attached<B, C> {
    fn forward(
        &mut self,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        training: bool,
    ) -> Result<Array2<f32>, LayerError> {
        let step = training.then_some(self.step);
        if training {
            let recorded = self.records_pairs || self.oracle_draws > 0;
            self.pairs = recorded.then(|| (expert_ids.to_owned(), gate_weights.to_owned()));
        }
        Ok(self
            .layer
            .forward(&mut *lock(&self.comm), x, expert_ids, gate_weights, step)?)
    }

    fn backward(
        &mut self,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), LayerError> {
        let comm = &mut *lock(&self.comm);
        self.oracle = None;
        if self.oracle_draws > 0 {
            // What the oracle sends is no part of the step.
            let sent = *comm.world().traffic();
            let ahead = Oracle::ahead(&mut self.layer, comm, dy, self.oracle_draws)?;
            comm.world_mut().set_traffic(sent);
            self.oracle = Some(ahead);
        }
        let (dx, dp) = self.layer.backward(comm, dy)?;
        if let (Some(oracle), Some((ids, _))) = (&mut self.oracle, &self.pairs) {
            let judged = self.layer.scores().zip(self.layer.selection());
            oracle.take_backward([&dx, &dp], ids, self.layer.config().experts, judged);
        }
        Ok((dx, dp))
    }

    fn loads(&self) -> &[u32] {
        self.layer.loads().map_or(&[], |loads| loads.per_expert())
    }
}

/// A rank's model, optimizer and data.
pub(super) struct RankTrainer<'a, B: Backend, C> {
    config: &'a TrainConfig,
    corpus: &'a Corpus,
    comm: Arc<Mutex<InNodes<C>>>,
    rank: usize,
    model: LanguageModel,
    dense: DenseParameters,
    layers: Vec<Arc<Mutex<Attached<B, C>>>>,
    parameters: Vec<f32>,
    moments: Moments,
    adamw: AdamW,
    /// Steps done.
    step: u32,
}

impl<'a, B: Backend + Clone, C: Collective + 'static> RankTrainer<'a, B, C> {
    /// `layers`: settings of each MoE layer, the same on every rank.
    pub(super) fn new(
        backend: &B,
        config: &'a TrainConfig,
        corpus: &'a Corpus,
        layers: Vec<LayerConfig>,
        comm: C,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self, Error> {
        let rank = comm.rank();
        let comm = Counted::new(comm, config.ranks_per_node)?;
        let algorithm = config.all_to_all.algorithm();
        let comm = Hierarchical::new(comm, config.ranks_per_node, algorithm)?;
        let comm = Arc::new(Mutex::new(comm));
        let mut attached = Vec::with_capacity(layers.len());
        for (index, layer) in layers.into_iter().enumerate() {
            let init = |expert| {
                let ExpertWeights { gate, up, down } =
                    expert_init(&config.model, index, expert, config.seed);
                ExpertParameters {
                    gate: config.activation.is_gated().then_some(gate),
                    up,
                    down,
                }
            };
            let mut layer = MoeLayer::on(backend.clone(), layer, rank, init)?;
            if let Some(checkpoint) = checkpoint {
                layer.restore(&checkpoint.layers[index])?;
            }
            attached.push(Arc::new(Mutex::new(Attached {
                layer,
                comm: comm.clone(),
                step: 0,
                records_pairs: false,
                pairs: None,
                oracle_draws: 0,
                oracle: None,
            })));
        }
        let dense = DenseParameters::new(&config.model, config.seed)?;
        let mut moments = Moments::zeros(dense.len());
        if let Some(checkpoint) = checkpoint {
            dense.load(&checkpoint.dense)?;
            moments = checkpoint.moments.clone();
        }
        let sparse = attached
            .iter()
            .map(|layer| layer.clone() as SharedLayer)
            .collect();
        Ok(Self {
            model: LanguageModel::new(&config.model, &dense, sparse)?,
            parameters: dense.flatten()?,
            adamw: AdamW {
                weight_decay: config.weight_decay,
                ..AdamW::default()
            },
            step: checkpoint.map_or(0, |checkpoint| checkpoint.step),
            layers: attached,
            config,
            corpus,
            comm,
            rank,
            dense,
            moments,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Steps done.
    pub(super) fn step(&self) -> u32 {
        self.step
    }

    /// One training step over the global batch. The record is the same on every rank; the trace, if there is to be one, comes on rank 0.
    pub(super) fn train_step(&mut self) -> Result<(StepRecord, Option<StepTrace>), Error> {
        let started = Instant::now();
        // What came before, such as an evaluation, is no part of the step.
        lock(&self.comm).world_mut().take_traffic();
        let (ranks, step) = (self.config.ranks, self.step);
        let share = self.config.batch / ranks;
        let (inputs, targets) = self.corpus.batch(
            self.config.seed,
            step,
            self.rank * share..(self.rank + 1) * share,
        );
        let every = self.config.record_pairs_every;
        let records_pairs = every > 0 && step.is_multiple_of(every);
        let oracle_draws = oracle::draws(self.config, step + 1);
        for layer in &self.layers {
            let mut layer = lock(layer);
            layer.step = step;
            layer.records_pairs = records_pairs;
            layer.oracle_draws = oracle_draws;
            layer.layer.keep_scores(records_pairs || oracle_draws > 0);
        }
        let shape = (share, self.config.model.context);
        let (inputs, targets) = (bytes_tensor(inputs, shape)?, bytes_tensor(targets, shape)?);
        let (loss, dense) = self.gradients(&inputs, &targets)?;
        let norm = self.gradient_norm(&dense)?;
        let learning_rate = self.learning_rate();
        self.update(&dense, learning_rate, clip_scale(norm, self.config.clip))?;
        self.step += 1;
        let layers = self
            .layers
            .iter()
            .map(|layer| lock(layer).layer.stats().clone())
            .collect::<Vec<_>>();
        let tokens = self.config.batch * self.config.model.context;
        let mut comm = lock(&self.comm);
        let traffic = comm.world_mut().take_traffic();
        let mut record = gather_record(&mut *comm, self.config, &layers)?;
        record.sent = gather_traffic(&mut *comm, &traffic)?;
        drop(comm);
        record.step = self.step;
        record.loss = loss;
        record.learning_rate = learning_rate;
        record.gradient_norm = norm;
        record.seconds = started.elapsed().as_secs_f64();
        self.ask_oracle(&mut record)?;
        record.tokens_per_second = tokens as f64 / record.seconds;
        Ok((record, self.trace(records_pairs)?))
    }

    /// Records what the oracle found in this step, the time of which it takes off.
    fn ask_oracle(&self, record: &mut StepRecord) -> Result<(), Error> {
        for (layer, of_layer) in self.layers.iter().zip(&mut record.layers) {
            let layer = &mut *lock(layer);
            if let Some(oracle) = layer.oracle.take() {
                record.seconds -= oracle.seconds;
                let (comm, draws) = (&mut *lock(&self.comm), layer.oracle_draws);
                of_layer.oracle = Some(oracle::gather(comm, oracle, &layer.layer, draws)?);
            }
        }
        Ok(())
    }

    /// How the step routed its pairs, on rank 0.
    fn trace(&self, with_pairs: bool) -> Result<Option<StepTrace>, Error> {
        if self.config.record_trace.is_none() {
            return Ok(None);
        }
        let mut trace = StepTrace::new(self.config);
        for (index, layer) in self.layers.iter().enumerate() {
            let layer = lock(layer);
            if let Some(loads) = layer.layer.loads() {
                trace.set_counts(index, loads);
            }
            if let Some((expert_ids, gate_weights)) = layer.pairs.as_ref().filter(|_| with_pairs) {
                let scores = layer.layer.scores();
                let mine = RankPairs {
                    expert_ids,
                    gate_weights,
                    scores,
                };
                trace.gather_pairs(&mut *lock(&self.comm), index, &mine)?;
            }
        }
        Ok((self.rank == 0).then_some(trace))
    }

    /// Mean loss of the global batch and its gradient by the dense parameters, over all ranks; the layers keep theirs.
    fn gradients(&self, inputs: &Tensor, targets: &Tensor) -> Result<(f32, Vec<f32>), Error> {
        let ranks = self.config.ranks;
        let balance = self.config.balance_loss;
        let diverged = |error: Error| error.diverged(self.step + 1);
        let losses = self.model.loss(inputs, targets, balance, true);
        let Losses {
            cross_entropy,
            total,
        } = losses.map_err(Error::from).map_err(diverged)?;
        let mut loss = [cross_entropy.to_scalar::<f32>()? / ranks as f32];
        lock(&self.comm).all_reduce(&mut loss, Reduction::Sum)?;
        if !loss[0].is_finite() {
            let (step, what) = (self.step + 1, format!("the loss is {}", loss[0]));
            return Err(Error::Diverged { step, what });
        }
        // The loss of the global batch is the mean over ranks, so every rank's gradient carries 1/ranks.
        let objective = total.affine(1.0 / ranks as f64, 0.0)?;
        let gradients = objective
            .backward()
            .map_err(Error::from)
            .map_err(diverged)?;
        let mut dense = self.dense.gradients(&gradients)?;
        lock(&self.comm).all_reduce(&mut dense, Reduction::Sum)?;
        Ok((loss[0], dense))
    }

    /// Mean loss on the held-out text, in nats per byte. Nothing is dropped.
    pub(super) fn held_out_loss(&self) -> Result<f32, Error> {
        let (ranks, context) = (self.config.ranks, self.config.model.context);
        let windows = self.corpus.held_out(self.config.eval_sequences);
        let (first, last) = (
            windows.len() * self.rank / ranks,
            windows.len() * (self.rank + 1) / ranks,
        );
        let (inputs, targets): (Vec<Vec<u8>>, Vec<Vec<u8>>) =
            windows[first..last].iter().cloned().unzip();
        let shape = (last - first, context);
        let (inputs, targets) = (
            bytes_tensor(inputs.concat(), shape)?,
            bytes_tensor(targets.concat(), shape)?,
        );
        let loss = self
            .model
            .loss(&inputs, &targets, 0.0, false)?
            .cross_entropy
            .to_scalar::<f32>()?;
        let mut mean = [loss * (last - first) as f32 / windows.len() as f32];
        lock(&self.comm).all_reduce(&mut mean, Reduction::Sum)?;
        Ok(mean[0])
    }

    /// Whether any rank wants to stop.
    pub(super) fn agree(&self, mine: bool) -> Result<bool, Error> {
        let mut flag = [u32::from(mine)];
        lock(&self.comm).all_reduce(&mut flag, Reduction::Max)?;
        Ok(flag[0] > 0)
    }

    /// Everything a resumed run needs, on rank 0; `None` on the others.
    pub(super) fn checkpoint(&self) -> Result<Option<Checkpoint>, Error> {
        let mut states: Vec<Option<LayerState>> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            states.push(lock(layer).layer.export(&mut *lock(&self.comm))?);
        }
        let layers: Option<Vec<LayerState>> = states.into_iter().collect();
        Ok(layers.map(|layers| Checkpoint {
            step: self.step,
            dense: self.parameters.clone(),
            moments: self.moments.clone(),
            layers,
        }))
    }

    /// Norm of the whole gradient over all ranks, the experts' gradients brought to their owners on the way.
    fn gradient_norm(&self, dense: &[f32]) -> Result<f32, Error> {
        let mut experts = 0.0;
        for layer in &self.layers {
            experts += lock(layer).layer.reduce_gradients(&mut *lock(&self.comm))?;
        }
        let mut sum = [experts as f32];
        lock(&self.comm).all_reduce(&mut sum, Reduction::Sum)?;
        Ok((sum_of_squares(dense) + f64::from(sum[0])).sqrt() as f32)
    }

    fn update(&mut self, dense: &[f32], learning_rate: f32, scale: f32) -> Result<(), Error> {
        let step = self.step + 1;
        self.adamw.update(
            &mut self.parameters,
            dense,
            &mut self.moments,
            step,
            learning_rate,
            scale,
        );
        self.dense.load(&self.parameters)?;
        for layer in &self.layers {
            lock(layer).layer.update(
                &mut *lock(&self.comm),
                &self.adamw,
                step,
                learning_rate,
                scale,
            )?;
        }
        Ok(())
    }

    /// Linear warm-up, then a cosine down to a tenth.
    fn learning_rate(&self) -> f32 {
        let (step, warmup, steps) = (self.step, self.config.warmup, self.config.steps);
        if step < warmup {
            return self.config.learning_rate * (step + 1) as f32 / warmup as f32;
        }
        let done = f64::from(step - warmup) / f64::from(steps.saturating_sub(warmup).max(1));
        self.config.learning_rate
            * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos())) as f32
    }
}

fn clip_scale(norm: f32, clip: f32) -> f32 {
    if clip > 0.0 && norm > clip {
        clip / norm
    } else {
        1.0
    }
}

fn bytes_tensor(bytes: Vec<u8>, shape: (usize, usize)) -> Result<Tensor, Error> {
    Ok(Tensor::from_vec(bytes, shape, &Device::Cpu)?)
}

/// A panic elsewhere must not turn into a second one here; its rank reports it.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
