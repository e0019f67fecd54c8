//! Messages whose memory belongs to the world: the only calls of MPI's C interface.

use std::ptr::NonNull;

use mpi::ffi;

/// What a message is for.
#[derive(Clone, Copy)]
pub(super) enum Tag {
    /// Meetings and failures.
    Control = 1,
    /// Chunks of elements.
    Chunk = 2,
}

/// A communicator of the world's own, which returns errors. It is never freed: that would be a
/// collective call, in which a lost rank would be missed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channel(ffi::MPI_Comm);

// SAFETY: MPI was initialised for `MPI_THREAD_MULTIPLE` (`Mpi::new` checks it), so its handles may
// be used from any thread.
unsafe impl Send for Channel {}

impl Channel {
    /// Takes over a communicator.
    pub(super) fn new(communicator: mpi::topology::SimpleCommunicator) -> Self {
        use mpi::raw::AsRaw;
        let raw = communicator.as_raw();
        std::mem::forget(communicator);
        // SAFETY: `raw` is a communicator that nothing else holds, and the error handler is MPI's
        // own.
        unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        Self(raw)
    }
}

/// MPI's code of an error.
#[derive(Clone, Copy, Debug)]
pub(super) struct Code(pub(super) i32);

impl Code {
    fn check(code: i32) -> Result<(), Self> {
        match code as u32 {
            ffi::MPI_SUCCESS => Ok(()),
            _ => Err(Self(code)),
        }
    }
}

/// Memory of one message at a time. While a message is on its way, MPI alone touches the memory; if it still is
/// when the slot is dropped, the memory is leaked, for MPI may write to it whenever it makes progress.
#[derive(Debug)]
pub(super) struct Slot {
    memory: NonNull<[u8]>,
    /// The message on its way.
    request: Option<ffi::MPI_Request>,
    receives: bool,
}

// SAFETY: the memory belongs to the slot, and for the request see `Channel`.
unsafe impl Send for Slot {}

impl Slot {
    /// A slot for messages of at most `bytes`.
    pub(super) fn new(bytes: usize) -> Self {
        let memory = Box::leak(vec![0; bytes].into_boxed_slice());
        Self {
            memory: NonNull::from(memory),
            request: None,
            receives: false,
        }
    }

    /// Starts to send the first `bytes` to `rank`. The slot must be idle.
    pub(super) fn send(
        &mut self,
        channel: Channel,
        rank: usize,
        tag: Tag,
        bytes: usize,
    ) -> Result<(), Code> {
        assert!(self.request.is_none() && bytes <= self.memory.len());
        // SAFETY: an all-zero request is only the place for MPI to write to.
        let mut request = unsafe { std::mem::zeroed() };
        // SAFETY: the memory holds `bytes` bytes, and neither it nor its content is touched until
        // `test` has seen the end of the request; counts, ranks and tags fit an int.
        Code::check(unsafe {
            ffi::MPI_Isend(
                self.memory.as_ptr().cast(),
                bytes as i32,
                ffi::RSMPI_UINT8_T,
                rank as i32,
                tag as i32,
                channel.0,
                &mut request,
            )
        })?;
        (self.request, self.receives) = (Some(request), false);
        Ok(())
    }

    /// Starts to receive a message of any length that fits from `rank`. The slot must be idle.
    pub(super) fn receive(&mut self, channel: Channel, rank: usize, tag: Tag) -> Result<(), Code> {
        assert!(self.request.is_none());
        // SAFETY: as in `send`.
        let mut request = unsafe { std::mem::zeroed() };
        // SAFETY: as in `send`; a longer message would be an error, not written beyond the memory.
        Code::check(unsafe {
            ffi::MPI_Irecv(
                self.memory.as_ptr().cast(),
                self.memory.len() as i32,
                ffi::RSMPI_UINT8_T,
                rank as i32,
                tag as i32,
                channel.0,
                &mut request,
            )
        })?;
        (self.request, self.receives) = (Some(request), true);
        Ok(())
    }

    /// Whether the slot is idle: its last message has left or come.
    pub(super) fn test(&mut self) -> Result<bool, Code> {
        let Some(request) = &mut self.request else {
            return Ok(true);
        };
        let mut done = 0;
        // SAFETY: the request is active, and the status may be left out.
        let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        Code::check(code)?;
        if done != 0 {
            self.request = None;
        }
        Ok(done != 0)
    }

    /// The last message received, and what lies behind it. The slot must be idle.
    pub(super) fn bytes(&self) -> &[u8] {
        assert!(self.request.is_none());
        // SAFETY: the memory is initialised and, as the slot is idle, ours.
        unsafe { self.memory.as_ref() }
    }

    /// Room for the next message. The slot must be idle.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.request.is_none());
        // SAFETY: as in `bytes`.
        unsafe { self.memory.as_mut() }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(request) = self.request.as_mut().filter(|_| self.receives) {
            // SAFETY: the request is active. Once cancelled it ends in `test`; if a message is coming
            // already it cannot be cancelled and stays active.
            unsafe { ffi::MPI_Cancel(request) };
        }
        if self.test().is_ok_and(|idle| idle) {
            // SAFETY: the memory came from a box, and MPI has let go of it.
            drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
        }
    }
}
