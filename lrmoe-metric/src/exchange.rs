use crate::Error;

/// Why a collective of the caller failed.
pub type ExchangeError = Box<dyn std::error::Error + Send + Sync>;

/// The collectives that selection needs, over a communicator of the caller.
///
/// All ranks make the same calls in the same order with slices of the same length. They are made on the calling thread, never inside a
/// parallel loop.
pub trait Exchange {
    /// This rank, in `0..ranks()`.
    fn rank(&self) -> usize;

    /// Number of ranks, at least 1.
    fn ranks(&self) -> usize;

    /// Replaces every value by its sum over the ranks.
    ///
    /// # Errors
    ///
    /// Whatever the communicator reports; a sum past `u32::MAX` must be an error on every rank.
    fn sum(&mut self, values: &mut [u32]) -> Result<(), ExchangeError>;

    /// Replaces every value by its maximum over the ranks.
    ///
    /// # Errors
    ///
    /// Whatever the communicator reports.
    fn max(&mut self, values: &mut [u32]) -> Result<(), ExchangeError>;

    /// Writes `mine` of every rank, in rank order, to `all` (`[ranks * mine.len()]`).
    ///
    /// # Errors
    ///
    /// Whatever the communicator reports.
    fn all_gather(&mut self, mine: &[u32], all: &mut [u32]) -> Result<(), ExchangeError>;
}

/// The exchange of a single rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Exchange for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn sum(&mut self, _values: &mut [u32]) -> Result<(), ExchangeError> {
        Ok(())
    }

    fn max(&mut self, _values: &mut [u32]) -> Result<(), ExchangeError> {
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u32], all: &mut [u32]) -> Result<(), ExchangeError> {
        if mine.len() != all.len() {
            return Err(format!("gather of {} values into {}", mine.len(), all.len()).into());
        }
        all.copy_from_slice(mine);
        Ok(())
    }
}

/// This rank's result of a step that all ranks have just compared: its own error, else that of another rank (`failed` not 0).
pub(crate) fn settle<T>(local: Result<T, Error>, failed: u32) -> Result<T, Error> {
    match local {
        Ok(_) if failed != 0 => Err(Error::Elsewhere),
        local => local,
    }
}
