//! A whole plan within budgets.

mod budget;
mod layout;
mod report;
mod rows;

use lrmoe_metric::Profile;
use serde::Serialize;

use crate::cost::{PredictedWork, rows_within};
use crate::error::expect;
use crate::quota::{quotas_on, wanted};
use crate::{
    ClusterSpec, Error, Loads, Memory, MemoryModel, ModelledSeconds, Placement, PlacementPolicy,
    QuotaPolicy, QuotaRequest, Quotas, Topology,
};
use layout::{Layout, lay_out};
use rows::spread;

/// What [`plan`] decides on.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// Pairs of the step; as many source ranks as the topology has.
    pub loads: &'a Loads,
    /// Where the experts are now.
    pub previous: &'a Placement,
    /// The ranks and their nodes. The nodes of `cluster` are not looked at.
    pub topology: &'a Topology,
    /// What takes memory.
    pub memory: &'a MemoryModel,
    /// What takes time.
    pub cluster: &'a ClusterSpec,
    /// Bytes that each rank may use, `[ranks]`.
    pub budget: &'a [u64],
    /// Instances that each rank holds memory for, `[ranks]`; derived from the budget if not given.
    pub slots: Option<&'a [u32]>,
    /// Where the experts go.
    pub placement: &'a dyn PlacementPolicy,
    /// Share of all pairs to retain, 0 to 1.
    pub retention: f64,
    /// How the retained pairs are shared out.
    pub quota_policy: QuotaPolicy,
    /// Values of pairs as seen in earlier steps.
    pub profile: Option<&'a Profile>,
    /// Pairs that every expert keeps if it has them and all floors together allow it.
    pub floor: u32,
    /// Seconds that the grouped GEMMs of the backward pass may take on a rank.
    pub seconds: Option<f64>,
}

impl PlanRequest<'_> {
    fn check(&self) -> Result<(), Error> {
        let (ranks, experts) = (self.topology.ranks(), self.loads.experts());
        expect("source ranks", ranks, self.loads.ranks())?;
        expect("budgets", ranks, self.budget.len())?;
        expect(
            "ranks of the previous placement",
            ranks,
            self.previous.ranks(),
        )?;
        expect(
            "experts of the previous placement",
            experts,
            self.previous.experts(),
        )?;
        if let Some(slots) = self.slots {
            expect("slots", ranks, slots.len())?;
        }
        self.cluster.check()?;
        match self.seconds {
            Some(value) if !(0.0..f64::INFINITY).contains(&value) => Err(Error::OutOfRange {
                what: "time budget",
                value,
                range: "the numbers from 0",
            }),
            _ => Ok(()),
        }
    }

    /// The most retained rows that a rank can finish in time.
    fn rows_in_time(&self, instances: u32) -> u64 {
        let memory = self.memory;
        let rows = |seconds| {
            rows_within(
                self.cluster,
                &memory.shape,
                memory.stash,
                instances,
                seconds,
            )
        };
        self.seconds.map_or(u64::MAX, rows)
    }
}

/// What one layer does in one step, and what that takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// Pairs of each expert that run backward, `[experts]`.
    pub quotas: Quotas,
    /// Where the experts live; in JSON the experts of each rank.
    #[serde(serialize_with = "report::by_rank")]
    pub placement: Placement,
    /// Instances that each rank holds memory for, `[ranks]`.
    pub slots: Vec<u32>,
    /// The most retained rows that each rank can hold and finish in time, `[ranks]`.
    pub capacities: Vec<u64>,
    /// Rank by rank, `[ranks]`.
    pub ranks: Vec<RankPlan>,
    /// Pairs that the retention asks for.
    pub wanted: u64,
    /// Bytes that one more retained row takes on a rank.
    pub retained_row_bytes: u64,
    /// Modelled time of the step.
    pub seconds: ModelledSeconds,
}

/// What one rank does, and what that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RankPlan {
    /// Memory in use, at most the budget.
    pub memory: Memory,
    /// Bytes that it may use.
    pub budget: u64,
    /// Rows of the forward pass.
    pub forward_rows: u64,
    /// Rows of the backward pass, at most the capacity.
    pub retained_rows: u64,
    /// What keeps the rank from taking more retained rows.
    pub binds: Constraint,
}

/// What keeps a rank from taking more retained rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Constraint {
    /// It has room; as many pairs are retained as the retention asks for.
    Retention,
    /// It has room; every pair of the experts that live on it is retained.
    Loads,
    /// Its memory is full.
    Memory,
    /// Its time is used up.
    Time,
}

/// Plans one layer of one step so that every rank stays within its budget.
///
/// 1. **Slots**, if not given: as many as fit beside a balanced share of the forward and retained rows (`1 / ranks` of them,
///    rounded up), at most one per expert, at least enough for every expert; what the placement leaves unused is not
///    counted. If the forward rows do not fit then, because they are not balanced, fewer slots are tried, then more.
/// 2. **Placement** by the policy, on the loads given.
/// 3. **Forward rows**: all pairs, spread so that the largest rank has as few as possible within the budgets.
/// 4. **Capacities**: the retained rows that fit into what is left of the budget and, if there is one, into the time budget.
/// 5. **Quotas** within the capacities, see [`quotas`](crate::quotas).
/// 6. **Retained rows**, spread so that the largest rank has as few as possible within the capacities.
///
/// The rows are those of one routing that keeps every budget; a router that takes them for capacities finds it. The seconds are
/// modelled as in [`modelled_seconds`](crate::modelled_seconds); the exchanges are predicted as if every rank received its rows
/// from all ranks in proportion to what these route, and weights and gradients travelled between every instance
/// and optimizer shards that are spread evenly over all ranks.
///
/// # Errors
///
/// [`Error::Mismatch`] if the inputs have different numbers of ranks or experts; [`Error::OutOfRange`] for the retention, the
/// time budget or a number of the cluster; what the placement policy returns; [`Error::RankSlots`] if the policy places
/// more on a rank than it has slots; [`Error::BudgetTooSmall`] or [`Error::TooManyBytes`] if the budgets cannot hold every
/// expert and the forward pass.
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, Error> {
    request.check()?;
    let wanted = wanted(request.loads, request.retention)?;
    let mut layout = lay_out(request, wanted)?;
    let rooms = rooms(request, &layout);
    let capacities: Vec<u64> = rooms.iter().map(Room::rows).collect();
    let quotas = quotas_on(
        &QuotaRequest {
            loads: request.loads,
            placement: &layout.placement,
            capacities: &capacities,
            retention: request.retention,
            policy: request.quota_policy,
            profile: request.profile,
            floor: request.floor,
        },
        &mut layout.flow,
    )?;
    let retained_rows = spread(&mut layout.flow, quotas.as_slice(), &capacities)
        .expect("quotas can be routed within the capacities");
    let reached = u64::from(quotas.total()) == wanted;
    let seconds = PredictedWork {
        loads: request.loads,
        placement: &layout.placement,
        forward_rows: &layout.forward_rows,
        retained_rows: &retained_rows,
    }
    .seconds(
        request.cluster,
        request.topology,
        &request.memory.shape,
        request.memory.stash,
    );
    Ok(Plan {
        quotas,
        ranks: rank_plans(request, &layout, &retained_rows, &rooms, reached),
        placement: layout.placement,
        slots: layout.slots,
        capacities,
        wanted,
        retained_row_bytes: request.memory.retained_row_bytes(),
        seconds,
    })
}

fn rank_plans(
    request: &PlanRequest<'_>,
    layout: &Layout,
    retained_rows: &[u64],
    rooms: &[Room],
    reached: bool,
) -> Vec<RankPlan> {
    let of_rank = |rank: usize| {
        let (forward_rows, retained_rows) = (layout.forward_rows[rank], retained_rows[rank]);
        RankPlan {
            memory: layout.memory_of(request.memory, rank, retained_rows),
            budget: request.budget[rank],
            forward_rows,
            retained_rows,
            binds: rooms[rank].binds(retained_rows, reached),
        }
    };
    (0..rooms.len()).map(of_rank).collect()
}

/// Retained rows for which a rank has room.
struct Room {
    memory: u64,
    time: u64,
}

impl Room {
    fn rows(&self) -> u64 {
        self.memory.min(self.time)
    }

    fn binds(&self, retained: u64, reached: bool) -> Constraint {
        if retained < self.rows() {
            if reached {
                Constraint::Retention
            } else {
                Constraint::Loads
            }
        } else if self.memory <= self.time {
            Constraint::Memory
        } else {
            Constraint::Time
        }
    }
}

fn rooms(request: &PlanRequest<'_>, layout: &Layout) -> Vec<Room> {
    let row = request.memory.retained_row_bytes().max(1);
    let room = |(rank, budget): (usize, &u64)| {
        let taken = layout.memory_of(request.memory, rank, 0).total();
        let instances = layout.placement.on_rank(rank).len() as u32;
        Room {
            memory: budget.saturating_sub(taken) / row,
            time: request.rows_in_time(instances),
        }
    };
    request.budget.iter().enumerate().map(room).collect()
}
