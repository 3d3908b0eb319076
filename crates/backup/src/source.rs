//! A base backup as `pg_basebackup` has made it: a directory that is like a data directory, or one with archives.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use walrider_datadir::backup_label::{BackupLabel, MappedTablespace, parse_tablespace_map};
use walrider_datadir::durable::{list_dir, read_file};
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Oid, RELSEG_SIZE, RelFileLocator};

use crate::error::{BackupError, IoContext, Result, quoted};
use crate::inventory::{Inventory, MANIFEST, incremental};
use crate::name::Name;
use crate::packing::Packing;

/// The longest `backup_label` or `tablespace_map`.
const MAX_SMALL: u64 = 4 << 20;
/// The longest manifest: of seven million files.
const MAX_MANIFEST: u64 = 1 << 30;

/// A backup, of which nothing but its beginning was read.
#[derive(Debug)]
pub struct Backup {
    pub(crate) form: Form,
    pub(crate) inventory: Option<Inventory>,
    label: BackupLabel,
    tablespaces: Vec<MappedTablespace>,
    /// The group may read it, and so what is made of it.
    pub(crate) group_access: bool,
}

/// How it lies there.
#[derive(Debug)]
pub(crate) enum Form {
    /// Like a data directory.
    Plain(PathBuf),
    /// As archives.
    Archives(Vec<Archive>),
}

/// An archive.
#[derive(Debug)]
pub(crate) struct Archive {
    pub path: PathBuf,
    pub packing: Packing,
    /// What precedes the names in it.
    pub above: String,
}

/// Which archive is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Base,
    Tablespace(Oid),
    Wal,
}

impl Part {
    /// By its name.
    fn parse(name: &str) -> Option<(Part, Packing)> {
        let (stem, ending) = name.split_at(name.find(".tar")?);
        let packing = Packing::ALL.into_iter().find(|packing| ending[".tar".len()..] == *packing.ending())?;
        let part = match stem {
            "base" => Part::Base,
            "pg_wal" => Part::Wal,
            oid => Part::Tablespace(oid.parse().ok().filter(|oid: &Oid| *oid > 0 && oid.to_string() == stem)?),
        };
        Some((part, packing))
    }

    fn above(self) -> String {
        match self {
            Part::Base => String::new(),
            Part::Tablespace(oid) => format!("pg_tblspc/{oid}/"),
            Part::Wal => "pg_wal/".to_owned(),
        }
    }
}

/// How long the maps of a backup's relations are.
#[derive(Debug)]
pub struct MapLengths(HashMap<SegmentFile, u64>);

impl MapLengths {
    /// Whole blocks of a map, up to the first file that is not full (`mdnblocks`); 0 if there is none.
    pub fn blocks(&self, rel: RelFileLocator, fork: ForkNumber) -> BlockNumber {
        let mut blocks: BlockNumber = 0;
        for segment in 0.. {
            let size = self.0.get(&SegmentFile { rel, fork, segment }).copied().unwrap_or(0);
            let here = (size / BLCKSZ as u64).min(u64::from(RELSEG_SIZE)) as BlockNumber;
            blocks = blocks.saturating_add(here);
            if here < RELSEG_SIZE {
                break;
            }
        }
        blocks
    }
}

impl Backup {
    /// Finds out what is there. `without_manifest`: one that has no manifest, and so cannot be verified, will do.
    ///
    /// # Errors
    /// It is none, or lacks something.
    pub fn open(directory: &Path, without_manifest: bool) -> Result<Backup> {
        let shown = quoted(directory);
        let manifest = read_file(&directory.join(MANIFEST), MAX_MANIFEST)?;
        let inventory = manifest.map(|contents| Inventory::parse(&contents)).transpose()?;
        if inventory.is_none() && !without_manifest {
            return Err(BackupError::Refused(format!(
                "{shown} has no {MANIFEST}, so that nobody can tell whether the backup is whole: if it never had one, say \
                 --no-manifest"
            )));
        }
        let archives = archives(directory)?;
        let is_plain = directory.join("PG_VERSION").try_exists().context("stat file", directory)?;
        match (archives.contains_key(&Part::Base), is_plain) {
            (true, true) => {
                Err(BackupError::Refused(format!("{shown} is a data directory, and has a base.tar besides")))
            }
            (true, false) => Backup::of_archives(directory, archives, inventory),
            (false, true) => Backup::plain(directory, inventory),
            (false, false) => {
                Err(BackupError::Refused(format!("{shown} is no base backup: it has neither PG_VERSION nor base.tar")))
            }
        }
    }

    fn of_archives(
        directory: &Path,
        archives: BTreeMap<Part, Archive>,
        inventory: Option<Inventory>,
    ) -> Result<Backup> {
        for entry in list_dir(directory)? {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != MANIFEST && Part::parse(&name).is_none() {
                return Err(BackupError::damaged(
                    name,
                    "does not belong to it: it is neither an archive nor the manifest",
                ));
            }
        }
        let (small, mode) = peek(&archives[&Part::Base])?;
        let label = label(directory, small.get("backup_label"))?;
        let tablespaces = map(small.get("tablespace_map").map_or(&[], Vec::as_slice))?;
        let has_archive = |oid| archives.contains_key(&Part::Tablespace(oid));
        if let Some(lacking) = tablespaces.iter().find(|one| !has_archive(one.oid)) {
            let name = format!("{}.tar", lacking.oid);
            return Err(BackupError::damaged(name, "is missing: tablespace_map names that tablespace"));
        }
        for part in archives.keys() {
            // One in pg_tblspc itself is in no map, but its files are in the manifest.
            if let Part::Tablespace(oid) = part
                && !inventory.as_ref().is_some_and(|inventory| inventory.has_below(&part.above()))
                && !tablespaces.iter().any(|one| one.oid == *oid)
            {
                let name = format!("{oid}.tar");
                return Err(BackupError::damaged(name, "does not belong to it: tablespace_map has no such tablespace"));
            }
        }
        let form = Form::Archives(archives.into_values().collect());
        Ok(Backup { form, inventory, label, tablespaces, group_access: mode & 0o040 != 0 })
    }

    fn plain(directory: &Path, inventory: Option<Inventory>) -> Result<Backup> {
        let label = label(directory, read_file(&directory.join("backup_label"), MAX_SMALL)?.as_ref())?;
        let mut tablespaces = map(&read_file(&directory.join("tablespace_map"), MAX_SMALL)?.unwrap_or_default())?;
        for entry in list_dir(&directory.join("pg_tblspc"))? {
            let oid = entry.file_name().to_str().and_then(|name| name.parse::<Oid>().ok());
            let Some(oid) = oid.filter(|oid| *oid > 0 && entry.path().is_symlink()) else { continue };
            // A server would make the links anew, by the map.
            if !tablespaces.iter().any(|one| one.oid == oid) {
                let path = fs::read_link(entry.path()).context("read symbolic link", &entry.path())?;
                tablespaces.push(MappedTablespace { oid, path });
            }
        }
        let mode = fs::metadata(directory).context("stat directory", directory)?.mode();
        let form = Form::Plain(directory.to_owned());
        Ok(Backup { form, inventory, label, tablespaces, group_access: mode & 0o050 == 0o050 })
    }

    /// Its label.
    pub fn label(&self) -> &BackupLabel {
        &self.label
    }

    /// Its tablespaces, and where they were.
    pub fn tablespaces(&self) -> &[MappedTablespace] {
        &self.tablespaces
    }

    /// Whether all that the manifest names was there.
    pub(crate) fn check_complete(&self) -> Result<()> {
        self.inventory.as_ref().map_or(Ok(()), Inventory::check_complete)
    }

    /// Whether packed archives make it costly to look at a part alone.
    pub fn is_gzip(&self) -> bool {
        matches!(&self.form, Form::Archives(archives) if archives.iter().any(|archive| archive.packing == Packing::Gzip))
    }

    /// Whether there is a manifest to verify it by.
    pub fn has_manifest(&self) -> bool {
        self.inventory.is_some()
    }

    /// How long the maps of relations are, as the manifest says; `None` without one.
    pub fn map_lengths(&self) -> Option<MapLengths> {
        Some(MapLengths(self.inventory.as_ref()?.maps()))
    }
}

/// The archives in a directory.
fn archives(directory: &Path) -> Result<BTreeMap<Part, Archive>> {
    let mut archives = BTreeMap::new();
    for entry in list_dir(directory)? {
        let Some((part, packing)) = entry.file_name().to_str().and_then(Part::parse) else { continue };
        let archive = Archive { path: entry.path(), packing, above: part.above() };
        if let Some(other) = archives.insert(part, archive) {
            return Err(BackupError::Refused(format!(
                "{} and {} are the same archive twice: move one of them away",
                quoted(&other.path),
                quoted(&entry.path())
            )));
        }
    }
    Ok(archives)
}

fn label(directory: &Path, contents: Option<&Vec<u8>>) -> Result<BackupLabel> {
    let contents = contents.ok_or_else(|| {
        BackupError::Refused(format!("{} has no backup_label: it is no base backup", quoted(directory)))
    })?;
    let text = String::from_utf8_lossy(contents);
    if text.lines().any(|line| line.starts_with("INCREMENTAL FROM ")) {
        return Err(incremental());
    }
    BackupLabel::parse(&text).map_err(|why| BackupError::damaged("backup_label", format!("is damaged: {why}")))
}

fn map(contents: &[u8]) -> Result<Vec<MappedTablespace>> {
    let map = parse_tablespace_map(contents)
        .map_err(|why| BackupError::damaged("tablespace_map", format!("is damaged: {why}")))?;
    let mut oids: Vec<Oid> = map.iter().map(|one| one.oid).collect();
    oids.sort_unstable();
    oids.dedup();
    if oids.len() < map.len() {
        return Err(BackupError::damaged("tablespace_map", "is damaged: it has a tablespace twice"));
    }
    Ok(map)
}

impl Archive {
    /// Hands all members to `take`: name, type, mode, length, and what reads it. To the end: the trailers of packed ones are checked.
    ///
    /// # Errors
    /// It cannot be read, has what a base backup does not have, or no end; those of `take`, which may stop by returning false.
    pub fn each(&self, take: &mut dyn FnMut(Member<'_>) -> Result<bool>) -> Result<()> {
        let shown = || self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let broken = |error: io::Error| BackupError::damaged(shown(), format!("cannot be read: {error}"));
        let file = File::open(&self.path).context("open file", &self.path)?;
        let mut reader = Counted { inner: self.packing.unpack(file).map_err(broken)?, ended: false };
        let mut archive = tar::Archive::new(&mut reader);
        // Raw: what would lengthen a name is none that PostgreSQL writes, and could be of any size.
        for entry in archive.entries().map_err(broken)?.raw(true) {
            let mut entry = entry.map_err(broken)?;
            let name = entry.path_bytes().into_owned();
            let text = String::from_utf8_lossy(&name).into_owned();
            let name = Name::parse(&self.above, &name)
                .map_err(|why| BackupError::damaged(shown(), format!("has a member \"{text}\", which {why}")))?;
            let kind = entry.header().entry_type();
            let is_directory = kind.is_dir();
            if !is_directory && !kind.is_file() {
                return Err(BackupError::damaged(
                    shown(),
                    format!(
                        "has a member \"{name}\" of type \"{}\", which base backups do not have: there are files and \
                         directories",
                        char::from(kind.as_byte()).escape_default()
                    ),
                ));
            }
            let (mode, size) = (entry.header().mode().map_err(broken)?, entry.size());
            if !take(Member { name, is_directory, mode, size, reader: &mut entry })? {
                return Ok(());
            }
        }
        if reader.ended {
            return Err(BackupError::damaged(shown(), "ends too early: it is only a part of the archive"));
        }
        io::copy(&mut reader, &mut io::sink()).map_err(broken)?;
        Ok(())
    }
}

/// A member of an archive.
pub(crate) struct Member<'m> {
    pub name: Name,
    pub is_directory: bool,
    pub mode: u32,
    pub size: u64,
    pub reader: &'m mut dyn Read,
}

/// Knows whether the end was seen: an archive has blocks of zeros before.
struct Counted {
    inner: Box<dyn Read>,
    ended: bool,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.ended |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

/// What a server sends first: label and map, by name; and the mode of its files.
fn peek(base: &Archive) -> Result<(BTreeMap<String, Vec<u8>>, u32)> {
    let (mut small, mut mode) = (BTreeMap::new(), 0);
    base.each(&mut |member| {
        let name = member.name.to_string();
        if member.is_directory || !["backup_label", "tablespace_map"].contains(&name.as_str()) {
            return Ok(false);
        }
        let mut contents = Vec::new();
        let read = member.reader.take(MAX_SMALL + 1).read_to_end(&mut contents);
        read.map_err(|error| BackupError::damaged(name.as_str(), format!("cannot be read: {error}")))?;
        if contents.len() as u64 != member.size {
            return Err(BackupError::damaged(name, "is longer than such a file can be, or than its archive"));
        }
        mode = member.mode;
        small.insert(name, contents);
        Ok(true)
    })?;
    Ok((small, mode))
}
