use lrmoe_metric::{Error as MetricError, Exchange};

use super::{
    Buffer, Cuda, Pairs,
    kernel::{Kernel, THREADS},
    metric::check_length,
};
use crate::{
    Error, KeptKeys, Memory,
    cuts::{ROUNDS, TIE_BITS, agree, deal_ties, first_cuts, is_any_cut, pair_mask},
};

/// Pairs that a block compacts.
const BLOCK: usize = 4 * THREADS;

impl Cuda {
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
        let own = pairs.loads.iter().zip(quotas);
        let most = own.map(|(load, quota)| *load.min(quota) as usize).sum();
        search.compact(most, exchange)
    }
}

/// A selection under way.
struct Search<'a> {
    cuda: &'a Cuda,
    pairs: &'a Pairs,
    keys: &'a Buffer<u32>,
    /// By key, and among equal keys by pair id; a cut for each expert.
    cuts: Buffer<u32>,
    ties: Buffer<u32>,
    counts: Buffer<u32>,
    /// Kept pairs of each block, then where they go.
    blocks: Buffer<u32>,
    next: Buffer<u32>,
    kept: Buffer<u32>,
    pair_mask: u32,
}

/// The bits of keys or pair ids that a round looks at.
#[derive(Clone, Copy, Default)]
struct Round {
    low: u32,
    bits: u32,
    is_first: bool,
}

impl<'a> Search<'a> {
    fn new(
        cuda: &'a Cuda,
        pairs: &'a Pairs,
        keys: &'a Buffer<u32>,
        cuts: &[u32],
    ) -> Result<Self, Error> {
        Ok(Self {
            cuda,
            pairs,
            keys,
            ties: cuda.upload(&vec![0; cuts.len()])?,
            cuts: cuda.upload(cuts)?,
            counts: Buffer::default(),
            blocks: Buffer::default(),
            next: cuda.upload(&vec![0; pairs.experts()])?,
            kept: Buffer::default(),
            pair_mask: pair_mask(pairs.len()),
        })
    }

    /// Looks for the cut of every expert that keeps some but not all of its pairs.
    fn find_cuts<E: Exchange>(&mut self, exchange: &mut E) -> Result<(), Error> {
        let alone = exchange.ranks() == 1;
        // Of this rank, in the last round.
        let mut own = Vec::new();
        for (at, (low, bits)) in ROUNDS.into_iter().enumerate() {
            let round = Round {
                low,
                bits,
                is_first: at == 0,
            };
            self.count(Kernel::CountKeys, round)?;
            if !alone {
                own = self.cuda.download(&self.counts)?;
                let mut all = own.clone();
                exchange.sum(&mut all).map_err(MetricError::Exchange)?;
                self.cuda.write(&all, &mut self.counts)?;
            }
            self.launch(Kernel::Descend, self.pairs.experts(), round)?;
        }
        if alone {
            let blocks = self.pairs.experts().div_ceil(THREADS);
            self.launch(Kernel::StartTies, blocks, Round::default())?;
        } else if !self.share_ties(&own, exchange)? {
            return Ok(());
        }
        let bits = u32::BITS - self.pair_mask.leading_zeros();
        for low in (0..bits).step_by(TIE_BITS as usize).rev() {
            let round = Round {
                low,
                bits: TIE_BITS,
                is_first: low + TIE_BITS >= bits,
            };
            self.count(Kernel::CountTies, round)?;
            // Ties are refined in place of cuts.
            std::mem::swap(&mut self.cuts, &mut self.ties);
            let refined = self.launch(Kernel::Descend, self.pairs.experts(), round);
            std::mem::swap(&mut self.cuts, &mut self.ties);
            refined?;
        }
        Ok(())
    }

    /// Gives the ties at the cuts to lower ranks first; whether this rank keeps some but not all of its own.
    fn share_ties<E: Exchange>(&mut self, own: &[u32], exchange: &mut E) -> Result<bool, Error> {
        let mut cuts = self.cuda.download(&self.cuts)?;
        let Some(dealt) = deal_ties(&mut cuts, own, exchange)? else {
            return Ok(false);
        };
        self.cuda.write(&cuts, &mut self.cuts)?;
        self.cuda.write(&dealt.ties, &mut self.ties)?;
        Ok(dealt.some)
    }

    /// Counts pairs by expert and bucket.
    fn count(&mut self, kernel: Kernel, round: Round) -> Result<(), Error> {
        let counts = self.pairs.experts() << round.bits;
        self.cuda.zero(&mut self.counts, counts)?;
        self.launch(kernel, self.pairs.len().div_ceil(THREADS), round)
    }

    /// Writes the kept pairs of this rank, at most `most`, and finds the keys that follow.
    fn compact<E: Exchange>(
        mut self,
        most: usize,
        exchange: &mut E,
    ) -> Result<KeptKeys<Cuda>, Error> {
        let cuda = self.cuda;
        let number = self.pairs.len().div_ceil(BLOCK);
        cuda.resize(&mut self.kept, most)?;
        cuda.resize(&mut self.blocks, number + 1)?;
        self.launch(Kernel::CountKept, number, Round::default())?;
        self.launch(Kernel::PlaceBlocks, 1, Round::default())?;
        self.launch(Kernel::WriteKept, number, Round::default())?;
        if exchange.ranks() > 1 {
            let blocks = cuda.download(&self.blocks)?;
            let len = blocks.last().map_or(0, |&len| len as usize);
            self.kept.truncate(len);
            let mut all = cuda.download(&self.next)?;
            exchange.max(&mut all).map_err(MetricError::Exchange)?;
            cuda.write(&all, &mut self.next)?;
        }
        Ok(KeptKeys {
            pairs: self.kept,
            next: self.next,
        })
    }

    fn launch(&self, kernel: Kernel, blocks: usize, round: Round) -> Result<(), Error> {
        let (cuda, pairs) = (self.cuda, self.pairs);
        let parameters = [
            cuda.address(&pairs.ids)?,
            cuda.address(self.keys)?,
            cuda.address(&self.cuts)?,
            cuda.address(&self.ties)?,
            cuda.address(&self.counts)?,
            cuda.address(&self.blocks)?,
            cuda.address(&self.next)?,
            cuda.address(&self.kept)?,
            pairs.len() as u64,
            pairs.experts() as u64,
            round.low.into(),
            round.bits.into(),
            round.is_first.into(),
            self.pair_mask.into(),
            pairs.len().div_ceil(BLOCK) as u64,
        ];
        // SAFETY: as in select.cu. Keys are checked to be as many as pairs; cuts, ties and next have an entry for each expert, counts one for
        // each bucket of the round, blocks one for each block and one more, and no more pairs are kept than `kept` has room for: the loads and
        // quotas of `pairs` say how many.
        unsafe { cuda.launch(kernel, blocks, &parameters) }
    }
}
