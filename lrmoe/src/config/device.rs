use std::fmt;
use std::str::FromStr;

use super::ConfigError;

/// Where the MoE layers compute; the dense part of the model is on the CPU in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// All cores of this machine.
    #[default]
    Cpu,
    /// The fastest Vulkan, Metal or DX12 device of this machine, which the ranks share.
    Wgpu,
    /// NVIDIA cards, which the ranks of the process take in turn. `None`: the first; or, where a launcher started several processes on this node,
    /// that of the process, see [`Device::of_process`].
    Cuda(Option<Cards>),
}

/// Consecutive numbers of NVIDIA cards, as the driver counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cards {
    first: u32,
    last: u32,
}

impl Cards {
    /// One card.
    pub fn one(number: u32) -> Self {
        Self {
            first: number,
            last: number,
        }
    }

    /// Their numbers, of which there is at least one.
    pub fn numbers(self) -> impl ExactSizeIterator<Item = usize> {
        self.first as usize..self.last as usize + 1
    }
}

impl Device {
    /// Settles which card a process takes that names none: the one with the number of the process among those of its node, which launchers
    /// call its local rank.
    #[must_use]
    pub fn of_process(self, local_rank: u32) -> Self {
        match self {
            Self::Cuda(None) => Self::Cuda(Some(Cards::one(local_rank))),
            other => other,
        }
    }

    /// The feature of this crate that brings it, if it needs one.
    pub(super) fn feature(self) -> &'static str {
        match self {
            Self::Cpu => "default",
            Self::Wgpu => "wgpu",
            Self::Cuda(_) => "cuda",
        }
    }

    /// Refuses a device that this program was built without.
    pub(super) fn built(self) -> Result<Self, ConfigError> {
        let built = match self {
            Self::Cpu => true,
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda(_) => cfg!(feature = "cuda"),
        };
        if built {
            Ok(self)
        } else {
            Err(ConfigError::NotBuilt { device: self })
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(Some(Cards { first, last })) if first == last => {
                f.pad(&format!("cuda:{first}"))
            }
            Self::Cuda(Some(Cards { first, last })) => f.pad(&format!("cuda:{first}-{last}")),
            other => f.pad(match other {
                Self::Cpu => "cpu",
                Self::Wgpu => "wgpu",
                Self::Cuda(_) => "cuda",
            }),
        }
    }
}

impl FromStr for Device {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let cards = name.strip_prefix("cuda:").and_then(|numbers| {
            let (first, last) = numbers.split_once('-').unwrap_or((numbers, numbers));
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(Cards { first, last })
        });
        match (name, cards) {
            ("cpu", _) => Ok(Self::Cpu),
            ("wgpu", _) => Ok(Self::Wgpu),
            ("cuda", _) => Ok(Self::Cuda(None)),
            (_, Some(cards)) => Ok(Self::Cuda(Some(cards))),
            _ => Err(ConfigError::Device { name: name.into() }),
        }
    }
}
