//! Who brings WAL while replay follows a primary, as replay sees it.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use walrider_datadir::DataDir;
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_store::StoreError;
use walrider_store::source::{Incoming, Kept};

use crate::error::ReplayError;

/// What a replay that follows is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// Follow.
    Follow,
    /// Replay nothing until further notice.
    Pause,
    /// Replay all that there is, and end there. Nothing more is received from now on.
    Promote,
    /// End here.
    Stop,
}

/// What ended a wait for more WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum News {
    /// There is more past the end that was known, in files of the same names.
    More,
    /// Files may have come, and timelines; or nothing has happened for a while.
    Perhaps,
}

/// What replay has found nothing more at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// End of what is replayed.
    pub replayed: Lsn,
    /// The WAL that it does not find; a record that is damaged, where that begins.
    pub needed: Lsn,
    /// On this timeline.
    pub timeline: TimelineId,
    /// There is WAL in the page that it begins in, so that what is missing may be what it goes on in. A file alone does not say so:
    /// one that was made ahead has nothing yet.
    pub has_wal: bool,
}

/// Tells whether replay reads these bytes at a position.
pub type Same<'a> = dyn FnMut(Lsn, &[u8]) -> Result<bool, StoreError> + 'a;

/// Brings WAL into `pg_wal`, and knows how far it may be replayed.
///
/// `replayed` ≤ [`Upstream::visible`], and what replay changes in files of the directory is ≤ what is durable.
pub trait Upstream: Send + Sync {
    /// The directory is locked, and nothing has been changed in it: whether it may be.
    ///
    /// # Errors
    /// When it is not a standby's, or not one of this primary.
    fn admit(&self, data_dir: &DataDir) -> Result<(), ReplayError>;

    /// What replay is to do. Asked between batches.
    fn wanted(&self) -> Wanted;

    /// Brings what is missing, if nobody does yet, and waits until there may be more, until something else is wanted, or for a
    /// while. `why`: what was found instead.
    ///
    /// # Errors
    /// When there never will be more.
    fn wait(&self, missing: Missing, why: &str) -> Result<News, ReplayError>;

    /// Promoting: the last record ends at `used`, in a file of this timeline, and replay finds no more on the way that the history
    /// tells. What was held back because the
    /// primary could have taken it back gets into `pg_wal` now, durably, if `same` says that replay has read what precedes; whether
    /// there was any.
    ///
    /// # Errors
    /// When it cannot be stored, and what `same` fails with.
    fn release(
        &self,
        used: Lsn,
        timeline: TimelineId,
        history: &TimelineHistory,
        same: &mut Same<'_>,
    ) -> Result<bool, ReplayError>;

    /// Waits for a time, or until something else is wanted.
    fn sleep(&self, time: Duration);

    /// Where the WAL that may be replayed ends (exclusive); what `pg_wal` has past it does not count.
    fn visible(&self) -> Lsn;

    /// From where on WAL streams in; archives are looked at for what is before, or for all if nothing does.
    fn streams_from(&self) -> Option<Lsn>;

    /// How long after the primary's commit one is replayed (`recovery_min_apply_delay`).
    fn min_apply_delay(&self) -> Duration;

    /// Returns once the WAL before `upto` is durable: what it says is about to get into the directory's files.
    ///
    /// # Errors
    /// When it cannot be made durable.
    fn ensure_durable(&self, upto: Lsn) -> Result<(), ReplayError>;

    /// A timeline that is read has this history file: keeps it in `pg_wal`, if it is not there.
    ///
    /// # Errors
    /// It cannot be kept.
    fn keep_history(&self, timeline: TimelineId, contents: &[u8]) -> Result<(), ReplayError>;

    /// As [`Incoming::keep_restored`].
    ///
    /// # Errors
    /// The segment cannot be kept.
    fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StoreError>;

    /// Recovery would now begin at `redo`, on this timeline: older WAL is not needed here any more.
    fn restartpoint(&self, redo: Lsn, timeline: TimelineId);
}

/// What a source of WAL asks and tells who brings some.
pub(crate) struct AsIncoming(Arc<dyn Upstream>);

impl AsIncoming {
    pub fn of(upstream: Arc<dyn Upstream>) -> Arc<dyn Incoming> {
        Arc::new(AsIncoming(upstream))
    }
}

impl Incoming for AsIncoming {
    fn visible(&self) -> Lsn {
        self.0.visible()
    }

    fn streams_from(&self) -> Option<Lsn> {
        self.0.streams_from()
    }

    fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StoreError> {
        self.0.keep_restored(name, contents, complete)
    }

    fn restartpoint(&self, redo: Lsn, timeline: TimelineId) {
        self.0.restartpoint(redo, timeline);
    }
}
