use std::fmt;

use serde::Serialize;

/// A figure over the seeds of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean; `None` of a single run.
    pub standard_error: Option<f64>,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Runs.
    pub runs: usize,
}

impl Spread {
    /// Over the values; `None` without any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let runs = values.len();
        if runs == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / runs as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let variance = squares / (runs as f64 - 1.0);
        Some(Self {
            mean,
            standard_error: (runs > 1).then(|| (variance / runs as f64).sqrt()),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            runs,
        })
    }

    /// In another unit.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            mean: self.mean * factor,
            standard_error: self.standard_error.map(|error| error * factor.abs()),
            min: self.min * factor,
            max: self.max * factor,
            runs: self.runs,
        }
    }
}

impl fmt::Display for Spread {
    /// `mean +- standard error`, with as many digits as the precision says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(3);
        write!(f, "{:.digits$}", self.mean)?;
        match self.standard_error {
            Some(error) => write!(f, " +- {error:.digits$}"),
            None => Ok(()),
        }
    }
}
