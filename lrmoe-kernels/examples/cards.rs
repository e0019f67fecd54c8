//! Lists the NVIDIA cards of this machine. Where the first cannot be used, says why and ends with 2.

use std::process::ExitCode;

use lrmoe_kernels::{Cuda, Error, cuda};

fn run() -> Result<(), Error> {
    let cards = cuda::cards()?;
    // And what compiles for it.
    Cuda::new(0)?;
    for card in cards {
        let (major, minor) = card.compute_capability;
        let gib = card.memory_bytes as f64 / f64::from(1 << 30);
        println!(
            "{}, compute capability {major}.{minor}, {gib:.1} GiB",
            card.name
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
