//! How ranks that share nothing yet get a few bytes of rank 0, such as the unique id of a
//! NCCL world.

mod guest;
mod host;
mod message;

use std::time::{Duration, Instant};

use crate::Error;

/// Gives every rank the `bytes` of rank 0, over TCP; those of the other ranks are not looked at.
///
/// Rank 0 listens on the port, on all its interfaces unless the host is a loopback address; the
/// others connect, whenever they come, and all leave once all have come. Whatever else connects, or
/// does not belong to the world, is turned away and keeps nobody waiting. A rank that goes away while
/// it waits counts as not come, and may come again. To find rank 0, and for its answer, a rank waits
/// no longer than `deadline` each, which should be the same on all ranks.
///
/// The port must be free: torchrun uses MASTER_PORT itself if it sets
/// `TORCHELASTIC_USE_AGENT_STORE` to `True`, and another port is to be given. Looking up a host's
/// name may take longer than the deadline.
///
/// # Errors
/// - [`Error::NoSuchRank`] if `rank` is not in `0..ranks`.
/// - [`Error::Address`] if the address cannot be found or the port cannot be had.
/// - [`Error::Absent`] with the lowest rank that has not come within `deadline`: on rank 0 and on
///   all that have come, and with rank 0 on ranks that do not find it.
/// - On a rank that is turned away: [`Error::WorldSize`] if rank 0 expects another number of ranks,
///   [`Error::RankTaken`] if another has come with its number.
/// - [`Error::Stranger`] if something else answers at the address.
/// - [`Error::TooLong`] for more than 65,536 bytes.
pub fn share(
    (rank, ranks): (usize, usize),
    address: (&str, u16),
    deadline: Duration,
    bytes: &[u8],
) -> Result<Vec<u8>, Error> {
    if rank >= ranks {
        return Err(Error::NoSuchRank { rank, ranks });
    }
    if rank > 0 {
        return guest::receive((rank, ranks), address, deadline);
    }
    if bytes.len() > message::MOST_BYTES {
        let (len, most) = (bytes.len(), message::MOST_BYTES);
        return Err(Error::TooLong { len, most });
    }
    if ranks > 1 {
        host::give(ranks, address, deadline, bytes)?;
    }
    Ok(bytes.to_vec())
}

/// What is left of a wait that began at `start`; `None` once it is over.
fn left(start: Instant, deadline: Duration) -> Option<Duration> {
    let left = deadline.checked_sub(start.elapsed())?;
    (!left.is_zero()).then_some(left)
}
