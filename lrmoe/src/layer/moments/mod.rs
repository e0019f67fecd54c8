//! Compensation by moments: what the pairs that do not run backward would add to the weight gradients, as far as sums over an expert's pairs say.
//!
//! With a = p dy, c = dh/dgate or dh/dup, a bar for means over all n pairs of an expert, and S_z the sum of w z over its retained pairs:
//!
//! ```text
//! priority   dW_down += ā δhᵀ + δa h̄ᵀ                  δh = S_1 h̄ - S_h    δx = S_1 x̄ - S_x    δa = n ā - S_a
//!            dW_x    += d̄ δxᵀ + (c̄ . W_downᵀ δa) x̄ᵀ    d̄ = c̄ . W_downᵀ ā
//! top        dW_down += A h_Nᵀ                          A: sum of a over the dropped pairs N; z_N: mean of z over them
//!            dW_x    += (c_N . W_downᵀ A) x_Nᵀ
//! ```
//!
//! The first are control variates: each pair's term is replaced by what remains of it besides a part that is linear in the pair's own a, h, c and x
//! about their means, of which the sum over all pairs is known. They are unbiased as far as w is. The second stand for the dropped pairs as
//! if each were their mean.

mod layout;

use lrmoe_comm::{Collective, Reduction};
use lrmoe_kernels::HiddenSums;
use lrmoe_metric::{Method, Pairs};
use lrmoe_route::RoutingTable;
use rayon::prelude::*;

use super::element::LayerElement;
use super::pass::on_host;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer};
use crate::error::Error;
use crate::policy::{Compensation, Policy};
use layout::{Corrections, Layout, Outer};

/// Sums of h and its derivatives over the rows of this rank's instances, `[local instances, parts, F]`.
#[derive(Debug, Default)]
pub(super) struct Moments {
    /// Each pair of the last training forward pass once.
    forward: Sums,
    /// The retained pairs of the backward pass, times w.
    backward: Sums,
}

#[derive(Debug, Default)]
pub(super) struct Sums {
    wanted: bool,
    values: Vec<f64>,
}

impl Sums {
    fn start(&mut self, wanted: bool) {
        self.wanted = wanted;
        self.values.clear();
    }

    /// Adds those of a chunk.
    pub(super) fn take(&mut self, chunk: Option<&HiddenSums>) {
        let Some(chunk) = chunk.filter(|_| self.wanted) else {
            return;
        };
        let instances = (0..chunk.instances()).flat_map(|instance| chunk.of(instance));
        if self.values.is_empty() {
            self.values.extend(instances);
        } else {
            let values = self.values.iter_mut().zip(instances);
            values.for_each(|(value, part)| *value += part);
        }
    }

    /// Of an instance; zeros if there was no chunk.
    fn of(&self, instance: usize, numbers: usize) -> impl Iterator<Item = f64> {
        let values = self
            .values
            .get(instance * numbers..(instance + 1) * numbers);
        let none = std::iter::repeat_n(0.0, if values.is_some() { 0 } else { numbers });
        values.unwrap_or_default().iter().copied().chain(none)
    }
}

impl Moments {
    /// Before the first chunk of a forward pass.
    pub(super) fn start_forward<B: Backend<T>, T: LayerElement>(
        &mut self,
        scratch: &mut B::Scratch,
        policy: Option<&Policy>,
    ) -> Result<&mut Sums, Error> {
        let wanted = policy.is_some_and(|policy| form(policy).is_some());
        if policy.is_some() {
            self.forward.start(wanted);
        }
        B::sum_hidden(scratch, wanted)?;
        Ok(&mut self.forward)
    }

    /// Before the first chunk of a backward pass.
    pub(super) fn start_backward<B: Backend<T>, T: LayerElement>(
        &mut self,
        scratch: &mut B::Scratch,
        policy: &Policy,
    ) -> Result<&mut Sums, Error> {
        let wanted = form(policy).is_some();
        self.backward.start(wanted);
        B::sum_hidden(scratch, wanted)?;
        Ok(&mut self.backward)
    }
}

/// The form in which a policy compensates, if it does. Frozen experts have no use for it.
fn form(policy: &Policy) -> Option<Method> {
    match policy {
        Policy::Lrmoe(selecting)
            if selecting.compensation == Compensation::Moments && !policy.is_frozen() =>
        {
            Some(selecting.method)
        }
        _ => None,
    }
}

/// Adds each instance's outer products to its matrix of `rows` rows.
fn add_outer(matrices: &mut [f32], rows: usize, of_instance: &[Option<&Outer>]) {
    let columns = (matrices.len() / of_instance.len() / rows).max(1);
    let each = |(index, row): (usize, &mut [f32])| {
        for (column, values) in of_instance[index / rows].into_iter().flatten() {
            let factor = column[index % rows];
            for (to, value) in row.iter_mut().zip(values) {
                *to += factor * value;
            }
        }
    };
    matrices.par_chunks_mut(columns).enumerate().for_each(each);
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Adds to the gradients of an instance of each expert what the policy puts in the place of the expert's dropped pairs.
    pub(super) fn compensate<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        table: &RoutingTable,
        (x, dy, pairs): (&B::Buffer<T>, &B::Buffer<T>, &Pairs<'_>),
    ) -> Result<(), Error> {
        let Some(method) = form(&self.config.policy) else {
            return Ok(());
        };
        let shape = self.config.shape;
        let layout = Layout {
            method,
            width: shape.width,
            hidden: shape.hidden,
            parts: 2 + usize::from(shape.activation.is_gated()),
        };
        let loads = self.loads.as_ref().ok_or(Error::NoForward)?.per_expert();
        let incomplete: Vec<(usize, [u32; 2])> = loads
            .iter()
            .enumerate()
            .map(|(expert, n)| (expert, [*n, retained(table, expert)]))
            .filter(|(_, [n, q])| q < n)
            .collect();
        if incomplete.is_empty() {
            return Ok(());
        }
        let mut copies = [Vec::new(), Vec::new()];
        let [copy_x, copy_dy] = &mut copies;
        let x = on_host(&self.backend, x, copy_x)?;
        let dy = on_host(&self.backend, dy, copy_dy)?;
        let of_expert = by_expert(pairs);
        let (placement, weights) = (self.experts.placement(), &self.buffers.host.weights);
        let first = placement.on_rank(self.rank).start;
        let mut sums = vec![0.0_f32; incomplete.len() * layout.len()];
        let each = |(sums, (expert, _)): (&mut [f32], &(usize, [u32; 2]))| {
            let mut own = vec![0.0; sums.len()];
            for pair in &of_expert[*expert] {
                let (pair, width) = (*pair as usize, layout.width);
                let row = pair / pairs.top_k() * width..(pair / pairs.top_k() + 1) * width;
                let (p, w) = (pairs.gate_weights()[pair], weights[pair]);
                layout.add_pair(&mut own, (&x[row.clone()], &dy[row]), p, w);
            }
            if let Some(instance) = placement.instance_on(self.rank, *expert) {
                layout.add_instance(&mut own, &self.moments, instance - first);
            }
            sums.iter_mut()
                .zip(own)
                .for_each(|(to, sum)| *to = sum as f32);
        };
        let chunks = sums.par_chunks_mut(layout.len());
        chunks.zip(&incomplete).for_each(each);
        clock.lap(&mut self.stats.seconds, Stage::Backward);
        comm.all_reduce(&mut sums, Reduction::Sum)?;
        clock.lap(&mut self.stats.seconds, Stage::Exchange);
        self.correct(&layout, &incomplete, &sums)?;
        clock.lap(&mut self.stats.seconds, Stage::Backward);
        Ok(())
    }

    /// Adds the corrections of the experts whose first instance lives here.
    fn correct(
        &mut self,
        layout: &Layout,
        incomplete: &[(usize, [u32; 2])],
        sums: &[f32],
    ) -> Result<(), Error> {
        let placement = self.experts.placement();
        let local = placement.on_rank(self.rank);
        let hosted = incomplete.iter().zip(sums.chunks_exact(layout.len()));
        let hosted: Vec<_> = hosted
            .filter_map(|((expert, counts), sums)| {
                let instance = placement.instances_of(*expert)[0] as usize;
                local
                    .contains(&instance)
                    .then(|| (instance - local.start, counts, sums))
            })
            .collect();
        let mut copy = Vec::new();
        let (weights, gradients) = self.experts.weights_and_gradients();
        let down = on_host(&self.backend, &weights.down, &mut copy)?;
        let block = layout.width * layout.hidden;
        let found: Vec<(usize, Corrections)> = hosted
            .into_par_iter()
            .map(|(instance, counts, sums)| {
                let down = &down[instance * block..][..block];
                let [n, q] = counts.map(f64::from);
                (instance, layout.corrections(sums, down, (n, q)))
            })
            .collect();
        let matrices = gradients.gate.iter_mut().chain([&mut gradients.up]);
        let found = (local.len(), &found[..]);
        for (part, buffer) in matrices.enumerate() {
            add_to::<B>(buffer, layout.hidden, found, |of| &of.inward[part])?;
        }
        add_to::<B>(&mut gradients.down, layout.width, found, |of| &of.down)
    }
}

/// Adds to one kind of matrix of all local instances.
fn add_to<B: lrmoe_kernels::Memory>(
    buffer: &mut B::Buffer<f32>,
    rows: usize,
    (instances, found): (usize, &[(usize, Corrections)]),
    of: impl Fn(&Corrections) -> &Outer,
) -> Result<(), Error> {
    let mut of_instance = vec![None; instances];
    for (instance, corrections) in found {
        of_instance[*instance] = Some(of(corrections));
    }
    let matrices = B::host_mut(buffer).ok_or(lrmoe_kernels::Error::NoHiddenSums)?;
    if instances > 0 {
        add_outer(matrices, rows, &of_instance);
    }
    Ok(())
}

/// Retained pairs of an expert over all ranks.
fn retained(table: &RoutingTable, expert: usize) -> u32 {
    let instances = table.placement().instances_of(expert).iter();
    instances
        .map(|instance| table.counts().column(*instance as usize).sum())
        .sum()
}

/// Local ids of each expert's pairs, ascending.
fn by_expert(pairs: &Pairs<'_>) -> Vec<Vec<u32>> {
    let mut lists: Vec<Vec<u32>> = vec![Vec::new(); pairs.experts()];
    for (pair, expert) in (0..).zip(pairs.expert_ids()) {
        if let Ok(expert) = usize::try_from(*expert) {
            lists[expert].push(pair);
        }
    }
    lists
}
