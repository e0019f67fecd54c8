use ndarray::{Array2, ArrayView2, ArrayViewMut2};
use rayon::prelude::*;

use crate::view::{elements, elements_mut, rows_per_task};
use crate::{Argument, Error};

/// The two orders of the rows a rank received in an exchange: as they came, by (source, local
/// instance, pair id), and grouped for computing, by (local instance, source, pair id).
#[derive(Clone, Debug)]
pub struct Grouping {
    offsets: Vec<usize>,
    received_rows: usize,
    /// Runs that make up the grouped rows, in their order, padding included.
    to_grouped: Vec<Run>,
    /// Runs that make up the received rows, in their order.
    to_received: Vec<Run>,
}

/// Consecutive rows of an output.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: usize,
    len: usize,
    /// First row of the input they are copied from; `None` for padding.
    from: Option<usize>,
}

impl Grouping {
    /// Prepares for `counts` (`[sources, local instances]`, any layout) rows received. Every group
    /// is padded to a multiple of `multiple` rows (1: no padding); a group without rows gets none.
    ///
    /// # Errors
    /// [`Error::ZeroMultiple`] if `multiple` is 0, [`Error::TooManyRows`] if the rows do not fit in
    /// `usize`.
    pub fn new(counts: ArrayView2<'_, u32>, multiple: usize) -> Result<Self, Error> {
        if multiple == 0 {
            return Err(Error::ZeroMultiple);
        }
        let (sources, instances) = counts.dim();
        let (received, received_rows) = received_starts(counts);
        let mut grouping = Self {
            offsets: vec![0],
            received_rows,
            to_grouped: Vec::with_capacity((sources + 1) * instances),
            to_received: Vec::with_capacity(sources * instances),
        };
        let mut grouped = Array2::zeros(counts.dim());
        let mut end = 0usize;
        for instance in 0..instances {
            let too_many = Error::TooManyRows { instance, multiple };
            let group = end;
            for source in 0..sources {
                let at = [source, instance];
                let run = Run {
                    start: end,
                    len: counts[at] as usize,
                    from: Some(received[at]),
                };
                grouped[at] = end;
                end = push(&mut grouping.to_grouped, run).ok_or(too_many.clone())?;
            }
            let rows = (end - group)
                .checked_next_multiple_of(multiple)
                .ok_or(too_many.clone())?;
            let padding = Run {
                start: end,
                len: rows - (end - group),
                from: None,
            };
            end = push(&mut grouping.to_grouped, padding).ok_or(too_many)?;
            grouping.offsets.push(end);
        }
        for (at, &count) in counts.indexed_iter() {
            let run = Run {
                start: received[at],
                len: count as usize,
                from: Some(grouped[at]),
            };
            push(&mut grouping.to_received, run);
        }
        Ok(grouping)
    }

    /// Where the group of each local instance starts and the last one ends (`[instances + 1]`), in
    /// padded rows.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Rows received from all sources.
    pub fn received_rows(&self) -> usize {
        self.received_rows
    }

    /// Rows of all groups, padding included.
    pub fn grouped_rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Copies `received` (`[received_rows, width]`) to `grouped` (`[grouped_rows, width]`) and
    /// fills the padding with `T::default()`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Layout`] if an array does not fit.
    pub fn group<T: Copy + Default + Send + Sync>(
        &self,
        received: ArrayView2<'_, T>,
        mut grouped: ArrayViewMut2<'_, T>,
    ) -> Result<(), Error> {
        let width = received.ncols();
        let received = elements(Argument::Received, &received, [self.received_rows, width])?;
        let grouped = elements_mut(
            Argument::Grouped,
            &mut grouped,
            [self.grouped_rows(), width],
        )?;
        copy(&self.to_grouped, received, width, grouped);
        Ok(())
    }

    /// Copies `grouped` (`[grouped_rows, width]`) back to `received` (`[received_rows, width]`),
    /// leaving out the padding.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Layout`] if an array does not fit.
    pub fn ungroup<T: Copy + Default + Send + Sync>(
        &self,
        grouped: ArrayView2<'_, T>,
        mut received: ArrayViewMut2<'_, T>,
    ) -> Result<(), Error> {
        let width = grouped.ncols();
        let grouped = elements(Argument::Grouped, &grouped, [self.grouped_rows(), width])?;
        let received = elements_mut(
            Argument::Received,
            &mut received,
            [self.received_rows, width],
        )?;
        copy(&self.to_received, grouped, width, received);
        Ok(())
    }
}

/// Where the rows of (source, instance) start as received, and how many there are. Numbers past
/// `usize` are saturated; the grouped rows are no fewer and are checked.
fn received_starts(counts: ArrayView2<'_, u32>) -> (Array2<usize>, usize) {
    let mut starts = Array2::zeros(counts.dim());
    let mut end = 0usize;
    for (start, &count) in starts.iter_mut().zip(counts) {
        *start = end;
        end = end.saturating_add(count as usize);
    }
    (starts, end)
}

/// Adds a run unless it is empty; returns the row after it, if there is such a number.
fn push(runs: &mut Vec<Run>, run: Run) -> Option<usize> {
    if run.len > 0 {
        runs.push(run);
    }
    run.start.checked_add(run.len)
}

/// Writes the runs, which follow each other and cover the output. Tasks are equal parts of the
/// output, so that one run with all the rows is shared out as well as many small ones.
fn copy<T: Copy + Default + Send + Sync>(
    runs: &[Run],
    input: &[T],
    width: usize,
    output: &mut [T],
) {
    if width == 0 {
        return;
    }
    let task_rows = rows_per_task::<T>(width);
    output
        .par_chunks_mut(task_rows * width)
        .enumerate()
        .for_each(|(task, mut output)| {
            let mut row = task * task_rows;
            let first = runs.partition_point(|run| run.start + run.len <= row);
            for run in &runs[first..] {
                let before = row - run.start;
                let rows = (run.len - before).min(output.len() / width);
                let (part, rest) = output.split_at_mut(rows * width);
                match run.from {
                    Some(from) => {
                        part.copy_from_slice(&input[(from + before) * width..][..part.len()])
                    }
                    None => part.fill(T::default()),
                }
                output = rest;
                row += rows;
                if output.is_empty() {
                    break;
                }
            }
        });
}
