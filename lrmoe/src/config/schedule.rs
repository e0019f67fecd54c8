use std::fmt;
use std::str::FromStr;

use lrmoe_plan::Stash;

use super::error::within;
use super::{ConfigError, TrainOptions};
use crate::policy::Selecting;

/// How the retention of the layers changes over a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RetentionSchedule {
    /// It does not.
    #[default]
    Constant,
    /// In a line over the steps, the same in every layer.
    Linear {
        /// At the first step.
        from: f64,
        /// At the last.
        to: f64,
    },
    /// All pairs for some steps, then the retention of the options.
    Warmup {
        /// Steps with all pairs.
        steps: u32,
    },
    /// In each layer what keeps the variance that selection adds to its weight gradient at a share of that which the minibatch has. The retention of the
    /// options holds until the first measurement.
    Adaptive {
        /// Variance of the selection over that of the minibatch, above 0.
        share: f64,
        /// Steps between measurements, at least 1.
        every: u32,
    },
}

/// Steps between measurements where nothing is said.
const EVERY: u32 = 20;

impl fmt::Display for RetentionSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant => f.pad("constant"),
            Self::Linear { from, to } => f.pad(&format!("linear:{from}:{to}")),
            Self::Warmup { steps } => f.pad(&format!("warmup:{steps}")),
            Self::Adaptive { share, every } => f.pad(&format!("adaptive:{share}:{every}")),
        }
    }
}

impl FromStr for RetentionSchedule {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let parts: Vec<&str> = text.split(':').collect();
        let unknown = || ConfigError::Schedule { text: text.into() };
        let number = |text: &str| text.parse::<f64>().map_err(|_| unknown());
        let share = |text: &str| {
            let share = number(text)?;
            (0.0..=1.0)
                .contains(&share)
                .then_some(share)
                .ok_or_else(unknown)
        };
        let steps = |text: &str| match text.parse() {
            Ok(steps) if steps > 0 => Ok(steps),
            _ => Err(unknown()),
        };
        let adaptive = |text: &str, every: u32| match number(text)? {
            share if share > 0.0 && share.is_finite() => Ok(Self::Adaptive { share, every }),
            _ => Err(unknown()),
        };
        match parts[..] {
            ["constant"] => Ok(Self::Constant),
            ["linear", from, to] => Ok(Self::Linear {
                from: share(from)?,
                to: share(to)?,
            }),
            ["warmup", count] => Ok(Self::Warmup {
                steps: steps(count)?,
            }),
            ["adaptive", share] => adaptive(share, EVERY),
            ["adaptive", share, every] => adaptive(share, steps(every)?),
            _ => Err(unknown()),
        }
    }
}

impl TrainOptions {
    /// Mean of the layers' retention; `of_all` stands before the option.
    pub(super) fn mean_retention(&self, of_all: Option<f64>) -> Result<f64, ConfigError> {
        let standard = [Selecting::default().retention];
        let given = match (&of_all, &self.retention) {
            (Some(one), _) => std::slice::from_ref(one),
            (None, Some(layers)) if !layers.is_empty() => layers.as_slice(),
            (None, _) => &standard[..],
        };
        for &share in given {
            within("retention", share, 0.0..=1.0)?;
        }
        Ok(given.iter().sum::<f64>() / given.len() as f64)
    }

    /// Retention of each layer, if more than one is given.
    pub(super) fn layer_retention(&self, layers: usize) -> Result<Option<Vec<f64>>, ConfigError> {
        match self.retention.as_deref() {
            Some(given) if given.len() > 1 && given.len() != layers => Err(ConfigError::Layers {
                given: given.len(),
                layers,
            }),
            Some(given) if given.len() > 1 => Ok(Some(given.to_vec())),
            _ => Ok(None),
        }
    }

    pub(super) fn retention_schedule(&self, steps: u32) -> Result<RetentionSchedule, ConfigError> {
        let schedule = self.retention_schedule.unwrap_or_default();
        let stash = self.stash.unwrap_or_default();
        let mut compared = self.compare.iter().flatten();
        match schedule {
            RetentionSchedule::Linear { .. }
                if self.retention.is_some() || compared.any(|run| run.retention.is_some()) =>
            {
                Err(ConfigError::TwoRetentions { schedule })
            }
            RetentionSchedule::Adaptive { .. } if stash != Stash::Recompute => {
                let option = "retention-schedule adaptive";
                Err(ConfigError::KeptOnce { option, stash })
            }
            RetentionSchedule::Warmup { steps: all } => {
                within("warm-up of retention-schedule", all, 1..=steps).map(|_| schedule)
            }
            _ => Ok(schedule),
        }
    }
}
