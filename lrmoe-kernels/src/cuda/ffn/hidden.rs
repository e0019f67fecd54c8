//! What is done to hidden rows, element by element or row by row.

use super::{Pass, Scratch};
use crate::{
    Activation, Error, RowBuffers,
    cuda::{
        Buffer, Cuda,
        kernel::{Kernel, LANES, THREADS},
    },
};

/// Elements of a block that activates.
const ELEMENTS: usize = 4 * THREADS;
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
    pub(super) fn activate(&self, scratch: &Scratch) -> Result<(), Error> {
        let elements = self.groups.rows() * self.groups.shape.hidden;
        let blocks = elements.div_ceil(ELEMENTS);
        self.launch_on_hidden(Kernel::Activate, blocks, scratch, &OfRows::default())
    }

    /// Turns pre-activations and the gradients of hidden rows into the gradients of pre-activations, hidden rows times w p, and dp.
    pub(super) fn differentiate(
        &self,
        inputs: &RowBuffers<'_, Cuda>,
        scratch: &Scratch,
        dp: &Buffer<f32>,
    ) -> Result<(), Error> {
        let of_rows = OfRows {
            p: Some(inputs.gate_weights),
            w: Some(inputs.weights),
            dp: Some(dp),
        };
        let blocks = self.groups.rows().div_ceil(ROWS);
        self.launch_on_hidden(Kernel::Differentiate, blocks, scratch, &of_rows)
    }

    /// Multiplies rows of up and gate by a weight each.
    pub(super) fn scale(&self, weights: &Buffer<f32>, scratch: &Scratch) -> Result<(), Error> {
        let of_rows = OfRows {
            w: Some(weights),
            ..OfRows::default()
        };
        let blocks = self.groups.rows().div_ceil(ROWS);
        self.launch_on_hidden(Kernel::ScaleRows, blocks, scratch, &of_rows)
    }

    fn launch_on_hidden(
        &self,
        kernel: Kernel,
        blocks: usize,
        scratch: &Scratch,
        of_rows: &OfRows<'_>,
    ) -> Result<(), Error> {
        let (cuda, shape) = (self.cuda, &self.groups.shape);
        let address =
            |values: Option<&Buffer<f32>>| values.map_or(Ok(0), |values| cuda.address(values));
        let activation = Activation::ALL
            .iter()
            .position(|&other| other == shape.activation);
        let parameters = [
            cuda.address(&scratch.gate)?,
            cuda.address(&scratch.up)?,
            cuda.address(&scratch.dh)?,
            address(of_rows.p)?,
            address(of_rows.w)?,
            address(of_rows.dp)?,
            activation.unwrap_or_default() as u64,
            self.groups.rows() as u64,
            shape.hidden as u64,
        ];
        // SAFETY: as in activation.cu; the scratch has room for all hidden rows, gate only where there is one, and what is known of rows is checked
        // to be of as many.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }
}
