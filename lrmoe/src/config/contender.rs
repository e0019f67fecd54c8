use std::fmt;
use std::str::FromStr;

use super::ConfigError;
use crate::policy::Policy;

/// A policy by name alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyName {
    /// Everything runs forward and backward.
    Dropless,
    /// Replicas follow popularity, pairs beyond capacity are dropped.
    Symi,
    /// Selected pairs run backward.
    Lrmoe,
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Dropless => "dropless",
            Self::Symi => "symi",
            Self::Lrmoe => "lrmoe",
        })
    }
}

impl FromStr for PolicyName {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "dropless" => Ok(Self::Dropless),
            "symi" => Ok(Self::Symi),
            "lrmoe" => Ok(Self::Lrmoe),
            _ => Err(ConfigError::Policy { name: name.into() }),
        }
    }
}

/// `POLICY` or `lrmoe@RETENTION`, as a comparison names its runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContenderName {
    /// The policy.
    pub policy: PolicyName,
    /// Its retention, if it differs from the common option.
    pub retention: Option<f64>,
}

impl fmt::Display for ContenderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.retention {
            Some(retention) => write!(f, "{}@{retention}", self.policy),
            None => self.policy.fmt(f),
        }
    }
}

impl FromStr for ContenderName {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let Some((policy, retention)) = text.split_once('@') else {
            return Ok(Self {
                policy: text.parse()?,
                retention: None,
            });
        };
        match (policy.parse()?, retention.parse()) {
            (policy @ PolicyName::Lrmoe, Ok(retention)) => Ok(Self {
                policy,
                retention: Some(retention),
            }),
            _ => Err(ConfigError::Contender { text: text.into() }),
        }
    }
}

/// One run of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Contender {
    /// Name in tables, `lrmoe@0.25`.
    pub name: String,
    /// What it runs.
    pub policy: Policy,
    /// Whether layers have a retention of their own where the options give them one, rather than all that of the name.
    pub layers_differ: bool,
}
