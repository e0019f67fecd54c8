//! Grouped products.

use super::Pass;
use crate::{
    Element, Error, FfnElement, FfnShape, Memory,
    cuda::{
        Buffer, Cuda, Products,
        buffer::is_bf16,
        gemm::{Product, Sizes, gemms},
        kernel::Kernel,
    },
    experts::Groups,
};

/// Results of a block, across and down: those of product.cu, and of tensor.cu.
fn tile<T: Element>() -> usize {
    if is_bf16::<T>() { 128 } else { 64 }
}

/// One kind of matrix of all instances, `[instances, rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Matrices<'a, T: Element> {
    buffer: &'a Buffer<T>,
    rows: usize,
    columns: usize,
}

impl<'a, T: Element> Matrices<'a, T> {
    /// Of the gate or up projection.
    pub(super) fn inward(buffer: &'a Buffer<T>, shape: &FfnShape) -> Self {
        Self {
            buffer,
            rows: shape.hidden,
            columns: shape.width,
        }
    }

    /// Of the down projection.
    pub(super) fn down(buffer: &'a Buffer<T>, shape: &FfnShape) -> Self {
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

    /// For products of rows of `T`. Nothing is added to where `accumulate` is empty.
    pub(super) fn write<T: FfnElement>(
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
            self.tiles += rows.len().div_ceil(tile::<T>());
        }
        cuda.write(&table, &mut self.table)
    }

    fn adds_to(&self, instance: usize) -> bool {
        self.accumulate.get(instance).is_some_and(|&add| add)
    }
}

/// A product of a pass, with the addresses of its operands.
struct Grouped {
    product: Product,
    a: u64,
    b: u64,
    c: u64,
    sizes: Sizes,
    /// Whether rows of results are added to.
    accumulate: bool,
}

impl Pass<'_> {
    /// `to = from W^T` of each row's instance.
    pub(super) fn rows_by_transposed<T: FfnElement>(
        &self,
        from: &Buffer<T>,
        matrices: Matrices<'_, T>,
        to: &Buffer<T>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Transposed,
            a: self.cuda.address(from)?,
            b: self.cuda.address(matrices.buffer)?,
            c: self.cuda.address(to)?,
            sizes: Sizes {
                m: 0,
                n: matrices.rows,
                k: matrices.columns,
            },
            accumulate: false,
        };
        // SAFETY: rows of `from` are as wide as the matrices have columns, those of `to` as they have rows.
        unsafe { self.multiply::<T>(&grouped, table) }
    }

    /// `to = from W` of each row's instance, or `to += from W`.
    pub(super) fn rows_by_matrices<T: FfnElement>(
        &self,
        from: &Buffer<T>,
        matrices: Matrices<'_, T>,
        to: &Buffer<T>,
        table: &GroupTable,
        accumulate: bool,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Plain,
            a: self.cuda.address(from)?,
            b: self.cuda.address(matrices.buffer)?,
            c: self.cuda.address(to)?,
            sizes: Sizes {
                m: 0,
                n: matrices.columns,
                k: matrices.rows,
            },
            accumulate,
        };
        // SAFETY: rows of `from` are as wide as the matrices have rows, those of `to` as they have columns.
        unsafe { self.multiply::<T>(&grouped, table) }
    }

    /// Per instance the sum over its rows of `left^T right`, zeros where it has none; or that added, as the table says.
    pub(super) fn sum_products<T: FfnElement>(
        &self,
        left: &Buffer<T>,
        right: &Buffer<T>,
        sums: Matrices<'_, f32>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let grouped = Grouped {
            product: Product::Sums,
            a: self.cuda.address(left)?,
            b: self.cuda.address(right)?,
            c: self.cuda.address(sums.buffer)?,
            sizes: Sizes {
                m: sums.rows,
                n: sums.columns,
                k: 0,
            },
            accumulate: false,
        };
        // SAFETY: rows of `left` are as wide as the matrices have rows, those of `right` as they have columns.
        unsafe { self.multiply::<T>(&grouped, table) }
    }

    /// # Safety
    ///
    /// The operands have as many elements as the product reaches by the sizes and the table: one row for each of the pass, one matrix for each
    /// instance. They are of `T`, but for sums, which are f32; the table is one for `T`.
    unsafe fn multiply<T: FfnElement>(
        &self,
        grouped: &Grouped,
        table: &GroupTable,
    ) -> Result<(), Error> {
        match self.cuda.products {
            // SAFETY: as promised.
            Products::CuBlas if !is_bf16::<T>() => unsafe {
                self.multiply_by_library(grouped, table)
            },
            // SAFETY: as promised.
            Products::CuBlas | Products::Own => unsafe {
                self.multiply_by_own::<T>(grouped, table)
            },
        }
    }

    /// # Safety
    ///
    /// As for [`multiply`](Self::multiply).
    unsafe fn multiply_by_own<T: FfnElement>(
        &self,
        grouped: &Grouped,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let cuda = self.cuda;
        let Sizes { m, n, k } = grouped.sizes;
        let down = match grouped.product {
            Product::Transposed | Product::Plain => table.tiles,
            Product::Sums => self.groups.instances() * m.div_ceil(tile::<T>()),
        };
        let blocks = down * n.div_ceil(tile::<T>());
        let kernel = match (grouped.product, is_bf16::<T>()) {
            (Product::Transposed, false) => Kernel::Project,
            (Product::Transposed, true) => Kernel::ProjectBf16,
            (Product::Plain, false) => Kernel::ProjectBack,
            (Product::Plain, true) => Kernel::ProjectBackBf16,
            (Product::Sums, false) => Kernel::WeightGradients,
            (Product::Sums, true) => Kernel::WeightGradientsBf16,
        };
        let parameters = [
            grouped.a,
            grouped.b,
            grouped.c,
            cuda.address(&table.table)?,
            self.groups.instances() as u64,
            m as u64,
            n as u64,
            k as u64,
            grouped.accumulate.into(),
        ];
        // SAFETY: as promised; the parameters are those of product.cu and of tensor.cu.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }

    /// # Safety
    ///
    /// As for [`multiply`](Self::multiply), in f32.
    unsafe fn multiply_by_library(
        &self,
        grouped: &Grouped,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let cuda = self.cuda;
        let (a, b, c) = (grouped.a, grouped.b, grouped.c);
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
