//! The early log: WAL that the primary has sent before it has flushed it. It is written and made durable like all WAL, but in
//! files that PostgreSQL does not read; what lies in segments is what the primary has called flushed.
//!
//! ```text
//! walrider.early.N     entry, entry, …, and then anything else
//! entry                header of 24 bytes, WAL, zeros up to a multiple of 8
//! header               CRC-32C (of N, and of all that follows up to the zeros) u32, length of the WAL u32,
//!                      its position u64, timeline u32, 1 if it begins a run u32; little endian
//! ```
//!
//! Entries are in the order in which WAL was received; [`Tail::merge`] of one after the other gives what is held. An entry without
//! WAL says that nothing past its position counts. One that does not begin a run follows the one before it: if it does not, one
//! is lost that was not durable, and what follows was not either, up to one that begins a run. Files are as long as segments; one is
//! used again, under another N, once all that it has is durable in segments.

use std::sync::Arc;
use std::time::Instant;

use walrider_datadir::wal_dir::EARLY_PREFIX;
use walrider_layout::bytes::{u32_at, u64_at};
use walrider_layout::{Lsn, TimelineId};

use crate::decide::LogEnds;
use crate::error::{Result, SpoolError};
use crate::files::{SegmentFile, read_all, write_all_at};
use crate::prepare;
use crate::state::{Shared, State};
use crate::stats::{count, count_time};
use crate::tail::Tail;

/// Length in bytes of what precedes the WAL of an entry.
const HEADER: usize = 24;
/// Most WAL of one entry, in bytes.
pub(crate) const MAX_ENTRY: usize = 256 << 10;

/// A file of the log.
#[derive(Clone)]
pub(crate) struct LogFile {
    number: u32,
    file: Arc<dyn SegmentFile>,
    /// Newest position of an entry's end.
    end: Lsn,
    /// Written, and not synced since.
    dirty: bool,
}

/// What there is of the log, under the spool's lock.
#[derive(Default)]
pub(crate) struct Early {
    pub ends: LogEnds,
    /// Oldest first; entries go into the last.
    files: Vec<LogFile>,
    /// Where the next entry goes.
    offset: u64,
    /// An empty file that comes next.
    spare: Option<LogFile>,
    wants_spare: bool,
    spare_failed: Option<SpoolError>,
    next_number: u32,
    /// Files of an earlier run precede: what they have past the end, if anything, does not count.
    recovered: bool,
    /// How many entries were written, and of these are durable.
    appended: u64,
    synced: u64,
    /// How often WAL was taken back, or others came in its place: what is being synced meanwhile says nothing of that.
    taken_back: u64,
}

impl Early {
    /// Nothing that it has counts as durable any more: other WAL takes its place, or the same once more.
    pub fn restart(&mut self) {
        self.ends = LogEnds::default();
        self.taken_back += 1;
    }

    /// Whether a file is to be made.
    pub fn lacks_spare(&self) -> bool {
        self.wants_spare && self.spare.is_none()
    }

    /// The oldest files whose WAL lies before `upto` as a whole, and those that have none; never the one that is written.
    fn take_obsolete(&mut self, upto: Lsn) -> Vec<LogFile> {
        let current = self.files.pop();
        let mut oldest = true;
        let (obsolete, needed) = self.files.drain(..).partition(|file| {
            oldest &= file.end <= upto;
            oldest || !file.end.is_valid()
        });
        self.files = needed;
        self.files.extend(current);
        obsolete
    }
}

/// The number of a file of the log: eight hexadecimal digits.
pub(crate) fn number_of_name(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(EARLY_PREFIX).filter(|digits| digits.len() == 8)?;
    u32::from_str_radix(digits, 16).ok()
}

fn name_of(number: u32) -> String {
    format!("{EARLY_PREFIX}{number:08X}")
}

/// The CRC of an entry, from `rest`, all that follows the CRC.
fn entry_crc(number: u32, rest: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&number.to_le_bytes());
    digest.update(rest);
    digest.finalize() as u32
}

/// WAL of a timeline, as the log has it.
struct Entry<'a> {
    timeline: TimelineId,
    at: Lsn,
    bytes: &'a [u8],
    /// It need not follow the one before it.
    starts_run: bool,
}

impl Entry<'_> {
    fn end(&self) -> Lsn {
        Lsn(self.at.0 + self.bytes.len() as u64)
    }

    /// Makes `out` what a file of this number has of it.
    fn encode(&self, out: &mut Vec<u8>, number: u32) {
        out.clear();
        out.extend([0; 4]);
        out.extend((self.bytes.len() as u32).to_le_bytes());
        out.extend(self.at.0.to_le_bytes());
        out.extend(self.timeline.0.to_le_bytes());
        out.extend(u32::from(self.starts_run).to_le_bytes());
        out.extend(self.bytes);
        let crc = entry_crc(number, &out[4..]);
        out[..4].copy_from_slice(&crc.to_le_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
    }

    /// The one at the beginning of `log`, and its length there; `None` where there is none.
    fn decode(log: &[u8], number: u32) -> Option<(Entry<'_>, usize)> {
        let header = log.get(..HEADER)?;
        let len = u32_at(header, 4) as usize;
        let whole = log.get(..HEADER.checked_add(len)?).filter(|_| len <= MAX_ENTRY)?;
        let at = Lsn(u64_at(header, 8));
        at.0.checked_add(len as u64)?;
        (u32_at(header, 0) == entry_crc(number, &whole[4..])).then(|| {
            let (timeline, starts_run) = (TimelineId(u32_at(header, 16)), u32_at(header, 20) != 0);
            (Entry { timeline, at, bytes: &whole[HEADER..], starts_run }, whole.len().next_multiple_of(8))
        })
    }
}

/// What entries come to, one after the other.
#[derive(Default)]
struct Recovered {
    timeline: TimelineId,
    tail: Tail,
    /// Where the next one follows, after the first.
    next: Option<Lsn>,
    /// The one that was to follow is lost.
    lost: bool,
}

impl Recovered {
    fn take(&mut self, entry: &Entry<'_>) {
        let removes = entry.bytes.is_empty();
        let follows = entry.starts_run || removes || self.next.is_none_or(|next| next == entry.at);
        self.lost = !follows || (self.lost && !entry.starts_run);
        if self.lost {
            return;
        }
        if entry.timeline != self.timeline {
            (self.timeline, self.tail) = (entry.timeline, Tail::default());
        }
        if removes {
            self.tail.truncate(entry.at);
            self.next = self.next.map(|next| next.min(entry.at));
        } else {
            self.tail.merge(entry.at, entry.bytes);
            self.next = Some(entry.end());
        }
    }
}

impl Shared {
    /// Reads what an earlier run has left; it must be durable already. Returns what is held, and its timeline.
    pub(crate) fn recover_early(&self) -> Result<(TimelineId, Tail)> {
        let names = self.directory.names().map_err(|error| self.error("read directory", "", error))?;
        let mut numbers: Vec<u32> = names.iter().filter_map(|name| number_of_name(name)).collect();
        numbers.sort_unstable();
        let mut recovered = Recovered::default();
        let mut files = Vec::new();
        for &number in &numbers {
            let name = name_of(number);
            let file = self.directory.open(&name).map_err(|error| self.error("open file", &name, error))?;
            let mut log = vec![0; self.size.bytes() as usize];
            let len = read_all(&*file, &mut log, 0).map_err(|error| self.error("read file", &name, error))?;
            let (mut rest, mut end) = (&log[..len], Lsn::INVALID);
            while let Some((entry, len)) = Entry::decode(rest, number) {
                recovered.take(&entry);
                end = end.max(entry.end());
                rest = &rest[len.min(rest.len())..];
            }
            files.push(LogFile { number, file, end, dirty: false });
        }
        let Recovered { timeline, tail, .. } = recovered;
        let mut state = self.lock();
        let early = &mut state.early;
        early.next_number = numbers.last().map_or(0, |last| last.wrapping_add(1));
        // Entries go into a new file: behind the last one there may be half of another.
        (early.files, early.offset) = (files, self.size.bytes());
        early.ends = LogEnds::recovered(&tail);
        early.recovered = true;
        Ok((timeline, tail))
    }

    /// Has a file made before it is needed.
    pub(crate) fn prepare_early(&self) {
        self.lock().early.wants_spare = true;
        self.prepare.notify_one();
    }

    /// Notes that nothing held from `at` on counts; durable on return.
    pub(crate) fn truncate_early(&self, timeline: TimelineId, at: Lsn, buffer: &mut Vec<u8>) -> Result<()> {
        self.append_early(timeline, at, &[], buffer)?;
        let mut state = self.lock();
        let wanted = state.early.appended;
        while state.early.synced < wanted {
            if let Some(failure) = state.failed.clone() {
                return Err(failure.into());
            }
            state = self.wait(&self.on_flushed, state);
        }
        Ok(())
    }

    /// Writes an entry of at most [`MAX_ENTRY`] bytes; it is in the operating system then. `buffer` is for use again.
    pub(crate) fn append_early(&self, timeline: TimelineId, at: Lsn, bytes: &[u8], buffer: &mut Vec<u8>) -> Result<()> {
        let (file, number, offset) = self.place_for((HEADER + bytes.len()).next_multiple_of(8) as u64)?;
        let starts_run = {
            let early = &self.lock().early;
            early.recovered || at != early.ends.written()
        };
        Entry { timeline, at, bytes, starts_run }.encode(buffer, number);
        let began = Instant::now();
        let calls = write_all_at(&*file, buffer, offset)
            .map_err(|error| self.error("write to file", &name_of(number), error))?;
        count(&self.counters.early_writes, calls);
        count_time(&self.counters.write_micros, began);
        count(&self.counters.early_bytes, bytes.len() as u64);
        let end = Lsn(at.0 + bytes.len() as u64);
        let mut state = self.lock();
        let early = &mut state.early;
        early.offset = offset + buffer.len() as u64;
        early.appended += 1;
        early.recovered = false;
        if let Some(last) = early.files.last_mut() {
            last.end = last.end.max(end);
            last.dirty = true;
        }
        early.taken_back += u64::from(bytes.is_empty() || at != early.ends.written());
        early.ends.appended(at, bytes.len() as u64);
        drop(state);
        self.early_work.notify_one();
        Ok(())
    }

    /// Where an entry of this length goes. Waits for a file if none is ready.
    fn place_for(&self, len: u64) -> Result<(Arc<dyn SegmentFile>, u32, u64)> {
        let mut state = self.lock();
        // An error counts if it came while we waited; an older one is reason to try again.
        state.early.spare_failed = None;
        loop {
            if let Some(failure) = state.failed.clone() {
                return Err(failure.into());
            }
            let early = &mut state.early;
            if early.offset + len <= self.size.bytes()
                && let Some(last) = early.files.last()
            {
                return Ok((last.file.clone(), last.number, early.offset));
            }
            match early.spare.take() {
                Some(spare) => {
                    early.files.push(spare);
                    early.offset = 0;
                    early.wants_spare = true;
                    // Files are free again once what they have is durable in segments.
                    self.flush_all(&mut state);
                    self.prepare.notify_one();
                }
                None => {
                    if let Some(error) = early.spare_failed.take() {
                        return Err(error);
                    }
                    early.wants_spare = true;
                    self.prepare.notify_one();
                    state = self.wait(&self.on_flushed, state);
                }
            }
        }
    }
}

/// All entries that were written at a moment.
pub(crate) struct LogSync {
    appended: u64,
    written: Lsn,
    taken_back: u64,
    dirty: Vec<LogFile>,
}

impl LogSync {
    /// What is to be made durable now, if anything.
    pub fn next(state: &mut State) -> Option<LogSync> {
        let early = &mut state.early;
        if state.failed.is_some() || early.synced == early.appended {
            return None;
        }
        let dirty = early.files.iter().filter(|file| file.dirty).cloned().collect();
        early.files.iter_mut().for_each(|file| file.dirty = false);
        let Early { appended, taken_back, .. } = *early;
        Some(LogSync { appended, written: early.ends.written(), taken_back, dirty })
    }

    /// Makes it durable.
    pub fn run(self, shared: &Shared) -> Result<()> {
        for LogFile { number, file, .. } in self.dirty {
            let begun = Instant::now();
            file.sync_data().map_err(|error| shared.fail("fdatasync file", &name_of(number), error))?;
            shared.counters.fsync(begun.elapsed());
        }
        let mut state = shared.lock();
        state.early.synced = self.appended;
        // Else positions up to there are of other WAL by now, and the next sync is of that.
        if state.early.taken_back == self.taken_back {
            state.early.ends.synced(self.written);
        }
        let held_durable = state.early.ends.held_durable(state.flushed);
        state.positions();
        drop(state);
        shared.on_flushed.notify_all();
        shared.call_back(held_durable);
        Ok(())
    }
}

/// Makes the file that comes next; in the thread that prepares segments, so that nobody waits for it here.
pub(crate) fn make_spare(shared: &Shared) {
    let mut state = shared.lock();
    let flushed = state.flushed;
    let mut obsolete = state.early.take_obsolete(flushed);
    let number = state.early.next_number;
    state.early.next_number = number.wrapping_add(1);
    drop(state);
    let made = make_file(shared, number, &mut obsolete);
    let mut state = shared.lock();
    // Nothing may be missing between files that are there: what follows a gap is not read.
    state.early.files.splice(0..0, obsolete);
    state.early.wants_spare = false;
    match made {
        Ok(file) => state.early.spare = Some(file),
        Err(error) => state.early.spare_failed = Some(error),
    }
    drop(state);
    shared.on_flushed.notify_all();
}

/// An empty file of this number, its length and name durable: one of the obsolete ones if there are any; the others are removed. Those that
/// are still there after an error are left.
fn make_file(shared: &Shared, number: u32, obsolete: &mut Vec<LogFile>) -> Result<LogFile> {
    let (directory, name) = (&*shared.directory, name_of(number));
    let mut recycled = None;
    while let Some(old) = obsolete.first() {
        let old_name = name_of(old.number);
        if recycled.is_none() {
            directory.rename(&old_name, &name).map_err(|error| shared.error("rename to", &name, error))?;
            recycled = Some(old.file.clone());
        } else {
            directory.remove(&old_name).map_err(|error| shared.error("remove file", &old_name, error))?;
        }
        obsolete.remove(0);
    }
    let file = match recycled {
        Some(file) => file,
        None => {
            let made = prepare::create(shared, &name);
            if made.is_err() {
                // It would mean nothing, but takes space.
                let _ = directory.remove(&name);
            }
            made?
        }
    };
    shared.sync_directory()?;
    Ok(LogFile { number, file, end: Lsn::INVALID, dirty: false })
}
