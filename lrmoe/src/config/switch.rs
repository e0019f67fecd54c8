use std::fmt;
use std::str::FromStr;

use super::ConfigError;

/// Something that is on or off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// It is used.
    On,
    /// It is not.
    #[default]
    Off,
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

impl FromStr for Switch {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(ConfigError::Switch { name: name.into() }),
        }
    }
}
