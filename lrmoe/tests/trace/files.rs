//! Traces from elsewhere: every `.safetensors` file is read whole, every `.jsonl` file converted and read.
//!
//! `LRMOE_TRACE` is the path of a file, or of a folder of such files. Without it the trial shows as ignored.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe::trace::{ConvertOptions, TraceReader, convert, inspect};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() {
    let arguments = Arguments::from_args();
    let place = std::env::var_os("LRMOE_TRACE");
    let absent = place.is_none();
    let trial = Trial::test("trace::files_from_elsewhere", move || {
        files(&place.unwrap_or_default()).map_err(|error| Failed::from(error.to_string()))
    });
    libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(absent)]).exit();
}

fn files(place: &OsString) -> Outcome {
    let place = Path::new(place);
    let mut files = vec![place.to_path_buf()];
    if place.is_dir() {
        let entries = std::fs::read_dir(place)?.map(|entry| Ok(entry?.path()));
        files = entries.collect::<std::io::Result<_>>()?;
    }
    let mut found = 0;
    for file in files {
        match file.extension().and_then(|ending| ending.to_str()) {
            Some("safetensors") => read(&file)?,
            Some("jsonl") => convert_and_read(&file)?,
            _ => continue,
        }
        found += 1;
    }
    if found == 0 {
        return Err(format!("{}: no trace", place.display()).into());
    }
    Ok(())
}

fn read(file: &Path) -> Outcome {
    let mut reader = TraceReader::open(file)?;
    let (inspection, _) = inspect(&mut reader, 0, &ProgressBar::hidden())?;
    println!("{}: {inspection}", file.display());
    let header = reader.header().clone();
    let pairs = header.top_k.zip(header.tokens_per_rank);
    for step in 0..header.steps {
        let counts = reader.step(step)?;
        for ((layer, rank), sent) in counts.sum_axis(ndarray::Axis(2)).indexed_iter() {
            if let Some((top_k, tokens)) = pairs
                && *sent as usize > top_k * tokens
            {
                return Err(
                    format!("step {step}, layer {layer}, rank {rank}: {sent} pairs").into(),
                );
            }
        }
    }
    for index in 0..header.recorded.len() {
        reader.pairs(index)?;
    }
    Ok(())
}

fn convert_and_read(file: &Path) -> Outcome {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("out.safetensors");
    let cut = ConvertOptions {
        ranks: Some(8),
        tokens_per_step: Some(512),
        ..ConvertOptions::default()
    };
    convert(&[PathBuf::from(file)], &out, &cut, &ProgressBar::hidden())?;
    read(&out)
}
