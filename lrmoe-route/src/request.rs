use lrmoe_plan::Placement;
use ndarray::ArrayView2;

use crate::Error;
use crate::error::expect;

/// Rows that no rank can exceed, as all pairs fit in u32.
pub(crate) const UNBOUNDED: i64 = u32::MAX as i64;

/// Checked inputs, and what all steps read of them.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// Pairs, flat `[source ranks * experts]`.
    pub(crate) counts: &'a [u32],
    pub(crate) placement: &'a Placement,
    /// Rows that each rank can hold. More than all pairs is as good as [`UNBOUNDED`].
    pub(crate) room: Vec<i64>,
    /// Pairs of each expert.
    pub(crate) per_expert: Vec<u32>,
    /// Rank of each instance.
    pub(crate) rank_of: Vec<u32>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(
        counts: ArrayView2<'a, u32>,
        placement: &'a Placement,
        capacities: Option<&[u64]>,
    ) -> Result<Self, Error> {
        expect("source ranks", placement.ranks(), counts.nrows())?;
        expect("experts", placement.experts(), counts.ncols())?;
        let room = match capacities {
            Some(rows) => rows
                .iter()
                .map(|&rows| rows.min(UNBOUNDED as u64) as i64)
                .collect(),
            None => vec![UNBOUNDED; placement.ranks()],
        };
        expect("capacities", placement.ranks(), room.len())?;
        let counts = counts.to_slice().ok_or(Error::Layout)?;
        Ok(Self {
            counts,
            placement,
            room,
            per_expert: per_expert(counts, placement.experts())?,
            rank_of: (0..placement.ranks())
                .flat_map(|rank| placement.on_rank(rank).map(move |_| rank as u32))
                .collect(),
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.placement.ranks()
    }

    /// Pairs of `expert` that start on `rank`.
    pub(crate) fn count(&self, rank: usize, expert: usize) -> u32 {
        self.counts[rank * self.placement.experts() + expert]
    }

    /// Rank of an instance.
    pub(crate) fn rank_of(&self, instance: u32) -> usize {
        self.rank_of[instance as usize] as usize
    }
}

/// Sums over ranks. All pairs together must fit in u32.
fn per_expert(counts: &[u32], experts: usize) -> Result<Vec<u32>, Error> {
    let pairs: u64 = counts.iter().map(|&n| u64::from(n)).sum();
    if pairs > u32::MAX.into() {
        return Err(Error::TooManyPairs { pairs });
    }
    let mut sums = vec![0; experts];
    for row in counts.chunks_exact(experts) {
        for (sum, n) in sums.iter_mut().zip(row) {
            *sum += n;
        }
    }
    Ok(sums)
}
