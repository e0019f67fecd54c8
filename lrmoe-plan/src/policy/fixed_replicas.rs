use crate::policy::pack::pack_replicas;
use crate::policy::{PlacementPolicy, PlacementRequest};
use crate::{Error, Placement};

/// Greedy replication packed by longest processing time, as balancers of inference servers do.
///
/// Replicas go one by one to the expert with the largest load per instance; instances go, largest share first,
/// to the rank with the least load that has room. All shares of an expert count as equal. Nothing is added for
/// experts without pairs. It looks only at the loads and the slots, never at the previous placement: to be
/// called once, with loads from history.
#[derive(Clone, Copy, Debug, Default)]
pub struct FixedReplicas;

impl PlacementPolicy for FixedReplicas {
    fn name(&self) -> &'static str {
        "fixed-replicas"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let per_expert = request.loads.per_expert();
        let by_rank = pack_replicas(per_expert, &request.usable_slots());
        Placement::new(per_expert.len(), by_rank)
    }
}
