use lrmoe_metric::SquaredNorm;

use super::{
    Buffer, Cuda,
    kernel::{Kernel, THREADS},
};
use crate::{Error, Memory, error::check_length};

/// Threads that have a row.
const THREADS_OF_ROW: usize = 8;

impl Cuda {
    /// Norms of rows of this shape.
    pub(super) fn norms_of(
        &self,
        rows: &Buffer<f32>,
        [count, width]: [usize; 2],
        norms: &mut Buffer<SquaredNorm>,
    ) -> Result<(), Error> {
        check_length("rows", Self::len(rows), count.saturating_mul(width))?;
        self.resize(norms, count)?;
        let parameters = [
            self.address(rows)?,
            self.address(norms)?,
            count as u64,
            width as u64,
        ];
        let blocks = count.div_ceil(THREADS / THREADS_OF_ROW);
        // SAFETY: as in norm.cu; there are that many elements and norms.
        unsafe { self.launch(Kernel::SquaredNorms, blocks, &parameters) }
    }
}
