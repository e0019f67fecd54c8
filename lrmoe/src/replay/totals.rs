//! What a contender does, added up over steps.

use lrmoe_plan::{Memory, ModelledSeconds};

use super::contender::PolicyName;
use super::layer::{Forward, LayerStep};
use super::report::{MemoryParts, MemoryReport, Point, PolicyReport};
use super::rules::Rules;
use super::traffic::LinkBytes;

/// A rank's memory over all layers, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankMemory {
    parts: MemoryParts,
    optimizer: u64,
}

impl RankMemory {
    /// What lasts adds up over the layers, for which `all` stands in; token buffers serve one layer after another, so the largest count.
    pub(super) fn new(layers: impl Iterator<Item = Memory>, all: impl Fn(u64) -> u64) -> Self {
        let mut sum = Self {
            parts: MemoryParts::default(),
            optimizer: 0,
        };
        for memory in layers {
            sum.parts.placement += memory.placement;
            sum.parts.replicas += memory.replicas;
            sum.parts.stash += memory.stash;
            sum.optimizer += memory.optimizer;
            if memory.token_buffers() > sum.parts.token_buffers {
                sum.parts.token_buffers = memory.token_buffers();
                sum.parts.forward_buffers = memory.forward_buffers;
                sum.parts.backward_buffers = memory.backward_buffers;
            }
        }
        let parts = &mut sum.parts;
        for lasting in [&mut parts.placement, &mut parts.replicas, &mut parts.stash] {
            *lasting = all(*lasting);
        }
        parts.total = parts.placement + parts.replicas + parts.token_buffers + parts.stash;
        sum.optimizer = all(sum.optimizer);
        sum
    }
}

const NO_TIME: ModelledSeconds = ModelledSeconds {
    forward: 0.0,
    backward: 0.0,
    exchange: 0.0,
    delivery: 0.0,
};

/// Sums over the steps of one contender.
#[derive(Debug)]
pub(super) struct Totals {
    steps: u64,
    peak: MemoryParts,
    sum: MemoryParts,
    peak_without_stash: u64,
    sum_without_stash: u64,
    optimizer: u64,
    needed: u64,
    forward: LinkBytes,
    backward: LinkBytes,
    update: LinkBytes,
    load_sum: f64,
    load_worst: f64,
    loads: u64,
    seconds: ModelledSeconds,
    balanced: f64,
    pairs: u64,
    dropped: u64,
    left_out: u64,
    contribution: f64,
    contributions: u64,
    planning: f64,
    points: Vec<Point>,
}

impl Default for Totals {
    fn default() -> Self {
        Self {
            steps: 0,
            peak: MemoryParts::default(),
            sum: MemoryParts::default(),
            peak_without_stash: 0,
            sum_without_stash: 0,
            optimizer: 0,
            needed: 0,
            forward: LinkBytes::default(),
            backward: LinkBytes::default(),
            update: LinkBytes::default(),
            load_sum: 0.0,
            load_worst: 0.0,
            loads: 0,
            seconds: NO_TIME,
            balanced: 0.0,
            pairs: 0,
            dropped: 0,
            left_out: 0,
            contribution: 0.0,
            contributions: 0,
            planning: 0.0,
            points: Vec::new(),
        }
    }
}

impl Totals {
    pub(super) fn add(
        &mut self,
        step: u32,
        forward: &[Forward],
        layers: &[LayerStep],
        ranks: &[RankMemory],
        rules: &Rules<'_>,
    ) {
        self.steps += 1;
        self.add_memory(ranks);
        let scale = rules.layers[0] as f64 / rules.layers[1] as f64;
        let mut point = Point {
            step,
            load_max_over_mean: 0.0,
            modelled_seconds: 0.0,
        };
        for (forward, layer) in forward.iter().zip(layers) {
            let load = imbalance(&forward.rows, &layer.backward_rows);
            self.load_sum += load;
            self.load_worst = self.load_worst.max(load);
            self.loads += 1;
            point.load_max_over_mean += load / layers.len() as f64;
            point.modelled_seconds += scale * layer.seconds.total();
            self.seconds = add(&self.seconds, &layer.seconds, scale);
            self.balanced += scale * layer.balanced.total();
            self.forward += layer.forward;
            self.backward += layer.backward;
            self.update += layer.update;
            self.pairs += layer.pairs;
            self.dropped += layer.dropped;
            self.left_out += layer.left_out;
            self.planning += layer.planning;
            if let Some(contribution) = layer.contribution {
                self.contribution += contribution;
                self.contributions += 1;
            }
        }
        self.points.push(point);
    }

    /// The rank that holds most counts.
    fn add_memory(&mut self, ranks: &[RankMemory]) {
        let Some(worst) = ranks.iter().max_by_key(|rank| rank.parts.total) else {
            return;
        };
        if worst.parts.total > self.peak.total {
            self.peak = worst.parts;
        }
        self.sum.add(&worst.parts);
        let without_stash = ranks.iter().map(|rank| rank.parts.without_stash()).max();
        let without_stash = without_stash.unwrap_or(0);
        self.peak_without_stash = self.peak_without_stash.max(without_stash);
        self.sum_without_stash += without_stash;
        for rank in ranks {
            self.optimizer = self.optimizer.max(rank.optimizer);
            self.needed = self.needed.max(rank.parts.total + rank.optimizer);
        }
    }

    pub(super) fn report(self, rules: &Rules<'_>) -> PolicyReport {
        let steps = self.steps;
        let bytes = |sum: LinkBytes| rules.all_layers_of(sum).over(steps);
        let share = |pairs: u64| match self.pairs {
            0 => 0.0,
            all => pairs as f64 / all as f64,
        };
        let seconds = add(&NO_TIME, &self.seconds, 1.0 / steps as f64);
        let [forward, backward, update] = [self.forward, self.backward, self.update].map(bytes);
        PolicyReport {
            name: rules.contender.to_string(),
            policy: rules.policy().to_string(),
            retention: (rules.policy() == PolicyName::Lrmoe).then(|| rules.retention()),
            buffering: rules.contender.buffering().to_string(),
            slots: rules.slots.iter().copied().max().unwrap_or(0),
            memory: MemoryReport {
                peak_bytes: self.peak,
                mean_bytes: self.sum.over(steps),
                peak_without_stash_bytes: self.peak_without_stash,
                mean_without_stash_bytes: self.sum_without_stash / steps,
                optimizer_bytes: self.optimizer,
                needed_bytes: self.needed,
                over_budget: self.needed > rules.settings.budget,
            },
            load_max_over_mean: self.load_sum / self.loads as f64,
            worst_load_max_over_mean: self.load_worst,
            modelled_step_seconds: seconds.total(),
            modelled_seconds: seconds,
            share_of_balanced: match self.seconds.total() {
                0.0 => 1.0,
                total => self.balanced / total,
            },
            forward_bytes: forward.total(),
            backward_bytes: backward.total(),
            update_bytes: update.total(),
            forward_links: forward,
            backward_links: backward,
            update_links: update,
            dropped: share(self.dropped),
            left_out: share(self.left_out),
            contribution_kept: (self.contributions > 0)
                .then(|| self.contribution / self.contributions as f64),
            measured_planning_seconds: self.planning / self.loads as f64,
            points: self.points,
        }
    }
}

/// Largest over mean of the rows that the ranks run in both passes; 1 where there are none.
fn imbalance(forward: &[u64], backward: &[u64]) -> f64 {
    let rows = || forward.iter().zip(backward).map(|(f, b)| f + b);
    match rows().sum::<u64>() {
        0 => 1.0,
        sum => rows().max().unwrap_or(0) as f64 * forward.len() as f64 / sum as f64,
    }
}

/// `sum + scale * other`, part by part.
fn add(sum: &ModelledSeconds, other: &ModelledSeconds, scale: f64) -> ModelledSeconds {
    ModelledSeconds {
        forward: sum.forward + scale * other.forward,
        backward: sum.backward + scale * other.backward,
        exchange: sum.exchange + scale * other.exchange,
        delivery: sum.delivery + scale * other.delivery,
    }
}
