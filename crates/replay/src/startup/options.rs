//! What a replay is asked for, and what came of it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use walrider_datadir::DataDir;
use walrider_datadir::recovery_settings::{RecoveryTarget, TargetTimeline};
use walrider_layout::{Lsn, TimelineId};
use walrider_store::driver::{Driver, FetchStats};
use walrider_store::restore::Refusal;

use crate::base::Base;
use crate::end_of_recovery::Promoted;
use crate::engine::Stop;
use crate::restartpoint::RestartpointPolicy;
use crate::stats::Stats;
use crate::upstream::Upstream;

/// What to replay, where to, how far.
#[derive(Clone)]
pub struct Options {
    /// The data directory.
    pub data_dir: PathBuf,
    /// `postgresql.conf`, where it is not in the data directory.
    pub config_file: Option<PathBuf>,
    /// A directory with WAL; without, what the directory's own configuration says.
    pub wal: Option<PathBuf>,
    /// An archive to read from instead.
    pub archive: Option<NamedArchive>,
    /// Recovery targets of the configuration count. In a base backup they are those of an earlier recovery.
    pub configured_target: bool,
    /// Where to stop; without, what the configuration says.
    pub target: Option<RecoveryTarget>,
    /// `recovery_target_inclusive`; without, what the configuration says.
    pub inclusive: Option<bool>,
    /// The timeline to follow; without, what the configuration says.
    pub timeline: Option<TargetTimeline>,
    /// Memory for pages and WAL.
    pub memory_bytes: u64,
    /// Where batches go that are larger than memory.
    pub spill: SpillOptions,
    /// The relation files of a base backup, where they are not in the directory yet; the one that put the rest of it there keeps servers
    /// out until they are ([`walrider_datadir::config::keep_servers_out`]).
    pub base: Option<Arc<dyn Base>>,
    /// Where tablespaces go that are made on the way; without, where the WAL says.
    pub new_tablespaces: Option<PathBuf>,
    /// Compare pages with `wal_consistency_checking` images.
    pub verify_images: bool,
    /// Wait for more WAL at its end.
    pub follow: bool,
    /// Who ends recovery where replay ends, so that the directory becomes that of a primary on a new timeline. The one that brings
    /// WAL may wish that, too.
    pub promotion: Promotion,
    /// `restore_command`; without, what the configuration says.
    pub restore_command: Option<String>,
    /// How many of these may run at once.
    pub fetch_jobs: usize,
    /// When restartpoints are made.
    pub restartpoints: RestartpointPolicy,
    /// Who brings the WAL: the directory is a standby's. With `follow`.
    pub upstream: Option<Arc<dyn Upstream>>,
}

/// The temporary file of batches that are larger than memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpillOptions {
    /// Most bytes of it; 0: no batch is larger than memory. Without, half of what is free.
    pub bytes: Option<u64>,
    /// Its directory; without, the one for temporary files in the data directory.
    pub directory: Option<PathBuf>,
    /// Every batch goes there, whether that is worth it or not.
    pub always: bool,
}

/// An archive that somebody else knows how to read.
#[derive(Clone)]
pub struct NamedArchive {
    /// Who reads it.
    pub driver: Arc<dyn Driver>,
    /// The `restore_command` with which PostgreSQL reads it.
    pub restore_command: String,
}

/// The same archive, read by whomever.
impl PartialEq for NamedArchive {
    fn eq(&self, other: &NamedArchive) -> bool {
        self.restore_command == other.restore_command
    }
}

impl fmt::Debug for NamedArchive {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.restore_command)
    }
}

/// Who ends recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promotion {
    /// We do where a server would as soon as it reaches the target: `recovery_target_action` is `promote`.
    AsConfigured,
    /// We do, at the target or at the end of the WAL.
    Always,
    /// PostgreSQL does, if anybody.
    Never,
}

/// How a replay went.
#[derive(Debug)]
pub struct Summary {
    /// Why it stopped; `None`: the directory was shut down cleanly, and nobody asked for more WAL.
    pub stop: Option<Stop>,
    /// Where it began.
    pub start: Lsn,
    /// End of the last record replayed.
    pub end: Lsn,
    /// Timeline there.
    pub timeline: TimelineId,
    /// The checkpoint record that recovery begins at now.
    pub checkpoint: Lsn,
    /// Bytes of WAL that PostgreSQL replays again when it starts: those past the redo position of that checkpoint.
    pub again_bytes: u64,
    /// Recovery has ended.
    pub promoted: Option<Promoted>,
    /// Counters and stages.
    pub stats: Stats,
    /// What fetching with `restore_command` cost.
    pub fetch: FetchStats,
    /// What `restore_command` said where the WAL was found to end.
    pub refusal: Option<Refusal>,
    /// From the first record to the last page change.
    pub redo: Duration,
    /// All of it, until everything is durable.
    pub total: Duration,
    /// Settings that were written to `postgresql.auto.conf`, so that PostgreSQL finishes at the same place.
    pub settings_written: Vec<(String, String)>,
}

impl Summary {
    /// Of a directory that was shut down cleanly.
    pub(super) fn nothing_to_do(data_dir: &DataDir, started: Instant) -> Summary {
        let control = data_dir.control();
        Summary {
            stop: None,
            start: control.checkpoint,
            end: control.checkpoint,
            timeline: control.checkpoint_copy.timeline,
            checkpoint: control.checkpoint,
            again_bytes: 0,
            promoted: None,
            stats: Stats::default(),
            fetch: FetchStats::default(),
            refusal: None,
            redo: Duration::ZERO,
            total: started.elapsed(),
            settings_written: Vec::new(),
        }
    }
}
