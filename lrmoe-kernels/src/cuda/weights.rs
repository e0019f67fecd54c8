use lrmoe_metric::Method;

use super::{
    Buffer, Cuda, Pairs, Scores,
    kernel::{Kernel, THREADS},
};
use crate::{Error, KeptKeys, Memory};

impl Cuda {
    /// Weights of kept pairs.
    pub(super) fn weights(
        &self,
        method: Method,
        pairs: &Pairs,
        scores: &Scores,
        kept: &KeptKeys<Self>,
    ) -> Result<Buffer<f32>, Error> {
        let len = Self::len(&kept.pairs);
        let mut weights = Buffer::default();
        self.resize(&mut weights, len)?;
        let parameters = [
            self.address(&kept.pairs)?,
            self.address(&pairs.ids)?,
            self.address(&scores.squared)?,
            self.address(&kept.next)?,
            self.address(&weights)?,
            len as u64,
            (method == Method::Priority).into(),
        ];
        let blocks = len.div_ceil(THREADS);
        // SAFETY: as in weights.cu; the kept pairs are among `pairs`, each of which has a score, and every expert has a key that follows.
        unsafe { self.launch(Kernel::SelectionWeights, blocks, &parameters) }?;
        Ok(weights)
    }
}
