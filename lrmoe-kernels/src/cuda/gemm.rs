//! Products as cuBLAS takes them, for those who would rather have its kernels than those of this crate.

use crate::experts::Groups;

/// What multiplies the experts' rows and matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// The kernels of this crate, whose results for a row do not depend on the other rows, to the bit.
    #[default]
    Own,
    /// The grouped products of cuBLAS 12.5 or later. It promises no order of sums: what a row gives may change with the number of rows of its
    /// instance, and a pass in parts need not give the bits of one. Those of f32 only: products of bf16 are always [`Own`](Self::Own).
    CuBlas,
}

/// `c = op(a) op(b) + beta c` of matrices in column-major order, where `op` transposes or not; `op(a)` is `[m, k]`, `op(b)` `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gemm {
    /// Of a and b.
    pub(super) transposed: [bool; 2],
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Where a, b and c begin.
    pub(super) at: [u64; 3],
    /// Elements from one column of a, b and c to the next.
    pub(super) columns_apart: [usize; 3],
    pub(super) beta: f32,
}

/// The grouped products of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// `c[row, n] = sum over k of a[row, k] b[instance, n, k]`.
    Transposed,
    /// `c[row, n] = sum over k of a[row, k] b[instance, k, n]`, or that added.
    Plain,
    /// `c[instance, m, n] = sum over rows of a[row, m] b[row, n]`, or that added.
    Sums,
}

/// Sizes of a grouped product, each 0 where it means nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// The products of the instances that have rows. Matrices in row-major order are their transposes in column-major order, so that each product is
/// written as that of the transposes, in the other order.
///
/// `adds` says of each instance whether its results are added to what is there.
pub(super) fn gemms(
    product: Product,
    groups: &Groups<'_>,
    [a, b, c]: [u64; 3],
    Sizes { m, n, k }: Sizes,
    adds: impl Fn(usize) -> bool,
) -> Vec<Gemm> {
    let after = |at: u64, elements: usize| at + 4 * elements as u64;
    let of_instance = |instance| {
        let rows = groups.rows_of(instance..instance + 1);
        let beta = if adds(instance) { 1.0 } else { 0.0 };
        match product {
            Product::Transposed | Product::Plain => Gemm {
                transposed: [product == Product::Transposed, false],
                m: n,
                n: rows.len(),
                k,
                at: [
                    after(b, instance * n * k),
                    after(a, rows.start * k),
                    after(c, rows.start * n),
                ],
                columns_apart: [if product == Product::Transposed { k } else { n }, k, n],
                beta,
            },
            Product::Sums => Gemm {
                transposed: [false, true],
                m: n,
                n: m,
                k: rows.len(),
                at: [
                    after(b, rows.start * n),
                    after(a, rows.start * m),
                    after(c, instance * m * n),
                ],
                columns_apart: [n, m, n],
                beta,
            },
        }
    };
    let with_rows = |&instance: &usize| !groups.rows_of(instance..instance + 1).is_empty();
    (0..groups.instances())
        .filter(with_rows)
        .map(of_instance)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Cpu, ExpertBuffers, FfnShape, Memory};

    /// Three instances, the second without rows, D = 2, F = 3; addresses are those of element 0 in made-up places.
    #[test]
    fn matrices_are_described_as_columns() {
        let shape = FfnShape {
            width: 2,
            hidden: 3,
            activation: Activation::Relu2,
        };
        let zeros = |len: usize| Cpu.upload(&vec![0.0_f32; len]).unwrap();
        let weights = ExpertBuffers::<Cpu> {
            gate: None,
            up: zeros(18),
            down: zeros(18),
        };
        let x = zeros(10);
        let groups = Groups::new(&shape, &weights, &[0, 4, 4, 5], &x).unwrap();
        let (a, b, c) = (1000, 2000, 3000);
        let of =
            |product, m, n, k| gemms(product, &groups, [a, b, c], Sizes { m, n, k }, |i| i == 2);
        // Rows of 2 times matrices [3, 2] transposed.
        let last = Gemm {
            transposed: [true, false],
            m: 3,
            n: 1,
            k: 2,
            at: [b + 4 * 12, a + 4 * 8, c + 4 * 12],
            columns_apart: [2, 2, 3],
            beta: 1.0,
        };
        let found = of(Product::Transposed, 0, 3, 2);
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            Gemm {
                n: 4,
                at: [b, a, c],
                beta: 0.0,
                ..last
            }
        );
        assert_eq!(found[1], last);
        // Rows of 3 times matrices [3, 2].
        let found = of(Product::Plain, 0, 2, 3);
        let last = Gemm {
            transposed: [false, false],
            m: 2,
            n: 1,
            k: 3,
            at: [b + 4 * 12, a + 4 * 12, c + 4 * 8],
            columns_apart: [2, 3, 2],
            beta: 1.0,
        };
        assert_eq!(
            found,
            [
                Gemm {
                    n: 4,
                    at: [b, a, c],
                    beta: 0.0,
                    ..last
                },
                last
            ]
        );
        // Sums of [3, 2] from rows of 3 and rows of 2.
        let found = of(Product::Sums, 3, 2, 0);
        let last = Gemm {
            transposed: [false, true],
            m: 2,
            n: 3,
            k: 1,
            at: [b + 4 * 8, a + 4 * 12, c + 4 * 12],
            columns_apart: [2, 3, 2],
            beta: 1.0,
        };
        assert_eq!(
            found,
            [
                Gemm {
                    k: 4,
                    at: [b, a, c],
                    beta: 0.0,
                    ..last
                },
                last
            ]
        );
    }
}
