//! The smallest largest rank load.

use crate::network::{Edge, Network};
use crate::pour::Pour;
use crate::request::{Request, UNBOUNDED};

/// Marks ranks that have more rows than room although no instance elsewhere can take any of these rows.
#[derive(Debug)]
pub(crate) struct Stuck(pub(crate) Vec<bool>);

/// Rows that each rank may have at most: its room, or the smallest largest load where that is less.
///
/// The bound L starts at the mean or the load of experts without a choice, and is raised as in Newton's method:
/// either a maximum flow fits, or its minimum cut marks ranks whose rows cannot leave, and L becomes the smallest
/// value with which these ranks hold them. Raising L leaves the flow valid, so it is carried on.
pub(crate) fn bounds(
    request: &Request<'_>,
    demand: &[u32],
    room: &[i64],
) -> Result<Vec<i64>, Stuck> {
    let ranks = request.ranks();
    let (choosing, mut load) = choosing(request, demand);
    let total = demand.iter().map(|&rows| i64::from(rows)).sum();
    let least = load.iter().copied().max().unwrap_or(0);
    let mut bound = level(total, room.iter().copied()).map_or(UNBOUNDED, |mean| mean.max(least));

    let edges = spread(request, demand, &choosing, &mut load);
    let excess: Vec<i64> = load
        .iter()
        .zip(room)
        .map(|(rows, room)| rows - bound.min(*room))
        .collect();
    let bounds = |bound: i64| room.iter().map(|&room| bound.min(room)).collect();
    if excess.iter().all(|&rows| rows <= 0) {
        return Ok(bounds(bound));
    }
    let mut network = Network::new(ranks + choosing.len(), &edges, excess);
    while !network.settle() {
        let stuck: Vec<bool> = (0..ranks).map(|rank| network.is_stuck(rank)).collect();
        if bound == UNBOUNDED {
            return Err(Stuck(stuck));
        }
        let here = || (0..ranks).filter(|&rank| stuck[rank]);
        let rows = here()
            .map(|rank| network.excess()[rank] + bound.min(room[rank]))
            .sum();
        let next = level(rows, here().map(|rank| room[rank])).unwrap_or(UNBOUNDED);
        for (rank, room) in room.iter().enumerate() {
            network.widen(rank, next.min(*room) - bound.min(*room));
        }
        bound = next;
    }
    Ok(bounds(bound))
}

/// Experts with rows and more than one instance, and what the others put on each rank.
pub(crate) fn choosing(request: &Request<'_>, demand: &[u32]) -> (Vec<usize>, Vec<i64>) {
    let mut choosing = Vec::new();
    let mut load = vec![0; request.ranks()];
    for (expert, &rows) in demand.iter().enumerate() {
        match request.placement.instances_of(expert) {
            &[only] => load[request.rank_of(only)] += i64::from(rows),
            _ if rows > 0 => choosing.push(expert),
            _ => {}
        }
    }
    (choosing, load)
}

/// Spreads the rows of each expert over its ranks, levelling loads one expert at a time: a start near the end.
fn spread(
    request: &Request<'_>,
    demand: &[u32],
    choosing: &[usize],
    load: &mut [i64],
) -> Vec<Edge> {
    let mut edges = Vec::new();
    let mut pour = Pour::default();
    for (&expert, tail) in choosing.iter().zip(request.ranks() as u32..) {
        let start = edges.len();
        let instances = request.placement.instances_of(expert).iter();
        let hosts = instances.map(|&instance| request.rank_of(instance));
        edges.extend(hosts.clone().map(|rank| Edge {
            tail,
            head: rank as u32,
            flow: 0,
            limit: u32::MAX,
            cost: 0,
        }));
        pour.level(demand[expert], hosts, load, |at, rows| {
            edges[start + at].flow = rows
        });
    }
    edges
}

/// Smallest L such that ranks with this room, filled to L at most, hold `rows`. None if they cannot.
fn level(rows: i64, room: impl Iterator<Item = i64>) -> Option<i64> {
    let mut room: Vec<i64> = room.collect();
    room.sort_unstable();
    let mut left = rows;
    for (i, &smallest) in room.iter().enumerate() {
        let ranks = (room.len() - i) as i64;
        if left <= smallest * ranks {
            return Some((left + ranks - 1) / ranks);
        }
        left -= smallest;
    }
    (left <= 0).then_some(0)
}
