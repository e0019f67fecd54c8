//! One contender through the whole trace.

use lrmoe_plan::{Loads, Memory, MemoryModel};
use ndarray::ArrayView2;
use rayon::prelude::*;

use super::ReplayError;
use super::layer::{Forward, Layer, LayerStep};
use super::report::PolicyReport;
use super::retained::Recorded;
use super::rules::Rules;
use super::source::Step;
use super::totals::{RankMemory, Totals};

/// A contender, its layers, and what they have done so far.
#[derive(Debug)]
pub(super) struct Contest<'a> {
    rules: Rules<'a>,
    layers: Vec<Layer>,
    totals: Totals,
}

impl<'a> Contest<'a> {
    /// `history` holds, layer by layer, the loads by which `fixed-replicas` places.
    pub(super) fn new(
        rules: Rules<'a>,
        first: u32,
        history: &[Loads],
    ) -> Result<Self, ReplayError> {
        let layers = history.iter().enumerate().map(|(index, history)| {
            Layer::new(index as u32, &rules, history).map_err(rules.at(first, index))
        });
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            totals: Totals::default(),
            rules,
        })
    }

    /// One step of all layers; `counts` in the figures or only moves on. `gates` are ones, of the shape of the step's pairs.
    pub(super) fn step(
        &mut self,
        step: &Step,
        gates: ArrayView2<'_, f32>,
        counts: bool,
    ) -> Result<(), ReplayError> {
        let rules = &self.rules;
        let memory = rules.memory(step.tokens);
        let forward = self.layers.par_iter().zip(&step.loads).enumerate();
        let forward = forward.map(|(index, (layer, loads))| {
            layer
                .forward(rules, loads)
                .map_err(rules.at(step.number, index))
        });
        let forward: Vec<Forward> = forward.collect::<Result<_, _>>()?;
        let capacities = self.capacities(step.number, &memory, &forward)?;

        let placed = self.layers.iter().map(|layer| layer.placement().clone());
        let placed: Vec<_> = placed.collect();
        let finish = |(index, layer): (usize, &mut Layer)| {
            let loads = &step.loads[index];
            let recorded = step
                .pairs
                .as_ref()
                .map(|pairs| Recorded::new(&pairs[index], gates, loads.ranks(), loads.experts()));
            let finish = |recorded: Option<Recorded<'_>>| {
                let (number, forward) = (step.number, &forward[index]);
                layer.finish(
                    rules,
                    number,
                    loads,
                    forward,
                    recorded.as_ref(),
                    &capacities[index],
                )
            };
            let done = recorded.transpose().and_then(finish);
            done.map_err(rules.at(step.number, index))
        };
        let done = self.layers.par_iter_mut().enumerate().map(finish);
        let done: Vec<LayerStep> = done.collect::<Result<_, _>>()?;

        if !counts {
            return Ok(());
        }
        let of_rank = |layer: usize, rank: usize| {
            let retained = rules.held(done[layer].backward_rows[rank]);
            let (placement, slots) = (&placed[layer], rules.slots[rank]);
            memory.of_rank(placement, rank, slots, forward[layer].rows[rank], retained)
        };
        let ranks = (0..rules.slots.len()).map(|rank| {
            let layers = (0..done.len()).map(|layer| of_rank(layer, rank));
            RankMemory::new(layers, |sum| rules.all_layers(sum))
        });
        let ranks: Vec<RankMemory> = ranks.collect();
        self.totals.add(step.number, &forward, &done, &ranks, rules);
        Ok(())
    }

    /// Retained rows that each rank can hold in each layer, `[layers][ranks]`, beside everything that the other layers hold.
    fn capacities(
        &self,
        step: u32,
        memory: &MemoryModel,
        forward: &[Forward],
    ) -> Result<Vec<Vec<u64>>, ReplayError> {
        let rules = &self.rules;
        let ranks = rules.slots.len();
        let mut capacities = vec![vec![u64::MAX; ranks]; forward.len()];
        if !rules.plans() {
            return Ok(capacities);
        }
        let mut short: Option<(u64, usize)> = None;
        for rank in 0..ranks {
            let of_layer = |layer: usize, retained: u64| {
                let (placement, rows) = (self.layers[layer].placement(), forward[layer].rows[rank]);
                memory.of_rank(placement, rank, rules.slots[rank], rows, retained)
            };
            let lasting = |memory: &Memory| memory.total() - memory.token_buffers();
            let all: u64 = (0..forward.len())
                .map(|layer| lasting(&of_layer(layer, 0)))
                .sum();
            let all = rules.all_layers(all);
            for (layer, capacities) in capacities.iter_mut().enumerate() {
                let none = of_layer(layer, 0);
                let held = all + none.token_buffers();
                let Some(left) = rules.settings.budget.checked_sub(held) else {
                    short = short.max(Some((held - rules.settings.budget, rank)));
                    continue;
                };
                let rows = left / memory.retained_row_bytes();
                // Rows that are not held at once need no more room than those that are.
                if rules.held(u64::MAX) > rows {
                    capacities[rank] = rows;
                }
            }
        }
        match short {
            None => Ok(capacities),
            Some((missing, rank)) => Err(ReplayError::Budget {
                contender: rules.contender.to_string(),
                step,
                rank,
                budget: rules.settings.budget,
                missing,
            }),
        }
    }

    pub(super) fn report(self) -> PolicyReport {
        self.totals.report(&self.rules)
    }
}
