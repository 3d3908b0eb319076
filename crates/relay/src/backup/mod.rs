//! BASE_BACKUP of a data directory that is replayed into: what `pg_basebackup` gets from a standby (`perform_base_backup`,
//! `backup/basebackup.c`; `do_pg_backup_start`, `do_pg_backup_stop`, `access/transam/xlog.c`; PostgreSQL 18).
//!
//! [`options`] are what the client asks for. `archive` sends files, with tar headers and checksums, by way of `sink`, and notes them in the
//! manifest. What of the directory belongs into a backup, and the form of all this, crate `backup` knows.
//!
//! # Why it is a backup
//!
//! Files are read while replay writes them. Recovery of the copy begins at the redo position R of the control file as it was at
//! the beginning, and must get to the position E, which the control file that is sent last tells as `minRecoveryPoint`.
//!
//! - *Nothing is missing from before R*: that was durable in the files before the control file said R (docs/crash-safety.md, steps 17 to
//!   22), so it was in them before the first was read.
//! - *What changed since R is repaired*: replay of the copy redoes it, page by page. A page that was read half written, or not at
//!   all, has a first record after R with an image, as `full_page_writes` was on; a backup where it was not is refused.
//! - *E covers all that was copied*: before replay writes a byte that shows a record's effect, `minRecoveryPoint` is durably past that
//!   record (argument C there). So a reader of the byte that then reads the control file finds it there. But what an
//!   earlier base backup, or an earlier run, had left in the files counts only once replay has passed it, and the control file need
//!   not say so then: PostgreSQL writes it at that moment (`ReachedEndOfBackup`), Walrider keeps it as it was until a page is written.
//!   Therefore E is also past where replay stood when the directory was known to be consistent, at the beginning.

mod archive;
pub mod options;
mod sink;

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use walrider_backup::header::{self, Attributes, Member};
use walrider_backup::label::{backup_label, tablespace_map};
use walrider_backup::manifest::{Manifest, ManifestError};
use walrider_backup::tree::{self, Found, Kind, Tree};
use walrider_datadir::DataDirError;
use walrider_datadir::config::letting_servers_in;
use walrider_datadir::directories::version_dir;
use walrider_datadir::durable::read_file;
use walrider_layout::control::{CONTROL_FILE, CONTROL_FILE_SIZE, ControlFile, DbState};
use walrider_layout::history::parse_history_file_name;
use walrider_layout::{Lsn, TimelineId};
use walrider_wire::replication::Options;
use walrider_wire::server::{self, Type};

use crate::link::Link;
use crate::origin::Origin;
use crate::refusal::{Refusal, Stopped};
use crate::service::Service;
use archive::{Archive, Name};
use options::Wishes;
use sink::Sink;

/// The longest `postgresql.auto.conf`, in bytes.
const MAX_AUTO_CONF: u64 = 64 << 20;
/// How often to look whether replay has got somewhere.
const LOOK: Duration = Duration::from_millis(20);

/// A data directory that WAL is replayed into, by this process.
pub trait Replica: Send + Sync {
    /// The way to it.
    fn data_dir(&self) -> &Path;

    /// How far replay is.
    fn standing(&self) -> Standing;
}

/// How far replay is, all of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// End of the last record replayed.
    pub replayed: Lsn,
    /// The timeline of that.
    pub timeline: TimelineId,
    /// The directory is consistent there.
    pub consistent: bool,
    /// Where the last record of those replayed begins that says that `full_page_writes` is off from there on (`lastFpwDisableRecPtr`).
    pub full_page_writes_off: Option<Lsn>,
    /// It becomes a primary.
    pub promotes: bool,
}

/// What a session has for it.
pub(crate) struct Backup<'a> {
    pub service: &'a Service,
    pub origin: &'a Origin,
    pub replica: &'a dyn Replica,
    pub link: &'a mut Link,
    pub wake: &'a OwnedFd,
}

/// Where it begins.
struct Begin {
    control: ControlFile,
    /// Where the directory is known to be consistent.
    standing: Standing,
}

impl Begin {
    fn start(&self) -> Lsn {
        self.control.checkpoint_copy.redo
    }

    fn timeline(&self) -> TimelineId {
        self.control.checkpoint_copy.timeline
    }
}

impl Backup<'_> {
    /// Sends it, all but the last CommandComplete.
    pub fn run(self, options: &Options) -> Result<(), Stopped> {
        let wishes = Wishes::parse(options)?;
        // Of everything, until it is known from where on.
        let hold = self.origin.spool().hold(Lsn(0));
        let begin = self.begin()?;
        hold.advance(begin.start());
        tracing::info!("base backup \"{}\" begins at {}, timeline {}", wishes.label, begin.start(), begin.timeline());

        let (replica, origin) = (self.replica, self.origin);
        let root = replica.data_dir();
        let tablespaces = tree::tablespaces(root)?;
        let version_dir = version_dir(begin.control.major, begin.control.catalog_version);
        let tree = Tree {
            root,
            version_dir: &version_dir,
            tablespaces: &tablespaces,
            links: !wishes.tablespace_map,
            next_xid: begin.control.checkpoint_copy.next_xid,
        };
        let manifest = wishes.manifest.map(|wished| Manifest::new(wished, begin.control.system_identifier, root));
        let manifest = manifest.transpose().map_err(ManifestError::Io)?;
        let verify = wishes.verify && begin.control.data_checksums();
        let sink = Sink::new(self.service, self.link, self.wake, wishes.rate);
        let mut archive = Archive::new(sink, manifest, verify.then(|| begin.start()));

        send_beginning(&mut archive.sink, &begin, &tree, &wishes)?;
        for tablespace in &tablespaces {
            archive.sink.begin_archive(&format!("{}.tar", tablespace.oid), &tablespace.location)?;
            let above = format!("pg_tblspc/{}/", tablespace.oid);
            tree.visit_tablespace(tablespace, &mut |found| send(&mut archive, &found, &above))?;
            archive.sink.zeros(header::END as u64)?;
            archive.sink.end_archive()?;
        }
        archive.sink.begin_archive("base.tar", b"")?;
        let label = backup_label(&begin.control, &wishes.label);
        let ours = Attributes::of_new_files(root)?;
        archive.contents(Name::of(b"backup_label"), label.as_bytes(), ours)?;
        if wishes.tablespace_map {
            archive.contents(
                Name::of(b"tablespace_map"),
                &tablespace_map(
                    tablespaces.iter().filter(|one| one.is_link).map(|one| (one.oid, one.location.as_slice())),
                ),
                ours,
            )?;
        }
        tree.visit(&mut |found| send(&mut archive, &found, ""))?;
        let end = self::end(&mut archive, replica, &begin)?;
        if wishes.wal {
            send_wal(&mut archive, origin, &begin, end, ours)?;
        }
        archive.sink.zeros(header::END as u64)?;
        archive.sink.end_archive()?;
        if let Some(manifest) = archive.manifest.take() {
            let history = origin.history(end.0)?;
            let (mut contents, _) = manifest.finish((begin.timeline(), begin.start()), end, &history)?;
            archive.sink.begin_manifest()?;
            let mut piece = vec![0; 32 << 10];
            loop {
                match contents.read(&mut piece).map_err(ManifestError::Io)? {
                    0 => break,
                    len => archive.sink.manifest(&piece[..len])?,
                }
            }
        }
        archive.sink.send(|out| {
            server::copy_done(out);
            position(out, end);
        })?;
        if wishes.wait {
            let message = "WAL archiving is not enabled; you must ensure that all required WAL segments are copied through \
                           other means to complete the backup";
            archive.sink.notice("NOTICE", "00000", message.to_owned())?;
        }
        match archive.failures {
            0 => {}
            1 => return Err(damaged()),
            many => {
                archive.sink.notice("WARNING", "01000", format!("{many} total checksum verification failures"))?;
                return Err(damaged());
            }
        }
        tracing::info!("base backup \"{}\" ends at {}, timeline {}", wishes.label, end.1, end.0);
        Ok(())
    }

    /// Where it can begin (`do_pg_backup_start`).
    fn begin(&self) -> Result<Begin, Stopped> {
        let standing = self.replica.standing();
        if !standing.consistent {
            // What a server says that does not let anybody in for this reason.
            let refusal = Refusal::new("57P03", "the database system is not yet accepting connections");
            return Err(refusal.detail("Consistent recovery state has not been yet reached.").into());
        }
        let (control, _) = read_control(self.replica.data_dir())?;
        if control.state != DbState::InArchiveRecovery || standing.promotes {
            return Err(promoted());
        }
        let checkpoint = &control.checkpoint_copy;
        if !checkpoint.full_page_writes || standing.full_page_writes_off.is_some_and(|at| at >= checkpoint.redo) {
            return Err(without_images("since last restartpoint"));
        }
        Ok(Begin { control, standing })
    }
}

fn damaged() -> Stopped {
    Refusal::new("XX001", "checksum verification failure during base backup").into()
}

fn promoted() -> Stopped {
    let refusal = Refusal::new("55000", "the standby was promoted during online backup");
    let hint =
        "This means that the backup being taken is corrupt and should not be used. Try taking another online backup.";
    refusal.hint(hint).into()
}

fn without_images(when: &str) -> Stopped {
    let refusal = Refusal::new("55000", format!("WAL generated with \"full_page_writes=off\" was replayed {when}"));
    let hint = "This means that the backup being taken on the standby is corrupt and should not be used. Enable \
                \"full_page_writes\" and run CHECKPOINT on the primary, and then try an online backup again.";
    refusal.hint(hint).into()
}

/// Where recovery of a backup would begin.
pub(crate) fn redo(replica: &dyn Replica) -> Result<Lsn, Refusal> {
    Ok(read_control(replica.data_dir())?.0.checkpoint_copy.redo)
}

/// The control file, and its bytes. It is replaced as a whole, so that these are of one moment.
fn read_control(root: &Path) -> Result<(ControlFile, Vec<u8>), Refusal> {
    let path = root.join(CONTROL_FILE);
    let unreadable = |why: String| Refusal::new("58030", format!("could not read file \"{CONTROL_FILE}\": {why}"));
    let bytes = read_file(&path, CONTROL_FILE_SIZE as u64).map_err(|error| unreadable(error.to_string()))?;
    let bytes = bytes.ok_or_else(|| unreadable("it is missing".to_owned()))?;
    let control = ControlFile::parse(&bytes).map_err(|error| unreadable(error.to_string()))?;
    Ok((control, bytes))
}

/// What precedes the archives: where it begins, and which there will be (`bbsink_copystream_begin_backup`).
fn send_beginning(sink: &mut Sink<'_>, begin: &Begin, tree: &Tree<'_>, wishes: &Wishes) -> Result<(), Stopped> {
    let mut sizes = Vec::new();
    for tablespace in tree.tablespaces.iter().map(Some).chain([None]) {
        let mut size = 0;
        let mut count = |found: Found<'_>| {
            sink.check()?;
            size += member(&found).map_or(0, header::size);
            Ok::<(), Stopped>(())
        };
        match tablespace.filter(|_| wishes.sizes) {
            Some(tablespace) => tree.visit_tablespace(tablespace, &mut count)?,
            None if wishes.sizes => tree.visit(&mut count)?,
            None => {}
        }
        sizes.push(wishes.sizes.then(|| (size / 1024).to_string()));
    }
    sink.send(|out| {
        position(out, (begin.timeline(), begin.start()));
        // Numbers of objects are of the type oid, which clients read as text all the same.
        server::row_description(out, &[("spcoid", Type::Oid), ("spclocation", Type::Text), ("size", Type::Int8)]);
        for (tablespace, size) in tree.tablespaces.iter().map(Some).chain([None]).zip(&sizes) {
            let oid = tablespace.map(|one| one.oid.to_string());
            let location = tablespace.map(|one| one.location.as_slice());
            server::data_row(
                out,
                [oid.as_ref().map(|oid| oid.as_bytes()), location, size.as_ref().map(|size| size.as_bytes())],
            );
        }
        server::command_complete(out, "SELECT");
        server::copy_out_response(out);
    })
}

/// A position and its timeline, as rows.
fn position(out: &mut Vec<u8>, (timeline, lsn): (TimelineId, Lsn)) {
    server::row_description(out, &[("recptr", Type::Text), ("tli", Type::Int8)]);
    server::data_row(out, [Some(lsn.to_string().as_bytes()), Some(timeline.to_string().as_bytes())]);
    server::command_complete(out, "SELECT");
}

/// What it is in an archive; nothing, for what belongs into none.
fn member<'f>(found: &'f Found<'_>) -> Option<Member<'f>> {
    Some(match &found.kind {
        Kind::Directory => Member::Directory,
        Kind::Link(target) => Member::Link(target),
        Kind::File | Kind::Relation(_) => Member::File(found.metadata.len()),
        Kind::Special => return None,
    })
}

/// Sends what was found. `above`: the place of the archive below the data directory.
fn send(archive: &mut Archive<'_>, found: &Found<'_>, above: &str) -> Result<(), Stopped> {
    let name = Name { archive: found.name, above };
    match &found.kind {
        Kind::Directory => {
            // A link that is sent as a directory is as accessible as what it leads to.
            archive.member(found.name, Member::Directory, Attributes::of(found.metadata))
        }
        Kind::Link(target) => archive.member(found.name, Member::Link(target), Attributes::of(found.metadata)),
        Kind::File if above.is_empty() && found.name == b"postgresql.auto.conf" => {
            let read = read_file(found.path, MAX_AUTO_CONF);
            let read = read.map_err(|error| Refusal::new("58030", error.to_string()))?;
            let Some(contents) = read else { return Ok(()) };
            // Servers are kept out of the directory for a moment, but not of a copy that begins at R (docs/crash-safety.md, D).
            let contents = letting_servers_in(&contents).unwrap_or(contents);
            archive.contents(name, &contents, Attributes::of(found.metadata))
        }
        Kind::File => archive.file(found.path, name, None).map(|_| ()),
        Kind::Relation(segment) => archive.file(found.path, name, Some(*segment)).map(|_| ()),
        Kind::Special => {
            let message = format!("skipping special file \"{}\"", String::from_utf8_lossy(found.name));
            archive.sink.notice("WARNING", "01000", message)
        }
    }
}

/// All files were read: sends the control file, which tells where it ends, and returns that (`do_pg_backup_stop`).
fn end(archive: &mut Archive<'_>, replica: &dyn Replica, begin: &Begin) -> Result<(TimelineId, Lsn), Stopped> {
    let root = replica.data_dir();
    let (mut control, mut bytes) = read_control(root)?;
    if ![DbState::InArchiveRecovery, DbState::ShutDownInRecovery].contains(&control.state) {
        return Err(promoted());
    }
    if control.min_recovery_point < begin.standing.replayed {
        control.min_recovery_point = begin.standing.replayed;
        control.min_recovery_point_timeline = begin.standing.timeline;
        bytes = control.to_bytes().to_vec();
    }
    let end = control.min_recovery_point;
    // What is in the files may be of a batch that replay has not told of yet, and so may be what it says of images.
    let mut standing = replica.standing();
    while standing.replayed < end {
        archive.sink.pause(LOOK)?;
        standing = replica.standing();
    }
    if standing.promotes {
        return Err(promoted());
    }
    if standing.full_page_writes_off.is_some_and(|at| at >= begin.start()) {
        return Err(without_images("during online backup"));
    }
    let metadata = std::fs::metadata(root.join(CONTROL_FILE))
        .map_err(|error| DataDirError::io("stat file", root.join(CONTROL_FILE), error))?;
    archive.contents(Name::of(CONTROL_FILE.as_bytes()), &bytes, Attributes::of(&metadata))?;
    Ok((control.min_recovery_point_timeline, end))
}

/// The WAL from the beginning to the end, and what tells of timelines (`perform_base_backup`).
fn send_wal(
    archive: &mut Archive<'_>,
    origin: &Origin,
    begin: &Begin,
    end: (TimelineId, Lsn),
    ours: Attributes,
) -> Result<(), Stopped> {
    let (directory, size) = (origin.directory(), origin.segment_size());
    let (first, last) = (size.segment_of(begin.start()), size.segment_of(Lsn(end.1.0 - 1)));
    let mut segments = Vec::new();
    let mut histories = Vec::new();
    let entries = std::fs::read_dir(directory).map_err(|error| DataDirError::io("open directory", directory, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| DataDirError::io("read directory", directory, error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        match size.parse_file_name(&name) {
            // A segment of a later timeline is one that is ready for use, or the beginning of what does not belong to this.
            Some((timeline, segment)) if (first..=last).contains(&segment) && timeline <= end.0 => {
                segments.push((segment, timeline, name));
            }
            None if parse_history_file_name(&name).is_some() => histories.push(name),
            _ => {}
        }
    }
    segments.sort();
    histories.sort();
    let mut expected = first;
    for &(segment, ..) in &segments {
        if segment > expected {
            break;
        }
        expected = segment + 1;
    }
    if expected <= last {
        let missing = size.file_name(if expected == first { begin.timeline() } else { end.0 }, expected);
        let refusal = Refusal::new("58P01", format!("could not find WAL file \"{missing}\""));
        return Err(refusal.hint("Let pg_basebackup stream WAL, or take it from the archive.").into());
    }
    let done = |name: &str| format!("pg_wal/archive_status/{name}.done").into_bytes();
    for (_, _, name) in &segments {
        let in_archive = format!("pg_wal/{name}");
        archive.segment(&directory.join(name), in_archive.as_bytes(), size.bytes())?;
        // A server that is promoted must not archive it again.
        archive.contents(Name::of(&done(name)), b"", ours)?;
    }
    for name in &histories {
        let in_archive = format!("pg_wal/{name}");
        if archive.file(&directory.join(name), Name::of(in_archive.as_bytes()), None)? {
            archive.contents(Name::of(&done(name)), b"", ours)?;
        }
    }
    Ok(())
}
