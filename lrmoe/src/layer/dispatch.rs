//! One routing table's traffic, chunk by chunk.

use lrmoe_comm::{Collective, Element};
use lrmoe_compact::Grouping;
use lrmoe_route::RoutingTable;
use ndarray::Array2;

use super::buffer::Buffer;
use crate::error::Error;

/// What one rank sends and receives under a routing table.
#[derive(Debug)]
pub(super) struct Dispatch<'a> {
    table: &'a RoutingTable,
    rank: usize,
    /// Local pair ids by (destination rank, instance, pair id).
    order: Vec<u32>,
    /// Where in `order` the next row for each destination stands.
    next: Vec<usize>,
    chunk_rows: u64,
    round: usize,
}

/// One chunk: which pairs go out, how many rows per peer each way, and how received rows group by instance.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) pairs: Vec<u32>,
    pub(super) grouping: Grouping,
    sent: Vec<usize>,
    received: Vec<usize>,
}

impl<'a> Dispatch<'a> {
    /// `pairs`: the local pairs to send, ascending.
    pub(super) fn new(
        table: &'a RoutingTable,
        rank: usize,
        expert_ids: &[i32],
        pairs: &[u32],
        chunk_rows: u64,
    ) -> Result<Self, Error> {
        let order = table.deal(rank, expert_ids, pairs)?;
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
            table,
            rank,
            order,
            next,
            chunk_rows,
            round: 0,
        })
    }

    /// The next chunk, or `None` when all rows of all ranks have travelled. Every rank gets the same number of chunks.
    pub(super) fn next_chunk(&mut self) -> Result<Option<Chunk>, Error> {
        if self.round == self.table.rounds(self.chunk_rows) {
            return Ok(None);
        }
        self.chunk().map(Some)
    }

    /// Everything at once; empty where no rank has a row.
    pub(super) fn single_chunk(
        table: &'a RoutingTable,
        rank: usize,
        expert_ids: &[i32],
        pairs: &[u32],
    ) -> Result<Chunk, Error> {
        Self::new(table, rank, expert_ids, pairs, u64::MAX)?.chunk()
    }

    fn chunk(&mut self) -> Result<Chunk, Error> {
        let mut pairs = Vec::new();
        let mut sent = Vec::with_capacity(self.next.len());
        let mut incoming = None;
        for (destination, next) in self.next.iter_mut().enumerate() {
            let counts = self.table.chunk(destination, self.round, self.chunk_rows);
            let rows = counts
                .row(self.rank)
                .iter()
                .map(|n| *n as usize)
                .sum::<usize>();
            pairs.extend_from_slice(&self.order[*next..*next + rows]);
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
        Ok(Chunk {
            pairs,
            sent,
            received,
            grouping: Grouping::new(incoming.view(), 1)?,
        })
    }
}

impl Chunk {
    /// Sends rows of `width` values to their instances' ranks.
    pub(super) fn dispatch<C: Collective, T: Element + Default>(
        &self,
        comm: &mut C,
        rows: &[T],
        width: usize,
        received: &mut Buffer<T>,
    ) -> Result<(), Error> {
        exchange(comm, rows, width, &self.sent, &self.received, received)
    }

    /// Sends rows of `width` values back to where they came from.
    pub(super) fn give_back<C: Collective, T: Element + Default>(
        &self,
        comm: &mut C,
        rows: &[T],
        width: usize,
        received: &mut Buffer<T>,
    ) -> Result<(), Error> {
        exchange(comm, rows, width, &self.received, &self.sent, received)
    }

    pub(super) fn received_rows(&self) -> usize {
        self.received.iter().sum()
    }
}

fn exchange<C: Collective, T: Element + Default>(
    comm: &mut C,
    rows: &[T],
    width: usize,
    sent: &[usize],
    received: &[usize],
    into: &mut Buffer<T>,
) -> Result<(), Error> {
    let elements = |rows: &[usize]| rows.iter().map(|n| n * width).collect::<Vec<usize>>();
    let (sent, received) = (elements(sent), elements(received));
    Ok(comm.all_to_all(rows, &sent, into.take(received.iter().sum()), &received)?)
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
