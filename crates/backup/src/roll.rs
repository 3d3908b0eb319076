//! From a data directory that replay has left to a backup: what a server would send of it that has stopped there
//! (`perform_base_backup`, `backup/basebackup.c`, PostgreSQL 18), with the WAL that recovery of it needs.
//!
//! It is the backup of a standby at rest: recovery begins at the redo position of its control file, and is consistent at
//! `minRecoveryPoint`, where replay ended. The WAL that comes along ends there, too.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, IoSliceMut, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use walrider_datadir::backup_label::MappedTablespace;
use walrider_datadir::config::{SignalFiles, letting_servers_in};
use walrider_datadir::directories::{named_location, version_dir};
use walrider_datadir::durable::{fsync_dir, list_dir, read_file, unlink, write_file};
use walrider_datadir::open::read_control;
use walrider_datadir::sync::Tree as Synced;
use walrider_datadir::wal_dir::WalDir;
use walrider_layout::control::{CONTROL_FILE, ControlFile, DbState};
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};
use walrider_store::directory::Directory;
use walrider_store::driver::Driver;
use walrider_store::read::ReadWal;
use walrider_store::source::Source;

use crate::checksum::{Checksums, Sum};
use crate::error::{BackupError, IoContext, Result, quoted};
use crate::header::{self, Attributes, Member};
use crate::label::{backup_label, tablespace_map};
use crate::manifest::{MANIFEST, Manifest, ManifestWishes};
use crate::packing::{Packed, Packing};
use crate::tree::{Found, Kind, Tablespace, Tree, tablespaces};

/// Where `pg_wal` is while a new one is made of it.
const OLD_WAL: &str = "walrider.pg_wal";
/// The longest `postgresql.auto.conf`, in bytes.
const MAX_AUTO_CONF: u64 = 64 << 20;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// What a backup says about the recovery of it, which replay overwrites.
#[derive(Clone, Debug)]
pub struct Settings {
    auto_conf: Option<Vec<u8>>,
    signals: SignalFiles,
}

impl Settings {
    /// Those of a directory.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read(data_dir: &Path) -> Result<Settings> {
        let auto_conf = read_file(&data_dir.join("postgresql.auto.conf"), MAX_AUTO_CONF)?;
        let auto_conf = auto_conf.map(|contents| letting_servers_in(&contents).unwrap_or(contents));
        Ok(Settings { auto_conf, signals: SignalFiles::read(data_dir)? })
    }

    fn put_back(&self, data_dir: &Path) -> Result<()> {
        let auto_conf = data_dir.join("postgresql.auto.conf");
        match &self.auto_conf {
            Some(contents) => write_file(&auto_conf, contents)?,
            None => _ = unlink(&auto_conf)?,
        }
        for (name, stays) in [("recovery.signal", self.signals.recovery), ("standby.signal", self.signals.standby)] {
            if !stays {
                unlink(&data_dir.join(name))?;
            }
        }
        Ok(())
    }
}

/// A data directory that is to become a backup. Nobody else is at work on it.
pub struct Rolled<'r> {
    /// Where it is.
    pub data_dir: &'r Path,
    /// Where replay has ended.
    pub end: Lsn,
    /// Where WAL comes from, besides its own `pg_wal`.
    pub wal: Vec<Arc<dyn Driver>>,
    /// What it said before.
    pub settings: Settings,
    /// LABEL.
    pub label: &'r str,
    /// How files are checksummed in the manifest.
    pub checksums: Checksums,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub struct Made {
    /// Where recovery of it begins.
    pub start: Lsn,
    /// The timeline at its end.
    pub timeline: TimelineId,
    /// `full_page_writes` where recovery of it begins.
    pub full_page_writes: bool,
    /// Files in it, without WAL.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
}

impl Rolled<'_> {
    /// Makes the directory itself a backup, as `pg_basebackup` would leave it in plain format. Durable on return; the manifest comes last.
    ///
    /// # Errors
    /// WAL is missing, files cannot be read or written.
    pub fn into_directory(self) -> Result<Made> {
        let prepared = self.prepare()?;
        let (root, control) = (self.data_dir, &prepared.control);
        let mut files = Vec::new();
        let mut belongs = HashSet::new();
        prepared.visit(root, true, &mut |found, above| {
            belongs.insert(found.path.to_owned());
            if matches!(found.kind, Kind::File | Kind::Relation(_)) {
                files.push((found.path.to_owned(), [above.as_bytes(), found.name].concat()));
            }
            Ok(())
        })?;
        belongs.insert(root.join(CONTROL_FILE));
        prune(root, &belongs)?;
        for tablespace in prepared.tablespaces.iter().filter(|one| one.is_link) {
            let directory = root.join("pg_tblspc").join(tablespace.oid.to_string()).join(&prepared.version_dir);
            prune(&directory, &belongs)?;
        }
        write_file(&root.join("backup_label"), backup_label(control, self.label).as_bytes())?;
        for name in ["backup_label", CONTROL_FILE] {
            files.push((root.join(name), name.as_bytes().to_vec()));
        }
        let mut manifest = self.manifest(control)?;
        let mut made = prepared.made();
        let summed: Vec<_> =
            files.par_iter().with_max_len(1).map(|(path, _)| summed(path, self.checksums)).collect::<Result<_>>()?;
        for ((_, name), (attributes, len, sum)) in files.iter().zip(summed) {
            add(&mut manifest, &mut made, name, len, attributes, sum)?;
        }
        Synced::of(root)?.sync()?;
        let mut contents = Vec::new();
        prepared.finish(manifest)?.read_to_end(&mut contents).context("read", root)?;
        write_file(&root.join(MANIFEST), &contents)?;
        Ok(made)
    }

    /// Writes it as archives into a new directory, as `pg_basebackup --format=tar --wal-method=fetch` would; with where tablespaces are
    /// said to be. Durable on return.
    ///
    /// # Errors
    /// WAL is missing, files cannot be read or written.
    pub fn into_archives(self, out: &Path, packing: Packing, locations: &[MappedTablespace]) -> Result<Made> {
        let prepared = self.prepare()?;
        let (root, control) = (self.data_dir, &prepared.control);
        fs::create_dir(out).context("create directory", out)?;
        let mut manifest = self.manifest(control)?;
        let mut made = prepared.made();
        let open = |name: &str| -> Result<(PathBuf, Packed)> {
            let path = out.join(format!("{name}.tar{}", packing.ending()));
            let file = File::create_new(&path).context("create file", &path)?;
            let packed = packing.pack(file).context("write file", &path)?;
            Ok((path, packed))
        };
        for tablespace in &prepared.tablespaces {
            let (path, packed) = open(&tablespace.oid.to_string())?;
            let mut archive = Writer::new(path, packed, &mut manifest, &mut made, self.checksums);
            let above = format!("pg_tblspc/{}/", tablespace.oid);
            prepared.tree(root, false).visit_tablespace(tablespace, &mut |found| archive.add(&found, &above))?;
            archive.finish()?;
        }
        let (path, packed) = open("base")?;
        let mut archive = Writer::new(path, packed, &mut manifest, &mut made, self.checksums);
        let ours = Attributes::of_new_files(root)?;
        archive.contents("backup_label", backup_label(control, self.label).as_bytes(), ours)?;
        let links: Vec<_> = prepared.tablespaces.iter().filter(|one| one.is_link).collect();
        if !links.is_empty() {
            let location = |one: &Tablespace| {
                let known = locations.iter().find(|known| known.oid == one.oid);
                let made = || named_location(Path::new(OsStr::from_bytes(&one.location)));
                let path = known.map(|known| known.path.clone()).or_else(made);
                path.map_or(one.location.clone(), |path| path.into_os_string().into_vec())
            };
            let links: Vec<_> = links.into_iter().map(|one| (one.oid, location(one))).collect();
            let map = tablespace_map(links.iter().map(|(oid, location)| (*oid, location.as_slice())));
            archive.contents("tablespace_map", &map, ours)?;
        }
        prepared.tree(root, false).visit(&mut |found| archive.add(&found, ""))?;
        archive.file(&root.join(CONTROL_FILE), CONTROL_FILE.as_bytes(), "", true)?;
        for directory in ["pg_wal", "pg_wal/archive_status"] {
            for entry in list_dir(&root.join(directory))? {
                if entry.file_type().context("stat", &entry.path())?.is_file() {
                    let name = format!("{directory}/{}", entry.file_name().to_string_lossy());
                    archive.file(&entry.path(), name.as_bytes(), "", false)?;
                }
            }
        }
        archive.finish()?;
        let path = out.join(MANIFEST);
        let mut contents = Vec::new();
        prepared.finish(manifest)?.read_to_end(&mut contents).context("read", root)?;
        write_file(&path, &contents)?;
        fsync_dir(out)?;
        Ok(made)
    }

    fn manifest(&self, control: &ControlFile) -> Result<Manifest> {
        let wishes = ManifestWishes { checksums: self.checksums, force_encode: false };
        Manifest::new(wishes, control.system_identifier, self.data_dir).context("create a file in", self.data_dir)
    }

    /// What both forms need: the directory says what it said before replay, as one that was copied meanwhile, and has the WAL of its recovery.
    fn prepare(&self) -> Result<Prepared> {
        let root = self.data_dir;
        let mut control = read_control(root)?;
        if control.state != DbState::ShutDownInRecovery || control.min_recovery_point != self.end {
            return Err(BackupError::Refused(format!(
                "{} is not where replay has left it: {CONTROL_FILE} says {} at {}, and replay ended at {}",
                quoted(root),
                control.state.name(),
                control.min_recovery_point,
                self.end
            )));
        }
        // After a clean end nobody makes a copy durable that was unpacked by others: recovery does so of one that was copied while it ran, and
        // `backup_label` lets it be (`StartupXLOG`, `SyncDataDirectory`; `InitWalRecovery`).
        control.state = DbState::InArchiveRecovery;
        write_file(&root.join(CONTROL_FILE), &control.to_bytes())?;
        self.settings.put_back(root)?;
        for name in ["backup_label.old", "tablespace_map.old"] {
            unlink(&root.join(name))?;
        }
        let history = self.wal(&control)?;
        let version_dir = version_dir(control.major, control.catalog_version);
        Ok(Prepared { control, history, version_dir, tablespaces: tablespaces(root)? })
    }

    /// Makes a new `pg_wal`: WAL from where recovery begins to the end, zeros behind that, and the histories that lead there.
    fn wal(&self, control: &ControlFile) -> Result<TimelineHistory> {
        let root = self.data_dir;
        let (new, old) = (root.join("pg_wal"), root.join(OLD_WAL));
        fs::rename(&new, &old).context("rename", &new)?;
        let permissions = fs::metadata(&old).context("stat directory", &old)?.permissions();
        for path in [&new, &new.join("archive_status"), &new.join("summaries")] {
            fs::create_dir(path).context("create directory", path)?;
            fs::set_permissions(path, permissions.clone()).context("set permissions of directory", path)?;
        }
        let mut places = self.wal.clone();
        places.push(Arc::new(Directory::new(&old)));
        let size = control.segment_size;
        let source = Source::new(places, size, TimelineHistory::alone(TimelineId(1)));
        let history = source.read_history(control.min_recovery_point_timeline)?;
        source.set_history(history.clone());
        let wal_dir = WalDir::new(root, size);
        for timeline in history.newest_first().map(|entry| entry.timeline) {
            if let Some((_, text)) = source.history_file(timeline)? {
                wal_dir.keep_history(timeline, &text)?;
            }
        }
        let start = control.checkpoint_copy.redo;
        for segment in size.segment_of(start)..=size.segment_of(Lsn(self.end.0 - 1)) {
            let begin = size.start_of(segment);
            let end = self.end.min(size.start_of(segment + 1));
            // Where timelines part, a file of each: recovery reads the newest, pg_verifybackup each up to its end.
            for entry in history.of_segment(segment, size) {
                let end = entry.end.map_or(end, |left| left.min(end));
                if entry.begin.max(begin) < end {
                    let mut reader = WalReader { source: &source, next: begin, end, page: Vec::new(), at: 0 };
                    // A server that is promoted must not archive it again.
                    wal_dir.keep_segment(entry.timeline, segment, &mut io::empty(), &mut reader)?;
                }
            }
        }
        fs::remove_dir_all(&old).context("remove directory", &old)?;
        Ok(history)
    }
}

/// Reads WAL up to a position.
struct WalReader<'s> {
    source: &'s Source,
    next: Lsn,
    end: Lsn,
    page: Vec<u8>,
    at: usize,
}

impl Read for WalReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.page.len() && self.next < self.end {
            let left = (self.end.0 - self.next.0) as usize;
            self.page.resize(PIECE.min(left.next_multiple_of(XLOG_BLCKSZ)), 0);
            let read = self.source.read(self.next, &mut [IoSliceMut::new(&mut self.page)]).map_err(io::Error::other)?;
            if read == 0 {
                let what = self.source.describe(self.next);
                return Err(io::Error::new(io::ErrorKind::NotFound, format!("{what} is missing")));
            }
            self.page.truncate(read.min(left));
            self.at = 0;
            self.next = Lsn(self.next.0 + self.page.len() as u64);
        }
        let len = buffer.len().min(self.page.len() - self.at);
        buffer[..len].copy_from_slice(&self.page[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

/// A directory that has all it needs.
struct Prepared {
    control: ControlFile,
    history: TimelineHistory,
    version_dir: String,
    tablespaces: Vec<Tablespace>,
}

impl Prepared {
    fn tree<'t>(&'t self, root: &'t Path, links: bool) -> Tree<'t> {
        Tree {
            root,
            version_dir: &self.version_dir,
            tablespaces: &self.tablespaces,
            links,
            next_xid: self.control.checkpoint_copy.next_xid,
        }
    }

    /// Everything that belongs into it; with the place of the archive that it would be in.
    fn visit(&self, root: &Path, links: bool, take: &mut dyn FnMut(Found<'_>, &str) -> Result<()>) -> Result<()> {
        let tree = self.tree(root, links);
        for tablespace in &self.tablespaces {
            let above = format!("pg_tblspc/{}/", tablespace.oid);
            tree.visit_tablespace(tablespace, &mut |found| take(found, &above))?;
        }
        tree.visit(&mut |found| take(found, ""))
    }

    fn made(&self) -> Made {
        let timeline = self.control.min_recovery_point_timeline;
        Made {
            start: self.control.checkpoint_copy.redo,
            timeline,
            full_page_writes: self.control.checkpoint_copy.full_page_writes,
            files: 0,
            bytes: 0,
        }
    }

    fn finish(&self, manifest: Manifest) -> Result<impl Read + use<>> {
        let begin = (self.control.checkpoint_copy.timeline, self.control.checkpoint_copy.redo);
        let end = (self.control.min_recovery_point_timeline, self.control.min_recovery_point);
        Ok(manifest.finish(begin, end, &self.history)?.0)
    }
}

fn add(
    manifest: &mut Manifest,
    made: &mut Made,
    name: &[u8],
    len: u64,
    attributes: Attributes,
    sum: Sum,
) -> Result<()> {
    made.files += 1;
    made.bytes += len;
    manifest.add(name, len, attributes.mtime, sum).map_err(crate::manifest::ManifestError::Io)?;
    Ok(())
}

/// A file's length and checksum.
fn summed(path: &Path, checksums: Checksums) -> Result<(Attributes, u64, Sum)> {
    let mut file = File::open(path).context("open file", path)?;
    let attributes = Attributes::of(&file.metadata().context("stat file", path)?);
    let (mut sum, mut len, mut piece) = (Sum::new(checksums), 0, vec![0; PIECE]);
    loop {
        let read = file.read(&mut piece).context("read file", path)?;
        if read == 0 {
            return Ok((attributes, len, sum));
        }
        sum.update(&piece[..read]);
        len += read as u64;
    }
}

/// Removes what does not belong into a backup; of WAL only what is needed is there.
fn prune(directory: &Path, belongs: &HashSet<PathBuf>) -> Result<()> {
    for entry in list_dir(directory)? {
        let path = entry.path();
        let is_dir = entry.file_type().context("stat", &path)?.is_dir();
        match (belongs.contains(&path), is_dir) {
            (true, true) if entry.file_name() != "pg_wal" => prune(&path, belongs)?,
            (true, _) => {}
            (false, true) => fs::remove_dir_all(&path).context("remove directory", &path)?,
            (false, false) => fs::remove_file(&path).context("remove file", &path)?,
        }
    }
    Ok(())
}

/// An archive that is being written.
struct Writer<'w> {
    path: PathBuf,
    out: Packed,
    manifest: &'w mut Manifest,
    made: &'w mut Made,
    checksums: Checksums,
}

impl<'w> Writer<'w> {
    fn new(
        path: PathBuf,
        out: Packed,
        manifest: &'w mut Manifest,
        made: &'w mut Made,
        checksums: Checksums,
    ) -> Writer<'w> {
        Writer { path, out, manifest, made, checksums }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).context("write file", &self.path)
    }

    fn add(&mut self, found: &Found<'_>, above: &str) -> Result<()> {
        let attributes = Attributes::of(found.metadata);
        match &found.kind {
            Kind::Directory => self.write(&header::header(found.name, Member::Directory, attributes)?),
            Kind::Link(target) => self.write(&header::header(found.name, Member::Link(target), attributes)?),
            Kind::File | Kind::Relation(_) => self.file(found.path, found.name, above, true),
            // Nobody has made one there.
            Kind::Special => Ok(()),
        }
    }

    fn contents(&mut self, name: &str, contents: &[u8], attributes: Attributes) -> Result<()> {
        let len = contents.len() as u64;
        self.write(&header::header(name.as_bytes(), Member::File(len), attributes)?)?;
        self.write(contents)?;
        self.write(&[0; header::BLOCK][..header::padding(len)])?;
        let mut sum = Sum::new(self.checksums);
        sum.update(contents);
        add(self.manifest, self.made, name.as_bytes(), len, attributes, sum)
    }

    /// A file; `noted`: in the manifest, by its place above.
    fn file(&mut self, path: &Path, name: &[u8], above: &str, noted: bool) -> Result<()> {
        let mut file = File::open(path).context("open file", path)?;
        let metadata = file.metadata().context("stat file", path)?;
        let (len, attributes) = (metadata.len(), Attributes::of(&metadata));
        self.write(&header::header(name, Member::File(len), attributes)?)?;
        let mut sum = Sum::new(self.checksums);
        let mut piece = vec![0; PIECE.min(len as usize)];
        let mut left = len;
        while left > 0 {
            let part = &mut piece[..PIECE.min(left as usize)];
            file.read_exact(part).context("read file", path)?;
            sum.update(part);
            self.write(part)?;
            left -= part.len() as u64;
        }
        self.write(&[0; header::BLOCK][..header::padding(len)])?;
        match noted {
            true => add(self.manifest, self.made, &[above.as_bytes(), name].concat(), len, attributes, sum),
            false => Ok(()),
        }
    }

    fn finish(mut self) -> Result<()> {
        self.write(&[0; header::END])?;
        self.out.finish().context("write file", &self.path)
    }
}
