//! Routing against brute force and against a linear program of the problem as stated.

use crate::case::{Case, Limits};
use lrmoe_route::{Error, route, shrink};
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOutcome, Variable};

/// (largest load, node crossings, rank crossings)
type Goal = (u64, u64, u64);

/// What `route` makes of a case: the goal reached, or the shortfall.
fn routed(case: &Case) -> Result<Goal, u64> {
    let capacities = case.capacities.as_deref();
    match route(
        case.counts.view(),
        &case.placement,
        &case.topology,
        capacities,
    ) {
        Ok(table) => {
            let loads = table.rank_loads();
            if let Some(capacities) = capacities {
                assert!(
                    loads
                        .iter()
                        .zip(capacities)
                        .all(|(load, room)| load <= room)
                );
            }
            let crossings = table.crossings(&case.topology);
            Ok((
                loads.into_iter().max().unwrap(),
                crossings.nodes,
                crossings.ranks,
            ))
        }
        Err(Error::NoRoom { shortfall, .. }) => Err(shortfall),
        Err(error) => panic!("{error}"),
    }
}

/// Tries every way to give each pair to an instance of its expert.
struct BruteForce<'a> {
    case: &'a Case,
    /// (source, expert, ranks that host it) of every pair.
    pairs: Vec<(usize, usize, Vec<usize>)>,
    /// Where each pair goes so far.
    to: Vec<usize>,
    best: Option<Goal>,
    shortfall: u64,
}

impl BruteForce<'_> {
    fn solve(case: &Case) -> Result<Goal, u64> {
        let pairs = case
            .counts
            .indexed_iter()
            .flat_map(|((source, expert), &n)| {
                (0..n).map(move |_| (source, expert, case.hosts(expert)))
            });
        let pairs = pairs.collect();
        let mut search = BruteForce {
            case,
            pairs,
            to: Vec::new(),
            best: None,
            shortfall: u64::MAX,
        };
        search.next();
        search.best.ok_or(search.shortfall)
    }

    fn next(&mut self) {
        let at = self.to.len();
        if at == self.pairs.len() {
            return self.finish();
        }
        for to in self.pairs[at].2.clone() {
            // Pairs of one source and expert are alike: only ascending destinations.
            if at > 0 && self.pairs[at - 1] == self.pairs[at] && to < self.to[at - 1] {
                continue;
            }
            self.to.push(to);
            self.next();
            self.to.pop();
        }
    }

    fn finish(&mut self) {
        let topology = &self.case.topology;
        let mut loads = vec![0; topology.ranks()];
        let (mut nodes, mut ranks) = (0, 0);
        for ((source, ..), &to) in self.pairs.iter().zip(&self.to) {
            loads[to] += 1;
            ranks += u64::from(*source != to);
            nodes += u64::from(topology.node_of(*source) != topology.node_of(to));
        }
        let short = self.case.capacities.as_ref().map_or(0, |room| {
            loads
                .iter()
                .zip(room)
                .map(|(load, room)| u64::saturating_sub(*load, *room))
                .sum()
        });
        self.shortfall = self.shortfall.min(short);
        if short == 0 {
            let goal = (loads.into_iter().max().unwrap(), nodes, ranks);
            self.best = Some(self.best.map_or(goal, |best| best.min(goal)));
        }
    }
}

#[test]
fn brute_force() {
    let limits = Limits {
        ranks: 4,
        experts: 4,
        pairs: 7,
    };
    let mut short = 0;
    for seed in 0..10_000 {
        let case = Case::random(seed, limits);
        let expected = BruteForce::solve(&case);
        assert_eq!(routed(&case), expected, "seed {seed}: {case:?}");
        if let (Err(shortfall), Some(capacities)) = (expected, &case.capacities) {
            short += 1;
            let shrunk = shrink(case.counts.view(), &case.placement, capacities).unwrap();
            assert_eq!(
                u64::from(shrunk.left.sum()),
                shortfall,
                "seed {seed}: {case:?}"
            );
        }
    }
    assert!(
        (1_000..5_000).contains(&short),
        "{short} cases without room"
    );
}

/// What a linear program minimises: a sum of these.
#[derive(Default)]
struct Costs {
    /// Of the largest load.
    largest: f64,
    /// Of a pair that is not routed. Without this cost all are.
    left: f64,
    /// Of a pair that crosses nodes and of one that crosses ranks.
    node: f64,
    rank: f64,
}

/// The problem as stated: a variable for the pairs of each source, expert and rank that hosts it. Loads are at most
/// `most`. With integral bounds an optimum of the flow is integral, so reals do.
fn minimum(case: &Case, costs: &Costs, most: f64) -> f64 {
    let any = (0.0, f64::INFINITY);
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let largest = problem.add_var(costs.largest, (0.0, most));
    let mut on_rank: Vec<Vec<(Variable, f64)>> = vec![Vec::new(); case.placement.ranks()];
    for ((source, expert), &n) in case.counts.indexed_iter() {
        let mut ways = Vec::new();
        if costs.left > 0.0 {
            ways.push((problem.add_var(costs.left, any), 1.0));
        }
        for rank in case.hosts(expert) {
            let crosses_node = case.topology.node_of(source) != case.topology.node_of(rank);
            let node = if crosses_node { costs.node } else { 0.0 };
            let cost = if source != rank {
                costs.rank + node
            } else {
                0.0
            };
            let pairs = problem.add_var(cost, any);
            ways.push((pairs, 1.0));
            on_rank[rank].push((pairs, 1.0));
        }
        problem.add_constraint(ways, ComparisonOp::Eq, n.into());
    }
    for (rank, mut rows) in on_rank.into_iter().enumerate() {
        if let Some(room) = &case.capacities {
            problem.add_constraint(rows.clone(), ComparisonOp::Le, room[rank] as f64);
        }
        rows.push((largest, -1.0));
        problem.add_constraint(rows, ComparisonOp::Le, 0.0);
    }
    match problem.solve() {
        Ok(SolveOutcome::Solution(solution)) => solution.objective(),
        other => panic!("{other:?}"),
    }
}

fn linear_program(case: &Case) -> Result<Goal, u64> {
    let nothing = Costs::default();
    let left = minimum(
        case,
        &Costs {
            left: 1.0,
            ..nothing
        },
        f64::INFINITY,
    )
    .round() as u64;
    if left > 0 {
        return Err(left);
    }
    // Sums of counts below 1000: 1e-6 is far above rounding and far below 1/8, the finest fraction.
    let largest = minimum(
        case,
        &Costs {
            largest: 1.0,
            ..nothing
        },
        f64::INFINITY,
    );
    let largest = (largest - 1e-6).ceil();
    let weight = u64::from(case.counts.sum()) + 1;
    let costs = Costs {
        node: weight as f64,
        rank: 1.0,
        ..nothing
    };
    let crossings = minimum(case, &costs, largest).round() as u64;
    Ok((largest as u64, crossings / weight, crossings % weight))
}

#[test]
fn linear_programs() {
    let limits = Limits {
        ranks: 8,
        experts: 8,
        pairs: 400,
    };
    for seed in 0..10_000 {
        let case = Case::random(seed, limits);
        assert_eq!(
            routed(&case),
            linear_program(&case),
            "seed {seed}: {case:?}"
        );
    }
}
