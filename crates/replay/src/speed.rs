//! How quickly a device takes what is written: tried, with a file that is gone again at once.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use walrider_datadir::DataDirError;
use walrider_datadir::behind::{Buffer, Handed, ToWrite, with_write_behind};
use walrider_datadir::relation::open_direct;
use walrider_layout::BLCKSZ;

use crate::error::ReplayError;
use crate::spill::temporary_file;

/// Pages that are written at once, 1 MB.
const PIECE_PAGES: usize = 128;
const PIECE: u64 = (PIECE_PAGES * BLCKSZ) as u64;

/// What is written side by side, and how many times that at most: some volumes are quicker for a moment than for long.
const MOST_PIECES: u64 = 16;
const MOST_ROUNDS: u64 = 8;
const LONG_ENOUGH: Duration = Duration::from_millis(250);

/// Bytes a second that the device of this directory takes when it is slowest, written as pages are: in large requests, many of them side
/// by side, around the system's cache where that can be; `None` where it cannot be tried, for want of room, say. The
/// writer of pages will meet the same problem and report it. Takes up to `memory` bytes for it.
pub fn write_speed(directory: &Path, memory: u64) -> Option<u64> {
    tried(directory, memory).ok()
}

fn tried(directory: &Path, memory: u64) -> Result<u64, ReplayError> {
    let failed = |error| DataDirError::io("write a temporary file in", directory, error);
    let cached = temporary_file(directory)?;
    let direct = open_direct(Path::new(&format!("/proc/self/fd/{}", cached.as_raw_fd()))).ok().flatten();
    let pieces = (memory / PIECE).clamp(1, MOST_PIECES);
    // What makes a file longer comes one after the other; where there is no room, writing will say so.
    let _ = fallocate(&cached, FallocateFlags::empty(), 0, MOST_ROUNDS * pieces * PIECE);
    let to = (direct.unwrap_or(cached.try_clone().map_err(failed)?), directory.to_owned());
    let (started, mut slowest) = (Instant::now(), Duration::ZERO);
    with_write_behind(&to, pieces * PIECE, |behind| {
        for round in 0..MOST_ROUNDS {
            let (handed, begun) = (Handed::default(), Instant::now());
            for number in round * pieces..(round + 1) * pieces {
                behind.write(Piece { at: number * PIECE, buffer: filled(behind.buffer(PIECE_PAGES), number) }, &handed);
            }
            handed.wait()?;
            cached.sync_data().map_err(failed)?;
            slowest = slowest.max(begun.elapsed());
            if started.elapsed() > LONG_ENOUGH {
                break;
            }
        }
        Ok::<_, ReplayError>(())
    })?;
    Ok(((pieces * PIECE) as f64 / slowest.as_secs_f64()) as u64)
}

/// With pages that are not all the same, which a device might not write.
fn filled(mut buffer: Buffer, number: u64) -> Buffer {
    for (page, at) in buffer.pages_mut().iter_mut().zip(number << 32..) {
        page.fill((at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8);
        page[..8].copy_from_slice(&at.to_le_bytes());
    }
    buffer
}

/// One of the requests.
struct Piece {
    at: u64,
    buffer: Buffer,
}

impl ToWrite for Piece {
    /// The file, and where it is.
    type To = (File, PathBuf);

    fn write(&self, (file, directory): &(File, PathBuf)) -> Result<(), DataDirError> {
        let written = file.write_all_at(self.buffer.bytes(), self.at);
        written.map_err(|error| DataDirError::io("write a temporary file in", directory, error))
    }

    fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let speed = write_speed(&dir.path().join("pgsql_tmp"), 4 << 20);
        assert!(speed > Some(0), "{speed:?}");
        assert_eq!(std::fs::read_dir(dir.path().join("pgsql_tmp")).unwrap().count(), 0);
    }
}
