//! Which sums over an expert's pairs the corrections need, and what they come to.

use lrmoe_metric::Method;

use super::Moments;
use crate::layer::element::LayerElement;

/// Which sums travel of an expert, `[1 + 4 D + parts F + F]` for `priority` and `[2 D + parts F]` for `top`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) method: Method,
    pub(super) width: usize,
    pub(super) hidden: usize,
    /// h and its derivatives by the pre-activations.
    pub(super) parts: usize,
}

impl Layout {
    pub(super) fn len(&self) -> usize {
        let Self {
            width,
            hidden,
            parts,
            ..
        } = *self;
        match self.method {
            Method::Priority => 1 + 4 * width + (parts + 1) * hidden,
            Method::Top => 2 * width + parts * hidden,
        }
    }

    /// What a rank knows from its tokens: the first numbers of an expert's.
    fn of_tokens(&self) -> usize {
        match self.method {
            Method::Priority => 1 + 4 * self.width,
            Method::Top => 2 * self.width,
        }
    }

    /// Adds a pair, with weight w, 0 if it is dropped. For `priority` the sums are w; x, w x, a and (1 - w) a; for `top` x and a of the dropped.
    pub(super) fn add_pair<T: LayerElement>(
        &self,
        sums: &mut [f64],
        (x, dy): (&[T], &[T]),
        p: f32,
        w: f32,
    ) {
        let (p, w) = (f64::from(p), f64::from(w));
        let number = |value: &T| f64::from(value.to_f32());
        let add = |sums: &mut [f64], row: &[T], factor: f64| {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += factor * number(value);
            }
        };
        match self.method {
            Method::Priority => {
                sums[0] += w;
                let mut parts = sums[1..].chunks_exact_mut(self.width);
                let factors = [(x, 1.0), (x, w), (dy, p), (dy, (1.0 - w) * p)];
                for ((row, factor), part) in factors.into_iter().zip(&mut parts) {
                    if factor != 0.0 {
                        add(part, row, factor);
                    }
                }
            }
            Method::Top if w == 0.0 => {
                let (of_x, of_a) = sums.split_at_mut(self.width);
                add(of_x, x, 1.0);
                add(&mut of_a[..self.width], dy, p);
            }
            Method::Top => {}
        }
    }

    /// Adds what a rank knows from an instance: for `priority` the sums over all pairs and that of w h, for `top` those over the dropped.
    pub(super) fn add_instance(&self, sums: &mut [f64], moments: &Moments, instance: usize) {
        let numbers = self.parts * self.hidden;
        let (all, rest) = sums[self.of_tokens()..].split_at_mut(numbers);
        let forward = moments.forward.of(instance, numbers);
        all.iter_mut()
            .zip(forward)
            .for_each(|(sum, part)| *sum += part);
        let retained = moments.backward.of(instance, numbers);
        match self.method {
            Method::Priority => rest
                .iter_mut()
                .zip(retained)
                .for_each(|(sum, part)| *sum += part),
            Method::Top => all
                .iter_mut()
                .zip(retained)
                .for_each(|(sum, part)| *sum -= part),
        }
    }

    /// The corrections of an expert with `n` pairs, of which `q` are retained.
    pub(super) fn corrections<T: LayerElement>(
        &self,
        sums: &[f32],
        down: &[T],
        (n, q): (f64, f64),
    ) -> Corrections {
        let sums: Vec<f64> = sums.iter().map(|sum| f64::from(*sum)).collect();
        let (width, hidden) = (self.width, self.hidden);
        let over = |values: &[f64], count: f64| -> Vec<f64> {
            values.iter().map(|value| value / count).collect()
        };
        let through_down = |values: &[f64]| back_through(down, values, hidden);
        match self.method {
            Method::Priority => {
                let weights = sums[0];
                let of_tokens: Vec<&[f64]> = sums[1..].chunks_exact(width).take(4).collect();
                let of_hidden: Vec<&[f64]> =
                    sums[self.of_tokens()..].chunks_exact(hidden).collect();
                let (mean_x, mean_a) = (over(of_tokens[0], n), over(of_tokens[2], n));
                let mean_h = over(of_hidden[0], n);
                let off = |mean: &[f64], weighted: &[f64]| -> Vec<f64> {
                    let both = mean.iter().zip(weighted);
                    both.map(|(mean, weighted)| weights * mean - weighted)
                        .collect()
                };
                let off_x = off(&mean_x, of_tokens[1]);
                let off_h = off(&mean_h, of_hidden[self.parts]);
                let off_a = of_tokens[3];
                let (b, off_b) = (through_down(&mean_a), through_down(off_a));
                let inward = of_hidden[1..self.parts].iter().map(|c| {
                    let mean_c = over(c, n);
                    [
                        (product(&mean_c, &b), single(&off_x)),
                        (product(&mean_c, &off_b), single(&mean_x)),
                    ]
                });
                Corrections {
                    inward: inward.map(Vec::from).collect(),
                    down: vec![
                        (single(&mean_a), single(&off_h)),
                        (single(off_a), single(&mean_h)),
                    ],
                }
            }
            Method::Top => {
                let (of_x, rest) = sums.split_at(width);
                let (of_a, of_hidden) = rest.split_at(width);
                let mut of_hidden = of_hidden.chunks_exact(hidden);
                let h = of_hidden.next().expect("parts are h and more");
                let (dropped, b) = (n - q, through_down(of_a));
                let inward = of_hidden.map(|c| {
                    let mean_c = over(c, dropped);
                    vec![(product(&mean_c, &b), single(&over(of_x, dropped)))]
                });
                Corrections {
                    inward: inward.collect(),
                    down: vec![(single(of_a), single(&over(h, dropped)))],
                }
            }
        }
    }
}

/// W_downᵀ v for W_down `[D, F]`.
fn back_through<T: LayerElement>(down: &[T], values: &[f64], hidden: usize) -> Vec<f64> {
    let mut sums = vec![0.0; hidden];
    for (row, value) in down.chunks_exact(hidden).zip(values) {
        for (sum, weight) in sums.iter_mut().zip(row) {
            *sum += value * f64::from(weight.to_f32());
        }
    }
    sums
}

fn product(a: &[f64], b: &[f64]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| (a * b) as f32).collect()
}

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Sums of outer products: columns times rows.
pub(super) type Outer = Vec<(Vec<f32>, Vec<f32>)>;

/// What an instance's gradients lack.
#[derive(Debug)]
pub(super) struct Corrections {
    /// Of gate (if gated) and up.
    pub(super) inward: Vec<Outer>,
    pub(super) down: Outer,
}
