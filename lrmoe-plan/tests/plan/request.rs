//! What a request borrows, in one place.

use crate::checker::check;
use lrmoe_plan::{
    ClusterSpec, Error, Loads, MemoryModel, Placement, PlacementPolicy, Plan, PlanRequest, Profile,
    QuotaPolicy, Topology, plan,
};

/// Owns what a [`PlanRequest`] borrows.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) loads: Loads,
    pub(crate) previous: Placement,
    pub(crate) topology: Topology,
    pub(crate) memory: MemoryModel,
    pub(crate) cluster: ClusterSpec,
    pub(crate) budget: Vec<u64>,
    pub(crate) slots: Option<Vec<u32>>,
    pub(crate) placement: Box<dyn PlacementPolicy>,
    pub(crate) retention: f64,
    pub(crate) quota_policy: QuotaPolicy,
    pub(crate) profile: Option<Profile>,
    pub(crate) floor: u32,
    pub(crate) seconds: Option<f64>,
}

impl Case {
    pub(crate) fn request(&self) -> PlanRequest<'_> {
        PlanRequest {
            loads: &self.loads,
            previous: &self.previous,
            topology: &self.topology,
            memory: &self.memory,
            cluster: &self.cluster,
            budget: &self.budget,
            slots: self.slots.as_deref(),
            placement: self.placement.as_ref(),
            retention: self.retention,
            quota_policy: self.quota_policy,
            profile: self.profile.as_ref(),
            floor: self.floor,
            seconds: self.seconds,
        }
    }

    /// Plans with the same budget everywhere.
    pub(crate) fn plan_with(&self, budget: u64) -> Result<Plan, Error> {
        let budget = vec![budget; self.budget.len()];
        let request = PlanRequest {
            budget: &budget,
            ..self.request()
        };
        let plan = plan(&request)?;
        check(&request, &plan);
        Ok(plan)
    }
}

/// Slow, so that time binds.
pub(crate) fn cluster() -> ClusterSpec {
    ClusterSpec {
        flops: 1e6,
        launch_seconds: 1e-4,
        ..ClusterSpec::preset("8xA100").unwrap()
    }
}
