//! One routing table's traffic, chunk by chunk.

use std::ops::Range;

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
    /// Tokens of the pairs of the latest chunk.
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

/// One chunk: how many rows per peer each way, and how received rows group by instance.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Which rows they are, in the order in which all rows go out.
    pub(super) rows: Range<usize>,
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
    pub(super) fn next_chunk(&mut self) -> Result<Option<Chunk>, Error> {
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
        let top_k = self.top_k as u32;
        tokens.clear();
        tokens.extend(gone[first..].iter().map(|pair| pair / top_k));
        Ok(Some(Chunk {
            rows: first..gone.len(),
            sent,
            received,
            grouping: Grouping::new(incoming.view(), 1)?,
        }))
    }

    /// Local ids of the pairs whose rows go out in a chunk that was begun.
    pub(super) fn pairs(&self, chunk: &Chunk) -> &[u32] {
        &self.lists.gone[chunk.rows.clone()]
    }

    /// Tokens of the pairs of the latest chunk.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.lists.tokens
    }
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
