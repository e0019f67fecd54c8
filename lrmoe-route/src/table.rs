use lrmoe_plan::{Placement, Topology};
use ndarray::{Array2, ArrayView2, Axis};

use crate::Error;
use crate::error::expect_pairs;

/// How many pairs each source rank sends to each instance, made by [`route`](crate::route()).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingTable {
    /// `[source ranks, instances]`; all pairs together fit in u32.
    counts: Array2<u32>,
    placement: Placement,
}

/// Pairs that run elsewhere than they start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossings {
    /// Pairs that run on another rank, on the same node or not.
    pub ranks: u64,
    /// Pairs that run on another node.
    pub nodes: u64,
}

impl RoutingTable {
    pub(crate) fn new(counts: Array2<u32>, placement: Placement) -> Self {
        Self { counts, placement }
    }

    /// Pairs from each source rank to each instance, `[source ranks, instances]`.
    pub fn counts(&self) -> ArrayView2<'_, u32> {
        self.counts.view()
    }

    /// The instances that pairs are routed to.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Rows that each rank receives from all ranks, itself included, `[ranks]`.
    pub fn rank_loads(&self) -> Vec<u64> {
        let ranks = 0..self.placement.ranks();
        ranks.map(|rank| self.rows_on(rank).sum().into()).collect()
    }

    /// Pairs that run elsewhere than they start. Nodes are those of `topology`.
    pub fn crossings(&self, topology: &Topology) -> Crossings {
        let mut crossings = Crossings::default();
        for rank in 0..self.placement.ranks() {
            for (source, row) in self.rows_on(rank).rows().into_iter().enumerate() {
                let rows = u64::from(row.sum());
                crossings.ranks += if source == rank { 0 } else { rows };
                let one_node = topology.node_of(source) == topology.node_of(rank);
                crossings.nodes += if one_node { 0 } else { rows };
            }
        }
        crossings
    }

    /// Puts the pairs of one source rank in sending order: by (destination rank, instance, pair id).
    ///
    /// `expert_ids` are the experts of all local pairs, `pairs` the ascending local ids of those to send. Of
    /// the pairs of an expert, in ascending order, its lowest instance gets the first, and so on.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`], [`Error::PairOutOfRange`], [`Error::PairOrder`], [`Error::ExpertOutOfRange`]
    /// (also for masked pairs), or [`Error::PairCount`] if the pairs are not as many, expert by expert, as were
    /// routed.
    pub fn deal(
        &self,
        source: usize,
        expert_ids: &[i32],
        pairs: &[u32],
    ) -> Result<Vec<u32>, Error> {
        let mut order = Vec::new();
        self.deal_into(source, expert_ids, pairs, &mut order)?;
        Ok(order)
    }

    /// As [`deal`](Self::deal), in the memory of an earlier order, which means nothing after an error.
    ///
    /// # Errors
    ///
    /// As for [`deal`](Self::deal).
    pub fn deal_into(
        &self,
        source: usize,
        expert_ids: &[i32],
        pairs: &[u32],
        order: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let (ranks, experts) = (self.placement.ranks(), self.placement.experts());
        if source >= ranks {
            return Err(Error::RankOutOfRange {
                rank: source,
                ranks,
            });
        }
        let row = self.counts.row(source);
        let mut given = vec![0; experts];
        for expert in experts_of(expert_ids, pairs, experts)? {
            given[expert?] += 1;
        }
        for (expert, &got) in given.iter().enumerate() {
            let instances = self.placement.instances_of(expert).iter();
            let expected = instances
                .map(|&instance| u64::from(row[instance as usize]))
                .sum();
            expect_pairs(source, expert, expected, got)?;
        }

        // Next place and end of each instance's run, and the instance whose turn it is for each expert.
        let mut place = Vec::with_capacity(row.len());
        let mut end = Vec::with_capacity(row.len());
        let mut sent = 0;
        for &n in row {
            place.push(sent);
            sent += n as usize;
            end.push(sent);
        }
        let mut turn = vec![0; experts];
        order.resize(pairs.len(), 0);
        for &pair in pairs {
            let expert = expert_ids[pair as usize] as usize;
            let instances = self.placement.instances_of(expert);
            let turn = &mut turn[expert];
            while place[instances[*turn] as usize] == end[instances[*turn] as usize] {
                *turn += 1;
            }
            let place = &mut place[instances[*turn] as usize];
            order[*place] = pair;
            *place += 1;
        }
        Ok(())
    }

    /// Rounds in which every rank receives all its rows, at most `chunk_rows` a round; the same number on every rank.
    /// A chunk of no rows counts as one row.
    pub fn rounds(&self, chunk_rows: u64) -> usize {
        let most = self.rank_loads().into_iter().max().unwrap_or(0);
        most.div_ceil(chunk_rows.max(1)) as usize
    }

    /// Rows that `destination` receives in one round, `[source ranks, local instances]`.
    ///
    /// The rows of a destination are numbered by (instance, source, pair id), and a round takes the next
    /// `chunk_rows` of them (0 counts as 1), so what one source sends in a round is a run of its sending order.
    /// Later rounds are empty.
    ///
    /// # Panics
    ///
    /// If `destination` does not exist.
    pub fn chunk(&self, destination: usize, round: usize, chunk_rows: u64) -> Array2<u32> {
        let chunk_rows = chunk_rows.max(1);
        let start = chunk_rows.saturating_mul(round as u64);
        let end = start.saturating_add(chunk_rows);
        let received = self.rows_on(destination);
        let mut chunk = Array2::zeros(received.raw_dim());
        let mut first = 0;
        for (received, mut chunk) in received.columns().into_iter().zip(chunk.columns_mut()) {
            for (&rows, rows_now) in received.iter().zip(&mut chunk) {
                let last = first + u64::from(rows);
                *rows_now = last.min(end).saturating_sub(first.max(start)) as u32;
                first = last;
            }
        }
        chunk
    }

    /// Pairs from each source to each instance on `rank`, `[source ranks, local instances]`.
    pub(crate) fn rows_on(&self, rank: usize) -> ArrayView2<'_, u32> {
        self.counts
            .slice_axis(Axis(1), self.placement.on_rank(rank).into())
    }
}

/// The expert of each of `pairs`, which must ascend.
pub(crate) fn experts_of(
    expert_ids: &[i32],
    pairs: &[u32],
    experts: usize,
) -> Result<impl Iterator<Item = Result<usize, Error>>, Error> {
    if let Some(pair) = pairs.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(Error::PairOrder {
            pair: pair[1],
            before: pair[0],
        });
    }
    let expert_of = move |&pair: &u32| {
        let Some(&expert) = expert_ids.get(pair as usize) else {
            return Err(Error::PairOutOfRange {
                pair,
                pairs: expert_ids.len(),
            });
        };
        match usize::try_from(expert) {
            Ok(id) if id < experts => Ok(id),
            _ => Err(Error::ExpertOutOfRange {
                pair,
                expert,
                experts,
            }),
        }
    };
    Ok(pairs.iter().map(expert_of))
}
