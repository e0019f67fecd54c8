//! The text a model trains on: bytes, in a training and a held-out part.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use walkdir::{DirEntry, WalkDir};

/// Files taken from a folder.
const EXTENSIONS: [&str; 3] = ["txt", "md", "rs"];

/// What makes a text unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A path does not exist.
    #[error("text {} does not exist", path.display())]
    Missing {
        /// The path given.
        path: PathBuf,
    },
    /// A file or folder cannot be read.
    #[error("cannot read text {}: {source}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The files are empty, or the folders hold none to take.
    #[error(
        "no text found in {} (folders are searched for .txt, .md and .rs files)",
        list(paths)
    )]
    Empty {
        /// The paths given.
        paths: Vec<PathBuf>,
    },
    /// A part does not hold one sequence and the byte that follows it.
    #[error(
        "text of {total} bytes is too short: its {part} part has {bytes} bytes, a context of {context} needs {}",
        context + 1
    )]
    TooShort {
        /// Bytes of the whole text.
        total: usize,
        /// `training` or `held-out`.
        part: &'static str,
        /// Bytes of that part.
        bytes: usize,
        /// Bytes of a sequence.
        context: usize,
    },
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    paths.join(", ")
}

/// A text in memory: its first nine tenths are for training, the rest is held out.
///
/// A window is a sequence of `context` input bytes with its targets, the same bytes one further.
#[derive(Clone, PartialEq, Eq)]
pub struct Corpus {
    bytes: Vec<u8>,
    /// Bytes of the training part.
    training: usize,
    context: usize,
}

impl std::fmt::Debug for Corpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Corpus")
            .field("bytes", &self.bytes.len())
            .field("training", &self.training)
            .field("context", &self.context)
            .finish()
    }
}

impl Corpus {
    /// Reads and joins `paths`: files, or folders, of which all `.txt`, `.md` and `.rs` files are taken
    /// in the order of their names, hidden folders and folders called `target` left out.
    ///
    /// # Errors
    ///
    /// A path that is missing or cannot be read, no text at all, or a training or held-out part that
    /// is shorter than one window of `context` bytes and one more.
    pub fn load(paths: &[PathBuf], context: usize) -> Result<Self, TextError> {
        let mut bytes = Vec::new();
        for path in paths {
            for file in files(path)? {
                match fs::read(&file) {
                    Ok(content) => bytes.extend(content),
                    Err(source) => return Err(TextError::Unreadable { path: file, source }),
                }
            }
        }
        if bytes.is_empty() {
            return Err(TextError::Empty {
                paths: paths.to_vec(),
            });
        }
        let training = bytes.len() - bytes.len().div_ceil(10);
        let corpus = Self {
            bytes,
            training,
            context,
        };
        for (part, text) in [("training", corpus.training()), ("held-out", corpus.rest())] {
            if text.len() <= context {
                return Err(TextError::TooShort {
                    total: corpus.len(),
                    part,
                    bytes: text.len(),
                    context,
                });
            }
        }
        Ok(corpus)
    }

    /// Bytes of the whole text.
    #[expect(clippy::len_without_is_empty, reason = "an empty text is refused")]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// CRC-32 of the whole text, to tell one from another.
    pub fn checksum(&self) -> u32 {
        crc32fast::hash(&self.bytes)
    }

    /// Bytes of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    fn training(&self) -> &[u8] {
        &self.bytes[..self.training]
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.training..]
    }

    /// Windows of the training part as (inputs, targets), each `[sequences, context]` row-major, for
    /// the given sequence numbers of a step's global batch.
    ///
    /// A window depends on seed, step and its sequence number alone: ranks that ask for their
    /// own range see parts of one batch, however many they are, and a resumed run goes on with the
    /// batches it would have seen.
    pub fn batch(&self, seed: u64, step: u32, sequences: Range<usize>) -> (Vec<u8>, Vec<u8>) {
        let text = self.training();
        let starts = (text.len() - self.context) as u64;
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        random.set_stream(u64::from(step));
        let mut inputs = Vec::with_capacity(sequences.len() * self.context);
        let mut targets = Vec::with_capacity(sequences.len() * self.context);
        for sequence in sequences {
            // A block of 16 words for each sequence: a draw takes two, rarely more.
            random.set_word_pos(16 * sequence as u128);
            let (input, target) = self.window(text, random.random_range(0..starts) as usize);
            inputs.extend_from_slice(input);
            targets.extend_from_slice(target);
        }
        (inputs, targets)
    }

    /// `count` windows of the held-out part as (input, target), evenly spaced from its first byte to its last;
    /// they overlap where the part is short.
    pub fn held_out(&self, count: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let text = self.rest();
        let last = text.len() - self.context - 1;
        (0..count)
            .map(|index| {
                let start = last as u128 * index as u128 / (count - 1).max(1) as u128;
                let (input, target) = self.window(text, start as usize);
                (input.to_vec(), target.to_vec())
            })
            .collect()
    }

    fn window<'a>(&self, text: &'a [u8], start: usize) -> (&'a [u8], &'a [u8]) {
        let window = &text[start..=start + self.context];
        (&window[..self.context], &window[1..])
    }
}

/// The files that a path stands for.
fn files(path: &Path) -> Result<Vec<PathBuf>, TextError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(vec![path.to_path_buf()]),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(TextError::Missing { path: path.into() });
        }
        Err(source) => {
            return Err(TextError::Unreadable {
                path: path.into(),
                source,
            });
        }
    }
    let walk = WalkDir::new(path).sort_by_file_name().into_iter();
    let mut files = Vec::new();
    for entry in walk.filter_entry(is_wanted) {
        let entry = entry.map_err(|error| TextError::Unreadable {
            path: error.path().unwrap_or(path).to_path_buf(),
            source: error.into(),
        })?;
        let extension = entry.path().extension().and_then(|e| e.to_str());
        if entry.file_type().is_file() && extension.is_some_and(|e| EXTENSIONS.contains(&e)) {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// Whether to look at an entry below a folder.
fn is_wanted(entry: &DirEntry) -> bool {
    let name = entry.file_name().to_string_lossy();
    entry.depth() == 0
        || !entry.file_type().is_dir()
        || !(name.starts_with('.') || name == "target")
}
