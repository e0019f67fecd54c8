use crate::flow::{balance, mean_load};
use crate::policy::pack::pack;
use crate::policy::search::Search;
use crate::policy::{PlacementPolicy, PlacementRequest};
use crate::{Error, Placement};

/// The placement with the smallest largest rank load that a local search finds, changed only when that pays.
///
/// The largest rank load of a placement is the smallest that any routing reaches, see
/// [`Placement::largest_load`]. Two searches start, one from the previous placement and one from greedy
/// replication packed by longest processing time; the better result is taken, the first if they are equal. An
/// instance that gains nothing is neither added nor moved.
///
/// The previous placement stays unless the largest rank load falls by more than a set share of it. So the
/// result is never worse than the previous placement and, but for that share, never worse than the greedy one. A
/// previous placement that no longer fits into the slots is replaced.
#[derive(Clone, Copy, Debug)]
pub struct Lrmoe {
    minimum_gain: f64,
}

impl Lrmoe {
    /// Keeps the previous placement unless the largest rank load falls by more than `minimum_gain` of it.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if `minimum_gain` is not in 0 to 1.
    pub fn new(minimum_gain: f64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&minimum_gain) {
            return Err(Error::OutOfRange {
                what: "minimum gain",
                value: minimum_gain,
                range: "0 to 1",
            });
        }
        Ok(Self { minimum_gain })
    }

    fn pays(self, before: u64, after: u64) -> bool {
        before.saturating_sub(after) as f64 > self.minimum_gain * before as f64
    }
}

impl Default for Lrmoe {
    /// A minimum gain of 5 %.
    fn default() -> Self {
        Self { minimum_gain: 0.05 }
    }
}

impl PlacementPolicy for Lrmoe {
    fn name(&self) -> &'static str {
        "lrmoe"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let experts = request.loads.experts();
        let per_expert = request.loads.per_expert();
        let slots: Vec<usize> = request
            .slots
            .iter()
            .map(|&s| experts.min(s as usize))
            .collect();
        let search = Search {
            per_expert,
            slots: &slots,
            topology: request.topology,
        };
        let previous = request.previous.by_rank();
        let kept = previous
            .iter()
            .zip(&slots)
            .all(|(here, &slots)| here.len() <= slots);

        let before = if kept {
            let before = balance(per_expert, &previous).largest;
            if !self.pays(before, mean_load(per_expert, slots.len())) {
                return Ok(request.previous.clone());
            }
            Some(before)
        } else {
            None
        };
        let mut by_rank = pack(per_expert, &slots);
        let mut largest = search.improve(&mut by_rank);
        by_rank = search.align(by_rank, &previous);
        if let Some(before) = before {
            let mut moved = previous.clone();
            let moved_largest = search.improve(&mut moved);
            if moved_largest <= largest {
                (by_rank, largest) = (moved, moved_largest);
            }
            if !self.pays(before, largest) {
                return Ok(request.previous.clone());
            }
        }
        search.prune(&mut by_rank, &previous, largest);
        Placement::new(experts, by_rank)
    }
}
