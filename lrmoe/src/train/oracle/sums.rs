//! Sums from which follows how far a gradient is from the full one.

use std::ops::AddAssign;

use super::Agreement;

/// Sums over the components of a gradient g, the full gradient f and, over repeated draws of g, their mean m and variance v.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// g f
    pub(super) product: f64,
    /// g^2
    pub(super) selected: f64,
    /// f^2
    pub(super) full: f64,
    /// (g - f)^2
    pub(super) difference: f64,
    /// (m - f)^2
    pub(super) bias: f64,
    /// v over the number of draws: what (m - f)^2 is on average where nothing is biased.
    pub(super) noise: f64,
}

impl Sums {
    pub(super) const LEN: usize = 6;

    /// Sums over components of g and f, and of their spread where draws were repeated.
    pub(super) fn of<'a>(
        g: impl IntoIterator<Item = &'a f32>,
        f: impl IntoIterator<Item = &'a f32>,
        spread: Option<SpreadPart<'_>>,
    ) -> Self {
        let mut sums = Self::default();
        for (i, (g, f)) in g.into_iter().zip(f).enumerate() {
            let (g, f) = (f64::from(*g), f64::from(*f));
            sums.product += g * f;
            sums.selected += g * g;
            sums.full += f * f;
            sums.difference += (g - f) * (g - f);
            if let Some(spread) = &spread {
                sums.bias += (spread.mean[i] - f).powi(2);
                sums.noise += spread.squares[i] / spread.divisor;
            }
        }
        sums
    }

    pub(super) fn to_array(self) -> [f64; Self::LEN] {
        [
            self.product,
            self.selected,
            self.full,
            self.difference,
            self.bias,
            self.noise,
        ]
    }

    pub(super) fn from_array(
        [product, selected, full, difference, bias, noise]: [f64; Self::LEN],
    ) -> Self {
        Self {
            product,
            selected,
            full,
            difference,
            bias,
            noise,
        }
    }

    /// What they say; of the bias only if `draws` were repeated.
    pub(super) fn agreement(self, draws: u32) -> Agreement {
        let of_full = |square: f64| ratio(square.sqrt(), self.full.sqrt());
        let repeated = draws > 1;
        Agreement {
            cosine: ratio(self.product, self.selected.sqrt() * self.full.sqrt()),
            error: of_full(self.difference),
            mean_error: repeated.then(|| of_full(self.bias)).flatten(),
            standard_error: repeated.then(|| of_full(self.noise)).flatten(),
        }
    }
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.product += other.product;
        self.selected += other.selected;
        self.full += other.full;
        self.difference += other.difference;
        self.bias += other.bias;
        self.noise += other.noise;
    }
}

/// The quotient, where there is one.
pub(super) fn ratio(part: f64, whole: f64) -> Option<f64> {
    Some(part / whole).filter(|quotient| quotient.is_finite())
}

/// Mean and squared deviations of each component over the draws so far, by Welford's recurrence.
#[derive(Clone, Debug, Default)]
pub(super) struct Spread {
    draws: f64,
    mean: Vec<f64>,
    squares: Vec<f64>,
}

impl Spread {
    pub(super) fn take<'a>(&mut self, gradient: impl ExactSizeIterator<Item = &'a f32>) {
        self.mean.resize(gradient.len(), 0.0);
        self.squares.resize(gradient.len(), 0.0);
        self.draws += 1.0;
        let components = self.mean.iter_mut().zip(&mut self.squares);
        for ((mean, squares), value) in components.zip(gradient) {
            let off = f64::from(*value) - *mean;
            *mean += off / self.draws;
            *squares += off * (f64::from(*value) - *mean);
        }
    }

    /// Of some components, once there were two draws.
    pub(super) fn part(&self, components: std::ops::Range<usize>) -> Option<SpreadPart<'_>> {
        (self.draws > 1.0).then(|| SpreadPart {
            mean: &self.mean[components.clone()],
            squares: &self.squares[components],
            divisor: self.draws * (self.draws - 1.0),
        })
    }
}

/// Mean and squared deviations of components; the latter over `divisor` are the variance of the mean.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpreadPart<'a> {
    mean: &'a [f64],
    squares: &'a [f64],
    divisor: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_definitions() {
        let full = [3.0, 0.0, 4.0];
        let draws = [[3.0, 1.0, 4.0], [1.0, -1.0, 4.0], [2.0, 0.0, 1.0]];
        let mut spread = Spread::default();
        draws.iter().for_each(|draw| spread.take(draw.iter()));
        let sums = Sums::of(&draws[0], &full, spread.part(0..3));
        let agreement = sums.agreement(3);
        let close = |a: Option<f64>, b: f64| assert!((a.expect("a number") - b).abs() < 1e-12);
        close(agreement.cosine, 25.0 / (26.0_f64.sqrt() * 5.0));
        close(agreement.error, 1.0 / 5.0);
        // Means 2, 0, 3; variances 1, 1, 3.
        close(agreement.mean_error, 2.0_f64.sqrt() / 5.0);
        close(agreement.standard_error, (5.0_f64 / 3.0).sqrt() / 5.0);
        let single = sums.agreement(1);
        assert_eq!((single.mean_error, single.standard_error), (None, None));
    }

    #[test]
    fn nothing_is_said_where_there_is_no_gradient() {
        let zero = Sums::of(&[0.0], &[0.0], None).agreement(1);
        assert_eq!(zero, Agreement::default());
        let dropped = Sums::of(&[0.0], &[2.0], None).agreement(1);
        assert_eq!((dropped.cosine, dropped.error), (None, Some(1.0)));
    }
}
