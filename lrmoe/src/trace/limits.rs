//! Sizes beyond which a file is taken for damaged rather than memory for it.

use super::error::Fault;
use super::header::TraceSettings;

/// Most experts, ranks and layers.
pub(super) const MOST: usize = 1 << 16;
/// Most steps, so that their numbers fit in `steps`.
pub(super) const MOST_STEPS: u64 = i32::MAX as u64;
/// Most counts of one step: 1 GiB.
pub(super) const MOST_COUNTS: u64 = 1 << 28;

impl TraceSettings {
    /// Every size is at least 1 and within the limits.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let experts = self.experts;
        let sizes = [self.layers, self.ranks, experts];
        let counts = sizes
            .iter()
            .fold(1, |all, size| u64::saturating_mul(all, *size as u64));
        for (what, value, limit) in [
            ("layers", self.layers as u64, MOST as u64),
            ("ranks", self.ranks as u64, MOST as u64),
            ("experts", experts as u64, MOST as u64),
            (
                "experts per token",
                self.top_k.unwrap_or(1) as u64,
                experts as u64,
            ),
            (
                "tokens per rank",
                self.tokens_per_rank.unwrap_or(1) as u64,
                u32::MAX.into(),
            ),
            ("counts of a step", counts, MOST_COUNTS),
            (
                "first step and 1",
                u64::from(self.first_step) + 1,
                MOST_STEPS,
            ),
        ] {
            if !(1..=limit).contains(&value) {
                return Err(Fault::Size { what, value, limit });
            }
        }
        Ok(())
    }
}
