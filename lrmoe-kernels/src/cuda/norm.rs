use lrmoe_metric::SquaredNorm;

use super::{
    Buffer, Cuda,
    buffer::is_bf16,
    kernel::{Kernel, THREADS},
};
use crate::{Error, FfnElement, Memory, error::check_length};

impl Cuda {
    /// Norms of rows of this shape.
    pub(super) fn norms_of<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
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
        let (kernel, threads_of_row) = if is_bf16::<T>() {
            (Kernel::SquaredNormsBf16, 4)
        } else {
            (Kernel::SquaredNorms, 8)
        };
        let blocks = count.div_ceil(THREADS / threads_of_row);
        // SAFETY: as in norm.cu; there are that many elements and norms.
        unsafe { self.launch(kernel, blocks, &parameters) }
    }
}
