use std::{fmt, ops::Range};

use lrmoe_metric::SquaredNorm;

use crate::{
    CompactRows, Element, Error, FfnElement, FfnShape, HiddenSums, Memory, RowIndex,
    error::check_length,
    ffn::{check_gate, check_offsets},
};

/// Matrices of a rank's instances in a backend's memory: weights, or their gradients, which are f32 whatever the weights are. Shapes as in
/// [`Weights`](crate::Weights).
#[derive(Debug)]
pub struct ExpertBuffers<B: Memory + ?Sized, T: Element = f32> {
    /// Gate projection `[instances, F, D]`; exactly with gated activations.
    pub gate: Option<B::Buffer<T>>,
    /// Up projection `[instances, F, D]`.
    pub up: B::Buffer<T>,
    /// Down projection `[instances, D, F]`.
    pub down: B::Buffer<T>,
}

/// What the backward pass knows of each row, in a backend's memory; see [`BackwardRows`](crate::BackwardRows).
#[derive(Debug)]
pub struct RowBuffers<'a, B: Memory + ?Sized, T: Element = f32> {
    /// Input of the expert `[rows, D]`.
    pub x: &'a B::Buffer<T>,
    /// Gradient of the layer's output `[rows, D]`, not multiplied by the gate weight.
    pub dy: &'a B::Buffer<T>,
    /// Gate weight p `[rows]`.
    pub gate_weights: &'a B::Buffer<f32>,
    /// Selection weight w `[rows]`.
    pub weights: &'a B::Buffer<f32>,
}

/// Projections of x that stay from the forward pass, in a backend's memory; see [`PreActivations`](crate::PreActivations).
#[derive(Debug)]
pub struct PreActivationBuffers<B: Memory + ?Sized, T: Element = f32> {
    /// Gate x `[rows, F]`; empty where the activation has no gate.
    pub gate: B::Buffer<T>,
    /// Up x `[rows, F]`.
    pub up: B::Buffer<T>,
}

impl<B: Memory + ?Sized, T: Element> Default for PreActivationBuffers<B, T> {
    fn default() -> Self {
        Self {
            gate: Default::default(),
            up: Default::default(),
        }
    }
}

impl<B: Memory, T: Element> PreActivationBuffers<B, T> {
    /// Makes room for those of `rows` rows, of any content.
    ///
    /// # Errors
    ///
    /// Those of [`Memory::resize`].
    pub fn resize(&mut self, backend: &B, shape: &FfnShape, rows: usize) -> Result<(), Error> {
        let hidden = rows.saturating_mul(shape.hidden);
        let gated = shape.activation.is_gated();
        backend.resize(&mut self.gate, if gated { hidden } else { 0 })?;
        backend.resize(&mut self.up, hidden)
    }
}

/// The grouped expert FFN in a backend's memory: what [`ExpertFfn`](crate::ExpertFfn) says, on buffers. A backend has it for each `T` that it can
/// compute with.
///
/// What a row gives does not depend, to the bit, on the other rows or on its place. Backends agree within rounding.
pub trait ComputeExperts<T: FfnElement = f32>: Memory {
    /// Memory that calls reuse; its content means nothing.
    type Scratch: Default + fmt::Debug + Send;

    /// Bytes that it holds.
    fn scratch_bytes(scratch: &Self::Scratch) -> usize;

    /// Whether calls with `scratch` from now on sum up the hidden values of their rows, for [`hidden_sums`](Self::hidden_sums): forward each row
    /// once, backward times its selection weight. By default they do not.
    ///
    /// # Errors
    ///
    /// [`Error::NoHiddenSums`] if they are wanted of a backend that has none.
    fn sum_hidden(_scratch: &mut Self::Scratch, wanted: bool) -> Result<(), Error> {
        if wanted {
            Err(Error::NoHiddenSums)
        } else {
            Ok(())
        }
    }

    /// The sums over the rows of the last call with `scratch`, if they were wanted.
    fn hidden_sums(_scratch: &Self::Scratch) -> Option<&HiddenSums> {
        None
    }

    /// Writes the experts' outputs, without gate weights, to `out` `[rows, D]`; and where asked for, the squared norm of the down projection's
    /// input of each row to `h_norms` `[rows]` and the pre-activations, as [`backward`](Self::backward) can take them, to `kept`.
    ///
    /// # Errors
    ///
    /// Sizes or offsets that do not fit together; those of [`Memory::resize`].
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn forward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        x: &Self::Buffer<T>,
        scratch: &mut Self::Scratch,
        out: &mut Self::Buffer<T>,
        h_norms: Option<&mut Self::Buffer<SquaredNorm>>,
        kept: Option<&mut PreActivationBuffers<Self, T>>,
    ) -> Result<(), Error>;

    /// As [`forward`](Self::forward), but of the pre-activations only those of chosen rows go to `kept`, from row `index[i]` to row `places[i]`; its
    /// other rows stay as they are. Both ascend. Backends that write those of all rows first, as this default does, have room for them in `all`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward); before anything is computed, sizes of the index, the places and `kept` that do not fit together, and where the
    /// host has them, [`Error::RowOrder`] or [`Error::PlaceOrder`] if they do not ascend.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn forward_chosen(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        x: &Self::Buffer<T>,
        scratch: &mut Self::Scratch,
        out: &mut Self::Buffer<T>,
        h_norms: Option<&mut Self::Buffer<SquaredNorm>>,
        index_and_places: [&RowIndex<Self>; 2],
        [all, kept]: [&mut PreActivationBuffers<Self, T>; 2],
    ) -> Result<(), Error>
    where
        Self: CompactRows + Sized,
    {
        Groups::new(shape, weights, offsets, x)?.check_chosen(index_and_places, kept)?;
        self.forward(shape, weights, offsets, x, scratch, out, h_norms, Some(all))?;
        if shape.activation.is_gated() {
            self.put(&all.gate, shape.hidden, index_and_places, &mut kept.gate)?;
        }
        self.put(&all.up, shape.hidden, index_and_places, &mut kept.up)
    }

    /// Writes `dx` `[rows, D]`, `dp` `[rows]` and the weight gradients of all instances, zeros where one has no rows; or adds to the gradients of
    /// the instances for which `accumulate` `[instances]` says so, which must have been written before.
    ///
    /// Pre-activations are recomputed, or are those `kept` by the forward pass, whose content means nothing afterwards: results are the same to
    /// the bit, but that in bf16 they are rounded where they are kept.
    ///
    /// `gradients` has a gate exactly if `weights` has. Sums over an instance's rows are taken in row order, so several calls give the bits of
    /// one; for bf16 if all but the last bring a multiple of 32 rows of it.
    ///
    /// # Errors
    ///
    /// Sizes or offsets that do not fit together; those of [`Memory::resize`].
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn backward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        rows: &RowBuffers<'_, Self, T>,
        kept: Option<&mut PreActivationBuffers<Self, T>>,
        scratch: &mut Self::Scratch,
        dx: &mut Self::Buffer<T>,
        dp: &mut Self::Buffer<f32>,
        gradients: &mut ExpertBuffers<Self>,
        accumulate: &[bool],
    ) -> Result<(), Error>;

    /// Writes the norm of each row's terms in all weight gradients, without w, to `norms` `[rows]`:
    /// `sqrt(p^2 |dy|^2 |h|^2 + (|dgate|^2 + |dup|^2) |x|^2)`. An oracle to measure scores by, and as slow as a backward pass of its rows.
    ///
    /// # Errors
    ///
    /// [`Error::NoGradientNorms`] on backends that have none, which are all but the CPU; sizes or offsets that do not fit together.
    fn gradient_norms(
        &self,
        _shape: &FfnShape,
        _weights: &ExpertBuffers<Self, T>,
        _offsets: &[usize],
        _rows: &RowBuffers<'_, Self, T>,
        _norms: &mut Self::Buffer<f32>,
    ) -> Result<(), Error> {
        Err(Error::NoGradientNorms)
    }
}

/// Sizes of a call that were found to fit together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups<'a> {
    pub(crate) shape: FfnShape,
    offsets: &'a [usize],
}

impl<'a> Groups<'a> {
    pub(crate) fn new<B: Memory + ?Sized, T: Element>(
        shape: &FfnShape,
        weights: &ExpertBuffers<B, T>,
        offsets: &'a [usize],
        x: &B::Buffer<T>,
    ) -> Result<Self, Error> {
        let FfnShape {
            width,
            hidden,
            activation,
        } = *shape;
        if width == 0 || hidden == 0 {
            return Err(Error::EmptyExpert { width, hidden });
        }
        let matrix = width.saturating_mul(hidden);
        let instances = B::len(&weights.up) / matrix;
        let matrices = instances * matrix;
        check_length("up weights", B::len(&weights.up), matrices)?;
        check_length("down weights", B::len(&weights.down), matrices)?;
        check_gate(activation, weights.gate.is_some(), "gate weights")?;
        let gate = weights.gate.as_ref();
        gate.map_or(Ok(()), |gate| {
            check_length("gate weights", B::len(gate), matrices)
        })?;
        check_length("row offsets", offsets.len(), instances + 1)?;
        let rows = B::len(x) / width;
        check_length("x", B::len(x), rows * width)?;
        check_offsets(offsets, rows)?;
        Ok(Self {
            shape: *shape,
            offsets,
        })
    }

    pub(crate) fn check_backward<B: Memory + ?Sized, T: Element>(
        &self,
        rows: &RowBuffers<'_, B, T>,
        kept: Option<&PreActivationBuffers<B, T>>,
        gradients: &ExpertBuffers<B>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        kept.map_or(Ok(()), |kept| self.check_kept(kept, self.rows()))?;
        self.check_rows(rows)?;
        check_length("accumulate", accumulate.len(), self.instances())?;
        check_gate(
            self.shape.activation,
            gradients.gate.is_some(),
            "gate gradients",
        )?;
        if accumulate.contains(&true) {
            let gate = gradients.gate.as_ref();
            let all = [
                ("gate gradients", gate),
                ("up gradients", Some(&gradients.up)),
                ("down gradients", Some(&gradients.down)),
            ];
            for (what, matrices) in all {
                matrices.map_or(Ok(()), |m| check_length(what, B::len(m), self.matrices()))?;
            }
        }
        Ok(())
    }

    /// Checks what [`ComputeExperts::forward_chosen`] takes beyond a forward pass.
    pub(crate) fn check_chosen<B: Memory, T: Element>(
        &self,
        [index, places]: [&RowIndex<B>; 2],
        kept: &PreActivationBuffers<B, T>,
    ) -> Result<(), Error> {
        check_length("rows of the index", index.rows, self.rows())?;
        check_length("places", B::len(&places.index), B::len(&index.index))?;
        self.check_kept(kept, places.rows)
    }

    /// Checks pre-activations of so many rows.
    fn check_kept<B: Memory + ?Sized, T: Element>(
        &self,
        PreActivationBuffers { gate, up }: &PreActivationBuffers<B, T>,
        rows: usize,
    ) -> Result<(), Error> {
        let hidden = rows.saturating_mul(self.shape.hidden);
        let gated = self.shape.activation.is_gated();
        let of_gate = if gated { hidden } else { 0 };
        check_length("gate pre-activations", B::len(gate), of_gate)?;
        check_length("up pre-activations", B::len(up), hidden)
    }

    pub(crate) fn check_rows<B: Memory + ?Sized, T: Element>(
        &self,
        rows: &RowBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        check_length("dy", B::len(rows.dy), self.rows() * self.shape.width)?;
        check_length("gate_weights", B::len(rows.gate_weights), self.rows())?;
        check_length("weights", B::len(rows.weights), self.rows())
    }

    pub(crate) fn instances(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows_of(0..self.instances()).end
    }

    /// The rows of these instances.
    pub(crate) fn rows_of(&self, instances: Range<usize>) -> Range<usize> {
        self.offsets[instances.start]..self.offsets[instances.end]
    }

    /// Elements of one kind of matrix of all instances.
    pub(crate) fn matrices(&self) -> usize {
        self.instances() * self.shape.width * self.shape.hidden
    }
}
