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

    /// Input of the down projection. `gate` is ignored by plain activations.
    #[inline]
    pub(crate) fn hidden(self, gate: f32, up: f32) -> f32 {
        match self {
            SwiGlu => silu(gate).value * up,
            GegluTanh => gelu_tanh(gate).value * up,
            GegluErf => gelu(gate).value * up,
            ReGlu => relu(gate).value * up,
            Relu2 => relu2(up).value,
            Gelu => gelu(up).value,
            Silu => silu(up).value,
        }
    }

    /// The hidden value and, for its gradient `dh`, the gradients of `gate` (0 when plain) and `up`.
    #[inline]
    pub(crate) fn hidden_and_gradients(self, gate: f32, up: f32, dh: f32) -> HiddenGradients {
        let a = match self {
            SwiGlu => silu(gate),
            GegluTanh => gelu_tanh(gate),
            GegluErf => gelu(gate),
            ReGlu => relu(gate),
            Relu2 => relu2(up),
            Gelu => gelu(up),
            Silu => silu(up),
        };
        if self.is_gated() {
            HiddenGradients {
                hidden: a.value * up,
                gate: dh * up * a.slope,
                up: dh * a.value,
            }
        } else {
            HiddenGradients {
                hidden: a.value,
                gate: 0.0,
                up: dh * a.slope,
            }
        }
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

#[derive(Clone, Copy, Debug)]
pub(crate) struct HiddenGradients {
    pub(crate) hidden: f32,
    pub(crate) gate: f32,
    pub(crate) up: f32,
}

struct Curve {
    value: f32,
    slope: f32,
}

/// sigmoid(x) and sigmoid(-x), both to full relative precision: 1 - sigmoid(x) would lose the small one.
#[inline]
fn sigmoids(x: f32) -> (f32, f32) {
    let e = (-x.abs()).exp();
    let (large, small) = (1.0 / (1.0 + e), e / (1.0 + e));
    if x < 0.0 {
        (small, large)
    } else {
        (large, small)
    }
}

#[inline]
fn silu(x: f32) -> Curve {
    let (s, rest) = sigmoids(x);
    Curve {
        value: x * s,
        slope: s * (1.0 + x * rest),
    }
}

/// `x/2 (1 + tanh z)` written as `x sigmoid(2z)`, which does not cancel for negative x.
#[inline]
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
#[inline]
fn gelu(x: f32) -> Curve {
    const DENSITY: f32 = 0.5 * consts::FRAC_2_SQRT_PI * consts::FRAC_1_SQRT_2;
    let phi = 0.5 * libm::erfcf(-x * consts::FRAC_1_SQRT_2);
    Curve {
        value: x * phi,
        slope: phi + x * (DENSITY * (-0.5 * x * x).exp()),
    }
}

// `x <= 0` rather than `max`, so that NaN passes through.
#[inline]
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

#[inline]
fn relu2(x: f32) -> Curve {
    let r = relu(x).value;
    Curve {
        value: r * r,
        slope: 2.0 * r,
    }
}
