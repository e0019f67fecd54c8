use lrmoe_metric::Method;

use super::{Buffer, Pairs, Scores, Wgpu, batch::Batch, kernel::Kernel};
use crate::{Error, KeptKeys, Memory};

/// Threads of a workgroup.
const THREADS: usize = 256;

impl Wgpu {
    /// Weights of kept pairs.
    pub(super) fn weights(
        &self,
        method: Method,
        pairs: &Pairs,
        scores: &Scores,
        kept: &KeptKeys<Self>,
    ) -> Result<Buffer<f32>, Error> {
        let len = Self::len(&kept.pairs);
        let weighted = method == Method::Priority;
        let mut weights = Buffer::default();
        self.resize(&mut weights, len)?;
        let next = self.whole("a key for each expert", &kept.next)?;
        let mut batch = Batch::new(self);
        // Without weights no pair is looked at.
        let of_pairs = if weighted { pairs.len() } else { len.min(1) };
        for written in self.pair_ranges(len)? {
            for range in self.pair_ranges(of_pairs)? {
                let from = self.window(&kept.pairs, written.clone());
                let ids = self.window(&pairs.ids, range.clone());
                let squared = self.window(&scores.squared, range.clone());
                let to = self.window(&weights, written.clone());
                let parameters = [
                    written.len() as u32,
                    weighted.into(),
                    range.start as u32,
                    range.end as u32,
                    from.base,
                    ids.base,
                    squared.base,
                    to.base,
                ];
                let windows = [(1, from), (2, ids), (3, squared), (4, next), (5, to)];
                let bindings = windows.map(|(number, window)| (number, window.into()));
                let groups = written.len().div_ceil(THREADS);
                batch.dispatch(Kernel::SelectionWeights, groups, &parameters, &bindings);
            }
        }
        batch.submit()?;
        Ok(weights)
    }
}
