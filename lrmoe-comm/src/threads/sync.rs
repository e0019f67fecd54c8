//! What threads synchronise by: std's, or with `--cfg loom` what loom tries all orders of.

#[cfg(loom)]
pub(super) use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
    thread::yield_now,
};
#[cfg(not(loom))]
pub(super) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
    thread::yield_now,
};

/// std's cell, with loom's methods.
#[cfg(not(loom))]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
