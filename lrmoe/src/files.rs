//! Files that are whole or not there: written under a temporary name in the same folder, synced, renamed; then the folder is synced.
//!
//! However a program ends, the file under its own name is the old one or the new one. What a killed one leaves behind is named after the file,
//! `.NAME.XXXXXX.part`.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::error::Error;

#[cfg(test)]
mod tests;

const SUFFIX: &str = ".part";

/// Makes the file at `path` hold these bytes.
///
/// # Errors
/// `Error::Io` with the path; what was there before is then as it was.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = temporary_beside(path).and_then(|mut file| {
        // Of the file itself, whose errors do not name the temporary path.
        file.as_file_mut().write_all(bytes)?;
        persist(file, path)
    });
    written.map_err(Error::io(path))
}

/// A file in the folder of `path`, for [`persist`]; dropped before that, it is removed. Who may read it is up to the umask, as for other files.
pub(crate) fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    let prefix = prefix(path);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(SUFFIX);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder_of(path))
}

/// Gives a written file its name.
pub(crate) fn persist(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    // The name too is on the disk before anything relies on it. Some file systems, and all of Windows, cannot sync a folder.
    #[cfg(unix)]
    match std::fs::File::open(folder_of(path))?.sync_all() {
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => return Err(error),
        _ => {}
    }
    Ok(())
}

/// Removes what killed programs left of `path`. No other may be writing it.
pub(crate) fn remove_leftovers(path: &Path) -> Result<(), Error> {
    let folder = folder_of(path);
    let prefix = prefix(path);
    for entry in folder.read_dir().map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        if is_leftover(&entry.file_name(), &prefix) {
            let left = entry.path();
            std::fs::remove_file(&left).map_err(Error::io(left))?;
        }
    }
    Ok(())
}

fn is_leftover(name: &OsStr, prefix: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(prefix.as_encoded_bytes()) && name.ends_with(SUFFIX.as_bytes())
}

fn prefix(path: &Path) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push(".");
    prefix
}

/// The folder that holds `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}
