//! Grouped products, split where operands do not fit in a binding.

use std::ops::Range;

use super::Pass;
use crate::{
    Error, FfnShape,
    wgpu::{Buffer, kernel::Kernel},
};

/// Results of a workgroup, across and down.
const TILE: usize = 64;
/// Most terms that a dispatch adds to a sum, the next going on with it: some drivers end loops after 2^16 rounds without a word.
const MOST_TERMS: usize = 1 << 14;

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

    fn len(&self) -> usize {
        self.rows * self.columns
    }

    /// The elements from these rows of the first instance to the same rows of the last.
    fn elements(&self, instances: &Range<usize>, rows: &Range<usize>) -> Range<usize> {
        let first = instances.start * self.len() + rows.start * self.columns;
        let last = (instances.end - 1) * self.len() + rows.end * self.columns;
        first..last
    }
}

/// How many instances, rows of their matrices, and rows of pairs a dispatch takes at most.
struct Steps {
    instances: usize,
    matrix_rows: usize,
    rows: usize,
}

/// As in product.wgsl, from `groups` on.
#[derive(Clone, Copy, Default)]
struct Parameters {
    groups: usize,
    m: usize,
    n: usize,
    k: usize,
    accumulate: bool,
    a_base: usize,
    a_m: usize,
    a_k: usize,
    b_base: usize,
    b_group: usize,
    b_k: usize,
    b_n: usize,
    c_base: usize,
    c_group: usize,
    c_m: usize,
}

impl Parameters {
    fn words(&self) -> [u32; 15] {
        [
            self.groups,
            self.m,
            self.n,
            self.k,
            self.accumulate.into(),
            self.a_base,
            self.a_m,
            self.a_k,
            self.b_base,
            self.b_group,
            self.b_k,
            self.b_n,
            self.c_base,
            self.c_group,
            self.c_m,
        ]
        .map(|number| number as u32)
    }
}

impl<'a> Pass<'a> {
    /// `to = from W^T` of each row's instance.
    pub(super) fn rows_by_transposed(
        &mut self,
        from: &'a Buffer<f32>,
        matrices: Matrices<'a>,
        to: &'a Buffer<f32>,
    ) -> Result<(), Error> {
        let widths = [matrices.columns, matrices.rows];
        let steps = self.steps(&matrices, widths)?;
        let part = |rows: &Range<usize>, terms: Range<usize>| Parameters {
            n: rows.len(),
            k: terms.len(),
            accumulate: terms.start > 0,
            a_base: terms.start,
            b_base: terms.start,
            b_k: 1,
            b_n: matrices.columns,
            c_base: rows.start,
            ..Parameters::default()
        };
        let parts = ranges(0..matrices.rows, steps.matrix_rows).flat_map(|rows| {
            let terms = ranges(0..matrices.columns, MOST_TERMS);
            terms.map(move |terms| (rows.clone(), part(&rows, terms)))
        });
        let parts: Vec<_> = parts.collect();
        self.rows_by(
            Kernel::Project,
            (from, matrices, to),
            widths,
            &steps,
            &parts,
        );
        Ok(())
    }

    /// `to = from W` of each row's instance, or `to += from W`.
    pub(super) fn rows_by_matrices(
        &mut self,
        from: &'a Buffer<f32>,
        matrices: Matrices<'a>,
        to: &'a Buffer<f32>,
        accumulate: bool,
    ) -> Result<(), Error> {
        let widths = [matrices.rows, matrices.columns];
        let steps = self.steps(&matrices, widths)?;
        let part = |terms: Range<usize>| Parameters {
            n: matrices.columns,
            k: terms.len(),
            accumulate: accumulate || terms.start > 0,
            a_base: terms.start,
            b_k: matrices.columns,
            b_n: 1,
            ..Parameters::default()
        };
        let parts = ranges(0..matrices.rows, steps.matrix_rows.min(MOST_TERMS));
        let parts: Vec<_> = parts.map(|rows| (rows.clone(), part(rows))).collect();
        self.rows_by(
            Kernel::ProjectBack,
            (from, matrices, to),
            widths,
            &steps,
            &parts,
        );
        Ok(())
    }

    /// Rows of a width times the matrices of their instances, to rows of another width. A part is what is done with some rows of the matrices.
    fn rows_by(
        &mut self,
        kernel: Kernel,
        (from, matrices, to): (&'a Buffer<f32>, Matrices<'a>, &'a Buffer<f32>),
        [width, width_to]: [usize; 2],
        steps: &Steps,
        parts: &[(Range<usize>, Parameters)],
    ) {
        let wgpu = self.wgpu;
        for instances in ranges(0..self.groups.instances(), steps.instances) {
            for rows in ranges(self.groups.rows_of(instances.clone()), steps.rows) {
                let touched = self.touched(&instances, &rows);
                let (table, tiles) = self.table(&touched, &rows);
                let table = self.batch.table(&table);
                let a = wgpu.window(from, rows.start * width..rows.end * width);
                let c = wgpu.window(to, rows.start * width_to..rows.end * width_to);
                for (matrix_rows, part) in parts {
                    let elements = matrices.elements(&touched, matrix_rows);
                    let b = wgpu.window(matrices.buffer, elements);
                    let parameters = Parameters {
                        groups: touched.len(),
                        a_base: part.a_base + a.base as usize,
                        a_m: width,
                        a_k: 1,
                        b_base: part.b_base + b.base as usize,
                        b_group: matrices.len(),
                        c_base: part.c_base + c.base as usize,
                        c_m: width_to,
                        ..*part
                    };
                    let bindings = [
                        (1, a.into()),
                        (2, b.into()),
                        (3, c.into()),
                        (4, table.clone()),
                    ];
                    let groups = tiles * part.n.div_ceil(TILE);
                    self.batch
                        .dispatch(kernel, groups, &parameters.words(), &bindings);
                }
            }
        }
    }

    /// Per instance the sum over its rows of `left^T right`, zeros where it has none; or that added.
    pub(super) fn sum_products(
        &mut self,
        left: &'a Buffer<f32>,
        right: &'a Buffer<f32>,
        sums: Matrices<'a>,
        accumulate: &[bool],
    ) -> Result<(), Error> {
        let wgpu = self.wgpu;
        let steps = self.steps(&sums, [sums.rows, sums.columns])?;
        for instances in ranges(0..self.groups.instances(), steps.instances) {
            let of_instances = self.groups.rows_of(instances.clone());
            let no_rows = of_instances.is_empty().then_some(of_instances.clone());
            let start = of_instances.start;
            let longest = self.longest(&instances);
            let most = if longest > MOST_TERMS {
                MOST_TERMS
            } else {
                steps.rows
            };
            for rows in ranges(of_instances, most.min(steps.rows)).chain(no_rows) {
                // The first dispatch writes all of the instances, later ones go on with the sums of those whose rows they have.
                let later = rows.start > start;
                let touched = if later {
                    self.touched(&instances, &rows)
                } else {
                    instances.clone()
                };
                let add = |instance: usize| u32::from(later || accumulate[instance]);
                let entries = touched.clone().flat_map(|instance| {
                    let own = self.rows_among(instance, &rows);
                    [add(instance), own.start as u32, own.end as u32]
                });
                let table = self.batch.table(&entries.collect::<Vec<_>>());
                let a = wgpu.window(left, rows.start * sums.rows..rows.end * sums.rows);
                let b = wgpu.window(right, rows.start * sums.columns..rows.end * sums.columns);
                for of_sums in ranges(0..sums.rows, steps.matrix_rows) {
                    let c = wgpu.window(sums.buffer, sums.elements(&touched, &of_sums));
                    let parameters = Parameters {
                        groups: touched.len(),
                        m: of_sums.len(),
                        n: sums.columns,
                        a_base: a.base as usize + of_sums.start,
                        a_m: 1,
                        a_k: sums.rows,
                        b_base: b.base as usize,
                        b_k: sums.columns,
                        b_n: 1,
                        c_base: c.base as usize,
                        c_group: sums.len(),
                        c_m: sums.columns,
                        ..Parameters::default()
                    };
                    let bindings = [
                        (1, a.into()),
                        (2, b.into()),
                        (3, c.into()),
                        (4, table.clone()),
                    ];
                    let tiles = of_sums.len().div_ceil(TILE) * sums.columns.div_ceil(TILE);
                    let groups = touched.len() * tiles;
                    let words = parameters.words();
                    self.batch
                        .dispatch(Kernel::WeightGradients, groups, &words, &bindings);
                }
            }
        }
        Ok(())
    }

    /// For these matrices, and rows of these widths.
    fn steps(&self, matrices: &Matrices<'_>, widths: [usize; 2]) -> Result<Steps, Error> {
        let width = widths[0].max(widths[1]);
        let in_table = self.wgpu.per_window("a table entry", 3)?;
        let rows = self.wgpu.per_window("a row", width)?;
        Ok(match self.wgpu.per_window("weights", matrices.len()) {
            Ok(instances) => Steps {
                instances: instances.min(in_table),
                matrix_rows: matrices.rows,
                rows,
            },
            Err(_) => Steps {
                instances: 1,
                matrix_rows: self.wgpu.per_window("a row of weights", matrices.columns)?,
                rows,
            },
        })
    }

    /// Rows of the instance that has the most.
    fn longest(&self, instances: &Range<usize>) -> usize {
        let rows = |instance| self.groups.rows_of(instance..instance + 1).len();
        instances.clone().map(rows).max().unwrap_or(0)
    }

    /// Those of the instances that have any of these rows.
    fn touched(&self, instances: &Range<usize>, rows: &Range<usize>) -> Range<usize> {
        let of = |instance: usize| self.groups.rows_of(instance..instance + 1);
        let first = instances.clone().find(|&i| of(i).end > rows.start);
        let last = instances.clone().rfind(|&i| of(i).start < rows.end);
        match (first, last) {
            (Some(first), Some(last)) => first..last + 1,
            _ => instances.start..instances.start,
        }
    }

    /// Per instance the tiles before its rows, and which of these rows are its; and the number of tiles.
    fn table(&self, instances: &Range<usize>, rows: &Range<usize>) -> (Vec<u32>, usize) {
        let mut table = Vec::with_capacity(3 * instances.len());
        let mut tiles = 0;
        for instance in instances.clone() {
            let own = self.rows_among(instance, rows);
            table.extend([tiles as u32, own.start as u32, own.end as u32]);
            tiles += own.len().div_ceil(TILE);
        }
        (table, tiles)
    }

    /// Which of these rows are the instance's, counted from the first.
    fn rows_among(&self, instance: usize, rows: &Range<usize>) -> Range<usize> {
        let own = self.groups.rows_of(instance..instance + 1);
        let place = |row: usize| row.clamp(rows.start, rows.end) - rows.start;
        place(own.start)..place(own.end)
    }
}

/// Consecutive parts of a range, of so many numbers but for the last.
fn ranges(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(step.max(1))
        .map(move |start| start..end.min(start + step))
}
