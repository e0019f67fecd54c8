//! What the placement policies would have cost on routing that was recorded: memory, traffic, time.
//!
//! [`replay`] takes the steps of a [`Source`] one by one. In each step and layer of each contender
//!
//! 1. the experts lie where the loads of the step before put them (`fixed` never moves, `fixed-replicas` places once, by the loads of the
//!    first steps; before the first step all experts count alike);
//! 2. `symi` drops the pairs beyond its capacities; the others keep all;
//! 3. `lrmoe` plans quotas within what each rank can hold, and selects: by the scores of the pairs where the trace has them, else as
//!    many of each source rank as its share;
//! 4. all pairs forward and the retained ones backward are routed exactly, by `lrmoe-route`;
//! 5. memory comes from `lrmoe_plan::MemoryModel::of_rank`, time from `lrmoe_plan::modelled_seconds`.
//!
//! Steps depend on each other by the placement and by the profile of scores alone. One step is in memory at a time.

mod contender;
mod contest;
mod error;
mod header;
mod layer;
mod loads;
mod page;
mod report;
mod retained;
mod rules;
mod settings;
mod source;
mod table;
mod totals;
mod traffic;

use std::sync::atomic::{AtomicBool, Ordering};

use lrmoe_plan::{Loads, Topology};
use ndarray::Array2;
use rayon::prelude::*;

use contest::Contest;
use rules::Rules;
use source::Multiples;

pub use contender::{Buffering, Contender, PolicyName};
pub use error::ReplayError;
pub use loads::read_loads;
pub use page::page;
pub use report::{Header, MemoryParts, MemoryReport, Point, PolicyReport, Report};
pub use settings::{Model, Settings};
pub use source::Source;
pub use traffic::LinkBytes;

/// Replays every step of `source` with every contender. `done` hears of each step: how many are done, of how many.
///
/// # Errors
///
/// Settings out of range or that do not fit the trace, a trace that cannot be read, a budget that a contender of policy `lrmoe` cannot keep
/// to, and [`ReplayError::Interrupted`] once `stop` is set.
pub fn replay(
    source: &mut Source,
    settings: &Settings,
    stop: &AtomicBool,
    mut done: impl FnMut(usize, usize),
) -> Result<Report, ReplayError> {
    settings.check()?;
    if let Some(range) = &settings.steps {
        source.keep(range)?;
    }
    if settings.warmup >= source.len() {
        return Err(ReplayError::NoSteps {
            steps: source.len(),
            warmup: settings.warmup,
        });
    }
    let top_k = source.top_k().or(settings.model.top_k);
    let top_k = top_k.ok_or(ReplayError::UnknownTopK)?;
    let by = multiples(source, settings)?;
    let trace = source.header().clone();
    let ranks = trace.ranks * by.ranks;
    if ranks > MOST_RANKS {
        return Err(ReplayError::OutOfRange {
            name: "ranks",
            value: ranks.to_string(),
            range: format!("1 to {MOST_RANKS}"),
        });
    }
    let topology = Topology::new(ranks, settings.cluster.ranks_per_node)?;
    let history = history(source, settings, top_k, by)?;
    let first = source.number(0);
    let contest = |contender: &Contender| {
        let rules = Rules::new(
            settings,
            *contender,
            topology,
            trace.experts,
            top_k,
            trace.layers,
        );
        Contest::new(rules, first, &history)
    };
    let contests = settings.contenders.iter().map(contest);
    let mut contests: Vec<Contest<'_>> = contests.collect::<Result<_, _>>()?;

    let steps = source.len();
    let mut gates = Array2::ones((0, 0));
    let mut tokens = 0;
    for index in 0..steps {
        if stop.load(Ordering::Relaxed) {
            return Err(ReplayError::Interrupted { done: index, steps });
        }
        let step = source.step(index, top_k, by, true)?;
        tokens = tokens.max(step.tokens);
        if let Some(pairs) = step.pairs.as_ref().and_then(|layers| layers.first())
            && gates.dim() != pairs.expert.dim()
        {
            gates = Array2::ones(pairs.expert.raw_dim());
        }
        let replayed = contests.par_iter_mut();
        let counts = index >= settings.warmup;
        replayed.try_for_each(|contest| {
            if stop.load(Ordering::Relaxed) {
                return Err(ReplayError::Interrupted { done: index, steps });
            }
            contest.step(&step, gates.view(), counts)
        })?;
        done(index + 1, steps);
    }
    Ok(Report {
        header: header::header(source, settings, top_k, by, tokens),
        policies: contests.into_iter().map(Contest::report).collect(),
    })
}

/// Ranks at most: traffic is counted from every rank to every rank.
const MOST_RANKS: usize = 4096;

/// By how much the trace is multiplied.
fn multiples(source: &Source, settings: &Settings) -> Result<Multiples, ReplayError> {
    let times = |what, asked: Option<usize>, traced: usize| match asked {
        None => Ok(1),
        Some(asked) if asked > 0 && asked.is_multiple_of(traced) => Ok(asked / traced),
        Some(asked) => Err(ReplayError::NotAMultiple {
            what,
            asked,
            traced,
        }),
    };
    let tokens = match (settings.tokens_per_rank, source.tokens_per_rank()) {
        (None, _) => 1,
        (Some(_), None | Some(0)) => return Err(ReplayError::UnknownTokens),
        (asked, Some(traced)) => times("tokens per rank", asked, traced)?,
    };
    Ok(Multiples {
        ranks: times("ranks", settings.ranks, source.header().ranks)?,
        tokens,
    })
}

/// Layer by layer the mean loads of the first steps.
fn history(
    source: &mut Source,
    settings: &Settings,
    top_k: usize,
    by: Multiples,
) -> Result<Vec<Loads>, ReplayError> {
    let needed = settings
        .contenders
        .iter()
        .any(|contender| contender.policy == PolicyName::FixedReplicas);
    let steps = if needed {
        settings.history.min(source.len())
    } else {
        1
    };
    let mut sums: Vec<Array2<u64>> = Vec::new();
    for index in 0..steps {
        let step = source.step(index, top_k, by, false)?;
        let counts = step
            .loads
            .iter()
            .map(|loads| loads.counts().mapv(u64::from));
        if sums.is_empty() {
            sums = counts.collect();
        } else {
            sums.iter_mut()
                .zip(counts)
                .for_each(|(sum, counts)| *sum += &counts);
        }
    }
    let mean = |sum: Array2<u64>| Loads::new(sum.mapv(|sum| (sum / steps as u64) as u32));
    Ok(sums.into_iter().map(mean).collect::<Result<_, _>>()?)
}
