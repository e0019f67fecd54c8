//! What goes over the wire, in little-endian words after eight bytes that tell strangers apart.

use std::time::Duration;

use crate::Error;

pub(super) const MOST_BYTES: usize = 1 << 16;

const MAGIC: [u8; 8] = *b"lrmoe\0\x01\n";

/// What a guest says when it comes: `MAGIC`, rank, ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Hello {
    pub(super) const LEN: usize = 16;

    pub(super) fn encode(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        put(&mut bytes, word(self.rank));
        put(&mut bytes, word(self.ranks));
        bytes
    }

    /// `None` if a stranger has sent this.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let mut words = words(bytes.strip_prefix(&MAGIC)?);
        Some(Self {
            rank: words.next()? as usize,
            ranks: words.next()? as usize,
        })
    }
}

/// Whether what has come so far may be the start of a message.
pub(super) fn may_be_ours(start: &[u8]) -> bool {
    start.iter().zip(&MAGIC).all(|(byte, magic)| byte == magic)
}

/// What the host says, once all have come or time is up, or at once to a guest that it refuses:
/// `MAGIC`, what it is, two words, then the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Bytes(Vec<u8>),
    Absent { rank: usize, waited: Duration },
    WorldSize { expected: usize },
    RankTaken,
}

impl Answer {
    /// Bytes before those of [`Answer::Bytes`].
    pub(super) const HEADER: usize = 20;

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, first, second, rest): (u32, usize, usize, &[u8]) = match self {
            Self::Bytes(bytes) => (0, bytes.len(), 0, bytes),
            Self::Absent { rank, waited } => (1, *rank, waited.as_millis() as usize, &[]),
            Self::WorldSize { expected } => (2, *expected, 0, &[]),
            Self::RankTaken => (3, 0, 0, &[]),
        };
        let mut bytes = MAGIC.to_vec();
        put(&mut bytes, kind);
        put(&mut bytes, word(first));
        put(&mut bytes, word(second));
        bytes.extend_from_slice(rest);
        bytes
    }

    /// The answer, with zeros for the bytes that follow; `None` if a stranger has sent this.
    pub(super) fn decode(header: &[u8; Self::HEADER]) -> Option<Self> {
        let mut words = words(header.strip_prefix(&MAGIC)?);
        let kind = words.next()?;
        let (first, second) = (words.next()? as usize, words.next()?);
        match kind {
            0 if first <= MOST_BYTES => Some(Self::Bytes(vec![0; first])),
            1 => Some(Self::Absent {
                rank: first,
                waited: Duration::from_millis(second.into()),
            }),
            2 => Some(Self::WorldSize { expected: first }),
            3 => Some(Self::RankTaken),
            _ => None,
        }
    }

    /// What it means for a rank of a world of so many ranks, told at `address`.
    pub(super) fn into_result(self, hello: Hello, address: String) -> Result<Vec<u8>, Error> {
        let Hello { rank, ranks } = hello;
        Err(match self {
            Self::Bytes(bytes) => return Ok(bytes),
            Self::Absent { rank, waited } => Error::Absent {
                rank,
                address,
                waited,
            },
            Self::WorldSize { expected } => Error::WorldSize {
                rank,
                found: ranks,
                expected,
            },
            Self::RankTaken => Error::RankTaken { rank },
        })
    }
}

/// Ranks that do not fit a word fit no world either.
fn word(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn put(bytes: &mut Vec<u8>, word: u32) {
    bytes.extend_from_slice(&word.to_le_bytes());
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|&word| u32::from_le_bytes(word))
}
