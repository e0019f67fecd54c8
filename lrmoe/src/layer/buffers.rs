//! Memory of the rows of a pass, and their ways between ranks.

use lrmoe_kernels::{Element, Memory, PairRows, PreActivationBuffers, RowIndex};
use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::Backend;
use super::dispatch::Chunk;
use super::element::LayerElement;
use super::pass::on_host;
use super::traffic::{Leg, Numbers};
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
    /// dp and norms that have come back.
    pub(super) back_dp: B::Buffer<f32>,
    pub(super) back_norms: B::Buffer<SquaredNorm>,
    /// Of all chunks, in the order in which the pairs go out: norms forward, dx and dp backward.
    pub(super) all_norms: B::Buffer<SquaredNorm>,
    pub(super) all_dx: B::Buffer<T>,
    pub(super) all_dp: B::Buffer<f32>,
    /// Of all tokens: what y is rounded from, where it is not f32 itself and there are several chunks.
    pub(super) sums: B::Buffer<f32>,
    /// Squared norms of dy and x of each token, and scores of all pairs.
    pub(super) dy_norms: B::Buffer<SquaredNorm>,
    pub(super) x_norms: B::Buffer<SquaredNorm>,
    pub(super) scores: Option<B::Scores>,
    /// Tokens of the rows, and the pairs they are of.
    pub(super) index: RowIndex<B>,
    pub(super) pairs: PairRows<B>,
    /// Ways of x, of dy and back. The last two are for chunks that go while another is computed with; else all go the first way.
    pub(super) legs: [Leg<B, T>; 3],
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
            back_dp: Default::default(),
            back_norms: Default::default(),
            all_norms: Default::default(),
            all_dx: Default::default(),
            all_dp: Default::default(),
            sums: Default::default(),
            dy_norms: Default::default(),
            x_norms: Default::default(),
            scores: None,
            index: RowIndex::default(),
            pairs: PairRows::default(),
            legs: Default::default(),
            host: Host::default(),
            scratch: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    pub(super) fn bytes(&self) -> usize {
        let PreActivationBuffers { gate, up } = &self.pre_activations;
        let rows = [&self.x, &self.dy, &self.out, &self.all_dx, gate, up];
        let legs = self.legs.iter();
        let under_way = legs.map(|Leg { near, far, copies }| {
            let copies = copies.iter().map(Vec::capacity).sum::<usize>();
            bytes::<B, T>(near) + bytes::<B, T>(far) + copies * size_of::<T>()
        });
        let floats = [
            &self.gate_weights,
            &self.weights,
            &self.dp,
            &self.back_dp,
            &self.all_dp,
            &self.sums,
        ];
        let norms = [
            &self.norms,
            &self.back_norms,
            &self.all_norms,
            &self.dy_norms,
            &self.x_norms,
        ];
        let held = [
            rows.map(bytes::<B, T>).iter().sum(),
            floats.map(bytes::<B, f32>).iter().sum(),
            norms.map(bytes::<B, SquaredNorm>).iter().sum(),
            under_way.sum(),
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
    chunk: &Chunk,
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

/// Numbers of rows on the host.
#[derive(Debug)]
pub(super) struct Host<T> {
    /// p and w of rows that are computed with, and numbers between host and device.
    pub(super) scalars: [Vec<f32>; 2],
    pub(super) norms: [Vec<SquaredNorm>; 2],
    /// On their way: p and w of each row out; dp, or the two words of |h|^2, back.
    pub(super) row_weights: Numbers<f32>,
    pub(super) dp: Numbers<f32>,
    pub(super) norm_words: Numbers<u32>,
    /// Rows that the host has to see though they are on a device.
    pub(super) rows: Vec<T>,
    /// Selection weight of each pair of the rank, 0 where it does not run backward.
    pub(super) weights: Vec<f32>,
}

impl<T> Default for Host<T> {
    fn default() -> Self {
        Self {
            scalars: Default::default(),
            norms: Default::default(),
            row_weights: Numbers::default(),
            dp: Numbers::default(),
            norm_words: Numbers::default(),
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
            + self.row_weights.bytes()
            + self.dp.bytes()
            + self.norm_words.bytes()
            + self.norms.iter().map(Vec::capacity).sum::<usize>() * size_of::<SquaredNorm>()
    }
}
