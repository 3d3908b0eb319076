//! A batch that is larger than memory: what its records do to pages is put apart by where the pages are, as a hash join puts
//! apart what does not fit, so that each page is read and written once however much WAL there is.
//!
//! A partition is some runs of blocks ([`runs`]); free space maps have one of their own, as redo of heap pages tells them something. What
//! comes together for a partition is compressed, and kept in memory as long as there is room. Then those partitions that have the most
//! write it to a file: the more of it lies together, the fewer requests it takes to read. The file has no name, and is gone with the
//! process.

pub mod entry;
mod packing;
pub mod runs;

use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crc_fast::{CrcAlgorithm, checksum};
use entry::Operation;
use packing::{pack, unpack};
use rayon::prelude::*;
use runs::RunTable;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use walrider_datadir::DataDirError;
use walrider_layout::ForkNumber;
use walrider_wal::decode::Place;

use crate::error::ReplayError;
use crate::memory;
use crate::partition::Part;
use crate::partition::sweep::OPERATION_BYTES;
use crate::plan::{PageOp, Planned};
use crate::rels::{PageKey, RelTable};

/// What a partition gathers before it is compressed, at least and at most. The less that is, the more partitions there are, and the sooner a
/// thread has memory for all of one.
const LEAST_CHUNK_BYTES: u64 = 8 << 10;
const MOST_CHUNK_BYTES: u64 = 1 << 20;

/// A chunk in the file begins at a block of the file system, so that its room can be given back.
const FILE_BLOCK: u64 = 4096;

/// Where a spilled batch may go, and how much of it.
#[derive(Clone, Debug)]
pub struct SpillSettings {
    /// The directory of the file.
    pub directory: PathBuf,
    /// Most bytes in the file; 0: no batch is larger than memory.
    pub file_bytes: u64,
    /// Every batch goes there, whether that is worth it or not.
    pub always: bool,
    /// Most bytes in memory, compressed.
    pub memory_bytes: u64,
    /// What all partitions gather before it is compressed.
    pub gather_bytes: u64,
    /// Of a partition, uncompressed and with what it takes to sort it, what a thread works on at a time.
    pub pass_bytes: usize,
    /// Of pages, most bytes that are on their way to their files.
    pub write_bytes: u64,
}

impl SpillSettings {
    /// The same, as far as entries may lie in it.
    fn most_at_once(&self) -> usize {
        self.pass_bytes.min(entry::MOST_BYTES / 2)
    }
}

/// Compressed bytes of a partition. Several are made one by putting them behind each other.
struct Chunk {
    stored: Stored,
    len: u32,
    operations: u32,
}

impl Chunk {
    /// Memory that it takes to work on it.
    fn cost(&self) -> usize {
        self.len as usize + self.operations as usize * OPERATION_BYTES
    }
}

enum Stored {
    Memory(Box<[u8]>),
    File { at: u64, len: u32, checksum: u32 },
}

impl Stored {
    fn len(&self) -> u64 {
        match self {
            Stored::Memory(bytes) => bytes.len() as u64,
            Stored::File { len, .. } => u64::from(*len),
        }
    }
}

/// One partition, in the order of the WAL.
#[derive(Default)]
struct SpillPartition {
    chunks: Vec<Chunk>,
    /// Of the last chunks, how many are in memory, with how many bytes.
    held: usize,
    held_bytes: u64,
    open: Vec<u8>,
    open_operations: u32,
}

/// The file, and how much there is.
struct Store {
    settings: SpillSettings,
    file: Option<File>,
    /// Where it ends, and how much was written to it.
    file_len: AtomicU64,
    file_used: AtomicU64,
    in_memory: AtomicU64,
    full: AtomicBool,
    /// It is sorted: whatever is written was read before, and has given its room back, so that what is full now may not be so again.
    sorting: bool,
}

/// A batch on its way.
pub struct Spill {
    store: Store,
    partitions: Vec<SpillPartition>,
    /// What a partition gathers before it is compressed.
    chunk_bytes: usize,
    forks: Vec<ForkNumber>,
    runs: RunTable,
    /// Room for what stretches do.
    spare: Vec<Apart>,
}

/// What a stretch does, put apart.
#[derive(Default)]
struct Apart {
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
}

/// What a stretch does to the pages of a run.
struct Piece {
    run: PageKey,
    bytes: Range<usize>,
    operations: u32,
}

impl Spill {
    /// Nothing is in it yet.
    ///
    /// # Errors
    /// When the file cannot be made.
    fn in_partitions(settings: &SpillSettings, runs: RunTable) -> Result<Spill, ReplayError> {
        let file = match settings.file_bytes {
            0 => None,
            _ => Some(temporary_file(&settings.directory)?),
        };
        let store = Store {
            settings: settings.clone(),
            file,
            file_len: AtomicU64::new(0),
            file_used: AtomicU64::new(0),
            in_memory: AtomicU64::new(0),
            full: AtomicBool::new(false),
            sorting: false,
        };
        let partitions = runs.partitions();
        let chunk_bytes =
            (settings.gather_bytes / partitions as u64).clamp(LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES) as usize;
        let partitions = (0..partitions).map(|_| SpillPartition::default()).collect();
        Ok(Spill { store, partitions, chunk_bytes, forks: Vec::new(), runs, spare: Vec::new() })
    }

    /// Whether there is no room for more.
    pub fn is_full(&self) -> bool {
        self.store.full.load(Ordering::Relaxed)
    }

    /// Bytes in the file.
    pub fn file_used(&self) -> u64 {
        self.store.file_used.load(Ordering::Relaxed)
    }

    /// Takes what these records do to pages.
    ///
    /// # Errors
    /// When the file cannot be written, except for want of room: then all is kept in memory, and no more should come.
    pub fn take(&mut self, parts: &[Part<'_>], rels: &RelTable) -> Result<(), ReplayError> {
        for number in self.forks.len()..rels.len() {
            self.forks.push(rels.fork(number as u32).fork);
        }
        let mut apart: Vec<Apart> = parts.iter().map(|_| self.spare.pop().unwrap_or_default()).collect();
        let (forks, runs) = (&self.forks, &self.runs);
        let run_of = |key: PageKey| runs.run_of(key, forks[key.fork() as usize]);
        apart.par_iter_mut().zip(parts).with_max_len(1).try_for_each(|(apart, part)| apart.put(part, run_of))?;
        let mut pieces: Vec<(usize, &Piece, &[u8])> = Vec::new();
        for apart in &apart {
            let bytes = |piece: &Piece| &apart.bytes[piece.bytes.clone()];
            pieces.extend(apart.pieces.iter().map(|piece| (self.runs.number(piece.run), piece, bytes(piece))));
        }
        // Stable: those of a partition stay in their order.
        pieces.sort_by_key(|piece| piece.0);
        let (store, chunk_bytes) = (&self.store, self.chunk_bytes);
        // Only those that get something: runs of a growing table are neighbours, and would be one thread's work.
        let mut partitions = self.partitions.iter_mut().enumerate();
        let mut work = Vec::new();
        for of_one in pieces.chunk_by(|a, b| a.0 == b.0) {
            let partition = partitions.find(|(number, _)| *number == of_one[0].0).expect("one of these").1;
            work.push((partition, of_one));
        }
        work.into_par_iter().try_for_each(|(partition, pieces)| {
            pieces.iter().try_for_each(|(_, piece, bytes)| partition.add(bytes, piece.operations, chunk_bytes, store))
        })?;
        drop(pieces);
        // No more than it took: the first batch may be larger than those that follow.
        self.spare = apart;
        self.make_room()
    }

    /// Writes what is too much for memory to the file, of those partitions that hold the most.
    fn make_room(&mut self) -> Result<(), ReplayError> {
        let (store, most) = (&self.store, self.store.settings.memory_bytes);
        if store.has_room() || self.is_full() {
            return Ok(());
        }
        let mut by_size: Vec<&mut SpillPartition> = self.partitions.iter_mut().filter(|held| held.held > 0).collect();
        by_size.sort_unstable_by_key(|held| std::cmp::Reverse(held.held_bytes));
        let mut left = store.in_memory.load(Ordering::Relaxed);
        let chosen = by_size.into_iter().take_while(|held| {
            let is_too_much = left > most / 8 * 7;
            left = left.saturating_sub(held.held_bytes);
            is_too_much
        });
        chosen.collect::<Vec<_>>().into_par_iter().try_for_each(|partition| partition.put_out(store))
    }

    /// Compresses what has come together, and gives the memory of the rest back.
    fn close(&mut self) -> Result<(), ReplayError> {
        (self.spare, self.forks) = (Vec::new(), Vec::new());
        let store = &self.store;
        self.partitions.par_iter_mut().with_min_len(16).try_for_each(|partition| {
            partition.close_chunk(store)?;
            partition.open = Vec::new();
            Ok::<(), ReplayError>(())
        })?;
        memory::trim();
        // What is read gives its room back.
        self.store.full.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl Apart {
    /// Puts a stretch's operations apart by the runs that their pages are in; those of a run have the order of the WAL.
    fn put(&mut self, part: &Part<'_>, run_of: impl Fn(PageKey) -> PageKey) -> Result<(), ReplayError> {
        self.bytes.clear();
        self.pieces.clear();
        let Planned { stretch, plan, .. } = part.planned;
        let mut found: Vec<(PageKey, Place, &[PageOp])> = Vec::new();
        for ops in plan.ops.iter().chain([&plan.fsm_ops]) {
            let of = |op: &PageOp| (run_of(op.key), op.place);
            found.extend(part.cut(ops).chunk_by(|a, b| of(a) == of(b)).map(|same| {
                let (run, place) = of(&same[0]);
                (run, place, same)
            }));
        }
        // Of one place, operations are on different pages.
        found.sort_unstable_by_key(|&(run, place, _)| (run, place));
        let mut operations: Vec<Operation> = Vec::new();
        for of_run in found.chunk_by(|a, b| a.0 == b.0) {
            let begin = self.bytes.len();
            let mut count = 0;
            for same in of_run.chunk_by(|a, b| a.1 == b.1) {
                let place = same[0].1;
                operations.clear();
                operations
                    .extend(same.iter().flat_map(|ops| ops.2).map(|op| Operation { key: op.key, change: op.change }));
                count += operations.len() as u32;
                let span = stretch.span(place);
                entry::put(&mut self.bytes, span, stretch.bytes(place), &operations)
                    .map_err(|error| ReplayError::CorruptWal(format!("record at {}: {error}", span.lsn)))?;
            }
            self.pieces.push(Piece { run: of_run[0].0, bytes: begin..self.bytes.len(), operations: count });
        }
        Ok(())
    }
}

impl SpillPartition {
    /// Adds what a stretch does.
    fn add(&mut self, piece: &[u8], operations: u32, chunk_bytes: usize, store: &Store) -> Result<(), ReplayError> {
        if self.open.len() + piece.len() > chunk_bytes {
            self.close_chunk(store)?;
        }
        if piece.len() > chunk_bytes {
            // A table's end moves on from partition to partition: each would keep the memory that its largest piece has taken.
            self.push(store.chunk(piece, operations)?);
            return Ok(());
        }
        // No more than it may come to.
        self.open.reserve_exact(chunk_bytes - self.open.len());
        self.open.extend_from_slice(piece);
        self.open_operations += operations;
        Ok(())
    }

    /// Compresses what has come together.
    fn close_chunk(&mut self, store: &Store) -> Result<(), ReplayError> {
        if !self.open.is_empty() {
            let chunk = store.chunk(&self.open, std::mem::take(&mut self.open_operations))?;
            self.open.clear();
            self.push(chunk);
        }
        Ok(())
    }

    fn push(&mut self, chunk: Chunk) {
        self.held += 1;
        self.held_bytes += chunk.stored.len();
        self.chunks.push(chunk);
    }

    /// Writes what it holds to the file, if there is room, in chunks that a thread can take a few of at a time.
    fn put_out(&mut self, store: &Store) -> Result<(), ReplayError> {
        let held = self.chunks.split_off(self.chunks.len() - self.held);
        (self.held, self.held_bytes) = (0, 0);
        let (most, mut next) = (store.settings.most_at_once() / 4, 0);
        while next < held.len() {
            let end = end_of_part(&held, next, most);
            self.chunks.push(store.put_out(&held[next..end])?);
            next = end;
        }
        Ok(())
    }
}

impl Store {
    /// Compresses some bytes and holds them.
    fn chunk(&self, bytes: &[u8], operations: u32) -> Result<Chunk, ReplayError> {
        let chunk = |compressed: &[u8]| {
            self.in_memory.fetch_add(compressed.len() as u64, Ordering::Relaxed);
            // As much as it takes, and no more.
            let stored = Stored::Memory(compressed.into());
            Chunk { stored, len: bytes.len() as u32, operations }
        };
        pack(bytes, chunk).map_err(|error| self.error("write", error))
    }

    /// Whether memory has room for what it holds.
    fn has_room(&self) -> bool {
        self.in_memory.load(Ordering::Relaxed) <= self.settings.memory_bytes
    }

    /// Makes one of chunks that are in memory, and writes it to the file. If that has no room, it stays in memory.
    fn put_out(&self, chunks: &[Chunk]) -> Result<Chunk, ReplayError> {
        let mut bytes = Vec::with_capacity(chunks.iter().map(|chunk| chunk.stored.len() as usize).sum());
        for chunk in chunks {
            let Stored::Memory(held) = &chunk.stored else { unreachable!("only chunks in memory are put out") };
            bytes.extend_from_slice(held);
        }
        let len = bytes.len() as u64;
        let room = len.next_multiple_of(FILE_BLOCK);
        let at = self.file_len.fetch_add(room, Ordering::Relaxed);
        let used = self.file_used.fetch_add(room, Ordering::Relaxed) + room;
        let may_grow = self.sorting || used <= self.settings.file_bytes;
        let written = match self.file.as_ref().filter(|_| may_grow) {
            Some(file) => file.write_all_at(&bytes, at),
            None => Err(ErrorKind::StorageFull.into()),
        };
        let stored = match written {
            Ok(()) => {
                self.in_memory.fetch_sub(len, Ordering::Relaxed);
                Stored::File { at, len: len as u32, checksum: sum_of(&bytes) }
            }
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                // No batch ends earlier for it any more, and not all that is in the file fits into memory.
                if self.sorting && self.in_memory.load(Ordering::Relaxed) > 2 * self.settings.memory_bytes {
                    return Err(self.error("write", error));
                }
                // The file does not become shorter again: somebody else may have written behind it.
                self.file_used.fetch_sub(room, Ordering::Relaxed);
                self.full.store(true, Ordering::Relaxed);
                Stored::Memory(bytes.into())
            }
            Err(error) => return Err(self.error("write", error)),
        };
        Ok(Chunk {
            stored,
            len: chunks.iter().map(|chunk| chunk.len).sum(),
            operations: chunks.iter().map(|chunk| chunk.operations).sum(),
        })
    }

    /// Reads chunks to the end of `into`.
    fn read(&self, chunks: &[Chunk], into: &mut Vec<u8>) -> Result<(), ReplayError> {
        into.reserve_exact(chunks.iter().map(|chunk| chunk.len as usize).sum());
        let mut read = Vec::new();
        let damaged = || {
            ReplayError::Refused(format!(
                "a temporary file in \"{}\" does not hold what was written to it: look at that disk, and try again",
                self.settings.directory.display()
            ))
        };
        for chunk in chunks {
            let compressed: &[u8] = match &chunk.stored {
                Stored::Memory(bytes) => bytes,
                Stored::File { at, len, checksum } => {
                    read.resize(*len as usize, 0);
                    let file = self.file.as_ref().expect("it was written");
                    file.read_exact_at(&mut read, *at).map_err(|error| self.error("read", error))?;
                    if sum_of(&read) != *checksum {
                        return Err(damaged());
                    }
                    &read
                }
            };
            let begin = into.len();
            into.resize(begin + chunk.len as usize, 0);
            if !unpack(compressed, &mut into[begin..]).map_err(|error| self.error("read", error))? {
                return Err(damaged());
            }
        }
        Ok(())
    }

    /// Has the system read chunks before they are needed.
    fn read_ahead(&self, chunks: &[Chunk]) {
        for chunk in chunks {
            if let (Stored::File { at, len, .. }, Some(file)) = (&chunk.stored, &self.file) {
                // A hint.
                let _ = fadvise(file, *at, NonZeroU64::new(u64::from(*len)), Advice::WillNeed);
            }
        }
    }

    /// Gives back the room of chunks.
    fn release(&self, chunks: &mut [Chunk]) {
        for chunk in chunks {
            match &mut chunk.stored {
                Stored::Memory(bytes) => {
                    self.in_memory.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                    *bytes = Box::default();
                }
                Stored::File { at, len, .. } => {
                    let file = self.file.as_ref().expect("it was written");
                    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    // Where a file cannot have holes, the room comes back with its end.
                    let _ = fallocate(file, hole, *at, u64::from(*len).next_multiple_of(FILE_BLOCK));
                }
            }
        }
    }

    fn error(&self, operation: &'static str, error: std::io::Error) -> ReplayError {
        DataDirError::io(operation, self.settings.directory.join("(temporary file)"), error).into()
    }
}

/// A partition that is read for the last time.
pub struct LastRead {
    /// Which it is.
    pub number: usize,
    chunks: Vec<Chunk>,
    next: usize,
}

impl LastRead {
    /// Reads what comes next in WAL order into `bytes`, as much as may be worked on at a time, and gives its room back. False: there is no more.
    fn read(&mut self, store: &Store, most: usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        let end = end_of_part(&self.chunks, self.next, most);
        let part = &mut self.chunks[self.next..end];
        self.next = end;
        store.read_ahead(part);
        store.read(part, bytes)?;
        store.release(part);
        Ok(!bytes.is_empty())
    }
}

fn sum_of(compressed: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, compressed) as u32
}

/// The end of those chunks that may be worked on at once: `most` bytes, or one.
fn end_of_part(chunks: &[Chunk], first: usize, most: usize) -> usize {
    let (mut end, mut cost) = (first, 0);
    while end < chunks.len() && (end == first || cost + chunks[end].cost() <= most) {
        cost += chunks[end].cost();
        end += 1;
    }
    end
}
/// A file without a name in `directory`, which is made if need be.
pub(crate) fn temporary_file(directory: &Path) -> Result<File, ReplayError> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(DataDirError::io("make directory", directory, error).into());
        }
        _ => {}
    }
    tempfile::tempfile_in(directory)
        .map_err(|error| DataDirError::io("make a temporary file in", directory, error).into())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use walrider_seed::Random;

    use super::*;

    fn store(file: Option<&str>, memory_bytes: u64, sorting: bool) -> Store {
        let settings = SpillSettings {
            directory: "/dev".into(),
            file_bytes: 1 << 30,
            always: false,
            memory_bytes,
            gather_bytes: 0,
            pass_bytes: 0,
            write_bytes: 0,
        };
        Store {
            settings,
            file: file.map(|file| OpenOptions::new().write(true).open(file).unwrap()),
            file_len: AtomicU64::new(0),
            file_used: AtomicU64::new(0),
            in_memory: AtomicU64::new(0),
            full: AtomicBool::new(false),
            sorting,
        }
    }

    /// The end of a table that grows has most of each stretch, and goes from partition to partition. All of them kept the memory that
    /// their largest piece took: restore needed 662 MB with `--memory 256MB`.
    #[test]
    fn a_partition_keeps_no_more_memory_than_a_chunk() {
        walrider_seed::rounds(50, |seed| {
            let mut rng = Random(seed);
            let store = store(None, 1 << 30, false);
            let (mut partition, mut expected) = (SpillPartition::default(), Vec::new());
            for _ in 0..50 {
                let piece: Vec<u8> = (0..rng.below(3000)).map(|_| rng.below(256) as u8).collect();
                partition.add(&piece, 1, 1000, &store).unwrap();
                expected.extend(piece);
                assert!(partition.open.capacity() <= 1000, "{}", partition.open.capacity());
            }
            partition.close_chunk(&store).unwrap();
            let mut found = Vec::new();
            store.read(&partition.chunks, &mut found).unwrap();
            assert_eq!(found, expected);
        });
    }

    #[test]
    fn a_full_disk_ends_a_batch_and_fails_what_must_be_sorted() {
        let full = |sorting| store(Some("/dev/full"), 1000, sorting);
        let mut rng = Random(1);
        let noise: Vec<u8> = (0..900).map(|_| rng.below(256) as u8).collect();
        let put_out = |store: &Store| {
            store.put_out(&[store.chunk(&noise, 1).unwrap()]).map(|chunk| matches!(chunk.stored, Stored::Memory(_)))
        };
        let gathered = full(false);
        for _ in 0..5 {
            assert!(put_out(&gathered).unwrap());
        }
        assert!(gathered.full.into_inner() && gathered.file_used.into_inner() == 0);
        let sorted = full(true);
        // Its room may come back.
        assert!(put_out(&sorted).unwrap() && put_out(&sorted).unwrap());
        let error = put_out(&sorted).err().unwrap().to_string();
        assert!(error.contains("temporary file") && error.contains("free some space"), "{error}");
    }
}
