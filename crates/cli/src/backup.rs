//! `walrider backup roll`: a new base backup of an old one and WAL.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand, ValueEnum};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use walrider_backup::BackupError;
use walrider_backup::checksum::Checksums;
use walrider_backup::packing::Packing;
use walrider_backup::roll::{Made, Rolled, Settings};
use walrider_datadir::config::is_half_restored;
use walrider_datadir::durable::{create_dirs, fsync_dir, fsync_parent, list_dir};
use walrider_replay::startup::{Options, Promotion, Summary};
use walrider_store::directory::Directory;
use walrider_store::driver::Driver;

use crate::failure::{Exit, Failure, SCHEMA_VERSION, note};
use crate::replay::{ResourceArgs, TargetArgs, plain_options, run_to_end, why_incomplete};
use crate::restore::{Restored, UnpackArgs, check_wal};
use crate::wal::named_archive;

/// What is appended to the name of a backup while it is made.
const ROLLING: &str = ".rolling";
/// In that directory, where tablespaces are of which archives are made.
const TABLESPACES: &str = "tablespaces";
/// In that directory, the file that says what it is.
const MARKER: &str = "walrider.rolling";

/// Make base backups
#[derive(Args)]
pub struct BackupArgs {
    #[command(subcommand)]
    command: BackupCommand,
}

#[derive(Subcommand)]
enum BackupCommand {
    Roll(Box<RollArgs>),
}

/// Make a new base backup of an old one and its WAL
///
/// The old backup is unpacked, verified, and rolled forward to the target, or to the end of the WAL. What comes out is a full backup of
/// that point, like one that pg_basebackup takes from a standby, with the WAL that its recovery needs, and no more: pg_verifybackup
/// accepts it, and PostgreSQL, started on it, gets to that point. No server is needed, and none is asked for anything.
///
/// All is made in a directory beside OUT, OUT.rolling, and has the name OUT when it is complete.
#[derive(Args)]
struct RollArgs {
    #[command(flatten)]
    unpack: UnpackArgs,
    /// Directory with WAL segments, .partial ones included, or an archive of walrider wal put: its directory, s3://BUCKET/PREFIX,
    /// gs:// or az://
    #[arg(long, value_name = "SOURCE")]
    wal: PathBuf,
    #[command(flatten)]
    target: TargetArgs,
    /// The new backup: a directory that is empty, or not there yet
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    /// What it is to be
    #[arg(long, value_enum, default_value_t = Format::Plain)]
    format: Format,
    /// How archives are packed, with --format tar
    #[arg(long, value_enum, default_value_t = Compress::None)]
    compress: Compress,
    /// Its label [default: that of the old one]
    #[arg(long, value_parser = parse_label)]
    label: Option<String>,
    /// Checksums in its manifest: CRC32C, SHA224, SHA256, SHA384, SHA512 or NONE
    #[arg(long, value_name = "ALGORITHM", default_value = "CRC32C", value_parser = parse_checksums)]
    manifest_checksums: Checksums,
    #[command(flatten)]
    resources: ResourceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// A directory that PostgreSQL can be started on
    Plain,
    /// base.tar, and an archive for each tablespace
    Tar,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Compress {
    None,
    Gzip,
    Lz4,
    Zstd,
}

impl Compress {
    fn packing(self) -> Packing {
        match self {
            Compress::None => Packing::None,
            Compress::Gzip => Packing::Gzip,
            Compress::Lz4 => Packing::Lz4,
            Compress::Zstd => Packing::Zstd,
        }
    }
}

fn parse_checksums(text: &str) -> Result<Checksums, String> {
    Checksums::parse(text).ok_or_else(|| "there are CRC32C, SHA224, SHA256, SHA384, SHA512 and NONE".into())
}

fn parse_label(text: &str) -> Result<String, String> {
    match text.contains(['\n', '\r']) || text.len() > 1024 {
        true => Err("a label is one line of at most 1024 bytes".into()),
        false => Ok(text.to_owned()),
    }
}

/// Runs the command.
pub fn run(args: BackupArgs) -> ExitCode {
    let BackupCommand::Roll(args) = args.command;
    match args.roll() {
        Ok((restored, summary, made)) => {
            if args.json {
                println!("{}", to_json(&restored, &summary, &made));
            } else {
                println!(
                    "Rolled to {} on timeline {}: {} files, {:.1} MB. Recovery of it begins at {}, and the WAL from there on is in it.",
                    summary.end,
                    made.timeline,
                    made.files,
                    made.bytes as f64 / 1e6,
                    made.start
                );
            }
            if !made.full_page_writes || summary.stats.full_page_writes_off.is_some_and(|at| at >= made.start) {
                eprintln!(
                    "walrider: warning: full_page_writes was off: PostgreSQL may end its recovery of this backup with \"WAL contains \
                     references to invalid pages\" where a table was truncated; use walrider restore, which does not"
                );
            }
            ExitCode::SUCCESS
        }
        Err(failure) => failure.tell(args.json),
    }
}

fn to_json(restored: &Restored, summary: &Summary, made: &Made) -> Value {
    json!({
        "schema_version": SCHEMA_VERSION,
        "backup": restored.to_json(),
        "start_lsn": made.start.to_string(),
        "end_lsn": summary.end.to_string(),
        "timeline": made.timeline.0,
        "files": made.files,
        "bytes": made.bytes,
        "replayed_bytes": summary.end.0 - summary.start.0,
        "redo_seconds": summary.redo.as_secs_f64(),
    })
}

fn refused(message: String) -> Failure {
    Failure::new(Exit::Refused, message)
}

impl RollArgs {
    fn roll(&self) -> Result<(Restored, Summary, Made), Failure> {
        if self.format == Format::Plain && self.compress != Compress::None {
            return Err(Failure::new(Exit::Usage, "--compress is of archives: say --format tar, too"));
        }
        let out = checked(&self.out)?;
        self.unpack.refuse_in_backup(&out)?;
        let mut work = out.clone().into_os_string();
        work.push(ROLLING);
        let work = PathBuf::from(work);
        self.resources.start()?;
        check_wal(&self.wal, &work.join("data"))?;
        let _lock = self.begin(&work)?;
        self.make(&work, &out).map_err(|failure| remove_work(&work, failure))
    }

    /// Makes it in `work`, and gives it its name.
    fn make(&self, work: &Path, out: &Path) -> Result<(Restored, Summary, Made), Failure> {
        let data_dir = work.join("data");
        let is_tar = self.format == Format::Tar;
        let unpacking = self.unpack.begin(&data_dir, is_tar.then(|| work.join(TABLESPACES)), &self.resources)?;
        let settings = Settings::read(&data_dir).map_err(failed)?;
        let options = plain_options(data_dir.clone(), Some(&self.wal), &self.target, &self.resources)
            .map_err(|error| refused(error.to_string()))?;
        let options = Options {
            promotion: Promotion::Never,
            base: unpacking.base(),
            configured_target: false,
            new_tablespaces: is_tar.then(|| work.join(TABLESPACES)),
            ..options
        };
        let summary = run_to_end(&options, Some(&self.wal), None)?;
        let restored = unpacking.restored();
        if let Some(failure) = why_incomplete(&summary) {
            return Err(failure);
        }
        // Replay has stopped its own.
        let archive = named_archive(&self.wal, &data_dir, self.resources.fetch_jobs(), false);
        let wal: Arc<dyn Driver> = match archive.map_err(|error| refused(error.to_string()))? {
            Some(archive) => archive.driver,
            None => Arc::new(Directory::new(&self.wal)),
        };
        let old = restored.backup.label().label.as_deref();
        let rolled = Rolled {
            data_dir: &data_dir,
            end: summary.end,
            wal: vec![wal],
            settings,
            label: self.label.as_deref().or(old).unwrap_or("walrider backup roll"),
            checksums: self.manifest_checksums,
        };
        let (made, complete) = match self.format {
            Format::Plain => (rolled.into_directory(), data_dir.clone()),
            Format::Tar => {
                let archives = work.join("archives");
                let locations = restored.backup.locations(self.unpack.tablespace_mapping());
                let made = locations
                    .and_then(|locations| rolled.into_archives(&archives, self.compress.packing(), &locations));
                (made, archives)
            }
        };
        let made = made.map_err(failed)?;
        end(work, &complete, out)?;
        Ok((restored, summary, made))
    }

    /// Makes the directory that all is made in, or empties what an interrupted run has left of it. It is ours as long as the file is open.
    fn begin(&self, work: &Path) -> Result<File, Failure> {
        create_dirs(work, 0o777).map_err(|error| refused(error.to_string()))?;
        // An empty one was about to be marked when it was interrupted.
        let (path, found) = (work.join(MARKER), entries(work)?);
        if !found.is_empty() && !found.contains(&path) {
            return Err(refused(format!("\"{}\" is in the way: move it away", work.display())));
        }
        let opened = File::options().write(true).create(true).truncate(false).open(&path);
        let marker = opened.map_err(|error| io("create file", &path, &error))?;
        let is_ours = flock(&marker, FlockOperation::NonBlockingLockExclusive).is_ok()
            // Another run that had it may have removed it meanwhile.
            && fs::metadata(&path).is_ok_and(|now| marker.metadata().is_ok_and(|ours| now.ino() == ours.ino()));
        if !is_ours {
            return Err(refused(format!("another walrider backup roll is at work in \"{}\"", work.display())));
        }
        let left: Vec<PathBuf> = entries(work)?.into_iter().filter(|entry| *entry != path).collect();
        if !left.is_empty() && !self.unpack.starts_over() {
            return Err(refused(format!(
                "\"{}\" is what an interrupted run has left: with --start-over, it is removed, and all begins again",
                work.display()
            )));
        }
        check_tablespaces(work)?;
        for entry in left {
            remove(&entry)?;
        }
        let text = b"walrider backup roll was interrupted, or is still at work.\n";
        (&marker).write_all(text).and_then(|()| marker.sync_all()).map_err(|error| io("write file", &path, &error))?;
        fsync_dir(work).and_then(|()| fsync_parent(work)).map_err(|error| refused(error.to_string()))?;
        Ok(marker)
    }
}

/// Where the new backup goes: a directory that is empty, or not there yet, and may have another one renamed over it.
fn checked(out: &Path) -> Result<PathBuf, Failure> {
    if out.to_str().is_some_and(|text| text.contains("://")) {
        return Err(Failure::new(Exit::Usage, "--out is a directory here: object stores are read, and not written"));
    }
    let path = std::path::absolute(out).map_err(|error| io("find directory", out, &error))?;
    // Without a slash at its end, or what is made beside it would be in it.
    let path: PathBuf = path.components().collect();
    let not = |what: &str| refused(format!("\"{}\" {what}", path.display()));
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(not("has no name: name a directory that is empty, or is not there yet"));
    };
    let found = match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(path),
        other => other.map_err(|error| io("stat", &path, &error))?,
    };
    if found.is_symlink() {
        return Err(not("is a symbolic link: name what it points to"));
    }
    if !found.is_dir() {
        return Err(not("is no directory"));
    }
    if !entries(&path)?.is_empty() {
        return Err(not("is not empty: name a directory that is, or is not there yet"));
    }
    let above = fs::metadata(parent).map_err(|error| io("stat", parent, &error))?;
    if above.dev() != found.dev() {
        return Err(not("is where a file system is mounted: name a directory in it"));
    }
    Ok(path)
}

/// Tablespaces beside the directory that were unpacked as a whole do not say any more whose they are.
fn check_tablespaces(work: &Path) -> Result<(), Failure> {
    let links = work.join("data/pg_tblspc");
    if !links.exists() {
        return Ok(());
    }
    for link in entries(&links)? {
        let Ok(location) = fs::read_link(&link) else { continue };
        if location.starts_with(work) || !location.is_dir() || entries(&location)?.is_empty() {
            continue;
        }
        if !is_half_restored(&location).map_err(|error| refused(error.to_string()))? {
            return Err(refused(format!(
                "\"{}\" is where the interrupted run has put a tablespace: if what is in it is what that run has left, remove it by hand",
                location.display()
            )));
        }
    }
    Ok(())
}

/// Removes what a run that failed has left: nothing of it is of use to the next one. But what it has put into tablespaces elsewhere stays, and
/// then all does, as only that says whose they are.
fn remove_work(work: &Path, failure: Failure) -> Failure {
    let tablespaces = work.join("data/pg_tblspc");
    let links = match tablespaces.try_exists() {
        Ok(false) => Ok(Vec::new()),
        _ => entries(&tablespaces),
    };
    // Where that cannot be told, all is left.
    let Ok(links) = links else { return failure };
    let elsewhere = links.iter().filter_map(|link| fs::read_link(link).ok()).find(|place| !place.starts_with(work));
    match elsewhere {
        Some(place) => failure.hint(format!(
            "what is made is left in \"{}\", and in tablespaces as \"{}\": empty these, and begin again with --start-over",
            work.display(),
            place.display()
        )),
        None => match remove(work) {
            // What it said of that is over.
            Ok(()) => failure.without_hint(),
            Err(_) => failure.hint(format!("\"{}\" could not be removed: begin again with --start-over", work.display())),
        },
    }
}

/// Removes a file, or a directory with all that is in it.
fn remove(path: &Path) -> Result<(), Failure> {
    let removed = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(|error| io("remove", path, &error))
}

/// What is complete gets its name.
fn end(work: &Path, complete: &Path, out: &Path) -> Result<(), Failure> {
    fs::rename(complete, out).map_err(|error| io("rename to", out, &error))?;
    fsync_parent(out).map_err(|error| refused(error.to_string()))?;
    if let Err(error) = fs::remove_dir_all(work) {
        note(format!("could not remove \"{}\", which nobody needs any more: {error}", work.display()));
    }
    Ok(())
}

/// What is in a directory.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let listed = list_dir(directory).map_err(|error| refused(error.to_string()))?;
    Ok(listed.into_iter().map(|entry| entry.path()).collect())
}

fn io(operation: &str, path: &Path, error: &std::io::Error) -> Failure {
    refused(format!("could not {operation} \"{}\": {error}", path.display()))
}

fn failed(error: BackupError) -> Failure {
    Failure::new(if error.is_corruption() { Exit::Damaged } else { Exit::Refused }, &error)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_new_backup_can_be_renamed_to_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let new = dir.path().join("new");
        let told = |path: &Path| checked(path).map_err(|failure| failure.to_json()["message"].to_string());
        assert_eq!(told(&new).unwrap(), new);
        fs::create_dir(&new).unwrap();
        // As a shell completes it.
        assert_eq!(told(&dir.path().join("new/")).unwrap(), new);
        symlink(&new, dir.path().join("link")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        for (bad, why) in
            [("link", "symbolic link"), ("file", "no directory"), (".", "not empty"), ("new/..", "no name")]
        {
            assert!(told(&dir.path().join(bad)).unwrap_err().contains(why), "{bad}");
        }
        assert!(told(Path::new("/")).unwrap_err().contains("no name"));
        assert!(told(Path::new("/proc")).unwrap_err().contains("not empty"));
    }
}
