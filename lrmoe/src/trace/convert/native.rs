//! Native traces, one after the other.

use std::path::PathBuf;

use indicatif::ProgressBar;

use super::{Source, Step, announce};
use crate::trace::TraceReader;
use crate::trace::error::{Fault, Place, TraceError};
use crate::trace::header::TraceSettings;

/// Metadata keys that say the same as the shapes, or no longer hold.
const OWN: [&str; 8] = [
    "E",
    "K",
    "experts",
    "top_k",
    "ranks",
    "tokens_per_rank",
    "first_step",
    "steps",
];

/// Several parts of a run. Where they overlap, as those of a run resumed from before its end do, the later part counts.
pub(super) struct Native {
    parts: Vec<Part>,
    settings: TraceSettings,
    progress: ProgressBar,
}

struct Part {
    reader: TraceReader,
    next: usize,
    /// Steps to take.
    end: usize,
    bytes_per_step: u64,
}

impl Native {
    pub(super) fn open(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Self, TraceError> {
        announce(inputs, 1, progress)?;
        let mut parts: Vec<Part> = Vec::with_capacity(inputs.len());
        for path in inputs {
            let reader = TraceReader::open(path)?;
            if let Some(before) = parts.last_mut() {
                follow(before, &reader)?;
            }
            let end = reader.header().steps;
            let bytes = std::fs::metadata(path).map_err(TraceError::io(path))?.len();
            parts.push(Part {
                reader,
                next: 0,
                end,
                bytes_per_step: bytes / end as u64,
            });
        }
        let header = parts[0].reader.header();
        let mut metadata = header.metadata.clone();
        metadata.retain(|key, _| !OWN.contains(&key.as_str()));
        let settings = TraceSettings {
            layers: header.layers,
            ranks: header.ranks,
            experts: header.experts,
            top_k: header.top_k,
            tokens_per_rank: header.tokens_per_rank,
            first_step: header.first_step,
            metadata,
        };
        Ok(Self {
            parts,
            settings,
            progress: progress.clone(),
        })
    }
}

/// The trace goes on where the part before it ends, or before.
fn follow(before: &mut Part, reader: &TraceReader) -> Result<(), TraceError> {
    let (header, known) = (reader.header(), before.reader.header());
    let invalid = |fault| TraceError::invalid(reader.path(), Place::default(), fault);
    let optional = |n: Option<usize>| n.unwrap_or(0);
    for (what, found, expected) in [
        ("layers", header.layers, known.layers),
        ("ranks", header.ranks, known.ranks),
        ("experts", header.experts, known.experts),
        (
            "experts per token",
            optional(header.top_k),
            optional(known.top_k),
        ),
        (
            "tokens per rank",
            optional(header.tokens_per_rank),
            optional(known.tokens_per_rank),
        ),
    ] {
        if found != expected {
            let (found, expected) = (found as u64, expected as u64);
            let other = before.reader.path().display().to_string();
            return Err(invalid(Fault::Mismatch {
                what,
                found,
                other,
                expected,
            }));
        }
    }
    let (first, next) = (known.first_step, known.first_step + before.end as u32);
    let found = header.first_step;
    if !(first..=next).contains(&found) {
        return Err(invalid(Fault::Gap { found, first, next }));
    }
    before.end = (found - first) as usize;
    Ok(())
}

impl Source for Native {
    fn settings(&self) -> TraceSettings {
        self.settings.clone()
    }

    fn next(&mut self) -> Result<Option<Step>, TraceError> {
        let Some(part) = self.parts.iter_mut().find(|part| part.next < part.end) else {
            return Ok(None);
        };
        let counts = part.reader.step(part.next)?;
        let recorded = part
            .reader
            .header()
            .recorded
            .binary_search(&(part.next as u32));
        let pairs = recorded
            .ok()
            .map(|index| part.reader.pairs(index))
            .transpose()?;
        part.next += 1;
        self.progress.inc(part.bytes_per_step);
        Ok(Some(Step { counts, pairs }))
    }
}
