//! What two samples come to: where each standby is, what its lag is made of, and how fast it could replay. No clock.
//!
//! Lag in time is the age of a position: how long ago the primary had flushed up to there. Positions of servers that answered at
//! different moments can be compared so, and it goes on for a standby that is not connected.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use walrider_layout::Lsn;
use walrider_layout::samples::PositionSamples;
use walrider_observe::status::StandbyStatus;

use crate::content::WalContent;
use crate::sample::{Sample, Server, ServerSample, Walsender};
use crate::slots::{self, SlotView};

/// A process that is seen in a state this often, as a share of all looks, owes its lag to it.
const TELLING: f64 = 0.3;
/// Seconds over which the speed of Walrider's replay is told.
const WINDOW: f64 = 5.0;
/// The most WAL that a walsender sends in one message, in bytes (`walsender.c`, `MAX_SEND_SIZE`).
const LARGEST_MESSAGE: u64 = 128 << 10;
/// Less replay than this, as a share of all time, says nothing of how fast it could be.
const LEAST_UTILISATION: f64 = 0.02;

/// [`Standby::state`] where nobody says.
pub const UNKNOWN: &str = "unknown";

/// What lag is made of, in the order of the way that WAL goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Nothing is sent: the primary has no walsender for it.
    NotConnected,
    /// The primary has not sent it.
    NotSent,
    /// It is on its way.
    Network,
    /// The standby writes it.
    StandbyWrite,
    /// The standby makes it durable.
    StandbyFsync,
    /// It is there, and not replayed; the standby was not asked why.
    Replay,
    /// Replay computes.
    ReplayCpu,
    /// Replay reads pages.
    ReplayRead,
    /// Replay writes, extends or syncs files.
    ReplayWrite,
    /// Replay waits for WAL from an archive, or reads it.
    WalFetch,
    /// Replay waits for queries.
    Conflict,
    /// `recovery_min_apply_delay`
    ApplyDelay,
    /// Replay is paused.
    Paused,
    /// The process that replays is stopped by a signal.
    Stopped,
    /// Replay waits for something else.
    ReplayOther,
}

impl Part {
    /// All of them, in that order.
    pub const ALL: [Part; 15] = [
        Part::NotConnected,
        Part::NotSent,
        Part::Network,
        Part::StandbyWrite,
        Part::StandbyFsync,
        Part::Replay,
        Part::ReplayCpu,
        Part::ReplayRead,
        Part::ReplayWrite,
        Part::WalFetch,
        Part::Conflict,
        Part::ApplyDelay,
        Part::Paused,
        Part::Stopped,
        Part::ReplayOther,
    ];

    /// A word or two, for a column.
    pub fn name(self) -> &'static str {
        match self {
            Part::NotConnected => "not connected",
            Part::NotSent => "not sent",
            Part::Network => "network",
            Part::StandbyWrite => "write",
            Part::StandbyFsync => "fsync",
            Part::Replay => "replay",
            Part::ReplayCpu => "replay CPU",
            Part::ReplayRead => "replay read",
            Part::ReplayWrite => "replay write",
            Part::WalFetch => "WAL fetch",
            Part::Conflict => "conflict",
            Part::ApplyDelay => "apply delay",
            Part::Paused => "paused",
            Part::Stopped => "stopped",
            Part::ReplayOther => "replay other",
        }
    }
}

/// What the process that replays does, by its wait event; `None` while it has nothing to do. The names are those of 13 to 18
/// (`utils/activity/wait_event_names.txt`, 18; `storage/procsignal.h`, before), and without a type the stages of Walrider's status.
pub fn replay_part(wait: &str) -> Option<Part> {
    let (kind, event) = wait.split_once(':').unwrap_or(("", wait));
    Some(match (kind, event) {
        ("", "" | "load" | "sequence" | "gather" | "apply" | "spill" | "fsm") => Part::ReplayCpu,
        ("", "fetch") => Part::WalFetch,
        ("", "read") => Part::ReplayRead,
        ("", "actions" | "write" | "sync") => Part::ReplayWrite,
        ("", "delay") => Part::ApplyDelay,
        ("", "pause") => Part::Paused,
        ("", "wait") => return None,
        (_, "RecoveryWalStream" | "RecoveryWalAll" | "RecoveryRetrieveRetryInterval") => return None,
        (_, "RestoreCommand" | "WALRead" | "WalRead") => Part::WalFetch,
        (_, "RecoveryApplyDelay") => Part::ApplyDelay,
        (_, "RecoveryPause") => Part::Paused,
        ("BufferPin" | "Buffer" | "Lock", _) => Part::Conflict,
        (_, event) if event.starts_with("RecoveryConflict") || event == "BufferCleanup" => Part::Conflict,
        ("IO", event) if event.ends_with("Read") || event.ends_with("Prefetch") || event.starts_with("Aio") => {
            Part::ReplayRead
        }
        ("IO", _) => Part::ReplayWrite,
        _ => Part::ReplayOther,
    })
}

/// Shares of the looks at a process: what it was seen doing. Empty if nobody looked.
fn shares(seen: &BTreeMap<String, u32>) -> BTreeMap<String, f64> {
    let all: u32 = seen.values().sum();
    seen.iter().map(|(wait, times)| (wait.clone(), f64::from(*times) / f64::from(all.max(1)))).collect()
}

/// What Walrider's replay did between two moments, as shares of the time. Empty for two processes.
fn stage_shares(before: &StandbyStatus, now: &StandbyStatus) -> BTreeMap<String, f64> {
    if (before.pid, before.started_at) != (now.pid, now.started_at) {
        return BTreeMap::new();
    }
    let (before, mut stages) = (&before.replay.stages, now.replay.stages.clone());
    stages.iter_mut().for_each(|(stage, time)| *time = (*time - before.get(stage).unwrap_or(&0.0)).max(0.0));
    stages.retain(|_, time| *time > 0.0);
    let all: f64 = stages.values().sum();
    stages.values_mut().for_each(|time| *time /= all);
    stages
}

/// The same shares by what they mean for lag.
fn by_part<T: Ord>(shares: &BTreeMap<String, f64>, part: impl Fn(&str) -> T) -> BTreeMap<T, f64> {
    let mut parts = BTreeMap::new();
    shares.iter().for_each(|(wait, share)| *parts.entry(part(wait)).or_default() += share);
    parts
}

/// A stage of a standby.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Stage {
    /// Where it ends, as text in JSON.
    #[serde(serialize_with = "walrider_observe::status::text::serialize")]
    pub lsn: Option<Lsn>,
    /// Bytes behind the primary's flush.
    pub bytes: Option<u64>,
    /// Seconds behind it.
    pub seconds: Option<f64>,
    /// It is more than `seconds`: it was so before anybody looked.
    pub at_least: bool,
}

/// How replay goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speed {
    /// Bytes of WAL a second that are replayed.
    pub rate: Option<f64>,
    /// Share of the time that the process works, waits for disks or for queries.
    pub utilisation: Option<f64>,
    /// Bytes a second that it could replay: past that it falls behind.
    pub capacity: Option<f64>,
    /// Seconds until it has caught up, as things go; infinite if never, which is null in JSON.
    pub catch_up: Option<f64>,
    /// Processor seconds a second.
    pub cpu: Option<f64>,
}

/// A standby, seen from both ends as far as they answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Standby {
    /// `application_name`, or the name of the server.
    pub name: String,
    /// Where it is.
    pub address: String,
    /// The primary has a walsender for it. Where not, nothing that is shown of it is 0 because nobody said anything.
    pub connected: bool,
    /// `streaming`, `catchup`, ..., `not connected`, or [`UNKNOWN`] while no primary answers.
    pub state: String,
    /// `sync`, `async`, `quorum`, `potential`.
    pub sync_state: Option<String>,
    /// `walrider standby`.
    pub walrider: bool,
    /// It was itself asked, or tried.
    pub asked: bool,
    /// Why it does not answer, if it was asked.
    pub error: Option<String>,
    /// Sent.
    pub sent: Stage,
    /// In the standby's operating system.
    pub write: Stage,
    /// Durable there.
    pub flush: Stage,
    /// Replayed.
    pub replay: Stage,
    /// What its lag is made of, in seconds, the largest first.
    pub parts: Vec<(Part, f64)>,
    /// How replay goes.
    pub speed: Speed,
    /// What the process that replays was seen doing, as shares; empty if the standby was not asked.
    pub replaying: BTreeMap<String, f64>,
    /// The same of the process that receives.
    pub receiving: BTreeMap<String, f64>,
}

impl Standby {
    /// Tells standbys apart: two may have one name.
    pub fn key(&self) -> String {
        format!("{} {}", self.name, self.address)
    }
}

/// A primary with what follows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct View {
    /// Its name.
    pub primary: String,
    /// Why it does not answer.
    pub error: Option<String>,
    /// End of its durable WAL.
    #[serde(serialize_with = "walrider_observe::status::text::serialize")]
    pub flushed: Option<Lsn>,
    /// Bytes of WAL a second.
    pub wal_rate: Option<f64>,
    /// Records a second.
    pub record_rate: Option<f64>,
    /// Full-page images a second.
    pub fpi_rate: Option<f64>,
    /// Transactions a second.
    pub commit_rate: Option<f64>,
    /// Its standbys, by name.
    pub standbys: Vec<Standby>,
    /// Its slots, the one that holds most first.
    pub slots: Vec<SlotView>,
    /// What is not seen, and what would show it.
    pub notes: Vec<String>,
    /// What its WAL is made of, if somebody asked and it is seen.
    pub wal: Option<WalContent>,
}

/// Looks at samples one after the other.
#[derive(Clone, Debug, Default)]
pub struct Observer {
    /// What the primary had flushed when.
    flushed: PositionSamples,
    /// The samples of the last [`WINDOW`], the oldest first.
    recent: VecDeque<Sample>,
    /// What standbys called themselves when they were connected, by address.
    names: BTreeMap<String, String>,
}

impl Observer {
    /// The newest sample; what it comes to, with those before.
    pub fn look(&mut self, sample: &Sample) -> View {
        let Some((at, server)) = sample.primary() else {
            let error =
                sample.servers.iter().find_map(|at| at.error.clone()).or(Some("no primary among the servers".into()));
            let mut standbys = self.standbys(sample, None);
            Observer::name_as_before(&mut self.names, &mut standbys);
            standbys.iter_mut().for_each(forget_primary);
            self.remember(sample);
            return View { error, notes: slots::notes(sample, &standbys), standbys, ..View::default() };
        };
        if let Some(flushed) = server.flush_lsn.filter(|_| at.error.is_none()) {
            self.flushed.note(at.answered_at, flushed);
        }
        let before = self.before(at).and_then(|at| at.server.clone());
        let rate = |of: &dyn Fn(&Server) -> Option<u64>| rate_between(before.as_ref()?, server, of);
        let mut standbys = self.standbys(sample, Some((at, server)));
        Observer::name_as_before(&mut self.names, &mut standbys);
        if at.error.is_some() {
            standbys.iter_mut().for_each(forget_primary);
        }
        let view = View {
            primary: at.name.clone(),
            error: at.error.clone(),
            flushed: server.flush_lsn,
            wal_rate: self.flushed.rate(5.0).filter(|_| at.error.is_none()),
            record_rate: rate(&|server| Some(server.wal?.records)),
            fpi_rate: rate(&|server| Some(server.wal?.fpi)),
            commit_rate: rate(&|server| server.commits),
            slots: if at.error.is_none() { slots::slots(server) } else { Vec::new() },
            wal: at.wal.clone().filter(|wal| wal.unseen.is_none()),
            notes: slots::notes(sample, &standbys),
            standbys,
        };
        self.remember(sample);
        view
    }

    /// One that is not connected does not say what it calls itself when it is.
    fn name_as_before(names: &mut BTreeMap<String, String>, standbys: &mut [Standby]) {
        for standby in standbys.iter_mut().filter(|standby| standby.asked) {
            if standby.connected {
                names.insert(standby.address.clone(), standby.name.clone());
            } else if let Some(name) = names.get(&standby.address) {
                standby.name.clone_from(name);
            }
        }
        standbys.sort_by(|a, b| a.name.cmp(&b.name));
    }

    fn standbys(&self, sample: &Sample, primary: Option<(&ServerSample, &Server)>) -> Vec<Standby> {
        let mut asked: Vec<&ServerSample> = sample.servers.iter().filter(|at| is_standby(at)).collect();
        let senders = primary.map_or(&[][..], |(_, server)| &server.replication);
        let mut standbys: Vec<Standby> = senders
            .iter()
            .filter(|sender| !sender.logical)
            .map(|sender| {
                let alone = senders.len() == 1 && asked.len() == 1;
                let found = (0..asked.len()).filter_map(|nth| Some((likeness(asked[nth], sender, alone)?, nth))).min();
                self.standby(primary, Some(sender), found.map(|(_, nth)| asked.remove(nth)))
            })
            .collect();
        standbys.extend(asked.into_iter().map(|at| self.standby(primary, None, Some(at))));
        standbys
    }

    fn standby(
        &self,
        primary: Option<(&ServerSample, &Server)>,
        sender: Option<&Walsender>,
        asked: Option<&ServerSample>,
    ) -> Standby {
        let flushed = primary.and_then(|(_, server)| server.flush_lsn);
        let primary_at = primary.map_or(0.0, |(at, _)| at.answered_at);
        let live = asked.filter(|at| at.error.is_none());
        let (own, own_at) = (live.map(own_positions).unwrap_or_default(), live.map_or(0.0, |at| at.answered_at));
        let stage = |told: Option<Lsn>, own: Option<Lsn>| {
            // The standby's own word is newer than what has come back to the primary.
            let (lsn, at) = match (own, told) {
                (Some(own), _) => (Some(own), own_at),
                (None, told) => (told, primary_at),
            };
            let age = lsn.and_then(|lsn| self.flushed.age(lsn, at));
            Stage {
                lsn,
                bytes: flushed.zip(lsn).map(|(flushed, lsn)| flushed.0.saturating_sub(lsn.0)),
                seconds: age.map(|(seconds, _)| seconds),
                at_least: age.is_some_and(|(_, least)| least),
            }
        };
        let mut standby = Standby {
            name: name_of(sender, asked),
            address: asked
                .map(|at| at.name.clone())
                .or(sender.and_then(|sender| sender.client_addr.clone()))
                .unwrap_or_default(),
            connected: sender.is_some(),
            state: sender.map_or(Some("not connected".to_owned()), |sender| sender.state.clone()).unwrap_or_default(),
            sync_state: sender.and_then(|sender| sender.sync_state.clone()),
            walrider: asked.is_some_and(|at| at.walrider.is_some()),
            asked: asked.is_some(),
            error: asked.and_then(|at| at.error.clone()),
            sent: stage(sender.and_then(|sender| sender.sent_lsn), None),
            write: stage(sender.and_then(|sender| sender.write_lsn), own.write),
            flush: stage(sender.and_then(|sender| sender.flush_lsn), own.flush),
            replay: stage(sender.and_then(|sender| sender.replay_lsn), own.replay),
            replaying: live.map(|at| self.replaying(at)).unwrap_or_default(),
            receiving: live.map(|at| self.receiving(at)).unwrap_or_default(),
            ..Standby::default()
        };
        let held_up =
            primary.zip(sender).is_some_and(|((_, server), sender)| self.is_held_up(&standby, server, sender));
        standby.parts = parts(&standby, sender, held_up, live);
        standby.speed = self.speed(&standby, live);
        standby
    }

    /// Whether a walsender waits for the other side to take what it sends: more than a message is under way, and it waits though it has
    /// more to send, now or in half of the looks of [`WINDOW`], as a look may meet a moment in between. It tells the same wait as when
    /// it has nothing to do (`walsender.c`, `WalSndLoop`). One that is stopped may tell it, too, but nothing of its is under way.
    fn is_held_up(&self, standby: &Standby, server: &Server, now: &Walsender) -> bool {
        let waits = |(server, sender): (&Server, &Walsender)| {
            let wait = sender.wait.as_deref().unwrap_or_default();
            wait.ends_with("WalSenderMain") && sender.sent_lsn < server.flush_lsn
        };
        let under_way =
            standby.sent.lsn.zip(standby.write.lsn).map_or(0, |(sent, write)| sent.0.saturating_sub(write.0));
        let servers = self.recent.iter().flat_map(|sample| &sample.servers).filter_map(|at| at.server.as_ref());
        let senders = servers.flat_map(|server| server.replication.iter().map(move |sender| (server, sender)));
        let seen: Vec<bool> = senders.filter(|(_, sender)| sender.pid == now.pid).map(waits).collect();
        let often = !seen.is_empty() && 2 * seen.iter().filter(|waited| **waited).count() >= seen.len();
        under_way >= LARGEST_MESSAGE && (often || waits((server, now)))
    }

    fn remember(&mut self, sample: &Sample) {
        // Those after it are from before the clock was set back.
        self.recent.retain(|older| older.time <= sample.time);
        self.recent.push_back(sample.clone());
        while self.recent.front().is_some_and(|oldest| oldest.time < sample.time - WINDOW) {
            self.recent.pop_front();
        }
    }

    /// The answer to compare this one with: the last, or for Walrider, which replays in large batches, that of [`WINDOW`] ago.
    fn before(&self, now: &ServerSample) -> Option<&ServerSample> {
        let mut answers = self.recent.iter().filter_map(|at| find(at, &now.name)).filter(|at| at.error.is_none());
        match now.walrider {
            Some(_) => answers.next(),
            None => answers.next_back(),
        }
    }

    fn replaying(&self, now: &ServerSample) -> BTreeMap<String, f64> {
        match &now.walrider {
            None => shares(&now.replaying),
            Some(status) => {
                let before = self.before(now).and_then(|before| before.walrider.as_ref());
                before.map(|before| stage_shares(before, status)).unwrap_or_default()
            }
        }
    }

    fn receiving(&self, now: &ServerSample) -> BTreeMap<String, f64> {
        let Some(status) = &now.walrider else { return shares(&now.receiving) };
        let before = self.before(now).and_then(|before| Some((before.answered_at, before.walrider.as_ref()?)));
        let Some((at, before)) = before.filter(|(at, _)| *at < now.answered_at) else { return BTreeMap::new() };
        let share = |to: f64, from: f64| ((to - from) / (now.answered_at - at)).clamp(0.0, 1.0);
        let (to, from) = (&status.spool, &before.spool);
        let write = share(to.write_seconds, from.write_seconds);
        let segment = share(to.segment_wait_seconds, from.segment_wait_seconds);
        BTreeMap::from([("write".into(), write), ("segment".into(), segment)])
    }

    fn speed(&self, standby: &Standby, live: Option<&ServerSample>) -> Speed {
        let Some(now) = live else { return Speed::default() };
        let before = self.before(now);
        let elapsed = before.map(|before| now.answered_at - before.answered_at).filter(|elapsed| *elapsed > 0.0);
        let rate = before.zip(elapsed).and_then(|(before, elapsed)| {
            let (from, to) = (own_positions(before).replay?, own_positions(now).replay?);
            Some(to.0.checked_sub(from.0)? as f64 / elapsed)
        });
        let utilisation = (!standby.replaying.is_empty()).then(|| {
            let parts = by_part(&standby.replaying, replay_part);
            let idle = |part: &Option<Part>| matches!(part, None | Some(Part::ApplyDelay | Part::Paused));
            // A sum of nothing would be -0.
            parts.iter().filter(|(part, _)| !idle(part)).fold(0.0, |busy, (_, share)| busy + share)
        });
        let cpu =
            before.and_then(|before| before.process).zip(now.process).zip(elapsed).and_then(|((from, to), elapsed)| {
                let spent = |process: crate::sample::Process| process.user_seconds + process.system_seconds;
                (from.pid == to.pid).then(|| (spent(to) - spent(from)).max(0.0) / elapsed)
            });
        let capacity = rate
            .zip(utilisation)
            .filter(|(rate, busy)| *busy >= LEAST_UTILISATION && *rate > 0.0)
            .map(|(rate, busy)| rate / busy);
        let catch_up =
            capacity.zip(self.flushed.rate(5.0)).zip(standby.replay.bytes).map(|((capacity, wal), bytes)| {
                match (bytes, capacity > wal) {
                    (0, _) => 0.0,
                    (_, true) => bytes as f64 / (capacity - wal),
                    (_, false) => f64::INFINITY,
                }
            });
        Speed { rate, utilisation, capacity, catch_up, cpu }
    }
}

/// The primary does not answer: what it last said, if anything, is no news, and nobody knows how far it has come since.
fn forget_primary(standby: &mut Standby) {
    (standby.connected, standby.state, standby.sync_state) = (false, UNKNOWN.to_owned(), None);
    standby.sent = Stage::default();
    for stage in [&mut standby.write, &mut standby.flush, &mut standby.replay] {
        *stage = Stage { lsn: stage.lsn, ..Stage::default() };
    }
    standby.parts.clear();
    standby.speed.catch_up = None;
}

/// Changes a second of a counter; none if it was reset, or the server is another.
fn rate_between(before: &Server, now: &Server, of: &dyn Fn(&Server) -> Option<u64>) -> Option<f64> {
    let elapsed = now.now - before.now;
    let grown = of(now)?.checked_sub(of(before)?)?;
    (elapsed > 0.0).then(|| grown as f64 / elapsed)
}

fn find<'a>(sample: &'a Sample, name: &str) -> Option<&'a ServerSample> {
    sample.servers.iter().find(|at| at.name == name)
}

fn is_standby(at: &ServerSample) -> bool {
    at.walrider.is_some() || at.server.as_ref().is_some_and(|server| server.in_recovery)
}

#[derive(Default)]
struct Own {
    write: Option<Lsn>,
    flush: Option<Lsn>,
    replay: Option<Lsn>,
}

/// What the standby itself says.
fn own_positions(at: &ServerSample) -> Own {
    if let Some(status) = &at.walrider {
        let positions = &status.positions;
        return Own { write: positions.written.lsn, flush: positions.flushed.lsn, replay: positions.replayed.lsn };
    }
    let Some(server) = &at.server else { return Own::default() };
    let receiver = server.receiver.as_ref();
    Own {
        write: receiver.and_then(|receiver| receiver.written_lsn),
        // What is there is durable also when nothing is received any more.
        flush: receiver.and_then(|receiver| receiver.flushed_lsn).or(server.receive_lsn),
        replay: server.replay_lsn,
    }
}

/// How well a server that was asked fits the end of this walsender, the less the better; `None`: it is another. `alone`: there is one
/// of each. One that answers comes before one that does not, of which nobody knows what it does now.
fn likeness(at: &ServerSample, sender: &Walsender, alone: bool) -> Option<(bool, u8)> {
    let (slot, named) = match (&at.walrider, &at.server) {
        (Some(status), _) => (status.slot.as_deref(), status.application_name.as_deref()),
        (None, Some(server)) => {
            let receiver = server.receiver.as_ref();
            if receiver.is_none() && at.error.is_none() {
                // It receives nothing.
                return None;
            }
            let named = receiver.and_then(|receiver| receiver.application_name.as_deref());
            // What a walreceiver calls itself (`libpqrcv_connect` in walreceiver.c).
            let named = named.or(server.cluster_name.as_deref()).unwrap_or("walreceiver");
            (receiver.and_then(|receiver| receiver.slot_name.as_deref()), Some(named))
        }
        (None, None) => return None,
    };
    let how = match (slot.filter(|slot| !slot.is_empty()), &sender.slot) {
        (Some(slot), Some(used)) => (slot == used).then_some(0),
        _ if named == Some(&sender.application_name) => Some(1),
        _ => (alone && at.walrider.is_none()).then_some(2),
    };
    how.map(|how| (at.error.is_some(), how))
}

fn name_of(sender: Option<&Walsender>, asked: Option<&ServerSample>) -> String {
    let own = |at: &ServerSample| match (&at.walrider, &at.server) {
        (Some(status), _) => status.application_name.clone(),
        (_, Some(server)) => server.cluster_name.clone(),
        _ => None,
    };
    match sender {
        Some(sender) => sender.application_name.clone(),
        None => asked.and_then(|at| own(at).or_else(|| Some(at.name.clone()))).unwrap_or_default(),
    }
}

/// What the lag of replay is made of.
fn parts(
    standby: &Standby,
    sender: Option<&Walsender>,
    held_up: bool,
    live: Option<&ServerSample>,
) -> Vec<(Part, f64)> {
    let mut parts: BTreeMap<Part, f64> = BTreeMap::new();
    let mut add = |part, seconds: f64| {
        if seconds > 0.0 {
            *parts.entry(part).or_default() += seconds;
        }
    };
    // Before 17, a process that receives does not tell that it writes.
    let silent = live.and_then(|at| at.server.as_ref()).is_some_and(|server| server.major() < 17);
    let receiving = by_part(&standby.receiving, |wait| match silent && wait.is_empty() {
        true => Some(Part::StandbyWrite),
        false => receive_part(wait),
    });
    let doing: BTreeMap<Part, f64> =
        by_part(&standby.replaying, replay_part).into_iter().filter_map(|(part, share)| Some((part?, share))).collect();
    let fetches = sender.is_none() && doing.get(&Part::WalFetch).is_some_and(|share| *share >= TELLING);
    let Some(replay) = standby.replay.seconds else { return Vec::new() };
    let flush = match standby.flush.seconds {
        // What was received long ago, or never, says nothing where all comes from an archive.
        _ if fetches => 0.0,
        // What is replayed is there, also if it came another way.
        Some(flush) => flush.min(replay),
        // It has never received anything.
        None if sender.is_none() => {
            let part = if live.is_some_and(has_archive) { Part::WalFetch } else { Part::NotConnected };
            return if replay > 0.0 { vec![(part, replay)] } else { Vec::new() };
        }
        None => return Vec::new(),
    };
    // Up to where it is durable on the standby.
    let (sent, write) =
        (standby.sent.seconds.unwrap_or(0.0).min(flush), standby.write.seconds.unwrap_or(flush).min(flush));
    let blocked = |part| receiving.get(&Some(part)).copied().unwrap_or(0.0);
    let (syncs, writes) = (blocked(Part::StandbyFsync), blocked(Part::StandbyWrite));
    if sender.is_some() && syncs.max(writes) >= TELLING {
        // One process receives, writes and syncs: while it is at one of these, nothing is received, and soon nothing sent.
        add(Part::StandbyFsync, flush * syncs / (syncs + writes));
        add(Part::StandbyWrite, flush * writes / (syncs + writes));
    } else if sender.is_none() {
        add(Part::NotConnected, flush);
    } else {
        add(if held_up { Part::Network } else { Part::NotSent }, sent);
        add(Part::Network, (write - sent).max(0.0));
        add(Part::StandbyFsync, flush - write.max(sent));
    }
    // From there on.
    let rest = replay - flush;
    let all: f64 = doing.values().sum();
    match live {
        Some(at) if at.process.is_some_and(|process| matches!(process.state, 'T' | 't')) => add(Part::Stopped, rest),
        Some(at) if is_paused(at) => add(Part::Paused, rest),
        _ if all > 0.0 => doing.iter().for_each(|(part, share)| add(*part, rest * share / all)),
        _ => add(Part::Replay, rest),
    }
    let mut parts: Vec<(Part, f64)> = parts.into_iter().collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    parts
}

/// What the process that receives does; `None` while it waits for the primary. Of Walrider's own status come `write`, and `segment`:
/// the next one is not there yet, because that, or one before, is not durable.
pub fn receive_part(wait: &str) -> Option<Part> {
    match wait.split_once(':') {
        Some(("IO", event)) if event.to_ascii_lowercase().contains("sync") => Some(Part::StandbyFsync),
        Some(("IO", _)) => Some(Part::StandbyWrite),
        None if wait == "segment" => Some(Part::StandbyFsync),
        None if wait == "write" => Some(Part::StandbyWrite),
        _ => None,
    }
}

/// Whether it has WAL from an archive.
fn has_archive(at: &ServerSample) -> bool {
    let command = at.server.as_ref().and_then(|server| server.settings.get("restore_command"));
    at.walrider.as_ref().is_some_and(|status| !status.has_primary) || command.is_some_and(|command| !command.is_empty())
}

fn is_paused(at: &ServerSample) -> bool {
    match (&at.walrider, &at.server) {
        (Some(status), _) => status.paused,
        (_, Some(server)) => server.paused == Some(true),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
