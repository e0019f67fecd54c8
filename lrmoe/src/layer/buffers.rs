//! Memory of the rows of a pass, and their ways between ranks.

use lrmoe_comm::Collective;
use lrmoe_kernels::{Element, Memory, PairRows, PreActivationBuffers, RowIndex};
use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::Backend;
use super::dispatch::{Chunk, exchange};
use super::element::LayerElement;
use super::pass::{Pass, from_host, on_host};
use super::stats::Stage;
use crate::error::Error;

/// Buffers that are kept from step to step. Rows are those of one chunk unless said otherwise.
#[derive(Debug)]
pub(super) struct Buffers<B: Backend<T>, T: LayerElement> {
    /// Rows grouped by instance: inputs, gradients of outputs, and what the experts put out.
    pub(super) x: B::Buffer<T>,
    pub(super) dy: B::Buffer<T>,
    pub(super) out: B::Buffer<T>,
    /// Where they stay at their instances, or come from there.
    pub(super) pre_activations: PreActivationBuffers<B, T>,
    /// What the backward pass knows of grouped rows, and what it finds: p, w, dp.
    pub(super) gate_weights: B::Buffer<f32>,
    pub(super) weights: B::Buffer<f32>,
    pub(super) dp: B::Buffer<f32>,
    pub(super) norms: B::Buffer<SquaredNorm>,
    /// Of all chunks, in the order in which the pairs go out: norms forward, dx and dp backward.
    pub(super) all_norms: B::Buffer<SquaredNorm>,
    pub(super) all_dx: B::Buffer<T>,
    pub(super) all_dp: B::Buffer<f32>,
    /// Of all tokens: what y is rounded from, where it is not f32 itself and there are several chunks.
    pub(super) sums: B::Buffer<f32>,
    /// Squared norm of dy of each token, and scores of all pairs.
    pub(super) dy_norms: B::Buffer<SquaredNorm>,
    pub(super) scores: Option<B::Scores>,
    /// Tokens of the rows, and the pairs they are of.
    pub(super) index: RowIndex<B>,
    pub(super) pairs: PairRows<B>,
    pub(super) traffic: Traffic<B, T>,
    pub(super) host: Host<T>,
    pub(super) scratch: B::Scratch,
}

impl<B: Backend<T>, T: LayerElement> Default for Buffers<B, T> {
    fn default() -> Self {
        Self {
            x: Default::default(),
            dy: Default::default(),
            out: Default::default(),
            pre_activations: PreActivationBuffers::default(),
            gate_weights: Default::default(),
            weights: Default::default(),
            dp: Default::default(),
            norms: Default::default(),
            all_norms: Default::default(),
            all_dx: Default::default(),
            all_dp: Default::default(),
            sums: Default::default(),
            dy_norms: Default::default(),
            scores: None,
            index: RowIndex::default(),
            pairs: PairRows::default(),
            traffic: Traffic::default(),
            host: Host::default(),
            scratch: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    pub(super) fn bytes(&self) -> usize {
        let Traffic { near, far, copies } = &self.traffic;
        let PreActivationBuffers { gate, up } = &self.pre_activations;
        let rows = [
            &self.x,
            &self.dy,
            &self.out,
            &self.all_dx,
            near,
            far,
            gate,
            up,
        ];
        let floats = [
            &self.gate_weights,
            &self.weights,
            &self.dp,
            &self.all_dp,
            &self.sums,
        ];
        let norms = [&self.norms, &self.all_norms, &self.dy_norms];
        let held = [
            rows.map(bytes::<B, T>).iter().sum(),
            floats.map(bytes::<B, f32>).iter().sum(),
            norms.map(bytes::<B, SquaredNorm>).iter().sum(),
            copies.iter().map(Vec::capacity).sum::<usize>() * size_of::<T>(),
        ];
        held.iter().sum::<usize>() + self.host.bytes() + B::scratch_bytes(&self.scratch)
    }
}

/// Values as rows of `width`.
pub(super) fn columns<T>(values: &[T], width: usize) -> ArrayView2<'_, T> {
    let shape = (values.len() / width, width);
    ArrayView2::from_shape(shape, values).expect("whole rows")
}

/// Values as rows of `width`, to write to.
pub(super) fn columns_mut<T>(values: &mut [T], width: usize) -> ArrayViewMut2<'_, T> {
    let shape = (values.len() / width, width);
    ArrayViewMut2::from_shape(shape, values).expect("whole rows")
}

/// Makes `received` the values of grouped rows, one each, in the order in which the rows were received.
pub(super) fn ungroup<B: Memory, T: Element>(
    backend: &B,
    chunk: &Chunk<'_>,
    grouped: &B::Buffer<T>,
    [copy, received]: [&mut Vec<T>; 2],
) -> Result<(), Error> {
    let grouped = on_host(backend, grouped, copy)?;
    received.resize(grouped.len(), T::default());
    let (grouped, received) = (columns(grouped, 1), columns_mut(received, 1));
    Ok(chunk.grouping.ungroup(grouped, received)?)
}

/// Bytes of a buffer's elements.
pub(super) fn bytes<B: Memory, T: Element>(buffer: &B::Buffer<T>) -> usize {
    B::len(buffer) * size_of::<T>()
}

/// Numbers of rows on their way from host to host or to a device.
#[derive(Debug)]
pub(super) struct Host<T> {
    pub(super) scalars: [Vec<f32>; 4],
    pub(super) words: [Vec<u32>; 2],
    pub(super) norms: [Vec<SquaredNorm>; 2],
    /// Rows that the host has to see though they are on a device.
    pub(super) rows: Vec<T>,
    /// Selection weight of each pair of the rank, 0 where it does not run backward.
    pub(super) weights: Vec<f32>,
}

impl<T> Default for Host<T> {
    fn default() -> Self {
        Self {
            scalars: Default::default(),
            words: Default::default(),
            norms: Default::default(),
            rows: Vec::new(),
            weights: Vec::new(),
        }
    }
}

impl<T> Host<T> {
    fn bytes(&self) -> usize {
        let floats = self.scalars.iter().chain([&self.weights]);
        floats.map(Vec::capacity).sum::<usize>() * size_of::<f32>()
            + self.rows.capacity() * size_of::<T>()
            + self.words.iter().map(Vec::capacity).sum::<usize>() * size_of::<u32>()
            + self.norms.iter().map(Vec::capacity).sum::<usize>() * size_of::<SquaredNorm>()
    }
}

/// Rows on their way between the rank of their token and the rank of their expert. Where there is one rank they only change their order.
#[derive(Debug)]
pub(super) struct Traffic<B: Backend<T>, T: LayerElement> {
    /// In the order of the pairs, at the rank of their tokens.
    near: B::Buffer<T>,
    /// In the order of (source, instance, pair id), at the rank of their experts.
    far: B::Buffer<T>,
    /// What goes out and comes in, where the communicator cannot reach the backend's memory.
    copies: [Vec<T>; 2],
}

impl<B: Backend<T>, T: LayerElement> Default for Traffic<B, T> {
    fn default() -> Self {
        Self {
            near: Default::default(),
            far: Default::default(),
            copies: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> Traffic<B, T> {
    /// Rows of the chunk's tokens (`index`) to their experts' ranks, grouped by instance.
    pub(super) fn dispatch<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
        (rows, width): (&B::Buffer<T>, usize),
        index: &RowIndex<B>,
        grouped: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let backend = pass.backend;
        if pass.is_alone() {
            // The order in which pairs go out is then that of the groups.
            backend.gather(rows, width, index, grouped)?;
            pass.lap(Stage::Compact);
            return Ok(());
        }
        backend.gather(rows, width, index, &mut self.near)?;
        pass.lap(Stage::Compact);
        let Self { near, far, copies } = self;
        let ways = [&chunk.sent, &chunk.received];
        send(pass, near, far, copies, ways, width)?;
        pass.lap(Stage::Exchange);
        let grouping = backend.grouping(&chunk.grouping)?;
        backend.group(&grouping, &self.far, width, grouped)?;
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Grouped rows back to where they came from, in the order of the chunk's pairs.
    pub(super) fn give_back<'a, C: Collective>(
        &'a mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
        (grouped, width): (&'a B::Buffer<T>, usize),
    ) -> Result<&'a B::Buffer<T>, Error> {
        if pass.is_alone() {
            return Ok(grouped);
        }
        let grouping = pass.backend.grouping(&chunk.grouping)?;
        pass.backend
            .ungroup(&grouping, grouped, width, &mut self.far)?;
        pass.lap(Stage::Compact);
        let Self { near, far, copies } = self;
        let ways = [&chunk.received, &chunk.sent];
        send(pass, far, near, copies, ways, width)?;
        pass.lap(Stage::Exchange);
        Ok(near)
    }
}

/// All-to-all between buffers; `ways` counts rows to and from each peer.
fn send<B: Memory, C: Collective, T: LayerElement>(
    pass: &mut Pass<'_, B, C>,
    from: &B::Buffer<T>,
    to: &mut B::Buffer<T>,
    [outgoing, incoming]: &mut [Vec<T>; 2],
    [sent, received]: [&Vec<usize>; 2],
    width: usize,
) -> Result<(), Error> {
    let rows = on_host(pass.backend, from, outgoing)?;
    let len = received.iter().sum::<usize>() * width;
    from_host(pass.backend, to, len, incoming, |to| {
        exchange(pass.comm, (sent, rows), (received, to), width)
    })
}
