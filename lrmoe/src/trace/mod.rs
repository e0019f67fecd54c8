//! Routing traces: how many pairs each source rank sent to each expert, step by step and layer by layer; for some steps every pair with
//! its expert, gate weight and score.
//!
//! # Native format
//!
//! One safetensors file, little-endian.
//!
//! | tensor | type | shape | |
//! |---|---|---|---|
//! | `counts` | u32 | `[steps, layers, ranks, experts]` | pairs of each source rank and expert; a layer's sum fits in 32 bits |
//! | `steps` | i32 | `[R]` | numbers, in the run, of the steps that have per-pair data; ascending |
//! | `expert` | u8, u16 or i32 | `[R, layers, tokens, k]` | expert of each pair, -1 = masked; no expert twice in a token |
//! | `gate_weight` | f32 | `[R, layers, tokens, k]` | finite, at least 0 |
//! | `score` | f32 | `[R, layers, tokens, k]` | optional; finite, at least 0 |
//! | `norm_h`, `norm_dy` | f32 | `[R, layers, tokens, k]`, `[R, layers, tokens]` | in place of `score`, which is then `gate_weight * norm_dy * norm_h` |
//!
//! Tokens are those of all ranks, rank by rank: the rank of a token is `token / tokens_per_rank`. A file without `counts` gets them from its
//! pairs; its steps are then the R recorded ones. Other tensors are left alone.
//!
//! Metadata are strings. `experts` (or `E`), `top_k` (or `K`), `ranks`, `tokens_per_rank` and `first_step` are read, and must agree with the
//! shapes where those say the same; a file without `counts` needs the first. Everything else is kept as it is.
//!
//! A step is read when it is asked for, and checked then; memory holds one step, whatever the size of the file.
//!
//! ```
//! use lrmoe::trace::synth::{SynthShape, Workload, synth};
//! use lrmoe::trace::{TraceReader, TraceSettings, TraceWriter};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("hot.safetensors");
//! let shape = SynthShape { layers: 2, ranks: 4, experts: 16, top_k: 2, tokens_per_rank: 64 };
//! let settings = TraceSettings { layers: 2, ranks: 4, experts: 16, ..TraceSettings::default() };
//! let mut writer = TraceWriter::create(&path, settings)?;
//! for step in 0..3 {
//!     writer.push(synth(Workload::HotSet, 1, step, &shape).view())?;
//! }
//! writer.finish()?;
//!
//! let mut reader = TraceReader::open(&path)?;
//! assert_eq!(reader.header().steps, 3);
//! assert_eq!(reader.step(2)?.sum(), 2 * 4 * 64 * 2);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

mod check;
mod convert;
mod error;
mod figures;
mod header;
mod heatmap;
mod inspect;
mod layout;
mod limits;
mod pairs;
mod reader;
mod sizes;
pub mod synth;
mod writer;

pub use convert::{Axes, ConvertOptions, Format, UnknownAxes, UnknownFormat, convert};
pub use error::{Fault, Invalid, Place, TraceError};
pub use header::{PairRecord, TraceHeader, TraceSettings};
pub use heatmap::HeatMap;
pub use inspect::{Inspection, LayerFigures, TimeFigures, inspect};
pub use reader::TraceReader;
pub use writer::{TraceWriter, check_output};
