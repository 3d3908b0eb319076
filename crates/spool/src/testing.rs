//! For tests: a directory in memory that knows what would survive a power loss, and that can be watched, held up and broken.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use crate::files::{Directory, SegmentFile, Stat};

/// A call of the spool.
#[allow(missing_docs, reason = "their names are those of `Directory` and `SegmentFile`")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Open,
    Create,
    Rename,
    Remove,
    SyncDirectory,
    Write,
    SyncData,
    SyncAll,
}

/// Disk blocks that are written whole.
const SECTOR: usize = 512;

#[derive(Clone, Default)]
struct Contents {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// What was written since `durable` was true.
    dirty: Vec<Range<usize>>,
    /// The same as `now`, for a reader of the system's files.
    live: Option<Arc<File>>,
}

#[derive(Clone)]
enum NameChange {
    Set(String, usize),
    Remove(String),
}

#[derive(Clone, Default)]
struct Inner {
    files: Vec<Contents>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// What was done to names since they were durable; a rename is one step.
    changes: Vec<Vec<NameChange>>,
}

impl Inner {
    fn change(&mut self, changes: Vec<NameChange>) {
        apply(&mut self.names, &changes);
        self.changes.push(changes);
    }
}

fn apply(names: &mut BTreeMap<String, usize>, changes: &[NameChange]) {
    for change in changes {
        match change {
            NameChange::Set(name, file) => names.insert(name.clone(), *file),
            NameChange::Remove(name) => names.remove(name),
        };
    }
}

/// Sees a call before it happens; may wait, or give the error that it ends with.
pub type Hook = Arc<dyn Fn(Call, &str) -> io::Result<()> + Send + Sync>;

/// The directory.
#[derive(Clone, Default)]
pub struct Model {
    inner: Arc<Mutex<Inner>>,
    hook: Arc<Mutex<Option<Hook>>>,
    /// The next fdatasync reports success, and is none.
    lies: Arc<AtomicBool>,
}

struct ModelFile {
    model: Model,
    file: usize,
    name: String,
}

impl Model {
    /// Has all calls seen by `hook` from now on.
    pub fn watch(&self, hook: impl Fn(Call, &str) -> io::Result<()> + Send + Sync + 'static) {
        *self.hook.lock().unwrap() = Some(Arc::new(hook));
    }

    /// The next fdatasync reports success, and what it was about is lost when the power goes.
    pub fn lose_next_sync(&self) {
        self.lies.store(true, Ordering::Relaxed);
    }

    /// Calls are seen by nobody any more.
    pub fn watch_no_more(&self) {
        *self.hook.lock().unwrap() = None;
    }

    fn seen(&self, call: Call, name: &str) -> io::Result<()> {
        let hook = self.hook.lock().unwrap().clone();
        hook.map_or(Ok(()), |hook| hook(call, name))
    }

    /// What a process that is killed leaves: everything, though a power loss may still take from it what was not synced.
    pub fn after_kill(&self) -> Model {
        let mut inner = self.inner.lock().unwrap().clone();
        inner.files.iter_mut().for_each(|file| file.live = None);
        Model { inner: Arc::new(Mutex::new(inner)), ..Model::default() }
    }

    /// What a power loss leaves, as `below` decides, which gives a number less than its bound: all that was synced; of the rest some sectors, and the changes of names up to some point,
    /// as journalling file systems keep their order.
    pub fn after_power_loss(&self, mut below: impl FnMut(u64) -> u64) -> Model {
        let mut inner = self.inner.lock().unwrap().clone();
        let kept = below(inner.changes.len() as u64 + 1) as usize;
        let mut names = std::mem::take(&mut inner.durable_names);
        inner.changes.drain(..).take(kept).for_each(|changes| apply(&mut names, &changes));
        inner.durable_names = names.clone();
        inner.names = names;
        for file in &mut inner.files {
            let mut left = std::mem::take(&mut file.durable);
            // A file may have got to the disk as a whole, and the one that was written before it not at all.
            let fate = below(4);
            for range in std::mem::take(&mut file.dirty) {
                let whole = fate == 1 || below(4) == 0;
                let mut at = range.start;
                while at < range.end {
                    let end = range.end.min((at / SECTOR + 1) * SECTOR);
                    if fate != 0 && (whole || below(2) == 0) {
                        if left.len() < end {
                            left.resize(end, 0);
                        }
                        left[at..end].copy_from_slice(&file.now[at..end]);
                    }
                    at = end;
                }
            }
            file.now = left.clone();
            (file.durable, file.live) = (left, None);
        }
        Model { inner: Arc::new(Mutex::new(inner)), ..Model::default() }
    }

    /// Contents of a file.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let inner = self.inner.lock().unwrap();
        inner.names.get(name).map(|&file| inner.files[file].now.clone())
    }

    /// A file of the system that has what is written to the one of this name, now and later.
    pub fn live(&self, name: &str) -> Option<File> {
        let mut inner = self.inner.lock().unwrap();
        let file = *inner.names.get(name)?;
        let Contents { now, live, .. } = &mut inner.files[file];
        let live = live.get_or_insert_with(|| {
            let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.write_all_at(now, 0).unwrap();
            Arc::new(file)
        });
        // Opened again, so that each reader has a position of its own.
        Some(File::open(format!("/proc/self/fd/{}", live.as_raw_fd())).unwrap())
    }

    fn file(&self, file: usize, name: &str) -> Arc<dyn SegmentFile> {
        Arc::new(ModelFile { model: self.clone(), file, name: name.to_owned() })
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Directory for Model {
    fn path(&self) -> &Path {
        Path::new("model")
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>> {
        self.seen(Call::Open, name)?;
        let file = *self.inner.lock().unwrap().names.get(name).ok_or_else(not_found)?;
        Ok(self.file(file, name))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>> {
        self.seen(Call::Create, name)?;
        let mut inner = self.inner.lock().unwrap();
        assert!(!inner.names.contains_key(name), "\"{name}\" would be overwritten");
        let file = inner.files.len();
        inner.files.push(Contents::default());
        inner.change(vec![NameChange::Set(name.to_owned(), file)]);
        Ok(self.file(file, name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.seen(Call::Rename, to)?;
        let mut inner = self.inner.lock().unwrap();
        let file = *inner.names.get(from).ok_or_else(not_found)?;
        inner.change(vec![NameChange::Remove(from.to_owned()), NameChange::Set(to.to_owned(), file)]);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.seen(Call::Remove, name)?;
        let mut inner = self.inner.lock().unwrap();
        inner.names.get(name).ok_or_else(not_found)?;
        inner.change(vec![NameChange::Remove(name.to_owned())]);
        Ok(())
    }

    fn stat(&self, name: &str) -> io::Result<Option<Stat>> {
        let inner = self.inner.lock().unwrap();
        let stat = |&file: &usize| Stat { len: inner.files[file].now.len() as u64, regular: true };
        Ok(inner.names.get(name).map(stat))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.inner.lock().unwrap().names.keys().filter(|name| !name.contains('/')).cloned().collect())
    }

    fn sync(&self) -> io::Result<()> {
        self.seen(Call::SyncDirectory, "")?;
        let mut inner = self.inner.lock().unwrap();
        inner.durable_names = inner.names.clone();
        inner.changes.clear();
        Ok(())
    }
}

impl SegmentFile for ModelFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let inner = self.model.inner.lock().unwrap();
        let rest = inner.files[self.file].now.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.model.seen(Call::Write, &self.name)?;
        // Seldom less than was asked for, as on a disk that fills up.
        let written = if bytes.len() % 97 == 5 { bytes.len() / 2 } else { bytes.len() };
        let (start, end) = (offset as usize, offset as usize + written);
        let mut inner = self.model.inner.lock().unwrap();
        let contents = &mut inner.files[self.file];
        if contents.now.len() < end {
            contents.now.resize(end, 0);
        }
        contents.now[start..end].copy_from_slice(&bytes[..written]);
        if let Some(live) = &contents.live {
            live.write_all_at(&bytes[..written], offset)?;
        }
        contents.dirty.push(start..end);
        Ok(written)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.model.inner.lock().unwrap().files[self.file].now.len() as u64)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync(Call::SyncData)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync(Call::SyncAll)
    }
}

impl ModelFile {
    /// Makes durable what was written before the call, and not what is written while it lasts. Where it fails, or lies, none of it
    /// is tried again: the next one reports success, and is not about it (as in Linux, whose pages are clean then).
    fn sync(&self, call: Call) -> io::Result<()> {
        let (written, len) = {
            let inner = self.model.inner.lock().unwrap();
            let contents = &inner.files[self.file];
            let written: Vec<_> =
                contents.dirty.iter().map(|range| (range.start, contents.now[range.clone()].to_vec())).collect();
            (written, contents.now.len())
        };
        let seen = self.model.seen(call, &self.name);
        let mut inner = self.model.inner.lock().unwrap();
        let contents = &mut inner.files[self.file];
        contents.dirty.drain(..written.len());
        seen?;
        if call == Call::SyncData && self.model.lies.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        if contents.durable.len() < len {
            contents.durable.resize(len, 0);
        }
        for (start, bytes) in written {
            contents.durable[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}

/// Something that can be held up.
#[derive(Default)]
pub struct Gate {
    /// Whether it is closed, how many wait at it, and how many of these may pass.
    state: Mutex<(bool, usize, usize)>,
    changed: Condvar,
}

impl Gate {
    /// Nobody passes from now on.
    pub fn close(&self) {
        self.state.lock().unwrap().0 = true;
    }

    /// All pass.
    pub fn open(&self) {
        self.state.lock().unwrap().0 = false;
        self.changed.notify_all();
    }

    /// Goes through, when it is open.
    pub fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        while state.0 && state.2 == 0 {
            state = self.changed.wait(state).unwrap();
        }
        state.2 = state.2.saturating_sub(1);
        state.1 -= 1;
    }

    /// Lets one through that waits, or the next one.
    pub fn let_one_pass(&self) {
        self.state.lock().unwrap().2 += 1;
        self.changed.notify_all();
    }

    /// Has it open at the latest when the guard is dropped, so that a test that fails does not hang.
    pub fn guard(self: &Arc<Gate>) -> GateGuard {
        GateGuard(self.clone())
    }

    /// Waits until somebody stands before it.
    pub fn await_someone(&self) {
        let mut state = self.state.lock().unwrap();
        while state.1 == 0 {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// Opens a gate when dropped.
pub struct GateGuard(Arc<Gate>);

impl std::ops::Deref for GateGuard {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.0
    }
}

impl Drop for GateGuard {
    fn drop(&mut self) {
        self.open();
    }
}
