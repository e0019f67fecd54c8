//! Buffers of CUDA devices, and what NVRTC makes of the kernels.

use lrmoe_kernels::{CompactRows, Cuda, Error, Memory};

use crate::Candidate;
use libtest_mimic::Trial;

/// Of two devices, made alike.
pub(crate) fn trials(candidate: &Candidate<Cuda>, other: fn() -> Cuda) -> Vec<Trial> {
    vec![
        candidate.trial("device::too_large", too_large),
        candidate.trial("device::other_device", move |cuda| {
            other_device(cuda, &other())
        }),
        candidate.trial("device::threads", threads),
    ]
}

fn too_large(cuda: &Cuda) {
    for len in [usize::MAX / 8, usize::MAX] {
        let mut buffer = cuda.upload(&[1.0_f32]).unwrap();
        match cuda.resize(&mut buffer, len).unwrap_err() {
            Error::TooLarge { bytes, .. } => assert!(bytes >= len as u64),
            Error::OutOfMemory { bytes, .. } => assert_eq!(bytes, 4 * len as u64),
            other => panic!("{other}"),
        }
    }
}

fn other_device(cuda: &Cuda, other: &Cuda) {
    let rows = other.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
    let index = cuda.row_index(&[2, 0], 3).unwrap();
    let error = cuda.gather(&rows, 1, &index, &mut Default::default());
    assert!(matches!(error, Err(Error::OtherDevice)), "{error:?}");
    let error = cuda.download(&rows);
    assert!(matches!(error, Err(Error::OtherDevice)), "{error:?}");
    // What a buffer held does not matter to what writes it.
    let mut rows = rows;
    cuda.write(&[4.0], &mut rows).unwrap();
    assert_eq!(cuda.download(&rows).unwrap(), [4.0]);
}

/// Clones in several threads, each with buffers of its own.
fn threads(cuda: &Cuda) {
    let gathered = |cuda: &Cuda, first: u32| {
        let rows: Vec<_> = (first..first + 3000).collect();
        let rows = cuda.upload(&rows).unwrap();
        let index = cuda.row_index(&[2, 0], 3).unwrap();
        let mut out = Default::default();
        cuda.gather(&rows, 1000, &index, &mut out).unwrap();
        let out = cuda.download(&out).unwrap();
        (0..1000).all(|i| out[i] == first + 2000 + i as u32)
    };
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let cuda = cuda.clone();
            std::thread::spawn(move || (0..20).all(|i| gathered(&cuda, 1000 * thread + i)))
        })
        .collect();
    for thread in threads {
        assert!(thread.join().unwrap());
    }
}

/// All kernels for cards of three generations, to what these run: without a warning, and without registers spilled to memory.
#[cfg(feature = "cuda")]
pub(crate) fn nvrtc_trials() -> Vec<Trial> {
    use std::sync::Arc;

    use lrmoe_kernels::cuda;

    let nvrtc = Candidate {
        name: "nvrtc",
        backend: cuda::find_nvrtc()
            .map(Arc::new)
            .map_err(|error| error.to_string()),
    };
    let compiles = |architecture: &'static str| {
        nvrtc.trial(architecture, move |_| {
            for compiled in cuda::compile(architecture).unwrap() {
                let (source, log) = (compiled.source, &compiled.log);
                if architecture.starts_with("sm_") {
                    assert!(compiled.image.starts_with(b"\x7fELF"), "{source}");
                }
                assert!(!log.contains("warning"), "{source}: {log}");
                let words: Vec<_> = log.split_whitespace().collect();
                for three in words.windows(3) {
                    if let [bytes, "bytes", "spill" | "stack"] = *three {
                        assert_eq!(bytes, "0", "{source}: {log}");
                    }
                }
            }
        })
    };
    ["sm_80", "sm_90a", "sm_100", "compute_80"]
        .map(compiles)
        .into()
}
