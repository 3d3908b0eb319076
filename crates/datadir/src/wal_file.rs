//! Reading a WAL segment file.

use std::fs::File;
use std::io::{self, IoSliceMut};

/// Most slices that one call of the system takes (`IOV_MAX`).
const MAX_SLICES: usize = 1024;

/// Reads from `offset` on into those slices that lie whole within `max_bytes`, as far as the file goes. Returns how many
/// bytes were read.
///
/// # Errors
/// What the system says.
pub fn read_up_to(file: &File, slices: &mut [IoSliceMut<'_>], offset: u64, max_bytes: usize) -> io::Result<usize> {
    let mut room = max_bytes;
    let whole =
        slices.iter().take_while(|slice| room.checked_sub(slice.len()).map(|left| room = left).is_some()).count();
    let mut rest = &mut slices[..whole];
    let mut got = 0;
    while !rest.is_empty() {
        let now = rest.len().min(MAX_SLICES);
        match rustix::io::preadv(file, &mut rest[..now], offset + got as u64) {
            Ok(0) => break,
            Ok(more) => {
                got += more;
                IoSliceMut::advance_slices(&mut rest, more);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(got)
}
