//! Files that are written around the system's cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use walrider_datadir::DataDirError;
use walrider_datadir::behind::{Buffer, ToWrite};
use walrider_datadir::relation::open_direct;

use crate::error::{IoContext, Result};

/// A file that is there, and empty.
pub struct Through {
    file: Arc<File>,
    path: Arc<PathBuf>,
}

impl Through {
    /// Opens a file that is to have `size` bytes; `None` where its file system always uses the cache.
    ///
    /// # Errors
    /// When it cannot be opened, or there is no room for it.
    pub fn open(path: &Path, size: u64) -> Result<Option<Through>> {
        let Some(file) = open_direct(path).context("open file", path)? else { return Ok(None) };
        // Writes that make a file longer come one after the other.
        match fallocate(&file, FallocateFlags::empty(), 0, size) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => {}
            Err(error) => return Err(std::io::Error::from(error)).context("make room for file", path),
        }
        Ok(Some(Through { file: Arc::new(file), path: Arc::new(path.to_owned()) }))
    }

    /// The first `len` bytes of a buffer, which begin at `offset`.
    pub fn piece(&self, offset: u64, buffer: Buffer, len: usize) -> Piece {
        Piece { file: self.file.clone(), path: self.path.clone(), offset, buffer, len }
    }
}

/// A piece of such a file.
pub struct Piece {
    file: Arc<File>,
    path: Arc<PathBuf>,
    offset: u64,
    buffer: Buffer,
    len: usize,
}

impl ToWrite for Piece {
    type To = ();

    fn write(&self, (): &()) -> std::result::Result<(), DataDirError> {
        let bytes = &self.buffer.bytes()[..self.len];
        let written = match self.file.write_all_at(bytes, self.offset) {
            // It took the flag, and not what is to be written.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                OpenOptions::new().write(true).open(&*self.path).and_then(|file| file.write_all_at(bytes, self.offset))
            }
            other => other,
        };
        written.map_err(|error| DataDirError::io("write file", &*self.path, error))
    }

    fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// In any order, whether the file system of temporary files writes around its cache or not.
    #[test]
    fn pieces_come_to_their_places() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("16384");
        fs::write(&path, "").unwrap();
        let Some(through) = Through::open(&path, 24_576).unwrap() else { return eprintln!("not tried: no direct I/O") };
        for (offset, len, byte) in [(16_384, 8_192, 3), (0, 16_384, 1)] {
            let mut buffer = Buffer::new(2);
            buffer.bytes_mut().fill(byte);
            through.piece(offset, buffer, len).write(&()).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 24_576 && bytes[..16_384].iter().all(|&byte| byte == 1));
        assert!(bytes[16_384..].iter().all(|&byte| byte == 3));
    }
}
