//! Whether a directory may be made to follow: looked at while nothing in it has been changed.
//!
//! `standby.signal` says that a directory is a standby's. A promotion removes it, and from then on the directory is a primary's:
//! to follow again, the old primary of all, is what nobody may do unasked. Who the primary is, is asked before anything is
//! written. Where it does not answer, a standby begins with the WAL that it has, as PostgreSQL does; what is no standby yet
//! does not become one.

use std::time::Duration;

use walrider_datadir::DataDir;
use walrider_datadir::durable::{read_file, unlink};
use walrider_datadir::held::shown;
use walrider_layout::control::DbState;
use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineEntry, TimelineHistory, history_file_name};
use walrider_layout::{Lsn, TimelineId};
use walrider_session::ConnectOptions;
use walrider_stream::error::ReceiveError;
use walrider_stream::upstream::{Early, Expected, Opened, Slot, Upstream};

use crate::error::StandbyError;
use crate::settings::Settings;
use crate::shell::{PROMOTING_FILE, Shell};

/// Longest wait for the primary, in case that it does not even refuse: a standby can begin without it.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Errors unless the directory is a standby's, or may be made one, and the primary is the one that it is a copy of. A promotion
/// that was interrupted goes on whatever the primary is.
pub(crate) fn admit(shell: &Shell, data_dir: &DataDir) -> Result<(), StandbyError> {
    let settings = shell.settings();
    let makes = !data_dir.signals().standby;
    if makes && !settings.make_standby {
        return Err(StandbyError::NotAStandby(no_standby(data_dir)));
    }
    if shell.resume_promotion(data_dir.control().checkpoint_copy.timeline)? {
        return Ok(());
    }
    if settings.primary.is_some()
        && let Err(error) = ask(shell, &settings, data_dir, makes)
    {
        if makes || is_foreign(&error) {
            return Err(error);
        }
        if !shell.board.ends() {
            tracing::warn!("the primary could not be asked who it is, replay begins without: {error}");
        }
    }
    // Of a promotion that was finished.
    unlink(&data_dir.path().join(PROMOTING_FILE))?;
    Ok(())
}

/// What keeps a directory without `standby.signal` out, and what to do.
fn no_standby(data_dir: &DataDir) -> String {
    let control = data_dir.control();
    let shown = shown(data_dir.path());
    let shown = shown.display();
    let timeline = control.checkpoint_copy.timeline;
    let so = "create standby.signal in it, or give --make-standby";
    match control.state {
        _ if data_dir.signals().recovery => format!(
            "data directory \"{shown}\" has recovery.signal, and no standby.signal: it is to be recovered, and then to be a \
             primary's (walrider replay). To make it a standby's, {so}"
        ),
        _ if data_dir.label().is_some() => format!(
            "data directory \"{shown}\" is a base backup without standby.signal: nothing says that it is to be a standby's. \
             pg_basebackup -R leaves that file; or {so}"
        ),
        DbState::InArchiveRecovery | DbState::ShutDownInRecovery => format!(
            "data directory \"{shown}\" has no standby.signal, although it was in recovery. If it is to go on as a standby, {so}"
        ),
        state => format!(
            "data directory \"{shown}\" has no standby.signal: it is a primary's, as a promotion leaves it (\"{}\", timeline \
             {timeline}). Start PostgreSQL on it. If it is to follow another primary, take it back with pg_rewind, and {so}",
            state.name()
        ),
    }
}

/// Whether nothing but another directory, or another primary, helps.
fn is_foreign(error: &StandbyError) -> bool {
    let StandbyError::Receive(error) = error else { return false };
    matches!(error, ReceiveError::OtherSystem { .. } | ReceiveError::OtherMajor { .. })
}

/// Asks the primary whether the directory is a copy of it. `makes`: and whether it has gone no further than the primary knows.
fn ask(shell: &Shell, settings: &Settings, data_dir: &DataDir, makes: bool) -> Result<(), StandbyError> {
    let conninfo = settings.primary.as_deref().unwrap_or_default();
    let mut connect =
        ConnectOptions::resolve(conninfo, &settings.application_name_fallback).map_err(ReceiveError::from)?;
    connect.give_up_after(LONGEST_WAIT);
    connect.interrupt_with(shell.board.end_fd());
    let control = data_dir.control();
    let upstream = Upstream {
        connect,
        expected: Expected { system_identifier: Some(control.system_identifier), major: Some(control.major.number()) },
        early: Early::Off,
        // Not before it is known who it is.
        slot: Slot::None,
    };
    let mut opened = upstream.open()?;
    if !makes {
        return Ok(());
    }
    let label = data_dir.label().map_or(TimelineId(0), |label| label.start_timeline);
    let timeline = control.checkpoint_copy.timeline.max(control.min_recovery_point_timeline).max(label);
    // Its last byte that is known of.
    let at = control.checkpoint.max(Lsn(control.min_recovery_point.0.saturating_sub(1)));
    let own = read_file(&data_dir.path().join("pg_wal").join(history_file_name(timeline)), MAX_HISTORY_BYTES)?;
    check_history(&mut opened, timeline, at, own)
}

/// The primary's history must lead through `at` on `timeline`, where the directory stands.
fn check_history(opened: &mut Opened, timeline: TimelineId, at: Lsn, own: Option<Vec<u8>>) -> Result<(), StandbyError> {
    let (newest, flushed) = (opened.identity.timeline, opened.identity.flushed);
    if newest < timeline {
        return Err(ReceiveError::OldTimeline { primary: newest, standby: timeline }.into());
    }
    let refused =
        |why: String| StandbyError::NotAStandby(format!("the directory stands at {at} on timeline {timeline}, {why}"));
    if newest == timeline && flushed < at {
        return Err(refused(format!("the primary at {flushed} only: it lacks WAL that the directory has")));
    }
    if newest == TimelineId(1) {
        return Ok(());
    }
    let (_, text) = opened.connection.timeline_history(newest).map_err(ReceiveError::from)?;
    let parse = |timeline, bytes: &[u8]| TimelineHistory::parse(timeline, &String::from_utf8_lossy(bytes));
    let history = parse(newest, &text).map_err(|error| refused(format!("and the primary sent: {error}")))?;
    // A timeline has its number from the server that began it: two that were promoted by themselves may have chosen the same.
    let begins_there = |entry: &TimelineEntry| {
        history.newest_first().any(|known| (known.timeline, known.begin) == (entry.timeline, entry.begin))
    };
    let own = own.and_then(|own| parse(timeline, &own).ok());
    if history.timeline_at(at) != timeline || own.is_some_and(|own| !own.newest_first().all(begins_there)) {
        return Err(refused(format!(
            "which is not in the history of the primary's timeline {newest}: both have gone on by themselves since they parted; \
             take the directory back with pg_rewind, or make a new base backup"
        )));
    }
    Ok(())
}
