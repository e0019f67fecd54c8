//! Processes of this host that share memory.

use std::fs::{File, OpenOptions};
use std::sync::atomic::{Ordering, fence};

use super::board::Board;

/// What the others of its host need to find a process: its id, the descriptor of its board's file, where the board lies in
/// its memory, and the secret on the board; all 0 without a board.
pub(super) type Card = [u64; 4];

/// This process's card. The file must stay open until the others have found it.
#[cfg(target_os = "linux")]
pub(super) fn card(board: &Board, file: &File) -> Card {
    use std::os::fd::AsRawFd;
    let (id, file) = (std::process::id().into(), file.as_raw_fd() as u64);
    [id, file, board.address(), board.secret()]
}

#[cfg(not(target_os = "linux"))]
pub(super) fn card(_: &Board, _: &File) -> Card {
    [0; 4]
}

/// A process of this host whose memory this one may read, and its board.
#[derive(Debug)]
pub(super) struct Neighbour {
    id: u32,
    pub(super) board: Board,
}

impl Neighbour {
    /// The process of this card, if it runs on this host and the system lets its memory be read. A process of another host
    /// may have the same id as one here, but not this secret at the same place.
    pub(super) fn find([id, file, address, secret]: Card, ranks: usize) -> Option<Self> {
        let (id, mut found) = (id as u32, [0; 8]);
        if secret == 0 || !read(id, address, &mut found) || u64::from_ne_bytes(found) != secret {
            return None;
        }
        let path = format!("/proc/{id}/fd/{file}");
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let board = Board::map(&file, ranks)?;
        (board.secret() == secret).then_some(Self { id, board })
    }

    /// Fills `out` from `address` of the process. The bytes only count if its board offers them afterwards.
    pub(super) fn read(&self, address: u64, out: &mut [u8]) -> bool {
        read(self.id, address, out)
    }
}

#[cfg(target_os = "linux")]
fn read(id: u32, address: u64, out: &mut [u8]) -> bool {
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        let local = libc::iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address as usize + done),
            iov_len: rest.len(),
        };
        // SAFETY: the local vector is `rest`, which is ours to write; the kernel checks the
        // remote one against the other process, which it only reads.
        let read = unsafe { libc::process_vm_readv(id as i32, &local, 1, &remote, 1, 0) };
        match usize::try_from(read) {
            Ok(read) if read > 0 => done += read,
            _ => return false,
        }
    }
    fence(Ordering::SeqCst);
    true
}

/// Other systems have nothing of the kind.
#[cfg(not(target_os = "linux"))]
fn read(_: u32, _: u64, _: &mut [u8]) -> bool {
    false
}
