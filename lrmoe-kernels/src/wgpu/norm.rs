use lrmoe_metric::SquaredNorm;

use super::{Buffer, Wgpu, batch::Batch, kernel::Kernel};
use crate::{Error, FfnElement, Memory, error::check_length};

/// Rows of a workgroup.
const ROWS: usize = 8;
/// Most elements of a row that lanes go through: some drivers end loops after 2^16 rounds without a word.
const MOST_IN_ROW: usize = 1 << 18;

/// Checks that lanes can go through a row of this width.
pub(super) fn check_width(what: &'static str, width: usize) -> Result<(), Error> {
    if width <= MOST_IN_ROW {
        return Ok(());
    }
    Err(Error::TooLarge {
        what,
        bytes: 4 * width as u64,
        limit: 4 * MOST_IN_ROW as u64,
    })
}

/// Adds the norms of rows of this shape to the batch; `norms` has room for them.
pub(super) fn squared_norms<'a, T: FfnElement>(
    batch: &mut Batch<'a>,
    wgpu: &Wgpu,
    values: &'a Buffer<T>,
    [rows, width]: [usize; 2],
    norms: &'a Buffer<SquaredNorm>,
) -> Result<(), Error> {
    check_width("a row", width)?;
    let step = wgpu.per_window("a row", width.max(2))?;
    for start in (0..rows).step_by(step) {
        let end = rows.min(start + step);
        let from = wgpu.window(values, start * width..end * width);
        let to = wgpu.window(norms, start..end);
        batch.dispatch(
            Kernel::SquaredNorms,
            (end - start).div_ceil(ROWS),
            &[(end - start) as u32, width as u32, from.base, to.base],
            &[(1, from.into()), (2, to.into())],
        );
    }
    Ok(())
}

impl Wgpu {
    pub(super) fn norms_of<T: FfnElement>(
        &self,
        rows: &Buffer<T>,
        shape: [usize; 2],
        norms: &mut Buffer<SquaredNorm>,
    ) -> Result<(), Error> {
        check_length("rows", Self::len(rows), shape[0].saturating_mul(shape[1]))?;
        self.resize(norms, shape[0])?;
        let mut batch = Batch::new(self);
        squared_norms(&mut batch, self, rows, shape, norms)?;
        batch.submit()
    }
}
