//! A directory of WAL files: an archive, or `pg_wal`.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use walrider_datadir::DataDirError;
use walrider_layout::history::parse_history_file_name;
use walrider_layout::wal::is_segment_name;

use crate::driver::{Answer, Driver, Listing, Opened, Request};
use crate::error::StoreError;

/// What the name of a segment ends in that is not complete, and will not be.
pub const PARTIAL: &str = ".partial";

/// Endings of files in WAL archives that some tool has packed.
const PACKED: [&str; 7] = ["gz", "lz4", "zst", "bz2", "xz", "br", "lzo"];

/// A directory of WAL files.
#[derive(Clone, Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// The one of this path, which need not be there.
    pub fn new(path: impl Into<PathBuf>) -> Directory {
        Directory(path.into())
    }
}

impl Driver for Directory {
    fn get(&self, request: &Request<'_>) -> Result<Answer, StoreError> {
        let path = self.0.join(request.name);
        match File::open(&path) {
            Ok(file) => Ok(Answer::There(Opened { file, path, fetched: false })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Answer::Missing(None)),
            Err(error) => Err(DataDirError::io("open", path, error).into()),
        }
    }

    fn list(&self) -> Result<Option<Listing>, StoreError> {
        let failed = |error| DataDirError::io("read directory", &self.0, error);
        let mut listing = Listing::default();
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(name) = name.to_str() else { continue };
            if is_segment_name(name.strip_suffix(PARTIAL).unwrap_or(name)) {
                listing.segments.push(name.to_owned());
            } else {
                listing.histories.extend(parse_history_file_name(name));
            }
        }
        listing.segments.sort();
        Ok(Some(listing))
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.0)
    }
}

/// What the file of this name is called as some tool has packed it, if that is there.
pub fn packed(directory: &Path, name: &str) -> Option<String> {
    PACKED.iter().map(|ending| format!("{name}.{ending}")).find(|name| directory.join(name).exists())
}

/// Whether a name is that of a file that some tool has packed.
pub fn is_packed(path: &Path) -> bool {
    path.extension().is_some_and(|ending| PACKED.iter().any(|known| ending == *known))
}
