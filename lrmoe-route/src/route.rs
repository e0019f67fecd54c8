use std::ops::Range;

use lrmoe_plan::{Placement, Topology};
use ndarray::{Array2, ArrayView2};

use crate::error::expect;
use crate::nodes::Nodes;
use crate::request::Request;
use crate::{Error, RoutingTable, balance, crossings};

/// Routes pairs to instances: the smallest possible largest rank load, then the fewest node crossings, then the
/// fewest rank crossings, then a fixed order.
///
/// `counts` are the pairs of each source rank for each expert, `[source ranks, experts]`, in standard layout;
/// `capacities` the rows that each rank can hold, `[ranks]`, unlimited if not given. The same inputs give the same
/// table on every rank.
///
/// # Errors
///
/// [`Error::NoRoom`] if the capacities are too small ([`shrink`](crate::shrink()) says what to leave out),
/// [`Error::Mismatch`] if the inputs differ in ranks or experts, [`Error::Layout`], or [`Error::TooManyPairs`].
pub fn route(
    counts: ArrayView2<'_, u32>,
    placement: &Placement,
    topology: &Topology,
    capacities: Option<&[u64]>,
) -> Result<RoutingTable, Error> {
    let request = Request::new(counts, placement, capacities)?;
    expect("ranks of the topology", placement.ranks(), topology.ranks())?;
    let bounds = balance::bounds(&request, &request.per_expert, &request.room)
        .map_err(|stuck| no_room(&request, &stuck.0))?;
    let nodes = Nodes::new(topology);
    let rows = crossings::fewest(&request, &nodes, &bounds);
    let counts = pair_up(&request, &nodes, rows);
    Ok(RoutingTable::new(counts, placement.clone()))
}

/// The experts that live only on ranks that are stuck, and what is missing there.
fn no_room(request: &Request<'_>, stuck: &[bool]) -> Error {
    let experts = 0..request.placement.experts();
    let experts: Vec<u32> = experts
        .filter(|&expert| {
            let mut instances = request.placement.instances_of(expert).iter();
            request.per_expert[expert] > 0
                && instances.all(|&instance| stuck[request.rank_of(instance)])
        })
        .map(|expert| expert as u32)
        .collect();
    let ranks: Vec<u32> = (0..)
        .zip(stuck)
        .filter(|(_, stuck)| **stuck)
        .map(|(rank, _)| rank)
        .collect();
    let pairs = experts
        .iter()
        .map(|&expert| u64::from(request.per_expert[expert as usize]))
        .sum();
    let room = ranks
        .iter()
        .map(|&rank| request.room[rank as usize] as u64)
        .sum();
    Error::NoRoom {
        experts,
        ranks,
        pairs,
        room,
        shortfall: pairs - room,
    }
}

/// Counts per (source rank, instance) from the rows of each instance: as many pairs as possible stay on their rank,
/// then on their node; the rest are paired up in ascending order of source and instance.
fn pair_up(request: &Request<'_>, nodes: &Nodes, rows: Vec<u32>) -> Array2<u32> {
    let (placement, ranks) = (request.placement, request.ranks());
    let mut counts = Array2::zeros((ranks, placement.instances()));
    let mut left = vec![0; ranks];
    let mut open = rows;
    for expert in 0..placement.experts() {
        let instances = placement.instances_of(expert);
        for (source, left) in left.iter_mut().enumerate() {
            *left = request.count(source, expert);
        }
        if let &[only] = instances {
            for (source, &left) in left.iter().enumerate() {
                counts[[source, only as usize]] = left;
            }
            continue;
        }
        let mut send = |sources: Range<usize>, instances: &[u32]| {
            let mut sources = sources.peekable();
            let mut instances = instances
                .iter()
                .map(|&instance| instance as usize)
                .peekable();
            while let (Some(&source), Some(&instance)) = (sources.peek(), instances.peek()) {
                let pairs = left[source].min(open[instance]);
                counts[[source, instance]] += pairs;
                left[source] -= pairs;
                open[instance] -= pairs;
                if left[source] == 0 {
                    sources.next();
                } else {
                    instances.next();
                }
            }
        };
        for &instance in instances {
            let rank = request.rank_of(instance);
            send(rank..rank + 1, &[instance]);
        }
        let node_of = |instance: u32| nodes.of(request.rank_of(instance));
        for group in instances.chunk_by(|&a, &b| node_of(a) == node_of(b)) {
            send(nodes.ranks(node_of(group[0])), group);
        }
        send(0..ranks, instances);
    }
    counts
}
