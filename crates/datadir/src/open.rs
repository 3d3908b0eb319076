//! Taking a data directory over: what is in it, and whether we may work on it (`checkDataDir`,
//! `utils/init/miscinit.c`; `InitWalRecovery`, `access/transam/xlogrecovery.c`; PostgreSQL 18).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use walrider_layout::Major;
use walrider_layout::control::{CONTROL_FILE, CONTROL_FILE_SIZE, ControlFile, DbState};

use crate::backup_label::{self, BackupLabel, MappedTablespace};
use crate::config::SignalFiles;
use crate::directories::{self, Directories};
use crate::durable::{read_file, temporary_name, unlink_if_there, write_file};
use crate::error::{DataDirError, IoContext, Result};
use crate::held::{HeldDir, shown};
use crate::lock::{self, DataDirLock};
use crate::relation::RelationFiles;
use crate::slots::{self, Slot};
use crate::slru::Slru;
use crate::sync::Tree;

/// How often the control file is read again that does not check, and when.
const CONTROL_RETRIES: u32 = 10;
const CONTROL_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The SLRUs that replay writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlruKind {
    /// Status of transactions.
    Xact,
    /// Commit timestamps.
    CommitTs,
    /// Where the members of a multixact begin.
    MultiXactOffsets,
    /// Members of multixacts.
    MultiXactMembers,
}

impl SlruKind {
    /// All of them.
    pub const ALL: [SlruKind; 4] =
        [SlruKind::Xact, SlruKind::CommitTs, SlruKind::MultiXactOffsets, SlruKind::MultiXactMembers];

    /// The directory, within the data directory.
    pub fn directory(self) -> &'static str {
        match self {
            SlruKind::Xact => "pg_xact",
            SlruKind::CommitTs => "pg_commit_ts",
            SlruKind::MultiXactOffsets => "pg_multixact/offsets",
            SlruKind::MultiXactMembers => "pg_multixact/members",
        }
    }
}

/// A data directory that is ours: while this lives, neither PostgreSQL nor another of us starts on it.
#[derive(Debug)]
pub struct DataDir {
    /// Before `held` in the order in which they are dropped: its file is removed by way of that.
    lock: DataDirLock,
    held: HeldDir,
    control: ControlFile,
    label: Option<BackupLabel>,
    tablespaces: Vec<MappedTablespace>,
    signals: SignalFiles,
    slots: Vec<Slot>,
    group_access: bool,
}

impl DataDir {
    /// Takes the directory over and reads what recovery begins with. Refuses what a server would refuse, and
    /// what we cannot do; nothing in the directory has changed then.
    pub fn open(path: &Path) -> Result<DataDir> {
        lock::check_ownership(path)?;
        let held = HeldDir::open(path)?;
        // What counts is what is held. By name first: what is told has the name that was given.
        lock::check_ownership(held.path())?;
        let path = held.path().to_owned();
        let major = read_version(&path)?;
        let lock = DataDirLock::acquire(&path)?;
        let control = read_control(&path)?;
        if control.major != major {
            return Err(DataDirError::corrupt(
                control_path(&path),
                format!("it is of version {}, PG_VERSION of {}", control.major.number(), major.number()),
            ));
        }
        let signals = SignalFiles::read(&path)?;
        let label = BackupLabel::read(&path)?;
        if let Some(label) = &label {
            check_label(&path, label, &control)?;
        }
        // Without a label the map means nothing; it is moved away with it.
        let tablespaces = match label {
            Some(_) => backup_label::read_tablespace_map(&path)?.unwrap_or_default(),
            None => Vec::new(),
        };
        let slots = slots::read_slots(&path)?;
        slots::refuse_logical_slots(&slots)?;
        // Left over if we were ended while replacing the control file.
        unlink_if_there(&temporary_name(&control_path(&path)))?;
        let group_access = path.metadata().context("stat", &path)?.mode() & 0o050 == 0o050;
        Ok(DataDir { held, control, label, tablespaces, signals, slots, group_access, lock })
    }

    /// The way to it, which stays right when it gets another name; [`shown`] has the name.
    pub fn path(&self) -> &Path {
        self.held.path()
    }

    /// The control file as last read or written.
    pub fn control(&self) -> &ControlFile {
        &self.control
    }

    /// Replaces `global/pg_control`; durable on return (`update_controlfile`, `common/controldata_utils.c`, but
    /// atomic on any disk). The caller has made durable what it vouches for, and set its time.
    ///
    /// # Errors
    /// If the directory is not ours any more: then nothing is written.
    pub fn write_control(&mut self, control: ControlFile) -> Result<()> {
        self.lock.recheck()?;
        write_file(&control_path(self.path()), &control.to_bytes())?;
        self.control = control;
        Ok(())
    }

    /// `backup_label`, if the directory is a base backup that nobody has recovered yet.
    pub fn label(&self) -> Option<&BackupLabel> {
        self.label.as_ref()
    }

    /// Makes the links of `tablespace_map`.
    pub fn apply_tablespace_map(&self) -> Result<()> {
        backup_label::apply_tablespace_map(self.path(), &self.tablespaces)
    }

    /// Moves `backup_label` and `tablespace_map` away, once the control file holds what they said.
    pub fn retire_label(&mut self) -> Result<()> {
        backup_label::retire(self.path())?;
        self.label = None;
        self.tablespaces = Vec::new();
        Ok(())
    }

    /// Which signal files are there.
    pub fn signals(&self) -> SignalFiles {
        self.signals
    }

    /// The replication slots: all physical.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Name of the directory in each tablespace, as in `PG_18_202506291`.
    pub fn version_dir(&self) -> String {
        directories::version_dir(self.control.major, self.control.catalog_version)
    }

    /// Whether the group may read the directory, and so what is made in it.
    pub fn group_access(&self) -> bool {
        self.group_access
    }

    /// Its relation files.
    pub fn relation_files(&self) -> RelationFiles {
        RelationFiles::new(self.path(), &self.version_dir(), self.group_access)
    }

    /// The directories of its databases and tablespaces.
    pub fn directories(&self) -> Directories {
        Directories::new(self.path(), self.control.major, self.control.catalog_version)
    }

    /// One of its SLRUs, with room in memory for `capacity` pages.
    pub fn slru(&self, kind: SlruKind, capacity: usize) -> Slru {
        Slru::new(self.path().join(kind.directory()), capacity)
    }

    /// Makes everything in the directory durable, as a server does that finds it not cleanly stopped.
    ///
    /// # Errors
    /// What cannot be made durable.
    pub fn sync(&self) -> Result<()> {
        Tree::of(self.path())?.sync()
    }
}

fn control_path(data_dir: &Path) -> PathBuf {
    data_dir.join(CONTROL_FILE)
}

/// The version of a data directory (`ValidatePgVersion`).
pub fn read_version(data_dir: &Path) -> Result<Major> {
    let path = data_dir.join("PG_VERSION");
    if !data_dir.try_exists().context("stat data directory", data_dir)? {
        return Err(DataDirError::Refused(format!("data directory \"{}\" does not exist", data_dir.display())));
    }
    let Some(contents) = read_file(&path, 64)? else {
        return Err(DataDirError::Refused(format!(
            "\"{}\" is not a PostgreSQL data directory: file PG_VERSION is missing",
            shown(data_dir).display()
        )));
    };
    let text = String::from_utf8_lossy(&contents);
    let text = text.trim();
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(DataDirError::corrupt(path, format!("\"{text}\" is not a version")));
    }
    text.parse().ok().and_then(Major::from_number).ok_or_else(|| {
        DataDirError::Refused(format!(
            "\"{}\" is of PostgreSQL {text}; {} are supported: let PostgreSQL {text} replay it",
            shown(data_dir).display(),
            Major::SUPPORTED
        ))
    })
}

/// The control file of a data directory, checked. Needs no lock: what a server writes there meanwhile may be seen in part, and is read
/// again then (`get_controlfile`, `common/controldata_utils.c`).
pub fn read_control(data_dir: &Path) -> Result<ControlFile> {
    for _ in 0..CONTROL_RETRIES {
        match try_read_control(data_dir) {
            Err(DataDirError::Control { .. }) => thread::sleep(CONTROL_RETRY_INTERVAL),
            done => return done,
        }
    }
    try_read_control(data_dir)
}

fn try_read_control(data_dir: &Path) -> Result<ControlFile> {
    let path = control_path(data_dir);
    let Some(contents) = read_file(&path, CONTROL_FILE_SIZE as u64)? else {
        let upgraded = path.with_extension("old").try_exists().context("stat file", &path)?;
        return Err(DataDirError::Refused(format!(
            "\"{}\" has no global/pg_control: {}",
            shown(data_dir).display(),
            if upgraded {
                "pg_upgrade has moved its files to a new cluster; use that one, or restore this one from a backup"
            } else {
                "it is not a whole data directory; restore it from the backup again"
            }
        )));
    };
    let control =
        ControlFile::parse(&contents).map_err(|source| DataDirError::Control { path: path.clone(), source })?;
    let expected = control.major.catalog_version();
    if control.catalog_version != expected {
        return Err(DataDirError::Refused(format!(
            "the directory has catalog version {}, PostgreSQL {} has {expected}: it was made by a pre-release or a \
             derived server, and only that can replay it",
            control.catalog_version,
            control.major.number()
        )));
    }
    Ok(control)
}

/// A label must fit the control file that came with it (`InitWalRecovery`).
fn check_label(data_dir: &Path, label: &BackupLabel, control: &ControlFile) -> Result<()> {
    let standby_states = [DbState::InArchiveRecovery, DbState::ShutDownInRecovery];
    if label.from_standby && !standby_states.contains(&control.state) {
        return Err(DataDirError::corrupt(
            data_dir.join("backup_label"),
            format!(
                "it says that the backup is from a standby, but the state in pg_control is \"{}\"; use another backup",
                control.state.name()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_versions_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let version = |text: &str| {
            std::fs::write(dir.path().join("PG_VERSION"), text).unwrap();
            read_version(dir.path()).map_err(|error| error.to_string())
        };
        assert_eq!(version("17\n"), Ok(Major::V17));
        assert_eq!(version("18\n"), Ok(Major::V18));
        for text in ["15", "16", "19", "9.6", "180000000000"] {
            let error = version(text).unwrap_err();
            assert!(error.contains(&format!("is of PostgreSQL {text}; 17 and 18 are supported")), "{error}");
        }
        assert!(version("").unwrap_err().contains("is not a version"));
    }
}
