//! Grouped products.

use super::Pass;
use crate::{
    Error, FfnShape, Memory,
    cuda::{Buffer, Cuda, kernel::Kernel},
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
        let mut table = Vec::with_capacity(8 * groups.instances());
        for instance in 0..groups.instances() {
            let rows = groups.rows_of(instance..instance + 1);
            let add = accumulate.get(instance).is_some_and(|&add| add);
            for number in [self.tiles, rows.start, rows.end, add.into()] {
                table.extend([number as u32, (number as u64 >> 32) as u32]);
            }
            self.tiles += rows.len().div_ceil(TILE);
        }
        cuda.write(&table, &mut self.table)
    }
}

/// As in product.cu, but for the operands.
struct Sizes {
    m: usize,
    n: usize,
    k: usize,
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
        let sizes = Sizes {
            m: 0,
            n: matrices.rows,
            k: matrices.columns,
            accumulate: false,
        };
        let blocks = table.tiles * matrices.rows.div_ceil(TILE);
        // SAFETY: rows of `from` are as wide as the matrices have columns, those of `to` as they have rows.
        unsafe {
            self.multiply(
                Kernel::Project,
                blocks,
                [from, matrices.buffer, to],
                table,
                &sizes,
            )
        }
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
        let sizes = Sizes {
            m: 0,
            n: matrices.columns,
            k: matrices.rows,
            accumulate,
        };
        let blocks = table.tiles * matrices.columns.div_ceil(TILE);
        let operands = [from, matrices.buffer, to];
        // SAFETY: rows of `from` are as wide as the matrices have rows, those of `to` as they have columns.
        unsafe { self.multiply(Kernel::ProjectBack, blocks, operands, table, &sizes) }
    }

    /// Per instance the sum over its rows of `left^T right`, zeros where it has none; or that added, as the table says.
    pub(super) fn sum_products(
        &self,
        left: &Buffer<f32>,
        right: &Buffer<f32>,
        sums: Matrices<'_>,
        table: &GroupTable,
    ) -> Result<(), Error> {
        let sizes = Sizes {
            m: sums.rows,
            n: sums.columns,
            k: 0,
            accumulate: false,
        };
        let tiles = sums.rows.div_ceil(TILE) * sums.columns.div_ceil(TILE);
        let blocks = self.groups.instances() * tiles;
        let operands = [left, right, sums.buffer];
        // SAFETY: rows of `left` are as wide as the matrices have rows, those of `right` as they have columns.
        unsafe { self.multiply(Kernel::WeightGradients, blocks, operands, table, &sizes) }
    }

    /// # Safety
    ///
    /// The operands have as many elements as the kernel reaches by the sizes and the table: one row for each of the pass, one matrix for each instance.
    unsafe fn multiply(
        &self,
        kernel: Kernel,
        blocks: usize,
        [a, b, c]: [&Buffer<f32>; 3],
        table: &GroupTable,
        sizes: &Sizes,
    ) -> Result<(), Error> {
        let cuda = self.cuda;
        let parameters = [
            cuda.address(a)?,
            cuda.address(b)?,
            cuda.address(c)?,
            cuda.address(&table.table)?,
            self.groups.instances() as u64,
            sizes.m as u64,
            sizes.n as u64,
            sizes.k as u64,
            sizes.accumulate.into(),
        ];
        // SAFETY: as promised.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }
}
