use ndarray::ArrayView2;

use crate::Error;
use crate::error::check_length;

/// This rank's share of the quota of each expert, `[experts]`, for a selection without collectives: give it to [`select`](crate::select())
/// or [`select_keys`](crate::select_keys) with [`Solo`](crate::Solo), on every rank.
///
/// `quotas` are those over all ranks, `[experts]`; `loads` the unmasked pairs of every rank, `[ranks, experts]`, which the ranks gather
/// anyway to plan. The `min(quotas[e], n[e])` pairs of an expert are apportioned to the ranks in proportion to their loads by largest
/// remainder, ties to the lower rank, so that the shares of all ranks sum to it exactly and none passes its load.
///
/// **Cost.** `ranks * experts` steps of integer arithmetic, no exchange; the selection then waits for no other rank.
///
/// **Loss.** A rank with many large scores keeps no more than one with few, and which pairs are kept depends on how tokens lie on ranks.
/// `Priority` stays unbiased; its threshold tau is then the rank's own. On 2026-11-29 (`tests/trace.rs`: a trained model of 32 experts, 8 ranks
/// of 512 tokens, k = 4), retention 0.5 / 0.25 / 0.1: `Top` kept 0.45 / 1.2 / 2.7 % less of the sum of `DownGrad` scores than with global quotas,
/// and `Priority` estimated the sums with 1.09 / 1.12 / 1.24 times the squared error.
///
/// ```
/// use lrmoe_metric::local_quotas;
/// use ndarray::array;
///
/// // Two ranks, two experts; 5 of 10 pairs and 1 of 2.
/// let loads = array![[3, 1], [7, 1]];
/// assert_eq!(local_quotas(&[5, 1], loads.view(), 0)?, [2, 1]);
/// assert_eq!(local_quotas(&[5, 1], loads.view(), 1)?, [3, 0]);
/// # Ok::<(), lrmoe_metric::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Rank`], [`Error::Length`].
pub fn local_quotas(
    quotas: &[u32],
    loads: ArrayView2<'_, u32>,
    rank: usize,
) -> Result<Vec<u32>, Error> {
    let (ranks, experts) = loads.dim();
    check_length("quotas", quotas.len(), experts)?;
    if rank >= ranks {
        return Err(Error::Rank { rank, ranks });
    }
    let share = |(loads, &quota): (ndarray::ArrayView1<'_, u32>, &u32)| {
        let total: u64 = loads.iter().map(|&load| u64::from(load)).sum();
        let quota = total.min(quota.into());
        // Quotient and remainder of a rank's exact share; the product of two values below 2^32 fits.
        let exact = |load: u32| {
            let product = u64::from(load) * quota;
            (product / total.max(1), product % total.max(1))
        };
        let (mine, remainder) = exact(loads[rank]);
        let mut left = quota;
        let mut before = 0;
        for (other, &load) in loads.iter().enumerate() {
            let (whole, rest) = exact(load);
            left -= whole;
            before += u64::from(rest > remainder || (rest == remainder && other < rank));
        }
        // Fewer are left than there are remainders above 0, so a share is at most the exact one rounded up, and that at most the load.
        (mine + u64::from(before < left)) as u32
    };
    Ok(loads.columns().into_iter().zip(quotas).map(share).collect())
}
