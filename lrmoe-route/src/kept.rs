//! What is left of routed pairs, each at the instance that it was routed to.

use ndarray::Array2;

use crate::error::{expect, expect_pairs};
use crate::table::experts_of;
use crate::{Error, RoutingTable};

/// Where the pairs of one source rank that are kept lie among those that were routed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptPlaces {
    /// Kept pairs at each instance, `[instances]`.
    pub counts: Vec<u32>,
    /// Of each kept pair, in sending order, how many of the source's routed pairs come before it at its instance.
    pub before: Vec<u32>,
}

impl RoutingTable {
    /// Finds the places of the pairs that are kept of one source rank's: `expert_ids` are the experts of all its pairs, -1 for those that were not
    /// routed, `kept` the ascending local ids of those that are kept.
    ///
    /// Makes `places` those, in the memory of earlier ones, which mean nothing after an error.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`]; as for [`deal`](Self::deal), [`Error::PairCount`] if the pairs are not those that were routed.
    pub fn places_into(
        &self,
        source: usize,
        expert_ids: &[i32],
        kept: &[u32],
        places: &mut KeptPlaces,
    ) -> Result<(), Error> {
        let (placement, experts) = (self.placement(), self.placement().experts());
        if source >= placement.ranks() {
            return Err(Error::RankOutOfRange {
                rank: source,
                ranks: placement.ranks(),
            });
        }
        for expert in experts_of(expert_ids, kept, experts)? {
            expert?;
        }
        let counts = self.counts();
        let routed = counts.row(source);
        let mut given = vec![0; experts];
        for (pair, &expert) in (0..).zip(expert_ids) {
            match usize::try_from(expert) {
                Ok(id) if id < experts => given[id] += 1,
                Err(_) if expert == -1 => {}
                _ => {
                    return Err(Error::ExpertOutOfRange {
                        pair,
                        expert,
                        experts,
                    });
                }
            }
        }
        for (expert, &got) in given.iter().enumerate() {
            let instances = placement.instances_of(expert).iter();
            let expected = instances.map(|&i| u64::from(routed[i as usize])).sum();
            expect_pairs(source, expert, expected, got)?;
        }

        // Dealt as in `deal`: of an expert's pairs, in ascending order, its lowest instance gets the first.
        let walk = |each: &mut dyn FnMut(usize, u32)| {
            let mut turn = vec![0; experts];
            let mut dealt = vec![0; routed.len()];
            let mut kept = kept.iter().copied().peekable();
            for (pair, &expert) in (0..).zip(expert_ids) {
                let Ok(expert) = usize::try_from(expert) else {
                    continue;
                };
                let instances = placement.instances_of(expert);
                let turn = &mut turn[expert];
                while dealt[instances[*turn] as usize] == routed[instances[*turn] as usize] {
                    *turn += 1;
                }
                let instance = instances[*turn] as usize;
                if kept.next_if_eq(&pair).is_some() {
                    each(instance, dealt[instance]);
                }
                dealt[instance] += 1;
            }
        };
        let KeptPlaces { counts, before } = places;
        counts.clear();
        counts.resize(routed.len(), 0);
        walk(&mut |instance, _| counts[instance] += 1);
        let mut next = Vec::with_capacity(counts.len());
        let mut end = 0;
        for &count in counts.iter() {
            next.push(end);
            end += count as usize;
        }
        before.resize(kept.len(), 0);
        walk(&mut |instance, number| {
            before[next[instance]] = number;
            next[instance] += 1;
        });
        Ok(())
    }

    /// The table of what is left of its pairs, `counts` (`[source ranks, instances]`) of them. `capacities` are the rows that each rank can hold,
    /// `[ranks]`, unlimited if not given.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if the inputs differ in ranks or instances, [`Error::TooManyKept`], [`Error::RankFull`].
    pub fn kept(&self, counts: Array2<u32>, capacities: Option<&[u64]>) -> Result<Self, Error> {
        let ranks = self.placement().ranks();
        expect("source ranks", ranks, counts.nrows())?;
        expect("instances", self.counts().ncols(), counts.ncols())?;
        for (((source, instance), &kept), &routed) in counts.indexed_iter().zip(self.counts()) {
            if kept > routed {
                return Err(Error::TooManyKept {
                    source_rank: source,
                    instance,
                    kept,
                    routed,
                });
            }
        }
        let table = Self::new(counts, self.placement().clone());
        if let Some(capacities) = capacities {
            expect("capacities", ranks, capacities.len())?;
            for (rank, (rows, &capacity)) in
                table.rank_loads().into_iter().zip(capacities).enumerate()
            {
                if rows > capacity {
                    return Err(Error::RankFull {
                        rank,
                        rows,
                        capacity,
                    });
                }
            }
        }
        Ok(table)
    }

    /// The rows of kept pairs on `rank` by (instance, source, pair id), each as its number among all routed rows there, counted in the same order.
    /// `kept` is the table of the kept pairs, `before` what [`places_into`](Self::places_into) says of each as they are received:
    /// by (source, instance, pair id).
    ///
    /// # Panics
    ///
    /// If `rank` does not exist, or `before` is not of as many rows as `kept` has there.
    pub fn kept_rows_into(&self, kept: &Self, rank: usize, before: &[u32], rows: &mut Vec<u32>) {
        let [routed, left] = [self, kept].map(|table| table.rows_on(rank));
        let sources = left.nrows();
        // Where what each source sends begins.
        let mut starts = Vec::with_capacity(sources);
        let mut end = 0;
        for source in left.rows() {
            starts.push(end);
            end += source.sum() as usize;
        }
        assert_eq!(before.len(), end, "rows of kept pairs");
        rows.clear();
        let mut first = 0;
        for (routed, left) in routed.columns().into_iter().zip(left.columns()) {
            for ((&routed, &left), start) in routed.iter().zip(left).zip(&mut starts) {
                let received = &before[*start..*start + left as usize];
                rows.extend(received.iter().map(|before| first + before));
                *start += left as usize;
                first += routed;
            }
        }
    }
}
