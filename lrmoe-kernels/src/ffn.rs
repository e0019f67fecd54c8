use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayRef, ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3, Dimension, Ix2};

use crate::{Activation, Error, Workspace, error::check_length};

/// Sizes of one expert; all instances of a layer share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FfnShape {
    /// Model width D.
    pub width: usize,
    /// Hidden width F.
    pub hidden: usize,
    /// What stands before the down projection.
    pub activation: Activation,
}

/// Weights of a rank's instances, matrices as `[out, in]`, no bias, standard layout.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, T = f32> {
    /// Gate projection `[instances, F, D]`; exactly with gated activations.
    pub gate: Option<ArrayView3<'a, T>>,
    /// Up projection `[instances, F, D]`.
    pub up: ArrayView3<'a, T>,
    /// Down projection `[instances, D, F]`.
    pub down: ArrayView3<'a, T>,
}

/// Where the weight gradients go: shapes as in [`Weights`], f32 whatever the weights are, standard layout, any content before but where sums are
/// added to it.
#[derive(Debug)]
pub struct WeightGradients<'a> {
    /// Of the gate projection `[instances, F, D]`; exactly with gated activations.
    pub gate: Option<ArrayViewMut3<'a, f32>>,
    /// Of the up projection `[instances, F, D]`.
    pub up: ArrayViewMut3<'a, f32>,
    /// Of the down projection `[instances, D, F]`.
    pub down: ArrayViewMut3<'a, f32>,
}

/// What the backward pass knows of each row; a row is one routed pair.
#[derive(Clone, Copy, Debug)]
pub struct BackwardRows<'a, T = f32> {
    /// Input of the expert `[rows, D]`.
    pub x: ArrayView2<'a, T>,
    /// Gradient of the layer's output y `[rows, D]`, not multiplied by the gate weight.
    pub dy: ArrayView2<'a, T>,
    /// Gate weight p `[rows]`.
    pub gate_weights: &'a [f32],
    /// Selection weight w `[rows]`: multiplies the row's term in the weight gradients, nothing else.
    pub weights: &'a [f32],
}

/// Projections of x that were kept from the forward pass, standard layout.
#[derive(Clone, Copy, Debug)]
pub struct PreActivations<'a, T = f32> {
    /// Gate x `[rows, F]`; exactly with gated activations.
    pub gate: Option<ArrayView2<'a, T>>,
    /// Up x `[rows, F]`.
    pub up: ArrayView2<'a, T>,
}

/// Where the forward pass keeps them: shapes as in [`PreActivations`], any content before.
#[derive(Debug)]
pub struct PreActivationsMut<'a, T = f32> {
    /// Gate x `[rows, F]`; exactly with gated activations.
    pub gate: Option<ArrayViewMut2<'a, T>>,
    /// Up x `[rows, F]`.
    pub up: ArrayViewMut2<'a, T>,
}

/// The grouped expert FFN `y = down(act(gate x) * up x)`, or `down(act(up x))`, of one backend.
///
/// Rows come grouped by instance: `offsets[i]..offsets[i + 1]` are the rows of instance i, any of them
/// possibly none. What is computed for a row does not depend, to the bit, on the other rows, on its place among
/// them, or on the number of threads.
pub trait ExpertFfn<T = f32> {
    /// Writes the experts' outputs, without gate weights, to `out` `[rows, D]`, and the squared norm of
    /// the down projection's input of each row to `h_norms` `[rows]` where asked for.
    ///
    /// # Errors
    ///
    /// Sizes, shapes, layouts or offsets that do not fit together.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn forward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        x: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, T>,
        h_norms: Option<&mut [SquaredNorm]>,
    ) -> Result<(), Error>;

    /// Recomputes the hidden rows from `rows.x` and writes, with f the expert,
    /// - `dx` `[rows, D]`: the gradient of `p <dy, f(x)>` with respect to x,
    /// - `dp` `[rows]`: `<dy, f(x)>`, the gradient with respect to p,
    /// - `gradients`: the sum over an instance's rows of w times the row's gradient; zeros where it has no rows. Where `accumulate`
    ///   `[instances]` says so, the sum goes on from what is there instead, and gradients of an instance without rows are left as they are.
    ///
    /// A weight w of 1 gives bit for bit what no weight would. Sums over rows are taken in row order: an instance's rows may come in several
    /// calls, all but the first of which accumulate, and give the same bits as in one if every part but the last is a multiple of
    /// 32 rows (for f32, of any length).
    ///
    /// # Errors
    ///
    /// Sizes, shapes, layouts or offsets that do not fit together.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn backward(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        rows: &BackwardRows<'_, T>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, T>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error>;
}

/// The same with the pre-activations kept from the forward pass: memory for two or one of the backward pass's eight or seven products of
/// a row.
///
/// Their rows may be gathered and dropped with those of x.
pub trait StashFfn<T = f32>: ExpertFfn<T> {
    /// [`ExpertFfn::forward`], which also writes the pre-activations to `stash`.
    ///
    /// # Errors
    ///
    /// Sizes, shapes, layouts or offsets that do not fit together.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn forward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        x: ArrayView2<'_, T>,
        workspace: &mut Workspace,
        out: ArrayViewMut2<'_, T>,
        h_norms: Option<&mut [SquaredNorm]>,
        stash: PreActivationsMut<'_, T>,
    ) -> Result<(), Error>;

    /// [`ExpertFfn::backward`], which takes the pre-activations from `stash`: to the bit the same for f32, and for bf16 as far as storing them
    /// rounds.
    ///
    /// # Errors
    ///
    /// Sizes, shapes, layouts or offsets that do not fit together.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs and outputs keep their own lifetimes"
    )]
    fn backward_stash(
        &self,
        shape: &FfnShape,
        weights: &Weights<'_, T>,
        offsets: &[usize],
        rows: &BackwardRows<'_, T>,
        stash: &PreActivations<'_, T>,
        workspace: &mut Workspace,
        dx: ArrayViewMut2<'_, T>,
        dp: &mut [f32],
        gradients: &mut WeightGradients<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error>;
}

/// Weights, sizes and offsets that were found to fit together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts<'a, T = f32> {
    pub(crate) shape: FfnShape,
    gate: Option<&'a [T]>,
    up: &'a [T],
    down: &'a [T],
    offsets: &'a [usize],
}

impl<'a, T: Copy> Experts<'a, T> {
    pub(crate) fn new(
        shape: &FfnShape,
        weights: &'a Weights<'_, T>,
        offsets: &'a [usize],
        x: &ArrayView2<'_, T>,
    ) -> Result<Self, Error> {
        let FfnShape {
            width,
            hidden,
            activation,
        } = *shape;
        if width == 0 || hidden == 0 {
            return Err(Error::EmptyExpert { width, hidden });
        }
        let instances = weights.up.dim().0;
        let up = checked("up weights", &weights.up, &[instances, hidden, width])?;
        let down = checked("down weights", &weights.down, &[instances, width, hidden])?;
        check_gate(activation, weights.gate.is_some(), "gate weights")?;
        let gate = weights.gate.as_ref();
        let gate = gate.map(|gate| checked("gate weights", gate, &[instances, hidden, width]));
        check_length("row offsets", offsets.len(), instances + 1)?;
        checked("x", x, &[x.nrows(), width])?;
        check_offsets(offsets, x.nrows())?;
        Ok(Self {
            shape: *shape,
            gate: gate.transpose()?,
            up,
            down,
            offsets,
        })
    }

    /// `[F, D]`.
    pub(crate) fn gate(&self, instance: usize) -> Option<&'a [T]> {
        self.gate.map(|gate| self.matrix(gate, instance))
    }

    /// `[F, D]`.
    pub(crate) fn up(&self, instance: usize) -> &'a [T] {
        self.matrix(self.up, instance)
    }

    /// `[D, F]`.
    pub(crate) fn down(&self, instance: usize) -> &'a [T] {
        self.matrix(self.down, instance)
    }

    fn matrix(&self, all: &'a [T], instance: usize) -> &'a [T] {
        let length = self.shape.width * self.shape.hidden;
        &all[instance * length..][..length]
    }

    pub(crate) fn instances(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(crate) fn rows_of(&self, instance: usize) -> std::ops::Range<usize> {
        self.offsets[instance]..self.offsets[instance + 1]
    }

    /// Projections of x: gate and up, or up alone.
    pub(crate) fn pre_activations(&self) -> usize {
        1 + usize::from(self.shape.activation.is_gated())
    }

    pub(crate) fn check_forward(
        &self,
        out: &ArrayViewMut2<'_, T>,
        h_norms: Option<&[SquaredNorm]>,
    ) -> Result<(), Error> {
        let rows = self.rows();
        checked("out", out, &[rows, self.shape.width])?;
        h_norms.map_or(Ok(()), |norms| check_length("h_norms", norms.len(), rows))
    }

    pub(crate) fn check_backward(
        &self,
        inputs: &BackwardRows<'_, T>,
        dx: &ArrayViewMut2<'_, T>,
        dp: &[f32],
        gradients: &WeightGradients<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let FfnShape {
            width,
            hidden,
            activation,
        } = self.shape;
        let (rows, instances) = (self.rows(), self.instances());
        checked("dy", &inputs.dy, &[rows, width])?;
        check_length("gate_weights", inputs.gate_weights.len(), rows)?;
        check_length("weights", inputs.weights.len(), rows)?;
        checked("dx", dx, &[rows, width])?;
        check_length("dp", dp.len(), rows)?;
        check_length("accumulate", accumulate.len(), instances)?;
        checked("up gradients", &gradients.up, &[instances, hidden, width])?;
        checked(
            "down gradients",
            &gradients.down,
            &[instances, width, hidden],
        )?;
        check_gate(activation, gradients.gate.is_some(), "gate gradients")?;
        let gate = gradients.gate.as_ref();
        gate.map_or(Ok(()), |g| {
            checked("gate gradients", g, &[instances, hidden, width]).map(drop)
        })
    }

    pub(crate) fn check_stash(
        &self,
        gate: Option<&ArrayRef<T, Ix2>>,
        up: &ArrayRef<T, Ix2>,
    ) -> Result<(), Error> {
        let shape = [self.rows(), self.shape.hidden];
        check_gate(
            self.shape.activation,
            gate.is_some(),
            "gate pre-activations",
        )?;
        gate.map_or(Ok(()), |gate| {
            checked("gate pre-activations", gate, &shape).map(drop)
        })?;
        checked("up pre-activations", up, &shape).map(drop)
    }

    pub(crate) fn rows(&self) -> usize {
        self.offsets[self.instances()]
    }
}

/// The elements of an array of this shape in standard layout.
fn checked<'a, T, D: Dimension>(
    what: &'static str,
    array: &'a ArrayRef<T, D>,
    expected: &[usize],
) -> Result<&'a [T], Error> {
    let shape = || array.shape().to_vec();
    if array.shape() != expected {
        return Err(Error::Shape {
            what,
            got: shape(),
            expected: expected.to_vec(),
        });
    }
    let strides = || array.strides().to_vec();
    array.as_slice().ok_or_else(|| Error::Layout {
        what,
        shape: shape(),
        strides: strides(),
    })
}

pub(crate) fn check_gate(
    activation: Activation,
    given: bool,
    what: &'static str,
) -> Result<(), Error> {
    match (activation.is_gated(), given) {
        (true, false) => Err(Error::MissingGate { activation, what }),
        (false, true) => Err(Error::UnusedGate { activation, what }),
        _ => Ok(()),
    }
}

pub(crate) fn check_offsets(offsets: &[usize], rows: usize) -> Result<(), Error> {
    let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
    if first != 0 {
        return Err(Error::OffsetStart { first });
    }
    for (instance, pair) in offsets.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return Err(Error::OffsetOrder {
                instance,
                start: pair[0],
                offset: pair[1],
            });
        }
    }
    if last != rows {
        return Err(Error::OffsetEnd { last, rows });
    }
    Ok(())
}
