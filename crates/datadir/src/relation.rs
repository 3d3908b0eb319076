//! Relation files: where they are, reading and writing runs of pages, extension, truncation, removal
//! (`storage/smgr/md.c`, `common/relpath.c`, PostgreSQL 18).
//!
//! A fork is one sequence of blocks, in segment files of 1 GB. Paths are relative to the data directory.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice};
use std::num::NonZeroU64;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::Errno;
use walrider_layout::{
    BLCKSZ, BlockNumber, DEFAULT_TABLESPACE_OID, ForkNumber, GLOBAL_TABLESPACE_OID, Oid, RELSEG_SIZE, RelFileLocator,
};

use crate::DataDirError;
use crate::descriptors::shares;
use crate::sync::{Writeback, start_writeback};

/// Pages in one system call (`IOV_MAX` is 1,024).
pub const MAX_RUN: usize = 256;

/// A segment file of a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentFile {
    /// The relation.
    pub rel: RelFileLocator,
    /// The fork.
    pub fork: ForkNumber,
    /// Number of the segment, from 0.
    pub segment: u32,
}

/// The directory of a database within a tablespace (`GetDatabasePath`); `version_dir` is the name of the directory
/// that PostgreSQL makes in each tablespace, as in `PG_18_202506291`.
///
/// ```
/// use walrider_datadir::relation::database_dir;
/// assert_eq!(database_dir(1663, 5, "PG_18_202506291").to_str(), Some("base/5"));
/// assert_eq!(database_dir(1664, 0, "PG_18_202506291").to_str(), Some("global"));
/// assert_eq!(database_dir(20000, 5, "PG_18_202506291").to_str(), Some("pg_tblspc/20000/PG_18_202506291/5"));
/// ```
pub fn database_dir(tablespace: Oid, database: Oid, version_dir: &str) -> PathBuf {
    match tablespace {
        GLOBAL_TABLESPACE_OID => PathBuf::from("global"),
        DEFAULT_TABLESPACE_OID => PathBuf::from(format!("base/{database}")),
        _ => PathBuf::from(format!("pg_tblspc/{tablespace}/{version_dir}/{database}")),
    }
}

/// Name of a segment file of a fork (`relpath`, `_mdfd_segpath`).
pub fn file_name(relation: Oid, fork: ForkNumber, segment: u32) -> String {
    match segment {
        0 => format!("{relation}{}", fork.suffix()),
        _ => format!("{relation}{}.{segment}", fork.suffix()),
    }
}

/// The last segment of the longest fork.
const MAX_SEGMENT: u32 = BlockNumber::MAX / RELSEG_SIZE;

/// Relation, fork and segment that a file's name tells of, if it is the name of a relation's file and not that of a temporary
/// one: numbers have no leading zeros (`parse_filename_for_nontemp_relation`, `storage/file/reinit.c`).
///
/// ```
/// use walrider_datadir::relation::parse_file_name;
/// use walrider_layout::ForkNumber;
/// assert_eq!(parse_file_name("16384_fsm.2"), Some((16384, ForkNumber::FreeSpaceMap, 2)));
/// assert_eq!(parse_file_name("pg_filenode.map"), None);
/// ```
pub fn parse_file_name(name: &str) -> Option<(Oid, ForkNumber, u32)> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| number.to_string() == text && *number > 0);
    let (stem, segment) = match name.split_once('.') {
        Some((stem, segment)) => (stem, number(segment).filter(|segment| *segment <= MAX_SEGMENT)?),
        None => (name, 0),
    };
    let (relation, suffix) = stem.split_at(stem.find('_').unwrap_or(stem.len()));
    let fork = ForkNumber::ALL.into_iter().find(|known| known.suffix() == suffix)?;
    Some((number(relation)?, fork, segment))
}

/// How a file is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Access {
    /// To be read and written through the system's cache.
    Cached,
    /// To be written around it.
    Direct,
}

type OpenKey = (SegmentFile, Access);

/// Files that are kept open, so that a run of pages costs one system call.
#[derive(Default)]
struct OpenFiles {
    /// With the time of their last use, on a clock of their own.
    files: HashMap<OpenKey, (Arc<File>, u64)>,
    clock: u64,
}

impl OpenFiles {
    fn get(&mut self, file: OpenKey) -> Option<Arc<File>> {
        let (open, used) = self.files.get_mut(&file)?;
        self.clock += 1;
        *used = self.clock;
        Some(open.clone())
    }

    /// Keeps one more. If there are `most`, the half that was not used for longest is closed: one at a time, each would cost a
    /// look at all of them.
    fn keep(&mut self, file: OpenKey, open: Arc<File>, most: usize) {
        if self.files.len() >= most {
            let mut times: Vec<u64> = self.files.values().map(|&(_, used)| used).collect();
            let middle = times.len() / 2;
            let (_, &mut median, _) = times.select_nth_unstable(middle);
            self.files.retain(|_, &mut (_, used)| used > median);
        }
        self.clock += 1;
        self.files.insert(file, (open, self.clock));
    }
}

/// What is made together with the relations of a database, and is not durable yet. Some of it may be gone by now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Files that are no relations.
    pub files: BTreeSet<PathBuf>,
    /// Directories with new entries.
    pub directories: BTreeSet<PathBuf>,
}

/// The relation files of a data directory. Shared by all threads.
pub struct RelationFiles {
    root: PathBuf,
    version_dir: String,
    /// Mode of new files: 0600, or 0640 where the group may read the directory.
    file_mode: u32,
    dir_mode: u32,
    open: Mutex<OpenFiles>,
    /// Written or made since the last [`RelationFiles::take_unsynced`].
    unsynced: Mutex<HashSet<SegmentFile>>,
    /// Made since the last [`RelationFiles::take_made`].
    made: Mutex<Made>,
    /// Tablespaces whose file systems cannot write around the system's cache.
    no_direct: Mutex<HashSet<Oid>>,
    writeback: OnceLock<Writeback>,
}

impl RelationFiles {
    /// The relation files under the data directory `root`. `group_access`: the group may read what is made.
    pub fn new(root: &Path, version_dir: &str, group_access: bool) -> RelationFiles {
        let (file_mode, dir_mode) = if group_access { (0o640, 0o750) } else { (0o600, 0o700) };
        RelationFiles {
            root: root.to_owned(),
            version_dir: version_dir.to_owned(),
            file_mode,
            dir_mode,
            open: Mutex::default(),
            unsynced: Mutex::default(),
            made: Mutex::default(),
            no_direct: Mutex::default(),
            writeback: OnceLock::new(),
        }
    }

    /// Path of a segment file below the data directory.
    pub fn relative_path(&self, file: SegmentFile) -> PathBuf {
        let directory = database_dir(file.rel.tablespace, file.rel.database, &self.version_dir);
        directory.join(file_name(file.rel.relation, file.fork, file.segment))
    }

    fn path(&self, file: SegmentFile) -> PathBuf {
        self.root.join(self.relative_path(file))
    }

    fn error(&self, operation: &'static str, file: SegmentFile, source: io::Error) -> DataDirError {
        DataDirError::io(operation, self.path(file), source)
    }

    /// Opens a segment file; `None` if it does not exist and is not to be created.
    fn open(&self, file: SegmentFile, create: bool) -> Result<Option<Arc<File>>, DataDirError> {
        if let Some(open) = self.open.lock().expect("no panic while locked").get((file, Access::Cached)) {
            return Ok(Some(open));
        }
        let path = self.path(file);
        let open = || OpenOptions::new().read(true).write(true).create(create).mode(self.file_mode).open(&path);
        let opened = match open() {
            // The directory of a database that a later record drops may be gone (TablespaceCreateDbspace).
            Err(error) if error.kind() == ErrorKind::NotFound && create => {
                let dir = path.parent().expect("a file below the data directory");
                self.make_directory(file.rel.tablespace, dir).and_then(|()| open())
            }
            other => other,
        };
        match opened {
            Ok(opened) => Ok(Some(self.keep(file, Access::Cached, opened))),
            Err(error) if error.kind() == ErrorKind::NotFound && !create => Ok(None),
            Err(error) => Err(self.error("open", file, error)),
        }
    }

    /// Opens a segment file that is there, for once: it may be removed at the same time, and must not be kept then.
    fn open_aside(&self, file: SegmentFile) -> Result<Option<Arc<File>>, DataDirError> {
        if let Some(open) = self.open.lock().expect("no panic while locked").get((file, Access::Cached)) {
            return Ok(Some(open));
        }
        match OpenOptions::new().read(true).write(true).open(self.path(file)) {
            Ok(open) => Ok(Some(Arc::new(open))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error("open", file, error)),
        }
    }

    /// Makes the directory of a database, and what is missing above it, but neither `base` nor `pg_tblspc`: without these
    /// it is no data directory.
    fn make_directory(&self, tablespace: Oid, directory: &Path) -> io::Result<()> {
        let levels = match tablespace {
            GLOBAL_TABLESPACE_OID => 0,
            DEFAULT_TABLESPACE_OID => 1,
            _ => 3,
        };
        let missing: Vec<&Path> = directory.ancestors().take(levels).collect();
        missing.iter().rev().try_for_each(|path| match fs::DirBuilder::new().mode(self.dir_mode).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            other => other,
        })
    }

    /// A file was written, or made, and is not durable yet.
    pub(crate) fn mark_unsynced(&self, file: SegmentFile) {
        self.unsynced.lock().expect("no panic while locked").insert(file);
    }

    /// Files that are no relations were written, and entries of directories made, and are not durable yet.
    pub(crate) fn mark_made<'p>(
        &self,
        files: impl IntoIterator<Item = &'p Path>,
        directories: impl IntoIterator<Item = &'p Path>,
    ) {
        let mut made = self.made.lock().expect("no panic while locked");
        made.files.extend(files.into_iter().map(Path::to_owned));
        made.directories.extend(directories.into_iter().map(Path::to_owned));
    }

    /// Length of a fork in blocks, `None` if it has no file (`mdnblocks`: a segment file that is not full is the
    /// last one; part of a page at the end does not count).
    pub fn blocks(&self, rel: RelFileLocator, fork: ForkNumber) -> Result<Option<BlockNumber>, DataDirError> {
        let mut segment = 0;
        loop {
            let file = SegmentFile { rel, fork, segment };
            let Some(open) = self.open(file, false)? else {
                return Ok((segment > 0).then(|| segment * RELSEG_SIZE));
            };
            let len = open.metadata().map_err(|error| self.error("stat", file, error))?.len();
            let blocks = (len / BLCKSZ as u64).min(u64::from(RELSEG_SIZE)) as u32;
            if blocks < RELSEG_SIZE || segment == MAX_SEGMENT {
                return Ok(Some((segment * RELSEG_SIZE).saturating_add(blocks)));
            }
            segment += 1;
        }
    }

    /// Creates an empty fork if it has no file (`mdcreate` in recovery).
    pub fn create(&self, rel: RelFileLocator, fork: ForkNumber) -> Result<(), DataDirError> {
        let file = SegmentFile { rel, fork, segment: 0 };
        if self.open(file, false)?.is_none() {
            self.open(file, true)?;
            self.mark_unsynced(file);
        }
        Ok(())
    }

    /// Reads pages from `block` on, as many as `buffer` holds, all in one segment file.
    ///
    /// # Errors
    /// Also when the file ends before the last of them.
    pub fn read(
        &self,
        rel: RelFileLocator,
        fork: ForkNumber,
        block: BlockNumber,
        buffer: &mut [u8],
    ) -> Result<(), DataDirError> {
        assert!(block % RELSEG_SIZE + (buffer.len() / BLCKSZ) as u32 <= RELSEG_SIZE, "pages of two files");
        let file = SegmentFile { rel, fork, segment: block / RELSEG_SIZE };
        let missing = || io::Error::new(ErrorKind::NotFound, "the file does not exist");
        let open = self.open(file, false)?.ok_or_else(|| self.error("read", file, missing()))?;
        let offset = u64::from(block % RELSEG_SIZE) * BLCKSZ as u64;
        open.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                let last = u64::from(block) + (buffer.len() / BLCKSZ) as u64 - 1;
                let short = format!("the file ends before the end of block {last}, which should be there");
                self.error("read", file, io::Error::new(ErrorKind::UnexpectedEof, short))
            }
            _ => self.error("read", file, error),
        })
    }

    /// Has the system read pages from `block` on, of one segment file, while other work is done.
    pub fn read_ahead(&self, rel: RelFileLocator, fork: ForkNumber, block: BlockNumber, count: BlockNumber) {
        let file = SegmentFile { rel, fork, segment: block / RELSEG_SIZE };
        if let Ok(Some(open)) = self.open(file, false) {
            let offset = u64::from(block % RELSEG_SIZE) * BLCKSZ as u64;
            let len = NonZeroU64::new(u64::from(count) * BLCKSZ as u64);
            // A hint: the read itself will meet what goes wrong.
            let _ = fadvise(&open, offset, len, Advice::WillNeed);
        }
    }

    /// Writes pages from `block` on, all in one segment file, at most [`MAX_RUN`].
    pub fn write(
        &self,
        rel: RelFileLocator,
        fork: ForkNumber,
        block: BlockNumber,
        buffers: &mut [IoSlice<'_>],
    ) -> Result<(), DataDirError> {
        assert!(
            buffers.len() <= MAX_RUN && block % RELSEG_SIZE + buffers.len() as u32 <= RELSEG_SIZE,
            "pages of two files"
        );
        let file = SegmentFile { rel, fork, segment: block / RELSEG_SIZE };
        let open = self.open(file, true)?.expect("created");
        let written = self.write_to(file, &open, block, buffers);
        // Not before: a thread that syncs files meanwhile takes the mark, and may be done before all is written (register_dirty_segment).
        self.mark_unsynced(file);
        written
    }

    fn write_to(
        &self,
        file: SegmentFile,
        open: &File,
        block: BlockNumber,
        buffers: &mut [IoSlice<'_>],
    ) -> Result<(), DataDirError> {
        let mut offset = u64::from(block % RELSEG_SIZE) * BLCKSZ as u64;
        let mut rest = buffers;
        while !rest.is_empty() {
            match rustix::io::pwritev(open, rest, offset) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.error("write", file, error.into())),
                Ok(0) => {
                    return Err(self.error("write", file, io::Error::new(ErrorKind::StorageFull, "no space left")));
                }
                Ok(put) => {
                    offset += put as u64;
                    IoSlice::advance_slices(&mut rest, put);
                }
            }
        }
        Ok(())
    }

    /// Writes pages from `block` on, all in one segment file, around the system's cache: waits until the device has them. They are
    /// as durable as those of [`RelationFiles::write`]. Where the file system of a tablespace cannot do that, the system is left to
    /// write them.
    ///
    /// Pages next to them must not be written in the other way meanwhile: the system keeps several of its pages together, and takes those
    /// that have changed again for a lost write.
    pub fn write_through(
        &self,
        rel: RelFileLocator,
        fork: ForkNumber,
        block: BlockNumber,
        pages: &[u8],
    ) -> Result<(), DataDirError> {
        let file = SegmentFile { rel, fork, segment: block / RELSEG_SIZE };
        let written = match self.open_direct(file)? {
            Some(open) => self.write_direct(file, &open, block, pages),
            None => Ok(false),
        };
        // Not before, as in RelationFiles::write.
        self.mark_unsynced(file);
        if written? { Ok(()) } else { self.write(rel, fork, block, &mut [IoSlice::new(pages)]) }
    }

    /// Whether the file system did it.
    fn write_direct(
        &self,
        file: SegmentFile,
        open: &File,
        block: BlockNumber,
        pages: &[u8],
    ) -> Result<bool, DataDirError> {
        let offset = u64::from(block % RELSEG_SIZE) * BLCKSZ as u64;
        let mut put = 0;
        while put < pages.len() {
            match rustix::io::pwrite(open, &pages[put..], offset + put as u64) {
                Err(Errno::INTR) => {}
                // It took the flag, and not what is to be written.
                Err(Errno::INVAL) if put == 0 => {
                    self.no_direct(file);
                    return Ok(false);
                }
                Err(error) => return Err(self.error("write", file, error.into())),
                Ok(0) => {
                    return Err(self.error("write", file, io::Error::new(ErrorKind::StorageFull, "no space left")));
                }
                Ok(done) => put += done,
            }
        }
        Ok(true)
    }

    /// Opens a segment file so that writes go around the system's cache; `None` where that cannot be done.
    fn open_direct(&self, file: SegmentFile) -> Result<Option<Arc<File>>, DataDirError> {
        if self.no_direct.lock().expect("no panic while locked").contains(&file.rel.tablespace) {
            return Ok(None);
        }
        if let Some(open) = self.open.lock().expect("no panic while locked").get((file, Access::Direct)) {
            return Ok(Some(open));
        }
        // Makes what is missing.
        self.open(file, true)?;
        match open_direct(&self.path(file)) {
            Ok(Some(open)) => Ok(Some(self.keep(file, Access::Direct, open))),
            Ok(None) => {
                self.no_direct(file);
                Ok(None)
            }
            Err(error) => Err(self.error("open", file, error)),
        }
    }

    fn no_direct(&self, file: SegmentFile) {
        self.no_direct.lock().expect("no panic while locked").insert(file.rel.tablespace);
    }

    fn keep(&self, file: SegmentFile, access: Access, open: File) -> Arc<File> {
        let open = Arc::new(open);
        self.open.lock().expect("no panic while locked").keep((file, access), open.clone(), shares().relations);
        open
    }

    /// Makes a fork at least `blocks` long; new pages read as zeros.
    pub fn extend(&self, rel: RelFileLocator, fork: ForkNumber, blocks: BlockNumber) -> Result<(), DataDirError> {
        let last = blocks.saturating_sub(1) / RELSEG_SIZE;
        for segment in 0..=last {
            let file = SegmentFile { rel, fork, segment };
            let wanted = if segment < last { RELSEG_SIZE } else { blocks - segment * RELSEG_SIZE };
            let wanted = u64::from(wanted) * BLCKSZ as u64;
            let open = self.open(file, true)?.expect("created");
            let len = open.metadata().map_err(|error| self.error("stat", file, error))?.len();
            if len < wanted {
                open.set_len(wanted).map_err(|error| self.error("extend", file, error))?;
                self.mark_unsynced(file);
            }
        }
        Ok(())
    }

    /// Cuts a fork to `blocks`. Segment files behind stay, empty, as in PostgreSQL (`mdtruncate`: other processes
    /// might have them open).
    ///
    /// Those behind one that is not full are cut, too, although they do not count: an online backup may have copied them before the primary
    /// cut them, and what is in front of them after that. They would count again as soon as the fork has grown up to them. And the last one
    /// is cut first: a crash in between leaves a fork that is too long, which the next replay cuts.
    pub fn truncate(&self, rel: RelFileLocator, fork: ForkNumber, blocks: BlockNumber) -> Result<(), DataDirError> {
        let of = |segment| SegmentFile { rel, fork, segment };
        let is_there = |file| self.path(file).try_exists().map_err(|error| self.error("stat", file, error));
        let mut segments = 0;
        while segments <= MAX_SEGMENT && is_there(of(segments))? {
            segments += 1;
        }
        for segment in (0..segments).rev() {
            let file = of(segment);
            let Some(open) = self.open(file, false)? else { continue };
            let keep = blocks.saturating_sub(segment * RELSEG_SIZE).min(RELSEG_SIZE);
            let len = open.metadata().map_err(|error| self.error("stat", file, error))?.len();
            let keep = u64::from(keep) * BLCKSZ as u64;
            if len > keep {
                open.set_len(keep).map_err(|error| self.error("truncate", file, error))?;
                self.mark_unsynced(file);
            }
        }
        Ok(())
    }

    /// Removes all files of a relation (`mdunlink` in recovery; the first segment goes first).
    pub fn unlink(&self, rel: RelFileLocator) -> Result<(), DataDirError> {
        self.forget(|file| file.rel == rel);
        for fork in ForkNumber::ALL {
            for segment in 0.. {
                let file = SegmentFile { rel, fork, segment };
                match fs::remove_file(self.path(file)) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::NotFound => break,
                    Err(error) => return Err(self.error("remove", file, error)),
                }
            }
        }
        Ok(())
    }

    /// Closes the files that `which` picks and forgets that they want to be synced, because they were removed.
    pub fn forget(&self, which: impl Fn(&SegmentFile) -> bool) {
        self.open.lock().expect("no panic while locked").files.retain(|(file, _), _| !which(file));
        self.unsynced.lock().expect("no panic while locked").retain(|file| !which(file));
    }

    /// The files that were written or made and not synced, in order; they count as synced from now on.
    pub fn take_unsynced(&self) -> Vec<SegmentFile> {
        let mut files: Vec<_> = self.unsynced.lock().expect("no panic while locked").drain().collect();
        files.sort_unstable();
        files
    }

    /// What else was made and is not durable; it counts as durable from now on.
    pub fn take_made(&self) -> Made {
        std::mem::take(&mut self.made.lock().expect("no panic while locked"))
    }

    /// Lets the system begin to write a file that [`RelationFiles::sync`] is to wait for.
    pub fn start_writeback(&self, file: SegmentFile) {
        if let Ok(Some(open)) = self.open_aside(file) {
            start_writeback(&open);
        }
    }

    /// The same beside all else: where the device has enough to do, the system waits for it.
    pub fn start_writeback_aside(&self, file: SegmentFile) {
        if let Ok(Some(open)) = self.open_aside(file) {
            self.writeback.get_or_init(Writeback::start).begin(open);
        }
    }

    /// Makes a file durable, and its directory's entry for it; one that is gone by now needs nothing.
    pub fn sync(&self, file: SegmentFile) -> Result<(), DataDirError> {
        match self.open_aside(file)? {
            Some(open) => open.sync_all().map_err(|error| self.error("fsync", file, error)),
            None => Ok(()),
        }
    }

    /// Absolute path of the directory that holds a file.
    pub fn directory(&self, file: SegmentFile) -> PathBuf {
        self.path(file).parent().expect("a file below the data directory").to_owned()
    }
}

/// Opens a file that is there so that writes go around the system's cache; `None` where its file system cannot do that.
///
/// # Errors
/// When it cannot be opened in any way.
pub fn open_direct(path: &Path) -> io::Result<Option<File>> {
    match OpenOptions::new().write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "PG_18_202506291";

    fn locator(tablespace: Oid) -> RelFileLocator {
        RelFileLocator { tablespace, database: 5, relation: 16384 }
    }

    #[test]
    fn names_of_relation_files() {
        assert_eq!(parse_file_name("16384"), Some((16384, ForkNumber::Main, 0)));
        assert_eq!(parse_file_name("16384_init"), Some((16384, ForkNumber::Init, 0)));
        for name in [
            "",
            "0",
            "017",
            "4294967296",
            "t3_16384",
            "1_main",
            "1_x",
            "1.",
            "1.0",
            "1.01",
            "1.2.3",
            "1.32768",
            "1_init_vm",
        ] {
            assert_eq!(parse_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn nothing_is_made_above_base_and_pg_tblspc() {
        for (tablespace, top) in
            [(DEFAULT_TABLESPACE_OID, "base"), (20_000, "pg_tblspc"), (GLOBAL_TABLESPACE_OID, "global")]
        {
            let dir = tempfile::tempdir().unwrap();
            let files = RelationFiles::new(dir.path(), VERSION, false);
            let error = files.create(locator(tablespace), ForkNumber::Main).unwrap_err().to_string();
            assert!(error.starts_with("could not open") && error.contains(top), "{error}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
            fs::create_dir(dir.path().join(top)).unwrap();
            files.create(locator(tablespace), ForkNumber::Main).unwrap();
            let file = SegmentFile { rel: locator(tablespace), fork: ForkNumber::Main, segment: 0 };
            assert!(dir.path().join(files.relative_path(file)).exists());
        }
    }

    /// Around the cache or, where the system refuses that, as at an address that no device likes, through it.
    #[test]
    fn written_through_is_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("base")).unwrap();
        let pages: Vec<u8> = (0..5 * BLCKSZ + 4096 + 1).map(|at| (at / 100) as u8).collect();
        let aligned = pages.as_ptr().align_offset(4096);
        for odd in [0, 1] {
            let files = RelationFiles::new(dir.path(), VERSION, false);
            let rel = locator(DEFAULT_TABLESPACE_OID);
            let pages = &pages[aligned + odd..][..4 * BLCKSZ];
            files.write_through(rel, ForkNumber::Main, 3, pages).unwrap();
            files.write_through(rel, ForkNumber::Main, 1, &pages[BLCKSZ..3 * BLCKSZ]).unwrap();
            let mut read = vec![0; 6 * BLCKSZ];
            files.read(rel, ForkNumber::Main, 1, &mut read).unwrap();
            assert_eq!(read[..2 * BLCKSZ], pages[BLCKSZ..3 * BLCKSZ]);
            assert_eq!(read[2 * BLCKSZ..], *pages);
            assert_eq!(files.blocks(rel, ForkNumber::Main).unwrap(), Some(7));
            assert_eq!(files.take_unsynced().len(), 1);
            files.truncate(rel, ForkNumber::Main, 0).unwrap();
        }
    }

    #[test]
    fn what_was_used_last_stays_open() {
        let file = |number| (SegmentFile { rel: locator(number), fork: ForkNumber::Main, segment: 0 }, Access::Cached);
        let mut open = OpenFiles::default();
        let any = Arc::new(tempfile::tempfile().unwrap());
        for number in 0..1000 {
            open.keep(file(number), any.clone(), 8);
            assert!(open.files.len() <= 8);
            assert!(open.get(file(0)).is_some() && open.get(file(number)).is_some());
        }
    }
}
