//! Small files read whole. A pipe in a file's place would keep a reader waiting for ever, so only regular files are opened;
//! links to them are.

use std::io;
use std::path::Path;

/// The bytes of a regular file.
///
/// # Errors
/// What the system says; something else than a file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        let problem = "expected a regular file, found something else (a folder, a pipe or a device)";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    std::fs::read(path)
}

/// The same as text.
///
/// # Errors
/// As [`read`]; bytes that are no UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
