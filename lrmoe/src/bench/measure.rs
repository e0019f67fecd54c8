//! Steps of the layer, in turns.

use std::time::Instant;

use lrmoe_comm::Solo;
use lrmoe_plan::{Stash, Topology};
use ndarray::Array2;

use super::Settings;
use super::meters::{Canary, peak_bytes, resident_bytes};
use super::workload::{Workload, expert_parameters};
use crate::error::Error;
use crate::layer::{Backend, LayerConfig, LayerElement, MoeLayer, Seconds};
use crate::policy::Policy;

/// The layer on one rank, and what goes into it.
#[derive(Debug)]
pub(super) struct Subject<B: Backend<T>, T: LayerElement> {
    layer: MoeLayer<B, T>,
    pub(super) workload: Workload,
    rows: Rows<B, T>,
    /// Bytes in memory before the first step: weights, their gradients, the optimizer's copy, the workload.
    before: Option<u64>,
    steps: u32,
}

/// Rows of tokens in the backend's memory, kept from step to step: what goes into a step, and what comes out.
#[derive(Debug)]
struct Rows<B: Backend<T>, T: LayerElement> {
    backend: B,
    /// An element to read.
    last: B::Buffer<u32>,
    x: B::Buffer<T>,
    dy: B::Buffer<T>,
    y: B::Buffer<T>,
    dx: B::Buffer<T>,
    dp: Array2<f32>,
}

impl<B: Backend<T>, T: LayerElement> Rows<B, T> {
    fn new(backend: B, workload: &Workload) -> Result<Self, Error> {
        let upload = |rows: &Array2<f32>| -> Result<_, Error> {
            let rows: Vec<T> = rows.iter().map(|value| T::from_f32(*value)).collect();
            Ok(backend.upload(&rows)?)
        };
        Ok(Self {
            last: backend.upload(&[0])?,
            x: upload(&workload.x)?,
            dy: upload(&workload.dy)?,
            y: B::Buffer::default(),
            dx: B::Buffer::default(),
            dp: Array2::zeros(workload.gate_weights.dim()),
            backend,
        })
    }

    /// Waits until a device has done what it was given: it reads in order.
    fn wait(&self) -> Result<(), Error> {
        Ok(self.backend.read(&self.last, &mut [0])?)
    }
}

/// One pass of one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lap {
    /// By the clock on the wall.
    pub(super) total: f64,
    /// What of it the layer accounts for.
    pub(super) stages: Seconds,
}

/// One step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) forward: Lap,
    pub(super) backward: Lap,
}

impl<B: Backend<T> + Clone, T: LayerElement> Subject<B, T> {
    pub(super) fn new(backend: B, settings: &Settings) -> Result<Self, Error> {
        let config = LayerConfig {
            layer: 0,
            seed: settings.seed,
            shape: settings.shape,
            experts: settings.experts,
            top_k: settings.top_k,
            topology: Topology::new(1, 1)?,
            slots: vec![settings.experts as u32],
            chunk_rows: settings.chunk_rows,
            overlap: false,
            capacities: None,
            policy: Policy::Dropless,
            stash: Stash::Recompute,
            profile_decay: 0.9,
        };
        let init = |expert| expert_parameters(&settings.shape, settings.seed, expert);
        let workload = Workload::new(settings);
        let rows = Rows::new(backend.clone(), &workload)?;
        let mut subject = Self {
            layer: MoeLayer::on(backend, config, 0, init)?,
            workload,
            rows,
            before: None,
            steps: 0,
        };
        subject.write_gradients()?;
        subject.before = resident_bytes();
        Ok(subject)
    }

    /// A token's step writes all gradients, most of them zero, so that they are in memory.
    fn write_gradients(&mut self) -> Result<(), Error> {
        let Workload {
            x,
            dy,
            expert_ids,
            gate_weights,
        } = self.workload.one_token();
        let [x, dy] = [x, dy].map(|rows| rows.mapv(T::from_f32));
        let (ids, p) = (expert_ids.view(), gate_weights.view());
        self.layer.forward(&mut Solo, x.view(), ids, p, Some(0))?;
        self.layer.backward(&mut Solo, dy.view())?;
        Ok(())
    }

    fn step(&mut self, (policy, stash): (&Policy, Stash)) -> Result<Step, Error> {
        self.layer.set_stash(Stash::Recompute)?;
        self.layer.set_policy(policy.clone())?;
        self.layer.set_stash(stash)?;
        self.steps += 1;
        let Self {
            layer,
            workload,
            rows,
            steps,
            ..
        } = self;
        let (ids, p) = (workload.expert_ids.view(), workload.gate_weights.view());
        let start = Instant::now();
        layer.forward_rows(&mut Solo, &rows.x, ids, p, Some(*steps), &mut rows.y)?;
        rows.wait()?;
        let forward = Lap {
            total: start.elapsed().as_secs_f64(),
            stages: layer.stats().seconds,
        };
        let start = Instant::now();
        let dp = rows.dp.view_mut();
        layer.backward_rows(&mut Solo, &rows.x, &rows.dy, &mut rows.dx, dp)?;
        rows.wait()?;
        let total = start.elapsed().as_secs_f64();
        let mut stages = layer.stats().seconds;
        for (all, forward) in stages.0.iter_mut().zip(forward.stages.0) {
            *all -= forward;
        }
        let backward = Lap { total, stages };
        Ok(Step { forward, backward })
    }
}

/// A policy and what its steps took.
#[derive(Debug)]
pub(super) struct Contender {
    pub(super) retention: f64,
    pub(super) policy: Policy,
    pub(super) stash: Stash,
    pub(super) steps: Vec<Step>,
    /// Bytes in memory at the peak of its first step, above those before the first step of all.
    pub(super) peak: Option<u64>,
    /// Token buffers, as the layer counts them.
    pub(super) buffers: u64,
    /// Rows of each expert backward.
    pub(super) retained: Vec<u32>,
}

impl Contender {
    /// LRMoE by ascending retention in each stash mode, then dropless, last of all in the first of the modes.
    pub(super) fn all(settings: &Settings) -> Vec<Self> {
        let mut retentions = settings.retentions.clone();
        retentions.sort_by(f64::total_cmp);
        let mut all = Vec::new();
        for retention in retentions {
            let policy = Policy::Lrmoe(settings.selecting(retention));
            let of_modes = settings.stashes.iter();
            all.extend(of_modes.map(|&stash| Self::new(retention, policy.clone(), stash)));
        }
        // Where all pairs run backward, all rows are kept.
        let mut modes: Vec<_> = settings
            .stashes
            .iter()
            .map(|&stash| all_kept(stash))
            .collect();
        modes.reverse();
        for (number, &stash) in modes.iter().enumerate() {
            if !modes[number + 1..].contains(&stash) {
                all.push(Self::new(1.0, Policy::Dropless, stash));
            }
        }
        all
    }

    fn new(retention: f64, policy: Policy, stash: Stash) -> Self {
        Self {
            retention,
            policy,
            stash,
            steps: vec![],
            peak: None,
            buffers: 0,
            retained: vec![],
        }
    }

    pub(super) fn name(&self) -> String {
        let name = match self.policy {
            Policy::Lrmoe(_) => format!("lrmoe@{}", self.retention),
            _ => self.policy.name().to_owned(),
        };
        match self.stash {
            Stash::Recompute => name,
            stash => format!("{name} {stash}"),
        }
    }

    fn first_step<B: Backend<T> + Clone, T: LayerElement>(
        &mut self,
        subject: &mut Subject<B, T>,
    ) -> Result<(), Error> {
        // So that the peak is its own, and not that of buffers that another has left.
        subject.layer.release();
        let (step, peak) = peak_bytes(|| subject.step((&self.policy, self.stash)));
        step?;
        self.peak = peak
            .zip(subject.before)
            .map(|(peak, before)| peak.saturating_sub(before));
        self.buffers = subject.layer.stats().buffer_bytes;
        self.retained = retained(&subject.layer, &subject.workload.expert_ids);
        Ok(())
    }
}

/// The mode in which a policy that runs all pairs backward stashes.
fn all_kept(stash: Stash) -> Stash {
    match stash {
        Stash::ForwardSelect => Stash::Full,
        other => other,
    }
}

/// Rows of each expert in the last backward pass.
fn retained<B: Backend<T>, T: LayerElement>(
    layer: &MoeLayer<B, T>,
    expert_ids: &Array2<i32>,
) -> Vec<u32> {
    let mut rows = vec![0; layer.config().experts];
    let pairs = layer
        .selection()
        .map_or(&[][..], |selection| &selection.pairs);
    for pair in pairs {
        let (token, slot) = (
            *pair as usize / expert_ids.ncols(),
            *pair as usize % expert_ids.ncols(),
        );
        rows[expert_ids[[token, slot]] as usize] += 1;
    }
    rows
}

/// What was seen of the machine meanwhile.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// The least cores beside a step of each round that counts.
    pub(super) cores: Vec<f64>,
    /// Rounds done again for lack of cores.
    pub(super) repeated: usize,
    /// Rounds that count for all that.
    pub(super) short: usize,
}

/// Rounds of a step of each contender. At most as many are repeated as count.
pub(super) fn rounds<B: Backend<T> + Clone, T: LayerElement>(
    settings: &Settings,
    subject: &mut Subject<B, T>,
    contenders: &mut [Contender],
    mut observe: impl FnMut(&str, usize),
) -> Result<Rounds, Error> {
    let (mut canary, mut rounds) = (Canary::new(), Rounds::default());
    for contender in contenders.iter_mut() {
        observe(&format!("memory of {}", contender.name()), 0);
        contender.first_step(subject)?;
    }
    let mut done = 0;
    while done < settings.warmup + settings.steps {
        let mut steps = Vec::with_capacity(contenders.len());
        let mut cores = canary.cores();
        for contender in contenders.iter() {
            observe(&contender.name(), done);
            steps.push(subject.step((&contender.policy, contender.stash))?);
            cores = cores.min(canary.cores());
        }
        if done < settings.warmup {
            done += 1;
            continue;
        }
        let enough = canary.is_enough(cores);
        if !enough && rounds.repeated < settings.steps {
            rounds.repeated += 1;
            continue;
        }
        rounds.short += usize::from(!enough);
        rounds.cores.push(cores);
        for (contender, step) in contenders.iter_mut().zip(steps) {
            contender.steps.push(step);
        }
        done += 1;
    }
    Ok(rounds)
}
