//! What a rank shows to the ranks of its own host, in memory that they all map.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::MmapRaw;

use super::message::{Message, WORDS};
use crate::Call;
use crate::transport::Counts;

/// Up to so many bytes for a peer lie on the board.
pub(super) const INLINE: usize = 16 << 10;

/// Bytes of a cache line, which writers of different words do not share.
const LINE: usize = 64;
const LINE_WORDS: usize = LINE / size_of::<u64>();

/// Words at the start, each in a line of its own: a secret by which the board is known, never 0; the number of the exchange
/// whose memory may be read, 0 while none may; the number of the last exchange that the rank has come to; and that of the
/// exchange in which the world ended for it, 0 while it has not.
const SECRET: usize = 0;
const OFFER: usize = LINE_WORDS;
const COME: usize = 2 * LINE_WORDS;
const FAILED: usize = 3 * LINE_WORDS;
const READS: usize = 4 * LINE_WORDS;

/// A rank's board: after the words at the start, for each peer the number of the last exchange in which the rank has read
/// that peer's memory; then two sheets, which exchanges use in turns. A sheet has the message of the meeting, the counts,
/// and for each peer where its elements lie in the rank's memory and, if they are few, the elements themselves.
///
/// A sheet is written again two exchanges later, after the meeting in between, to which every rank comes after it has
/// read the sheet.
#[derive(Debug)]
pub(super) struct Board {
    memory: MmapRaw,
    ranks: usize,
}

impl Board {
    /// A new board and its file, for other processes to map; `None` where the system has nothing of the kind.
    #[cfg(target_os = "linux")]
    pub(super) fn new(ranks: usize) -> Option<(Self, File)> {
        use std::hash::{BuildHasher, RandomState};
        use std::os::fd::FromRawFd;
        // SAFETY: the name ends with a zero.
        let file = unsafe { libc::memfd_create(c"lrmoe-comm".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return None;
        }
        // SAFETY: the descriptor is open, and nothing else has it.
        let file = unsafe { File::from_raw_fd(file) };
        file.set_len(Self::bytes(ranks) as u64).ok()?;
        let board = Self::map(&file, ranks)?;
        let secret = RandomState::new().hash_one(ranks) | 1;
        board.word(SECRET).store(secret, Ordering::SeqCst);
        Some((board, file))
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn new(_: usize) -> Option<(Self, File)> {
        None
    }

    /// The board that the file holds.
    pub(super) fn map(file: &File, ranks: usize) -> Option<Self> {
        let memory = MmapRaw::map_raw(file).ok()?;
        (memory.len() == Self::bytes(ranks)).then_some(Self { memory, ranks })
    }

    pub(super) fn secret(&self) -> u64 {
        self.word(SECRET).load(Ordering::SeqCst)
    }

    /// Where its secret lies in this process's memory.
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64
    }

    /// Bytes of a board in a world of so many ranks.
    fn bytes(ranks: usize) -> usize {
        8 * Self::elements(ranks) + 2 * ranks * INLINE
    }

    /// Words before the elements of both sheets.
    fn elements(ranks: usize) -> usize {
        let words = READS + ranks + 2 * Self::sheet_words(ranks);
        words.next_multiple_of(LINE_WORDS)
    }

    /// Words of a sheet: the message, counts, and addresses.
    fn sheet_words(ranks: usize) -> usize {
        WORDS + 3 * ranks
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < Self::elements(self.ranks));
        // SAFETY: the mapping is longer than the words, aligned to a page, and lives as long as `self`; every process
        // takes its words as atomic ones.
        unsafe { AtomicU64::from_ptr(self.memory.as_mut_ptr().cast::<u64>().add(index)) }
    }

    fn sheet(&self, number: u64) -> usize {
        READS + self.ranks + number as usize % 2 * Self::sheet_words(self.ranks)
    }

    fn part(&self, number: u64, peer: usize) -> *mut u8 {
        assert!(peer < self.ranks);
        let part = number as usize % 2 * self.ranks + peer;
        let start = 8 * Self::elements(self.ranks) + part * INLINE;
        // SAFETY: the part lies in the mapping.
        unsafe { self.memory.as_mut_ptr().add(start) }
    }

    /// Lets the others read what exchange `number` offers.
    pub(super) fn open(&self, number: u64) {
        self.word(OFFER).store(number, Ordering::SeqCst);
    }

    /// Takes the memory back: what is read from now on does not count.
    pub(super) fn close(&self) {
        self.word(OFFER).store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether what was read of the rank's memory in exchange `number` counts.
    pub(super) fn offers(&self, number: u64) -> bool {
        fence(Ordering::SeqCst);
        self.word(OFFER).load(Ordering::SeqCst) == number
    }

    /// Writes what the rank gives a peer in exchange `number` down.
    pub(super) fn put(&self, number: u64, peer: usize, bytes: &[u8]) {
        let address = bytes.as_ptr().addr() as u64;
        self.source_word(number, peer)
            .store(address, Ordering::Relaxed);
        if bytes.len() <= INLINE {
            // SAFETY: a part has room for them, and no rank reads it now: what it held two exchanges ago was read before the
            // exchange in between, and what it gets is read once this rank has come.
            unsafe {
                self.part(number, peer)
                    .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
            };
        }
    }

    /// Says that the rank has come to exchange `number`, for which it has put down everything.
    pub(super) fn come(&self, number: u64, call: Call, counts: Option<Counts<'_>>) {
        let message = Message::Meet { call }.to_words();
        let counts = counts.iter().flatten().copied().flatten();
        let words = message.into_iter().chain(counts.map(|&count| count as u64));
        for (index, word) in words.enumerate() {
            self.word(self.sheet(number) + index)
                .store(word, Ordering::Relaxed);
        }
        self.word(COME).store(number, Ordering::Release);
    }

    /// Whether the rank has come to exchange `number`. What it has written for it can then be read.
    pub(super) fn has_come(&self, number: u64) -> bool {
        self.word(COME).load(Ordering::Acquire) >= number && !self.has_failed(number)
    }

    /// Says that the world has ended for the rank in exchange `number`. Whoever comes to it later is not to go on as if all
    /// were there.
    pub(super) fn fail(&self, number: u64) {
        self.word(FAILED).store(number.max(1), Ordering::Release);
    }

    /// Whether the world had ended for the rank in exchange `number` or before.
    pub(super) fn has_failed(&self, number: u64) -> bool {
        (1..=number).contains(&self.word(FAILED).load(Ordering::Acquire))
    }

    /// Words of a sheet from `start` on.
    fn words(&self, number: u64, start: usize) -> impl Iterator<Item = u64> {
        let sheet = self.sheet(number);
        let words = sheet + start..sheet + Self::sheet_words(self.ranks);
        words.map(|index| self.word(index).load(Ordering::Relaxed))
    }

    /// What the rank says to all, once it has come to exchange `number`.
    pub(super) fn message(&self, number: u64) -> Message {
        let mut words = [0; WORDS];
        for (word, written) in words.iter_mut().zip(self.words(number, 0)) {
            *word = written;
        }
        Message::from_words(&words)
    }

    /// The counts that follow the message.
    pub(super) fn counts(&self, number: u64) -> impl Iterator<Item = usize> {
        let counts = self.words(number, WORDS).take(2 * self.ranks);
        counts.map(|count| count as usize)
    }

    /// Where what the rank gives `peer` lies in the rank's memory.
    pub(super) fn source(&self, number: u64, peer: usize) -> u64 {
        self.source_word(number, peer).load(Ordering::Relaxed)
    }

    fn source_word(&self, number: u64, peer: usize) -> &AtomicU64 {
        self.word(self.sheet(number) + WORDS + 2 * self.ranks + peer)
    }

    /// The first `bytes` bytes for `peer`, once the rank has come to exchange `number` and until `peer` comes to the next.
    pub(super) fn inline(&self, number: u64, peer: usize, bytes: usize) -> &[u8] {
        assert!(bytes <= INLINE);
        // SAFETY: the bytes lie in the mapping, and the rank does not write there meanwhile.
        unsafe { std::slice::from_raw_parts(self.part(number, peer), bytes) }
    }

    /// Says that the rank has read `peer`'s memory in exchange `number`.
    pub(super) fn tell_read(&self, number: u64, peer: usize) {
        self.word(READS + peer).store(number, Ordering::Release);
    }

    /// Whether the rank has read `peer`'s memory in exchange `number`.
    pub(super) fn has_read(&self, number: u64, peer: usize) -> bool {
        self.word(READS + peer).load(Ordering::Acquire) >= number
    }
}
