//! Ways of rows and numbers between the rank of their token and the rank of their expert.

use lrmoe_comm::Collective;
use lrmoe_kernels::RowIndex;

use super::Backend;
use super::dispatch::Chunk;
use super::element::LayerElement;
use super::pass::{Pass, on_host};
use super::stats::Stage;
use crate::error::Error;

/// Which way rows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To their experts.
    Out,
    /// To where they came from.
    Back,
}

impl Way {
    /// Rows of the chunk to each peer, and from each.
    fn counts(self, chunk: &Chunk) -> [&[usize]; 2] {
        match self {
            Self::Out => [&chunk.sent, &chunk.received],
            Self::Back => [&chunk.received, &chunk.sent],
        }
    }
}

/// One all-to-all, ready to go. It holds its buffers, so that they stay as they are while it is under way.
#[derive(Debug)]
pub(super) struct Journey<'a, T> {
    send: &'a [T],
    recv: &'a mut [T],
    /// Elements to each peer, and from each.
    counts: [Vec<usize>; 2],
}

impl<T: lrmoe_comm::Element> Journey<'_, T> {
    pub(super) fn run<C: Collective>(self, comm: &mut C) -> Result<(), lrmoe_comm::Error> {
        let [sent, received] = &self.counts;
        comm.all_to_all(self.send, sent, self.recv, received)
    }
}

fn elements(counts: [&[usize]; 2], width: usize) -> [Vec<usize>; 2] {
    counts.map(|rows| rows.iter().map(|rows| rows * width).collect())
}

/// Rows of one chunk on their way. Where there is one rank they only change their order, and nothing is held here.
#[derive(Debug)]
pub(super) struct Leg<B: Backend<T>, T: LayerElement> {
    /// In the order of the pairs, at the rank of their tokens.
    pub(super) near: B::Buffer<T>,
    /// In the order of (source, instance, pair id), at the rank of their experts.
    pub(super) far: B::Buffer<T>,
    /// What goes out and comes in, where the communicator cannot reach the backend's memory.
    pub(super) copies: [Vec<T>; 2],
}

impl<B: Backend<T>, T: LayerElement> Default for Leg<B, T> {
    fn default() -> Self {
        Self {
            near: Default::default(),
            far: Default::default(),
            copies: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> Leg<B, T> {
    /// Takes the rows at `index`, those of a chunk's tokens, to go out.
    pub(super) fn pack<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (rows, width): (&B::Buffer<T>, usize),
        index: &RowIndex<B>,
    ) -> Result<(), Error> {
        pass.backend.gather(rows, width, index, &mut self.near)?;
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Groups what has come by instance.
    pub(super) fn unpack<C: Collective>(
        &self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
        width: usize,
        grouped: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let grouping = pass.backend.grouping(&chunk.grouping)?;
        pass.backend.group(&grouping, &self.far, width, grouped)?;
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Takes grouped rows to go back.
    pub(super) fn pack_back<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
        (grouped, width): (&B::Buffer<T>, usize),
    ) -> Result<(), Error> {
        let grouping = pass.backend.grouping(&chunk.grouping)?;
        let far = &mut self.far;
        pass.backend.ungroup(&grouping, grouped, width, far)?;
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// The exchange of what is packed.
    pub(super) fn journey(
        &mut self,
        backend: &B,
        chunk: &Chunk,
        way: Way,
        width: usize,
    ) -> Result<Journey<'_, T>, Error> {
        let Self { near, far, copies } = self;
        let (from, to) = match way {
            Way::Out => (near, far),
            Way::Back => (far, near),
        };
        let counts = elements(way.counts(chunk), width);
        let len = counts[1].iter().sum();
        let [outgoing, incoming] = copies;
        let send = on_host(backend, from, outgoing)?;
        backend.resize(to, len)?;
        let recv = match B::host_mut(to) {
            Some(values) => values,
            None => {
                incoming.resize(len, T::default());
                incoming
            }
        };
        Ok(Journey { send, recv, counts })
    }

    /// Ends a journey: what came is in the backend's memory.
    pub(super) fn arrive<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        way: Way,
    ) -> Result<(), Error> {
        let Self { near, far, copies } = self;
        let to = match way {
            Way::Out => far,
            Way::Back => near,
        };
        if B::host(to).is_none() {
            pass.backend.write(&copies[1], to)?;
        }
        pass.lap(Stage::Exchange);
        Ok(())
    }

    /// Rows of the chunk's tokens (`index`) to their experts' ranks, grouped by instance.
    pub(super) fn bring<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
        rows: (&B::Buffer<T>, usize),
        index: &RowIndex<B>,
        grouped: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        if pass.is_alone() {
            // The order in which pairs go out is then that of the groups.
            pass.backend.gather(rows.0, rows.1, index, grouped)?;
            pass.lap(Stage::Compact);
            return Ok(());
        }
        self.pack(pass, rows, index)?;
        self.travel(pass, chunk, Way::Out, rows.1)?;
        self.unpack(pass, chunk, rows.1, grouped)
    }

    /// Grouped rows back to where they came from, in the order of the chunk's pairs.
    pub(super) fn give_back<'a, C: Collective>(
        &'a mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
        rows: (&'a B::Buffer<T>, usize),
    ) -> Result<&'a B::Buffer<T>, Error> {
        if pass.is_alone() {
            return Ok(rows.0);
        }
        self.pack_back(pass, chunk, rows)?;
        self.travel(pass, chunk, Way::Back, rows.1)?;
        Ok(&self.near)
    }

    fn travel<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk,
        way: Way,
        width: usize,
    ) -> Result<(), Error> {
        let journey = self.journey(pass.backend, chunk, way, width)?;
        journey.run(pass.comm)?;
        self.arrive(pass, way)
    }
}

/// Numbers of a chunk's rows on their way between hosts.
#[derive(Debug, Default)]
pub(super) struct Numbers<T> {
    pub(super) outgoing: Vec<T>,
    pub(super) incoming: Vec<T>,
}

impl<T: lrmoe_comm::Element + Default> Numbers<T> {
    /// The exchange of `width` numbers a row.
    pub(super) fn journey(&mut self, chunk: &Chunk, way: Way, width: usize) -> Journey<'_, T> {
        let counts = elements(way.counts(chunk), width);
        self.incoming.resize(counts[1].iter().sum(), T::default());
        Journey {
            send: &self.outgoing,
            recv: &mut self.incoming,
            counts,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        (self.outgoing.capacity() + self.incoming.capacity()) * size_of::<T>()
    }
}
