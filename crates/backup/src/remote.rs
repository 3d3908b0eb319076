//! Files of a backup that are not in a directory.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex};

/// Where they are, as an object store's prefix.
pub trait Remote: Send + Sync {
    /// Their names.
    ///
    /// # Errors
    /// When they cannot be had.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Reads one of them, from its beginning.
    ///
    /// # Errors
    /// When it is not there, or out of reach.
    fn open(&self, name: &str) -> io::Result<Box<dyn Input>>;

    /// What messages call the place.
    fn shown(&self) -> String;
}

impl fmt::Debug for dyn Remote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.shown())
    }
}

/// An archive's bytes.
pub trait Input: Read + Seek + Send {}

impl<T: Read + Seek + Send> Input for T {}

/// Why an input could not be read: that is no damage of the backup, whatever its reader makes of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failed(Arc<Mutex<Option<String>>>);

impl Failed {
    /// An input whose errors are noted.
    pub fn watch(&self, inner: Box<dyn Input>) -> impl Input + 'static {
        Watched { inner, failed: self.clone() }
    }

    /// What it was.
    pub fn why(&self) -> Option<String> {
        self.0.lock().expect("no panic while locked").clone()
    }
}

struct Watched {
    inner: Box<dyn Input>,
    failed: Failed,
}

impl Watched {
    fn noted<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| *self.failed.0.lock().expect("no panic while locked") = Some(error.to_string()))
    }
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer);
        self.noted(read)
    }
}

impl Seek for Watched {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let sought = self.inner.seek(to);
        self.noted(sought)
    }
}
