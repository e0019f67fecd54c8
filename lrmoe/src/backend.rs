//! From the name of a device to backends of `lrmoe_kernels`.

use lrmoe_kernels::Cpu;

use crate::config::Device;
use crate::error::Error;
use crate::layer::Backend;

/// Work that any backend can do.
pub(crate) trait OnBackend {
    /// What comes of it.
    type Output;

    /// Does it, with the backend that each rank of the process has.
    fn run<B: Backend + Clone>(self, of_rank: impl Fn(usize) -> B) -> Result<Self::Output, Error>;
}

/// Does the work on a device.
///
/// # Errors
/// Those of the work; a device that is not there, or not in this program.
pub(crate) fn on_device<W: OnBackend>(device: Device, work: W) -> Result<W::Output, Error> {
    match device {
        Device::Cpu => work.run(|_| Cpu),
        #[cfg(feature = "wgpu")]
        Device::Wgpu => {
            let wgpu = lrmoe_kernels::Wgpu::new().map_err(Error::Device)?;
            tracing::info!(device = wgpu.adapter_info().name, "computing on wgpu");
            work.run(|_| wgpu.clone())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cards) => {
            let cards = open_cards(cards)?;
            work.run(|rank| cards[rank % cards.len()].clone())
        }
        #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
        device => Err(crate::config::ConfigError::NotBuilt { device }.into()),
    }
}

/// The named cards, or card 0.
///
/// # Errors
/// A card that is not there.
#[cfg(feature = "cuda")]
pub(crate) fn open_cards(
    cards: Option<crate::config::Cards>,
) -> Result<Vec<lrmoe_kernels::Cuda>, Error> {
    let numbers = cards.unwrap_or(crate::config::Cards::one(0)).numbers();
    let opened: Result<Vec<_>, _> = numbers.map(lrmoe_kernels::Cuda::new).collect();
    let cards = opened.map_err(Error::Device)?;
    tracing::info!(?cards, "computing on cuda");
    Ok(cards)
}
