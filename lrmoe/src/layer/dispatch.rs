//! One routing table's traffic, chunk by chunk.

use lrmoe_comm::{Collective, Element};
use lrmoe_compact::Grouping;
use lrmoe_route::RoutingTable;
use ndarray::Array2;

use crate::error::Error;

/// Lists of pairs that are kept from step to step.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// Local ids of the pairs to send, ascending.
    pub(super) chosen: Vec<u32>,
    /// The same by (destination rank, instance, pair id).
    order: Vec<u32>,
    /// Local ids of the pairs of all chunks so far, in the order in which they go out.
    pub(super) gone: Vec<u32>,
    /// Tokens of the pairs of the current chunk.
    tokens: Vec<u32>,
}

impl Lists {
    pub(super) fn bytes(&self) -> usize {
        let lists = [&self.chosen, &self.order, &self.gone, &self.tokens];
        lists.iter().map(|list| list.capacity()).sum::<usize>() * size_of::<u32>()
    }
}

/// What one rank sends and receives under a routing table.
#[derive(Debug)]
pub(super) struct Dispatch<'a> {
    table: &'a RoutingTable,
    rank: usize,
    top_k: usize,
    lists: &'a mut Lists,
    /// Where in the order the next row for each destination stands.
    next: Vec<usize>,
    chunk_rows: u64,
    round: usize,
    rounds: usize,
}

/// One chunk: which pairs go out, how many rows per peer each way, and how received rows group by instance.
#[derive(Debug)]
pub(super) struct Chunk<'a> {
    /// Rows that went out before.
    pub(super) first: usize,
    /// Local ids of the pairs whose rows go out.
    pub(super) pairs: &'a [u32],
    /// Their tokens.
    pub(super) tokens: &'a [u32],
    pub(super) grouping: Grouping,
    pub(super) sent: Vec<usize>,
    pub(super) received: Vec<usize>,
}

impl<'a> Dispatch<'a> {
    /// Of the pairs that `lists` has as chosen. Every rank gets the same number of chunks, at least `least`; some may be without rows.
    pub(super) fn new(
        table: &'a RoutingTable,
        rank: usize,
        (expert_ids, top_k): (&[i32], usize),
        lists: &'a mut Lists,
        chunk_rows: u64,
        least: usize,
    ) -> Result<Self, Error> {
        table.deal_into(rank, expert_ids, &lists.chosen, &mut lists.order)?;
        lists.gone.clear();
        let placement = table.placement();
        let mut next = vec![0; placement.ranks()];
        let mut start = 0;
        for (destination, next) in next.iter_mut().enumerate() {
            *next = start;
            start += placement
                .on_rank(destination)
                .map(|i| table.counts()[[rank, i]] as usize)
                .sum::<usize>();
        }
        Ok(Self {
            rounds: table.rounds(chunk_rows).max(least),
            table,
            rank,
            top_k,
            lists,
            next,
            chunk_rows,
            round: 0,
        })
    }

    /// Rows that this rank sends in all chunks.
    pub(super) fn rows(&self) -> usize {
        self.lists.order.len()
    }

    /// Local ids of the pairs of all chunks, in the order in which they go out.
    pub(super) fn order(&self) -> &[u32] {
        &self.lists.order
    }

    /// Number of chunks.
    pub(super) fn rounds(&self) -> usize {
        self.rounds
    }

    /// The next chunk, or `None` when all rows of all ranks have travelled.
    pub(super) fn next_chunk(&mut self) -> Result<Option<Chunk<'_>>, Error> {
        if self.round == self.rounds {
            return Ok(None);
        }
        let first = self.lists.gone.len();
        let mut sent = Vec::with_capacity(self.next.len());
        let mut incoming = None;
        for (destination, next) in self.next.iter_mut().enumerate() {
            let counts = self.table.chunk(destination, self.round, self.chunk_rows);
            let rows = counts
                .row(self.rank)
                .iter()
                .map(|n| *n as usize)
                .sum::<usize>();
            let pairs = &self.lists.order[*next..*next + rows];
            self.lists.gone.extend_from_slice(pairs);
            sent.push(rows);
            *next += rows;
            if destination == self.rank {
                incoming = Some(counts);
            }
        }
        let incoming = incoming.expect("this rank is one of the destinations");
        let received = incoming
            .rows()
            .into_iter()
            .map(|row| row.iter().map(|n| *n as usize).sum())
            .collect();
        self.round += 1;
        let Lists { gone, tokens, .. } = &mut *self.lists;
        let (pairs, top_k) = (&gone[first..], self.top_k as u32);
        tokens.clear();
        tokens.extend(pairs.iter().map(|pair| pair / top_k));
        Ok(Some(Chunk {
            first,
            pairs,
            tokens,
            sent,
            received,
            grouping: Grouping::new(incoming.view(), 1)?,
        }))
    }
}

impl Chunk<'_> {
    /// Sends rows of `width` values to their instances' ranks.
    pub(super) fn dispatch<C: Collective, T: Element + Default>(
        &self,
        comm: &mut C,
        rows: &[T],
        width: usize,
        received: &mut Vec<T>,
    ) -> Result<(), Error> {
        received.resize(width * self.received_rows(), T::default());
        exchange(comm, (&self.sent, rows), (&self.received, received), width)
    }

    /// Sends rows of `width` values back to where they came from.
    pub(super) fn give_back<C: Collective, T: Element + Default>(
        &self,
        comm: &mut C,
        rows: &[T],
        width: usize,
        received: &mut Vec<T>,
    ) -> Result<(), Error> {
        received.resize(width * self.pairs.len(), T::default());
        exchange(comm, (&self.received, rows), (&self.sent, received), width)
    }

    pub(super) fn received_rows(&self) -> usize {
        self.received.iter().sum()
    }
}

/// All-to-all of rows of `width` values, counted in rows by peer.
pub(super) fn exchange<C: Collective, T: Element>(
    comm: &mut C,
    (sent, rows): (&[usize], &[T]),
    (received, into): (&[usize], &mut [T]),
    width: usize,
) -> Result<(), Error> {
    let elements = |rows: &[usize]| rows.iter().map(|n| n * width).collect::<Vec<usize>>();
    Ok(comm.all_to_all(rows, &elements(sent), into, &elements(received))?)
}

/// Rows from rank to rank under a table, `[ranks, ranks]`.
pub(crate) fn rows_between_ranks(table: &RoutingTable) -> Array2<u64> {
    let (placement, counts) = (table.placement(), table.counts());
    let ranks = placement.ranks();
    Array2::from_shape_fn((ranks, ranks), |(source, destination)| {
        placement
            .on_rank(destination)
            .map(|instance| u64::from(counts[[source, instance]]))
            .sum()
    })
}

/// Rows that leave `rank` going out plus rows that leave it coming back.
pub(super) fn rows_leaving(rows: &Array2<u64>, rank: usize) -> (u64, u64) {
    let out = rows.row(rank).sum() - rows[[rank, rank]];
    let back = rows.column(rank).sum() - rows[[rank, rank]];
    (out, back)
}
