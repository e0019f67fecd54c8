//! Reading the memory of another process on this host.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Where this process offers memory to the others: the number of the exchange that may be read, 0
/// while nothing may. Leaked, so that the address never means anything else.
#[derive(Debug)]
pub(super) struct Offer(&'static AtomicU64);

impl Offer {
    pub(super) fn new() -> Self {
        Self(Box::leak(Box::default()))
    }

    pub(super) fn address(&self) -> u64 {
        std::ptr::from_ref(self.0).addr() as u64
    }

    /// Lets the others read what exchange `number` offers.
    pub(super) fn open(&self, number: u64) {
        self.0.store(number, Ordering::SeqCst);
    }

    /// Takes the memory back: what is read from now on does not count.
    pub(super) fn close(&self) {
        self.0.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// A process on this host and where it offers memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Process {
    pub(super) id: u32,
    pub(super) offer: u64,
}

impl Process {
    /// Whether that process now has exchange `number` on offer, as far as this one can read.
    pub(super) fn offers(self, number: u64) -> bool {
        let mut found = [0; 8];
        self.read(self.offer, &mut found) && u64::from_ne_bytes(found) == number
    }

    /// Fills `out` from `address` of the process. The bytes only count if `offers` says so
    /// afterwards.
    #[cfg(target_os = "linux")]
    pub(super) fn read(self, address: u64, out: &mut [u8]) -> bool {
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
            let read = unsafe { libc::process_vm_readv(self.id as i32, &local, 1, &remote, 1, 0) };
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
    pub(super) fn read(self, _: u64, _: &mut [u8]) -> bool {
        false
    }
}
