//! What is done to hidden rows, element by element or row by row.

use std::ops::Range;

use super::{Hidden, Pass};
use crate::{
    Activation, Error, RowBuffers,
    wgpu::{Buffer, Wgpu, buffer::Window, kernel::Kernel, norm::check_width},
};

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Rows of a workgroup that differentiates.
const ROWS: usize = 8;

impl<'a> Pass<'a> {
    /// Turns pre-activations into hidden rows.
    pub(super) fn activate(&mut self, of_rows: Hidden<'a>) -> Result<(), Error> {
        let hidden = self.groups.shape.hidden;
        for rows in self.row_ranges()? {
            let elements = rows.start * hidden..rows.end * hidden;
            let gate = self.gate(of_rows.gate, elements.clone());
            let up = self.wgpu.window(of_rows.up, elements);
            let parameters = self.parameters(&rows, [gate.base, up.base, 0, 0, 0, 0]);
            let bindings = [(1, gate.into()), (2, up.into())];
            let groups = (rows.len() * hidden).div_ceil(THREADS);
            self.batch
                .dispatch(Kernel::Activate, groups, &parameters, &bindings);
        }
        Ok(())
    }

    /// Turns pre-activations and the gradients of hidden rows into the gradients of pre-activations, hidden rows times w p, and dp.
    pub(super) fn differentiate(
        &mut self,
        inputs: &RowBuffers<'a, Wgpu>,
        of_rows: Hidden<'a>,
        dp: &'a Buffer<f32>,
    ) -> Result<(), Error> {
        let (wgpu, hidden) = (self.wgpu, self.groups.shape.hidden);
        check_width("a hidden row", hidden)?;
        for rows in self.row_ranges()? {
            let elements = rows.start * hidden..rows.end * hidden;
            let gate = self.gate(of_rows.gate, elements.clone());
            let up = wgpu.window(of_rows.up, elements.clone());
            let dh = wgpu.window(of_rows.dh, elements);
            let p = wgpu.window(inputs.gate_weights, rows.clone());
            let w = wgpu.window(inputs.weights, rows.clone());
            let dp = wgpu.window(dp, rows.clone());
            let windows = [(1, gate), (2, up), (3, dh), (4, p), (5, w), (6, dp)];
            let bases = windows.map(|(_, window)| window.base);
            let parameters = self.parameters(&rows, bases);
            let bindings = windows.map(|(number, window)| (number, window.into()));
            let groups = rows.len().div_ceil(ROWS);
            self.batch
                .dispatch(Kernel::Differentiate, groups, &parameters, &bindings);
        }
        Ok(())
    }

    /// Multiplies hidden rows by a weight each.
    pub(super) fn scale(
        &mut self,
        rows_of: &'a Buffer<f32>,
        weights: &'a Buffer<f32>,
    ) -> Result<(), Error> {
        let hidden = self.groups.shape.hidden;
        for rows in self.row_ranges()? {
            let of_rows = self
                .wgpu
                .window(rows_of, rows.start * hidden..rows.end * hidden);
            let w = self.wgpu.window(weights, rows.clone());
            let parameters = self.parameters(&rows, [0, of_rows.base, 0, 0, w.base, 0]);
            let bindings = [(2, of_rows.into()), (5, w.into())];
            let groups = (rows.len() * hidden).div_ceil(THREADS);
            self.batch
                .dispatch(Kernel::ScaleRows, groups, &parameters, &bindings);
        }
        Ok(())
    }

    fn gate(&self, gate: &'a Buffer<f32>, elements: Range<usize>) -> Window<'a> {
        if self.groups.shape.activation.is_gated() {
            self.wgpu.window(gate, elements)
        } else {
            Window::NOTHING
        }
    }

    /// Rows that fit in a binding.
    fn row_ranges(&self) -> Result<impl Iterator<Item = Range<usize>> + use<>, Error> {
        let step = self
            .wgpu
            .per_window("a hidden row", self.groups.shape.hidden)?;
        let rows = self.groups.rows();
        Ok((0..rows)
            .step_by(step)
            .map(move |start| start..rows.min(start + step)))
    }

    /// As in activation.wgsl; bases of gate, up, dh, p, w and dp.
    fn parameters(&self, rows: &Range<usize>, bases: [u32; 6]) -> Vec<u32> {
        let shape = &self.groups.shape;
        let activation = Activation::ALL
            .iter()
            .position(|&other| other == shape.activation);
        let mut parameters = vec![
            activation.unwrap_or_default() as u32,
            rows.len() as u32,
            shape.hidden as u32,
        ];
        parameters.extend(bases);
        parameters
    }
}
