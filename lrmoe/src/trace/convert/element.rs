//! What an npy file's numbers and axes are.

use std::fmt;
use std::str::FromStr;

/// Names of the axes that an array can have.
pub(super) const AXES: [&str; 4] = ["steps", "layers", "ranks", "experts"];

/// Axes of an array, by their index into steps, layers, ranks, experts; experts are there, no axis twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axes(pub(super) Vec<usize>);

/// No list of axes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "axes `{0}` must be some of steps, layers, ranks, experts, each at most once, among them experts"
)]
pub struct UnknownAxes(String);

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|axis| AXES[*axis]).collect();
        f.pad(&names.join(","))
    }
}

impl FromStr for Axes {
    type Err = UnknownAxes;

    fn from_str(text: &str) -> Result<Self, UnknownAxes> {
        let mut axes = Vec::new();
        for name in text.split(',') {
            let axis = AXES.iter().position(|known| *known == name.trim());
            match axis.filter(|axis| !axes.contains(axis)) {
                Some(axis) => axes.push(axis),
                None => return Err(UnknownAxes(text.into())),
            }
        }
        if !axes.contains(&EXPERTS) {
            return Err(UnknownAxes(text.into()));
        }
        Ok(Self(axes))
    }
}

pub(super) const STEPS: usize = 0;
const EXPERTS: usize = 3;

impl Axes {
    /// By the number of axes alone.
    pub(super) fn of(dimensions: usize) -> Option<Self> {
        match dimensions {
            1 => Some(Self(vec![3])),
            2 => Some(Self(vec![1, 3])),
            3 => Some(Self(vec![0, 1, 3])),
            4 => Some(Self(vec![0, 1, 2, 3])),
            _ => None,
        }
    }
}

/// How an element is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    kind: u8,
    pub(super) size: usize,
    big_endian: bool,
}

impl Element {
    /// From numpy's type descriptor, such as `<i8`.
    pub(super) fn parse(descriptor: &str) -> Option<Self> {
        let [order, kind, size] = descriptor.as_bytes() else {
            return None;
        };
        let size = usize::from(size.checked_sub(b'0')?);
        let known = match kind {
            b'i' | b'u' => [1, 2, 4, 8].contains(&size),
            b'f' => [4, 8].contains(&size),
            _ => false,
        };
        let big_endian = match order {
            b'<' | b'|' => false,
            b'>' => true,
            b'=' => cfg!(target_endian = "big"),
            _ => return None,
        };
        known.then_some(Self {
            kind: *kind,
            size,
            big_endian,
        })
    }

    /// A count, or the number that is none.
    pub(super) fn count(self, bytes: &[u8]) -> Result<u32, String> {
        let mut word = [0; 8];
        for (place, byte) in bytes.iter().enumerate() {
            let place = if self.big_endian {
                self.size - 1 - place
            } else {
                place
            };
            word[place] = *byte;
        }
        let bits = u64::from_le_bytes(word);
        let spare = 64 - 8 * self.size as u32;
        match (self.kind, self.size) {
            (b'u', _) => u32::try_from(bits).map_err(|_| bits.to_string()),
            (b'i', _) => {
                let number = (bits << spare) as i64 >> spare;
                u32::try_from(number).map_err(|_| number.to_string())
            }
            (_, size) => {
                let number = if size == 4 {
                    f32::from_bits(bits as u32).into()
                } else {
                    f64::from_bits(bits)
                };
                let fits = (0.0..=f64::from(u32::MAX)).contains(&number) && number.fract() == 0.0;
                if fits {
                    Ok(number as u32)
                } else {
                    Err(number.to_string())
                }
            }
        }
    }
}
