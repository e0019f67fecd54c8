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
}

impl Device {
    /// Refuses a device that this program was built without.
    pub(super) fn built(self) -> Result<Self, ConfigError> {
        if self == Self::Wgpu && !cfg!(feature = "wgpu") {
            return Err(ConfigError::NotBuilt { device: self });
        }
        Ok(self)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
        })
    }
}

impl FromStr for Device {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "wgpu" => Ok(Self::Wgpu),
            _ => Err(ConfigError::Device { name: name.into() }),
        }
    }
}
