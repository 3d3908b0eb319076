//! Where the directory stands: the control file, restartpoints and hand-over (`CreateRestartPoint`,
//! `UpdateMinRecoveryPoint` in `access/transam/xlog.c`; `CheckRecoveryConsistency` in
//! `access/transam/xlogrecovery.c`, PostgreSQL 18). The steps are argued in docs/crash-safety.md.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use walrider_datadir::relation::{Made, RelationFiles, SegmentFile};
use walrider_datadir::sync::sync_side_by_side;
use walrider_datadir::{DataDir, DataDirError, config, durable};
use walrider_layout::control::{ControlFile, DbState};
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_wal::record::Record;

use crate::error::ReplayError;
use crate::globals::{BackupState, Globals, SeenCheckpoint};
use crate::upstream::Upstream;

/// When a restartpoint is made, if a newer checkpoint record was replayed: bounds what a crash costs.
#[derive(Clone, Copy, Debug)]
pub struct RestartpointPolicy {
    /// So long after the last one, like `checkpoint_timeout`.
    pub interval: Duration,
    /// So much WAL past where recovery would begin, in bytes, like `max_wal_size`.
    pub wal_bytes: u64,
}

impl Default for RestartpointPolicy {
    /// Every five minutes; volume does not matter to a replay that goes on to an end.
    fn default() -> RestartpointPolicy {
        RestartpointPolicy { interval: Duration::from_secs(300), wal_bytes: u64::MAX }
    }
}

/// The control file as it is on disk, and what leads to the next one.
pub struct Recovery {
    data_dir: DataDir,
    /// What is on disk, or will be with the next [`Recovery::write_control`].
    control: ControlFile,
    history: TimelineHistory,
    /// Of the last record that was sequenced.
    timeline: TimelineId,
    /// A signal file, or the command line, asks for recovery from an archive. Else it is crash recovery, to the end
    /// of `pg_wal`, and `minRecoveryPoint` stays zero as in PostgreSQL.
    archive_recovery: bool,
    /// What `minRecoveryPoint` was at the start: until there, the directory is not consistent.
    consistent_from: Lsn,
    last_checkpoint: Option<SeenCheckpoint>,
    /// End of the last record that copied a database, until a restartpoint past it.
    copied_until: Option<Lsn>,
    last_restartpoint: Instant,
    policy: RestartpointPolicy,
    /// Who makes WAL durable; without, it is.
    upstream: Option<Arc<dyn Upstream>>,
}

impl Recovery {
    /// Begins with what the control file on disk says. `timeline` is the one of the first record.
    pub fn new(data_dir: DataDir, history: TimelineHistory, timeline: TimelineId, archive_recovery: bool) -> Recovery {
        let control = data_dir.control().clone();
        let consistent_from = control.min_recovery_point;
        Recovery {
            data_dir,
            control,
            history,
            timeline,
            archive_recovery,
            consistent_from,
            last_checkpoint: None,
            copied_until: None,
            last_restartpoint: Instant::now(),
            policy: RestartpointPolicy::default(),
            upstream: None,
        }
    }

    /// Makes restartpoints when this says so.
    pub fn with_restartpoints(mut self, policy: RestartpointPolicy) -> Recovery {
        self.policy = policy;
        self
    }

    /// Before anything gets into the directory's files, makes sure that the WAL that says so is durable.
    pub fn durable_by(mut self, upstream: Option<Arc<dyn Upstream>>) -> Recovery {
        self.upstream = upstream;
        self
    }

    /// The control file as it is on disk.
    pub fn control(&self) -> &ControlFile {
        &self.control
    }

    /// The data directory.
    pub fn data_dir(&self) -> &DataDir {
        &self.data_dir
    }

    /// Whether this is recovery from an archive, with a `minRecoveryPoint`; else it is crash recovery.
    pub fn is_archive_recovery(&self) -> bool {
        self.archive_recovery
    }

    /// Replaces the timelines that lead to the target; all that was replayed is on them.
    pub fn set_history(&mut self, history: TimelineHistory) {
        self.history = history;
    }

    /// Timeline of the last record that was sequenced.
    pub fn timeline(&self) -> TimelineId {
        self.timeline
    }

    /// Notes a checkpoint record. True: the batch must end with it, for a restartpoint.
    pub fn saw_checkpoint(&mut self, seen: SeenCheckpoint) -> bool {
        self.last_checkpoint = Some(seen);
        self.copied_until.is_some_and(|copied| copied <= seen.body.redo)
    }

    /// Notes that a record, which ends at `end`, has copied the files of a database. Replayed once more after a crash, it
    /// would copy what the source has become since then. The primary makes a checkpoint before it lets anybody change
    /// the source (`CreateDatabaseUsingFileCopy`): a restartpoint right there closes the gap, which PostgreSQL leaves
    /// open (`dbase_redo`).
    pub fn copied_database(&mut self, end: Lsn) {
        self.copied_until = Some(end);
    }

    /// Where recovery should begin now, if a restartpoint should be made, with replay at `replayed`.
    pub fn due_restartpoint(&self, replayed: Lsn) -> Option<SeenCheckpoint> {
        let behind = replayed.0.saturating_sub(self.control.checkpoint_copy.redo.0);
        let is_due = self.last_restartpoint.elapsed() >= self.policy.interval || behind >= self.policy.wal_bytes;
        self.newer_checkpoint().filter(|_| is_due || self.must_restart_here())
    }

    /// Whether a restartpoint must be made before anything else is replayed: see [`Recovery::copied_database`].
    pub fn must_restart_here(&self) -> bool {
        let newer = self.newer_checkpoint();
        self.copied_until.is_some_and(|copied| newer.is_some_and(|seen| copied <= seen.body.redo))
    }

    /// Checks a change of timeline against the history (`checkTimeLineSwitch`).
    pub fn switch_timeline(
        &mut self,
        from: TimelineId,
        to: TimelineId,
        previous: TimelineId,
        record: &Record<'_>,
    ) -> Result<(), ReplayError> {
        let corrupt = |why: String| Err(ReplayError::CorruptWal(format!("at {}: {why}", record.lsn)));
        if previous != from {
            return corrupt(format!(
                "timeline {to} branches off timeline {previous}, but replay is on timeline {from}"
            ));
        }
        if to < from || !self.history.contains(to) {
            return corrupt(format!("timeline {to} does not follow timeline {from} in the history of the target"));
        }
        if self.archive_recovery
            && record.lsn < self.control.min_recovery_point
            && to > self.control.min_recovery_point_timeline
        {
            return corrupt(format!(
                "timeline {to} begins before the minimum recovery point {} on timeline {}",
                self.control.min_recovery_point, self.control.min_recovery_point_timeline
            ));
        }
        self.timeline = to;
        Ok(())
    }

    /// Where the directory becomes consistent; `None` while the end of the backup is not known.
    pub fn consistency_point(&self, backup: &BackupState) -> Option<Lsn> {
        // That of a standby's backup is a position, and no record need say so.
        if !self.archive_recovery || backup.end_required && !backup.end.is_valid() {
            return None;
        }
        Some(self.consistent_from.max(backup.end))
    }

    /// Whether the directory is consistent at `replayed`.
    pub fn is_consistent(&self, backup: &BackupState, replayed: Lsn) -> bool {
        self.consistency_point(backup).is_some_and(|point| point <= replayed)
    }

    /// Before anything up to `lsn` becomes visible in the directory's files: a server started on it must not stop
    /// before (`UpdateMinRecoveryPoint`).
    pub fn ensure_min_recovery_point(&mut self, lsn: Lsn) -> Result<(), ReplayError> {
        self.move_min_recovery_point(lsn, lsn)
    }

    /// As [`Recovery::ensure_min_recovery_point`], but once it has to move, it goes on to `ahead`, where replay gets unless
    /// something stops it, so that it need not move again soon. What is not durable yet it does not go ahead to.
    pub fn move_min_recovery_point(&mut self, lsn: Lsn, ahead: Lsn) -> Result<(), ReplayError> {
        if !self.archive_recovery || self.control.min_recovery_point >= lsn {
            return Ok(());
        }
        let lsn = match &self.upstream {
            Some(upstream) => {
                upstream.ensure_durable(lsn)?;
                lsn
            }
            None => lsn.max(ahead),
        };
        self.control.min_recovery_point = lsn;
        self.control.min_recovery_point_timeline = self.history.timeline_at(Lsn(lsn.0 - 1));
        self.write_control()
    }

    /// Where recovery begins, and how far it must get, never goes back: half of the directory may be newer than that.
    fn write_control(&mut self) -> Result<(), ReplayError> {
        let (old, new) = (self.data_dir.control(), &self.control);
        assert!(old.checkpoint_copy.redo <= new.checkpoint_copy.redo, "recovery would begin earlier");
        assert!(
            old.min_recovery_point <= new.min_recovery_point || new.state == DbState::ShutDown,
            "a server could stop before what is in the files"
        );
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.control.time = now.as_secs() as i64;
        Ok(self.data_dir.write_control(self.control.clone())?)
    }

    /// Makes everything that was written durable, and the last checkpoint record the place where recovery begins.
    /// All relation pages have been written, `minRecoveryPoint` covers `replayed`, where both they and `globals`
    /// stand. Without `eligible`, as long as pages are missing without explanation, recovery goes on beginning where
    /// it does. `finished`: hand the directory over.
    pub fn restartpoint(
        &mut self,
        globals: &mut Globals,
        files: &RelationFiles,
        replayed: Lsn,
        eligible: bool,
        finished: bool,
    ) -> Result<(), ReplayError> {
        let checkpoint = self.newer_checkpoint().filter(|_| eligible);
        sync_relations(files)?;
        self.conclude(globals, checkpoint, replayed, finished)
    }

    /// The last checkpoint record that was sequenced, if recovery does not begin there already.
    pub fn newer_checkpoint(&self) -> Option<SeenCheckpoint> {
        self.last_checkpoint.filter(|seen| seen.body.redo > self.control.checkpoint_copy.redo)
    }

    /// Lets recovery go on beginning where it does, if the last record that was replayed is a shutdown checkpoint: recovery that
    /// begins with one does not replay it, and would look for a target that it is for ever
    /// ("recovery ended before configured recovery target was reached").
    pub fn keep_last_record(&mut self, replayed: Lsn) {
        self.last_checkpoint = self.last_checkpoint.filter(|seen| !seen.shutdown || seen.end != replayed);
    }

    /// The end of [`Recovery::restartpoint`]: relation files are durable with all that was replayed before `checkpoint` was
    /// sequenced.
    pub fn conclude(
        &mut self,
        globals: &mut Globals,
        checkpoint: Option<SeenCheckpoint>,
        replayed: Lsn,
        finished: bool,
    ) -> Result<(), ReplayError> {
        let next_xid = self.control.checkpoint_copy.next_xid;
        let keep_out = checkpoint.is_some_and(|checkpoint| globals.writes_future_files(&checkpoint, next_xid));
        if let Some(checkpoint) = &checkpoint {
            assert!(checkpoint.end <= replayed, "{} is not replayed yet", checkpoint.lsn);
            assert!(
                checkpoint.body.redo > self.control.checkpoint_copy.redo,
                "recovery begins past {}",
                checkpoint.lsn
            );
            self.copied_until = self.copied_until.filter(|&copied| copied > checkpoint.body.redo);
            globals.checkpoint(checkpoint)?;
            if keep_out {
                config::keep_servers_out(self.data_dir.path())?;
            }
            globals.checkpoint_prepared(checkpoint)?;
            self.control.checkpoint = checkpoint.lsn;
            self.control.checkpoint_copy = checkpoint.body;
            if self.archive_recovery && self.control.min_recovery_point < checkpoint.end {
                self.control.min_recovery_point = checkpoint.end;
                self.control.min_recovery_point_timeline = checkpoint.body.timeline;
            }
        }
        globals.apply_to(&mut self.control);
        if finished {
            // After crash recovery, too: a server that goes on from an archive must not stop before.
            if self.control.min_recovery_point < replayed {
                self.control.min_recovery_point = replayed;
                self.control.min_recovery_point_timeline = self.history.timeline_at(Lsn(replayed.0 - 1));
            }
            self.control.state = DbState::ShutDownInRecovery;
        }
        self.last_restartpoint = Instant::now();
        self.write_control()?;
        if keep_out {
            config::let_servers_in(self.data_dir.path())?;
        }
        Ok(())
    }

    /// Makes the directory that of a server which was shut down at this checkpoint (`CreateCheckPoint`). Everything else that
    /// belongs to it is durable; the files of prepared transactions come last, as late as can be (docs/crash-safety.md). With
    /// `keep_out`, or if these files ask for it, servers are kept out from here on until somebody lets them in.
    pub fn end(
        &mut self,
        globals: &mut Globals,
        checkpoint: &SeenCheckpoint,
        keep_out: bool,
    ) -> Result<(), ReplayError> {
        if keep_out || globals.writes_future_files(checkpoint, self.control.checkpoint_copy.next_xid) {
            config::keep_servers_out(self.data_dir.path())?;
        }
        globals.checkpoint_prepared(checkpoint)?;
        assert!(checkpoint.shutdown && checkpoint.body.redo == checkpoint.lsn, "a server would have WAL to replay");
        self.control = ControlFile {
            state: DbState::ShutDown,
            checkpoint: checkpoint.lsn,
            checkpoint_copy: checkpoint.body,
            unlogged_lsn: FIRST_NORMAL_UNLOGGED_LSN,
            min_recovery_point: Lsn::INVALID,
            min_recovery_point_timeline: TimelineId(0),
            ..self.control.clone()
        };
        self.write_control()
    }
}

/// Where the positions of pages of unlogged relations begin, which have no WAL (`FirstNormalUnloggedLSN`).
const FIRST_NORMAL_UNLOGGED_LSN: Lsn = Lsn(1000);

/// Makes all files durable that were written or made in the directories of databases, and then these; side by side.
pub fn sync_relations(files: &RelationFiles) -> Result<(), ReplayError> {
    let (unsynced, made) = (files.take_unsynced(), files.take_made());
    sync_side_by_side(&unsynced, |&file| files.start_writeback(file), |&file| files.sync(file))?;
    let others: Vec<&PathBuf> = made.files.iter().collect();
    sync_side_by_side(&others, |_| (), |file| if_there(durable::fsync_file(file)))?;
    let directories = Vec::from_iter(directories_of(files, &unsynced, &made));
    Ok(sync_side_by_side(&directories, |_| (), |directory| if_there(durable::fsync_dir(directory)))?)
}

/// The same without the threads that replay needs.
pub fn sync_one_by_one(files: &RelationFiles) -> Result<(), ReplayError> {
    let (unsynced, made) = (files.take_unsynced(), files.take_made());
    unsynced.iter().for_each(|&file| files.start_writeback(file));
    unsynced.iter().try_for_each(|&file| files.sync(file))?;
    made.files.iter().try_for_each(|file| if_there(durable::fsync_file(file)))?;
    let directories = directories_of(files, &unsynced, &made);
    Ok(directories.iter().try_for_each(|directory| if_there(durable::fsync_dir(directory)))?)
}

fn directories_of(files: &RelationFiles, synced: &[SegmentFile], made: &Made) -> BTreeSet<PathBuf> {
    synced.iter().map(|&file| files.directory(file)).chain(made.directories.iter().cloned()).collect()
}

fn if_there(synced: Result<(), DataDirError>) -> Result<(), DataDirError> {
    match synced {
        // The database was dropped since.
        Err(DataDirError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
