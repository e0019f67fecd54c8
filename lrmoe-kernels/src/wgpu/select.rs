use std::ops::Range;

use lrmoe_metric::{Error as MetricError, Exchange};

use super::{
    Buffer, Pairs, Wgpu,
    batch::{Batch, Binding},
    kernel::Kernel,
    metric::check_length,
};
use crate::{
    Error, KeptKeys, Memory,
    cuts::{CUT, ROUNDS, TIE_BITS, agree, deal_ties, first_cuts, is_any_cut, pair_mask},
};

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Pairs that a workgroup compacts.
pub(super) const BLOCK: usize = 1024;

/// A selection under way.
pub(super) struct Search<'a> {
    pub(super) wgpu: &'a Wgpu,
    pub(super) pairs: &'a Pairs,
    pub(super) keys: &'a Buffer<u32>,
    /// By key, and among equal keys by pair id; `[experts]` cuts each.
    pub(super) cuts: Buffer<u32>,
    pub(super) ties: Buffer<u32>,
    /// Within this mask, the complement of a pair id is as large as the id is small.
    pair_mask: u32,
    counts: Buffer<u32>,
}

impl Wgpu {
    /// Selects by keys, where forming them may have failed on this rank; the others then learn of it.
    pub(super) fn select_checked<E: Exchange>(
        &self,
        pairs: &Pairs,
        keys: Result<&Buffer<u32>, Error>,
        quotas: &[u32],
        exchange: &mut E,
    ) -> Result<KeptKeys<Self>, Error> {
        let local = keys.and_then(|keys| {
            check_length("keys", Self::len(keys), pairs.len())?;
            check_length("quotas", quotas.len(), pairs.experts())?;
            Ok(keys)
        });
        let (keys, loads) = agree(local, &pairs.loads, exchange)?;
        let mut search = Search::new(self, pairs, keys, &first_cuts(&loads, quotas))?;
        if is_any_cut(&loads, quotas) {
            search.find_cuts(exchange)?;
        }
        let most = pairs.loads.iter().zip(quotas);
        search.compact(most.map(|(load, q)| *load.min(q) as usize).sum(), exchange)
    }
}

impl<'a> Search<'a> {
    fn new(
        wgpu: &'a Wgpu,
        pairs: &'a Pairs,
        keys: &'a Buffer<u32>,
        cuts: &[u32],
    ) -> Result<Self, Error> {
        Ok(Self {
            wgpu,
            pairs,
            keys,
            ties: wgpu.upload(&vec![0; cuts.len()])?,
            cuts: wgpu.upload(cuts)?,
            pair_mask: pair_mask(pairs.len()),
            counts: Buffer::default(),
        })
    }

    /// Looks for the cut of every expert that keeps some but not all of its pairs.
    fn find_cuts<E: Exchange>(&mut self, exchange: &mut E) -> Result<(), Error> {
        let alone = exchange.ranks() == 1;
        // Of this rank, in the last round.
        let mut own = Vec::new();
        for (low, bits) in ROUNDS {
            self.count(Kernel::CountKeys, low, bits)?;
            if !alone {
                own = self.wgpu.download(&self.counts)?;
                let mut all = own.clone();
                exchange.sum(&mut all).map_err(MetricError::Exchange)?;
                self.wgpu.write(&all, &mut self.counts)?;
            }
            self.descend(&self.cuts, low, bits)?;
        }
        if alone {
            self.start_ties()?;
        } else if !self.share_ties(&own, exchange)? {
            return Ok(());
        }
        let bits = u32::BITS - self.pair_mask.leading_zeros();
        for low in (0..bits).step_by(TIE_BITS as usize).rev() {
            self.count(Kernel::CountTies, low, TIE_BITS)?;
            self.descend(&self.ties, low, TIE_BITS)?;
        }
        Ok(())
    }

    /// Experts whose counts of a round fit in a binding.
    fn expert_ranges(
        &self,
        bits: u32,
    ) -> Result<impl Iterator<Item = Range<usize>> + Clone + use<>, Error> {
        let step = self.wgpu.per_window("an expert's counts", 1 << bits)?;
        let experts = self.pairs.experts();
        Ok((0..experts)
            .step_by(step)
            .map(move |start| start..experts.min(start + step)))
    }

    pub(super) fn parameters(&self, pairs: Range<usize>, experts: Range<usize>) -> Parameters {
        Parameters {
            pairs,
            experts,
            pair_mask: self.pair_mask,
            ..Parameters::default()
        }
    }

    /// Counts pairs by expert and bucket.
    fn count(&mut self, kernel: Kernel, low: u32, bits: u32) -> Result<(), Error> {
        let (wgpu, pairs) = (self.wgpu, self.pairs);
        wgpu.resize(&mut self.counts, pairs.experts() << bits)?;
        let top = match kernel {
            Kernel::CountKeys => u32::BITS,
            _ => u32::BITS - self.pair_mask.leading_zeros(),
        };
        let mut batch = Batch::new(wgpu);
        batch.clear(&self.counts);
        for experts in self.expert_ranges(bits)? {
            let of_experts = CUT * experts.start..CUT * experts.end;
            let cuts = wgpu.window(&self.cuts, of_experts.clone());
            let ties = wgpu.window(&self.ties, of_experts);
            let counts = wgpu.window(&self.counts, experts.start << bits..experts.end << bits);
            for range in wgpu.pair_ranges(pairs.len())? {
                let ids = wgpu.window(&pairs.ids, range.clone());
                let keys = wgpu.window(self.keys, range.clone());
                let parameters = Parameters {
                    low,
                    bits,
                    is_first: low + bits >= top,
                    ids: ids.base,
                    keys: keys.base,
                    cuts: cuts.base / CUT as u32,
                    ties: ties.base / CUT as u32,
                    counts: counts.base,
                    ..self.parameters(range.clone(), experts.clone())
                };
                let mut bindings: Vec<(u32, Binding<'_>)> = vec![
                    (1, ids.into()),
                    (2, keys.into()),
                    (3, cuts.into()),
                    (5, counts.into()),
                ];
                if kernel == Kernel::CountTies {
                    bindings.push((4, ties.into()));
                }
                let groups = range.len().div_ceil(THREADS);
                batch.dispatch(kernel, groups, &parameters.words(), &bindings);
            }
        }
        batch.submit()
    }

    /// Takes the counts of a round into cuts or ties.
    fn descend(&self, refined: &Buffer<u32>, low: u32, bits: u32) -> Result<(), Error> {
        let wgpu = self.wgpu;
        let mut batch = Batch::new(wgpu);
        for experts in self.expert_ranges(bits)? {
            let counts = wgpu.window(&self.counts, experts.start << bits..experts.end << bits);
            let refined = wgpu.window(refined, CUT * experts.start..CUT * experts.end);
            let parameters = Parameters {
                low,
                bits,
                cuts: refined.base / CUT as u32,
                counts: counts.base,
                ..self.parameters(0..0, experts.clone())
            };
            let bindings = [(6, refined.into()), (10, counts.into())];
            let groups = experts.len();
            batch.dispatch(Kernel::Descend, groups, &parameters.words(), &bindings);
        }
        batch.submit()
    }

    /// On one rank: the first of the pairs with the boundary key are kept.
    fn start_ties(&self) -> Result<(), Error> {
        let experts = self.pairs.experts();
        let cuts = self.wgpu.whole("cuts of experts", &self.cuts)?;
        let ties = self.wgpu.whole("cuts of experts", &self.ties)?;
        let parameters = self.parameters(0..0, 0..experts);
        let bindings = [(6, cuts.into()), (11, ties.into())];
        let groups = experts.div_ceil(THREADS);
        let mut batch = Batch::new(self.wgpu);
        batch.dispatch(Kernel::StartTies, groups, &parameters.words(), &bindings);
        batch.submit()
    }

    /// Gives the ties at the cuts to lower ranks first; whether this rank keeps some but not all of its own.
    fn share_ties<E: Exchange>(&mut self, own: &[u32], exchange: &mut E) -> Result<bool, Error> {
        let mut cuts = self.wgpu.download(&self.cuts)?;
        let Some(dealt) = deal_ties(&mut cuts, own, exchange)? else {
            return Ok(false);
        };
        self.wgpu.write(&cuts, &mut self.cuts)?;
        self.wgpu.write(&dealt.ties, &mut self.ties)?;
        Ok(dealt.some)
    }
}

/// As in select.wgsl, from `pairs` on; bases are named after what begins there.
#[derive(Clone, Debug, Default)]
pub(super) struct Parameters {
    pub(super) pairs: Range<usize>,
    pub(super) experts: Range<usize>,
    pub(super) low: u32,
    pub(super) bits: u32,
    pub(super) is_first: bool,
    pub(super) pair_mask: u32,
    pub(super) ids: u32,
    pub(super) keys: u32,
    pub(super) cuts: u32,
    pub(super) ties: u32,
    pub(super) counts: u32,
    pub(super) blocks: usize,
    pub(super) first_block: u32,
    pub(super) kept: Range<usize>,
    pub(super) kept_base: u32,
}

impl Parameters {
    pub(super) fn words(&self) -> [u32; 18] {
        [
            self.pairs.len() as u32,
            self.pairs.start as u32,
            self.experts.len() as u32,
            self.experts.start as u32,
            self.low,
            self.bits,
            self.is_first.into(),
            self.pair_mask,
            self.ids,
            self.keys,
            self.cuts,
            self.ties,
            self.counts,
            self.blocks as u32,
            self.first_block,
            self.kept.start as u32,
            self.kept.end as u32,
            self.kept_base,
        ]
    }
}
