//! What an archive does: it takes files, once and for good, and gives them back as they were.

use std::sync::Mutex;
use std::time::Duration;

use crate::check::{self, SegmentFacts};
use crate::directory::Directory;
use crate::error::{ArchiveError, Result};
use crate::frame::{HEADER_SIZE, MAX_CONTENTS, Packing, checksum, pack, unpack};
use crate::name::{Kind, WAL, WalName};
use crate::objects::Objects;
use crate::place::Place;

/// Longest file of an archive, in bytes. Packing may add something to a segment that does not pack.
pub const MAX_FILE: u64 = MAX_CONTENTS + (16 << 20) + HEADER_SIZE as u64;

/// Where the objects of an archive lie. Keys are relative to its place.
pub trait Backend: Send + Sync {
    /// All of an object; `None`: it is not there. `found` is called once it is known to be there, before it is read.
    ///
    /// # Errors
    /// When that cannot be told, or it cannot be read.
    fn read(&self, key: &str, found: &mut dyn FnMut()) -> Result<Option<Vec<u8>>>;

    /// Makes an object, durable on return. `false`: one of this name is there, and is as it was.
    ///
    /// # Errors
    /// When it is not known to be there.
    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool>;

    /// Returns when an object that is there is durable.
    ///
    /// # Errors
    /// When that fails.
    fn settle(&self, key: &str) -> Result<()>;

    /// The first of these that is there.
    ///
    /// # Errors
    /// When that cannot be told.
    fn which(&self, keys: &[String]) -> Result<Option<String>>;

    /// The same, and whether anything was ever put there if none is.
    ///
    /// # Errors
    /// When that cannot be told.
    fn look(&self, keys: &[String]) -> Result<Look>;

    /// Names of what is below `wal`, directories among it.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn directories(&self) -> Result<Vec<String>>;

    /// Names in such a directory, sorted.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn list(&self, directory: &str) -> Result<Vec<String>>;

    /// Removes objects, in this order; those that are not there are none the less gone.
    ///
    /// # Errors
    /// When one cannot be removed.
    fn remove(&self, keys: &[String]) -> Result<()>;

    /// What messages call an object.
    fn shown(&self, key: &str) -> String;
}

/// What is there of some objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// This one.
    There(String),
    /// None of them.
    Missing,
    /// None of them, nor any other.
    Empty,
}

/// What came of putting a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is archived.
    Done,
    /// It was archived before.
    Again,
}

/// A file that was fetched, checked.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its contents.
    pub contents: Vec<u8>,
    /// Their CRC-32C.
    pub checksum: u32,
    /// What it says of itself, if it is a segment.
    pub facts: Option<SegmentFacts>,
}

impl Fetched {
    /// Refuses a segment of another cluster.
    ///
    /// # Errors
    /// [`ArchiveError::Refused`] if it is one.
    pub fn is_of(&self, system_identifier: u64, name: &WalName) -> Result<()> {
        match self.facts {
            Some(facts) if facts.system_identifier != system_identifier => Err(ArchiveError::Refused(format!(
                "\"{}\" in the archive is of another cluster: its system identifier is {}, and that of the data directory is \
                 {system_identifier}",
                name.as_str(),
                facts.system_identifier,
            ))),
            _ => Ok(()),
        }
    }
}

/// An archive.
pub struct Archive {
    backend: Box<dyn Backend>,
    /// Ending of the segment that was fetched last: the others are likely to have the same.
    likely: Mutex<Option<String>>,
}

impl Archive {
    /// The one at a place. Nothing is asked of it yet.
    ///
    /// # Errors
    /// When the environment lacks something, or has something wrong.
    pub fn open(place: &Place) -> Result<Archive> {
        Archive::answering_within(place, None)
    }

    /// One that counts as out of reach if it does not begin to answer in that time.
    ///
    /// # Errors
    /// As [`Archive::open`].
    pub fn answering_within(place: &Place, time: Option<Duration>) -> Result<Archive> {
        Ok(Archive::new(match (place, time) {
            (Place::Directory(path), _) => Box::new(Directory::new(path)),
            (Place::Objects(url), None) => Box::new(Objects::open(url)?),
            (Place::Objects(url), Some(time)) => Box::new(Objects::open(url)?.answering_within(time)),
        }))
    }

    /// One whose objects lie there.
    pub fn new(backend: Box<dyn Backend>) -> Archive {
        Archive { backend, likely: Mutex::default() }
    }

    /// Archives a file; it is durable on return.
    ///
    /// # Errors
    /// When its contents are not what its name says, when the archive has others under this name, or when it cannot be written.
    pub fn put(&self, name: &WalName, contents: &[u8], packing: Packing) -> Result<Put> {
        if name.is_wal() {
            check::segment(name, contents)
                .map_err(|why| ArchiveError::Refused(format!("\"{}\" is not archived: {why}", name.as_str())))?;
        }
        // It may be there packed in another way.
        let packing = if name.is_wal() { packing } else { Packing::Raw };
        let key = name.key(packing);
        let others: Vec<String> = name.keys().into_iter().filter(|other| *other != key).collect();
        if let Some(other) = self.backend.which(&others)? {
            return self.compare(&other, contents);
        }
        let packed = pack(contents, packing)
            .map_err(|error| ArchiveError::Refused(format!("could not pack \"{}\": {error}", name.as_str())))?;
        match self.backend.create(&key, &packed)? {
            true => Ok(Put::Done),
            false => self.compare(&key, contents),
        }
    }

    /// Whether what is there has these contents: `archive_command` is repeated for what was archived right before a crash.
    fn compare(&self, key: &str, contents: &[u8]) -> Result<Put> {
        let object = || self.backend.shown(key);
        let there = self.backend.read(key, &mut || ())?;
        let there = there.ok_or_else(|| ArchiveError::Refused(format!("\"{}\" was there, and is gone", object())))?;
        let there = unpack(&there).map_err(|reason| ArchiveError::Damaged { object: object(), reason })?;
        if there != contents {
            return Err(ArchiveError::Different { object: object() });
        }
        self.backend.settle(key)?;
        Ok(Put::Again)
    }

    /// Fetches a file; `None`: the archive does not have it. `found` is called once it is known to be there.
    ///
    /// # Errors
    /// When that cannot be told, when it is damaged, or is not what its name says. An archive that has nothing at all is an error,
    /// too: it is more likely that its name is wrong, or that nothing is mounted there, than that WAL ends before its beginning.
    pub fn get(&self, name: &WalName, found: &mut dyn FnMut()) -> Result<Option<Fetched>> {
        let mut keys = name.keys();
        if let Some(ending) = &*self.likely.lock().expect("no panic while locked") {
            // Stable: what is not likely stays in its order.
            keys.sort_by_key(|key| !key.ends_with(ending));
        }
        let Some((likely, others)) = keys.split_first() else { return Ok(None) };
        if let Some(bytes) = self.backend.read(likely, found)? {
            return self.check(name, likely, &bytes).map(Some);
        }
        match self.backend.look(others)? {
            Look::Missing => Ok(None),
            Look::There(other) => match self.backend.read(&other, found)? {
                Some(bytes) => {
                    let ending = other.rsplit_once('.').map(|(_, ending)| format!(".{ending}"));
                    *self.likely.lock().expect("no panic while locked") = ending;
                    self.check(name, &other, &bytes).map(Some)
                }
                None => Ok(None),
            },
            Look::Empty => Err(ArchiveError::Empty { place: self.backend.shown(WAL) }),
        }
    }

    fn check(&self, name: &WalName, key: &str, bytes: &[u8]) -> Result<Fetched> {
        let damaged = |reason| ArchiveError::Damaged { object: self.backend.shown(key), reason };
        let contents = unpack(bytes).map_err(damaged)?;
        let facts = name.is_wal().then(|| check::segment(name, &contents)).transpose().map_err(damaged)?;
        Ok(Fetched { checksum: checksum(&contents), contents, facts })
    }

    /// What a segment says of itself, any that is there; `None`: there is none.
    ///
    /// # Errors
    /// When they cannot be listed, or it is damaged.
    pub fn facts(&self) -> Result<Option<SegmentFacts>> {
        let timelines = self.backend.directories()?.into_iter().filter(|name| is_timeline(name));
        for directory in timelines {
            let objects = self.backend.list(&directory)?;
            let mut names = objects.iter().filter_map(|object| WalName::parse(object.get(..24)?));
            // The last: it may not be removed meanwhile.
            if let Some(fetched) = names.next_back().and_then(|name| self.get(&name, &mut || ()).transpose()) {
                return Ok(fetched?.facts);
            }
        }
        Ok(None)
    }

    /// Removes segments and backup histories before a segment, on all timelines, as `pg_archivecleanup` does; history files
    /// stay, which are small. Says how many objects are removed, or would be.
    ///
    /// # Errors
    /// When they cannot be listed or removed; those that were are gone.
    pub fn expire(&self, before: &WalName, dry_run: bool) -> Result<u64> {
        if before.kind() != Kind::Segment {
            return Err(ArchiveError::Refused(format!("\"{}\" is not the name of a segment", before.as_str())));
        }
        let mut removed = 0;
        for directory in self.backend.directories()?.into_iter().filter(|name| is_timeline(name)) {
            // Oldest first, so that what is left has no gap in it.
            let old: Vec<String> = self
                .backend
                .list(&directory)?
                .into_iter()
                .filter(|name| is_object_of(name, &directory) && name[8..24] < before.as_str()[8..24])
                .map(|name| format!("{WAL}/{directory}/{name}"))
                .collect();
            removed += old.len() as u64;
            if !dry_run {
                self.backend.remove(&old)?;
            }
        }
        Ok(removed)
    }
}

/// Whether a directory is one of a timeline.
pub(crate) fn is_timeline(directory: &str) -> bool {
    WalName::parse(&format!("{directory}.history")).is_some()
}

/// Whether an object's name is one that this timeline's directory has.
fn is_object_of(object: &str, directory: &str) -> bool {
    let endings = Packing::ALL.map(Packing::ending);
    let name = endings.iter().find_map(|ending| object.strip_suffix(ending)?.strip_suffix('.')).unwrap_or(object);
    object.starts_with(directory) && WalName::parse(name).is_some_and(|name| !matches!(name.kind(), Kind::History(_)))
}
