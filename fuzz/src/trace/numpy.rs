use lrmoe::trace::{Axes, ConvertOptions, Format};
use ndarray::Array3;

use super::{Expected, MOST, Steps, check_converted, choice};

const AXES: [&str; 8] = [
    "",
    "experts",
    "experts,layers",
    "steps,experts",
    "layers,steps,experts",
    "experts,ranks",
    "steps,layers,ranks,experts",
    "ranks,experts,layers,steps",
];

/// Arrays of counts against a reader of the headers that numpy itself writes. The first byte chooses axes (`0` the standard ones) and, from `8` on, npz.
pub fn trace_numpy(data: &[u8]) {
    let Some((choice, bytes)) = choice(data) else {
        return;
    };
    let axes = AXES[usize::from(choice & 7)];
    let options = ConvertOptions {
        axes: axes.parse::<Axes>().ok(),
        array: (choice & 16 > 0).then(|| "counts".to_owned()),
        ..ConvertOptions::default()
    };
    if choice & 8 > 0 {
        check_converted("in.npz", bytes, Format::Numpy, &options, &Expected::Unknown);
    } else {
        let expected = parse(bytes, axes).unwrap_or(Expected::Unknown);
        check_converted("in.npy", bytes, Format::Numpy, &options, &expected);
    }
}

/// What an array of version 1 holds; none if numpy would have written its header otherwise.
fn parse(bytes: &[u8], axes: &str) -> Option<Expected> {
    let rest = bytes.strip_prefix(b"\x93NUMPY\x01\x00")?;
    let (length, rest) = rest.split_first_chunk()?;
    let (header, data) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
    let header = std::str::from_utf8(header).ok()?.strip_suffix('\n')?;
    let between = |before: &str, after: &str| {
        let (_, rest) = header.split_once(before)?;
        Some(rest.split_once(after)?.0)
    };
    let descriptor = between("'descr': '", "'")?;
    let fortran = between("'fortran_order': ", ",")? == "True";
    let listed = between("'shape': (", ")")?;
    let sizes = listed
        .split(',')
        .map(str::trim)
        .filter(|size| !size.is_empty());
    let shape: Vec<usize> = sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?;
    let tuple = match shape[..] {
        [only] => format!("{only},"),
        _ => shape
            .iter()
            .map(usize::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    };
    let order = if fortran { "True" } else { "False" };
    let written =
        format!("{{'descr': '{descriptor}', 'fortran_order': {order}, 'shape': ({tuple}), }}");
    (header.trim_end_matches(' ') == written).then(|| read(descriptor, fortran, &shape, axes, data))
}

fn read(descriptor: &str, fortran: bool, shape: &[usize], axes: &str, data: &[u8]) -> Expected {
    let standard = [
        "",
        "experts",
        "layers,experts",
        "steps,layers,experts",
        AXES[6],
    ];
    let axes = match axes {
        "" => standard.get(shape.len()).copied().unwrap_or(""),
        given => given,
    };
    let axes: Vec<&str> = axes.split(',').collect();
    let Some(element) = Element::of(descriptor) else {
        return Expected::Refused;
    };
    let bytes = shape.iter().fold(element.size as u128, |all, &n| {
        all.saturating_mul(n as u128)
    });
    if shape.is_empty() || axes.len() != shape.len() || bytes != data.len() as u128 || bytes == 0 {
        return Expected::Refused;
    }
    let size = |name: &str| {
        axes.iter()
            .position(|axis| *axis == name)
            .map_or(1, |at| shape[at])
    };
    let [steps, layers, ranks, experts] = ["steps", "layers", "ranks", "experts"].map(size);
    if [layers, ranks, experts].iter().any(|size| *size > MOST) {
        return Expected::Refused;
    }
    let mut counts = vec![Array3::zeros((layers, ranks, experts)); steps];
    for (place, bytes) in data.chunks(element.size).enumerate() {
        let Some(count) = element.count(bytes) else {
            return Expected::Refused;
        };
        // The axis that changes fastest first.
        let mut left = place;
        let mut at = [0; 4];
        let fastest_first: Vec<usize> = match fortran {
            true => (0..shape.len()).collect(),
            false => (0..shape.len()).rev().collect(),
        };
        for axis in fastest_first {
            let names = ["steps", "layers", "ranks", "experts"];
            let named = names.iter().position(|name| *name == axes[axis]);
            at[named.expect("an axis of these")] = left % shape[axis];
            left /= shape[axis];
        }
        counts[at[0]][[at[1], at[2], at[3]]] = count;
    }
    let steps = Steps {
        counts,
        ..Steps::default()
    };
    steps.checked()
}

struct Element {
    kind: char,
    size: usize,
    big_endian: bool,
}

impl Element {
    fn of(descriptor: &str) -> Option<Self> {
        let mut parts = descriptor.chars();
        let (order, kind) = (parts.next()?, parts.next()?);
        let sizes: &[&str] = match kind {
            'i' | 'u' => &["1", "2", "4", "8"],
            'f' => &["4", "8"],
            _ => return None,
        };
        let size = parts.as_str();
        ("<>|=".contains(order) && sizes.contains(&size)).then(|| Self {
            kind,
            size: size.parse().expect("a digit"),
            big_endian: order == '>',
        })
    }

    fn count(&self, bytes: &[u8]) -> Option<u32> {
        let mut bytes = bytes.to_vec();
        if self.big_endian {
            bytes.reverse();
        }
        let bits = bytes
            .iter()
            .rev()
            .fold(0_i128, |bits, &byte| bits << 8 | i128::from(byte));
        let float = match (self.kind, self.size) {
            ('f', 4) => f64::from(f32::from_bits(bits as u32)),
            ('f', _) => f64::from_bits(bits as u64),
            ('i', size) if bits >> (8 * size - 1) == 1 => return None,
            _ => return u32::try_from(bits).ok(),
        };
        let whole = float as u32;
        (f64::from(whole) == float).then_some(whole)
    }
}
