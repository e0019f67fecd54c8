use std::fmt;
use std::str::FromStr;

use lrmoe_metric::Method;
use lrmoe_plan::QuotaPolicy;

use super::error::above;
use super::{ConfigError, TrainOptions};
use crate::policy::{DxWeight, Policy, Scope, Selecting};

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

impl TrainOptions {
    /// A policy with the options that shape it; `retention` stands before the option.
    pub(super) fn policy(
        &self,
        name: PolicyName,
        retention: Option<f64>,
    ) -> Result<Policy, ConfigError> {
        // Checked for every policy: a wrong value is wrong even where it has no effect.
        let retention = self.mean_retention(retention)?;
        let capacity_factor = above("capacity-factor", self.capacity_factor.unwrap_or(1.0), 0.0)?;
        let selecting = self.selecting(retention)?;
        let policy = match name {
            PolicyName::Dropless => Policy::Dropless,
            PolicyName::Symi => Policy::Symi { capacity_factor },
            PolicyName::Lrmoe => Policy::Lrmoe(selecting),
        };
        policy.check_stash(self.stash.unwrap_or_default())?;
        Ok(policy)
    }

    fn selecting(&self, retention: f64) -> Result<Selecting, ConfigError> {
        let standard = Selecting::default();
        let method = self.select.unwrap_or(standard.method);
        let scope = self.scope.unwrap_or(standard.scope);
        if scope == Scope::Wgrad && self.dx_weight == Some(DxWeight::Selection) {
            return Err(ConfigError::DxWeight);
        }
        let selecting = Selecting {
            retention,
            score: self.score.unwrap_or(standard.score),
            method,
            quotas: self.quota_policy.unwrap_or(match method {
                Method::Priority => QuotaPolicy::Proportional,
                Method::Top => QuotaPolicy::Blend,
            }),
            recalibration: self.recalibration.unwrap_or(standard.recalibration),
            rescale: self.rescale.unwrap_or(standard.rescale),
            scope,
            compensation: self.compensation.unwrap_or(standard.compensation),
            dx_weight: self.dx_weight.unwrap_or(standard.dx_weight),
            router_gradient: self.router_gradient.unwrap_or(standard.router_gradient),
            ..standard
        };
        selecting.check()?;
        Ok(selecting)
    }

    pub(super) fn contenders(&self) -> Result<Vec<Contender>, ConfigError> {
        let mut contenders: Vec<Contender> = Vec::new();
        for given in self.compare.iter().flatten() {
            let name = given.to_string();
            if contenders.iter().any(|known| known.name == name) {
                return Err(ConfigError::Repeated { name });
            }
            let policy = self.policy(given.policy, given.retention)?;
            contenders.push(Contender {
                name,
                policy,
                layers_differ: given.retention.is_none(),
            });
        }
        Ok(contenders)
    }
}
