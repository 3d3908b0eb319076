//! A batch that is larger than memory: what its records do to pages is put apart by where the pages are, as a hash join puts
//! apart what does not fit, so that each page is read and written once however much WAL there is.
//!
//! A partition is some ranges of blocks. A range is what one page of the free space map tells of, and that page: so whatever
//! redo of a heap page tells the map stays within the partition. For whoever brings pages in an order of his own it is another
//! ([`runs`]). Partitions are kept in memory, compressed, as long as there is room; what comes later goes to a file that has no
//! name, and is gone with the process.

pub mod entry;
mod packing;
pub mod runs;

use std::fs::{DirBuilder, File};
use std::hash::{Hash, Hasher};
use std::io::ErrorKind;
use std::num::NonZeroU64;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crc_fast::{CrcAlgorithm, checksum};
use entry::Operation;
use packing::{pack, unpack};
use rayon::prelude::*;
use runs::RunTable;
use rustc_hash::FxHasher;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use walrider_datadir::DataDirError;
use walrider_layout::ForkNumber;
use walrider_redo::fsm;
use walrider_wal::decode::Place;

use crate::error::ReplayError;
use crate::memory;
use crate::partition::Part;
use crate::plan::{PageOp, Planned};
use crate::rels::{PageKey, RelFork, RelTable};

/// What a partition gathers before it is compressed, where memory and the number of partitions allow it: what is read at a time should
/// be as much as a device likes.
const CHUNK_BYTES: u64 = 128 << 10;

/// The same, at least and at most.
const ANY_CHUNK_BYTES: RangeInclusive<u64> = (64 << 10)..=(1 << 20);

/// How many partitions a spilled batch may have, if it is not one of runs: the more, the sooner a thread has memory for all of one.
const SPILL_PARTITIONS: RangeInclusive<u64> = 256..=(1 << 14);

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
    /// Of a partition, uncompressed, what a thread works on at a time.
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

/// Compressed bytes of a partition.
struct Chunk {
    stored: Stored,
    len: u32,
    checksum: u32,
}

enum Stored {
    Memory(Box<[u8]>),
    File { at: u64, len: u32 },
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
pub struct SpillPartition {
    chunks: Vec<Chunk>,
    open: Vec<u8>,
}

/// What tells which partition a page of a fork is in.
#[derive(Clone, Copy)]
struct ForkPlace {
    seed: u64,
    fork: ForkNumber,
}

impl ForkPlace {
    fn of(fork: &RelFork) -> ForkPlace {
        // The map of a heap goes with the heap.
        let with = if fork.fork == ForkNumber::FreeSpaceMap { ForkNumber::Main } else { fork.fork };
        let mut hasher = FxHasher::default();
        (fork.rel, with as u8).hash(&mut hasher);
        ForkPlace { seed: hasher.finish(), fork: fork.fork }
    }
}

/// The partition of a page of this fork, of so many.
pub fn spill_partition_of(key: PageKey, fork: &RelFork, of: usize) -> usize {
    partition_of(key, ForkPlace::of(fork), of)
}

/// The file, and how much there is.
struct Store {
    settings: SpillSettings,
    file: Option<File>,
    /// Its length, and how much of it is in use.
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
    forks: Vec<ForkPlace>,
    /// If it is one of runs, which are where.
    runs: Option<RunTable>,
    /// Room for what stretches do.
    spare: Vec<Apart>,
}

/// What a stretch does, put apart.
#[derive(Default)]
struct Apart {
    bytes: Vec<u8>,
    /// What is whose: the number of a partition, or a run.
    pieces: Vec<(u64, Range<usize>)>,
}

impl Spill {
    /// What it was made with.
    pub fn settings(&self) -> &SpillSettings {
        &self.store.settings
    }

    /// Nothing is in it yet.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn new(settings: &SpillSettings) -> Result<Spill, ReplayError> {
        let partitions =
            (settings.gather_bytes / CHUNK_BYTES).clamp(*SPILL_PARTITIONS.start(), *SPILL_PARTITIONS.end());
        Spill::in_partitions(settings, partitions as usize, None)
    }

    fn in_partitions(
        settings: &SpillSettings,
        partitions: usize,
        runs: Option<RunTable>,
    ) -> Result<Spill, ReplayError> {
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
        let chunk_bytes = (settings.gather_bytes / partitions as u64)
            .clamp(*ANY_CHUNK_BYTES.start(), *ANY_CHUNK_BYTES.end()) as usize;
        let partitions = (0..partitions).map(|_| SpillPartition::default()).collect();
        Ok(Spill { store, partitions, chunk_bytes, forks: Vec::new(), runs, spare: Vec::new() })
    }

    /// In how many partitions it is.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
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
            self.forks.push(ForkPlace::of(&rels.fork(number as u32)));
        }
        let mut apart: Vec<Apart> = parts.iter().map(|_| self.spare.pop().unwrap_or_default()).collect();
        let (forks, runs, of) = (&self.forks, self.runs.as_ref(), self.partitions.len());
        let whose = |key: PageKey| {
            let place = forks[key.fork() as usize];
            runs.map_or_else(|| partition_of(key, place, of) as u64, |runs| runs.run_of(key, place.fork).bits())
        };
        apart.par_iter_mut().zip(parts).with_max_len(1).try_for_each(|(apart, part)| apart.put(part, whose))?;
        let mut number =
            |whose| self.runs.as_mut().map_or(whose as usize, |runs| runs.number(PageKey::from_bits(whose)));
        let mut pieces: Vec<(usize, &[u8])> = Vec::new();
        for apart in &apart {
            pieces.extend(apart.pieces.iter().map(|(whose, piece)| (number(*whose), &apart.bytes[piece.clone()])));
        }
        // Stable: those of a partition stay in their order.
        pieces.sort_by_key(|piece| piece.0);
        let (store, chunk_bytes) = (&self.store, self.chunk_bytes);
        self.partitions.par_iter_mut().enumerate().with_min_len(16).try_for_each(|(number, partition)| {
            let first = pieces.partition_point(|piece| piece.0 < number);
            for (_, piece) in pieces[first..].iter().take_while(|piece| piece.0 == number) {
                partition.add(piece, chunk_bytes, store)?;
            }
            Ok::<(), ReplayError>(())
        })?;
        drop(pieces);
        self.spare.append(&mut apart);
        Ok(())
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

    /// Hands each partition to `work`, side by side, with how to read it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn each<T: Send>(mut self, work: impl Fn(SpilledPartition<'_>) -> T + Sync) -> Result<Vec<T>, ReplayError> {
        self.close()?;
        let Spill { store, partitions, .. } = self;
        let most = store.settings.most_at_once();
        let one = |(number, partition)| work(SpilledPartition { number, partition, store: &store, next: 0, most });
        Ok(partitions.into_par_iter().enumerate().with_max_len(1).map(one).collect())
    }
}

impl Apart {
    /// Puts a stretch's operations apart by `whose` pages they are about; each has the order of the WAL.
    fn put(&mut self, part: &Part<'_>, whose: impl Fn(PageKey) -> u64) -> Result<(), ReplayError> {
        self.bytes.clear();
        self.pieces.clear();
        let Planned { stretch, plan, .. } = part.planned;
        let mut found: Vec<(u64, Place, &[PageOp])> = Vec::new();
        for ops in plan.ops.iter().chain([&plan.fsm_ops]) {
            let of = |op: &PageOp| (whose(op.key), op.place);
            found.extend(part.cut(ops).chunk_by(|a, b| of(a) == of(b)).map(|same| {
                let (whose, place) = of(&same[0]);
                (whose, place, same)
            }));
        }
        // Of one place, operations are on different pages.
        found.sort_unstable_by_key(|&(whose, place, _)| (whose, place));
        let mut operations: Vec<Operation> = Vec::new();
        for of_one in found.chunk_by(|a, b| a.0 == b.0) {
            let begin = self.bytes.len();
            for same in of_one.chunk_by(|a, b| a.1 == b.1) {
                let place = same[0].1;
                operations.clear();
                operations
                    .extend(same.iter().flat_map(|ops| ops.2).map(|op| Operation { key: op.key, change: op.change }));
                let span = stretch.span(place);
                entry::put(&mut self.bytes, span, stretch.bytes(place), &operations)
                    .map_err(|error| ReplayError::CorruptWal(format!("record at {}: {error}", span.lsn)))?;
            }
            self.pieces.push((of_one[0].0, begin..self.bytes.len()));
        }
        Ok(())
    }
}

/// The partition of a page, of so many.
fn partition_of(key: PageKey, place: ForkPlace, of: usize) -> usize {
    let range = match place.fork {
        ForkNumber::Main => fsm::location(key.block()).0,
        ForkNumber::FreeSpaceMap => key.block(),
        ForkNumber::VisibilityMap | ForkNumber::Init => key.block() / fsm::SLOTS_PER_PAGE as u32,
    };
    let mixed = (place.seed ^ u64::from(range)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((u128::from(mixed) * of as u128) >> 64) as usize
}

impl SpillPartition {
    /// Adds what a stretch does.
    fn add(&mut self, piece: &[u8], chunk_bytes: usize, store: &Store) -> Result<(), ReplayError> {
        if self.open.len() + piece.len() > chunk_bytes {
            self.close_chunk(store)?;
        }
        if piece.len() > chunk_bytes {
            // A table's end moves on from partition to partition: each would keep the memory that its largest piece has taken.
            self.chunks.push(store.chunk(piece)?);
            return Ok(());
        }
        // No more than it may come to.
        self.open.reserve_exact(chunk_bytes - self.open.len());
        self.open.extend_from_slice(piece);
        Ok(())
    }

    /// Compresses what has come together.
    fn close_chunk(&mut self, store: &Store) -> Result<(), ReplayError> {
        if !self.open.is_empty() {
            self.chunks.push(store.chunk(&self.open)?);
            self.open.clear();
        }
        Ok(())
    }
}

impl Store {
    /// Compresses some bytes and keeps them.
    fn chunk(&self, bytes: &[u8]) -> Result<Chunk, ReplayError> {
        let chunk = |compressed: &[u8]| {
            Ok(Chunk {
                len: bytes.len() as u32,
                checksum: checksum(CrcAlgorithm::Crc32Iscsi, compressed) as u32,
                stored: self.keep(compressed)?,
            })
        };
        pack(bytes, chunk).map_err(|error| self.error("write", error))?
    }

    /// Keeps a chunk in memory or in the file.
    fn keep(&self, bytes: &[u8]) -> Result<Stored, ReplayError> {
        let len = bytes.len() as u64;
        // As much as it takes, and no more.
        let in_memory = || Ok(Stored::Memory(bytes.into()));
        let total = self.in_memory.fetch_add(len, Ordering::Relaxed) + len;
        if total <= self.settings.memory_bytes {
            return in_memory();
        }
        let used = self.file_used.fetch_add(len, Ordering::Relaxed) + len;
        let may_grow = || !self.full.load(Ordering::Relaxed) && used <= self.settings.file_bytes;
        if let Some(file) = self.file.as_ref().filter(|_| self.sorting || may_grow()) {
            let at = self.file_len.fetch_add(len, Ordering::Relaxed);
            match file.write_all_at(bytes, at) {
                Ok(()) => {
                    self.in_memory.fetch_sub(len, Ordering::Relaxed);
                    return Ok(Stored::File { at, len: len as u32 });
                }
                Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                    // No batch ends earlier for it any more, and not all that is in the file fits into memory.
                    if self.sorting && total > 2 * self.settings.memory_bytes {
                        return Err(self.error("write", error));
                    }
                }
                Err(error) => return Err(self.error("write", error)),
            }
        }
        self.file_used.fetch_sub(len, Ordering::Relaxed);
        self.full.store(true, Ordering::Relaxed);
        in_memory()
    }

    /// Reads a chunk to the end of `into`.
    fn read(&self, chunk: &Chunk, into: &mut Vec<u8>) -> Result<(), ReplayError> {
        let mut read = Vec::new();
        let compressed: &[u8] = match &chunk.stored {
            Stored::Memory(bytes) => bytes,
            Stored::File { at, len } => {
                read.resize(*len as usize, 0);
                let file = self.file.as_ref().expect("it was written");
                file.read_exact_at(&mut read, *at).map_err(|error| self.error("read", error))?;
                &read
            }
        };
        let damaged = || {
            ReplayError::Refused(format!(
                "a temporary file in \"{}\" does not hold what was written to it: look at that disk, and run the same \
                 command again",
                self.settings.directory.display()
            ))
        };
        if checksum(CrcAlgorithm::Crc32Iscsi, compressed) as u32 != chunk.checksum {
            return Err(damaged());
        }
        let (begin, len) = (into.len(), chunk.len as usize);
        into.resize(begin + len, 0);
        match unpack(compressed, &mut into[begin..]) {
            Ok(true) => Ok(()),
            Ok(false) => Err(damaged()),
            Err(error) => Err(self.error("read", error)),
        }
    }

    /// Has the system read chunks before they are needed.
    fn read_ahead(&self, chunks: &[Chunk]) {
        for chunk in chunks {
            if let (Stored::File { at, len }, Some(file)) = (&chunk.stored, &self.file) {
                // A hint.
                let _ = fadvise(file, *at, NonZeroU64::new(u64::from(*len)), Advice::WillNeed);
            }
        }
    }

    /// Gives back the room of a chunk.
    fn release(&self, chunk: &mut Chunk) {
        match &mut chunk.stored {
            Stored::Memory(bytes) => {
                self.in_memory.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                *bytes = Box::default();
            }
            Stored::File { at, len } => {
                let file = self.file.as_ref().expect("it was written");
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // Where a file cannot have holes, the room comes back with its end.
                if fallocate(file, hole, *at, u64::from(*len)).is_ok() {
                    self.file_used.fetch_sub(u64::from(*len), Ordering::Relaxed);
                }
            }
        }
    }

    fn error(&self, operation: &'static str, error: std::io::Error) -> ReplayError {
        DataDirError::io(operation, self.settings.directory.join("(temporary file)"), error).into()
    }
}

/// A partition that is read, a pass at a time.
pub struct SpilledPartition<'s> {
    /// Which it is.
    pub number: usize,
    partition: SpillPartition,
    store: &'s Store,
    next: usize,
    /// Bytes of it that a thread works on at a time.
    most: usize,
}

impl SpilledPartition<'_> {
    /// Reads what comes next in WAL order, as much as a thread works on at a time, into `bytes`. False: there is no more.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub fn read(&mut self, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        let most = self.most;
        let lengths = self.partition.chunks[self.next..].iter().map(|chunk| chunk.len as usize);
        let total = lengths
            .scan(0, |sum, len| {
                (*sum < most).then(|| {
                    *sum += len;
                    *sum
                })
            })
            .last()
            .unwrap_or(0);
        bytes.reserve_exact(total);
        while self.next < self.partition.chunks.len() && bytes.len() < most {
            let chunk = &mut self.partition.chunks[self.next];
            self.store.read(chunk, bytes)?;
            self.store.release(chunk);
            self.next += 1;
        }
        Ok(!bytes.is_empty())
    }
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
                partition.add(&piece, 1000, &store).unwrap();
                expected.extend(piece);
                assert!(partition.open.capacity() <= 1000, "{}", partition.open.capacity());
            }
            partition.close_chunk(&store).unwrap();
            let mut found = Vec::new();
            partition.chunks.iter().for_each(|chunk| store.read(chunk, &mut found).unwrap());
            assert_eq!(found, expected);
        });
    }

    #[test]
    fn a_full_disk_ends_a_batch_and_fails_what_must_be_sorted() {
        let full = |sorting| store(Some("/dev/full"), 1000, sorting);
        let gathered = full(false);
        for _ in 0..5 {
            assert!(matches!(gathered.keep(&[0; 900]), Ok(Stored::Memory(_))));
        }
        assert!(gathered.full.into_inner() && gathered.file_used.into_inner() == 0);
        let sorted = full(true);
        assert!(matches!(sorted.keep(&[0; 900]), Ok(Stored::Memory(_))));
        // Its room may come back.
        assert!(matches!(sorted.keep(&[0; 900]), Ok(Stored::Memory(_))));
        let error = sorted.keep(&[0; 900]).err().unwrap().to_string();
        assert!(error.contains("temporary file") && error.contains("free some space"), "{error}");
    }
}
