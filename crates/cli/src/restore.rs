//! `walrider restore`: a base backup unpacked, and rolled forward.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use std::{fs, io};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use walrider_archive::Place;
use walrider_archive::ranges::Files;
use walrider_backup::remote::{Input, Remote};
use walrider_backup::unpack::{Begun, Destination, Pages, PagesError, Unchanged, Unpacked, begin, unpack};
use walrider_backup::{Backup, BackupError, MapLengths, Mapping};
use walrider_datadir::config::is_half_restored;
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};
use walrider_replay::base::{Base, PassPages};
use walrider_replay::error::ReplayError;

use crate::failure::{Exit, Failure, note};
use crate::replay::{RecoveryArgs, ResourceArgs, tell, to_json};
use crate::wal::named_archive;

/// Make a data directory of a base backup, and roll it forward through WAL
///
/// The backup is one of pg_basebackup: a directory in plain format, or with base.tar and the archives of its tablespaces, each as it is
/// or as .gz, .lz4 or .zst, and backup_manifest beside them; or these archives below a prefix of an object store, read with --fetch-jobs
/// requests at once. Every file is verified by the manifest on its way. DIR must be empty or
/// absent; until the backup is there, whole and durable, no server starts on it, and --start-over removes what an interrupted run has left.
///
/// Replay follows, and hands the directory over, as walrider replay does, with the same options. Should it fail, or be interrupted, when
/// the backup is there, go on with walrider replay. A message says which it is.
#[derive(Args)]
pub struct RestoreArgs {
    /// The new data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    #[command(flatten)]
    unpack: UnpackArgs,
    #[command(flatten)]
    recovery: RecoveryArgs,
}

/// What is unpacked.
#[derive(Args)]
pub struct UnpackArgs {
    /// Directory with the base backup; or, of one in tar format, s3://BUCKET/PREFIX, gs:// or az://
    #[arg(long, value_name = "SOURCE")]
    backup: PathBuf,
    /// Put a tablespace that was at OLD to NEW; may be given several times. A backslash protects a = in a path
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_mapping)]
    tablespace_mapping: Vec<(PathBuf, PathBuf)>,
    /// Take a backup that has no backup_manifest, so that nothing can be verified
    #[arg(long)]
    no_manifest: bool,
    /// Remove what an interrupted run has left in the new directories, and begin again
    #[arg(long)]
    start_over: bool,
}

/// As `pg_basebackup` reads it (`tablespace_list_append`, `pg_basebackup.c`).
fn parse_mapping(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (mut parts, mut protected) = (vec![String::new()], false);
    for letter in text.chars() {
        match letter {
            '=' if !protected => parts.push(String::new()),
            '\\' if !protected => protected = true,
            _ => {
                let part = parts.last_mut().expect("there is always one");
                if protected && letter != '=' {
                    part.push('\\');
                }
                part.push(letter);
                protected = false;
            }
        }
    }
    match &parts[..] {
        [old, new] if old.starts_with('/') && new.starts_with('/') => {
            // Written in other words, it is the same place.
            let plain = |path: &String| Path::new(path).components().collect();
            Ok((plain(old), plain(new)))
        }
        _ => Err("expected OLD=NEW, two absolute paths".into()),
    }
}

/// A backup that was unpacked.
pub struct Restored {
    /// What it has.
    pub backup: Arc<Backup>,
    /// How much that was.
    pub unpacked: Unpacked,
    /// How long it took.
    pub time: Duration,
}

impl Restored {
    /// As an object.
    pub fn to_json(&self) -> Value {
        json!({
            "files": self.unpacked.files,
            "bytes": self.unpacked.bytes,
            "verified": self.backup.has_manifest(),
            "unpack_seconds": self.time.as_secs_f64(),
        })
    }
}

/// A backup whose relations come into the directory during replay, which changes them on their way; or have come before.
pub struct Unpacking {
    backup: Arc<Backup>,
    /// Of what is not there yet.
    maps: Option<MapLengths>,
    begun: Mutex<Option<Begun>>,
    bar: ProgressBar,
    done: OnceLock<(Unpacked, Duration)>,
}

impl Base for Unpacking {
    fn bytes(&self) -> u64 {
        self.begun.lock().expect("no panic while locked").as_ref().map_or(0, Begun::relation_bytes)
    }

    fn unpack(&self, pages: &dyn PassPages) -> Result<(), ReplayError> {
        let started = Instant::now();
        let begun = self.begun.lock().expect("no panic while locked").take().expect("once");
        let unpacked = begun.relations(&Passed(pages), &|bytes| self.bar.inc(bytes));
        self.bar.finish_and_clear();
        let unpacked = unpacked.map_err(|error| match error {
            BackupError::Pages(error) => match error.downcast() {
                Ok(error) => *error,
                Err(source) => ReplayError::Base { source, damaged: false },
            },
            error => ReplayError::Base { damaged: error.is_corruption(), source: Box::new(error) },
        })?;
        self.done.set((unpacked, started.elapsed())).expect("once");
        Ok(())
    }

    fn blocks(&self, rel: RelFileLocator, fork: ForkNumber) -> Option<BlockNumber> {
        match fork {
            ForkNumber::FreeSpaceMap | ForkNumber::VisibilityMap => Some(self.maps.as_ref()?.blocks(rel, fork)),
            ForkNumber::Main | ForkNumber::Init => None,
        }
    }
}

/// Pages as the backup has them, for replay.
struct Passed<'p>(&'p dyn PassPages);

impl Pages for Passed<'_> {
    fn pass(&self, file: SegmentFile, first: BlockNumber, pages: &mut [u8]) -> Result<(), PagesError> {
        Ok(self.0.pass(file, first, pages)?)
    }

    fn passed(&self, file: SegmentFile, end: BlockNumber) -> Result<(), PagesError> {
        self.0.passed(file, end);
        Ok(())
    }
}

impl Unpacking {
    /// What replay must have come into the directory; `None`: all of it is there.
    pub fn base(self: &Arc<Unpacking>) -> Option<Arc<dyn Base>> {
        let is_begun = self.begun.lock().expect("no panic while locked").is_some();
        is_begun.then(|| self.clone() as Arc<dyn Base>)
    }

    /// What was unpacked, when replay has ended.
    pub fn restored(&self) -> Restored {
        let (unpacked, time) = self.done.get().copied().unwrap_or_default();
        let (seconds, Unpacked { files, bytes }) = (time.as_secs_f64(), unpacked);
        let verified = if self.backup.has_manifest() { "verified" } else { "not verified" };
        note(format!(
            "backup unpacked: {files} files, {:.1} MB, {verified}, {seconds:.2} s ({:.0} MB/s)",
            bytes as f64 / 1e6,
            bytes as f64 / 1e6 / seconds.max(1e-6)
        ));
        Restored { backup: self.backup.clone(), unpacked, time }
    }
}

/// A backup in an object store.
struct Objects {
    shown: String,
    files: Files,
}

impl Remote for Objects {
    fn names(&self) -> io::Result<Vec<String>> {
        self.files.names().map_err(io::Error::other)
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Input>> {
        Ok(Box::new(self.files.read(name).map_err(io::Error::other)?))
    }

    fn shown(&self) -> String {
        self.shown.clone()
    }
}

impl UnpackArgs {
    /// Whether it begins again.
    pub fn starts_over(&self) -> bool {
        self.start_over
    }

    /// Where tablespaces are to be, from old to new.
    pub fn tablespace_mapping(&self) -> &[(PathBuf, PathBuf)] {
        &self.tablespace_mapping
    }

    /// Unpacks it into a directory, but for the relations, which replay is to have come there ([`Unpacking::base`]). All tablespaces go below
    /// `others`, where archives are made of them; without, where they are mapped to, or were.
    pub fn begin(
        &self,
        data_dir: &Path,
        others: Option<PathBuf>,
        resources: &ResourceArgs,
    ) -> Result<Arc<Unpacking>, Failure> {
        let begun = self.open(resources.fetch_jobs()).and_then(|backup| {
            let mut pairs = self.tablespace_mapping.clone();
            if others.is_some() {
                backup.locations(&pairs)?;
                pairs.clear();
            }
            let mapping = Mapping { pairs, others };
            let (data_dir, memory_bytes) = (data_dir.to_owned(), resources.memory_bytes());
            begun(backup, &Destination { data_dir, mapping, start_over: self.start_over, memory_bytes })
        });
        let unpacking = begun.map_err(|error| {
            let failure = Failure::new(if error.is_corruption() { Exit::Damaged } else { Exit::Refused }, &error);
            // What it refuses has not to do with what is left, or says it itself.
            if matches!(error, BackupError::Refused(_)) { failure } else { what_is_left(failure, data_dir, None) }
        })?;
        Ok(Arc::new(unpacking))
    }

    /// A directory in the backup would become part of it, while that is read.
    pub fn refuse_in_backup(&self, new: &Path) -> Result<(), Failure> {
        let (Ok(backup), Ok(new)) = (fs::canonicalize(&self.backup), std::path::absolute(new)) else { return Ok(()) };
        let above = new.ancestors().find_map(|above| fs::canonicalize(above).ok());
        match above.is_some_and(|above| above.starts_with(&backup)) {
            true => {
                let (new, backup) = (new.display(), backup.display());
                Err(Failure::new(Exit::Refused, format!("\"{new}\" is in the backup \"{backup}\": name another place")))
            }
            false => Ok(()),
        }
    }

    fn open(&self, fetch_jobs: usize) -> Result<Backup, BackupError> {
        let url = self.backup.to_str().filter(|text| text.contains("://"));
        match url.map(Place::parse).transpose().map_err(|error| BackupError::Refused(error.to_string()))? {
            None => Backup::open(&self.backup, self.no_manifest),
            Some(Place::Directory(path)) => Backup::open(&path, self.no_manifest),
            Some(Place::Objects(url)) => {
                let (shown, files) = (url.to_string(), Files::new(url, fetch_jobs));
                Backup::open_remote(Arc::new(Objects { shown, files }), self.no_manifest)
            }
        }
    }
}

/// Begins to unpack.
fn begun(backup: Backup, destination: &Destination) -> Result<Unpacking, BackupError> {
    let backup = Arc::new(backup);
    // Hidden unless stderr is a terminal.
    let bar = ProgressBar::new_spinner();
    let template = "{spinner} {elapsed_precise} {bytes} of the backup, {bytes_per_sec}";
    bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
    let (done, progress) = (OnceLock::new(), |bytes| bar.inc(bytes));
    let begun = match backup.is_gzip() {
        // To unpack it twice takes longer than to read its pages once more.
        true => {
            let started = Instant::now();
            let unpacked = unpack(&backup, destination, &Unchanged, &progress)?;
            done.set((unpacked, started.elapsed())).expect("once");
            None
        }
        false => Some(begin(backup.clone(), destination, &progress)?),
    };
    let maps = begun.as_ref().and_then(|_| backup.map_lengths());
    Ok(Unpacking { backup, maps, begun: Mutex::new(begun), bar, done })
}

/// Adds how to go on with what a run that failed has left in the directory: if it is not complete, or if it is.
fn what_is_left(failure: Failure, data_dir: &Path, complete: Option<&str>) -> Failure {
    let shown = data_dir.display();
    match (is_half_restored(data_dir).unwrap_or(true), complete) {
        (true, _) => failure.hint(format!("\"{shown}\" is not complete: --start-over empties it, and begins again")),
        (false, Some(how)) => failure.hint(format!("the backup is unpacked in \"{shown}\": {how}")),
        (false, None) => failure,
    }
}

/// What is wrong with where WAL is to come from had better be known before a backup is unpacked.
pub fn check_wal(wal: &Path, data_dir: &Path) -> Result<(), Failure> {
    let refused = |message: String| Err(Failure::new(Exit::Refused, message));
    match named_archive(wal, data_dir, 1, false) {
        Err(error) => refused(error.to_string()),
        Ok(None) if !wal.is_dir() => refused(format!("there is no directory \"{}\", which --wal names", wal.display())),
        Ok(_) => Ok(()),
    }
}

/// When relations are there, the same command is another one.
const GO_ON: &str = "go on with walrider replay there, with the same options, not with walrider restore";

/// Runs the command.
pub fn run(args: RestoreArgs) -> ExitCode {
    let RestoreArgs { data_dir, unpack, recovery } = args;
    let json = recovery.json;
    let done = recovery.resources().start().and_then(|_| {
        recovery.wal().map_or(Ok(()), |wal| check_wal(wal, &data_dir))?;
        unpack.refuse_in_backup(&data_dir)?;
        let unpacking = unpack.begin(&data_dir, None, recovery.resources())?;
        let summary = recovery.replay(data_dir.clone(), false, unpacking.base(), false);
        let summary = summary.map_err(|failure| what_is_left(failure, &data_dir, Some(GO_ON)))?;
        Ok((unpacking.restored(), summary))
    });
    match done {
        Ok((restored, summary)) => {
            let object = json.then(|| {
                let mut object = to_json(&summary);
                object["backup"] = restored.to_json();
                object
            });
            tell(&summary, recovery.verify_images(), object)
        }
        Err(failure) => failure.tell(json),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_as_pg_basebackup_has_them() {
        let pair = |old: &str, new: &str| Ok((PathBuf::from(old), PathBuf::from(new)));
        assert_eq!(parse_mapping("/a=/b"), pair("/a", "/b"));
        assert_eq!(parse_mapping("/a\\=x=/b/"), pair("/a=x", "/b"));
        assert_eq!(parse_mapping("/a\\b=/c"), pair("/a\\b", "/c"));
        for bad in ["", "/a", "a=/b", "/a=b", "/a=/b=/c", "=/b"] {
            assert!(parse_mapping(bad).is_err(), "{bad}");
        }
    }
}
