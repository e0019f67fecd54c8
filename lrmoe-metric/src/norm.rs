use ndarray::ArrayView2;
use rayon::prelude::*;

use crate::Error;
use crate::error::check_length;

const LANES: usize = 32;
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY_BITS: u32 = 0x7f80_0000;
/// Exponent field of rows that hold an infinity or a NaN.
pub(crate) const NOT_FINITE: u32 = 255;

/// The squared norm of a row as a scaled f32: `|row|^2 = significand * 4^(scale - 128)`.
///
/// `scale` is the exponent field (0..=255) of the row's largest magnitude. The row times `2^(128 - scale)`, which is exact, has its
/// largest element in `[2, 4)`, so that its squares neither vanish nor overflow: for a row of D elements the significand lies in
/// `[4, 16 D)`. It is summed in 32 lanes, lane l taking elements l, l + 32, ... in ascending order; then lanes are added pairwise at
/// distance 16, 8, 4, 2, 1. Elements that are subnormal, or below `2^-62` after scaling, count as zero by an integer test, so that a
/// device may flush subnormals or not.
///
/// `scale` 0: nothing but zeros and subnormals; the significand is 0. `scale` 255: a NaN or else an infinity is in the row, and is the
/// significand.
///
/// The row's own exponent is used, not that of the layer, because the forward pass runs in chunks and has the norms of h before the
/// layer's largest exponent is known. The latter enters in [`score`](crate::score) as an exact shift.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct SquaredNorm {
    /// Sum of the squares of the scaled row.
    pub significand: f32,
    /// Exponent field of the largest magnitude.
    pub scale: u32,
}

impl SquaredNorm {
    /// The squared norm of a row.
    pub fn of(row: &[f32]) -> Self {
        Self::of_widened(row, |x| x)
    }

    /// The squared norm of a row of another type, whose elements `widen` takes to f32: exactly, or that of the rounded row.
    #[inline(always)]
    pub fn of_widened<T: Copy>(row: &[T], widen: impl Fn(T) -> f32) -> Self {
        let largest = row.iter().fold(0, |largest, &x| {
            (widen(x).to_bits() & MAGNITUDE).max(largest)
        });
        let scale = largest >> 23;
        let significand = match scale {
            NOT_FINITE if largest > INFINITY_BITS => f32::NAN,
            NOT_FINITE => f32::INFINITY,
            _ => sum_of_squares(row, widen, scale),
        };
        Self { significand, scale }
    }

    /// The squared norm; an infinity or a NaN where the row holds one.
    pub fn value(self) -> f64 {
        match self.scale {
            0 | NOT_FINITE => self.significand.into(),
            scale => f64::from(self.significand) * 4f64.powi(scale as i32 - 128),
        }
    }

    /// Whether a row can have it: scales are exponent fields, and the significand is not finite exactly where the row is not.
    pub(crate) fn is_of_a_row(self) -> bool {
        match self.scale {
            0 => self.significand == 0.0,
            NOT_FINITE => self.significand.is_nan() || self.significand == f32::INFINITY,
            scale => scale < NOT_FINITE && (0.0..f32::INFINITY).contains(&self.significand),
        }
    }

    /// The squared norm times `4^(128 - layer_scale)`, 0 below `2^-125`, for `layer_scale` at least that of any finite row.
    pub(crate) fn relative_to(self, layer_scale: u32) -> f32 {
        if self.scale == NOT_FINITE {
            return self.significand;
        }
        let bits = self.significand.to_bits();
        let shift = 2 * layer_scale.saturating_sub(self.scale);
        if bits >> 23 < shift + 2 {
            0.0
        } else {
            f32::from_bits(bits - (shift << 23))
        }
    }
}

/// Sum of the squares of `row * 2^(128 - scale)`, for scale up to 254: with 0, nothing is large enough to count.
#[inline(always)]
fn sum_of_squares<T: Copy>(row: &[T], widen: impl Fn(T) -> f32, scale: u32) -> f32 {
    let power = f32::from_bits((255 - scale) << 23);
    let least = scale.saturating_sub(63).max(1) << 23;
    let square = |x: f32| {
        let scaled = if x.to_bits() & MAGNITUDE < least {
            0.0
        } else {
            x * power
        };
        scaled * scaled
    };
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane += square(widen(x));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += square(widen(x));
    }
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}

/// The squared norm of each row of `rows` (`[n, width]`) into `out` (`[n]`), in parallel over rows.
///
/// # Errors
///
/// [`Error::Layout`], [`Error::Length`].
pub fn squared_norms(rows: ArrayView2<'_, f32>, out: &mut [SquaredNorm]) -> Result<(), Error> {
    check_length("squared norms", out.len(), rows.nrows())?;
    let width = rows.ncols();
    let rows = rows.to_slice().ok_or(Error::Layout { what: "rows" })?;
    if width == 0 {
        out.fill(SquaredNorm::default());
        return Ok(());
    }
    rows.par_chunks_exact(width)
        .zip(out)
        .with_min_len((4096 / width).max(1))
        .for_each(|(row, out)| *out = SquaredNorm::of(row));
    Ok(())
}

/// The largest `scale` of the norms, 0 if there are none.
pub fn largest_scale(norms: &[SquaredNorm]) -> u32 {
    norms.iter().map(|norm| norm.scale).max().unwrap_or(0)
}
