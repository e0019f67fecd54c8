//! One layer of one contender: where its experts live, and what a step does there.

use std::time::Instant;

use lrmoe_metric::{Draw, Profile};
use lrmoe_plan::{
    Fixed, Loads, ModelledSeconds, Placement, QuotaRequest, Quotas, Stash, StepWork,
    modelled_seconds, quotas,
};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, Axis};

use super::contender::PolicyName;
use super::retained::{Recorded, Retained, apportion, apportion_columns};
use super::rules::Rules;
use super::traffic::{self, LinkBytes};
use crate::error::Error;
use crate::layer::rows_between_ranks;
use crate::policy::SymiCapacity;

/// Decay per step of the profile of scores, as in training.
const PROFILE_DECAY: f32 = 0.9;

/// What a layer carries from step to step.
#[derive(Debug)]
pub(super) struct Layer {
    index: u32,
    placement: Placement,
    symi: Option<SymiCapacity>,
    profile: Profile,
}

/// The forward pass of a step.
#[derive(Debug)]
pub(super) struct Forward {
    kept: Loads,
    table: RoutingTable,
    /// Rows that each rank computes.
    pub(super) rows: Vec<u64>,
}

/// A step of a layer.
#[derive(Debug)]
pub(super) struct LayerStep {
    /// Rows that each rank computes backward.
    pub(super) backward_rows: Vec<u64>,
    /// Bytes between ranks in the forward pass.
    pub(super) forward: LinkBytes,
    /// Bytes between ranks in the backward pass.
    pub(super) backward: LinkBytes,
    /// Gradients to the optimizer's shards and weights to the next placement.
    pub(super) update: LinkBytes,
    /// Time on the cluster.
    pub(super) seconds: ModelledSeconds,
    /// The same rows and bytes, evenly over ranks and links.
    pub(super) balanced: ModelledSeconds,
    /// Routed pairs.
    pub(super) pairs: u64,
    /// Pairs that run neither forward nor backward.
    pub(super) dropped: u64,
    /// Pairs that run forward alone.
    pub(super) left_out: u64,
    /// Share of the scores that is retained.
    pub(super) contribution: Option<f64>,
    /// Measured time of planning quotas and placement.
    pub(super) planning: f64,
}

impl Layer {
    /// Before the first step every expert counts alike; `history` holds the loads that `fixed-replicas` places by.
    pub(super) fn new(index: u32, rules: &Rules<'_>, history: &Loads) -> Result<Self, Error> {
        let (experts, ranks) = (rules.experts, rules.topology.ranks());
        let even = Loads::new(Array2::ones((ranks, experts)))?;
        let contiguous = Fixed::placement(experts, ranks)?;
        let loads = match rules.policy() {
            PolicyName::FixedReplicas => history,
            _ => &even,
        };
        let placement = rules
            .policy()
            .placing()
            .place(&rules.request(loads, &contiguous))?;
        let symi = match rules.policy() {
            PolicyName::Symi => Some(SymiCapacity::new(
                rules.settings.capacity_factor,
                &rules.slots,
                experts,
            )?),
            _ => None,
        };
        Ok(Self {
            index,
            placement,
            symi,
            profile: Profile::new(experts),
        })
    }

    pub(super) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Drops what the policy drops and routes the rest.
    pub(super) fn forward(&self, rules: &Rules<'_>, loads: &Loads) -> Result<Forward, Error> {
        let kept = match &self.symi {
            Some(symi) => symi.kept(loads)?,
            None => loads.clone(),
        };
        let table = route(kept.counts(), &self.placement, &rules.topology, None)?;
        Ok(Forward {
            rows: table.rank_loads(),
            kept,
            table,
        })
    }

    /// The rest of the step: what runs backward within `capacities` (retained rows of each rank), traffic, time, and the next placement.
    pub(super) fn finish(
        &mut self,
        rules: &Rules<'_>,
        step: u32,
        loads: &Loads,
        forward: &Forward,
        recorded: Option<&Recorded<'_>>,
        capacities: &[u64],
    ) -> Result<LayerStep, Error> {
        let start = Instant::now();
        let quotas = match rules.policy() {
            PolicyName::Lrmoe => self.quotas(rules, &forward.kept, capacities)?,
            _ => Quotas::all(&forward.kept),
        };
        let mut planning = start.elapsed();
        let retained = self.retain(rules, step, forward, recorded, &quotas)?;
        let backward = self.route_backward(rules, forward, &retained.counts, capacities)?;
        let start = Instant::now();
        let next = self.next_placement(rules, loads)?;
        planning += start.elapsed();
        if let (Some(recorded), PolicyName::Lrmoe) = (recorded, rules.policy()) {
            recorded.observe(&mut self.profile, PROFILE_DECAY)?;
        }

        let work = self.work(rules, forward, &backward, &next);
        let cluster = &rules.settings.cluster;
        let balanced = balanced(&work.step, rules);
        let done = LayerStep {
            forward: work.forward,
            backward: work.backward,
            update: work.update,
            seconds: modelled_seconds(cluster, &rules.shape, &work.step)?,
            balanced: modelled_seconds(cluster, &rules.shape, &balanced)?,
            pairs: loads.total().into(),
            dropped: (loads.total() - forward.kept.total()).into(),
            left_out: u64::from(forward.kept.total()) - work.step.backward_rows.iter().sum::<u64>(),
            contribution: retained.contribution,
            planning: planning.as_secs_f64(),
            backward_rows: work.step.backward_rows,
        };
        self.placement = next;
        if let Some(symi) = &mut self.symi {
            symi.follow(loads.per_expert())?;
        }
        Ok(done)
    }

    fn quotas(&self, rules: &Rules<'_>, kept: &Loads, capacities: &[u64]) -> Result<Quotas, Error> {
        Ok(quotas(&QuotaRequest {
            loads: kept,
            placement: &self.placement,
            capacities,
            retention: rules.retention(),
            policy: rules.settings.quota_policy,
            profile: (!self.profile.is_empty()).then_some(&self.profile),
            floor: rules.settings.floor,
        })?)
    }

    /// Pairs that run backward, by source rank and expert.
    fn retain(
        &self,
        rules: &Rules<'_>,
        step: u32,
        forward: &Forward,
        recorded: Option<&Recorded<'_>>,
        quotas: &Quotas,
    ) -> Result<Retained, Error> {
        let Some(recorded) = recorded else {
            return Ok(Retained {
                counts: apportion_columns(quotas.as_slice(), forward.kept.counts()),
                contribution: None,
            });
        };
        if rules.policy() != PolicyName::Lrmoe {
            return Ok(recorded.first(&forward.kept));
        }
        let draw = Draw {
            seed: rules.settings.seed,
            step,
            layer: self.index,
        };
        recorded.select(rules.settings.method, quotas.as_slice(), draw)
    }

    /// Retained rows from rank to rank. Where the forward pass leaves its rows at the instances, these take what they have of them, in
    /// proportion; else every instance is eligible.
    fn route_backward(
        &self,
        rules: &Rules<'_>,
        forward: &Forward,
        retained: &Array2<u32>,
        capacities: &[u64],
    ) -> Result<Array2<u64>, Error> {
        if rules.stash() == Stash::Recompute {
            // Everything fits where nothing is planned.
            let capacities = (rules.policy() == PolicyName::Lrmoe).then_some(capacities);
            let table = route(
                retained.view(),
                &self.placement,
                &rules.topology,
                capacities,
            )?;
            return Ok(rows_between_ranks(&table));
        }
        let ranks = self.placement.ranks();
        let mut rows = Array2::zeros((ranks, ranks));
        for ((source, expert), &count) in retained.indexed_iter() {
            let instances = self.placement.instances_of(expert);
            let sent = instances
                .iter()
                .map(|&i| forward.table.counts()[[source, i as usize]]);
            let shares = apportion(count, &sent.collect::<Vec<u32>>());
            for (&instance, share) in instances.iter().zip(shares) {
                rows[[source, self.placement.rank_of(instance as usize)]] += u64::from(share);
            }
        }
        Ok(rows)
    }

    fn next_placement(&self, rules: &Rules<'_>, loads: &Loads) -> Result<Placement, Error> {
        if rules.is_static() {
            return Ok(self.placement.clone());
        }
        Ok(rules
            .policy()
            .placing()
            .place(&rules.request(loads, &self.placement))?)
    }

    fn work(
        &self,
        rules: &Rules<'_>,
        forward: &Forward,
        backward_rows: &Array2<u64>,
        next: &Placement,
    ) -> Work {
        let (shape, topology, ranks) = (&rules.shape, &rules.topology, self.placement.ranks());
        let forward_rows = rows_between_ranks(&forward.table);
        let norms = rules.policy() == PolicyName::Lrmoe;
        let forward = traffic::forward(&forward_rows, shape, norms, topology);
        let backward = traffic::backward(backward_rows, shape, rules.stash(), topology);
        let [reduction, delivery] = if rules.updates_travel() {
            let delivery = traffic::gradients(next, shape).reversed_axes();
            [traffic::gradients(&self.placement, shape), delivery]
        } else {
            [Array2::zeros((ranks, ranks)), Array2::zeros((ranks, ranks))]
        };
        let mut update = LinkBytes::of(&reduction, topology);
        update += LinkBytes::of(&delivery, topology);
        let instances = (0..ranks).map(|rank| self.placement.on_rank(rank).len() as u32);
        let exchanges = forward.rows.into_iter().chain(backward.rows);
        Work {
            forward: forward.bytes,
            backward: backward.bytes,
            update,
            step: StepWork {
                stash: rules.stash(),
                instances: instances.collect(),
                forward_rows: received(&forward_rows),
                backward_rows: received(backward_rows),
                exchanges: exchanges.chain([reduction]).collect(),
                delivery,
            },
        }
    }
}

/// What a step moves and computes.
struct Work {
    forward: LinkBytes,
    backward: LinkBytes,
    update: LinkBytes,
    step: StepWork,
}

/// Rows that arrive at each rank, itself as a source included.
fn received(rows: &Array2<u64>) -> Vec<u64> {
    rows.sum_axis(Axis(0)).to_vec()
}

/// The same rows and bytes, evenly over the ranks and links.
fn balanced(work: &StepWork, rules: &Rules<'_>) -> StepWork {
    let even = |rows: &[u64]| vec![rows.iter().sum::<u64>() / rows.len() as u64; rows.len()];
    let evenly = |bytes| traffic::evenly(bytes, &rules.topology);
    let instances: u32 = work.instances.iter().sum();
    StepWork {
        stash: work.stash,
        instances: vec![instances / work.instances.len() as u32; work.instances.len()],
        forward_rows: even(&work.forward_rows),
        backward_rows: even(&work.backward_rows),
        exchanges: work.exchanges.iter().map(evenly).collect(),
        delivery: evenly(&work.delivery),
    }
}

#[cfg(test)]
mod tests;
