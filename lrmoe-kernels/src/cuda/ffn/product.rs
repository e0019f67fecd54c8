//! Grouped products.

use super::Pass;
use crate::{
    Error, FfnShape, Memory,
    cuda::{
        Buffer, Cuda, Products,
        gemm::{Product, Sizes, gemms},
        kernel::Kernel,
    },
    experts::Groups,
};

/// Results of a block, across and down.
const TILE: usize = 64;

/// One kind of matrix of all instances, `[instances, rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Matrices<'a> {
    buffer: &'a Buffer<f32>,
    rows: usize,
    columns: usize,
}

impl<'a> Matrices<'a> {
    /// Of the gate or up projection.
    pub(super) fn inward(buffer: &'a Buffer<f32>, shape: &FfnShape) -> Self {
        Self {
            buffer,
            rows: shape.hidden,
            columns: shape.width,
        }
    }

    /// Of the down projection.
    pub(super) fn down(buffer: &'a Buffer<f32>, shape: &FfnShape) -> Self {
        Self {
            buffer,
            rows: shape.width,
            columns: shape.hidden,
        }
    }
}

/// Which rows are whose, in the memory of the device.
#[derive(Debug, Default)]
pub(super) struct GroupTable {
    /// Per instance four 64-bit numbers, low word first: the tiles of rows before its own, where its rows begin, where they end, and whether its
    /// weight gradients are added to.
    table: Buffer<u32>,
    /// Tiles of rows of all instances.
    tiles: usize,
    /// Whether weight gradients are added to, of each instance or of none.
    accumulate: Vec<bool>,
}

impl GroupTable {
    /// Bytes of its memory.
    pub(super) fn held(&self) -> usize {
        self.table.held()
    }

    /// Nothing is added to where `accumulate` is empty.
    pub(super) fn write(
        &mut self,
        cuda: &Cuda,
        groups: &Groups<'_>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        self.tiles = 0;
        self.accumulate = accumulate.to_vec();
        let mut table = Vec::with_capacity(8 * groups.instances());
        for instance in 0..groups.instances() {
            let rows = groups.rows_of(instance..instance + 1);
            let add = self.adds_to(instance);
            for number in [self.tiles, rows.start, rows.end, add.into()] {
                table.extend([number as u32, (number as u64 >> 32) as u32]);
            }
            self.tiles += rows.len().div_ceil(TILE);
        }
        cuda.write(&table, &mut self.table)
    }

    fn adds_to(&self, instance: usize) -> bool {
        self.accumulate.get(instance).is_some_and(|&add| add)
    }
}

/// A product of a pass, with its operands.
struct Grouped<'a> {
    product: Product,
    a: &'a Buffer<f32>,
    b: &'a Buffer<f32>,
    c: &'a Buffer<f32>,
    sizes: Sizes,
    /// Whether rows of results are added to.
    accumulate: bool,
}

impl Pass<'_> {
    /// `to = from W^T` of each row's instance.
    pub(super) fn rows_by_transposed(
        &self,
        from: &Buffer<f32>,
        matrices: Matrices<'_>,
        to: &Buffer<f32>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Transposed,
            a: from,
            b: matrices.buffer,
            c: to,
            sizes: Sizes {
                m: 0,
                n: matrices.rows,
                k: matrices.columns,
            },
            accumulate: false,
        };
        // SAFETY: rows of `from` are as wide as the matrices have columns, those of `to` as they have rows.
        unsafe { self.multiply(&grouped, table) }
    }

    /// `to = from W` of each row's instance, or `to += from W`.
    pub(super) fn rows_by_matrices(
        &self,
        from: &Buffer<f32>,
        matrices: Matrices<'_>,
        to: &Buffer<f32>,
        table: &GroupTable,
        accumulate: bool,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Plain,
            a: from,
            b: matrices.buffer,
            c: to,
            sizes: Sizes {
                m: 0,
                n: matrices.columns,
                k: matrices.rows,
            },
            accumulate,
        };
        // SAFETY: rows of `from` are as wide as the matrices have rows, those of `to` as they have columns.
        unsafe { self.multiply(&grouped, table) }
    }

    /// Per instance the sum over its rows of `left^T right`, zeros where it has none; or that added, as the table says.
    pub(super) fn sum_products(
        &self,
        left: &Buffer<f32>,
        right: &Buffer<f32>,
        sums: Matrices<'_>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Sums,
            a: left,
            b: right,
            c: sums.buffer,
            sizes: Sizes {
                m: sums.rows,
                n: sums.columns,
                k: 0,
            },
            accumulate: false,
        };
        // SAFETY: rows of `left` are as wide as the matrices have rows, those of `right` as they have columns.
        unsafe { self.multiply(&grouped, table) }
    }

    /// # Safety
    ///
    /// The operands have as many elements as the product reaches by the sizes and the table: one row for each of the pass, one matrix for each
    /// instance.
    unsafe fn multiply(&self, grouped: &Grouped<'_>, table: &GroupTable) -> Result<(), Error> {
        match self.cuda.products {
            // SAFETY: as promised.
            Products::Own => unsafe { self.multiply_by_own(grouped, table) },
            // SAFETY: as promised.
            Products::CuBlas => unsafe { self.multiply_by_library(grouped, table) },
        }
    }

    /// # Safety
    ///
    /// As for [`multiply`](Self::multiply).
    unsafe fn multiply_by_own(
        &self,
        grouped: &Grouped<'_>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let cuda = self.cuda;
        let Sizes { m, n, k } = grouped.sizes;
        let across = n.div_ceil(TILE);
        let (kernel, blocks) = match grouped.product {
            Product::Transposed => (Kernel::Project, table.tiles * across),
            Product::Plain => (Kernel::ProjectBack, table.tiles * across),
            Product::Sums => (
                Kernel::WeightGradients,
                self.groups.instances() * m.div_ceil(TILE) * across,
            ),
        };
        let parameters = [
            cuda.address(grouped.a)?,
            cuda.address(grouped.b)?,
            cuda.address(grouped.c)?,
            cuda.address(&table.table)?,
            self.groups.instances() as u64,
            m as u64,
            n as u64,
            k as u64,
            grouped.accumulate.into(),
        ];
        // SAFETY: as promised; the parameters are those of product.cu.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }

    /// # Safety
    ///
    /// As for [`multiply`](Self::multiply).
    unsafe fn multiply_by_library(
        &self,
        grouped: &Grouped<'_>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let cuda = self.cuda;
        let (a, b, c) = (
            cuda.address(grouped.a)?,
            cuda.address(grouped.b)?,
            cuda.address(grouped.c)?,
        );
        let sums = grouped.product == Product::Sums;
        let adds = |instance| match sums {
            true => table.adds_to(instance),
            false => grouped.accumulate,
        };
        if sums {
            let bytes = 4 * grouped.sizes.m * grouped.sizes.n;
            for instance in 0..self.groups.instances() {
                let rows = self.groups.rows_of(instance..instance + 1);
                if rows.is_empty() && !adds(instance) {
                    // SAFETY: there is a matrix for each instance.
                    unsafe { cuda.clear_bytes(c + (instance * bytes) as u64, bytes) }?;
                }
            }
        }
        let products = gemms(
            grouped.product,
            &self.groups,
            [a, b, c],
            grouped.sizes,
            adds,
        );
        if products.is_empty() {
            return Ok(());
        }
        // SAFETY: as promised; instances share no rows and no matrices.
        unsafe { cuda.shared.driver.multiply(&products) }
    }
}
