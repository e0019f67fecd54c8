//! Expert weights where they run, and the optimizer's copy divided evenly over the ranks.
//!
//! All experts' parameters form one vector: matrix by matrix (gate, up, down), expert by expert, so that every (matrix, expert) is a
//! contiguous block of `hidden * width` numbers. Rank `r` of `R` owns elements `n * r / R .. n * (r + 1) / R` of the vector: their master
//! weights and moments. Gradients travel from the instances to the owners, new weights from the owners to the next instances.

use std::ops::Range;

use lrmoe_comm::Collective;
use lrmoe_kernels::{FfnShape, WeightGradients, Weights};
use lrmoe_plan::Placement;
use ndarray::Array3;

use super::buffer::Buffer;
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

/// A rank's matrices `[local instances, ..]`, in the order of `Placement::local_experts`.
#[derive(Debug)]
struct Matrices(Vec<Array3<f32>>);

impl Matrices {
    fn zeros(shape: &FfnShape, instances: usize) -> Self {
        let (width, hidden) = (shape.width, shape.hidden);
        let inward = if shape.activation.is_gated() { 2 } else { 1 };
        let mut matrices = vec![Array3::zeros((instances, hidden, width)); inward];
        matrices.push(Array3::zeros((instances, width, hidden)));
        Self(matrices)
    }

    fn slices(&self) -> impl Iterator<Item = &[f32]> {
        self.0
            .iter()
            .map(|m| m.as_slice().expect("owned matrices are contiguous"))
    }

    fn slice_mut(&mut self, matrix: usize) -> &mut [f32] {
        self.0[matrix]
            .as_slice_mut()
            .expect("owned matrices are contiguous")
    }
}

/// A run of elements of one block: where it lies at the instance and in the owner's shard.
struct Piece {
    matrix: usize,
    at_instance: Range<usize>,
    in_shard: Range<usize>,
}

/// The experts of one layer on one rank.
#[derive(Debug)]
pub(super) struct Experts {
    shape: FfnShape,
    rank: usize,
    placement: Placement,
    weights: Matrices,
    gradients: Matrices,
    master: Vec<f32>,
    moments: Moments,
    shard_gradient: Vec<f32>,
    send: Buffer<f32>,
    receive: Buffer<f32>,
}

impl Experts {
    pub(super) fn new(
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
            weights: Matrices::zeros(&shape, 0),
            gradients: Matrices::zeros(&shape, 0),
            master: Vec::new(),
            moments: Moments::default(),
            shard_gradient: Vec::new(),
            send: Buffer::default(),
            receive: Buffer::default(),
            placement,
        };
        // Zeros of their own rather than a copy of zeros: memory that nothing is written to until the first update.
        new.moments = Moments::zeros(new.shard(rank).len());
        new.take_parameters(&all);
        Ok(new)
    }

    /// Takes the vector of all experts' parameters and moments, and keeps what belongs here.
    pub(super) fn restore(&mut self, placement: Placement, parameters: &[f32], moments: &Moments) {
        self.placement = placement;
        let shard = self.shard(self.rank);
        self.moments = Moments {
            first: moments.first[shard.clone()].to_vec(),
            second: moments.second[shard].to_vec(),
        };
        self.take_parameters(parameters);
    }

    /// Takes the owned shard and the weights of the local instances from the vector of all experts' parameters.
    fn take_parameters(&mut self, parameters: &[f32]) {
        let shard = self.shard(self.rank);
        self.master = parameters[shard.clone()].to_vec();
        self.shard_gradient = vec![0.0; shard.len()];
        self.resize();
        let (block, experts) = (self.block(), self.placement.experts());
        for (instance, expert) in self
            .placement
            .local_experts(self.rank)
            .to_vec()
            .into_iter()
            .enumerate()
        {
            for matrix in 0..matrices(&self.shape) {
                let from = &parameters[(matrix * experts + expert as usize) * block..][..block];
                self.weights.slice_mut(matrix)[instance * block..][..block].copy_from_slice(from);
            }
        }
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

    pub(super) fn weights(&self) -> Weights<'_> {
        split(&self.weights)
    }

    /// Weights to read and gradients to write, together.
    pub(super) fn weights_and_gradients(&mut self) -> (Weights<'_>, WeightGradients<'_>) {
        let mut gradients = self
            .gradients
            .0
            .iter_mut()
            .rev()
            .map(|matrix| matrix.view_mut());
        let (down, up) = (
            gradients.next().expect("a down projection"),
            gradients.next().expect("an up projection"),
        );
        (
            split(&self.weights),
            WeightGradients {
                gate: gradients.next(),
                up,
                down,
            },
        )
    }

    /// Gradients of the local instances, matrix by matrix, `[local instances, ..]`.
    pub(super) fn gradients(&self) -> impl Iterator<Item = &Array3<f32>> {
        self.gradients.0.iter()
    }

    /// Adds the instances' gradients up at their owners, sources in ascending rank order. Returns the bytes sent to each other rank.
    pub(super) fn reduce<C: Collective>(&mut self, comm: &mut C) -> Result<Vec<u64>, Error> {
        let ranks = self.placement.ranks();
        let send_counts: Vec<usize> = (0..ranks)
            .map(|owner| self.run_length(owner, self.rank))
            .collect();
        let receive_counts: Vec<usize> = (0..ranks)
            .map(|host| self.run_length(self.rank, host))
            .collect();
        let mut send = std::mem::take(&mut self.send);
        let mut cursor = Cursor::new(send.take(send_counts.iter().sum()));
        let local: Vec<&[f32]> = self.gradients.slices().collect();
        for owner in 0..ranks {
            for piece in self.pieces(owner, self.rank) {
                cursor
                    .next(piece.in_shard.len())
                    .copy_from_slice(&local[piece.matrix][piece.at_instance]);
            }
        }
        let mut receive = std::mem::take(&mut self.receive);
        let received = receive.take(receive_counts.iter().sum());
        comm.all_to_all(send.filled(), &send_counts, received, &receive_counts)?;

        let mut sum = std::mem::take(&mut self.shard_gradient);
        sum.fill(0.0);
        let mut cursor = Cursor::new(received);
        for host in 0..ranks {
            for piece in self.pieces(self.rank, host) {
                let part = cursor.next(piece.in_shard.len());
                sum[piece.in_shard]
                    .iter_mut()
                    .zip(part)
                    .for_each(|(sum, part)| *sum += *part);
            }
        }
        (self.send, self.receive, self.shard_gradient) = (send, receive, sum);
        Ok(crossing(&send_counts, self.rank))
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
        comm: &mut C,
        next: Placement,
    ) -> Result<Vec<u64>, Error> {
        self.placement = next;
        let ranks = self.placement.ranks();
        let send_counts: Vec<usize> = (0..ranks)
            .map(|host| self.run_length(self.rank, host))
            .collect();
        let receive_counts: Vec<usize> = (0..ranks)
            .map(|owner| self.run_length(owner, self.rank))
            .collect();
        let mut send = std::mem::take(&mut self.send);
        let mut cursor = Cursor::new(send.take(send_counts.iter().sum()));
        for host in 0..ranks {
            for piece in self.pieces(self.rank, host) {
                cursor
                    .next(piece.in_shard.len())
                    .copy_from_slice(&self.master[piece.in_shard]);
            }
        }
        let mut receive = std::mem::take(&mut self.receive);
        let received = receive.take(receive_counts.iter().sum());
        comm.all_to_all(send.filled(), &send_counts, received, &receive_counts)?;

        self.resize();
        let mut cursor = Cursor::new(received);
        for owner in 0..ranks {
            for piece in self.pieces(owner, self.rank).collect::<Vec<_>>() {
                let part = cursor.next(piece.in_shard.len());
                self.weights.slice_mut(piece.matrix)[piece.at_instance].copy_from_slice(part);
            }
        }
        (self.send, self.receive) = (send, receive);
        Ok(crossing(&send_counts, self.rank))
    }

    fn block(&self) -> usize {
        self.shape.width * self.shape.hidden
    }

    /// Makes room for the instances of the current placement.
    fn resize(&mut self) {
        let instances = self.placement.local_experts(self.rank).len();
        if self.weights.0[0].dim().0 != instances {
            self.weights = Matrices::zeros(&self.shape, instances);
            self.gradients = Matrices::zeros(&self.shape, instances);
        }
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

fn split(matrices: &Matrices) -> Weights<'_> {
    let mut views = matrices.0.iter().rev().map(|matrix| matrix.view());
    let (down, up) = (
        views.next().expect("a down projection"),
        views.next().expect("an up projection"),
    );
    Weights {
        gate: views.next(),
        up,
        down,
    }
}

/// Bytes to each peer; what stays on the rank counts as 0.
fn crossing(counts: &[usize], rank: usize) -> Vec<u64> {
    let bytes = |(peer, n): (usize, &usize)| {
        if peer == rank {
            0
        } else {
            (n * size_of::<f32>()) as u64
        }
    };
    counts.iter().enumerate().map(bytes).collect()
}

/// Hands out a slice run by run.
struct Cursor<'a>(&'a mut [f32]);

impl<'a> Cursor<'a> {
    fn new(values: &'a mut [f32]) -> Self {
        Self(values)
    }

    fn next(&mut self, len: usize) -> &'a mut [f32] {
        let (head, tail) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = tail;
        head
    }
}
