//! What goes wrong on a device is a typed error, and devices are found and shared.

use std::{env, process::Command};

use lrmoe_kernels::{
    CompactRows, Error, Memory, SelectPairs, SquaredNorm, Wgpu,
    lrmoe_metric::{Pairs, Score, Solo},
    ndarray::Array2,
    wgpu::{DeviceType, Limits},
};

use crate::Candidate;
use libtest_mimic::Trial;

pub(crate) fn trials(candidate: &Candidate<Wgpu>) -> Vec<Trial> {
    vec![
        candidate.trial("device::adapters", adapters),
        candidate.trial("device::shared", shared),
        candidate.trial("device::lost", lost),
        candidate.trial("device::out_of_memory", out_of_memory),
        candidate.trial("device::too_large", too_large),
        candidate.trial("device::refused_shader", refused_shader),
        candidate.trial("device::other_device", other_device),
    ]
}

fn gathered(wgpu: &Wgpu) -> Result<Vec<f32>, Error> {
    let rows = wgpu.upload(&[1.0, 2.0, 3.0])?;
    let index = wgpu.row_index(&[2, 0], 3)?;
    let mut out = Default::default();
    wgpu.gather(&rows, 1, &index, &mut out)?;
    wgpu.download(&out)
}

fn adapters(wgpu: &Wgpu) {
    let name = wgpu.adapter_info().name;
    let adapters = Wgpu::adapters().unwrap();
    assert!(adapters.iter().any(|(info, _)| info.name == name));
    assert!(format!("{wgpu:?}").contains(&name));
}

fn shared(wgpu: &Wgpu) {
    let other = Wgpu::from_device(wgpu.device().clone(), wgpu.queue().clone()).unwrap();
    let threads = [wgpu.clone(), other].map(|wgpu| {
        std::thread::spawn(move || {
            (0..20)
                .map(|_| gathered(&wgpu).unwrap())
                .collect::<Vec<_>>()
        })
    });
    for thread in threads {
        assert!(
            thread
                .join()
                .unwrap()
                .iter()
                .all(|rows| rows == &[3.0, 1.0])
        );
    }
}

/// Every way in: writing, queueing, reading, and a stage that reads back.
fn lost(_: &Wgpu) {
    for own in [true, false] {
        let wgpu = Wgpu::new().unwrap();
        let wgpu = match own {
            true => wgpu,
            false => Wgpu::from_device(wgpu.device().clone(), wgpu.queue().clone()).unwrap(),
        };
        let rows = wgpu.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
        let index = wgpu.row_index(&[2, 0], 3).unwrap();
        let ids = Array2::zeros((2, 1));
        let gates = Array2::ones((2, 1));
        let pairs = Pairs::new(ids.view(), gates.view(), 1, 0).unwrap();
        let pairs = wgpu.pairs(&pairs).unwrap();
        let norms = wgpu.upload(&[SquaredNorm::of(&[1.0]); 2]).unwrap();
        let keys = wgpu.upload(&[1, 2]).unwrap();
        wgpu.device().destroy();
        let is_lost = |what: &str, error: Error| {
            let lost = matches!(error, Error::DeviceLost { .. });
            assert!(lost, "{what}: {error}");
            assert!(error.to_string().starts_with("the device was lost while "));
        };
        let gathered_rows = wgpu.gather(&rows, 1, &index, &mut Default::default());
        is_lost("gather", gathered_rows.unwrap_err());
        is_lost("download", wgpu.download(&rows).unwrap_err());
        is_lost("upload and gather", gathered(&wgpu).unwrap_err());
        let score = wgpu.score(Score::Forward, &pairs, None, Some(&norms), &mut Solo);
        is_lost("score", score.unwrap_err());
        let kept = wgpu.select_keys(&pairs, &keys, &[1], &mut Solo);
        is_lost("select", kept.unwrap_err());
        let again = Wgpu::from_device(wgpu.device().clone(), wgpu.queue().clone());
        let error = again.map(|wgpu| gathered(&wgpu).unwrap_err());
        is_lost("from_device", error.unwrap_or_else(|error| error));
    }
    gathered(&Wgpu::new().unwrap()).unwrap();
}

/// In a process of its own, as one that is out of memory is of no use to other tests.
fn out_of_memory(wgpu: &Wgpu) {
    let mut command = Command::new(env::current_exe().unwrap());
    if cfg!(unix) && wgpu.adapter_info().device_type == DeviceType::Cpu {
        // A software driver's memory is the process's.
        command = Command::new("sh");
        command.args(["-c", "ulimit -v 8000000 && exec \"$0\" \"$1\""]);
        command.arg(env::current_exe().unwrap());
    }
    let output = command.arg(EXHAUST_MEMORY).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
}

/// The argument for which this program runs [`exhaust_memory`] and nothing else.
pub(crate) const EXHAUST_MEMORY: &str = "--exhaust-memory";

/// Allocates until there is no more memory.
pub(crate) fn exhaust_memory() {
    let wgpu = Wgpu::new().unwrap();
    gathered(&wgpu).unwrap();
    let most = wgpu.limits().max_buffer_size as usize / 4;
    let mut held = Vec::new();
    let error = (0..1 << 12).find_map(|_| {
        let mut buffer = Default::default();
        let error = wgpu.resize::<f32>(&mut buffer, most).err();
        held.push(buffer);
        error
    });
    match error {
        Some(Error::OutOfMemory { operation, bytes }) => {
            assert_eq!((operation, bytes), ("allocating a buffer", 4 * most as u64));
        }
        other => panic!("{other:?}"),
    }
    drop(held);
    assert_eq!(gathered(&wgpu).unwrap(), [3.0, 1.0]);
}

fn too_large(wgpu: &Wgpu) {
    let limit = wgpu.limits().max_buffer_size;
    for len in [limit as usize / 4 + 1, usize::MAX] {
        let mut buffer = wgpu.upload(&[1.0_f32]).unwrap();
        let error = wgpu.resize(&mut buffer, len).unwrap_err();
        let expected = Error::TooLarge {
            what: "a buffer",
            bytes: (len as u64).saturating_mul(4),
            limit,
        };
        assert_eq!(error.to_string(), expected.to_string());
        assert_eq!(wgpu.download(&buffer).unwrap(), [1.0]);
    }
    let small = Wgpu::with_limits(|limits| Limits {
        max_storage_buffer_binding_size: 1 << 12,
        ..limits
    });
    let small = small.unwrap();
    let row = small.upload(&[1.0_f32; 1100]).unwrap();
    let index = small.row_index(&[0], 1).unwrap();
    let error = small.gather(&row, 1100, &index, &mut Default::default());
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("a row of 4400 bytes is past the device's limit of "),
        "{error}"
    );
}

/// A device that does not allow what the shaders need.
fn refused_shader(_: &Wgpu) {
    let small = Wgpu::with_limits(|limits| Limits {
        max_compute_invocations_per_workgroup: 64,
        ..limits
    });
    match small.unwrap_err() {
        Error::Shader { shader, reason } => {
            assert_eq!(shader, "norm");
            assert!(!reason.is_empty());
        }
        other => panic!("{other}"),
    }
}

fn other_device(wgpu: &Wgpu) {
    let other = Wgpu::new().unwrap();
    let rows = other.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
    let index = wgpu.row_index(&[2, 0], 3).unwrap();
    let error = wgpu.gather(&rows, 1, &index, &mut Default::default());
    assert!(matches!(error, Err(Error::OtherDevice)), "{error:?}");
    let error = wgpu.download(&rows);
    assert!(matches!(error, Err(Error::OtherDevice)), "{error:?}");
    // What a buffer held does not matter to what writes it.
    let mut rows = rows;
    wgpu.write(&[4.0], &mut rows).unwrap();
    assert_eq!(wgpu.download(&rows).unwrap(), [4.0]);
}
