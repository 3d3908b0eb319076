//! Following WAL that is still being written: replays what there is, and waits for more.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_datadir::watch::{Watch, Woken};
use walrider_layout::history::TimelineHistory;
use walrider_layout::wal::page_of;
use walrider_layout::{Lsn, XLOG_BLCKSZ};
use walrider_store::StoreError;
use walrider_store::read::{ReadWal, agrees, has_page};
use walrider_store::source::Source;
use walrider_wal::decode::WalFormat;

use crate::engine::{Engine, Flow, Stop};
use crate::error::ReplayError;
use crate::stages::Stage;
use crate::stats::Stats;
use crate::upstream::{Missing, News, Upstream, Wanted};

/// Between two looks for a new timeline while replay is paused: a command may be asked each time.
const TIMELINE_INTERVAL: Duration = Duration::from_secs(5);
/// How often to look for more where changes have shown by themselves: in case that one does not.
const SAFETY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look where they have not: on a network file system, or through a link into another directory.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often to run `restore_command` (`wal_retrieve_retry_interval`).
const COMMAND_INTERVAL: Duration = Duration::from_secs(5);
/// Whether the WAL is damaged where it ends is looked at after this time, and must be so twice: what is being written, in
/// whatever order, looks damaged for a moment.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Then it is looked at from time to time, less and less often, but at least this often.
const LONGEST_SETTLE_TIME: Duration = Duration::from_secs(60);

/// How following ended.
#[derive(Debug)]
pub struct Followed {
    /// Why.
    pub stop: Stop,
    /// Recovery ends here, too: it is to be a primary's directory. What is wanted from now on changes nothing about it.
    pub promotes: bool,
}

/// What a replay that follows does where it finds the end of WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// Waits for more.
    Wait,
    /// Looks once more, at all files again.
    LookAgain,
    /// Has what was held back released ([`Upstream::release`]); recovery ends here if there is none.
    Release,
}

/// What to do at the end of WAL, if that was found while this was `wanted`, after this `news`; `moved`: something was replayed.
pub fn at_end(wanted: Wanted, news: News, moved: bool) -> AtEnd {
    match (wanted, news) {
        // Promoted in the middle of something, the whole of what there is counts.
        (Wanted::Promote, News::Perhaps) if !moved => AtEnd::Release,
        (Wanted::Promote, _) => AtEnd::LookAgain,
        _ => AtEnd::Wait,
    }
}

/// Replays until there is a reason to stop that waiting does not cure. `latest`: goes over to a new timeline when one
/// branches off. `upstream`: who brings the WAL; without, it comes into the source's directories by itself.
///
/// # Errors
/// As [`Engine::run`].
pub fn follow(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    upstream: Option<Arc<dyn Upstream>>,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Followed, ReplayError> {
    match upstream {
        Some(upstream) => follow_upstream(engine, source, latest, &*upstream, progress),
        None => Ok(Followed { stop: follow_directories(engine, source, latest, progress)?, promotes: false }),
    }
}

/// Follows what brings WAL, as it is wanted.
fn follow_upstream(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    upstream: &dyn Upstream,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Followed, ReplayError> {
    keep_histories(source, upstream)?;
    let mut news = News::Perhaps;
    // When replay last got on.
    let mut since = Instant::now();
    let (mut damaged, mut looked) = (None, Instant::now());
    loop {
        // The one time that this is asked: the answer holds until the next round, or to the end.
        let wanted = upstream.wanted();
        let promotes = wanted == Wanted::Promote;
        match wanted {
            Wanted::Stop => return Ok(Followed { stop: Stop::Interrupted, promotes }),
            Wanted::Pause => {
                // WAL is received all the same.
                let _pause = engine.stats.stages.enter(Stage::Pause);
                let news = bring_more(engine, source, upstream, "replay is paused")?;
                if news == News::Perhaps && latest && looked.elapsed() >= TIMELINE_INTERVAL {
                    looked = Instant::now();
                    if look_for_timeline(engine, source)? {
                        keep_histories(source, upstream)?;
                    }
                }
                upstream.sleep(SAFETY_INTERVAL);
                continue;
            }
            Wanted::Follow | Wanted::Promote => {}
        }
        match news {
            News::More => source.forget_missing(),
            News::Perhaps => source.close_all(),
        }
        let delay = Some(upstream.min_apply_delay()).filter(|delay| !delay.is_zero() && wanted == Wanted::Follow);
        engine.commits_wait_from(delay.map(|delay| TimestampTz::from(SystemTime::now() - delay)));
        let before = engine.replayed();
        // What streams in has no gaps: where it is not valid for long, it is damaged. What lies there from before may have
        // some, and is streamed again.
        let visible = upstream.visible();
        let more = visible > Lsn(before.0 + 2 * XLOG_BLCKSZ as u64);
        let streamed = upstream.streams_from().is_some_and(|from| from <= before);
        engine.look_past(streamed && more && since.elapsed() >= SETTLE_TIME);
        let stop = engine.run(progress)?;
        if engine.replayed() > before {
            (since, damaged) = (Instant::now(), None);
        }
        match stop {
            Stop::EndOfWal { why } => match at_end(wanted, news, engine.replayed() > before) {
                AtEnd::Wait => {
                    if engine.replayed() == before {
                        // What has come since `run` looked ends the rest, too.
                        engine.rest(|| upstream.visible() != visible)?;
                    }
                    news = wait_for_more(engine, source, upstream, &why)?;
                    if news == News::Perhaps && latest && look_for_timeline(engine, source)? {
                        keep_histories(source, upstream)?;
                    }
                }
                AtEnd::LookAgain => news = News::Perhaps,
                AtEnd::Release if release(engine, source, upstream)? => {}
                AtEnd::Release => return Ok(Followed { stop: Stop::EndOfWal { why }, promotes }),
            },
            // Being written just now, perhaps.
            Stop::Corrupt { lsn, .. } if damaged != Some(lsn) => (since, damaged) = (Instant::now(), Some(lsn)),
            Stop::ApplyDelay { committed } => {
                let due = SystemTime::now() - delay.unwrap_or_default();
                let micros = committed.0.saturating_sub(TimestampTz::from(due).0);
                let _delay = engine.stats.stages.enter(Stage::Delay);
                upstream.sleep(Duration::from_micros(micros.max(0) as u64).min(SAFETY_INTERVAL));
                news = News::More;
            }
            Stop::Interrupted => {}
            stop => return Ok(Followed { stop, promotes }),
        }
    }
}

/// Has what was held back released; whether there was any.
fn release(engine: &Engine<'_>, source: &Source, upstream: &dyn Upstream) -> Result<bool, ReplayError> {
    let used = engine.used();
    let size = engine.format().segment_size;
    let same = &mut |at, bytes: &[u8]| agrees(source, size, at, bytes);
    upstream.release(used, source.timeline_at(used), &source.history(), same)
}

/// Waits until somebody has brought more.
fn wait_for_more(
    engine: &Engine<'_>,
    source: &Source,
    upstream: &dyn Upstream,
    why: &str,
) -> Result<News, ReplayError> {
    let _wait = engine.stats.stages.enter(Stage::Wait);
    bring_more(engine, source, upstream, why)
}

/// Has more brought, and waits as [`Upstream::wait`] does.
fn bring_more(engine: &Engine<'_>, source: &Source, upstream: &dyn Upstream, why: &str) -> Result<News, ReplayError> {
    let needed = engine.needed();
    upstream.wait(missing(source, engine.format(), engine.replayed(), needed)?, why)
}

/// What is missing where replay has got to `replayed`, and finds nothing at `needed`.
///
/// # Errors
/// When looking for it fails.
pub fn missing(source: &Source, format: &WalFormat, replayed: Lsn, needed: Lsn) -> Result<Missing, StoreError> {
    let (timeline, has_wal) = (source.timeline_needed(needed), has_page(source, format, page_of(needed))?);
    Ok(Missing { replayed, needed, timeline, has_wal })
}

/// Follows what is written into the source's directories.
fn follow_directories(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    let mut waiting = Waiting::new(source);
    // When the WAL's end was new, or last looked at, and how long to leave it alone from then on.
    let (mut since, mut settle) = (Instant::now(), SETTLE_TIME);
    let mut damaged = None;
    loop {
        let before = engine.replayed();
        let looks = since.elapsed() >= settle;
        engine.look_past(looks);
        let stop = engine.run(progress)?;
        let more = engine.replayed() > before;
        waiting.note(more);
        match &stop {
            Stop::EndOfWal { .. } if more => (since, settle, damaged) = (Instant::now(), SETTLE_TIME, None),
            Stop::EndOfWal { .. } if looks => {
                (since, settle, damaged) = (Instant::now(), LONGEST_SETTLE_TIME.min(2 * settle), None);
            }
            Stop::EndOfWal { .. } => {}
            // Being written just now, perhaps.
            Stop::Corrupt { lsn, .. } if damaged != Some(*lsn) => {
                (since, settle, damaged) = (Instant::now(), SETTLE_TIME, Some(*lsn));
            }
            _ => return Ok(stop),
        }
        if progress(&engine.stats, engine.replayed()) == Flow::Stop {
            return Ok(Stop::Interrupted);
        }
        let wait = engine.stats.stages.enter(Stage::Wait);
        let woken = waiting.wait(source);
        drop(wait);
        if woken != Woken::Written && latest {
            look_for_timeline(engine, source)?;
        }
    }
}

/// Goes over to the newest timeline, if it leads through where replay stands (`rescanLatestTimeLine`). Whether there was one.
pub(crate) fn look_for_timeline(engine: &mut Engine<'_>, source: &Source) -> Result<bool, ReplayError> {
    let Some(history) = newer_history(source, engine.replayed())? else { return Ok(false) };
    engine.set_history(history.clone());
    source.set_history(history);
    Ok(true)
}

/// Has the histories of the timelines that are read in `pg_wal`, wherever they were found: who gets WAL from there needs them.
fn keep_histories(source: &Source, upstream: &dyn Upstream) -> Result<(), ReplayError> {
    for entry in source.history().newest_first() {
        if let Some((_, contents)) = source.history_file(entry.timeline)? {
            upstream.keep_history(entry.timeline, &contents)?;
        }
    }
    Ok(())
}

/// The history of the newest timeline, if it is another than is read now, and leads through `replayed`.
///
/// # Errors
/// When looking for it fails.
pub fn newer_history(source: &Source, replayed: Lsn) -> Result<Option<TimelineHistory>, StoreError> {
    let target = source.history().target();
    let newest = source.newest_timeline(target)?;
    if newest == target {
        return Ok(None);
    }
    let history = source.read_history(newest)?;
    Ok(Some(history).filter(|history| history.switch_point(target).is_some_and(|switch| switch >= replayed)))
}

/// How to learn that there may be more WAL.
struct Waiting {
    watch: Watch,
    fetches: bool,
    /// What came last showed by itself.
    shows: bool,
    woken: Woken,
}

impl Waiting {
    fn new(source: &Source) -> Waiting {
        // Fetching changes pg_wal: we would wake ourselves.
        let fetches = source.fetches();
        let watch = Watch::new(if fetches { Vec::new() } else { source.directories() });
        // What was found before may have changed meanwhile.
        source.close_all();
        Waiting { watch, fetches, shows: false, woken: Woken::Timeout }
    }

    /// Notes whether there was more WAL after the last wait.
    fn note(&mut self, more: bool) {
        if more {
            self.shows = self.woken != Woken::Timeout;
        }
    }

    /// Waits until there may be more WAL, and has the source look again for what may have changed.
    fn wait(&mut self, source: &Source) -> Woken {
        self.woken = self.watch.wait(match self {
            Waiting { fetches: true, .. } => COMMAND_INTERVAL,
            Waiting { shows: true, .. } => SAFETY_INTERVAL,
            _ => POLL_INTERVAL,
        });
        if self.woken != Woken::Written {
            source.close_all();
        }
        self.woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promotion_ends_recovery_where_a_second_look_finds_no_more() {
        for (news, moved, expected) in [
            (News::More, false, AtEnd::LookAgain),
            (News::More, true, AtEnd::LookAgain),
            (News::Perhaps, true, AtEnd::LookAgain),
            (News::Perhaps, false, AtEnd::Release),
        ] {
            assert_eq!(at_end(Wanted::Promote, news, moved), expected);
            assert_eq!(at_end(Wanted::Follow, news, moved), AtEnd::Wait);
        }
    }
}
