use crate::flow::{Flow, Instance};
use crate::policy::level::{Group, experts, level};
use crate::policy::near::Near;
use crate::policy::pack::{pack_replicas, pack_single};
use crate::policy::search::{Search, least_load};
use crate::policy::{PlacementPolicy, PlacementRequest};
use crate::{Error, Placement};

/// The placement with the smallest largest rank load that is found within bounded time, changed only when that pays.
///
/// The largest rank load of a placement is the smallest that any routing reaches, see
/// [`Placement::largest_load`]. In this order:
///
/// 1. If the previous placement fits into the slots and nothing can be gained, it stays.
/// 2. Its instances are added, replaced and exchanged one by one, guided by the experts and ranks that a maximum
///    flow leaves full, until every rank stays within the mean: a few moves while loads drift.
/// 3. Failing that, experts are divided anew so that every rank bears the mean. This cannot fail where every rank has
///    s slots and there are at most (s - 1) R + 1 experts: with one slot a rank to spare, the optimum is certain.
/// 4. Failing that too (hardly any spare slots, or uneven ones), the best that bisection of the level finds by changes
///    of the previous placement and of greedy packings, with replicas as by [`FixedReplicas`](crate::FixedReplicas)
///    and without.
///
/// So the result is never worse than the previous placement and, with a minimum gain of 0, never worse than
/// `FixedReplicas`. An instance that takes no pairs is not added. Among ranks that serve the balance equally well an
/// instance goes to the node with most of its pairs, so that replicas spread over nodes and fewer pairs cross them.
///
/// The previous placement stays unless the largest rank load falls by more than the minimum gain. It is 0 by
/// default, strictly better or stay: where optimizer shards are spread evenly over the ranks and every instance is sent
/// its weights in every step, an instance that moves costs no more than one that stays. A previous placement that
/// does not fit into the slots is replaced.
#[derive(Clone, Copy, Debug, Default)]
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

    fn pays(self, before: Option<u64>, after: u64) -> bool {
        before.is_none_or(|before| {
            before.saturating_sub(after) as f64 > self.minimum_gain * before as f64
        })
    }
}

impl PlacementPolicy for Lrmoe {
    fn name(&self) -> &'static str {
        "lrmoe"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let (per_expert, previous) = (request.loads.per_expert(), request.previous);
        let slots = request.usable_slots();
        let least = least_load(per_expert, &slots);
        let fits = (0..slots.len()).all(|rank| previous.on_rank(rank).len() <= slots[rank]);
        let start = fits.then(|| Flow::of(previous, slots.iter().copied()));
        let mut changed = start.clone();
        let before = changed.as_mut().map(|flow| flow.balance(per_expert, least));
        if !self.pays(before, least) {
            return Ok(previous.clone());
        }

        let near = Near::new(request);
        let search = Search {
            per_expert,
            slots: &slots,
            near: &near,
            least,
        };
        if let Some(flow) = &mut changed
            && search.reach(flow, least, search.work_to_reach_least())
        {
            let by_rank = experts(groups(flow, Some(previous)));
            return Placement::new(per_expert.len(), by_rank);
        }
        if let Some(groups) = level(per_expert, &slots, least) {
            return Placement::new(per_expert.len(), near.arrange(groups, &slots, previous));
        }
        let mut packings = pack_single(per_expert, &slots);
        packings.insert(0, pack_replicas(per_expert, &slots));
        let packed = packings.iter().map(|by_rank| {
            let by_rank = by_rank.iter().map(Vec::as_slice);
            Flow::on(per_expert.len(), slots.iter().copied(), by_rank)
        });
        let starts = start.into_iter().chain(packed).collect();
        match search.descend(starts) {
            Some(found) if self.pays(before, found.largest) => {
                let by_rank = if fits && found.start == 0 {
                    experts(groups(&found.flow, Some(previous)))
                } else {
                    near.arrange(groups(&found.flow, None), &slots, previous)
                };
                Placement::new(per_expert.len(), by_rank)
            }
            _ => Ok(previous.clone()),
        }
    }
}

/// The instances of each rank with their pairs, but those without pairs only where `keep` has them or if they are the
/// last of their expert.
fn groups(flow: &Flow, keep: Option<&Placement>) -> Vec<Group> {
    let hosts = flow.hosts();
    let mut count: Vec<u32> = (0..hosts.experts()).map(|e| hosts.count(e)).collect();
    let mut needed = |instance: &&Instance| {
        let (rank, expert) = (instance.rank as usize, instance.expert as usize);
        let kept = keep.is_some_and(|keep| keep.instance_on(rank, expert).is_some());
        let needed = instance.amount > 0 || count[expert] == 1 || kept;
        count[expert] -= u32::from(!needed);
        needed
    };
    let group = |rank| {
        let here = hosts.on_rank(rank).iter().filter(&mut needed);
        here.map(|i| (i.expert, i.amount)).collect()
    };
    (0..hosts.ranks()).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::groups;
    use crate::flow::Flow;

    #[test]
    fn the_last_instance_stays() {
        let by_rank: [&[u32]; 3] = [&[0, 1], &[1, 0], &[1]];
        let mut flow = Flow::on(2, [2; 3].into_iter(), by_rank.into_iter());
        flow.fill(&[3, 0], 3);
        let experts = groups(&flow, None);
        assert_eq!(
            experts.iter().flatten().filter(|&&(e, _)| e == 1).count(),
            1
        );
    }
}
