//! Pages are written by threads that wait for the device, while the next ones are read and redone.
//!
//! They write around the system's cache. What is left to the system it writes in the end, when nothing is read any more; and where a
//! device takes long for a request, it writes one at a time (write-back throttling), which these writes do not meet.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use walrider_datadir::DataDirError;
use walrider_datadir::descriptors::shares;
use walrider_datadir::relation::RelationFiles;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, PageBytes, RelFileLocator};

/// Most threads, and so writes under way. Each has a file open: of the descriptors, an eighth is nobody's.
const MOST_WRITERS: usize = 32;

/// Pages in memory that begins where devices want it to.
#[derive(Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    /// Where its pages begin.
    start: usize,
}

impl Buffer {
    /// What devices want, at most.
    const ALIGNMENT: usize = 4096;

    /// Room for so many pages.
    pub fn new(pages: usize) -> Buffer {
        let bytes = vec![0; pages * BLCKSZ + Self::ALIGNMENT];
        let start = bytes.as_ptr().align_offset(Self::ALIGNMENT).min(Self::ALIGNMENT);
        Buffer { bytes, start }
    }

    /// How many pages it has room for.
    pub fn len(&self) -> usize {
        self.pages().len()
    }

    /// Its pages.
    pub fn pages(&self) -> &[PageBytes] {
        self.bytes[self.start..].as_chunks().0
    }

    /// Its pages, to be changed.
    pub fn pages_mut(&mut self) -> &mut [PageBytes] {
        self.bytes[self.start..].as_chunks_mut().0
    }
}

/// Pages of one segment file that are to be written.
pub struct ToWrite {
    pub rel: RelFileLocator,
    pub fork: ForkNumber,
    /// The block of the buffer's first page.
    pub first: BlockNumber,
    pub buffer: Buffer,
    /// Which of its pages.
    pub pieces: Vec<Range<usize>>,
}

impl ToWrite {
    fn write(&self, files: &RelationFiles) -> Result<(), DataDirError> {
        self.pieces.iter().try_for_each(|piece| {
            let pages = self.buffer.pages()[piece.clone()].as_flattened();
            files.write_through(self.rel, self.fork, self.first + piece.start as u32, pages)
        })
    }
}

/// What someone has handed on.
#[derive(Default)]
pub struct Handed(Arc<Written>);

#[derive(Default)]
struct Written {
    state: Mutex<WrittenState>,
    changed: Condvar,
}

#[derive(Default)]
struct WrittenState {
    waiting: usize,
    failed: Option<DataDirError>,
}

impl Handed {
    /// Waits until all of it is written.
    ///
    /// # Errors
    /// The first that was met.
    pub fn wait(&self) -> Result<(), DataDirError> {
        let state = self.0.state.lock().expect(NO_PANIC);
        let mut state = self.0.changed.wait_while(state, |state| state.waiting > 0).expect(NO_PANIC);
        state.failed.take().map_or(Ok(()), Err)
    }
}

/// The way to the threads.
pub struct Behind<'a> {
    files: &'a RelationFiles,
    /// Most pages in buffers.
    most_pages: usize,
    queue: Mutex<Queue>,
    /// Something waits, or nothing more will come.
    waits: Condvar,
    /// There is room for another buffer.
    room: Condvar,
}

#[derive(Default)]
struct Queue {
    writers: usize,
    waiting: VecDeque<(ToWrite, Arc<Written>)>,
    /// Pages in buffers that are in use.
    pages: usize,
    free: Vec<Buffer>,
    /// Nothing more will come.
    ended: bool,
}

const NO_PANIC: &str = "no panic while locked";

impl Behind<'_> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect(NO_PANIC)
    }

    /// Room for `pages`; waits until there is.
    pub fn buffer(&self, pages: usize) -> Buffer {
        let is_full = |queue: &mut Queue| queue.pages > 0 && queue.pages + pages > self.most_pages;
        let mut queue = self.room.wait_while(self.lock(), is_full).expect(NO_PANIC);
        let buffer = queue.free.pop().filter(|free| free.len() >= pages);
        let buffer = buffer.unwrap_or_else(|| Buffer::new(pages.next_power_of_two()));
        queue.pages += buffer.len();
        buffer
    }

    /// Takes back what nothing was made of.
    pub fn give_back(&self, buffer: Buffer) {
        let mut queue = self.lock();
        queue.pages -= buffer.len();
        if queue.free.iter().map(Buffer::len).sum::<usize>() + queue.pages + buffer.len() <= self.most_pages {
            queue.free.push(buffer);
        }
        self.room.notify_all();
    }

    /// Hands pages on to be written.
    pub fn write(&self, pages: ToWrite, handed: &Handed) {
        handed.0.state.lock().expect(NO_PANIC).waiting += 1;
        let mut queue = self.lock();
        if queue.writers == 0 {
            drop(queue);
            return self.done(pages, &handed.0);
        }
        queue.waiting.push_back((pages, handed.0.clone()));
        self.waits.notify_one();
    }

    fn done(&self, pages: ToWrite, handed: &Written) {
        let done = pages.write(self.files);
        self.give_back(pages.buffer);
        let mut state = handed.state.lock().expect(NO_PANIC);
        state.waiting -= 1;
        if let Err(error) = done {
            state.failed.get_or_insert(error);
        }
        handed.changed.notify_all();
    }

    /// Writes what comes until nothing more will.
    fn work(&self) {
        let is_idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.ended;
        loop {
            let mut queue = self.waits.wait_while(self.lock(), is_idle).expect(NO_PANIC);
            let Some((pages, handed)) = queue.waiting.pop_front() else { return };
            drop(queue);
            self.done(pages, &handed);
        }
    }
}

/// Does `work` with such threads beside it, and pages of at most `memory` bytes on their way.
pub fn with_write_behind<R>(files: &RelationFiles, memory: u64, work: impl FnOnce(&Behind<'_>) -> R) -> R {
    let behind = Behind {
        files,
        most_pages: memory as usize / BLCKSZ,
        queue: Mutex::default(),
        waits: Condvar::new(),
        room: Condvar::new(),
    };
    let writers = MOST_WRITERS.min(shares().relations / 4);
    thread::scope(|scope| {
        let write = || behind.work();
        let spawn = || thread::Builder::new().name("write".to_owned()).spawn_scoped(scope, write);
        let writers = (0..writers).map_while(|_| spawn().ok()).count();
        behind.lock().writers = writers;
        let _ends = Ends(&behind);
        work(&behind)
    })
}

/// When this goes, nothing more will come.
struct Ends<'b, 'a>(&'b Behind<'a>);

impl Drop for Ends<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.waits.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const REL: RelFileLocator = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };

    fn page(number: usize) -> ToWrite {
        let mut buffer = Buffer::new(2);
        buffer.pages_mut()[1].fill(number as u8);
        ToWrite {
            rel: REL,
            fork: ForkNumber::Main,
            first: number as u32,
            buffer,
            pieces: std::iter::once(1..2).collect(),
        }
    }

    /// More than there is room for; all of it is there when that is said.
    #[test]
    fn what_was_waited_for_is_written() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("base")).unwrap();
        let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
        with_write_behind(&files, 8 * BLCKSZ as u64, |behind| {
            let handed = Handed::default();
            for number in 0..100 {
                let ToWrite { buffer, .. } = page(number);
                let mut room = behind.buffer(2);
                room.pages_mut().copy_from_slice(buffer.pages());
                behind.write(ToWrite { buffer: room, ..page(number) }, &handed);
            }
            handed.wait().unwrap();
            let mut read = vec![0; 101 * BLCKSZ];
            files.read(REL, ForkNumber::Main, 0, &mut read).unwrap();
            for (number, page) in read[BLCKSZ..].chunks_exact(BLCKSZ).enumerate() {
                assert!(page.iter().all(|&byte| byte == number as u8), "{number}");
            }
        });
    }

    /// Who waits is told, and only of what they have handed on.
    #[test]
    fn errors_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
        with_write_behind(&files, 8 * BLCKSZ as u64, |behind| {
            let (handed, other) = (Handed::default(), Handed::default());
            let mut buffer = behind.buffer(2);
            buffer.pages_mut()[1].fill(1);
            behind.write(ToWrite { buffer, ..page(0) }, &handed);
            let error = handed.wait().unwrap_err().to_string();
            assert!(error.contains("base"), "{error}");
            other.wait().unwrap();
        });
    }
}
