//! Two ops for candle over `lrmoe-compact`: rows of tokens to rows of pairs, and back by adding up. Each is the transpose of the other, and
//! so its backward pass.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Tensor};
use lrmoe_compact::{ArrayView2, ArrayViewMut2, ScatterAdd, gather};

/// The pairs (token, slot) of a batch in the order of their experts.
pub struct ByExpert {
    /// Pair ids `token * top_k + slot`, those of expert 0 first; ascending within an expert.
    pub pairs: Vec<u32>,
    /// The pairs of expert e are `pairs[offsets[e]..offsets[e + 1]]`.
    pub offsets: Vec<usize>,
    tokens_of_pairs: Vec<u32>,
    tokens: usize,
    top_k: usize,
}

impl ByExpert {
    /// Orders the pairs of `expert_ids` (`[tokens * top_k]`).
    pub fn new(expert_ids: &[u32], top_k: usize, experts: usize) -> Self {
        let mut pairs: Vec<u32> = (0..expert_ids.len() as u32).collect();
        pairs.sort_by_key(|&pair| expert_ids[pair as usize]);
        let end = |expert| pairs.partition_point(|&pair| expert_ids[pair as usize] < expert);
        Self {
            offsets: (0..=experts as u32).map(end).collect(),
            tokens_of_pairs: pairs.iter().map(|pair| pair / top_k as u32).collect(),
            tokens: expert_ids.len() / top_k,
            top_k,
            pairs,
        }
    }
}

/// `[tokens, width]` to `[pairs, width]`: the row of its token for every pair.
pub struct Dispatch(pub Arc<ByExpert>);

/// `[pairs, width]` to `[tokens, width]`: the sum of its pairs' rows for every token, always in the order of the slots, so that a run repeats
/// to the bit with any number of threads.
pub struct Combine(pub Arc<ByExpert>);

impl CustomOp1 for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = view(x, layout, self.name())?;
        let shape = (self.0.pairs.len(), x.ncols());
        let mut rows = vec![0.0; shape.0 * shape.1];
        gather(x, &self.0.tokens_of_pairs, view_mut(&mut rows, shape)?).map_err(Error::wrap)?;
        Ok((CpuStorage::F32(rows), shape.into()))
    }

    fn bwd(&self, _x: &Tensor, _rows: &Tensor, d_rows: &Tensor) -> Result<Option<Tensor>> {
        let dx = d_rows.contiguous()?.apply_op1(Combine(self.0.clone()))?;
        Ok(Some(dx))
    }
}

impl CustomOp1 for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn cpu_fwd(&self, rows: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let order = &self.0;
        let rows = view(rows, layout, self.name())?;
        let shape = (order.tokens, rows.ncols());
        let mut y = vec![0.0; shape.0 * shape.1];
        ScatterAdd::new()
            .add(
                rows,
                &order.pairs,
                None,
                order.top_k,
                view_mut(&mut y, shape)?,
            )
            .map_err(Error::wrap)?;
        Ok((CpuStorage::F32(y), shape.into()))
    }

    fn bwd(&self, _rows: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let d_rows = dy.contiguous()?.apply_op1(Dispatch(self.0.clone()))?;
        Ok(Some(d_rows))
    }
}

/// The memory of a contiguous tensor as the crate takes it: no copy.
fn view<'a>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<ArrayView2<'a, f32>> {
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or(Error::RequiresContiguous { op })?;
    let values = &storage.as_slice::<f32>()?[start..end];
    ArrayView2::from_shape(layout.shape().dims2()?, values).map_err(Error::wrap)
}

fn view_mut(values: &mut [f32], shape: (usize, usize)) -> Result<ArrayViewMut2<'_, f32>> {
    ArrayViewMut2::from_shape(shape, values).map_err(Error::wrap)
}
