//! When a standby connects and from where, when it looks at archives, pauses, is promoted and ends, and which error ends it: the
//! state machine behind `walrider standby`. It has no thread, socket, file or clock: [`crate::Standby`] tells it what happens and
//! does what it says, and so does the simulator in `crates/sim`. Times are since any fixed moment.
//!
//! WAL comes from the archive and from `pg_wal` first; once replay runs out of it, it is streamed
//! (`WaitForWALToBecomeAvailable`, `access/transam/xlogrecovery.c`, PostgreSQL 18). Unlike there, the receiver itself connects
//! again when a connection is lost, however far replay lags. Archives are looked at again only when nothing is left to replay.

use std::time::Duration;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_replay::upstream::{Missing, News, Wanted};
use walrider_stream::error::ReceiveError;

/// Longest wait for WAL before looking around: for files that tell what to do, for timelines.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// First pause after a connection failed; each further one is twice as long, up to [`Rules::retry_interval`].
pub const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// WAL that is to be streamed, from there on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// The first byte.
    pub start: Lsn,
    /// On which timeline.
    pub timeline: TimelineId,
}

/// The connection to the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Link {
    /// There is none, and nobody works on it.
    #[default]
    Down,
    /// One is being made.
    Connecting,
    /// WAL streams in.
    Up,
}

/// What the settings say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// There is a primary to connect to.
    pub has_primary: bool,
    /// Longest pause between attempts to connect, and how often archives are looked at.
    pub retry_interval: Duration,
}

/// What somebody outside wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// End as soon as possible.
    Stop,
    /// End receiving, and then recovery.
    Promote,
    /// Pause replay, or resume it.
    Pause(bool),
    /// Other settings; `reconnects`: the session at hand cannot go on with them.
    Reload {
        /// The new ones.
        rules: Rules,
        /// The session ends.
        reconnects: bool,
    },
}

/// What is to be done about an event. All that wait are woken after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The session at hand ends, and no other begins before [`Machine::next_session`] says so.
    EndSession,
    /// Something changed that is to be logged.
    Log(&'static str),
}

/// What the receiver does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A session.
    Begin(Task),
    /// Nothing before this time has passed, if one is given, or something changes. Sessions may begin again.
    Sleep(Option<Duration>),
    /// Nothing any more.
    Finish,
}

/// Where the spool stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    /// The timeline that is written; zero before anything was.
    pub timeline: TimelineId,
    /// End of what is in segments.
    pub written: Lsn,
}

/// Why a session ended, or why there was none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As [`Action::EndSession`] had asked.
    Asked,
    /// The primary left the timeline.
    Timeline,
    /// It failed.
    Failed(Failure),
}

/// What helps against an error of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Time, or another primary behind the same name.
    Passing,
    /// An archive: the primary does not have that WAL.
    MissingWal,
    /// Somebody who sets right what we were told, or where we were sent.
    Misdirected,
    /// Nothing.
    Final,
}

impl From<&ReceiveError> for Failure {
    fn from(error: &ReceiveError) -> Failure {
        match () {
            () if error.is_final() => Failure::Final,
            () if error.never_heals() => Failure::Misdirected,
            () if error.is_missing_wal() => Failure::MissingWal,
            () => Failure::Passing,
        }
    }
}

/// What is said about the end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Expected,
    /// That it ended, as it has to now and then.
    Note,
    /// The error; the session is tried again.
    Warn,
    /// The same, of an error that does not go away by itself.
    Complain,
    /// The error; the standby ends with it.
    Fatal,
}

/// How replay waits for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It need not.
    No(News),
    /// Until more than `past` is written, for [`LOOK_INTERVAL`], or until it is woken; then [`Machine::waited`] tells.
    ForWal {
        /// What was written when it last looked.
        past: Lsn,
    },
    /// While [`Machine::is_quiet`], and no longer than `time`; then [`News::Perhaps`]. `requests`: the receiver has something to do.
    ForChange {
        /// The longest wait.
        time: Duration,
        /// What is to be streamed, if that is news.
        requests: Option<Task>,
    },
    /// It need not, as with [`News::Perhaps`]: the session at hand ends, as [`Action::EndSession`] says.
    EndSession,
    /// Nothing will come: the error that was fatal ends it.
    Failed,
}

/// When the files that tell what to do are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// For the first time: what is there may be left over from an earlier run.
    First,
    /// Once more.
    Again,
    /// Not now.
    No,
}

/// What was wanted from outside so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Wishes {
    /// To end.
    pub stops: bool,
    /// To be promoted.
    pub promotes: bool,
    /// That replay pauses.
    pub paused: bool,
}

impl Wishes {
    /// Nothing more is to be received.
    fn ends_receiving(self) -> bool {
        self.stops || self.promotes
    }
}

/// Pauses between attempts to connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Retry {
    /// Not before then.
    at: Option<Duration>,
    /// How many attempts in a row have failed.
    failures: u32,
}

impl Retry {
    fn put_off(&mut self, longest: Duration, now: Duration) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(longest);
        *self = Retry { at: Some(now + pause), failures: self.failures.saturating_add(1) };
    }

    fn pause(&self, now: Duration) -> Option<Duration> {
        self.at.map(|at| at.saturating_sub(now)).filter(|pause| !pause.is_zero())
    }
}

/// A standby's decisions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    rules: Rules,
    wishes: Wishes,
    /// [`Action::EndSession`] holds.
    ends: bool,
    /// There was a fatal error, and replay has not been told yet.
    failed: bool,
    link: Link,
    /// What replay asks for.
    request: Option<Task>,
    /// Where the receiver goes on by itself.
    next: Option<Task>,
    /// From where on `pg_wal` has this timeline without gaps up to what is written: WAL streams in, or did until just now.
    stream: Option<Task>,
    /// The same of the newest stream, also when it has ended.
    begun: Option<Task>,
    /// The session at hand is of no use, and no other goes on where it ends.
    useless: bool,
    /// What the primary has no WAL for, if that is how the last attempt ended.
    refused: Option<Task>,
    /// What was not asked for because of that, but the next segment.
    skipped: Option<Task>,
    retry: Retry,
    /// When the session at hand began to stream, and how many did.
    since: Option<Duration>,
    sessions: u64,
    /// Sessions, and attempts at one, that have ended; how many of them replay knows of.
    ended: u64,
    ended_seen: u64,
    /// What replay could see when it was last told of news; invalid: it looks at everything first.
    seen: Lsn,
    looked_at: Option<Duration>,
}

impl Machine {
    /// One that has not begun.
    pub fn new(rules: Rules) -> Machine {
        Machine {
            rules,
            wishes: Wishes::default(),
            ends: false,
            failed: false,
            link: Link::Down,
            request: None,
            next: None,
            stream: None,
            begun: None,
            useless: false,
            refused: None,
            skipped: None,
            retry: Retry::default(),
            since: None,
            sessions: 0,
            ended: 0,
            ended_seen: 0,
            seen: Lsn::INVALID,
            looked_at: None,
        }
    }

    /// Panics where what it knows contradicts itself, in builds with assertions. Called wherever something changes.
    fn check(&self) {
        debug_assert!(self.link != Link::Up || (self.stream.is_some() && self.since.is_some()), "{self:?}");
        debug_assert!(self.link == Link::Up || self.since.is_none(), "{self:?}");
        debug_assert!(self.ended_seen <= self.ended, "{self:?}");
        // Else a session could begin that nobody would end.
        debug_assert!(self.ends || !self.wishes.ends_receiving(), "{self:?}");
    }

    /// Somebody outside wants something.
    pub fn hear(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Stop => self.wishes.stops = true,
            Event::Promote => {
                if !std::mem::replace(&mut self.wishes.promotes, true) {
                    actions.push(Action::Log("received promote request"));
                }
            }
            Event::Pause(paused) => {
                if std::mem::replace(&mut self.wishes.paused, paused) != paused {
                    let log = if paused { "replay is paused; WAL is still received" } else { "replay goes on" };
                    actions.push(Action::Log(log));
                }
            }
            Event::Reload { rules, reconnects } => {
                self.rules = rules;
                if !self.rules.has_primary {
                    // Nobody is asked any more, who is somewhere by default.
                    (self.request, self.next) = (None, None);
                    if self.link == Link::Down {
                        self.stream = None;
                    }
                }
                if reconnects {
                    actions.push(Action::Log("the connection string or slot has changed: connecting again"));
                    self.retry = Retry::default();
                }
            }
        }
        if matches!(event, Event::Stop | Event::Promote | Event::Reload { reconnects: true, .. }) {
            self.ends = true;
            actions.push(Action::EndSession);
        }
        self.check();
        actions
    }

    // The receiver

    /// No session is there: what comes next.
    pub fn next_session(&mut self, now: Duration) -> Next {
        (self.link, self.since) = (Link::Down, None);
        if self.wishes.ends_receiving() {
            // What comes in may lie past what was replayed from `pg_wal`: from now on that counts, as a whole.
            (self.next, self.stream) = (None, None);
            return Next::Finish;
        }
        // Ended for a new session, which is this one.
        self.ends = false;
        let pause = self.retry.pause(now);
        if pause.is_none()
            && let Some(task) = self.next.take().or(self.request.take())
        {
            self.link = Link::Connecting;
            self.check();
            return Next::Begin(task);
        }
        self.check();
        Next::Sleep(pause)
    }

    /// WAL streams in from now on, as the task says. False: it is not wanted any more.
    pub fn session_begins(&mut self, task: Task, now: Duration) -> bool {
        debug_assert_eq!(self.link, Link::Connecting);
        if self.wishes.ends_receiving() {
            return false;
        }
        // It goes on where the last one ended.
        let stream = self.stream.filter(|before| before.timeline == task.timeline).unwrap_or(task);
        debug_assert!(stream.start <= task.start, "{self:?}");
        (self.link, self.stream, self.since) = (Link::Up, Some(stream), Some(now));
        (self.begun, self.request) = (Some(stream), None);
        self.retry.at = None;
        self.seen = Lsn::INVALID;
        self.sessions += 1;
        self.check();
        true
    }

    /// The session for `task` is over, or did not come about.
    pub fn session_ends(&mut self, task: Task, stored: Stored, how: Ended, now: Duration) -> Verdict {
        // What was written goes on where it is, if it is this task's.
        let next = Some(Task { start: stored.written, timeline: task.timeline })
            .filter(|next| stored.timeline == task.timeline && next.start >= task.start);
        let (next, in_vain, verdict) = match how {
            Ended::Asked => (next.or(Some(task)), false, Verdict::Expected),
            // More than once in a row only while replay has not found the way to the next timeline.
            Ended::Timeline => (None, stored.written == task.start, Verdict::Note),
            Ended::Failed(_) if self.ends => (next.or(Some(task)), false, Verdict::Expected),
            Ended::Failed(Failure::Final) => (None, true, Verdict::Fatal),
            // Once WAL has streamed in, the primary was the right one, and may become so again.
            Ended::Failed(Failure::Misdirected) if self.sessions == 0 => (None, true, Verdict::Fatal),
            Ended::Failed(Failure::Misdirected) => (next, true, Verdict::Complain),
            Ended::Failed(Failure::MissingWal) => (None, true, Verdict::Warn),
            Ended::Failed(Failure::Passing) => (next, true, Verdict::Warn),
        };
        let lasted = self.since.take().map(|since| now.saturating_sub(since));
        if !in_vain || lasted.is_some_and(|lasted| lasted > self.rules.retry_interval) {
            self.retry.failures = 0;
        }
        if in_vain {
            self.retry.put_off(self.rules.retry_interval, now);
        }
        // Another way round is tried once, and no more: what was refused before is asked for again.
        self.refused = Some(task).filter(|_| how == Ended::Failed(Failure::MissingWal));
        let next = next.filter(|_| !std::mem::take(&mut self.useless)).filter(|_| self.rules.has_primary);
        self.link = Link::Down;
        self.next = next;
        self.ended += 1;
        self.failed |= verdict == Verdict::Fatal;
        if next.is_none() {
            self.stream = None;
        }
        self.check();
        verdict
    }

    // Replay

    /// Whether it is time to look for the files that tell what to do.
    pub fn look(&mut self, now: Duration) -> Look {
        match self.looked_at {
            Some(at) if now.saturating_sub(at) < LOOK_INTERVAL => Look::No,
            before => {
                self.looked_at = Some(now);
                if before.is_none() { Look::First } else { Look::Again }
            }
        }
    }

    /// What replay is to do.
    pub fn wanted(&self) -> Wanted {
        match () {
            () if self.wishes.stops => Wanted::Stop,
            // Only once nothing more comes in, and all counts that is in `pg_wal`: not before the receiver has finished.
            () if self.wishes.promotes && self.link == Link::Down && self.stream.is_none() => Wanted::Promote,
            () if self.wishes.promotes => Wanted::Follow,
            () if self.wishes.paused => Wanted::Pause,
            () => Wanted::Follow,
        }
    }

    /// Replay has found nothing more: how it waits.
    pub fn wait(&mut self, missing: Missing, stored: Stored, size: SegmentSize) -> Wait {
        if std::mem::take(&mut self.failed) {
            return Wait::Failed;
        }
        if self.wishes.ends_receiving() {
            return Wait::No(News::Perhaps);
        }
        let asked = Task { start: size.start_of(size.segment_of(missing.needed)), timeline: missing.timeline };
        if let Some(stream) = self.stream {
            let same_timeline = stream.timeline == missing.timeline;
            // A power loss has damaged a record that goes on in the segment with which the stream begins.
            let precedes = same_timeline && missing.needed < stream.start && self.seen.is_valid();
            if precedes && self.skipped != Some(asked) {
                return self.give_up();
            }
            return self.wait_for_stream(same_timeline, stored.written);
        }
        // Why it ended may be that there are new timelines, or that an archive has to help out.
        if self.ended != self.ended_seen {
            self.ended_seen = self.ended;
            return Wait::No(News::Perhaps);
        }
        let mut requests = None;
        if self.rules.has_primary && self.request.is_none() && self.link == Link::Down {
            // What was streamed before is there without gaps. The primary may not have the segment any more that it ends in, and an
            // archive has had all of it.
            let has = |begun: Task| begun.timeline == missing.timeline && begun.start <= missing.needed;
            let goes_on = self.begun.is_some_and(has)
                && stored.timeline == missing.timeline
                && stored.written >= missing.replayed
                && self.refused != Some(Task { start: stored.written, ..asked });
            // What is there may be right, and the damage in the next segment, where the record goes on.
            let skips = missing.has_wal && self.refused == Some(asked);
            self.skipped = Some(asked).filter(|_| skips && !goes_on);
            let start = match (goes_on, skips) {
                (true, _) => stored.written,
                (false, true) => size.start_of(size.segment_of(asked.start) + 1),
                (false, false) => asked.start,
            };
            requests = Some(Task { start, ..asked });
            self.request = requests;
        }
        self.check();
        Wait::ForChange { time: self.rules.retry_interval.max(FIRST_PAUSE), requests }
    }

    /// What streams in does not help: there is nothing before it that replay needs.
    fn give_up(&mut self) -> Wait {
        if self.link == Link::Down {
            (self.stream, self.next) = (None, None);
            return Wait::No(News::Perhaps);
        }
        if std::mem::replace(&mut self.useless, true) {
            return Wait::ForWal { past: self.seen };
        }
        self.ends = true;
        Wait::EndSession
    }

    /// WAL is streamed, on the timeline that replay asks for or another.
    fn wait_for_stream(&mut self, same_timeline: bool, written: Lsn) -> Wait {
        if !self.seen.is_valid() {
            // Segments that were found elsewhere, or on the timeline before, may have come once more.
            self.seen = written;
            return Wait::No(News::Perhaps);
        }
        if written > self.seen {
            self.seen = written;
            return Wait::No(News::More);
        }
        if self.link == Link::Down && same_timeline {
            // All is replayed, and nothing comes: perhaps the archive has more.
            (self.stream, self.next) = (None, None);
            return Wait::No(News::Perhaps);
        }
        Wait::ForWal { past: self.seen }
    }

    /// The wait that [`Wait::ForWal`] asked for is over.
    pub fn waited(&mut self, written: Lsn) -> News {
        self.seen = self.seen.max(written);
        News::More
    }

    /// Whether nothing has come that [`Wait::ForChange`] waits for.
    pub fn is_quiet(&self) -> bool {
        self.stream.is_none() && self.ended == self.ended_seen && !self.wishes.ends_receiving()
    }

    /// Where the WAL that may be replayed ends (exclusive): what is past it in `pg_wal` came from somewhere before, and comes
    /// again. Not known where nothing streams in; then everything counts that is valid.
    pub fn visible(&self, stored: Stored) -> Option<Lsn> {
        self.stream.map(|_| stored.written)
    }

    /// From where on WAL streams in, or did until just now: archives are not looked at for it. A record may begin before.
    pub fn streams_from(&self) -> Option<Lsn> {
        self.stream.map(|stream| stream.start)
    }

    // For the status

    /// The connection.
    pub fn link(&self) -> Link {
        self.link
    }

    /// What was wanted so far.
    pub fn wishes(&self) -> Wishes {
        self.wishes
    }

    /// How many sessions have streamed.
    pub fn sessions(&self) -> u64 {
        self.sessions
    }
}

#[cfg(test)]
mod tests;
