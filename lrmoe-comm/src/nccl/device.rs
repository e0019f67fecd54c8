//! Staging memory on a CUDA device, and the calls of NCCL.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError};
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;

use super::form::Kind;
use super::plan::{Transfer, Way};
use super::staged::{Device, Op};
use crate::{Call, Error, Reduction};

/// Bytes of a unique id.
pub(super) const ID_BYTES: usize = 128;
/// Bytes of staging memory for sending, and as many for receiving.
const STAGING: usize = 1 << 26;
/// Between two looks at work that goes on.
const PAUSE: Duration = Duration::from_micros(20);

/// cudarc loads libraries at their first use, and panics if there are none.
pub(super) fn check_libraries() -> Result<(), Error> {
    // SAFETY: both only try to load a library; loading NVIDIA's libraries has no other effect.
    let found = unsafe {
        [
            ("CUDA driver", cudarc::driver::sys::is_culib_present()),
            ("NCCL", sys::is_culib_present()),
        ]
    };
    match found.into_iter().find(|(_, is_present)| !is_present) {
        Some((library, _)) => Err(Error::NoLibrary { library }),
        None => Ok(()),
    }
}

pub(super) fn unique_id() -> Result<[u8; ID_BYTES], Error> {
    check_libraries()?;
    let id = result::get_uniqueid().map_err(nccl)?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// A communicator of NCCL that does not block the host, and its staging memory.
pub(super) struct Nvidia {
    /// Null once it is aborted.
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
    send: CudaSlice<u8>,
    recv: CudaSlice<u8>,
    deadline: Duration,
}

// SAFETY: NCCL's communicators are not bound to a thread, and this one is used through `&mut` only.
unsafe impl Send for Nvidia {}

impl fmt::Debug for Nvidia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvidia")
            .field("stream", &self.stream)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Nvidia {
    pub(super) fn new(
        stream: Arc<CudaStream>,
        (rank, ranks): (usize, usize),
        id: [u8; ID_BYTES],
        deadline: Duration,
    ) -> Result<Self, Error> {
        check_libraries()?;
        stream.context().bind_to_thread().map_err(cuda)?;
        let memory = || stream.alloc_zeros::<u8>(STAGING).map_err(cuda);
        let (send, recv) = (memory()?, memory()?);
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as c_char),
        };
        let number =
            |number| c_int::try_from(number).map_err(|_| Error::NoSuchRank { rank, ranks });
        let (place, size) = (number(rank)?, number(ranks)?);
        let (mut comm, mut config) = (null_mut(), config());
        // SAFETY: `comm` and `config` are valid for the call, `id` came from `ncclGetUniqueId` by
        // the contract of `Nccl::new`, and the stream's device is current.
        unsafe { result::comm_init_rank_config(&mut comm, size, id, place, &mut config) }
            .map_err(nccl)?;
        let mut world = Self {
            comm,
            stream,
            send,
            recv,
            deadline,
        };
        world.settle(Call::Barrier, Instant::now())?;
        Ok(world)
    }

    /// Waits until NCCL has taken what it was given.
    fn settle(&mut self, collective: Call, start: Instant) -> Result<(), Error> {
        while self.state()? == sys::ncclResult_t::ncclInProgress {
            self.pause(collective, start)?;
        }
        Ok(())
    }

    /// Waits until the device has done what it was given.
    fn finish(&mut self, collective: Call) -> Result<(), Error> {
        let start = Instant::now();
        self.settle(collective, start)?;
        let done = self.stream.record_event(None).map_err(cuda)?;
        while !done.try_is_complete().map_err(cuda)? {
            self.state()?;
            self.pause(collective, start)?;
        }
        Ok(())
    }

    /// What NCCL says of work that goes on: success or still in progress.
    fn state(&mut self) -> Result<sys::ncclResult_t, Error> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: `comm` is a communicator, as no method is called after `abort`, and `state` is
        // valid for the call.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm, &mut state) };
        let status = asked.result().and_then(|_| state.result());
        status.map_err(|error| self.abort(nccl(error)))?;
        Ok(state)
    }

    fn pause(&mut self, collective: Call, start: Instant) -> Result<(), Error> {
        let waited = start.elapsed();
        if waited >= self.deadline {
            return Err(self.abort(Error::Stalled { collective, waited }));
        }
        thread::sleep(PAUSE);
        Ok(())
    }

    /// Ends what is going on, on the device too. Nothing else can follow.
    fn abort(&mut self, error: Error) -> Error {
        let comm = std::mem::replace(&mut self.comm, null_mut());
        if !comm.is_null() {
            // SAFETY: `comm` is a communicator, and nobody has it any more.
            let _ = unsafe { result::comm_abort(comm) };
        }
        error
    }

    /// The calls of one operation, which NCCL queues on the stream.
    fn enqueue(&mut self, kind: Kind, op: Op<'_>) -> Result<NcclStatus, NcclError> {
        let (comm, stream) = (self.comm, self.stream.cu_stream().cast());
        let (send, _sent) = self.send.device_ptr(&self.stream);
        let (recv, _received) = self.recv.device_ptr_mut(&self.stream);
        let (from, to) = (send as *const c_void, recv as *mut c_void);
        let data = data_type(kind);
        match op {
            Op::Group(transfers) => group(transfers, kind, (from, to), (comm, stream)),
            // SAFETY: communicator and stream are alive; `Staged` keeps what an operation reads and
            // writes, at most the values of all ranks at once, within `capacity` of either part,
            // and waits for its end before it uses or frees them.
            Op::AllReduce { len, reduction } => unsafe {
                result::all_reduce(from, to, len, data, operator(reduction), comm, stream)
            },
            // SAFETY: as for an all-reduce.
            Op::AllGather { len } => unsafe {
                result::all_gather(from, to, len, data, comm, stream)
            },
            // SAFETY: as for an all-reduce.
            Op::ReduceScatter { len, reduction } => unsafe {
                result::reduce_scatter(from, to, len, data, operator(reduction), comm, stream)
            },
            // SAFETY: as for an all-reduce.
            Op::Broadcast { len, root } => unsafe {
                result::broadcast(from, to, len, data, root as c_int, comm, stream)
            },
        }
    }
}

impl Device for Nvidia {
    fn capacity(&self) -> usize {
        STAGING
    }

    fn upload(&mut self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let mut part = self.send.slice_mut(at..at + bytes.len());
        self.stream.memcpy_htod(bytes, &mut part).map_err(cuda)
    }

    fn download(&mut self, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let part = self.recv.slice(at..at + bytes.len());
        self.stream.memcpy_dtoh(&part, bytes).map_err(cuda)?;
        self.stream.synchronize().map_err(cuda)
    }

    fn run(&mut self, collective: Call, kind: Kind, op: Op<'_>) -> Result<(), Error> {
        self.stream.context().bind_to_thread().map_err(cuda)?;
        if let Err(error) = self.enqueue(kind, op) {
            return Err(self.abort(nccl(error)));
        }
        self.finish(collective)
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // Every collective has been waited for, so there is nothing that could be lost.
            // SAFETY: `comm` is a communicator, and this is its last use.
            let _ = unsafe { result::comm_abort(self.comm) };
        }
    }
}

/// As NCCL_CONFIG_INITIALIZER, except that calls do not block.
fn config() -> sys::ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        // The version that these fields are of, 2.24.3.
        version: 2 * 10_000 + 24 * 100 + 3,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
    }
}

fn group(
    transfers: &[Transfer],
    kind: Kind,
    (from, to): (*const c_void, *mut c_void),
    (comm, stream): (sys::ncclComm_t, sys::cudaStream_t),
) -> Result<NcclStatus, NcclError> {
    let data = data_type(kind);
    result::group_start()?;
    let queued = transfers.iter().try_for_each(|part| {
        let (len, at) = (part.elements.len(), part.at * kind.size());
        let peer = part.peer as c_int;
        // SAFETY: as for the operations of `enqueue`; the plan keeps parts side by side within the
        // staging memory.
        let status = unsafe {
            match part.way {
                Way::Send => result::send(from.byte_add(at), len, data, peer, comm, stream),
                Way::Receive => result::recv(to.byte_add(at), len, data, peer, comm, stream),
            }
        };
        status.map(drop)
    });
    // A group that was begun is ended whatever happened in it.
    let ended = result::group_end();
    queued.and(ended)
}

fn data_type(kind: Kind) -> sys::ncclDataType_t {
    match kind {
        Kind::U32 => sys::ncclDataType_t::ncclUint32,
        Kind::U64 => sys::ncclDataType_t::ncclUint64,
        Kind::F32 => sys::ncclDataType_t::ncclFloat32,
        Kind::Bf16 => sys::ncclDataType_t::ncclBfloat16,
    }
}

fn operator(reduction: Reduction) -> sys::ncclRedOp_t {
    match reduction {
        Reduction::Sum => sys::ncclRedOp_t::ncclSum,
        Reduction::Max => sys::ncclRedOp_t::ncclMax,
    }
}

fn cuda(error: DriverError) -> Error {
    Error::Cuda {
        code: error.0 as u32,
    }
}

fn nccl(error: NcclError) -> Error {
    Error::Nccl {
        code: error.0 as u32,
    }
}
