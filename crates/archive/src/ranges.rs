//! Large objects, read in order: several requests at once fetch what comes next.

use std::collections::VecDeque;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex};
use std::thread;

use object_store::ObjectStoreExt;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use url::Url;

use crate::archive::Backend;
use crate::error::{ArchiveError, Result};
use crate::objects::Objects;

/// Bytes of a request: so many that its latency counts little.
const PIECE: u64 = 4 << 20;

/// Opens the store: who reads has connections of his own, which only he keeps going.
type Open = dyn Fn() -> Result<Objects> + Send + Sync;

/// Objects right below a prefix.
pub struct Files {
    open: Arc<Open>,
    shape: Shape,
    /// Their lengths, as they were listed.
    known: Mutex<Vec<(String, Option<u64>)>>,
}

/// How an object is read.
#[derive(Clone, Copy)]
struct Shape {
    /// Requests at once.
    requests: usize,
    /// Bytes of each.
    piece: u64,
}

impl Files {
    /// Those of an URL, with endpoint and credentials from the environment; of each that is read, so many requests are made at once.
    pub fn new(url: Url, requests: usize) -> Files {
        Files::with(Arc::new(move || Objects::open(&url)), Shape { requests: requests.max(1), piece: PIECE })
    }

    fn with(open: Arc<Open>, shape: Shape) -> Files {
        Files { open, shape, known: Mutex::default() }
    }

    /// Their names, and those that others are below of.
    ///
    /// # Errors
    /// When they cannot be listed; what is missing or wrong in the environment.
    pub fn names(&self) -> Result<Vec<String>> {
        let listed = (self.open)()?.list_all()?;
        let names = listed.iter().map(|(name, _)| name.clone()).collect();
        *self.known.lock().expect("no panic while locked") = listed;
        Ok(names)
    }

    /// Reads one that was listed, from its beginning. That takes memory for two pieces more than there are requests at once.
    ///
    /// # Errors
    /// When it was not.
    pub fn read(&self, name: &str) -> Result<Ranges> {
        let known = self.known.lock().expect("no panic while locked");
        let size = known.iter().find_map(|(known, size)| size.filter(|_| known == name));
        let size = size.ok_or_else(|| ArchiveError::Refused(format!("there is no object \"{name}\"")))?;
        let object = Object { open: self.open.clone(), shape: self.shape, name: name.to_owned(), size };
        Ok(Ranges { object, coming: None, piece: Vec::new(), at: 0, position: 0 })
    }
}

/// An object that is read.
#[derive(Clone)]
struct Object {
    open: Arc<Open>,
    shape: Shape,
    name: String,
    size: u64,
}

impl Object {
    /// Fetches it from there on, in a thread that ends when nobody wants more.
    fn fetch(&self, from: u64) -> io::Result<Receiver<Result<Vec<u8>>>> {
        let (sender, receiver) = channel(1);
        let object = self.clone();
        let fetch = move || match (object.open)() {
            Ok(objects) => objects.run(object.send(&objects, from, &sender)),
            Err(error) => drop(sender.blocking_send(Err(error))),
        };
        thread::Builder::new().name("fetch".to_owned()).spawn(fetch)?;
        Ok(receiver)
    }

    async fn send(&self, objects: &Objects, from: u64, sender: &Sender<Result<Vec<u8>>>) {
        let (mut next, mut under_way) = (from, VecDeque::new());
        // Who leaves much out wants little at each place: the others would be fetched in vain.
        let mut requests = 1;
        loop {
            while under_way.len() < requests && next < self.size {
                let range = next..self.size.min(next + self.shape.piece);
                let (store, path, wanted) = (objects.store().clone(), objects.path(&self.name), range.clone());
                next = range.end;
                under_way.push_back((range, tokio::spawn(async move { store.get_range(&path, wanted).await })));
            }
            let Some((range, first)) = under_way.pop_front() else { return };
            let piece = first.await.expect("it does not panic, and nobody else ends it");
            let piece = piece.map_err(objects.failed("read", &self.name)).and_then(|piece| {
                match piece.len() as u64 == range.end - range.start {
                    true => Ok(piece.into()),
                    false => Err(ArchiveError::Refused(format!(
                        "\"{}\" has become shorter while it was read",
                        objects.shown(&self.name)
                    ))),
                }
            });
            let was_last = piece.is_err();
            // Those under way go on while this waits.
            if sender.send(piece).await.is_err() || was_last {
                return;
            }
            requests = self.shape.requests.min(2 * requests);
        }
    }
}

/// Reads an object. A reader that leaves out more than is under way has the rest fetched from there on.
pub struct Ranges {
    object: Object,
    coming: Option<Receiver<Result<Vec<u8>>>>,
    piece: Vec<u8>,
    /// Where in it the next byte is, and where that is in the object.
    at: usize,
    position: u64,
}

impl Read for Ranges {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            if self.position >= self.object.size {
                return Ok(0);
            }
            let coming = match &mut self.coming {
                Some(coming) => coming,
                None => self.coming.insert(self.object.fetch(self.position)?),
            };
            let gone = || Err(ArchiveError::Refused("the thread that fetches has ended".to_owned()));
            self.piece = coming.blocking_recv().unwrap_or_else(gone).map_err(io::Error::other)?;
            self.at = 0;
        }
        let len = buffer.len().min(self.piece.len() - self.at);
        buffer[..len].copy_from_slice(&self.piece[self.at..self.at + len]);
        self.at += len;
        self.position += len as u64;
        Ok(len)
    }
}

impl Seek for Ranges {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, by) = match to {
            SeekFrom::Start(to) => (to, 0),
            SeekFrom::Current(by) => (self.position, by),
            SeekFrom::End(by) => (self.object.size, by),
        };
        let to = base.checked_add_signed(by).ok_or(io::ErrorKind::InvalidInput)?;
        let Shape { requests, piece } = self.object.shape;
        match to.checked_sub(self.position) {
            Some(left_out) if self.coming.is_some() && left_out <= requests as u64 * piece => {
                io::copy(&mut self.by_ref().take(left_out), &mut io::sink())?;
            }
            _ => (self.coming, self.piece, self.at) = (None, Vec::new(), 0),
        }
        self.position = to;
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use object_store::local::LocalFileSystem;
    use object_store::path::Path;

    use super::*;

    #[test]
    fn any_part_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let contents: Vec<u8> = (0..10_000_u32).map(|at| ((at * at) >> 7) as u8).collect();
        std::fs::create_dir_all(dir.path().join("p/below")).unwrap();
        std::fs::write(dir.path().join("p/object"), &contents).unwrap();
        std::fs::write(dir.path().join("p/empty"), b"").unwrap();
        std::fs::write(dir.path().join("p/below/x"), b"x").unwrap();
        let root = dir.path().to_owned();
        let open = move || {
            Objects::new(Arc::new(LocalFileSystem::new_with_prefix(&root).unwrap()), Path::from("p"), "file:///p")
        };
        let files = Files::with(Arc::new(open), Shape { requests: 3, piece: 700 });
        let mut names = files.names().unwrap();
        names.sort();
        assert_eq!(names, ["below", "empty", "object"]);
        for missing in ["below", "x"] {
            assert!(files.read(missing).is_err());
        }
        let read = |ranges: &mut Ranges, len: u64| {
            let mut bytes = Vec::new();
            ranges.take(len).read_to_end(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(read(&mut files.read("empty").unwrap(), 10), b"");
        let mut object = files.read("object").unwrap();
        assert_eq!(read(&mut object, u64::MAX), contents);
        // Before anything was asked for; within a piece; within what is under way; behind that; back; behind the end.
        let mut object = files.read("object").unwrap();
        for (to, position) in [
            (SeekFrom::Start(100), 100),
            (SeekFrom::Current(50), 180),
            (SeekFrom::Current(2000), 2210),
            (SeekFrom::Current(5000), 7240),
            (SeekFrom::Current(-7000), 270),
            (SeekFrom::End(-20), 9980),
        ] {
            assert_eq!(object.seek(to).unwrap(), position);
            let position = position as usize;
            let end = contents.len().min(position + 30);
            assert_eq!(read(&mut object, 30), contents[position..end], "{to:?}");
        }
        object.seek(SeekFrom::Start(20_000)).unwrap();
        assert_eq!(read(&mut object, 30), b"");
        // Fewer bytes than were listed.
        std::fs::write(dir.path().join("p/object"), &contents[..5000]).unwrap();
        let error = files.read("object").unwrap().read_to_end(&mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("file:///p/object"), "{error}");
    }
}
