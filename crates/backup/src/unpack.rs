//! From a backup to a data directory: each file is read once, verified, and written once.
//!
//! Relations that are larger than the memory there is go around the system's cache, by threads that wait for the device: nobody would find
//! them in that cache, and where a device takes long for a request, the system writes one at a time (`walrider_datadir::behind`).

mod through;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::fs::OFlags;
use walrider_datadir::behind::{Behind, Handed, with_write_behind, writers};
use walrider_datadir::config::keep_servers_out;
use walrider_datadir::durable::{list_dir, write_file};
use walrider_datadir::relation::SegmentFile;
use walrider_datadir::sync::{Tree, start_writeback};
use walrider_layout::control::{CONTROL_FILE, CONTROL_FILE_SIZE, ControlFile};
use walrider_layout::{BLCKSZ, BlockNumber, RELSEG_SIZE};

use crate::error::{BackupError, IoContext, Result};
use crate::inventory::{Expected, Inventory};
use crate::manifest::MANIFEST;
use crate::name::Name;
use crate::source::{Archive, Backup, Form, MAX_SMALL, map};
use crate::target::{MARKER, Mapping, Target};
use through::{Piece, Through};

/// Bytes that are read, changed and written at once: whole pages.
const PIECE: usize = PIECE_PAGES * BLCKSZ;
const PIECE_PAGES: usize = 128;
/// The longest file that a manifest does not vouch for: a segment of a relation, or of WAL (`RELSEG_SIZE`, `WalSegMaxSize`).
const MAX_UNVOUCHED: u64 = RELSEG_SIZE as u64 * BLCKSZ as u64;

/// Sees the pages of all relations on their way into the new directory, and may change them there.
pub trait Pages: Sync {
    /// Some pages of a segment file, from the block `first` of the fork on. Those of one file come in their order, from one thread
    /// at a time; files come side by side, in any order.
    ///
    /// # Errors
    /// Whatever is to end all.
    fn pass(&self, file: SegmentFile, first: BlockNumber, pages: &mut [u8]) -> std::result::Result<(), PagesError>;

    /// All of a segment file has passed: the fork has blocks before `end`, as far as this file tells.
    ///
    /// # Errors
    /// Whatever is to end all.
    fn passed(&self, _file: SegmentFile, _end: BlockNumber) -> std::result::Result<(), PagesError> {
        Ok(())
    }
}

/// Why pages could not be changed.
pub type PagesError = Box<dyn std::error::Error + Send + Sync>;

/// Leaves all pages as they are.
#[derive(Clone, Copy, Debug)]
pub struct Unchanged;

impl Pages for Unchanged {
    fn pass(&self, _: SegmentFile, _: BlockNumber, _: &mut [u8]) -> std::result::Result<(), PagesError> {
        Ok(())
    }
}

/// Where a backup is to go.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The data directory, which is empty or not there yet.
    pub data_dir: PathBuf,
    /// Where its tablespaces go.
    pub mapping: Mapping,
    /// What an earlier call has left that did not get to its end is removed first.
    pub start_over: bool,
    /// Bytes of memory that there are for all. Relations of more go around the system's cache; what is on its way may take a sixteenth.
    pub memory_bytes: u64,
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
}

/// A backup of which all is unpacked but the files of relations.
pub struct Begun {
    backup: Arc<Backup>,
    target: Target,
    unpacked: Unpacked,
    memory_bytes: u64,
}

/// Unpacks all of a backup but the files of relations, durably. Servers are kept out, and the directory says what it is, until
/// these follow.
///
/// # Errors
/// As [`unpack`].
pub fn begin(backup: Arc<Backup>, destination: &Destination, progress: &(dyn Fn(u64) + Sync)) -> Result<Begun> {
    let target = destination.begin(&backup)?;
    let memory_bytes = destination.memory_bytes;
    let (unpacked, control) = unpack_some(&backup, &target, Which::Rest, &Unchanged, memory_bytes, progress)?;
    keep_servers_out(&target.root)?;
    Tree::of(&target.root)?.sync()?;
    write_control(&backup, &target, control)?;
    Ok(Begun { backup, target, unpacked, memory_bytes })
}

impl Begun {
    /// How many bytes the files of relations have; 0 where there is no manifest to tell.
    pub fn relation_bytes(&self) -> u64 {
        self.backup.inventory.as_ref().map_or(0, Inventory::relation_bytes)
    }

    /// Unpacks the files of relations; durable on return. Servers are kept out as before.
    ///
    /// # Errors
    /// As [`unpack`].
    pub fn relations(self, pages: &dyn Pages, progress: &(dyn Fn(u64) + Sync)) -> Result<Unpacked> {
        let Begun { backup, target, unpacked: Unpacked { files, bytes }, memory_bytes } = self;
        let (unpacked, _) = unpack_some(&backup, &target, Which::Relations, pages, memory_bytes, progress)?;
        backup.check_complete()?;
        Tree::of(&target.root)?.sync()?;
        target.end_tablespaces()?;
        target.end()?;
        Ok(Unpacked { files: files + unpacked.files, bytes: bytes + unpacked.bytes })
    }
}

/// Unpacks a backup; durable on return. Until then the directory has no control file, but a file that says what it is.
/// `progress` is told of bytes that are done.
///
/// # Errors
/// The backup is damaged or not whole, the directory not empty; files cannot be read or written.
pub fn unpack(
    backup: &Backup,
    destination: &Destination,
    pages: &dyn Pages,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Unpacked> {
    let target = destination.begin(backup)?;
    let (unpacked, control) = unpack_some(backup, &target, Which::All, pages, destination.memory_bytes, progress)?;
    backup.check_complete()?;
    Tree::of(&target.root)?.sync()?;
    target.end_tablespaces()?;
    write_control(backup, &target, control)?;
    target.end()?;
    Ok(unpacked)
}

impl Destination {
    fn begin(&self, backup: &Backup) -> Result<Target> {
        let Destination { data_dir, mapping, start_over, .. } = self;
        Target::begin(data_dir, backup.tablespaces(), mapping, backup.group_access, *start_over)
    }
}

/// The control file comes when all else is durable.
fn write_control(backup: &Backup, target: &Target, control: Option<Vec<u8>>) -> Result<()> {
    let control = control.ok_or_else(|| BackupError::damaged(CONTROL_FILE, "is missing"))?;
    check_control(backup, &control)?;
    Ok(write_file(&target.root.join(CONTROL_FILE), &control)?)
}

fn check_control(backup: &Backup, bytes: &[u8]) -> Result<()> {
    let control = ControlFile::parse(bytes)
        .map_err(|error| BackupError::damaged(CONTROL_FILE, format!("is not accepted: {error}")))?;
    let told = backup.inventory.as_ref().and_then(|inventory| inventory.system_identifier);
    if let Some(told) = told.filter(|&told| told != control.system_identifier) {
        return Err(BackupError::damaged(
            MANIFEST,
            format!("is of system identifier {told}, but {CONTROL_FILE} of {}", control.system_identifier),
        ));
    }
    Ok(())
}

/// Which files are unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    All,
    /// Those of relations.
    Relations,
    /// The others.
    Rest,
}

/// Unpacks some files; returns the control file, too, which is not written.
fn unpack_some(
    backup: &Backup,
    target: &Target,
    which: Which,
    pages: &dyn Pages,
    memory_bytes: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(Unpacked, Option<Vec<u8>>)> {
    let relation_bytes = backup.inventory.as_ref().map(Inventory::relation_bytes);
    let around_cache = relation_bytes.is_none_or(|bytes| bytes > memory_bytes);
    let pieces = |number: usize| (number * PIECE) as u64;
    // As many pieces as are written at a time, and as many that wait; but one for each thread to read, and one to be written.
    let on_their_way = (memory_bytes / 16).min(pieces(2 * writers())).max(pieces(2 * rayon::current_num_threads()));
    with_write_behind(&(), on_their_way, |behind| {
        let (control, files, bytes) = (Mutex::default(), AtomicU64::new(0), AtomicU64::new(0));
        let handed = Handed::default();
        let work = Work { which, backup, target, pages, progress, around_cache, behind, handed, control, files, bytes };
        work.run()
    })
}

/// Does something to each, by as many threads as there are to work, until one fails. They are others than those: a file's thread waits
/// while these work on its pages, and must not begin with another file meanwhile.
fn side_by_side<T: Sync>(all: &[T], each: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let some = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = each(one) {
                next.store(all.len(), Ordering::Relaxed);
                failed.lock().expect("no panic while locked").get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..rayon::current_num_threads().min(all.len()) {
            scope.spawn(some);
        }
    });
    failed.into_inner().expect("no panic while locked").map_or(Ok(()), Err)
}

/// What all threads share.
struct Work<'w> {
    which: Which,
    backup: &'w Backup,
    target: &'w Target,
    pages: &'w dyn Pages,
    progress: &'w (dyn Fn(u64) + Sync),
    /// Relations of more than a piece go around the system's cache.
    around_cache: bool,
    behind: &'w Behind<'w, Piece>,
    /// All that is written so.
    handed: Handed,
    control: Mutex<Option<Vec<u8>>>,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// A file of the backup.
struct Reading<'r> {
    reader: &'r mut dyn Read,
    size: u64,
    /// The archive that it is in, for messages.
    within: &'r str,
}

impl Work<'_> {
    /// Unpacks; returns the control file, too, which is not written.
    fn run(self) -> Result<(Unpacked, Option<Vec<u8>>)> {
        match &self.backup.form {
            Form::Plain(directory) => self.plain(directory)?,
            Form::Archives(archives) => {
                side_by_side(archives, |archive| self.archive(archive))?;
            }
        }
        self.handed.wait()?;
        let unpacked = Unpacked { files: self.files.into_inner(), bytes: self.bytes.into_inner() };
        Ok((unpacked, self.control.into_inner().expect("no panic while locked")))
    }

    fn wants(&self, name: &Name) -> bool {
        match self.which {
            Which::All => true,
            Which::Relations => name.segment().is_some(),
            Which::Rest => name.segment().is_none(),
        }
    }

    fn archive(&self, archive: &Archive) -> Result<()> {
        let within = format!(", in {}", archive.name);
        archive.each(&mut |member| {
            match member.is_directory {
                true => self.target.directory(member.name.path())?,
                false if !self.wants(&member.name) => {}
                false => {
                    let read = Reading { reader: member.reader, size: member.size, within: &within };
                    self.file(&member.name, read)?;
                }
            }
            Ok(true)
        })
    }

    fn plain(&self, directory: &Path) -> Result<()> {
        let mut files = Vec::new();
        self.list(directory, "", &mut files)?;
        for tablespace in self.backup.tablespaces() {
            self.list(&tablespace.path, &format!("pg_tblspc/{}/", tablespace.oid), &mut files)?;
        }
        side_by_side(&files, |(path, name)| {
            let flags = OFlags::NOFOLLOW.bits() as i32;
            let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).context("open file", path)?;
            let size = file.metadata().context("stat file", path)?.len();
            self.file(name, Reading { reader: &mut file, size, within: "" })
        })
    }

    /// Makes the directories below one, and lists the files.
    fn list(&self, directory: &Path, above: &str, files: &mut Vec<(PathBuf, Name)>) -> Result<()> {
        for entry in list_dir(directory)? {
            let path = entry.path();
            let file_name = entry.file_name();
            let name = Name::parse(above, file_name.as_encoded_bytes())
                .map_err(|why| BackupError::damaged(format!("{above}{}", file_name.to_string_lossy()), why))?;
            let kind = entry.file_type().context("stat", &path)?;
            // WAL may be elsewhere (pg_basebackup --waldir).
            let is_wal = name.as_bytes() == b"pg_wal" && kind.is_symlink();
            if kind.is_dir() || (is_wal && path.is_dir()) {
                self.target.directory(name.path())?;
                self.list(&path, &format!("{name}/"), files)?;
            } else if kind.is_file() {
                if self.wants(&name) {
                    files.push((path, name));
                }
            } else if !(above == "pg_tblspc/" && kind.is_symlink() && self.is_tablespace(&name)) {
                return Err(BackupError::damaged(
                    name.to_string(),
                    "is neither a file nor a directory, which base backups do not have",
                ));
            }
        }
        Ok(())
    }

    /// Whether it is the link of one that is known.
    fn is_tablespace(&self, name: &Name) -> bool {
        let is = |oid| name.as_bytes() == format!("pg_tblspc/{oid}").as_bytes();
        self.backup.tablespaces().iter().any(|one| is(one.oid))
    }

    /// One file: read, verified, its pages shown, written.
    fn file(&self, name: &Name, read: Reading<'_>) -> Result<()> {
        let size = read.size;
        let damaged = |reason: String| BackupError::damaged(name.to_string(), reason);
        let text = name.to_string();
        let expected = match &self.backup.inventory {
            _ if text == MANIFEST => return Ok(()),
            Some(inventory) => inventory.expect(name)?,
            None => None,
        };
        match expected {
            _ if name.is_incremental() => return Err(crate::inventory::incremental()),
            // Left at the very end of a restore by a stop, and in each backup of the server that has run there since.
            Some(_) if text == MARKER => return Ok(()),
            None if text == MARKER => {
                return Err(damaged("does not belong to it: nobody has finished making it".to_owned()));
            }
            Some(expected) if expected.size != size => {
                return Err(damaged(format!("is of {size} bytes, and {MANIFEST} says {}", expected.size)));
            }
            None if size > MAX_UNVOUCHED => {
                return Err(damaged(format!("is of {size} bytes, which none can be that no manifest vouches for")));
            }
            _ => {}
        }
        self.files.fetch_add(1, Ordering::Relaxed);
        let is_control = text == CONTROL_FILE;
        if is_control || text == "tablespace_map" {
            let most = if is_control { CONTROL_FILE_SIZE as u64 } else { MAX_SMALL };
            if size > most {
                return Err(damaged(format!("is of {size} bytes, and cannot have more than {most}")));
            }
            let mut contents = Vec::new();
            self.copy(name, read, expected, None, &mut |piece| {
                contents.extend_from_slice(piece);
                Ok(())
            })?;
            if !is_control {
                // The links are made by it already, perhaps to elsewhere.
                return match matches!(self.backup.form, Form::Archives(_)) && map(&contents)? != self.backup.tablespaces
                {
                    true => Err(damaged("comes after other files: pg_basebackup's archive begins with it".to_owned())),
                    false => Ok(()),
                };
            }
            let mut control = self.control.lock().expect("no panic while locked");
            return match control.replace(contents).is_some() {
                true => Err(damaged("is there twice".to_owned())),
                false => Ok(()),
            };
        }
        let segment = name.segment();
        if segment.is_some() && size > MAX_UNVOUCHED {
            return Err(damaged(format!("is of {size} bytes, which is more than a segment of a relation has")));
        }
        let path = self.target.root.join(name.path());
        let mut file = self.target.file(name.path())?;
        let is_through =
            self.around_cache && segment.is_some() && size > PIECE as u64 && size.is_multiple_of(BLCKSZ as u64);
        let through = if is_through { Through::open(&path, size)? } else { None };
        let mut next = segment.map_or(0, |segment| segment.segment.saturating_mul(RELSEG_SIZE));
        self.copy(name, read, expected, through.as_ref(), &mut |piece| {
            if let Some(segment) = segment {
                // What is left of a page at the end is none.
                let whole = piece.len() - piece.len() % BLCKSZ;
                self.pages.pass(segment, next, &mut piece[..whole]).map_err(BackupError::Pages)?;
                next = next.saturating_add((whole / BLCKSZ) as BlockNumber);
            }
            match &through {
                Some(_) => Ok(()),
                None => file.write_all(piece).context("write file", &path),
            }
        })?;
        if let Some(segment) = segment {
            self.pages.passed(segment, next).map_err(BackupError::Pages)?;
        }
        start_writeback(&file);
        Ok(())
    }

    /// Hands a file on, piece by piece, once each has gone into its checksum; `write` leaves those to others that go `through`.
    fn copy(
        &self,
        name: &Name,
        read: Reading<'_>,
        expected: Option<&Expected>,
        through: Option<&Through>,
        write: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let damaged = |reason: String| BackupError::damaged(name.to_string(), reason);
        let Reading { reader, size, within } = read;
        let mut sum = expected.map(Expected::sum);
        let mut done = 0;
        while done < size {
            let mut buffer = self.behind.buffer(PIECE_PAGES);
            let wanted = PIECE.min(usize::try_from(size - done).unwrap_or(PIECE));
            let piece = &mut buffer.bytes_mut()[..wanted];
            let mut one = || {
                reader.read_exact(piece).map_err(|error| match error.kind() {
                    io::ErrorKind::UnexpectedEof => damaged(format!("ends before its {size} bytes do{within}")),
                    _ => damaged(format!("cannot be read{within}: {error}")),
                })?;
                if let Some(sum) = &mut sum {
                    sum.update(piece);
                }
                write(piece)
            };
            match (one(), through) {
                (Ok(()), Some(through)) => self.behind.write(through.piece(done, buffer, wanted), &self.handed),
                (result, _) => {
                    self.behind.give_back(buffer);
                    result?;
                }
            }
            if self.handed.has_failed() {
                self.handed.wait()?;
            }
            done += wanted as u64;
            self.bytes.fetch_add(wanted as u64, Ordering::Relaxed);
            (self.progress)(wanted as u64);
        }
        match (expected, sum) {
            (Some(expected), Some(sum)) => expected.compare(sum).map_err(damaged),
            _ => Ok(()),
        }
    }
}
