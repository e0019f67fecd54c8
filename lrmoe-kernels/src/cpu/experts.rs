use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView3, ArrayViewMut3};

use super::{
    Cpu, HostBuffer, Workspace,
    forward::{Outputs, Stash, forward},
    gradient_norms::gradient_norms,
    pack::RowPlaces,
    rows, rows_mut,
};
use crate::{
    BackwardRows, ComputeExperts, Error, ExpertBuffers, ExpertFfn, FfnElement, FfnShape,
    HiddenSums, Memory, PreActivationBuffers, PreActivations, PreActivationsMut, RowBuffers,
    RowIndex, StashFfn, WeightGradients, Weights,
    compact::{check_order, first_descent},
    experts::Groups,
    ffn::Experts,
};

impl<T: FfnElement> ComputeExperts<T> for Cpu {
    type Scratch = Workspace;

    fn scratch_bytes(scratch: &Workspace) -> usize {
        scratch.bytes()
    }

    fn sum_hidden(scratch: &mut Workspace, wanted: bool) -> Result<(), Error> {
        scratch.sum_hidden(wanted);
        Ok(())
    }

    fn hidden_sums(scratch: &Workspace) -> Option<&HiddenSums> {
        scratch.hidden_sums()
    }

    fn forward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        x: &HostBuffer<T>,
        scratch: &mut Workspace,
        out: &mut HostBuffer<T>,
        mut h_norms: Option<&mut HostBuffer<SquaredNorm>>,
        kept: Option<&mut PreActivationBuffers<Self, T>>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        let of_rows = [groups.rows(), shape.width];
        self.resize(out, of_rows[0] * of_rows[1])?;
        if let Some(norms) = &mut h_norms {
            self.resize(norms, groups.rows())?;
        }
        let (weights, x) = (views(&groups, weights)?, rows("x", x, of_rows)?);
        let out = rows_mut("out", out, of_rows)?;
        let h_norms = h_norms.map(|norms| &mut **norms);
        let Some(kept) = kept else {
            return ExpertFfn::forward(self, shape, &weights, offsets, x, scratch, out, h_norms);
        };
        kept.resize(self, shape, groups.rows())?;
        let of_hidden = [groups.rows(), shape.hidden];
        let PreActivationBuffers { gate, up } = kept;
        let gate = (shape.activation.is_gated())
            .then(|| rows_mut("gate pre-activations", gate, of_hidden));
        let kept = PreActivationsMut {
            gate: gate.transpose()?,
            up: rows_mut("up pre-activations", up, of_hidden)?,
        };
        self.forward_stash(shape, &weights, offsets, x, scratch, out, h_norms, kept)
    }

    fn forward_chosen(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        x: &HostBuffer<T>,
        scratch: &mut Workspace,
        out: &mut HostBuffer<T>,
        mut h_norms: Option<&mut HostBuffer<SquaredNorm>>,
        [index, places]: [&RowIndex<Self>; 2],
        [_, kept]: [&mut PreActivationBuffers<Self, T>; 2],
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, x)?;
        groups.check_chosen([index, places], kept)?;
        if let Some((position, [before, row])) = first_descent(&index.index) {
            return Err(Error::RowOrder {
                position,
                row,
                before,
            });
        }
        check_order(&places.index)?;
        let of_rows = [groups.rows(), shape.width];
        self.resize(out, of_rows[0] * of_rows[1])?;
        if let Some(norms) = &mut h_norms {
            self.resize(norms, groups.rows())?;
        }
        let (weights, x) = (views(&groups, weights)?, rows("x", x, of_rows)?);
        let experts = Experts::new(shape, &weights, offsets, &x)?;
        let PreActivationBuffers { gate, up } = kept;
        let outputs = Outputs {
            out: rows_mut("out", out, of_rows)?,
            h_norms: h_norms.map(|norms| &mut **norms),
            stash: Some(Stash {
                matrices: [
                    shape.activation.is_gated().then_some(&mut **gate),
                    Some(&mut **up),
                ],
                chosen: Some(RowPlaces {
                    rows: &index.index,
                    places: &places.index,
                    before: 0,
                }),
            }),
        };
        forward(&experts, x, scratch, outputs)
    }

    fn backward(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        inputs: &RowBuffers<'_, Self, T>,
        kept: Option<&mut PreActivationBuffers<Self, T>>,
        scratch: &mut Workspace,
        dx: &mut HostBuffer<T>,
        dp: &mut HostBuffer<f32>,
        gradients: &mut ExpertBuffers<Self>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, inputs.x)?;
        groups.check_backward(inputs, kept.as_deref(), gradients, accumulate)?;
        let of_rows = [groups.rows(), shape.width];
        self.resize(dx, of_rows[0] * of_rows[1])?;
        self.resize(dp, groups.rows())?;
        for matrices in [&mut gradients.up, &mut gradients.down]
            .into_iter()
            .chain(&mut gradients.gate)
        {
            self.resize(matrices, groups.matrices())?;
        }
        let weights = &views(&groups, weights)?;
        let inputs = &BackwardRows {
            x: rows("x", inputs.x, of_rows)?,
            dy: rows("dy", inputs.dy, of_rows)?,
            gate_weights: inputs.gate_weights,
            weights: inputs.weights,
        };
        let dx = rows_mut("dx", dx, of_rows)?;
        let gradients = &mut views_mut(&groups, gradients)?;
        let Some(PreActivationBuffers { gate, up }) = kept else {
            return ExpertFfn::backward(
                self, shape, weights, offsets, inputs, scratch, dx, dp, gradients, accumulate,
            );
        };
        let of_hidden = [groups.rows(), shape.hidden];
        let gate =
            (shape.activation.is_gated()).then(|| rows("gate pre-activations", gate, of_hidden));
        let kept = PreActivations {
            gate: gate.transpose()?,
            up: rows("up pre-activations", up, of_hidden)?,
        };
        self.backward_stash(
            shape, weights, offsets, inputs, &kept, scratch, dx, dp, gradients, accumulate,
        )
    }

    fn gradient_norms(
        &self,
        shape: &FfnShape,
        weights: &ExpertBuffers<Self, T>,
        offsets: &[usize],
        inputs: &RowBuffers<'_, Self, T>,
        norms: &mut HostBuffer<f32>,
    ) -> Result<(), Error> {
        let groups = Groups::new(shape, weights, offsets, inputs.x)?;
        groups.check_rows(inputs)?;
        self.resize(norms, groups.rows())?;
        let of_rows = [groups.rows(), shape.width];
        let inputs = BackwardRows {
            x: rows("x", inputs.x, of_rows)?,
            dy: rows("dy", inputs.dy, of_rows)?,
            gate_weights: inputs.gate_weights,
            weights: inputs.weights,
        };
        let weights = views(&groups, weights)?;
        let experts = Experts::new(shape, &weights, offsets, &inputs.x)?;
        gradient_norms(&experts, &inputs, norms);
        Ok(())
    }
}

fn views<'a, T: FfnElement>(
    groups: &Groups<'_>,
    buffers: &'a ExpertBuffers<Cpu, T>,
) -> Result<Weights<'a, T>, Error> {
    let ([inward, outward], instances) = (shapes(groups), groups.instances());
    let view = |what, values: &'a HostBuffer<T>, [rows, columns]: [usize; 2]| {
        ArrayView3::from_shape((instances, rows, columns), values)
            .map_err(|_| wrong(what, values.len(), [instances, rows, columns]))
    };
    let gate = buffers.gate.as_ref();
    Ok(Weights {
        gate: gate
            .map(|gate| view("gate weights", gate, inward))
            .transpose()?,
        up: view("up weights", &buffers.up, inward)?,
        down: view("down weights", &buffers.down, outward)?,
    })
}

fn views_mut<'a>(
    groups: &Groups<'_>,
    buffers: &'a mut ExpertBuffers<Cpu>,
) -> Result<WeightGradients<'a>, Error> {
    let ([inward, outward], instances) = (shapes(groups), groups.instances());
    let view = |what, values: &'a mut HostBuffer<f32>, [rows, columns]: [usize; 2]| {
        let got = values.len();
        ArrayViewMut3::from_shape((instances, rows, columns), values)
            .map_err(|_| wrong(what, got, [instances, rows, columns]))
    };
    let gate = buffers.gate.as_mut();
    Ok(WeightGradients {
        gate: gate
            .map(|gate| view("gate gradients", gate, inward))
            .transpose()?,
        up: view("up gradients", &mut buffers.up, inward)?,
        down: view("down gradients", &mut buffers.down, outward)?,
    })
}

/// Of gate and up, and of down.
fn shapes(groups: &Groups<'_>) -> [[usize; 2]; 2] {
    let (width, hidden) = (groups.shape.width, groups.shape.hidden);
    [[hidden, width], [width, hidden]]
}

fn wrong(what: &'static str, got: usize, expected: [usize; 3]) -> Error {
    Error::Shape {
        what,
        got: vec![got],
        expected: expected.to_vec(),
    }
}
