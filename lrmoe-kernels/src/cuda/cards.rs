//! What there is on this machine, without opening it.

use std::ffi::c_int;

use cudarc::driver::{
    result::{self, DriverError, device},
    sys::{self, CUdevice_attribute},
};

use super::device::{explain, none};
use crate::Error;

/// A card, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardInfo {
    /// Name of the model.
    pub name: String,
    /// Compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// Looks for the driver, and asks for the latest version of CUDA that it runs (major, minor).
///
/// # Errors
///
/// [`Error::NoDevice`].
pub fn find_driver() -> Result<(u32, u32), Error> {
    // Its functions panic without.
    // SAFETY: loading the driver's library runs nothing but its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(none("the driver's library (libcuda) is not found"));
    }
    let mut version: c_int = 0;
    // SAFETY: an integer is written.
    let asked = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    asked.map_err(|error| none(explain(error)))?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// The cards of this machine, in the order of their numbers.
///
/// # Errors
///
/// [`Error::NoDevice`] without a driver, or if it finds none.
pub fn cards() -> Result<Vec<CardInfo>, Error> {
    find_driver()?;
    let failed = |error| none(explain(error));
    result::init().map_err(failed)?;
    let count = device::get_count().map_err(failed)?;
    (0..count)
        .map(|ordinal| describe(ordinal).map_err(failed))
        .collect()
}

/// The driver is initialised.
fn describe(ordinal: c_int) -> Result<CardInfo, DriverError> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };

    let card = device::get(ordinal)?;
    // SAFETY: the driver gave this card.
    let attribute = |which| unsafe { device::get_attribute(card, which) };
    Ok(CardInfo {
        name: device::get_name(card)?,
        compute_capability: (
            attribute(MAJOR)?.unsigned_abs(),
            attribute(MINOR)?.unsigned_abs(),
        ),
        // SAFETY: likewise.
        memory_bytes: unsafe { device::total_mem(card) }? as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cards need a driver; each that is listed can be asked for by its number.
    #[test]
    fn cards_need_a_driver() {
        let found = cards();
        match (find_driver(), &found) {
            (Err(driver), Err(cards)) => assert_eq!(driver.to_string(), cards.to_string()),
            (Err(driver), Ok(_)) => panic!("cards, but {driver}"),
            (Ok((major, _)), _) => assert!(major > 0),
        }
        for card in found.iter().flatten() {
            assert!(!card.name.is_empty() && card.memory_bytes > 0, "{card:?}");
        }
    }
}
