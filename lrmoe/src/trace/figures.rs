//! Figures of single steps, and their means.

use lrmoe_plan::Placement;
use ndarray::ArrayView1;

use super::inspect::{LayerFigures, TimeFigures};

/// Figures of one layer in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepFigures {
    pairs: f64,
    experts: f64,
    ranks: f64,
    shares: [f64; 3],
    gini: f64,
    variation: f64,
    idle: f64,
    /// `None` without a step before it.
    pub(super) drift: Option<f64>,
}

impl StepFigures {
    /// `None` without pairs.
    pub(super) fn of(loads: ArrayView1<'_, u64>, placement: &Placement) -> Option<Self> {
        let experts = loads.len() as f64;
        let pairs = loads.sum() as f64;
        if pairs == 0.0 {
            return None;
        }
        let mean = pairs / experts;
        let mut sorted = loads.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let share = |count: usize| sorted[..count].iter().sum::<u64>() as f64 / pairs;
        // The largest has weight E - 1, the smallest 1 - E: half the mean absolute difference, over the mean.
        let weighted = sorted
            .iter()
            .zip(0_u32..)
            .map(|(load, place)| *load as f64 * (experts - 1.0 - 2.0 * f64::from(place)));
        let squares = sorted
            .iter()
            .map(|load| (*load as f64 - mean).powi(2))
            .sum::<f64>();
        let of_rank = |rank| {
            let here = placement.local_experts(rank).iter();
            here.map(|expert| loads[*expert as usize]).sum::<u64>()
        };
        let busiest = (0..placement.ranks()).map(of_rank).max().unwrap_or(0);
        Some(Self {
            pairs,
            experts: sorted[0] as f64 / mean,
            ranks: busiest as f64 * placement.ranks() as f64 / pairs,
            shares: [1, sorted.len().div_ceil(10), sorted.len().div_ceil(4)].map(share),
            gini: weighted.sum::<f64>() / (experts * pairs),
            variation: (squares / experts).sqrt() / mean,
            idle: sorted.iter().filter(|load| **load == 0).count() as f64,
            drift: None,
        })
    }
}

/// Half the sum of the differences of the shares; `None` if either has no pairs.
pub(super) fn distance(a: ArrayView1<'_, u64>, b: ArrayView1<'_, u64>) -> Option<f64> {
    let (all, other) = (a.sum() as f64, b.sum() as f64);
    let share = |(a, b): (&u64, &u64)| (*a as f64 / all - *b as f64 / other).abs();
    (all > 0.0 && other > 0.0).then(|| a.iter().zip(b).map(share).sum::<f64>() / 2.0)
}

/// Sums of figures over steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    count: f64,
    sums: [f64; 9],
    worst: [f64; 2],
    drift: (f64, f64),
}

impl Sums {
    pub(super) fn add(&mut self, figures: &StepFigures) {
        let [top_1, top_10, top_25] = figures.shares;
        let StepFigures {
            pairs,
            experts,
            ranks,
            gini,
            variation,
            idle,
            ..
        } = *figures;
        let values = [
            pairs, experts, ranks, top_1, top_10, top_25, gini, variation, idle,
        ];
        self.count += 1.0;
        self.sums
            .iter_mut()
            .zip(values)
            .for_each(|(sum, value)| *sum += value);
        self.worst = [self.worst[0].max(experts), self.worst[1].max(ranks)];
        if let Some(drift) = figures.drift {
            self.drift = (self.drift.0 + drift, self.drift.1 + 1.0);
        }
    }

    fn means(&self) -> ([f64; 9], f64) {
        let mean = |sum: f64, count: f64| if count > 0.0 { sum / count } else { 0.0 };
        (
            self.sums.map(|sum| mean(sum, self.count)),
            mean(self.drift.0, self.drift.1),
        )
    }

    pub(super) fn layer(&self) -> LayerFigures {
        let (
            [
                pairs,
                experts,
                ranks,
                top_1,
                top_10,
                top_25,
                gini,
                variation,
                idle,
            ],
            drift,
        ) = self.means();
        LayerFigures {
            pairs,
            expert_max_over_mean: experts,
            expert_max_over_mean_worst: self.worst[0],
            rank_max_over_mean: ranks,
            rank_max_over_mean_worst: self.worst[1],
            share_top_1: top_1,
            share_top_10_percent: top_10,
            share_top_25_percent: top_25,
            gini,
            variation,
            drift,
            idle_experts: idle,
        }
    }

    pub(super) fn time(&self, (first_step, last_step): (u32, u32)) -> TimeFigures {
        let ([_, experts, ranks, ..], drift) = self.means();
        TimeFigures {
            first_step,
            last_step,
            expert_max_over_mean: experts,
            rank_max_over_mean: ranks,
            drift,
        }
    }
}
