//! Pages are written by threads that wait for the device, while the next ones are read and redone.
//!
//! They write around the system's cache. What is left to the system it writes in the end, when nothing is read any more; and where a
//! device takes long for a request, it writes one at a time (write-back throttling), which these writes do not meet.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use walrider_layout::{BLCKSZ, PageBytes};

use crate::descriptors::shares;
use crate::error::Result;

/// Most threads, and so writes under way.
const MOST_WRITERS: usize = 32;

/// How many threads there are, and so most files that they write to. Each has one open: of the descriptors, an eighth is nobody's.
pub fn writers() -> usize {
    MOST_WRITERS.min(shares().relations / 4)
}

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
    fn len(&self) -> usize {
        self.pages().len()
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.pages().as_flattened()
    }

    /// Its bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.pages_mut().as_flattened_mut()
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

/// Pages that are to be written somewhere.
pub trait ToWrite: Send {
    /// What all of them are written to.
    type To: Sync;

    /// Writes them, and waits until the device has them.
    ///
    /// # Errors
    /// When that fails.
    fn write(&self, to: &Self::To) -> Result<()>;

    /// Where they were.
    fn into_buffer(self) -> Buffer;
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
    failed: Option<crate::error::DataDirError>,
}

impl Handed {
    /// Waits until all of it is written.
    ///
    /// # Errors
    /// The first that was met.
    pub fn wait(&self) -> Result<()> {
        let state = self.0.state.lock().expect(NO_PANIC);
        let mut state = self.0.changed.wait_while(state, |state| state.waiting > 0).expect(NO_PANIC);
        state.failed.take().map_or(Ok(()), Err)
    }

    /// Whether something failed already.
    pub fn has_failed(&self) -> bool {
        self.0.state.lock().expect(NO_PANIC).failed.is_some()
    }
}

/// The way to the threads.
pub struct Behind<'a, W: ToWrite> {
    to: &'a W::To,
    /// Most pages in buffers.
    most_pages: usize,
    queue: Mutex<Queue<W>>,
    /// Something waits, or nothing more will come.
    waits: Condvar,
    /// There is room for another buffer.
    room: Condvar,
}

struct Queue<W> {
    writers: usize,
    waiting: VecDeque<(W, Arc<Written>)>,
    /// Pages in buffers that are in use.
    pages: usize,
    free: Vec<Buffer>,
    /// Nothing more will come.
    ended: bool,
}

const NO_PANIC: &str = "no panic while locked";

impl<W: ToWrite> Behind<'_, W> {
    fn lock(&self) -> MutexGuard<'_, Queue<W>> {
        self.queue.lock().expect(NO_PANIC)
    }

    /// Room for `pages`; waits until there is.
    pub fn buffer(&self, pages: usize) -> Buffer {
        let is_full = |queue: &mut Queue<W>| queue.pages > 0 && queue.pages + pages > self.most_pages;
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
    pub fn write(&self, pages: W, handed: &Handed) {
        handed.0.state.lock().expect(NO_PANIC).waiting += 1;
        let mut queue = self.lock();
        if queue.writers == 0 {
            drop(queue);
            return self.done(pages, &handed.0);
        }
        queue.waiting.push_back((pages, handed.0.clone()));
        self.waits.notify_one();
    }

    fn done(&self, pages: W, handed: &Written) {
        let done = pages.write(self.to);
        self.give_back(pages.into_buffer());
        let mut state = handed.state.lock().expect(NO_PANIC);
        state.waiting -= 1;
        if let Err(error) = done {
            state.failed.get_or_insert(error);
        }
        handed.changed.notify_all();
    }

    /// Writes what comes until nothing more will.
    fn work(&self) {
        let is_idle = |queue: &mut Queue<W>| queue.waiting.is_empty() && !queue.ended;
        loop {
            let mut queue = self.waits.wait_while(self.lock(), is_idle).expect(NO_PANIC);
            let Some((pages, handed)) = queue.waiting.pop_front() else { return };
            drop(queue);
            self.done(pages, &handed);
        }
    }
}

/// Does `work` with such threads beside it, and pages of at most `memory` bytes on their way.
pub fn with_write_behind<W: ToWrite, R>(to: &W::To, memory: u64, work: impl FnOnce(&Behind<'_, W>) -> R) -> R {
    let queue = Queue { writers: 0, waiting: VecDeque::new(), pages: 0, free: Vec::new(), ended: false };
    let behind = Behind {
        to,
        most_pages: memory as usize / BLCKSZ,
        queue: Mutex::new(queue),
        waits: Condvar::new(),
        room: Condvar::new(),
    };
    thread::scope(|scope| {
        let write = || behind.work();
        let spawn = || thread::Builder::new().name("write".to_owned()).spawn_scoped(scope, write);
        let writers = (0..writers()).map_while(|_| spawn().ok()).count();
        behind.lock().writers = writers;
        let _ends = Ends(&behind);
        work(&behind)
    })
}

/// When this goes, nothing more will come.
struct Ends<'b, 'a, W: ToWrite>(&'b Behind<'a, W>);

impl<W: ToWrite> Drop for Ends<'_, '_, W> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.waits.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::DataDirError;

    /// Page `number` of a list.
    struct Page {
        number: usize,
        buffer: Buffer,
    }

    impl ToWrite for Page {
        type To = Mutex<Vec<u8>>;

        fn write(&self, list: &Mutex<Vec<u8>>) -> Result<()> {
            let mut list = list.lock().unwrap();
            let room = list.get_mut(self.number).ok_or_else(|| DataDirError::Refused("no such page".to_owned()))?;
            *room = self.buffer.pages()[1][7];
            Ok(())
        }

        fn into_buffer(self) -> Buffer {
            self.buffer
        }
    }

    /// More than there is room for; all of it is there when that is said, and an error comes to those whose it is.
    #[test]
    fn what_was_waited_for_is_written() {
        let list = Mutex::new(vec![0; 100]);
        with_write_behind(&list, 8 * BLCKSZ as u64, |behind| {
            let (handed, other) = (Handed::default(), Handed::default());
            let write = |number: usize, handed| {
                let mut buffer = behind.buffer(2);
                buffer.pages_mut()[1].fill(number as u8);
                behind.write(Page { number, buffer }, handed);
            };
            (0..100).for_each(|number| write(number, &handed));
            handed.wait().unwrap();
            assert!(list.lock().unwrap().iter().enumerate().all(|(number, &byte)| byte == number as u8));
            write(100, &other);
            assert_eq!(other.wait().unwrap_err().to_string(), "no such page");
            handed.wait().unwrap();
        });
    }
}
