//! Expert weights where they run, and the optimizer's copy divided evenly over the ranks.
//!
//! All experts' parameters form one vector: matrix by matrix (gate, up, down), expert by expert, so that every (matrix, expert) is a
//! contiguous block of `hidden * width` numbers. Rank `r` of `R` owns elements `n * r / R .. n * (r + 1) / R` of the vector: their master
//! weights and moments. Gradients travel from the instances to the owners, new weights from the owners to the next instances.

use std::collections::HashMap;
use std::ops::Range;

use lrmoe_comm::Collective;
use lrmoe_kernels::{Element, ExpertBuffers, FfnShape, Memory};
use lrmoe_plan::Placement;

use super::Backend;
use super::element::LayerElement;
use super::parameters::{ExpertParameters, all_parameters, matrices};
use super::pass::{from_host, on_host};
use crate::adamw::{AdamW, Moments};
use crate::error::Error;

/// A run of elements of one block: where it lies at the instance and in the owner's shard.
struct Piece {
    block: usize,
    matrix: usize,
    at_instance: Range<usize>,
    in_shard: Range<usize>,
}

/// The experts of one layer on one rank.
#[derive(Debug)]
pub(super) struct Experts<B: Backend<T>, T: LayerElement> {
    shape: FfnShape,
    rank: usize,
    placement: Placement,
    /// `[local instances, ..]`, in the order of `Placement::local_experts`: the master weights, rounded. Gradients alike, in f32.
    weights: ExpertBuffers<B, T>,
    gradients: ExpertBuffers<B>,
    master: Vec<f32>,
    moments: Moments,
    shard_gradient: Vec<f32>,
    send: Vec<f32>,
    receive: Vec<f32>,
    /// Gradients on their way from a device, weights on their way to it.
    copies: [Vec<f32>; 3],
    copy: Vec<T>,
}

impl<B: Backend<T>, T: LayerElement> Experts<B, T> {
    pub(super) fn new(
        backend: &B,
        shape: FfnShape,
        rank: usize,
        placement: Placement,
        init: impl FnMut(usize) -> ExpertParameters,
    ) -> Result<Self, Error> {
        let all = all_parameters(&shape, placement.experts(), init)?;
        let mut new = Self {
            shape,
            rank,
            weights: empty(&shape),
            gradients: empty(&shape),
            master: Vec::new(),
            moments: Moments::default(),
            shard_gradient: Vec::new(),
            send: Vec::new(),
            receive: Vec::new(),
            copies: Default::default(),
            copy: Vec::new(),
            placement,
        };
        // Zeros of their own rather than a copy of zeros: memory that nothing is written to until the first update.
        new.moments = Moments::zeros(new.shard(rank).len());
        new.take_parameters(backend, &all)?;
        Ok(new)
    }

    /// Takes the vector of all experts' parameters and moments, and keeps what belongs here.
    pub(super) fn restore(
        &mut self,
        backend: &B,
        placement: Placement,
        parameters: &[f32],
        moments: &Moments,
    ) -> Result<(), Error> {
        self.placement = placement;
        let shard = self.shard(self.rank);
        self.moments = Moments {
            first: moments.first[shard.clone()].to_vec(),
            second: moments.second[shard].to_vec(),
        };
        self.take_parameters(backend, parameters)
    }

    /// Takes the owned shard and the weights of the local instances from the vector of all experts' parameters.
    fn take_parameters(&mut self, backend: &B, parameters: &[f32]) -> Result<(), Error> {
        let shard = self.shard(self.rank);
        self.master = parameters[shard.clone()].to_vec();
        self.shard_gradient = vec![0.0; shard.len()];
        self.resize(backend)?;
        let shards: Vec<_> = (0..self.placement.ranks()).map(|r| self.shard(r)).collect();
        self.write_weights(backend, |owner, in_shard, weights| {
            round(&parameters[shards[owner].clone()][in_shard], weights);
        })
    }

    /// Writes the local instances' weights, piece by piece, with `write`, which is told where in which owner's shard they are.
    fn write_weights(
        &mut self,
        backend: &B,
        write: impl Fn(usize, Range<usize>, &mut [T]),
    ) -> Result<(), Error> {
        let mut weights = std::mem::replace(&mut self.weights, empty(&self.shape));
        let mut copy = std::mem::take(&mut self.copy);
        let len = self.placement.local_experts(self.rank).len() * self.block();
        for (matrix, buffer) in matrices_mut(&mut weights).enumerate() {
            from_host(backend, buffer, len, &mut copy, |values| {
                for owner in 0..self.placement.ranks() {
                    let pieces = self.pieces(owner, self.rank);
                    for piece in pieces.filter(|piece| piece.matrix == matrix) {
                        write(owner, piece.in_shard, &mut values[piece.at_instance]);
                    }
                }
                Ok(())
            })?;
        }
        (self.weights, self.copy) = (weights, copy);
        Ok(())
    }

    pub(super) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Length of the vector of all experts' parameters.
    pub(super) fn len(&self) -> usize {
        matrices(&self.shape) * self.placement.experts() * self.block()
    }

    /// This rank's part of that vector, and its moments.
    pub(super) fn owned(&self) -> (&[f32], &Moments) {
        (&self.master, &self.moments)
    }

    pub(super) fn shard(&self, rank: usize) -> Range<usize> {
        let (n, ranks) = (self.len() as u128, self.placement.ranks() as u128);
        let bound = |r: usize| (n * r as u128 / ranks) as usize;
        bound(rank)..bound(rank + 1)
    }

    pub(super) fn shape(&self) -> &FfnShape {
        &self.shape
    }

    pub(super) fn weights(&self) -> &ExpertBuffers<B, T> {
        &self.weights
    }

    /// Weights to read and gradients to write, together.
    pub(super) fn weights_and_gradients(
        &mut self,
    ) -> (&ExpertBuffers<B, T>, &mut ExpertBuffers<B>) {
        (&self.weights, &mut self.gradients)
    }

    /// Gradients of the local instances.
    pub(super) fn gradients(&self) -> &ExpertBuffers<B> {
        &self.gradients
    }

    /// Adds the instances' gradients up at their owners, sources in ascending rank order. Returns the bytes sent to each other rank.
    pub(super) fn reduce<C: Collective>(
        &mut self,
        backend: &B,
        comm: &mut C,
    ) -> Result<Vec<u64>, Error> {
        let ranks = self.placement.ranks();
        let mut copies = std::mem::take(&mut self.copies);
        let mut local: Vec<&[f32]> = Vec::with_capacity(copies.len());
        for (buffer, copy) in matrices_of(&self.gradients).zip(&mut copies) {
            local.push(on_host(backend, buffer, copy)?);
        }
        let mut send = std::mem::take(&mut self.send);
        send.clear();
        for owner in self.others() {
            for piece in self.pieces(owner, self.rank) {
                send.extend_from_slice(&local[piece.matrix][piece.at_instance]);
            }
        }
        let send_counts = self.counts(|peer| self.run_length(peer, self.rank));
        let receive_counts = self.counts(|peer| self.run_length(self.rank, peer));
        let mut receive = std::mem::take(&mut self.receive);
        receive.resize(receive_counts.iter().sum(), 0.0);
        comm.all_to_all(&send, &send_counts, &mut receive, &receive_counts)?;

        let mut sum = std::mem::take(&mut self.shard_gradient);
        let mut received = receive.as_slice();
        let mut is_begun = vec![false; matrices(&self.shape) * self.placement.experts()];
        for host in 0..ranks {
            for piece in self.pieces(self.rank, host) {
                let part = if host == self.rank {
                    &local[piece.matrix][piece.at_instance]
                } else {
                    take(&mut received, piece.in_shard.len())
                };
                let sum = &mut sum[piece.in_shard];
                if std::mem::replace(&mut is_begun[piece.block], true) {
                    sum.iter_mut()
                        .zip(part)
                        .for_each(|(sum, part)| *sum += *part);
                } else {
                    sum.copy_from_slice(part);
                }
            }
        }
        drop(local);
        (self.send, self.receive, self.shard_gradient) = (send, receive, sum);
        self.copies = copies;
        Ok(bytes_of::<f32>(&send_counts))
    }

    /// The owned part of the reduced gradient.
    pub(super) fn shard_gradient(&self) -> &[f32] {
        &self.shard_gradient
    }

    /// The owned part of the reduced gradient, of which zeros stay behind.
    pub(super) fn take_shard_gradient(&mut self) -> Vec<f32> {
        let zeros = vec![0.0; self.shard_gradient.len()];
        std::mem::replace(&mut self.shard_gradient, zeros)
    }

    pub(super) fn update(&mut self, adamw: &AdamW, step: u32, learning_rate: f32, scale: f32) {
        adamw.update(
            &mut self.master,
            &self.shard_gradient,
            &mut self.moments,
            step,
            learning_rate,
            scale,
        );
    }

    /// Sends the owned weights to the instances of `next`. Returns the bytes sent to each other rank.
    pub(super) fn deliver<C: Collective>(
        &mut self,
        backend: &B,
        comm: &mut C,
        next: Placement,
    ) -> Result<Vec<u64>, Error> {
        self.placement = next;
        let send_counts = self.counts(|peer| self.run_length(self.rank, peer));
        let receive_counts = self.counts(|peer| self.run_length(peer, self.rank));
        let mut words = [&mut self.send, &mut self.receive].map(std::mem::take);
        let [send, receive] = &mut words;
        let send = elements::<T>(send, send_counts.iter().sum());
        let receive = elements(receive, receive_counts.iter().sum());
        let mut free = &mut *send;
        for host in self.others() {
            for piece in self.pieces(self.rank, host) {
                let next = free.split_off_mut(..piece.in_shard.len());
                round(&self.master[piece.in_shard], next.expect("as counted"));
            }
        }
        comm.all_to_all(send, &send_counts, receive, &receive_counts)?;

        self.resize(backend)?;
        // What came from an owner follows the order of its pieces, that is of its shard.
        let mut parts = HashMap::new();
        let mut received = &*receive;
        for owner in self.others() {
            for piece in self.pieces(owner, self.rank) {
                let start = (owner, piece.in_shard.start);
                parts.insert(start, take(&mut received, piece.in_shard.len()));
            }
        }
        let (rank, master) = (self.rank, std::mem::take(&mut self.master));
        let written = self.write_weights(backend, |owner, in_shard, weights| {
            if owner == rank {
                round(&master[in_shard], weights);
            } else {
                weights.copy_from_slice(parts[&(owner, in_shard.start)]);
            }
        });
        self.master = master;
        [self.send, self.receive] = words;
        written?;
        Ok(bytes_of::<T>(&send_counts))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<B, T> {
        let rank = self.rank;
        (0..self.placement.ranks()).filter(move |peer| *peer != rank)
    }

    /// Elements for each peer; what stays on the rank does not go through the communicator.
    fn counts(&self, of: impl Fn(usize) -> usize) -> Vec<usize> {
        let count = |peer| if peer == self.rank { 0 } else { of(peer) };
        (0..self.placement.ranks()).map(count).collect()
    }

    fn block(&self) -> usize {
        self.shape.width * self.shape.hidden
    }

    /// Makes room for the instances of the current placement.
    fn resize(&mut self, backend: &B) -> Result<(), Error> {
        let len = self.placement.local_experts(self.rank).len() * self.block();
        resize(backend, &mut self.weights, len)?;
        resize(backend, &mut self.gradients, len)
    }

    /// What of `owner`'s shard belongs to instances on `host`, in ascending order.
    fn pieces(&self, owner: usize, host: usize) -> impl Iterator<Item = Piece> {
        let (block, experts, shard) = (self.block(), self.placement.experts(), self.shard(owner));
        let blocks = if shard.is_empty() {
            0..0
        } else {
            shard.start / block..shard.end.div_ceil(block)
        };
        blocks.filter_map(move |index| {
            let instance = self.placement.instance_on(host, index % experts)?
                - self.placement.on_rank(host).start;
            let (start, end) = (
                shard.start.max(index * block),
                shard.end.min((index + 1) * block),
            );
            Some(Piece {
                block: index,
                matrix: index / experts,
                at_instance: instance * block + start - index * block
                    ..instance * block + end - index * block,
                in_shard: start - shard.start..end - shard.start,
            })
        })
    }

    fn run_length(&self, owner: usize, host: usize) -> usize {
        self.pieces(owner, host)
            .map(|piece| piece.in_shard.len())
            .sum()
    }
}

fn empty<B: Memory, T: Element>(shape: &FfnShape) -> ExpertBuffers<B, T> {
    ExpertBuffers {
        gate: shape.activation.is_gated().then(Default::default),
        up: Default::default(),
        down: Default::default(),
    }
}

/// Gate (if gated), up, down.
fn matrices_of<B: Memory>(buffers: &ExpertBuffers<B>) -> impl Iterator<Item = &B::Buffer<f32>> {
    buffers.gate.iter().chain([&buffers.up, &buffers.down])
}

fn matrices_mut<B: Memory, T: Element>(
    buffers: &mut ExpertBuffers<B, T>,
) -> impl Iterator<Item = &mut B::Buffer<T>> {
    let ExpertBuffers { gate, up, down } = buffers;
    gate.iter_mut().chain([up, down])
}

/// Makes the matrices of a kind `len` elements, zeros if they were others.
fn resize<B: Memory, T: Element>(
    backend: &B,
    buffers: &mut ExpertBuffers<B, T>,
    len: usize,
) -> Result<(), Error> {
    for matrices in matrices_mut(buffers) {
        if B::len(matrices) != len {
            backend.zero(matrices, len)?;
        }
    }
    Ok(())
}

/// Rounds master weights to working weights.
fn round<T: LayerElement>(master: &[f32], weights: &mut [T]) {
    for (weight, value) in weights.iter_mut().zip(master) {
        *weight = T::from_f32(*value);
    }
}

/// Room for `len` elements of any content in a list of words.
fn elements<T: LayerElement>(words: &mut Vec<f32>, len: usize) -> &mut [T] {
    words.resize((len * size_of::<T>()).div_ceil(size_of::<f32>()), 0.0);
    &mut bytemuck::cast_slice_mut(words)[..len]
}

/// Cuts the first `len` elements off.
fn take<'a, T>(values: &mut &'a [T], len: usize) -> &'a [T] {
    let (head, tail) = values.split_at(len);
    *values = tail;
    head
}

fn bytes_of<T>(counts: &[usize]) -> Vec<u64> {
    let bytes = |n: &usize| (n * size_of::<T>()) as u64;
    counts.iter().map(bytes).collect()
}
