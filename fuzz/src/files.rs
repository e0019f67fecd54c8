//! A folder for what has to be read from files, one for each thread.

use std::path::PathBuf;

use tempfile::TempDir;

thread_local! {
    static FOLDER: TempDir = TempDir::new().expect("a folder for temporary files");
}

/// A file of that name.
pub(crate) fn path(name: &str) -> PathBuf {
    FOLDER.with(|folder| folder.path().join(name))
}

/// The file, with these bytes.
pub(crate) fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(name);
    std::fs::write(&path, bytes).expect("a file that can be written");
    path
}
