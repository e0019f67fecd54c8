use arbitrary::Arbitrary;
use lrmoe_compact::{Error, Grouping, ScatterAdd, gather};
use lrmoe_route::{Placement, RoutingTable, Topology};
use ndarray::{Array2, ArrayView2, Axis, concatenate, s};

use crate::hosts;

#[derive(Arbitrary, Debug)]
struct Input {
    experts: u8,
    top_k: u8,
    width: u8,
    /// Of each rank's tokens the expert of the first pair, from which the others follow; what is out of range is masked.
    tokens: [Vec<u8>; 3],
    hosts: Vec<u8>,
    multiple: u8,
    weighted: bool,
    seed: u32,
}

/// A rank's tokens.
struct Tokens {
    /// `[tokens * top_k]`, -1 = masked.
    ids: Vec<i32>,
    x: Array2<f32>,
    weights: Vec<f32>,
}

/// The way of rows through a layer: gathered in sending order, exchanged, grouped by instance, multiplied by a number of their expert, ungrouped, sent
/// back and added up, against a loop over tokens and slots, to the bit. In between the grouped rows and their padding against plain loops.
pub fn compact(data: &[u8]) {
    let Some(input) = crate::input::of::<Input>(data) else {
        return;
    };
    let experts = usize::from(input.experts % 6) + 1;
    let top_k = usize::from(input.top_k) % experts.min(3) + 1;
    let width = usize::from(input.width % 5);
    let ranks = input.tokens.len();
    let placement = hosts::placement(experts, ranks, &input.hosts);
    let mut state = input.seed;
    let ranks: Vec<Tokens> = input
        .tokens
        .iter()
        .map(|tokens| {
            Tokens::new(
                &tokens[..tokens.len().min(20)],
                experts,
                top_k,
                width,
                &mut state,
            )
        })
        .collect();
    let table = route(&ranks, &placement);
    // What each rank sends, in sending order: pairs and rows.
    let sent: Vec<(Vec<u32>, Array2<f32>)> = ranks
        .iter()
        .enumerate()
        .map(|(rank, tokens)| tokens.send(rank, &table, top_k))
        .collect();
    let Some(back) = compute(&table, &sent, input.multiple.into(), width) else {
        return;
    };
    for ((tokens, (pairs, _)), rows) in ranks.iter().zip(&sent).zip(&back) {
        tokens.check_sum(pairs, rows, input.weighted, top_k);
    }
}

/// The next of a sequence of numbers of many sizes, so that the order of a sum shows.
fn number(state: &mut u32) -> f32 {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    let mantissa = (*state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    mantissa * 2f32.powi((*state % 24) as i32 - 12)
}

/// What an expert multiplies rows by. A power of two changes no digits.
fn factor(expert: usize) -> f32 {
    2f32.powi(expert as i32 - 2)
}

fn bits(rows: ArrayView2<'_, f32>) -> Array2<u32> {
    rows.map(|value| value.to_bits())
}

impl Tokens {
    fn new(firsts: &[u8], experts: usize, top_k: usize, width: usize, state: &mut u32) -> Self {
        let ids = firsts.iter().flat_map(|&first| {
            let first = usize::from(first) % (experts + 1);
            let id = move |slot: usize| ((first + slot) % experts) as i32;
            (0..top_k).map(move |slot| if first == experts { -1 } else { id(slot) })
        });
        Self {
            ids: ids.collect(),
            x: Array2::from_shape_simple_fn((firsts.len(), width), || number(state)),
            weights: (0..firsts.len() * top_k).map(|_| number(state)).collect(),
        }
    }

    fn unmasked(&self) -> Vec<u32> {
        let pairs = (0..).zip(&self.ids).filter(|(_, id)| **id >= 0);
        pairs.map(|(pair, _)| pair).collect()
    }

    fn send(&self, rank: usize, table: &RoutingTable, top_k: usize) -> (Vec<u32>, Array2<f32>) {
        let order = table.deal(rank, &self.ids, &self.unmasked());
        let order = order.expect("the pairs that were routed");
        let index: Vec<u32> = order.iter().map(|pair| pair / top_k as u32).collect();
        let mut rows = Array2::from_elem((order.len(), self.x.ncols()), f32::NAN);
        gather(self.x.view(), &index, rows.view_mut()).expect("rows that exist");
        let expected = self.x.select(
            Axis(0),
            &index.iter().map(|&i| i as usize).collect::<Vec<_>>(),
        );
        assert_eq!(bits(rows.view()), bits(expected.view()), "gathered rows");
        (order, rows)
    }

    /// `rows` are those of `pairs`, multiplied by their experts; adds them to what is there and compares.
    fn check_sum(&self, pairs: &[u32], rows: &Array2<f32>, weighted: bool, top_k: usize) {
        let before = Array2::from_elem(self.x.dim(), 0.1);
        let mut expected = before.clone();
        for (pair, &id) in self.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let token = pair / top_k;
            for (sum, &x) in expected.row_mut(token).iter_mut().zip(self.x.row(token)) {
                let value = x * factor(id as usize);
                *sum += if weighted {
                    self.weights[pair] * value
                } else {
                    value
                };
            }
        }
        let weights: Vec<f32> = pairs
            .iter()
            .map(|pair| self.weights[*pair as usize])
            .collect();
        let weights = weighted.then_some(weights.as_slice());
        let mut sums = before.clone();
        let mut scatter = ScatterAdd::new();
        let added = scatter.add(rows.view(), pairs, weights, top_k, sums.view_mut());
        added.expect("distinct pairs of these tokens");
        assert_eq!(bits(sums.view()), bits(expected.view()), "sums of tokens");

        let Some(&pair) = pairs.first() else {
            return;
        };
        // A pair twice is refused and changes nothing.
        let twice = [pairs, &[pair]].concat();
        let rows = concatenate![Axis(0), *rows, rows.slice(s![..1, ..])];
        let mut unchanged = before.clone();
        let refused = scatter.add(rows.view(), &twice, None, top_k, unchanged.view_mut());
        let (first, second) = (0, pairs.len());
        assert_eq!(
            refused,
            Err(Error::DuplicatePair {
                pair,
                first,
                second
            })
        );
        assert_eq!(unchanged, before);
    }
}

fn route(ranks: &[Tokens], placement: &Placement) -> RoutingTable {
    let mut counts = Array2::<u32>::zeros((ranks.len(), placement.experts()));
    for (rank, tokens) in ranks.iter().enumerate() {
        for &id in tokens.ids.iter().filter(|id| **id >= 0) {
            counts[[rank, id as usize]] += 1;
        }
    }
    let topology = Topology::single_node(ranks.len()).expect("some ranks");
    lrmoe_route::route(counts.view(), placement, &topology, None).expect("room without bounds")
}

/// The rows of every rank, multiplied by their experts and in sending order again; none if the multiple is 0, which must be refused.
fn compute(
    table: &RoutingTable,
    sent: &[(Vec<u32>, Array2<f32>)],
    multiple: usize,
    width: usize,
) -> Option<Vec<Array2<f32>>> {
    let mut back: Vec<Array2<f32>> = sent.iter().map(|(_, rows)| rows.clone()).collect();
    let mut starts = vec![0; sent.len()];
    for rank in 0..sent.len() {
        let instances = table.placement().on_rank(rank);
        let counts = table.counts();
        let counts = counts.slice(s![.., instances.clone()]);
        // As the exchange brings them: source by source.
        let rows_of: Vec<usize> = counts
            .rows()
            .into_iter()
            .map(|row| row.sum() as usize)
            .collect();
        let parts: Vec<_> = (0..sent.len())
            .map(|source| {
                sent[source]
                    .1
                    .slice(s![starts[source]..starts[source] + rows_of[source], ..])
            })
            .collect();
        let received = concatenate(Axis(0), &parts).expect("rows of one width");
        let grouping = match Grouping::new(counts, multiple) {
            Ok(grouping) => grouping,
            Err(error) => {
                assert_eq!((error, multiple), (Error::ZeroMultiple, 0));
                return None;
            }
        };
        let (expected, offsets) = grouped(counts, received.view(), multiple);
        assert_eq!(grouping.offsets(), offsets);
        assert_eq!(grouping.received_rows(), received.nrows());
        let mut rows = Array2::from_elem((grouping.grouped_rows(), width), f32::NAN);
        grouping
            .group(received.view(), rows.view_mut())
            .expect("its shape");
        assert_eq!(bits(rows.view()), bits(expected.view()), "grouped rows");

        for (local, instance) in instances.enumerate() {
            let expert = table.placement().expert_of(instance);
            let mut group = rows.slice_mut(s![offsets[local]..offsets[local + 1], ..]);
            group.mapv_inplace(|value| value * factor(expert));
        }
        let mut returned = Array2::from_elem(received.dim(), f32::NAN);
        grouping
            .ungroup(rows.view(), returned.view_mut())
            .expect("its shape");
        let mut from = 0;
        for (source, &rows) in rows_of.iter().enumerate() {
            let part = returned.slice(s![from..from + rows, ..]);
            back[source]
                .slice_mut(s![starts[source]..starts[source] + rows, ..])
                .assign(&part);
            from += rows;
            starts[source] += rows;
        }
    }
    Some(back)
}

/// Rows by (instance, source), each group filled up with zeros, and where the groups start.
fn grouped(
    counts: ArrayView2<'_, u32>,
    received: ArrayView2<'_, f32>,
    multiple: usize,
) -> (Array2<f32>, Vec<usize>) {
    let mut rows: Vec<Vec<f32>> = Vec::new();
    let mut offsets = vec![0];
    for instance in 0..counts.ncols() {
        for source in 0..counts.nrows() {
            let before = |at: (usize, usize)| at < (source, instance);
            let first: u32 = counts
                .indexed_iter()
                .filter(|(at, _)| before(*at))
                .map(|(_, n)| n)
                .sum();
            for row in first..first + counts[[source, instance]] {
                rows.push(received.row(row as usize).to_vec());
            }
        }
        while !rows.len().is_multiple_of(multiple) {
            rows.push(vec![0.0; received.ncols()]);
        }
        offsets.push(rows.len());
    }
    let flat: Vec<f32> = rows.concat();
    let rows = Array2::from_shape_vec((rows.len(), received.ncols()), flat);
    (rows.expect("rows of one width"), offsets)
}
