//! The end of a selection: what is kept, in order.

use std::ops::Range;

use lrmoe_metric::{Error as MetricError, Exchange};

use super::{
    Buffer, Wgpu,
    batch::{Batch, Binding},
    kernel::Kernel,
    select::{BLOCK, Parameters, Search},
};
use crate::{Error, KeptKeys, Memory};

impl Search<'_> {
    /// Writes the kept pairs of this rank, at most `most`, and finds the keys that follow.
    pub(super) fn compact<E: Exchange>(
        &self,
        most: usize,
        exchange: &mut E,
    ) -> Result<KeptKeys<Wgpu>, Error> {
        let (wgpu, experts) = (self.wgpu, self.pairs.experts());
        let mut kept = Buffer::default();
        wgpu.resize(&mut kept, most)?;
        let mut next = wgpu.upload(&vec![0; experts])?;
        let blocks = self.place_kept(&next, &kept)?;
        if exchange.ranks() > 1 {
            let blocks = wgpu.download(&blocks)?;
            kept.truncate(blocks.last().map_or(0, |&len| len as usize));
            let mut all = wgpu.download(&next)?;
            exchange.max(&mut all).map_err(MetricError::Exchange)?;
            wgpu.write(&all, &mut next)?;
        }
        Ok(KeptKeys { pairs: kept, next })
    }

    /// Fills `kept` and `next`; gives where each block of pairs begins in `kept`, and behind it the number of kept pairs.
    fn place_kept(&self, next: &Buffer<u32>, kept: &Buffer<u32>) -> Result<Buffer<u32>, Error> {
        let (wgpu, pairs) = (self.wgpu, self.pairs);
        let ranges = wgpu.pair_ranges(pairs.len())?;
        let number = ranges.clone().map(|range| range.len().div_ceil(BLOCK));
        let number: usize = number.sum();
        let mut blocks = Buffer::default();
        wgpu.resize(&mut blocks, number + 1)?;
        let of_blocks = wgpu.whole("counts of blocks", &blocks)?;
        let next = wgpu.whole("keys of experts", next)?;
        let cuts = wgpu.whole("cuts of experts", &self.cuts)?;
        let ties = wgpu.whole("cuts of experts", &self.ties)?;
        let inputs = |range: &Range<usize>, first_block| {
            let ids = wgpu.window(&pairs.ids, range.clone());
            let keys = wgpu.window(self.keys, range.clone());
            let parameters = Parameters {
                ids: ids.base,
                keys: keys.base,
                first_block,
                ..self.parameters(range.clone(), 0..pairs.experts())
            };
            (parameters, [(1, ids), (2, keys), (3, cuts), (4, ties)])
        };
        let bind = |windows: &[_]| -> Vec<(u32, Binding<'_>)> {
            let windows = windows.iter();
            windows
                .map(|&(number, window)| (number, Binding::Window(window)))
                .collect()
        };
        let mut batch = Batch::new(wgpu);
        let mut first = 0;
        for range in ranges.clone() {
            let (parameters, windows) = inputs(&range, first as u32);
            let bindings = bind(&[&windows[..], &[(7, of_blocks), (8, next)]].concat());
            let groups = range.len().div_ceil(BLOCK);
            batch.dispatch(Kernel::CountKept, groups, &parameters.words(), &bindings);
            first += groups;
        }
        let all = Parameters {
            blocks: number,
            ..self.parameters(0..0, 0..0)
        };
        batch.dispatch(
            Kernel::PlaceBlocks,
            1,
            &all.words(),
            &bind(&[(7, of_blocks)]),
        );
        first = 0;
        for range in ranges {
            let (parameters, windows) = inputs(&range, first as u32);
            let groups = range.len().div_ceil(BLOCK);
            for written in wgpu.pair_ranges(Wgpu::len(kept))? {
                let to = wgpu.window(kept, written.clone());
                let parameters = Parameters {
                    kept_base: to.base,
                    kept: written,
                    ..parameters.clone()
                };
                let bindings = bind(&[&windows[..], &[(7, of_blocks), (9, to)]].concat());
                batch.dispatch(Kernel::WriteKept, groups, &parameters.words(), &bindings);
            }
            first += groups;
        }
        batch.submit()?;
        Ok(blocks)
    }
}
