//! The positions under every order of events that a small world allows: a primary that sends its WAL before it has flushed
//! it, a link, a standby, clients that wait for its flush. Everything may crash, and the primary may go for good.
//!
//! The standby's decisions are [`Positions`], [`Tail`] and [`decide`], the code that runs; what is around it is modelled. An LSN is the
//! number of records before it; a record is one byte, the number of the primary's run that wrote it; each record is a commit.

mod traces;

use std::time::Duration;

use stateright::{Checker, Model, Property};
use walrider_layout::Lsn;
use walrider_spool::Tail;
use walrider_spool::decide::{self, LogEnds};
use walrider_stream::positions::{Positions, Report};
use walrider_wire::pulse::{Link, Timing};

type Run = u8;
type Log = Vec<Run>;

const NEVER: Timing = Timing { status_interval: Duration::ZERO, timeout: Duration::ZERO };
const NOW: Duration = Duration::ZERO;

fn lsn(records: usize) -> Lsn {
    Lsn(records as u64)
}

fn records(lsn: Lsn) -> usize {
    lsn.0 as usize
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Primary {
    up: bool,
    /// Gone for good.
    lost: bool,
    run: Run,
    log: Log,
    flushed: usize,
    /// What the standby has reported as flushed in this session.
    standby_flushed: usize,
}

/// An entry of the early log; without a record: nothing from there on counts.
type Entry = (usize, Option<Run>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Standby {
    positions: Positions,
    up: bool,
    /// What is in segments, in the operating system at least.
    segments: Log,
    segments_flushed: usize,
    /// The early log, as far as segments do not have it durably, and how much of it is durable.
    log: Vec<Entry>,
    log_flushed: usize,
    /// What the log has as a whole.
    ends: LogEnds,
    /// What is held past the segments.
    tail: Tail,
    applied: Log,
    promoted: bool,
}

impl Standby {
    /// A record has come, or nothing but a horizon: what `Writer::write_ahead` does about it.
    fn receive(&mut self, at: usize, record: &[Run]) {
        let horizon = self.positions.horizon();
        if let Some(from) = decide::taken_back(&self.tail, lsn(at), record, horizon) {
            self.discard(from);
        }
        let (end, flushed) = (lsn(at + record.len()), lsn(self.segments_flushed));
        let parts = decide::parts(&self.tail, (lsn(at), end), horizon, &self.ends, flushed);
        let piece = |from: Lsn, to: Lsn| &record[records(from) - at..records(to) - at];
        self.segments.extend_from_slice(piece(lsn(at), parts.before));
        self.positions.holds(parts.known);
        if parts.settled > parts.known {
            self.advance();
            self.segments.extend_from_slice(piece(parts.known, parts.settled));
            self.positions.holds(parts.settled);
        }
        let ahead = piece(parts.settled, end);
        if !ahead.is_empty() {
            self.log.extend(ahead.iter().map(|&record| (records(parts.settled), Some(record))));
            self.ends.appended(parts.settled, ahead.len() as u64);
            self.tail.extend(parts.settled, ahead);
            self.positions.holds(end);
        }
        self.advance();
    }

    /// What is held from there on counts no more; durable on return.
    fn discard(&mut self, from: Lsn) {
        self.log.push((records(from), None));
        self.ends.appended(from, 0);
        self.sync_log();
        self.tail.truncate(from);
    }

    /// All entries of the log become durable.
    fn sync_log(&mut self) {
        self.log_flushed = self.log.len();
        self.ends.synced(self.ends.written());
    }

    /// What came in this session, and the primary has flushed, gets into segments.
    fn advance(&mut self) {
        let written = lsn(self.segments.len());
        let upto = decide::settles(written, self.positions.held(), self.positions.horizon());
        if upto > written {
            self.segments.extend_from_slice(self.tail.slice(written, upto));
        }
        self.tail.forget_before(upto);
    }

    /// What the first so many entries of the log say.
    fn held(&self, entries: usize) -> Tail {
        let mut tail = Tail::default();
        for &(at, record) in &self.log[..entries] {
            match record {
                Some(record) => tail.merge(lsn(at), &[record]),
                None => tail.truncate(lsn(at)),
            }
        }
        tail
    }

    /// Up to where all is durable that came in this session.
    fn durable(&self) -> usize {
        records(self.ends.held_durable(lsn(self.segments_flushed)).min(self.positions.held()))
    }

    /// Where a session begins.
    fn start(&self) -> usize {
        self.segments.len()
    }
}

/// A record with its place, and the primary's flush position when it was sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sent {
    at: usize,
    record: Option<Run>,
    wal_end: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Session {
    sent_upto: usize,
    to_standby: Vec<Sent>,
    to_primary: Vec<Report>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    primary: Primary,
    standby: Standby,
    session: Option<Session>,
    /// Commits whose clients were told: the place past the record, and its run.
    acknowledged: Vec<(usize, Run)>,
    /// What the primary's WAL was whenever it crashed.
    histories: Vec<Log>,
    primary_crashes: u8,
    standby_crashes: u8,
    link_losses: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    Insert,
    PrimaryFlushes,
    /// The next record, flushed or not.
    Send,
    Keepalive,
    StandbyReceives,
    /// A flush that began when there was so much.
    SegmentsAreFlushed(usize),
    LogIsFlushed,
    StandbyApplies,
    StandbyReports,
    PrimaryHears,
    Acknowledge(usize),
    /// What is left of its WAL: all that it had flushed, at least.
    PrimaryCrashes {
        kept: usize,
    },
    PrimaryRestarts,
    PrimaryIsLost,
    /// What is left of segments, and of the entries of the log.
    StandbyCrashes {
        segments: usize,
        entries: usize,
    },
    StandbyRestarts,
    LinkFails,
    Connect,
    Promote,
}

/// How much may happen.
#[derive(Clone)]
struct Bounds {
    records: usize,
    primary_crashes: u8,
    standby_crashes: u8,
    link_losses: u8,
    /// A standby that crashes loses some of what it has not made durable; else it is killed, and loses nothing.
    power_losses: bool,
}

impl Model for Bounds {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let primary = Primary { up: true, lost: false, run: 1, log: vec![], flushed: 0, standby_flushed: 0 };
        let standby = Standby {
            positions: Positions::new(NEVER),
            up: true,
            segments: vec![],
            segments_flushed: 0,
            log: vec![],
            log_flushed: 0,
            ends: LogEnds::default(),
            tail: Tail::default(),
            applied: vec![],
            promoted: false,
        };
        vec![World {
            primary,
            standby,
            session: None,
            acknowledged: vec![],
            histories: vec![],
            primary_crashes: 0,
            standby_crashes: 0,
            link_losses: 0,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Event>) {
        let World { primary, standby, session, .. } = world;
        if standby.promoted {
            return;
        }
        if primary.up {
            if primary.log.len() < self.records {
                actions.push(Event::Insert);
            }
            if primary.flushed < primary.log.len() {
                actions.push(Event::PrimaryFlushes);
            }
            for upto in 1..=primary.flushed.min(primary.standby_flushed) {
                let commit = (upto, primary.log[upto - 1]);
                // Only clients of this run are still there to be told.
                if commit.1 == primary.run && !world.acknowledged.contains(&commit) {
                    actions.push(Event::Acknowledge(upto));
                }
            }
            if world.primary_crashes < self.primary_crashes {
                let kept = primary.flushed..=primary.log.len();
                actions.extend(kept.map(|kept| Event::PrimaryCrashes { kept }));
            }
        } else if !primary.lost {
            actions.push(Event::PrimaryRestarts);
            actions.push(Event::PrimaryIsLost);
        }
        if standby.up {
            let unflushed = standby.segments_flushed + 1..=standby.segments.len();
            actions.extend(unflushed.map(Event::SegmentsAreFlushed));
            if standby.log_flushed < standby.log.len() {
                actions.push(Event::LogIsFlushed);
            }
            if standby.applied.len() < standby.segments.len() {
                actions.push(Event::StandbyApplies);
            }
            if world.standby_crashes < self.standby_crashes {
                let least = |flushed, all| if self.power_losses { flushed } else { all };
                for segments in least(standby.segments_flushed, standby.segments.len())..=standby.segments.len() {
                    let entries = least(standby.log_flushed, standby.log.len())..=standby.log.len();
                    actions.extend(entries.map(|entries| Event::StandbyCrashes { segments, entries }));
                }
            }
            if primary.lost {
                actions.push(Event::Promote);
            }
        } else {
            actions.push(Event::StandbyRestarts);
        }
        match session {
            Some(session) => {
                if session.sent_upto < primary.log.len() {
                    actions.push(Event::Send);
                }
                if session.to_standby.last().map(|sent| sent.wal_end) != Some(primary.flushed) {
                    actions.push(Event::Keepalive);
                }
                if !session.to_standby.is_empty() {
                    actions.push(Event::StandbyReceives);
                }
                if standby.positions.clone().report(Link::Quiet, NOW).is_some() {
                    actions.push(Event::StandbyReports);
                }
                if !session.to_primary.is_empty() {
                    actions.push(Event::PrimaryHears);
                }
                if world.link_losses < self.link_losses {
                    actions.push(Event::LinkFails);
                }
            }
            None if primary.up && standby.up => actions.push(Event::Connect),
            None => {}
        }
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut world = last.clone();
        let World { primary, standby, session, histories, acknowledged, .. } = &mut world;
        match event {
            Event::Insert => primary.log.push(primary.run),
            Event::PrimaryFlushes => primary.flushed = primary.log.len(),
            Event::Send => {
                let session = session.as_mut()?;
                let (at, wal_end) = (session.sent_upto, primary.flushed);
                session.to_standby.push(Sent { at, record: Some(primary.log[at]), wal_end });
                session.sent_upto += 1;
            }
            Event::Keepalive => {
                let session = session.as_mut()?;
                session.to_standby.push(Sent { at: session.sent_upto, record: None, wal_end: primary.flushed });
            }
            Event::StandbyReceives => {
                let sent = session.as_mut()?.to_standby.remove(0);
                standby.positions.heard(lsn(sent.wal_end), false, NOW);
                let held = records(standby.positions.held());
                assert!(sent.record.is_none() || sent.at == held, "streaming has no gaps");
                standby.receive(held, sent.record.as_slice());
                standby.positions.holds_durably(lsn(standby.durable()));
            }
            Event::SegmentsAreFlushed(upto) => {
                standby.segments_flushed = upto;
                // Its entries are not needed any more; all that follow are.
                let flushed = standby.segments_flushed;
                let end = |&(at, record): &Entry| at + usize::from(record.is_some());
                let needed = standby.log.iter().position(|entry| end(entry) > flushed).unwrap_or(standby.log.len());
                standby.log.drain(..needed);
                standby.log_flushed = standby.log_flushed.saturating_sub(needed);
                standby.positions.holds_durably(lsn(standby.durable()));
            }
            Event::LogIsFlushed => {
                standby.sync_log();
                standby.positions.holds_durably(lsn(standby.durable()));
            }
            Event::StandbyApplies => {
                let next = standby.segments[standby.applied.len()];
                standby.applied.push(next);
                standby.positions.applied(lsn(standby.applied.len()), true);
            }
            Event::StandbyReports => {
                let report = standby.positions.report(Link::Quiet, NOW)?;
                session.as_mut()?.to_primary.push(report);
            }
            Event::PrimaryHears => {
                let report = session.as_mut()?.to_primary.remove(0);
                primary.standby_flushed = records(report.flush);
            }
            Event::Acknowledge(upto) => {
                let run = primary.log[upto - 1];
                acknowledged.push((upto, run));
                acknowledged.sort_unstable();
            }
            Event::PrimaryCrashes { kept } => {
                histories.push(primary.log.clone());
                primary.log.truncate(kept);
                primary.flushed = kept;
                primary.up = false;
                primary.standby_flushed = 0;
                *session = None;
                world.primary_crashes += 1;
            }
            Event::PrimaryRestarts => {
                primary.up = true;
                primary.run += 1;
            }
            Event::PrimaryIsLost => primary.lost = true,
            Event::StandbyCrashes { segments, entries } => {
                let promised = standby.durable();
                standby.up = false;
                standby.segments.truncate(segments);
                standby.segments_flushed = segments;
                standby.log.truncate(entries);
                standby.log_flushed = entries;
                standby.tail = standby.held(entries);
                standby.ends = LogEnds::recovered(&standby.tail);
                let tail = Some(&standby.tail).filter(|tail| records(tail.start()) <= segments);
                let left = tail.map_or(0, |tail| records(tail.end())).max(segments);
                assert!(left >= promised, "{left} records are left of {promised} that were reported as durable");
                // What is replayed gets into files only behind its WAL (`ensure_durable`).
                standby.applied.truncate(segments);
                standby.positions = Positions::new(NEVER);
                *session = None;
                world.standby_crashes += 1;
            }
            Event::StandbyRestarts => standby.up = true,
            Event::LinkFails => {
                *session = None;
                world.link_losses += 1;
            }
            Event::Connect => {
                let start = standby.start();
                // `Spool::start_at`
                if standby.tail.end() <= lsn(start) {
                    standby.ends = LogEnds::default();
                }
                assert!(start <= primary.flushed, "the primary keeps what it flushed");
                standby.tail.forget_before(lsn(start));
                standby.segments_flushed = start;
                standby.positions.connect(lsn(start), lsn(primary.flushed), NOW);
                primary.standby_flushed = 0;
                *session = Some(Session { sent_upto: start, to_standby: vec![], to_primary: vec![] });
            }
            Event::Promote => {
                // `Spool::release`
                let (replayed, end) = (lsn(standby.segments.len()), standby.tail.end());
                if standby.tail.start() <= replayed && replayed < end {
                    standby.segments.extend_from_slice(standby.tail.slice(replayed, end));
                }
                standby.applied.clone_from(&standby.segments);
                standby.promoted = true;
                *session = None;
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("following, segments have only what the primary has made durable", |_, world: &World| {
                let durable = &world.primary.log[..world.primary.flushed];
                world.standby.promoted || durable.starts_with(&world.standby.segments)
            }),
            Property::always("following, what is in segments is replayed, and nothing else", |_, world: &World| {
                world.standby.promoted || world.standby.segments.starts_with(&world.standby.applied)
            }),
            Property::always("no acknowledged commit is lost at promotion", |_, world: &World| {
                let applied = &world.standby.applied;
                !world.standby.promoted
                    || world.acknowledged.iter().all(|&(upto, run)| applied.get(upto - 1) == Some(&run))
            }),
            Property::always("what is promoted is what the primary once had", |_, world: &World| {
                !world.standby.promoted
                    || world.histories.iter().any(|history| history.starts_with(&world.standby.applied))
            }),
            Property::sometimes("a tail past the horizon is promoted", |_, world: &World| {
                world.standby.promoted && world.standby.applied.len() > records(world.standby.positions.horizon())
            }),
            Property::sometimes("a tail that was never flushed is thrown away", |_, world: &World| {
                world.standby.log.iter().any(|(_, record)| record.is_none())
            }),
            Property::sometimes(
                "an acknowledged commit is in what is promoted, and not in segments",
                |_, world: &World| {
                    let World { standby, acknowledged, .. } = world;
                    let horizon = records(standby.positions.horizon());
                    standby.promoted && acknowledged.iter().any(|&(upto, _)| upto > horizon)
                },
            ),
            Property::sometimes("a tail is confirmed by a primary that has crashed", |_, world: &World| {
                let World { primary, standby, .. } = world;
                primary.run > 1
                    && !standby.tail.is_empty()
                    && records(standby.positions.held()) > standby.segments.len()
            }),
            Property::sometimes("a commit is acknowledged that the horizon does not cover", |_, world: &World| {
                let horizon = records(world.standby.positions.horizon());
                world.acknowledged.iter().any(|&(upto, _)| upto > horizon)
            }),
        ]
    }
}

fn check(bounds: Bounds) {
    let checker = bounds.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!("{} states", checker.unique_state_count());
}

#[test]
fn nothing_is_lost_and_nothing_invented() {
    check(Bounds { records: 2, primary_crashes: 1, standby_crashes: 1, link_losses: 1, power_losses: true });
}

#[test]
fn a_primary_that_crashes_twice_takes_nothing_with_it() {
    check(Bounds { records: 2, primary_crashes: 2, standby_crashes: 0, link_losses: 0, power_losses: true });
}

/// Nine million states: `cargo test --release -p walrider-stream --test model -- --ignored`.
#[test]
#[ignore = "takes minutes, and gigabytes"]
fn nothing_is_lost_and_nothing_invented_in_a_larger_world() {
    check(Bounds { records: 2, primary_crashes: 2, standby_crashes: 1, link_losses: 1, power_losses: true });
}
