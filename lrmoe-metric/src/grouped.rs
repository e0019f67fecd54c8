use rayon::prelude::*;

use crate::Pairs;
use crate::pairs::{CHUNK, slot};

/// The keys of a rank's unmasked pairs, grouped by expert within chunks of consecutive pairs, in pair order.
pub(crate) struct Grouped {
    chunks: Vec<Chunk>,
    experts: usize,
}

struct Chunk {
    /// Start of each expert in `keys`, `[experts + 1]`.
    offsets: Vec<u32>,
    keys: Vec<u32>,
}

impl Grouped {
    pub(crate) fn new(pairs: &Pairs<'_>, keys: &[u32]) -> Self {
        let experts = pairs.experts();
        let chunks = pairs
            .expert_ids()
            .par_chunks(CHUNK)
            .zip(keys.par_chunks(CHUNK))
            .map(|(ids, keys)| Chunk::new(ids, keys, experts))
            .collect();
        Self { chunks, experts }
    }

    /// Unmasked pairs of each expert, `[experts]`.
    pub(crate) fn loads(&self) -> Vec<u32> {
        let mut loads = vec![0; self.experts];
        for chunk in &self.chunks {
            for (load, ends) in loads.iter_mut().zip(chunk.offsets.windows(2)) {
                *load += ends[1] - ends[0];
            }
        }
        loads
    }

    /// The keys of an expert, in pair order, as one slice per chunk.
    pub(crate) fn of(&self, expert: usize) -> impl Iterator<Item = &[u32]> + Clone {
        self.chunks.iter().map(move |chunk| {
            let [start, end] = [expert, expert + 1].map(|at| chunk.offsets[at] as usize);
            &chunk.keys[start..end]
        })
    }

    /// The largest key of an expert that is at most `bound`, 0 if there is none.
    pub(crate) fn largest_up_to(&self, expert: usize, bound: u32) -> u32 {
        self.of(expert)
            .flatten()
            .map(|&key| if key <= bound { key } else { 0 })
            .max()
            .unwrap_or(0)
    }

    /// The number of an expert's keys that are `key`.
    pub(crate) fn count(&self, expert: usize, key: u32) -> u32 {
        self.of(expert)
            .flatten()
            .map(|&other| u32::from(other == key))
            .sum()
    }
}

impl Chunk {
    /// A counting sort by expert.
    fn new(ids: &[i32], keys: &[u32], experts: usize) -> Self {
        let mut offsets = vec![0; experts + 1];
        let (_, counts) = offsets.split_at_mut(1);
        for &id in ids {
            if let Some(count) = counts.get_mut(slot(id)) {
                *count += 1;
            }
        }
        let mut end = 0;
        for count in counts {
            end += *count;
            *count = end;
        }
        let mut next = offsets.clone();
        let mut grouped = vec![0; end as usize];
        for (&id, &key) in ids.iter().zip(keys) {
            if let Some(next) = next[..experts].get_mut(slot(id)) {
                grouped[*next as usize] = key;
                *next += 1;
            }
        }
        Self {
            offsets,
            keys: grouped,
        }
    }
}
