//! Work in pieces: an instance's rows are cut into tiles of nearly equal height, and one thread takes a tile at a time.

use std::{ops::Range, sync::Mutex};

use rayon::iter::{IndexedParallelIterator, IntoParallelRefMutIterator, ParallelIterator};

use super::{
    element::Storage,
    pack::{Panel, padded, panels},
};
use crate::ffn::Experts;

/// Most rows of a tile: what a block of them in depth, and a block of sums, leave room for in the second cache.
pub(super) const ROWS: usize = 384;
/// Rows of a tile are a multiple of this, but for an instance's last one.
pub(super) const UNIT: usize = 32;
/// Output features taken at a time.
pub(super) const FEATURES: usize = 256;

/// Most rows of a tile: fewer where that gives each thread of the pool a few tiles. Nothing in a result depends on it.
pub(super) fn tile_rows<T: Storage>(experts: &Experts<'_, T>) -> usize {
    const TILES_PER_THREAD: usize = 8;
    let wanted = experts.rows() / (TILES_PER_THREAD * rayon::current_num_threads());
    [ROWS, ROWS / 2, ROWS / 4]
        .into_iter()
        .find(|&rows| rows <= wanted)
        .unwrap_or(UNIT)
}

/// The tiles of all instances in row order: (instance, rows).
pub(super) fn tiles<T: Storage>(
    experts: &Experts<'_, T>,
    height: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..experts.instances()).flat_map(move |instance| {
        let rows = experts.rows_of(instance);
        cut(rows.clone(), height_of(rows.len(), height)).map(move |rows| (instance, rows))
    })
}

/// Rows of the tiles of an instance with `rows` rows, at most `most`, which is a multiple of [`UNIT`].
///
/// Nearly equal, as a tile of few rows reads all weights for little work.
pub(super) fn height_of(rows: usize, most: usize) -> usize {
    let count = rows.div_ceil(most).max(1);
    rows.div_ceil(count).max(1).next_multiple_of(UNIT)
}

/// Cuts a range into pieces of `length`, the last one shorter.
pub(super) fn cut(
    range: Range<usize>,
    length: usize,
) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = range.end;
    range
        .step_by(length)
        .map(move |from| from..end.min(from + length))
}

/// The panels of rows of a range of features, `[range, lanes]` each. Columns `[features, rows]` lie range after range.
pub(super) fn blocks(features: Range<usize>, rows: usize) -> impl Iterator<Item = Columns> {
    panels(rows).map(move |panel| {
        let start = features.start * padded(rows) + panel.start * features.len();
        Columns {
            place: start..start + features.len() * panel.lanes,
            features: features.clone(),
            panel,
        }
    })
}

/// A block of columns.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// Where it lies among all.
    pub(super) place: Range<usize>,
    pub(super) features: Range<usize>,
    pub(super) panel: Panel,
}

/// The next `length` values of a thread's scratch, with any content.
pub(super) fn take<'a, T>(scratch: &mut &'a mut [T], length: usize) -> &'a mut [T] {
    scratch
        .split_off_mut(..padded(length))
        .and_then(|taken| taken.get_mut(..length))
        .expect("scratch is as long as its parts")
}

/// Does `work` for every item, each thread with a scratch of its own.
///
/// Items are made on demand, so nothing is allocated for them.
pub(super) fn share<S: Send, T: Send>(
    scratch: &mut [S],
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(&mut S, T) + Sync,
) {
    let items = Mutex::new(items);
    let next = || {
        items
            .lock()
            .expect("no thread panics while it takes an item")
            .next()
    };
    scratch.par_iter_mut().with_max_len(1).for_each(|scratch| {
        while let Some(item) = next() {
            work(scratch, item);
        }
    });
}
