//! What is done to hidden rows, element by element or row by row.

use super::{Hidden, Pass};
use crate::{
    Activation, Error, FfnElement, RowBuffers,
    cuda::{
        Buffer, Cuda,
        buffer::{bytes_of, is_bf16},
        kernel::{Kernel, LANES, THREADS},
    },
};

/// Bytes of hidden rows that a thread activates.
const PIECE: usize = 16;
/// Rows of a block where a warp has one.
const ROWS: usize = THREADS / LANES;

/// What is known of each row, where a kernel needs it.
#[derive(Default)]
struct OfRows<'a> {
    p: Option<&'a Buffer<f32>>,
    w: Option<&'a Buffer<f32>>,
    dp: Option<&'a Buffer<f32>>,
}

impl Pass<'_> {
    /// Turns pre-activations into hidden rows.
    pub(super) fn activate<T: FfnElement>(&self, hidden: Hidden<'_, T>) -> Result<(), Error> {
        let elements = self.groups.rows() * self.groups.shape.hidden;
        let blocks = elements.div_ceil(PIECE / bytes_of::<T>() * THREADS);
        let kernels = [Kernel::Activate, Kernel::ActivateBf16];
        self.launch_on_hidden(kernels, blocks, hidden, &OfRows::default())
    }

    /// Turns pre-activations and the gradients of hidden rows into the gradients of pre-activations, hidden rows times w p, and dp.
    pub(super) fn differentiate<T: FfnElement>(
        &self,
        inputs: &RowBuffers<'_, Cuda, T>,
        hidden: Hidden<'_, T>,
        dp: &Buffer<f32>,
    ) -> Result<(), Error> {
        let of_rows = OfRows {
            p: Some(inputs.gate_weights),
            w: Some(inputs.weights),
            dp: Some(dp),
        };
        let blocks = self.groups.rows().div_ceil(ROWS);
        let kernels = [Kernel::Differentiate, Kernel::DifferentiateBf16];
        self.launch_on_hidden(kernels, blocks, hidden, &of_rows)
    }

    /// Multiplies rows of up and gate by a weight each.
    pub(super) fn scale<T: FfnElement>(
        &self,
        weights: &Buffer<f32>,
        hidden: Hidden<'_, T>,
    ) -> Result<(), Error> {
        let of_rows = OfRows {
            w: Some(weights),
            ..OfRows::default()
        };
        let blocks = self.groups.rows().div_ceil(ROWS);
        let kernels = [Kernel::ScaleRows, Kernel::ScaleRowsBf16];
        self.launch_on_hidden(kernels, blocks, hidden, &of_rows)
    }

    /// `kernels` are that of f32 and that of bf16.
    fn launch_on_hidden<T: FfnElement>(
        &self,
        [of_f32, of_bf16]: [Kernel; 2],
        blocks: usize,
        hidden: Hidden<'_, T>,
        of_rows: &OfRows<'_>,
    ) -> Result<(), Error> {
        let (cuda, shape) = (self.cuda, &self.groups.shape);
        let address =
            |values: Option<&Buffer<f32>>| values.map_or(Ok(0), |values| cuda.address(values));
        let activation = Activation::ALL
            .iter()
            .position(|&other| other == shape.activation);
        let parameters = [
            cuda.address(hidden.gate)?,
            cuda.address(hidden.up)?,
            cuda.address(hidden.dh)?,
            address(of_rows.p)?,
            address(of_rows.w)?,
            address(of_rows.dp)?,
            activation.unwrap_or_default() as u64,
            self.groups.rows() as u64,
            shape.hidden as u64,
        ];
        let kernel = if is_bf16::<T>() { of_bf16 } else { of_f32 };
        // SAFETY: as in activation.cu, by the kernel of the element; there is room for all hidden rows, gate only where there is one, and what is
        // known of rows is checked to be of as many.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }
}
