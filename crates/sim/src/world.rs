//! What happens, and what must hold: one run from a seed.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use walrider_layout::Lsn;
use walrider_seed::Random;
use walrider_spool::files::Directory;
use walrider_spool::testing::{Call, Model};
use walrider_spool::{Step as SpoolStep, Worker};
use walrider_standby::machine::Event;
use walrider_wire::stream::Streamed;

use crate::primary::{self, Known, Primary, SEGMENT};
use crate::standby::{Connection, Control, Message, Standby, Step};

/// How many things happen before all is well.
const TROUBLES: u64 = 3_000;
/// So many rounds are enough to catch up, or to be promoted, where nothing fails.
const PATIENCE: u64 = 20_000;
/// Most WAL that the primary sends past what it has flushed.
const MAX_AHEAD: u64 = 300 << 10;

/// What the disk does next.
#[derive(Default)]
struct Fate {
    /// At which call from now the process dies.
    dies_in: Option<u64>,
    /// And the power goes.
    power: bool,
    /// What the dead one has left.
    left: Option<Model>,
    /// There is no space.
    full: bool,
    /// The next fsync fails.
    sync_fails: bool,
    /// One has failed. What it was about is read as if it were there, and no later fsync makes it durable: only what a power cut
    /// leaves may be begun with.
    sync_failed: bool,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Things that happened.
    pub events: u64,
    /// Records that were replayed.
    pub replayed: u64,
    /// Sessions that streamed.
    pub sessions: u64,
    /// Kills, and power cuts among them.
    pub deaths: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// The primary's crashes.
    pub primary_crashes: u64,
    /// Timelines begun.
    pub timelines: u64,
    /// Runs that ended with a promotion.
    pub promotions: u64,
    /// Of these, those where what was held made a difference.
    pub releases: u64,
    /// Messages that came twice, or not at all, though a connection does neither.
    pub broken: u64,
    /// Reports that came after the connection that they were sent on was followed by another.
    pub late: u64,
    /// What an fsync was about was lost, although it reported success.
    pub lies: u64,
}

/// One run.
pub struct World {
    now: Duration,
    random: Random,
    primary: Primary,
    connection: Option<Connection>,
    /// Connections can be made.
    link: bool,
    disk: Model,
    archive: Model,
    control: Control,
    standby: Option<Standby>,
    fate: Arc<Mutex<Fate>>,
    /// Up to there a standby may replay what was sent, or what is in its segments.
    exposed: Lsn,
    /// What a standby has reported as flushed in this run of the primary.
    heard: Lsn,
    /// Now and then an fsync reports success, and is none. What was promised may be lost then, but nothing is invented.
    disk_lies: bool,
    /// Nothing fails any more.
    peaceful: bool,
    /// While it is promoted: the histories that what it replays may be of.
    promotes: Option<Vec<Vec<Known>>>,
    /// What happened, for a failure; also in what might have happened instead.
    log: Rc<RefCell<VecDeque<String>>>,
    counts: Counts,
}

/// Runs a seed; how often what happened.
///
/// # Panics
/// Where something does not hold.
pub fn run(seed: u64) -> Counts {
    let mut world = World::new(seed);
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    if let Err(panic) = ended {
        eprintln!("seed {seed}, the last of what happened:");
        world.log.borrow().iter().for_each(|line| eprintln!("  {line}"));
        std::panic::resume_unwind(panic);
    }
    world.counts
}

impl World {
    fn new(seed: u64) -> World {
        let primary = Primary::default();
        let control = Control::of_backup(primary.records[0]);
        World {
            now: Duration::from_secs(1),
            random: Random(seed),
            primary,
            connection: None,
            link: true,
            disk: Model::default(),
            archive: Model::default(),
            control,
            standby: None,
            fate: Arc::default(),
            exposed: Lsn::INVALID,
            heard: Lsn::INVALID,
            disk_lies: seed % 8 == 7,
            peaceful: false,
            promotes: None,
            log: Rc::default(),
            counts: Counts::default(),
        }
    }

    fn run(&mut self) {
        for _ in 0..TROUBLES {
            self.trouble();
            self.something();
        }
        self.peace();
        if !self.random.one_in(3) {
            self.catch_up();
            for _ in 0..self.random.below(200) {
                self.something();
            }
            if self.random.one_in(3) {
                return;
            }
        }
        self.lose_primary();
        if self.random.one_in(2) {
            self.die(true);
        }
        self.promote();
    }

    /// The primary is gone, with all that it had.
    fn lose_primary(&mut self) {
        self.primary.lost_histories.push(self.primary.records.clone());
        self.primary.lost = true;
        self.primary.up = false;
        self.end_walsenders();
        self.say("the primary is lost");
    }

    /// What would come of a promotion now: the same disk, and no primary any more.
    fn try_promotion(&mut self) {
        self.say("what if the primary were lost now?");
        let mut instead = World {
            now: self.now,
            random: Random(self.random.number()),
            primary: self.primary.clone(),
            disk: self.disk.after_kill(),
            archive: self.archive.clone(),
            control: self.control,
            disk_lies: self.disk_lies,
            log: self.log.clone(),
            counts: self.counts,
            ..World::new(0)
        };
        instead.lose_primary();
        instead.promote();
        self.counts = instead.counts;
        self.say("it is not lost");
    }

    fn say(&self, what: impl std::fmt::Display) {
        let mut log = self.log.borrow_mut();
        if log.len() == 400 {
            log.pop_front();
        }
        log.push_back(format!("{:.3} {what}", self.now.as_secs_f64()));
    }

    // What goes wrong

    /// Once in a while, something does.
    fn trouble(&mut self) {
        match self.random.below(600) {
            0 => self.cut(),
            1 => {
                self.link = !self.link;
                self.say(format!("new connections can be made: {}", self.link));
            }
            2 if self.primary.up => {
                self.primary.crash(&mut self.random);
                self.counts.primary_crashes += 1;
                self.end_walsenders();
                self.say(format!("the primary crashes, and keeps {}", self.primary.flushed()));
            }
            3..8 if !self.primary.up => {
                self.primary.up = true;
                self.say("the primary is back");
            }
            8 if self.random.one_in(2) && self.primary.left.len() < 3 => self.fail_over(),
            9 | 10 => {
                let power = self.random.one_in(2);
                self.die(power);
            }
            11 | 12 => {
                let mut fate = self.fate.lock().expect("no panic while locked");
                fate.dies_in = Some(1 + self.random.below(60));
                fate.power = self.random.one_in(2);
            }
            13 => {
                let mut fate = self.fate.lock().expect("no panic while locked");
                fate.full = !fate.full;
                let full = fate.full;
                drop(fate);
                self.say(format!("the disk is full: {full}"));
            }
            14 if self.random.one_in(4) => self.fate.lock().expect("no panic while locked").sync_fails = true,
            15 | 16 => {
                let paused = self.random.one_in(2);
                if let Some(standby) = &mut self.standby {
                    standby.hear(Event::Pause(paused));
                }
            }
            17 => self.now += Duration::from_secs(self.random.below(30)),
            18 if self.random.one_in(2) => {
                // Its WAL is recycled.
                let oldest = self.primary.archived;
                if oldest > self.primary.oldest {
                    self.primary.oldest = oldest;
                    self.say(format!("the primary has no WAL before {oldest}"));
                }
            }
            19 if self.disk_lies => {
                self.disk.lose_next_sync();
                self.counts.lies += 1;
                self.say("an fsync is none");
            }
            _ => {}
        }
    }

    /// Nothing fails any more.
    fn peace(&mut self) {
        *self.fate.lock().expect("no panic while locked") = Fate::default();
        self.link = true;
        self.primary.up = true;
        self.peaceful = true;
        if self.connection.as_ref().is_some_and(|connection| connection.holed) {
            self.cut();
        }
        if let Some(standby) = &mut self.standby {
            standby.hear(Event::Pause(false));
        }
        self.say("nothing fails any more");
    }

    fn cut(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.cut = true;
        // Some of what is on its way comes.
        let left = self.random.below(connection.to_standby.len() as u64 + 1) as usize;
        connection.to_standby.truncate(left);
        let left = self.random.below(connection.to_primary.len() as u64 + 1) as usize;
        connection.to_primary.truncate(left);
        self.say("the connection is cut");
    }

    /// The primary's processes end, with what they had heard.
    fn end_walsenders(&mut self) {
        self.cut();
        self.heard = Lsn::INVALID;
        if let Some(connection) = &mut self.connection {
            connection.deaf = true;
        }
    }

    /// Another primary takes over, which has all that the standby may replay: one that is ahead of it could not follow.
    fn fail_over(&mut self) {
        let begun = self.primary.left.last().map_or(Lsn::INVALID, |(_, at)| Lsn(at.0 + 1));
        let least =
            [begun, self.exposed, self.primary.archived, self.primary.acknowledged].into_iter().max().expect("four");
        if least > self.primary.flushed() {
            return;
        }
        self.primary.fail_over(least, &mut self.random);
        self.end_walsenders();
        self.counts.timelines += 1;
        let &(left, at) = self.primary.left.last().expect("just left");
        let (name, contents) = self.primary.history(self.primary.timeline);
        store(&self.archive, &name, &contents);
        self.say(format!("timeline {left} is left at {at} for {}", self.primary.timeline));
    }

    /// The standby's process is killed, or its machine loses power.
    fn die(&mut self, power: bool) {
        let power = power || self.fate.lock().expect("no panic while locked").sync_failed;
        let left = match power {
            true => self.disk.after_power_loss(self.random.draws()),
            false => self.disk.after_kill(),
        };
        self.dead(left, power);
    }

    fn dead(&mut self, left: Model, power: bool) {
        if self.standby.take().is_none() && !power {
            return;
        }
        self.disk = left;
        self.counts.deaths += 1;
        self.counts.power_cuts += u64::from(power);
        if let Some(connection) = &mut self.connection {
            connection.cut = true;
            connection.to_standby.clear();
        }
        let mut fate = self.fate.lock().expect("no panic while locked");
        (fate.dies_in, fate.left) = (None, None);
        (fate.sync_fails, fate.sync_failed) = (false, false);
        drop(fate);
        self.say(if power { "the power goes" } else { "the standby is killed" });
        if self.promotes.is_none() && self.random.one_in(2) {
            self.try_promotion();
        }
    }

    // What happens

    /// Something happens.
    fn something(&mut self) {
        self.counts.events += 1;
        self.now += Duration::from_micros(self.random.below(20_000));
        if self.standby.is_none() {
            if self.random.one_in(5) {
                self.start();
            }
            return;
        }
        match self.random.below(14) {
            0 if self.primary.up => self.insert(),
            1 if self.primary.up => {
                self.primary.flush(&mut self.random);
                self.acknowledge();
            }
            2 | 3 => self.send(),
            4 => self.hear(),
            5 | 6 => drop(self.receive()),
            7 => drop(self.work(Worker::Flusher)),
            8 => drop(self.work(Worker::Logger)),
            9 => drop(self.work(Worker::Preparer)),
            10 | 11 => drop(self.replay()),
            12 if self.random.one_in(4) => self.archive_one(),
            13 => self.write_pages(),
            _ => {}
        }
        self.after();
    }

    /// The standby may have died of what it did.
    fn after(&mut self) {
        let (left, power) = {
            let mut fate = self.fate.lock().expect("no panic while locked");
            (fate.left.take(), fate.power)
        };
        if let Some(left) = left {
            return self.dead(left, power);
        }
        if let Some(standby) = &self.standby
            && let Some(why) = standby.failed.clone()
        {
            // An fsync has failed: what it was about may be gone.
            self.say(format!("the standby ends: {why}"));
            self.die(true);
        }
    }

    fn start(&mut self) {
        let (fate, disk) = (self.fate.clone(), self.disk.clone());
        let random = Mutex::new(Random(self.random.number()));
        self.disk.watch(move |call, _| {
            let mut fate = fate.lock().expect("no panic while locked");
            if fate.left.is_some() {
                return Err(io::Error::other("the process is gone"));
            }
            fate.dies_in = fate.dies_in.map(|calls| calls - 1);
            if fate.dies_in == Some(0) {
                let random = &mut random.lock().expect("no panic while locked");
                fate.power |= fate.sync_failed;
                fate.left = Some(if fate.power { disk.after_power_loss(random.draws()) } else { disk.after_kill() });
                return Err(io::Error::other("the process is gone"));
            }
            match call {
                Call::Write | Call::Create if fate.full => Err(io::ErrorKind::StorageFull.into()),
                Call::SyncData | Call::SyncAll if std::mem::take(&mut fate.sync_fails) => {
                    fate.sync_failed = true;
                    Err(io::Error::from_raw_os_error(5))
                }
                _ => Ok(()),
            }
        });
        match Standby::start(&self.disk, &self.archive, &self.control) {
            Ok(standby) => {
                self.standby = Some(standby);
                self.say(format!("the standby starts at {}", self.control.redo.1));
            }
            Err(error) => {
                self.disk.watch_no_more();
                self.say(format!("the standby does not start: {error}"));
                let (left, power) = {
                    let mut fate = self.fate.lock().expect("no panic while locked");
                    fate.sync_failed = false;
                    if fate.left.is_some() {
                        fate.dies_in = None;
                    }
                    (fate.left.take(), fate.power)
                };
                match left {
                    Some(left) => {
                        self.disk = left;
                        self.counts.power_cuts += u64::from(power);
                    }
                    None => self.disk = self.disk.after_power_loss(self.random.draws()),
                }
            }
        }
    }

    fn insert(&mut self) {
        if self.primary.inserted().0 - self.primary.flushed().0 > 4 * SEGMENT {
            return;
        }
        match self.random.below(60) {
            0 => self.primary.switch(),
            1..4 => self.primary.insert(200_000),
            4..20 => self.primary.insert(8_000 + self.random.below(20_000) as usize),
            _ => self.primary.insert(self.random.below(900) as usize),
        }
    }

    /// The primary sends some WAL, or a sign of life.
    fn send(&mut self) {
        let flushed = self.primary.flushed();
        let Some(connection) = &mut self.connection else { return };
        if connection.cut || !self.primary.up || matches!(connection.to_standby.back(), Some((_, Message::Done))) {
            return;
        }
        let late = connection.to_standby.back().map_or(self.now, |(at, _)| self.now.max(*at));
        let at = late + Duration::from_micros(self.random.below(5_000));
        // A primary that is on another timeline by now is another one.
        let upto = match (connection.ends, connection.early) {
            (Some(ends), _) => ends,
            (None, true) => self.primary.inserted().min(Lsn(flushed.0 + MAX_AHEAD)),
            (None, false) => flushed,
        };
        if connection.sent >= upto && connection.ends.is_some() {
            connection.to_standby.push_back((at, Message::Done));
            return;
        }
        let room = upto.0.saturating_sub(connection.sent.0).min(128 << 10);
        let len = if self.random.one_in(2) { room } else { self.random.below(room + 1) };
        let mut payload = Vec::new();
        if len == 0 {
            let reply_requested = self.random.one_in(4);
            // `WalSndKeepalive` has what was sent, which is before what the message before it said of the flush.
            let wal_end = if connection.early { flushed } else { connection.sent };
            Streamed::Keepalive { wal_end, send_time: 0, reply_requested }.encode(&mut payload);
        } else {
            let data = self.primary.wal(connection.sent, Lsn(connection.sent.0 + len));
            Streamed::XLogData { start: connection.sent, wal_end: flushed, send_time: 0, data }.encode(&mut payload);
            connection.sent = Lsn(connection.sent.0 + len);
        }
        let copies = match self.random.below(2_000) {
            0 if !self.peaceful => 0,
            1 if !self.peaceful => 2,
            _ => 1,
        };
        connection.holed |= copies == 0;
        self.counts.broken += u64::from(copies != 1);
        for _ in 0..copies {
            connection.to_standby.push_back((at, Message::Payload(payload.clone())));
        }
        self.exposed = self.exposed.max(connection.sent.min(flushed));
    }

    /// The primary hears what the standby says.
    fn hear(&mut self) {
        if !self.primary.up {
            return;
        }
        let Some(connection) = self.connection.as_mut().filter(|connection| !connection.deaf) else { return };
        let report = match connection.late.pop_front() {
            Some(late) => {
                self.counts.late += 1;
                late
            }
            None => {
                let Some(report) = connection.to_primary.pop_front() else { return };
                assert!(report.flush <= connection.sent, "{report:?}: no more came than {}", connection.sent);
                report
            }
        };
        self.heard = self.heard.max(report.flush);
        self.acknowledge();
    }

    fn acknowledge(&mut self) {
        self.primary.acknowledge(self.heard);
    }

    fn archive_one(&mut self) {
        let end = Lsn(self.primary.archived.0 + SEGMENT);
        if !self.primary.up || end > self.primary.flushed() {
            return;
        }
        let (name, contents) = self.primary.segment(self.primary.archived);
        store(&self.archive, &name, contents);
        self.primary.archived = end;
        self.say(format!("{name} is archived"));
    }

    fn receive(&mut self) -> bool {
        let Some(standby) = &mut self.standby else { return false };
        let streamed = standby.is_streaming();
        let busy = standby.receive(self.now, &self.primary, self.link, &mut self.connection);
        let streams = standby.is_streaming();
        if streams && !streamed {
            self.counts.sessions += 1;
            let connection = self.connection.as_ref().expect("there is one while WAL streams in");
            let (task, early) = (connection.task, connection.early);
            self.say(format!("streams from {} on timeline {}, early: {early}", task.start, task.timeline));
        } else if streamed && !streams {
            self.say("the session ends");
        }
        busy
    }

    fn work(&mut self, worker: Worker) -> bool {
        self.standby.as_ref().is_some_and(|standby| standby.shared.spool.step(worker) != SpoolStep::Idle)
    }

    fn write_pages(&mut self) {
        let Some(standby) = &mut self.standby else { return };
        if standby.is_promoted() {
            return;
        }
        let mut saved = None;
        // A process that is gone writes nothing.
        let mut save = |control| {
            if self.fate.lock().expect("no panic while locked").left.is_none() {
                saved = Some(control);
            }
        };
        // Where the spool has failed, nothing is saved from there on.
        let _ = match self.random.below(20) {
            0 => standby.restartpoint(self.control, self.random.below(30) as usize, &mut save),
            1..4 => standby.write_pages(&mut { self.control }, &mut save),
            _ => return,
        };
        if let Some(control) = saved {
            self.control = control;
            self.say(format!("{control:?}"));
        }
    }

    fn replay(&mut self) -> bool {
        let Some(standby) = &mut self.standby else { return false };
        let (control, fate) = (&mut self.control, &self.fate);
        let mut promises = |timeline| {
            if fate.lock().expect("no panic while locked").left.is_none() {
                control.promoting = Some(timeline);
            }
        };
        let step = standby.replay(self.now, &mut promises);
        let (replayed, min_recovery) = (standby.replayed, self.control.min_recovery.1);
        if self.fate.lock().expect("no panic while locked").left.is_some() {
            // What the dead find does not count.
            return true;
        }
        match step {
            Step::Idle => false,
            Step::Replayed(records) => {
                records.into_iter().for_each(|record| self.replayed(record));
                true
            }
            Step::FirstEnd => {
                self.say(format!("WAL ends at {replayed}, pages are at {min_recovery}"));
                assert!(
                    self.disk_lies || replayed >= min_recovery,
                    "pages are at {min_recovery}, and WAL ends at {replayed}"
                );
                true
            }
            Step::Promoted => {
                self.promoted(replayed);
                true
            }
        }
    }

    /// A record was replayed.
    fn replayed(&mut self, record: Known) {
        self.counts.replayed += 1;
        if let Some(histories) = &mut self.promotes {
            histories.retain(|records| primary::find(records, record.begin) == Some(record));
            assert!(!histories.is_empty(), "{record:?} is promoted, which no primary had after what precedes it");
            return;
        }
        assert_eq!(self.primary.record_at(record.begin), Some(record), "the primary has something else");
        let flushed = self.primary.flushed();
        assert!(record.end <= flushed, "{record:?} is replayed, and the primary has flushed {flushed}");
    }

    fn promoted(&mut self, replayed: Lsn) {
        let acknowledged = self.primary.acknowledged;
        self.say(format!("promoted at {replayed}; acknowledged up to {acknowledged}"));
        assert!(
            self.disk_lies || replayed >= acknowledged,
            "{acknowledged} was acknowledged, and {replayed} is promoted"
        );
        self.counts.promotions += 1;
        self.counts.releases += u64::from(self.control.promoting.is_some());
    }

    // What must come of it

    /// Everybody does what there is to do, one after the other; nobody fails.
    fn round(&mut self) {
        self.counts.events += 1;
        if self.standby.is_none() {
            self.start();
        }
        let mut busy = false;
        for worker in Worker::ALL {
            busy |= self.work(worker);
        }
        self.primary.flush_all();
        self.acknowledge();
        if self.random.one_in(3) {
            self.send();
        }
        self.hear();
        busy |= self.receive();
        busy |= self.replay();
        self.after();
        self.now += if busy { Duration::from_millis(1) } else { Duration::from_millis(50) };
    }

    fn catch_up(&mut self) {
        for _ in 0..PATIENCE {
            self.round();
            if self.standby.as_ref().is_some_and(|standby| standby.replayed >= self.primary.flushed()) {
                return;
            }
        }
        let replayed = self.standby.as_ref().map(|standby| standby.replayed);
        panic!("replay is at {replayed:?}, the primary at {}", self.primary.flushed());
    }

    fn promote(&mut self) {
        let may_die = self.random.one_in(2);
        self.promotes = Some(self.primary.lost_histories.clone());
        for round in 0..PATIENCE {
            if self.standby.is_none() {
                // What was replayed before, and is replayed again, must be of the same history.
                self.promotes = Some(self.primary.lost_histories.clone());
                self.start();
                if let Some(standby) = &mut self.standby {
                    standby.hear(Event::Promote);
                }
            } else if round == 0
                && let Some(standby) = &mut self.standby
            {
                standby.hear(Event::Promote);
            }
            if may_die && round < 200 && self.random.one_in(40) {
                let mut fate = self.fate.lock().expect("no panic while locked");
                (fate.dies_in, fate.power) = (Some(1 + self.random.below(10)), self.random.one_in(2));
            }
            for worker in Worker::ALL {
                self.work(worker);
            }
            self.receive();
            self.replay();
            self.after();
            self.now += Duration::from_millis(20);
            if self.standby.as_ref().is_some_and(Standby::is_promoted) {
                return;
            }
        }
        panic!("it is not promoted");
    }
}

/// Puts a whole file into a directory.
fn store(directory: &Model, name: &str, contents: &[u8]) {
    let file = directory.create(name).expect("one of each name");
    let mut written = 0;
    while written < contents.len() {
        written += file.write_at(&contents[written..], written as u64).expect("space");
    }
}
