use std::{f32::consts, fmt, str::FromStr};

use crate::Error;

/// What stands between an expert's first projections and its down projection.
///
/// Gated: `h = act(gate x) * up x`. Plain: `h = act(up x)`. The derivative of ReLU at 0 is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Gated SiLU.
    SwiGlu,
    /// Gated GELU, tanh form.
    GegluTanh,
    /// Gated GELU, erf form.
    GegluErf,
    /// Gated ReLU.
    ReGlu,
    /// Squared ReLU, plain.
    Relu2,
    /// GELU in its erf form, plain.
    Gelu,
    /// SiLU, plain.
    Silu,
}

use Activation::{GegluErf, GegluTanh, Gelu, ReGlu, Relu2, Silu, SwiGlu};

impl Activation {
    /// All activations.
    pub const ALL: [Self; 7] = [SwiGlu, GegluTanh, GegluErf, ReGlu, Relu2, Gelu, Silu];

    /// Whether experts have gate weights.
    pub fn is_gated(self) -> bool {
        matches!(self, SwiGlu | GegluTanh | GegluErf | ReGlu)
    }

    /// The name in configuration and trace files, what [`Display`](fmt::Display) prints and [`FromStr`] reads.
    pub fn name(self) -> &'static str {
        match self {
            SwiGlu => "swiglu",
            GegluTanh => "geglu_tanh",
            GegluErf => "geglu_erf",
            ReGlu => "reglu",
            Relu2 => "relu2",
            Gelu => "gelu",
            Silu => "silu",
        }
    }

    pub(crate) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Turns `up` into the input of the down projection. `gate` is ignored by plain activations.
    #[inline(always)]
    pub(crate) fn hidden(self, gate: &[f32], up: &mut [f32]) {
        match self {
            SwiGlu => gated(gate, up, silu),
            GegluTanh => gated(gate, up, gelu_tanh),
            GegluErf => gated(gate, up, gelu),
            ReGlu => gated(gate, up, relu),
            Relu2 => plain(up, relu2),
            Gelu => plain(up, gelu),
            Silu => plain(up, silu),
        }
    }

    /// From the pre-activations and the gradient `dh` of the hidden values: the gradients of the pre-activations in their place, and the
    /// hidden values in place of `dh`.
    #[inline(always)]
    pub(crate) fn differentiate(self, gate: &mut [f32], up: &mut [f32], dh: &mut [f32]) {
        match self {
            SwiGlu => gated_gradients(gate, up, dh, silu),
            GegluTanh => gated_gradients(gate, up, dh, gelu_tanh),
            GegluErf => gated_gradients(gate, up, dh, gelu),
            ReGlu => gated_gradients(gate, up, dh, relu),
            Relu2 => plain_gradients(up, dh, relu2),
            Gelu => plain_gradients(up, dh, gelu),
            Silu => plain_gradients(up, dh, silu),
        }
    }
}

#[inline(always)]
fn gated(gate: &[f32], up: &mut [f32], curve: impl Fn(f32) -> Curve) {
    for (up, &gate) in up.iter_mut().zip(gate) {
        *up *= curve(gate).value;
    }
}

#[inline(always)]
fn plain(up: &mut [f32], curve: impl Fn(f32) -> Curve) {
    for up in up {
        *up = curve(*up).value;
    }
}

#[inline(always)]
fn gated_gradients(gate: &mut [f32], up: &mut [f32], dh: &mut [f32], curve: impl Fn(f32) -> Curve) {
    for ((gate, up), dh) in gate.iter_mut().zip(up).zip(dh) {
        let a = curve(*gate);
        (*gate, *up, *dh) = (*dh * *up * a.slope, *dh * a.value, a.value * *up);
    }
}

#[inline(always)]
fn plain_gradients(up: &mut [f32], dh: &mut [f32], curve: impl Fn(f32) -> Curve) {
    for (up, dh) in up.iter_mut().zip(dh) {
        let a = curve(*up);
        (*up, *dh) = (*dh * a.slope, a.value);
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|a| a.name() == name);
        known.ok_or_else(|| Error::UnknownActivation {
            name: name.to_owned(),
        })
    }
}

struct Curve {
    value: f32,
    slope: f32,
}

/// sigmoid(x) and sigmoid(-x), both to full relative precision: 1 - sigmoid(x) would lose the small one.
#[inline(always)]
fn sigmoids(x: f32) -> (f32, f32) {
    let e = exp_of_negative(-x.abs());
    let (large, small) = (1.0 / (1.0 + e), e / (1.0 + e));
    if x < 0.0 {
        (small, large)
    } else {
        (large, small)
    }
}

/// e^x for x <= 0 within 2 units in the last place, 0 below -87; NaN stays. Without branches or calls, so that loops of it are
/// vectorised, and without fused operations, so that it is the same on every machine.
///
/// x = n ln 2 + r with n whole, ln 2 in two parts of which the first times n is exact; e^r by its Taylor series.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    const LEAST: f32 = -87.0;
    /// Adding it rounds to a whole number, which the lowest bits then hold.
    const ROUNDING: f32 = 1.5 * (1 << 23) as f32;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x < LEAST { LEAST } else { x };
    let rounded = clamped * consts::LOG2_E + ROUNDING;
    let n = rounded - ROUNDING;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let high =
        1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0))));
    let e_r = 1.0 + (r + r * r * (0.5 + r * high));
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    let result = e_r * power;
    if x < LEAST { 0.0 } else { result }
}

#[inline(always)]
fn silu(x: f32) -> Curve {
    let (s, rest) = sigmoids(x);
    Curve {
        value: x * s,
        slope: s * (1.0 + x * rest),
    }
}

/// `x/2 (1 + tanh z)` written as `x sigmoid(2z)`, which does not cancel for negative x.
#[inline(always)]
fn gelu_tanh(x: f32) -> Curve {
    const CUBE: f32 = 0.044_715;
    const TWICE_SCALE: f32 = 2.0 * consts::FRAC_2_SQRT_PI * consts::FRAC_1_SQRT_2;
    // Beyond 30 the sigmoid has long been 0 or 1; the bound keeps x^3 times 0 from becoming NaN.
    let t = if x.abs() > 30.0 {
        30.0_f32.copysign(x)
    } else {
        x
    };
    let (s, rest) = sigmoids(TWICE_SCALE * (t + CUBE * t * t * t));
    let slope_of_z = TWICE_SCALE * (1.0 + 3.0 * CUBE * t * t);
    Curve {
        value: x * s,
        slope: s + t * slope_of_z * s * rest,
    }
}

/// `x Phi(x)`, with Phi from erfc, which does not cancel for negative x.
#[inline(always)]
fn gelu(x: f32) -> Curve {
    const DENSITY: f32 = 0.5 * consts::FRAC_2_SQRT_PI * consts::FRAC_1_SQRT_2;
    let phi = 0.5 * libm::erfcf(-x * consts::FRAC_1_SQRT_2);
    Curve {
        value: x * phi,
        slope: phi + x * (DENSITY * (-0.5 * x * x).exp()),
    }
}

// `x <= 0` rather than `max`, so that NaN passes through.
#[inline(always)]
fn relu(x: f32) -> Curve {
    if x <= 0.0 {
        Curve {
            value: 0.0,
            slope: 0.0,
        }
    } else {
        Curve {
            value: x,
            slope: 1.0,
        }
    }
}

#[inline(always)]
fn relu2(x: f32) -> Curve {
    let r = relu(x).value;
    Curve {
        value: r * r,
        slope: 2.0 * r,
    }
}
