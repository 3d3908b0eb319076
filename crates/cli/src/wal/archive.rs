//! `walrider wal put`, `get` and `expire`: archives of WAL, for PostgreSQL's `archive_command` and `restore_command`.

use std::fmt::Display;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use walrider_archive::ahead::Ahead;
use walrider_archive::directory::Directory;
use walrider_archive::driver::ArchiveDriver;
use walrider_archive::frame::MAX_CONTENTS;
use walrider_archive::name::WalName;
use walrider_archive::restore::{Cluster, Request, Restored};
use walrider_archive::retention;
use walrider_archive::spool::Spool;
use walrider_archive::{Archive, ArchiveError, Place, Put};
use walrider_datadir::DataDirError;
use walrider_datadir::durable::read_file;
use walrider_layout::wal::SegmentSize;
use walrider_replay::startup::NamedArchive;

use crate::archiving::{Compression, parse_place};
use crate::failure::{Exit, Failure, note, warning};

/// What `get` ends with where it cannot tell whether the archive has a file: above 125, PostgreSQL stops recovery, and does not take
/// it for the end of the WAL; above 128, `pg_rewind` does so, too (`wait_result_is_any_signal`, `common/wait_error.c`). It is no
/// signal's number, and 126 would be told as "command not executable".
const TROUBLE: u8 = 200;
/// Name of the spool beside what is restored.
const SPOOL: &str = "walrider.ahead";

#[derive(clap::Args, Clone, Debug)]
struct ArchiveArg {
    /// Where the archive is: the absolute path of a directory, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX
    ///
    /// Endpoint and credentials of object stores come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
    /// AWS_ENDPOINT and AWS_ALLOW_HTTP; GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY. A
    /// server's commands have the environment that the server was started with.
    #[arg(long, value_name = "PLACE", env = "WALRIDER_ARCHIVE", value_parser = parse_place)]
    archive: Place,
}

fn parse_name(text: &str) -> Result<WalName, String> {
    WalName::parse(text).ok_or_else(|| "PostgreSQL archives nothing that is named so".into())
}

/// Put a WAL file into an archive: an archive_command
///
/// The file is durable when this returns with exit code 0. It is one if the archive has the file already, with the same contents;
/// with others, nothing is replaced, and the exit code is 1. A segment's size and first page have to be what its name says.
#[derive(clap::Args, Clone, Debug)]
pub struct PutArgs {
    #[command(flatten)]
    archive: ArchiveArg,
    /// How segments are packed; zstd -d and lz4 -d unpack them, too
    #[arg(long, value_enum, default_value_t = Compression::Zstd)]
    compression: Compression,
    /// The file (%p); its name counts, without its directory
    path: PathBuf,
}

/// Get a WAL file from an archive: a restore_command
///
/// Once a segment was asked for, the segments after it are fetched by a process in the background, several at once, into a directory
/// beside PATH. It ends, and removes that directory, when nobody has asked for a while.
///
/// Exit codes: 0 the file is there, whole; 1 the archive does not have it; 200 that cannot be told, or the file is damaged or is
/// another cluster's, or wrong usage: PostgreSQL stops, instead of ending recovery there.
#[derive(clap::Args, Clone, Debug)]
pub struct GetArgs {
    #[command(flatten)]
    archive: ArchiveArg,
    /// How many segments are fetched ahead; 0: none, and no process is started
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(..=1024))]
    prefetch: u64,
    /// How many of them at once
    #[arg(long, value_name = "N", default_value = "8")]
    jobs: NonZeroUsize,
    /// Where they are put [default: walrider.ahead, beside PATH]
    #[arg(long, value_name = "DIR")]
    spool_dir: Option<PathBuf>,
    /// After how many seconds without a request they are removed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    idle: u64,
    /// The file's name (%f)
    name: String,
    /// Where it is to be (%p)
    path: PathBuf,
}

/// Remove old segments from an archive
///
/// Those of all timelines that lie before a segment, as pg_archivecleanup does, and the backup histories among them. History files
/// of timelines stay. The segment is named, or is the first that the backups need that are kept: those of pg_basebackup, plain or tar, each
/// in a directory of its own with its backup_manifest. A backup without one may be under way: what it needs stays, or nothing is
/// removed where that cannot be told. No backup is removed.
#[derive(clap::Args, Clone, Debug)]
pub struct ExpireArgs {
    #[command(flatten)]
    archive: ArchiveArg,
    /// The oldest segment to keep: where the oldest backup begins, by its backup_label
    #[arg(long, value_name = "SEGMENT", value_parser = parse_name, required_unless_present = "keep_backups")]
    before: Option<WalName>,
    /// Keep what the newest N whole backups need, and those that may be under way
    #[arg(long, value_name = "N", requires = "backups", conflicts_with = "before", value_parser = clap::value_parser!(u32).range(1..))]
    keep_backups: Option<u32>,
    /// Where the backups are: a directory of directories; may be repeated
    #[arg(long, value_name = "DIR", requires = "keep_backups")]
    backups: Vec<PathBuf>,
    /// Only say how many there are
    #[arg(long)]
    dry_run: bool,
}

/// What `get` starts.
#[derive(clap::Args, Clone, Debug)]
pub struct AheadArgs {
    #[command(flatten)]
    archive: ArchiveArg,
    #[arg(long)]
    spool_dir: PathBuf,
    #[arg(long)]
    system_identifier: u64,
    #[arg(long)]
    segment_size: u32,
    #[arg(long)]
    prefetch: u64,
    #[arg(long)]
    jobs: NonZeroUsize,
    #[arg(long)]
    idle: u64,
}

/// The exit code that wrong usage has where PostgreSQL would take another for the end of the WAL.
pub fn asks_for_wal() -> Option<u8> {
    let words: Vec<_> = std::env::args_os().skip(1).take(2).collect();
    (words == ["wal", "get"]).then_some(TROUBLE)
}

/// The archive that `--wal` names, for the replay of a directory; `None`: it names a directory of segments. `waits`: it is asked
/// again when it is out of reach.
///
/// # Errors
/// What is no place for an archive, and looks like one.
pub fn named_archive(
    wal: &Path,
    data_dir: &Path,
    jobs: usize,
    waits: bool,
) -> Result<Option<NamedArchive>, ArchiveError> {
    let place = match wal.to_str() {
        Some(text) if text.contains("://") => Place::parse(text)?,
        _ if Directory::is_archive(wal)? => {
            let path = std::fs::canonicalize(wal).map_err(|error| DataDirError::io("open", wal, error))?;
            Place::Directory(path)
        }
        _ => return Ok(None),
    };
    let program = std::env::current_exe().unwrap_or_else(|_| "walrider".into());
    let quoted = |text: String| format!("'{}'", text.replace('%', "%%").replace('\'', "'\\''"));
    let program = quoted(program.display().to_string());
    let restore_command = format!("{program} wal get --archive {} %f '%p'", quoted(place.to_string()));
    let driver = Arc::new(ArchiveDriver::new(place, data_dir.join("pg_wal"), jobs)?.waiting(waits));
    Ok(Some(NamedArchive { driver, restore_command }))
}

fn complain(error: &ArchiveError) -> ExitCode {
    let exit = if matches!(error, ArchiveError::Damaged { .. }) { Exit::Damaged } else { Exit::Refused };
    Failure::new(exit, error).complain()
}

/// Runs `walrider wal put`.
pub fn put(args: &PutArgs) -> ExitCode {
    let refused = |message: &dyn Display| Failure::new(Exit::Refused, message).complain();
    let name = args.path.file_name().and_then(|name| WalName::parse(name.to_str()?));
    let Some(name) = name else {
        return refused(&format_args!(
            "\"{}\" is not the name of a file that PostgreSQL archives",
            args.path.display()
        ));
    };
    let contents = match read_file(&args.path, MAX_CONTENTS) {
        Ok(Some(contents)) => contents,
        Ok(None) => return refused(&format_args!("there is no file \"{}\"", args.path.display())),
        Err(error) => return refused(&error),
    };
    match Archive::open(&args.archive.archive)
        .and_then(|archive| archive.put(&name, &contents, args.compression.into()))
    {
        Ok(Put::Done) => ExitCode::SUCCESS,
        Ok(Put::Again) => {
            note(format_args!("\"{}\" was archived before, with the same contents", name.as_str()));
            ExitCode::SUCCESS
        }
        // Also of a damaged object: 1 is what PostgreSQL's documentation asks for.
        Err(error) => refused(&error),
    }
}

/// Runs `walrider wal get`.
pub fn get(args: &GetArgs) -> ExitCode {
    // A panic would end with 101, which means that there is no such file.
    let result = std::panic::catch_unwind(|| restore(args));
    match result {
        Ok(Ok(Restored::Fetched | Restored::Spooled)) => ExitCode::SUCCESS,
        Ok(Ok(Restored::Missing)) => ExitCode::from(Exit::Refused as u8),
        Ok(Err(error)) => Failure::new(Exit::Refused, error).with_code(TROUBLE).complain(),
        Err(_) => ExitCode::from(TROUBLE),
    }
}

fn restore(args: &GetArgs) -> Result<Restored, ArchiveError> {
    let name = parse_name(&args.name)
        .map_err(|why| ArchiveError::Refused(format!("\"{}\" is no file to restore: {why}", args.name)))?;
    let path = std::path::absolute(&args.path)
        .map_err(|error| ArchiveError::Refused(format!("there is no way to \"{}\": {error}", args.path.display())))?;
    let cluster = Cluster::of(&path);
    let place = &args.archive.archive;
    // Whose the segments are has to be known: they lie there until somebody else may ask.
    let spool = cluster.filter(|_| args.prefetch > 0).map(|cluster| {
        let beside = || path.parent().unwrap_or(Path::new("/")).join(SPOOL);
        let base = args.spool_dir.clone().unwrap_or_else(beside);
        Spool::of(&std::path::absolute(&base).unwrap_or(base), place, cluster.system_identifier)
    });
    let start = |spool: &Spool, size: SegmentSize| {
        if let Err(error) = start(args, spool, size) {
            warning(format_args!("nothing is fetched ahead: {error}"));
        }
    };
    let request = Request { name: &name, to: &path, cluster, spool: spool.as_ref(), start: &start };
    request.restore(|| Archive::open(place))
}

/// Starts the process that fetches ahead. Nobody waits for it, and it holds nothing of ours open: PostgreSQL's log would not end.
fn start(args: &GetArgs, spool: &Spool, size: SegmentSize) -> std::io::Result<()> {
    let base = spool.path().parent().unwrap_or(Path::new("/"));
    // Also when the program's file was replaced meanwhile.
    let running = Path::new("/proc/self/exe");
    let program = if running.exists() { running.to_owned() } else { std::env::current_exe()? };
    Command::new(program)
        .arg0("walrider")
        .args(["wal", "ahead", "--archive"])
        .arg(args.archive.archive.to_string())
        .arg("--spool-dir")
        .arg(base)
        .args(["--system-identifier", &spool.system_identifier().to_string()])
        .args(["--segment-size", &size.bytes().to_string()])
        .args(["--prefetch", &args.prefetch.to_string()])
        .args(["--jobs", &args.jobs.to_string()])
        .args(["--idle", &args.idle.to_string()])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(|_| ())
}

/// Runs what `get` starts.
pub fn ahead(args: &AheadArgs) -> ExitCode {
    // A signal for the command that started us does not end us. We may lead a group already, which is as good.
    let _ = rustix::process::setsid();
    let Some(size) = SegmentSize::new(args.segment_size) else { return Exit::Usage.into() };
    let ahead = Ahead {
        spool: Spool::of(&args.spool_dir, &args.archive.archive, args.system_identifier),
        size,
        window: args.prefetch,
        jobs: args.jobs.get().min(usize::try_from(args.prefetch).unwrap_or(usize::MAX)),
        idle: Duration::from_secs(args.idle),
    };
    match ahead.run(|| Archive::open(&args.archive.archive)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&error),
    }
}

fn remove_old(args: &ExpireArgs) -> Result<u64, ArchiveError> {
    let archive = Archive::open(&args.archive.archive)?;
    if let Some(before) = &args.before {
        return archive.expire(before, args.dry_run);
    }
    let Some(facts) = archive.facts()? else { return Ok(0) };
    let backups = retention::backups(&args.backups)?;
    let kept = retention::kept(&backups, args.keep_backups.unwrap_or(u32::MAX) as usize);
    let before = retention::first_segment(&kept, facts)?;
    for backup in &kept {
        let whole = if backup.whole { "" } else { ", has no backup_manifest, and may be under way" };
        note(format_args!("\"{}\" begins at {}{whole}", backup.path.display(), backup.start));
    }
    note(format_args!("segments from \"{}\" on stay", before.as_str()));
    archive.expire(&before, args.dry_run)
}

/// Runs `walrider wal expire`.
pub fn expire(args: &ExpireArgs) -> ExitCode {
    match remove_old(args) {
        Ok(removed) => {
            println!("{removed} {}", if args.dry_run { "would be removed" } else { "removed" });
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error),
    }
}
