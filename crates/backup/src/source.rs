//! A base backup as `pg_basebackup` has made it: a directory that is like a data directory, or one with archives.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use walrider_datadir::backup_label::{BackupLabel, MappedTablespace, parse_tablespace_map};
use walrider_datadir::durable::{list_dir, read_file};
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Oid, RELSEG_SIZE, RelFileLocator};

use crate::error::{BackupError, IoContext, Result, quoted};
use crate::inventory::{Inventory, incremental};
use crate::manifest::MANIFEST;
use crate::name::Name;
use crate::packing::Packing;
use crate::remote::{Failed, Input, Remote};
use crate::target::Mapping;

/// The longest `backup_label` or `tablespace_map`.
pub(crate) const MAX_SMALL: u64 = 4 << 20;
/// The longest manifest: of seven million files.
const MAX_MANIFEST: u64 = 1 << 30;

/// A backup, of which nothing but its beginning was read.
#[derive(Debug)]
pub struct Backup {
    pub(crate) form: Form,
    pub(crate) inventory: Option<Inventory>,
    label: BackupLabel,
    pub(crate) tablespaces: Vec<MappedTablespace>,
    /// How many of these, the first ones, `tablespace_map` names. Of the others there are links, which lead to where the backup has them.
    in_map: usize,
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

/// Where it lies.
#[derive(Clone, Debug)]
enum Place {
    Directory(PathBuf),
    Remote(Arc<dyn Remote>),
}

impl Place {
    /// For messages.
    fn shown(&self) -> String {
        match self {
            Place::Directory(path) => quoted(path),
            Place::Remote(remote) => format!("\"{}\"", remote.shown()),
        }
    }

    fn names(&self) -> Result<Vec<String>> {
        match self {
            Place::Directory(path) => {
                Ok(list_dir(path)?.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            }
            Place::Remote(remote) => remote.names().map_err(unreachable),
        }
    }

    fn manifest(&self, names: &[String]) -> Result<Option<Vec<u8>>> {
        match self {
            Place::Directory(path) => Ok(read_file(&path.join(MANIFEST), MAX_MANIFEST)?),
            Place::Remote(_) if !names.iter().any(|name| name == MANIFEST) => Ok(None),
            Place::Remote(remote) => {
                let mut contents = Vec::new();
                let input = remote.open(MANIFEST).map_err(unreachable)?;
                let read = input.take(MAX_MANIFEST + 1).read_to_end(&mut contents).map_err(unreachable)?;
                match read as u64 > MAX_MANIFEST {
                    true => Err(BackupError::damaged(MANIFEST, "is longer than such a file can be")),
                    false => Ok(Some(contents)),
                }
            }
        }
    }
}

/// What is out of reach is not damaged.
fn unreachable(error: io::Error) -> BackupError {
    BackupError::Refused(error.to_string())
}

/// An archive.
#[derive(Debug)]
pub(crate) struct Archive {
    place: Place,
    /// Its own name.
    pub name: String,
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
        Backup::at(Place::Directory(directory.to_owned()), without_manifest)
    }

    /// The same of one that is elsewhere: it is in tar format.
    ///
    /// # Errors
    /// It is none, or lacks something, or is out of reach.
    pub fn open_remote(remote: Arc<dyn Remote>, without_manifest: bool) -> Result<Backup> {
        Backup::at(Place::Remote(remote), without_manifest)
    }

    fn at(place: Place, without_manifest: bool) -> Result<Backup> {
        let shown = place.shown();
        let names = place.names()?;
        let inventory = place.manifest(&names)?.map(|contents| Inventory::parse(&contents)).transpose()?;
        let archives = archives(&place, &names)?;
        let plain = match &place {
            Place::Directory(path) if path.join("PG_VERSION").try_exists().context("stat file", path)? => Some(path),
            _ => None,
        };
        let has_base = archives.contains_key(&Part::Base);
        if inventory.is_none() && !without_manifest && (has_base || plain.is_some()) {
            return Err(BackupError::Refused(format!(
                "{shown} has no {MANIFEST}, so that nobody can tell whether the backup is whole: if it never had one, say \
                 --no-manifest"
            )));
        }
        match (has_base, plain) {
            (true, Some(_)) => {
                Err(BackupError::Refused(format!("{shown} is a data directory, and has a base.tar besides")))
            }
            (true, None) => Backup::of_archives(&shown, &names, archives, inventory),
            (false, Some(directory)) => Backup::plain(directory, inventory),
            (false, None) => Err(BackupError::Refused(match place {
                Place::Directory(_) => format!("{shown} is no base backup: it has neither PG_VERSION nor base.tar"),
                Place::Remote(_) => format!("{shown} is no base backup in tar format: it has no base.tar"),
            })),
        }
    }

    fn of_archives(
        shown: &str,
        names: &[String],
        archives: BTreeMap<Part, Archive>,
        inventory: Option<Inventory>,
    ) -> Result<Backup> {
        if let Some(name) = names.iter().find(|name| *name != MANIFEST && Part::parse(name).is_none()) {
            return Err(BackupError::damaged(name, "does not belong to it: it is neither an archive nor the manifest"));
        }
        let (small, mode) = peek(&archives[&Part::Base])?;
        let label = label(shown, small.get("backup_label"))?;
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
        let in_map = tablespaces.len();
        Ok(Backup { form, inventory, label, tablespaces, in_map, group_access: mode & 0o040 != 0 })
    }

    fn plain(directory: &Path, inventory: Option<Inventory>) -> Result<Backup> {
        let label = label(&quoted(directory), read_file(&directory.join("backup_label"), MAX_SMALL)?.as_ref())?;
        let mut tablespaces = map(&read_file(&directory.join("tablespace_map"), MAX_SMALL)?.unwrap_or_default())?;
        let in_map = tablespaces.len();
        for entry in list_dir(&directory.join("pg_tblspc"))? {
            let oid = entry.file_name().to_str().and_then(|name| name.parse::<Oid>().ok());
            let Some(oid) = oid.filter(|oid| *oid > 0 && entry.path().is_symlink()) else { continue };
            // A server would make the links again, by the map.
            if !tablespaces.iter().any(|one| one.oid == oid) {
                let path = fs::read_link(entry.path()).context("read symbolic link", &entry.path())?;
                tablespaces.push(MappedTablespace { oid, path });
            }
        }
        // One that is missing would be taken for empty.
        if let Some(lacking) = tablespaces.iter().find(|one| !one.path.is_dir()) {
            let what = format!("is to be in {}, which is no directory", quoted(&lacking.path));
            return Err(BackupError::damaged(format!("tablespace {}", lacking.oid), what));
        }
        let mode = fs::metadata(directory).context("stat directory", directory)?.mode();
        let form = Form::Plain(directory.to_owned());
        Ok(Backup { form, inventory, label, tablespaces, in_map, group_access: mode & 0o050 == 0o050 })
    }

    /// Its label.
    pub fn label(&self) -> &BackupLabel {
        &self.label
    }

    /// Its tablespaces, and where they were.
    pub fn tablespaces(&self) -> &[MappedTablespace] {
        &self.tablespaces
    }

    /// Its tablespaces, and where servers are to have them, which archives of a new backup say: where they were, unless `pairs`, from old to
    /// new, say otherwise.
    ///
    /// # Errors
    /// There is none that a pair names; or a link leads to one, perhaps to the backup's own copy, and no pair names it.
    pub fn locations(&self, pairs: &[(PathBuf, PathBuf)]) -> Result<Vec<MappedTablespace>> {
        let mapping = Mapping { pairs: pairs.to_vec(), others: None };
        mapping.check(&self.tablespaces)?;
        let is_named = |one: &MappedTablespace| pairs.iter().any(|(old, _)| *old == one.path);
        if let Some(one) = self.tablespaces[self.in_map..].iter().find(|one| !is_named(one)) {
            let path = one.path.display();
            return Err(BackupError::Refused(format!(
                "the backup has tablespace {} in {}, and does not tell where servers have it, which archives must say: \
                 --tablespace-mapping {path}=DIR, or {path}={path} if it is there",
                one.oid,
                quoted(&one.path)
            )));
        }
        Ok(self.tablespaces.iter().map(|one| MappedTablespace { oid: one.oid, path: mapping.of(one) }).collect())
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

/// The archives among these.
fn archives(place: &Place, names: &[String]) -> Result<BTreeMap<Part, Archive>> {
    let mut archives = BTreeMap::new();
    for name in names {
        let Some((part, packing)) = Part::parse(name) else { continue };
        let archive = Archive { place: place.clone(), name: name.clone(), packing, above: part.above() };
        if let Some(other) = archives.insert(part, archive) {
            return Err(BackupError::Refused(format!(
                "\"{}\" and \"{name}\" in {} are the same archive twice: move one of them away",
                other.name,
                place.shown()
            )));
        }
    }
    Ok(archives)
}

fn label(shown: &str, contents: Option<&Vec<u8>>) -> Result<BackupLabel> {
    let contents =
        contents.ok_or_else(|| BackupError::Refused(format!("{shown} has no backup_label: it is no base backup")))?;
    let text = String::from_utf8_lossy(contents);
    if text.lines().any(|line| line.starts_with("INCREMENTAL FROM ")) {
        return Err(incremental());
    }
    BackupLabel::parse(&text).map_err(|why| BackupError::damaged("backup_label", format!("is damaged: {why}")))
}

pub(crate) fn map(contents: &[u8]) -> Result<Vec<MappedTablespace>> {
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
    pub fn each(&self, take: &mut Take<'_>) -> Result<()> {
        let failed = Failed::default();
        let done = match &self.place {
            Place::Directory(path) => {
                let path = path.join(&self.name);
                self.members(File::open(&path).context("open file", &path)?, take)
            }
            Place::Remote(remote) => self.members(failed.watch(remote.open(&self.name).map_err(unreachable)?), take),
        };
        // It is why there was no more, whatever that was taken for.
        done.map_err(|error| failed.why().map_or(error, BackupError::Refused))
    }

    fn members(&self, input: impl Input + 'static, take: &mut Take<'_>) -> Result<()> {
        match self.packing {
            // What nobody wants is not read.
            Packing::None => {
                let mut reader = Counted { inner: input, ended: false };
                let goes_on = {
                    let mut archive = tar::Archive::new(&mut reader);
                    self.entries(archive.entries_with_seek(), take)?
                };
                if goes_on { self.end(reader) } else { Ok(()) }
            }
            packing => {
                let unpacked = packing.unpack(input).map_err(|error| self.broken(&error))?;
                let mut reader = Counted { inner: unpacked, ended: false };
                let goes_on = {
                    let mut archive = tar::Archive::new(&mut reader);
                    self.entries(archive.entries(), take)?
                };
                if goes_on { self.end(reader) } else { Ok(()) }
            }
        }
    }

    fn broken(&self, error: &io::Error) -> BackupError {
        BackupError::damaged(&self.name, format!("cannot be read: {error}"))
    }

    /// All members, in their order; false: no more are wanted.
    fn entries<R: Read>(&self, entries: io::Result<tar::Entries<'_, R>>, take: &mut Take<'_>) -> Result<bool> {
        let shown = || self.name.clone();
        let broken = |error: io::Error| self.broken(&error);
        // Raw: what would lengthen a name is none that PostgreSQL writes, and could be of any size.
        for entry in entries.map_err(broken)?.raw(true) {
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
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What follows the last member.
    fn end<R: Read>(&self, mut reader: Counted<R>) -> Result<()> {
        if reader.ended {
            return Err(BackupError::damaged(&self.name, "ends too early: it is only a part of the archive"));
        }
        io::copy(&mut reader, &mut io::sink()).map_err(|error| self.broken(&error))?;
        Ok(())
    }
}

/// Is given the members; false: no more are wanted.
type Take<'t> = dyn FnMut(Member<'_>) -> Result<bool> + 't;

/// A member of an archive.
pub(crate) struct Member<'m> {
    pub name: Name,
    pub is_directory: bool,
    pub mode: u32,
    pub size: u64,
    pub reader: &'m mut dyn Read,
}

/// Knows whether the end was seen: an archive has blocks of zeros before.
struct Counted<R> {
    inner: R,
    ended: bool,
}

impl<R: Seek> Seek for Counted<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

impl<R: Read> Read for Counted<R> {
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
