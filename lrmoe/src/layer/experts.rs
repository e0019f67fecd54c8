//! Expert weights where they run, and the optimizer's copy divided evenly over the ranks.
//!
//! All experts' parameters form one vector: matrix by matrix (gate, up, down), expert by expert, so that every (matrix, expert) is a
//! contiguous block of `hidden * width` numbers. Rank `r` of `R` owns elements `n * r / R .. n * (r + 1) / R` of the vector: their master
//! weights and moments. Gradients travel from the instances to the owners, new weights from the owners to the next instances.

use std::collections::HashMap;
use std::ops::Range;

use lrmoe_comm::Collective;
use lrmoe_kernels::{ExpertBuffers, FfnShape};
use lrmoe_plan::Placement;

use super::Backend;
use super::pass::{from_host, on_host};
use crate::adamw::{AdamW, Moments};
use crate::error::Error;

/// One expert's matrices, row-major: gate and up `[hidden, width]`, down `[width, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertParameters {
    /// Gate projection; `None` where the activation is not gated.
    pub gate: Option<Vec<f32>>,
    /// Up projection.
    pub up: Vec<f32>,
    /// Down projection.
    pub down: Vec<f32>,
}

/// A run of elements of one block: where it lies at the instance and in the owner's shard.
struct Piece {
    matrix: usize,
    at_instance: Range<usize>,
    in_shard: Range<usize>,
}

/// The experts of one layer on one rank.
#[derive(Debug)]
pub(super) struct Experts<B: Backend> {
    shape: FfnShape,
    rank: usize,
    placement: Placement,
    /// `[local instances, ..]`, in the order of `Placement::local_experts`; gradients alike.
    weights: ExpertBuffers<B>,
    gradients: ExpertBuffers<B>,
    master: Vec<f32>,
    moments: Moments,
    shard_gradient: Vec<f32>,
    send: Vec<f32>,
    receive: Vec<f32>,
    /// Matrices on their way between the host and a device.
    copies: [Vec<f32>; 3],
}

impl<B: Backend> Experts<B> {
    pub(super) fn new(
        backend: &B,
        shape: FfnShape,
        rank: usize,
        placement: Placement,
        mut init: impl FnMut(usize) -> ExpertParameters,
    ) -> Result<Self, Error> {
        let (block, matrices, experts) = (
            shape.width * shape.hidden,
            matrices(&shape),
            placement.experts(),
        );
        let mut all = vec![0.0; matrices * experts * block];
        for expert in 0..experts {
            let ExpertParameters { gate, up, down } = init(expert);
            let given: Vec<Vec<f32>> = gate.into_iter().chain([up, down]).collect();
            if given.len() != matrices || given.iter().any(|m| m.len() != block) {
                let lengths = given.iter().map(Vec::len).collect();
                return Err(Error::ExpertParameters {
                    expert,
                    matrices,
                    block,
                    given: lengths,
                });
            }
            for (matrix, values) in given.iter().enumerate() {
                all[(matrix * experts + expert) * block..][..block].copy_from_slice(values);
            }
        }
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
        self.write_weights(backend, |owner, in_shard| {
            &parameters[shards[owner].clone()][in_shard]
        })
    }

    /// Writes the local instances' weights, which `part` finds in the owners' shards.
    fn write_weights<'a>(
        &mut self,
        backend: &B,
        part: impl Fn(usize, Range<usize>) -> &'a [f32],
    ) -> Result<(), Error> {
        let mut weights = std::mem::replace(&mut self.weights, empty(&self.shape));
        let mut copies = std::mem::take(&mut self.copies);
        let len = self.placement.local_experts(self.rank).len() * self.block();
        for (matrix, buffer) in matrices_mut(&mut weights).enumerate() {
            from_host(backend, buffer, len, &mut copies[0], |values| {
                for owner in 0..self.placement.ranks() {
                    let pieces = self.pieces(owner, self.rank);
                    for piece in pieces.filter(|piece| piece.matrix == matrix) {
                        values[piece.at_instance].copy_from_slice(part(owner, piece.in_shard));
                    }
                }
                Ok(())
            })?;
        }
        (self.weights, self.copies) = (weights, copies);
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

    pub(super) fn weights(&self) -> &ExpertBuffers<B> {
        &self.weights
    }

    /// Weights to read and gradients to write, together.
    pub(super) fn weights_and_gradients(&mut self) -> (&ExpertBuffers<B>, &mut ExpertBuffers<B>) {
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
        sum.fill(0.0);
        let mut received = receive.as_slice();
        for host in 0..ranks {
            for piece in self.pieces(self.rank, host) {
                let part = if host == self.rank {
                    &local[piece.matrix][piece.at_instance]
                } else {
                    take(&mut received, piece.in_shard.len())
                };
                let sum = sum[piece.in_shard].iter_mut();
                sum.zip(part).for_each(|(sum, part)| *sum += *part);
            }
        }
        drop(local);
        (self.send, self.receive, self.shard_gradient) = (send, receive, sum);
        self.copies = copies;
        Ok(bytes_of(&send_counts))
    }

    /// The owned part of the reduced gradient.
    pub(super) fn shard_gradient(&self) -> &[f32] {
        &self.shard_gradient
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
        let mut send = std::mem::take(&mut self.send);
        send.clear();
        for host in self.others() {
            for piece in self.pieces(self.rank, host) {
                send.extend_from_slice(&self.master[piece.in_shard]);
            }
        }
        let send_counts = self.counts(|peer| self.run_length(self.rank, peer));
        let receive_counts = self.counts(|peer| self.run_length(peer, self.rank));
        let mut receive = std::mem::take(&mut self.receive);
        receive.resize(receive_counts.iter().sum(), 0.0);
        comm.all_to_all(&send, &send_counts, &mut receive, &receive_counts)?;

        self.resize(backend)?;
        // What came from an owner follows the order of its pieces, that is of its shard.
        let mut parts = HashMap::new();
        let mut received = receive.as_slice();
        for owner in self.others() {
            for piece in self.pieces(owner, self.rank) {
                let start = (owner, piece.in_shard.start);
                parts.insert(start, take(&mut received, piece.in_shard.len()));
            }
        }
        let (rank, master) = (self.rank, std::mem::take(&mut self.master));
        let written = self.write_weights(backend, |owner, in_shard| {
            if owner == rank {
                &master[in_shard]
            } else {
                parts[&(owner, in_shard.start)]
            }
        });
        drop(parts);
        (self.send, self.receive, self.master) = (send, receive, master);
        written?;
        Ok(bytes_of(&send_counts))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<B> {
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
        for matrices in [&mut self.weights, &mut self.gradients] {
            for matrix in matrices_mut(matrices) {
                if B::len(matrix) != len {
                    backend.zero(matrix, len)?;
                }
            }
        }
        Ok(())
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

fn matrices(shape: &FfnShape) -> usize {
    if shape.activation.is_gated() { 3 } else { 2 }
}

fn empty<B: Backend>(shape: &FfnShape) -> ExpertBuffers<B> {
    ExpertBuffers {
        gate: shape.activation.is_gated().then(Default::default),
        up: Default::default(),
        down: Default::default(),
    }
}

/// Gate (if gated), up, down.
fn matrices_of<B: Backend>(buffers: &ExpertBuffers<B>) -> impl Iterator<Item = &B::Buffer<f32>> {
    buffers.gate.iter().chain([&buffers.up, &buffers.down])
}

fn matrices_mut<B: Backend>(
    buffers: &mut ExpertBuffers<B>,
) -> impl Iterator<Item = &mut B::Buffer<f32>> {
    let ExpertBuffers { gate, up, down } = buffers;
    gate.iter_mut().chain([up, down])
}

/// Cuts the first `len` elements off.
fn take<'a>(values: &mut &'a [f32], len: usize) -> &'a [f32] {
    let (head, tail) = values.split_at(len);
    *values = tail;
    head
}

fn bytes_of(counts: &[usize]) -> Vec<u64> {
    let bytes = |n: &usize| (n * size_of::<f32>()) as u64;
    counts.iter().map(bytes).collect()
}
