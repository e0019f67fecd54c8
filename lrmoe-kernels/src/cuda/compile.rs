//! Sources to images, by NVRTC.

use std::ffi::{CStr, CString, c_int};

use cudarc::nvrtc::{
    result::{self, NvrtcError},
    sys,
};

use super::kernel::Source;
use crate::Error;

/// A source of kernels as NVRTC compiled it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The source's name.
    pub source: &'static str,
    /// What a driver loads: CUBIN, or PTX that ends with a zero.
    pub image: Vec<u8>,
    /// What the compiler and the assembler said, with the registers and the spilled bytes of each kernel.
    pub log: String,
}

/// Compiles all kernels for an architecture: `sm_90` gives CUBIN for it, `compute_90` gives PTX for it and later ones. This needs NVRTC, but no card.
///
/// # Errors
///
/// [`Error::NoDevice`] without NVRTC, [`Error::Shader`].
pub fn compile(architecture: &str) -> Result<Vec<Compiled>, Error> {
    find_nvrtc()?;
    let compile = |source: &Source| compile_source(*source, architecture);
    Source::ALL.iter().map(compile).collect()
}

/// Looks for the library of NVRTC, and asks for its version (major, minor).
///
/// # Errors
///
/// [`Error::NoDevice`].
pub fn find_nvrtc() -> Result<(u32, u32), Error> {
    let none = |reason: String| Error::NoDevice {
        backend: "cuda",
        reason,
    };
    // Its functions panic without.
    // SAFETY: loading NVRTC runs nothing but its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(none(
            "the library of NVRTC, which compiles kernels, is not found".into(),
        ));
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: two integers are written.
    let asked = unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result();
    asked.map_err(|error| none(format!("NVRTC does not say its version: {error}")))?;
    Ok((major.unsigned_abs(), minor.unsigned_abs()))
}

/// What to compile for, for a card of this compute capability: itself, or the latest that NVRTC knows before it, from which a driver goes on.
pub(super) fn architecture_for((major, minor): (i32, i32)) -> Result<String, Error> {
    let own = 10 * major + minor;
    let refused = |error: NvrtcError| Error::NoDevice {
        backend: "cuda",
        reason: format!("NVRTC does not say what it compiles for: {error}"),
    };
    let mut count: c_int = 0;
    // SAFETY: an integer is written.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }
        .result()
        .map_err(refused)?;
    let mut known = vec![0 as c_int; usize::try_from(count).unwrap_or(0)];
    // SAFETY: as many integers are written as it was said.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }
        .result()
        .map_err(refused)?;
    match known.into_iter().filter(|&known| known <= own).max() {
        Some(latest) if latest == own => Ok(format!("sm_{own}")),
        Some(latest) => Ok(format!("compute_{latest}")),
        None => Err(Error::NoDevice {
            backend: "cuda",
            reason: format!("NVRTC does not compile for compute capability {major}.{minor}"),
        }),
    }
}

/// NVRTC is present.
pub(super) fn compile_source(source: Source, architecture: &str) -> Result<Compiled, Error> {
    let shader = source.name();
    let refused = |reason| Error::Shader { shader, reason };
    let failed = |error: NvrtcError| refused(error.to_string());
    let text = CString::new(source.text()).map_err(|error| refused(error.to_string()))?;
    let name = CString::new(format!("{shader}.cu")).map_err(|error| refused(error.to_string()))?;
    let program = Program::new(&text, &name).map_err(failed)?;
    let architecture = CString::new(architecture).map_err(|error| refused(error.to_string()))?;
    let architecture = architecture.to_string_lossy();
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        "--ptxas-options=-v".into(),
        // Not all constants of what sources share are used in each.
        "--diag-suppress=177".into(),
    ];
    // SAFETY: the program is not destroyed yet.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    // SAFETY: likewise.
    let log = unsafe { result::get_program_log(program.0) }.map_err(failed)?;
    let log: Vec<_> = log.into_iter().map(|byte| byte as u8).collect();
    let log = String::from_utf8_lossy(&log);
    let log = log.trim_end_matches('\0').to_owned();
    compiled.map_err(|error| refused(format!("{error}: {log}")))?;
    let image = if architecture.starts_with("sm_") {
        program.cubin()
    } else {
        program.ptx()
    };
    Ok(Compiled {
        source: shader,
        image: image.map_err(failed)?,
        log,
    })
}

/// Destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(text: &CStr, name: &CStr) -> Result<Self, NvrtcError> {
        result::create_program(text, Some(name)).map(Self)
    }

    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is not destroyed yet, and a number is written.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result()?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: as many bytes are written as it was said.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }

    fn ptx(&self) -> Result<Vec<u8>, NvrtcError> {
        // SAFETY: the program is not destroyed yet.
        let ptx = unsafe { result::get_ptx(self.0) }?;
        Ok(ptx.into_iter().map(|byte| byte as u8).collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Of no use to anyone if it fails.
        // SAFETY: the program is not destroyed yet.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
