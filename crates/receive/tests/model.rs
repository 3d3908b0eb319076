//! The positions under every order of events that a small world allows: a primary that sends its WAL before it has flushed
//! it, a link, a standby, clients that wait for its flush. Everything may crash, and the primary may go for good.
//!
//! The standby's decisions are [`Positions`], the code that runs; what is around it is modelled. An LSN is the number of
//! records before it; a record is the number of the primary's run that wrote it; each record is a commit.

use std::time::Duration;

use stateright::{Checker, Model, Property};
use walrider_layout::Lsn;
use walrider_receive::positions::{Greeting, Link, Positions, Report, Timing};

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
    /// Where the WAL of each run before this one ended.
    ended: Vec<usize>,
    /// What the standby has reported as flushed in this session.
    standby_flushed: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Standby {
    positions: Positions,
    up: bool,
    /// What it holds, in the operating system at least.
    log: Log,
    flushed: usize,
    /// The horizon as it was made durable with the last flush.
    flushed_horizon: usize,
    applied: Log,
    promoted: bool,
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
    /// Commits whose clients were told: the place behind the record, and its run.
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
    StandbyFlushes,
    StandbyApplies,
    StandbyReports,
    PrimaryHears,
    Acknowledge(usize),
    PrimaryCrashes,
    PrimaryRestarts,
    PrimaryIsLost,
    /// What is left of the WAL behind the last flush, and of the horizon.
    StandbyCrashes {
        held: usize,
        horizon: usize,
    },
    StandbyRestarts,
    LinkFails,
    Connect,
    Promote,
}

/// How much may happen.
struct Bounds {
    records: usize,
    primary_crashes: u8,
    standby_crashes: u8,
    link_losses: u8,
}

impl Model for Bounds {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let primary =
            Primary { up: true, lost: false, run: 1, log: vec![], flushed: 0, ended: vec![], standby_flushed: 0 };
        let standby = Standby {
            positions: Positions::new(NEVER),
            up: true,
            log: vec![],
            flushed: 0,
            flushed_horizon: 0,
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
                actions.push(Event::PrimaryCrashes);
            }
        } else if !primary.lost {
            actions.push(Event::PrimaryRestarts);
            actions.push(Event::PrimaryIsLost);
        }
        if standby.up {
            if standby.flushed < standby.log.len() || standby.flushed_horizon < records(standby.positions.horizon()) {
                actions.push(Event::StandbyFlushes);
            }
            if standby.applied.len() < records(standby.positions.visible()) {
                actions.push(Event::StandbyApplies);
            }
            if world.standby_crashes < self.standby_crashes {
                let known = records(standby.positions.horizon());
                for held in standby.flushed..=standby.log.len() {
                    actions.extend(
                        (standby.flushed_horizon..=known).map(|horizon| Event::StandbyCrashes { held, horizon }),
                    );
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
                if let Some(record) = sent.record {
                    assert_eq!(sent.at, standby.log.len(), "streaming has no gaps");
                    standby.log.push(record);
                    standby.positions.wrote(lsn(standby.log.len()));
                }
            }
            Event::StandbyFlushes => {
                standby.flushed = standby.log.len();
                standby.flushed_horizon = records(standby.positions.horizon());
                standby.positions.flushed(lsn(standby.flushed));
            }
            Event::StandbyApplies => {
                let next = standby.log[standby.applied.len()];
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
            Event::PrimaryCrashes => {
                histories.push(primary.log.clone());
                primary.log.truncate(primary.flushed);
                primary.up = false;
                primary.standby_flushed = 0;
                *session = None;
                world.primary_crashes += 1;
            }
            Event::PrimaryRestarts => {
                primary.up = true;
                primary.run += 1;
                primary.ended.push(primary.log.len());
            }
            Event::PrimaryIsLost => primary.lost = true,
            Event::StandbyCrashes { held, horizon } => {
                standby.up = false;
                standby.log.truncate(held);
                standby.flushed = held;
                standby.flushed_horizon = horizon;
                // What is replayed gets into files only behind its WAL and the horizon (`ensure_durable`).
                standby.applied.truncate(held.min(horizon));
                let run = standby.positions.run();
                standby.positions = Positions::restarted(NEVER, lsn(held), lsn(horizon), run);
                *session = None;
                world.standby_crashes += 1;
            }
            Event::StandbyRestarts => standby.up = true,
            Event::LinkFails => {
                *session = None;
                world.link_losses += 1;
            }
            Event::Connect => {
                let known = standby.positions.run().unwrap_or(primary.run.into()) as usize;
                let kept = primary.ended.get(known - 1).copied().unwrap_or(primary.log.len());
                let greeting = Greeting { flushed: lsn(primary.flushed), run: primary.run.into(), kept: lsn(kept) };
                let start =
                    records(standby.positions.connect(&greeting, NOW).expect("the primary keeps what it flushed"));
                standby.log.truncate(start);
                standby.flushed = standby.flushed.min(start);
                primary.standby_flushed = 0;
                *session = Some(Session { sent_upto: start, to_standby: vec![], to_primary: vec![] });
            }
            Event::Promote => {
                standby.positions.promote();
                let tail = standby.log[standby.applied.len()..records(standby.positions.visible())].to_vec();
                standby.applied.extend(tail);
                standby.promoted = true;
                *session = None;
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("following, only what the primary has made durable is replayed", |_, world: &World| {
                let applied = &world.standby.applied;
                let durable = &world.primary.log[..world.primary.flushed];
                world.standby.promoted || durable.starts_with(applied)
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
            Property::sometimes("a tail behind the horizon is promoted", |_, world: &World| {
                world.standby.promoted && world.standby.applied.len() > records(world.standby.positions.horizon())
            }),
            Property::sometimes("a tail that was never flushed is thrown away", |_, world: &World| {
                let World { primary, standby, .. } = world;
                standby.log.len() > primary.log.len() && primary.run == 2 && primary.up
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
    check(Bounds { records: 2, primary_crashes: 2, standby_crashes: 1, link_losses: 1 });
}

/// 14 million states: `cargo test --release -p walrider-receive --test model -- --ignored`.
#[test]
#[ignore = "takes minutes, and gigabytes"]
fn nothing_is_lost_and_nothing_invented_in_a_larger_world() {
    check(Bounds { records: 3, primary_crashes: 1, standby_crashes: 1, link_losses: 1 });
}
