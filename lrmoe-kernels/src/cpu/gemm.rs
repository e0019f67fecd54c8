use gemm::Parallelism;
use ndarray::{ArrayView2, ArrayViewMut2, s};

/// The longest sum over k that `gemm` never cuts in two, whatever the other sizes and the caches are.
const PANEL: usize = 512;

/// `dst = a b`, or `dst += a b`, `[m, k] [k, n] -> [m, n]`, on the calling thread. `dst` and `b` are contiguous.
///
/// An element of the result depends, to the bit, on its row of `a`, its column of `b` and k alone: not on m, nor on n
/// as long as n > 1. That takes care, as `gemm` 0.19 chooses its order of summation by size:
/// - sums of more than [`PANEL`] terms are cut by m, n and the cache sizes: here they are cut before, evenly;
/// - a product with m or n = 1 goes to kernels of its own: here to a plain loop;
/// - so does one with m n <= 256 where `a` and `b` are both contiguous along k: here `b` is not, as its rows lie
///   n > 1 apart.
///
/// What is left is one chain of (fused) multiply-adds in ascending k for each element of a panel.
pub(super) fn multiply(
    mut dst: ArrayViewMut2<'_, f32>,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    add: bool,
) {
    let k = a.ncols();
    let step = k.div_ceil(k.div_ceil(PANEL).max(1)).max(1);
    if !add && k == 0 {
        dst.fill(0.0);
    }
    for from in (0..k).step_by(step) {
        let to = k.min(from + step);
        let (a, b) = (a.slice(s![.., from..to]), b.slice(s![from..to, ..]));
        multiply_panel(dst.view_mut(), a, b, add || from > 0);
    }
}

fn multiply_panel(
    mut dst: ArrayViewMut2<'_, f32>,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    add: bool,
) {
    let ((m, k), n) = (a.dim(), b.ncols());
    assert_eq!(dst.dim(), (m, n), "shape of a product");
    assert_eq!(b.nrows(), k, "terms of a product");
    assert!(
        dst.is_standard_layout() && b.is_standard_layout(),
        "contiguous rows"
    );
    if m == 1 || n == 1 {
        if !add {
            dst.fill(0.0);
        }
        for (mut dst, a) in dst.rows_mut().into_iter().zip(a.rows()) {
            for (&a, b) in a.iter().zip(b.rows()) {
                dst.scaled_add(a, &b);
            }
        }
        return;
    }
    let (a_strides, b_strides) = (a.strides(), b.strides());
    let (dst_rows, dst_columns) = (dst.strides()[0], dst.strides()[1]);
    // SAFETY: the pointers and strides are those of live views of shapes [m, n], [m, k] and [k, n], as asserted above, so
    // every element that gemm reaches lies in its view. `dst` is borrowed mutably, so it overlaps neither operand and
    // its own elements are distinct. All elements are initialised f32.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            dst_columns,
            dst_rows,
            add,
            a.as_ptr(),
            a_strides[1],
            a_strides[0],
            b.as_ptr(),
            b_strides[1],
            b_strides[0],
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
