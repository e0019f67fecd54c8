//! Counts in a `.npy` or `.npz` file, such as SGLang's expert distribution (`logical_count`) or vLLM's EPLB load matrices: integers, or floats without
//! a fraction.
//!
//! Files follow one another as further steps. An array in C order that starts with its steps is read step by step, any other whole. Elements of
//! type `object` are refused: they are pickled, and to unpickle is to run what the file says.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use ndarray::{Array3, Array4, ArrayD, Axis, Ix4, IxDyn, ShapeBuilder};
use ndarray_npy::npy::header::Header;
use zip::ZipArchive;
use zip::result::ZipError;

use super::element::{AXES, Axes, Element, STEPS};
use super::{ConvertOptions, Source, Step, announce, check_sizes};
use crate::trace::error::{Fault, Place, TraceError};
use crate::trace::header::TraceSettings;
use crate::trace::limits::MOST_COUNTS;

/// Arrays taken from an npz file with several, the first that is there.
const KNOWN: [&str; 3] = ["counts", "logical_count", "expert_load"];

/// What an array's elements and axes are.
struct Kind {
    element: Element,
    axes: Axes,
}

impl Kind {
    /// The axes are as many as the options or the shape say, none of length 0.
    fn of(name: &str, header: &Header, options: &ConvertOptions) -> Result<Self, Fault> {
        let name = name.to_owned();
        let found = header.type_descriptor.to_string();
        let found = found.trim_matches('\'').to_owned();
        let Some(element) = Element::parse(&found) else {
            return Err(Fault::ArrayType { name, found });
        };
        let shape = &header.shape;
        let given = options.axes.as_ref();
        let axes = given.cloned().or_else(|| Axes::of(shape.len()));
        let Some(axes) = axes.filter(|axes| axes.0.len() == shape.len()) else {
            let expected = given.map_or_else(|| AXES.join(","), Axes::to_string);
            let found = shape.clone();
            return Err(Fault::ArrayShape {
                name,
                found,
                expected,
            });
        };
        match shape.iter().position(|size| *size == 0) {
            None => Ok(Self { element, axes }),
            Some(axis) => {
                let (what, limit) = (AXES[axes.0[axis]], MOST_COUNTS);
                Err(Fault::Size {
                    what,
                    value: 0,
                    limit,
                })
            }
        }
    }

    /// Steps, layers, ranks, experts; 1 where there is no such axis.
    fn sizes(&self, shape: &[usize]) -> [usize; 4] {
        let mut sizes = [1; 4];
        for (axis, size) in self.axes.0.iter().zip(shape) {
            sizes[*axis] = *size;
        }
        sizes
    }
}

/// The header of an array.
struct Head {
    header: Header,
    kind: Kind,
    /// Bytes of the header, and of what it describes.
    bytes: [u64; 2],
}

impl Head {
    /// Reads the header of an array that has so many bytes, header included. Memory is taken for it only if it is within them.
    fn read(
        name: &str,
        from: &mut impl Read,
        size: u64,
        options: &ConvertOptions,
    ) -> io::Result<Result<Self, Fault>> {
        let length = |expected| Fault::Length {
            expected,
            found: size,
        };
        let mut head = Vec::new();
        from.take(12).read_to_end(&mut head)?;
        let len = match head.strip_prefix(b"\x93NUMPY") {
            Some(&[1, _, a, b, _, _]) => 10 + u64::from(u16::from_le_bytes([a, b])),
            Some(&[_, _, a, b, c, d]) => 12 + u64::from(u32::from_le_bytes([a, b, c, d])),
            _ => 0,
        };
        if len > size {
            return Ok(Err(length(len)));
        }
        from.take(len.saturating_sub(12)).read_to_end(&mut head)?;
        let header = match Header::from_reader(&mut &head[..]) {
            Ok(header) => header,
            Err(error) => return Ok(Err(error.into())),
        };
        Ok(Kind::of(name, &header, options).and_then(|kind| {
            let head = head.len() as u64;
            let sizes = header.shape.iter().map(|n| *n as u64);
            let data = sizes.fold(kind.element.size as u64, u64::saturating_mul);
            let (expected, bytes) = (data.saturating_add(head), [head, data]);
            match expected == size {
                true => Ok(Self {
                    header,
                    kind,
                    bytes,
                }),
                false => Err(length(expected)),
            }
        }))
    }
}

/// An array whose header has been read.
struct Array {
    path: PathBuf,
    kind: Kind,
    shape: Vec<usize>,
    fortran: bool,
    data: BufReader<File>,
    /// Steps in each part that is read at once: 1, or all.
    part: usize,
    /// Steps read and not yet handed out, and where they start.
    steps: Array4<u32>,
    first: usize,
    /// Steps handed out.
    next: usize,
}

impl Array {
    fn open(path: &Path, options: &ConvertOptions) -> Result<Self, TraceError> {
        let whole = |fault| TraceError::invalid(path, Place::default(), fault);
        let zipped = path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("npz"));
        let (head, file) = if zipped {
            unzip(path, options)?
        } else {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let mut file = File::open(path).map_err(TraceError::io(path))?;
            let size = file.metadata().map_err(TraceError::io(path))?.len();
            let head = Head::read(&name, &mut file, size, options);
            (head.map_err(TraceError::io(path))?.map_err(whole)?, file)
        };
        let Head { header, kind, .. } = head;
        let steps = kind.sizes(&header.shape)[STEPS];
        let whole_array = header.layout.is_fortran() || kind.axes.0[0] != STEPS;
        let array = Self {
            path: path.into(),
            kind,
            fortran: header.layout.is_fortran(),
            shape: header.shape,
            data: BufReader::new(file),
            part: if whole_array { steps } else { 1 },
            steps: Array4::zeros((0, 0, 0, 0)),
            first: 0,
            next: 0,
        };
        let (value, limit) = (array.part_len() as u64, MOST_COUNTS);
        if value > limit {
            let what = "numbers that have to be read at once";
            return Err(whole(Fault::TooMany { what, value, limit }));
        }
        Ok(array)
    }

    /// Steps, layers, ranks, experts; 1 where there is no such axis.
    fn sizes(&self) -> [usize; 4] {
        self.kind.sizes(&self.shape)
    }

    /// Numbers in a part.
    fn part_len(&self) -> usize {
        self.shape.iter().product::<usize>() / self.sizes()[STEPS] * self.part
    }

    /// The next step, `[layers, ranks, experts]`.
    fn step(&mut self) -> Result<Option<Array3<u32>>, TraceError> {
        if self.next == self.sizes()[STEPS] {
            return Ok(None);
        }
        if self.next == self.first + self.steps.len_of(Axis(0)) {
            self.first = self.next;
            self.steps = self.read_part()?;
        }
        let step = self
            .steps
            .index_axis(Axis(0), self.next - self.first)
            .to_owned();
        self.next += 1;
        Ok(Some(step))
    }

    fn read_part(&mut self) -> Result<Array4<u32>, TraceError> {
        let mut bytes = vec![0; self.part_len() * self.kind.element.size];
        self.data
            .read_exact(&mut bytes)
            .map_err(TraceError::io(&self.path))?;
        let mut shape = self.shape.clone();
        if self.kind.axes.0[0] == STEPS {
            shape[0] = self.part;
        }
        let elements = ArrayD::from_shape_vec(
            IxDyn(&shape).set_f(self.fortran),
            bytes.chunks_exact(self.kind.element.size).collect(),
        );
        let mut elements = elements.expect("as many as were read");
        // Axes that are not there get the size 1; then all come into their order.
        let mut axes = self.kind.axes.0.clone();
        for axis in (0..AXES.len()).filter(|axis| !self.kind.axes.0.contains(axis)) {
            axes.push(axis);
            elements = elements.insert_axis(Axis(axes.len() - 1));
        }
        let order = [0, 1, 2, 3].map(|axis| {
            axes.iter()
                .position(|known| *known == axis)
                .expect("all four")
        });
        let elements = elements.permuted_axes(IxDyn(&order));
        let elements = elements.into_dimensionality::<Ix4>().expect("four axes");
        let mut counts = Array4::zeros(elements.dim());
        for ((at, count), bytes) in counts.indexed_iter_mut().zip(elements.iter()) {
            *count = self
                .kind
                .element
                .count(bytes)
                .map_err(|value| self.not_a_count(at, value))?;
        }
        Ok(counts)
    }

    fn not_a_count(&self, at: (usize, usize, usize, usize), value: String) -> TraceError {
        let place = Place {
            step: Some((self.first + at.0) as u64),
            layer: Some(at.1),
            rank: Some(at.2),
            expert: Some(at.3),
            ..Place::default()
        };
        let expected = format!("a whole number from 0 to {}", u32::MAX);
        TraceError::invalid(
            &self.path,
            place,
            Fault::Field {
                name: "count",
                value,
                expected,
            },
        )
    }
}

/// An array of an npz file: its header, and a temporary file with what this describes. No more is unpacked: that is what the archive says the
/// array's size is, and more than that is an error of the archive.
fn unzip(path: &Path, options: &ConvertOptions) -> Result<(Head, File), TraceError> {
    let whole = |fault| TraceError::invalid(path, Place::default(), fault);
    let file = File::open(path).map_err(TraceError::io(path))?;
    let archive = ZipArchive::new(BufReader::new(file));
    let mut archive = archive.map_err(|error| whole(error.into()))?;
    let bare = |entry: &str| entry.strip_suffix(".npy").unwrap_or(entry).to_owned();
    let names: Result<Vec<String>, ZipError> =
        archive.file_names().map(|name| Ok(bare(&name?))).collect();
    let names = names.map_err(|error| whole(error.into()))?;
    let known = |name: &&str| names.iter().any(|known| known == name);
    let chosen = match (options.array.as_deref(), names.as_slice()) {
        (Some(name), _) => Some(name).filter(known),
        (None, [only]) => Some(only.as_str()),
        (None, _) => KNOWN.iter().copied().find(|name| known(name)),
    };
    let Some(chosen) = chosen.map(str::to_owned) else {
        return Err(whole(Fault::Arrays(names)));
    };
    let index = names.iter().position(|name| *name == chosen);
    let index = index.expect("one of the names");
    let mut entry = archive
        .by_index(index)
        .map_err(|error| whole(error.into()))?;
    let size = entry.size();
    let head = Head::read(&chosen, &mut entry, size, options);
    let head = head.map_err(TraceError::io(path))?.map_err(whole)?;
    let [start, data] = head.bytes;
    let mut unpacked = tempfile::tempfile().map_err(TraceError::io(path))?;
    let copied = io::copy(&mut entry, &mut unpacked);
    let copied = copied.map_err(TraceError::io(path))?;
    if copied != data {
        let (expected, found) = (start + data, start + copied);
        return Err(whole(Fault::Length { expected, found }));
    }
    unpacked.rewind().map_err(TraceError::io(path))?;
    Ok((head, unpacked))
}

pub(super) struct Numpy {
    inputs: Vec<(PathBuf, u64)>,
    options: ConvertOptions,
    current: Array,
    /// Inputs opened.
    opened: usize,
    settings: TraceSettings,
    progress: ProgressBar,
}

impl Numpy {
    pub(super) fn open(
        inputs: &[PathBuf],
        options: &ConvertOptions,
        progress: &ProgressBar,
    ) -> Result<Self, TraceError> {
        announce(inputs, 1, progress)?;
        let current = Array::open(&inputs[0], options)?;
        let [_, layers, ranks, experts] = current.sizes();
        let settings = TraceSettings {
            layers,
            ranks,
            experts,
            ..TraceSettings::default()
        };
        check_sizes(&inputs[0], &settings)?;
        let sized = |path: &PathBuf| {
            let bytes = std::fs::metadata(path).map_err(TraceError::io(path))?.len();
            Ok((path.clone(), bytes))
        };
        Ok(Self {
            inputs: inputs
                .iter()
                .map(sized)
                .collect::<Result<_, TraceError>>()?,
            options: options.clone(),
            current,
            opened: 1,
            settings,
            progress: progress.clone(),
        })
    }

    fn open_next(&mut self, path: &Path) -> Result<(), TraceError> {
        self.current = Array::open(path, &self.options)?;
        self.opened += 1;
        let [_, layers, ranks, experts] = self.current.sizes();
        for (what, found, expected) in [
            ("layers", layers, self.settings.layers),
            ("ranks", ranks, self.settings.ranks),
            ("experts", experts, self.settings.experts),
        ] {
            if found != expected {
                let (found, expected) = (found as u64, expected as u64);
                let other = self.inputs[0].0.display().to_string();
                let fault = Fault::Mismatch {
                    what,
                    found,
                    other,
                    expected,
                };
                return Err(TraceError::invalid(path, Place::default(), fault));
            }
        }
        Ok(())
    }
}

impl Source for Numpy {
    fn settings(&self) -> TraceSettings {
        self.settings.clone()
    }

    fn next(&mut self) -> Result<Option<Step>, TraceError> {
        loop {
            if let Some(counts) = self.current.step()? {
                let bytes = self.inputs[self.opened - 1].1;
                self.progress
                    .inc(bytes / self.current.sizes()[STEPS] as u64);
                return Ok(Some(Step {
                    counts,
                    pairs: None,
                }));
            }
            let Some((path, _)) = self.inputs.get(self.opened).cloned() else {
                return Ok(None);
            };
            self.open_next(&path)?;
        }
    }
}
