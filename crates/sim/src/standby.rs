//! The standby's process: the threads of `walrider standby` as steps that somebody else puts in order. Each function does what
//! the one that it names does between two waits.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, Major, TimelineId};
use walrider_replay::error::ReplayError;
use walrider_replay::follow::{AtEnd, at_end, missing, newer_history};
use walrider_replay::load::{Ending, Loader};
use walrider_replay::rels::RelTable;
use walrider_replay::upstream::{News, Wanted};
use walrider_spool::testing::Model;
use walrider_spool::{ArchiveStatus, Judgement, Spool, SpoolError, SpoolOptions, Writer};
use walrider_standby::machine::{
    Action, Ended, Event, Failure, LOOK_INTERVAL, Machine, Next, Rules, Stored, Task, Verdict, Wait,
};
use walrider_store::StoreError;
use walrider_store::driver::{self, Driver, Request};
use walrider_store::read::{ReadWal, agrees};
use walrider_store::source::{Incoming, Kept, Source};
use walrider_stream::error::ReceiveError;
use walrider_stream::intake::Intake;
use walrider_stream::positions::{Positions, Report};
use walrider_stream::timelines;
use walrider_wal::decode::WalFormat;
use walrider_wal::record::Record;
use walrider_wal::testing::pages::WalBuilder;
use walrider_wire::pulse::{Link, Timing};

use crate::primary::{Answer, Known, Primary, segment_size};

/// Settings that a user would make shorter here, too.
const RULES: Rules = Rules { has_primary: true, retry_interval: Duration::from_secs(2) };
const TIMING: Timing = Timing { status_interval: Duration::from_secs(3), timeout: Duration::from_secs(20) };
/// WAL in one stretch: several to a segment.
const WINDOW: u64 = 128 << 10;

/// What `pg_control` and `walrider.promoting` say, durably.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    /// Where recovery begins.
    pub redo: (TimelineId, Lsn),
    /// How far the pages may be.
    pub min_recovery: (TimelineId, Lsn),
    /// A promotion has released what was held, on this timeline.
    pub promoting: Option<TimelineId>,
}

/// What is on its way to the standby.
pub enum Message {
    /// A CopyData.
    Payload(Vec<u8>),
    /// CopyDone.
    Done,
}

/// A connection on which WAL streams. What is on its way comes at its time, in order.
pub struct Connection {
    /// What was asked for.
    pub task: Task,
    /// Before the primary's flush.
    pub early: bool,
    /// Where the timeline ends, if it does.
    pub ends: Option<Lsn>,
    /// Up to there it was sent.
    pub sent: Lsn,
    /// To the standby.
    pub to_standby: VecDeque<(Duration, Message)>,
    /// To the primary.
    pub to_primary: VecDeque<Report>,
    /// To the walsenders of earlier connections, which do not know yet that nobody is there any more.
    pub late: VecDeque<Report>,
    /// Nothing more gets to the standby than what is on its way; it may not know yet.
    pub cut: bool,
    /// Nobody hears what it says, nor what it said before: the primary's process is gone.
    pub deaf: bool,
    /// A message did not come; where it was the last, nobody notices.
    pub holed: bool,
}

/// What the threads share.
pub struct Shared {
    machine: Mutex<Machine>,
    /// Where WAL is stored.
    pub spool: Arc<Spool>,
    /// Why a segment of the archive was not kept, which ends the standby.
    not_kept: Mutex<Option<String>>,
}

impl Shared {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().expect("no panic while locked")
    }

    fn stored(&self) -> Stored {
        let (timeline, written) = self.spool.timeline_and_written();
        Stored { timeline, written }
    }
}

impl Incoming for Shared {
    fn visible(&self) -> Lsn {
        self.machine().visible(self.stored()).unwrap_or(Lsn(u64::MAX))
    }

    fn streams_from(&self) -> Option<Lsn> {
        self.machine().streams_from()
    }

    fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StoreError> {
        let mut judge = || Ok(Judgement { replaces: complete, complete, useless: Vec::new() });
        match self.spool.keep_restored(name, contents, &mut judge) {
            Ok(_) | Err(SpoolError::Full { .. }) => Ok(Kept::InPgWal),
            Err(error) => {
                *self.not_kept.lock().expect("no panic while locked") = Some(error.to_string());
                Err(StoreError::Refused(error.to_string()))
            }
        }
    }

    fn restartpoint(&self, redo: Lsn, timeline: TimelineId) {
        // It is tried again at the next one.
        let _ = self.spool.remove_before(redo, timeline);
    }
}

/// A directory of the model as replay reads it.
struct Place(Model);

impl Driver for Place {
    fn get(&self, request: &Request<'_>) -> Result<driver::Answer, StoreError> {
        Ok(match self.0.live(request.name) {
            Some(file) => {
                driver::Answer::There(driver::Opened { file, path: PathBuf::from(request.name), fetched: false })
            }
            None => driver::Answer::Missing(None),
        })
    }
}

enum Receiver {
    Idle,
    Connecting(Task),
    Streaming(Box<Streaming>),
    Finished,
}

struct Streaming {
    task: Task,
    writer: Writer,
    intake: Intake,
    positions: Positions,
    full: bool,
}

/// Where replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Look,
    Run { wanted: Wanted, before: Lsn },
    ForWal { past: Lsn, until: Duration },
    ForChange { until: Duration },
    Sleep { until: Duration },
    Promoted,
}

/// What a step of replay came to.
#[derive(Debug)]
pub enum Step {
    /// It waits.
    Idle,
    /// These records were replayed, perhaps none.
    Replayed(Vec<Known>),
    /// No more WAL is found, for the first time since the start.
    FirstEnd,
    /// Recovery has ended.
    Promoted,
}

/// The process.
pub struct Standby {
    /// What the threads share.
    pub shared: Arc<Shared>,
    /// End of what is replayed.
    pub replayed: Lsn,
    /// What ends the process, once replay hears of it.
    pub failed: Option<String>,
    directory: Model,
    source: Source,
    receiver: Receiver,
    /// `Board::ends`.
    ends: bool,
    /// `Board::take_applied`.
    commits: bool,
    loader: Loader,
    rels: RelTable,
    phase: Phase,
    news: News,
    used: Lsn,
    needed: Lsn,
    first_end: bool,
    /// WAL has streamed in while it read, or before.
    streamed: bool,
    /// Somebody has called `Shell::notify`.
    notified: bool,
    /// Where records begin that were replayed.
    begins: Vec<Lsn>,
}

impl Standby {
    /// Starts on a directory.
    ///
    /// # Errors
    /// The disk's.
    pub fn start(directory: &Model, archive: &Model, control: &Control) -> Result<Standby, SpoolError> {
        let options = SpoolOptions {
            segment_size: segment_size(),
            archive_status: ArchiveStatus::Done,
            max_recycled: 2,
            ..SpoolOptions::default()
        };
        let spool = Spool::open_stepped(Arc::new(directory.clone()), &options)?;
        let shared = Arc::new(Shared { machine: Mutex::new(Machine::new(RULES)), spool, not_kept: Mutex::default() });
        let places: Vec<Arc<dyn Driver>> = vec![Arc::new(Place(archive.clone())), Arc::new(Place(directory.clone()))];
        let source =
            Source::new(places, segment_size(), TimelineHistory::alone(TimelineId(1))).brought_by(Some(shared.clone()));
        // `choose_history`
        let current = control.redo.0.max(control.min_recovery.0);
        let newest = source.newest_timeline(current).expect("files that can be read");
        let history = source.read_history(newest).expect("histories that make sense");
        // `Beginning::check_history`
        assert_eq!(
            history.timeline_at(control.redo.1),
            control.redo.0,
            "recovery begins on the way to timeline {newest}"
        );
        let last = Lsn(control.min_recovery.1.0 - 1);
        assert_eq!(history.timeline_at(last), control.min_recovery.0, "pages are on the way to timeline {newest}");
        source.set_history(history);
        let format = WalFormat {
            major: Major::V18,
            segment_size: segment_size(),
            system_identifier: Some(WalBuilder::SYSTEM_IDENTIFIER),
        };
        let redo = control.redo.1;
        let mut standby = Standby {
            shared,
            replayed: redo,
            failed: None,
            directory: directory.clone(),
            source,
            receiver: Receiver::Idle,
            ends: false,
            commits: false,
            loader: Loader::new(format, WINDOW, redo),
            rels: RelTable::default(),
            phase: Phase::Look,
            news: News::Perhaps,
            used: redo,
            needed: redo,
            first_end: true,
            streamed: false,
            notified: false,
            begins: Vec::new(),
        };
        // `Shell::resume_promotion`
        if control.promoting.is_some_and(|left| left >= control.redo.0) {
            standby.hear(Event::Promote);
        }
        Ok(standby)
    }

    /// `Shell::hear`.
    pub fn hear(&mut self, event: Event) {
        let actions = self.shared.machine().hear(event);
        self.ends |= actions.contains(&Action::EndSession);
        self.notified = true;
    }

    /// Recovery has ended.
    pub fn is_promoted(&self) -> bool {
        self.phase == Phase::Promoted
    }

    /// Whether WAL streams in.
    pub fn is_streaming(&self) -> bool {
        matches!(self.receiver, Receiver::Streaming(_))
    }

    /// A step of the thread that receives (`receiver::run`). Whether it had anything to do.
    pub fn receive(
        &mut self,
        now: Duration,
        primary: &Primary,
        link: bool,
        connection: &mut Option<Connection>,
    ) -> bool {
        match std::mem::replace(&mut self.receiver, Receiver::Finished) {
            Receiver::Finished => return false,
            // `Shell::next_task`
            Receiver::Idle => {
                let next = self.shared.machine().next_session(now);
                self.ends &= next == Next::Finish;
                self.receiver = match next {
                    Next::Begin(task) => Receiver::Connecting(task),
                    Next::Sleep(_) => {
                        self.receiver = Receiver::Idle;
                        return false;
                    }
                    Next::Finish => {
                        self.notified = true;
                        Receiver::Finished
                    }
                };
            }
            Receiver::Connecting(task) => {
                let begun = match link && primary.up && !self.ends {
                    true => self.connect(task, now, primary, connection),
                    false if self.ends => Err(Ended::Asked),
                    false => Err(Ended::Failed(Failure::Passing)),
                };
                match begun {
                    Ok(streaming) => self.receiver = Receiver::Streaming(streaming),
                    Err(how) => self.end_session(task, how, now),
                }
            }
            Receiver::Streaming(mut streaming) => match self.stream(&mut streaming, now, connection) {
                Ok(busy) => {
                    self.receiver = Receiver::Streaming(streaming);
                    return busy;
                }
                Err(how) => {
                    let task = streaming.task;
                    if how == Ended::Timeline {
                        streaming.writer.end_timeline();
                    }
                    drop(streaming);
                    if let Some(connection) = connection {
                        connection.to_standby.clear();
                        connection.cut = true;
                    }
                    self.end_session(task, how, now);
                }
            },
        }
        true
    }

    fn end_session(&mut self, task: Task, how: Ended, now: Duration) {
        let verdict = self.shared.machine().session_ends(task, self.shared.stored(), how, now);
        if verdict == Verdict::Fatal {
            self.failed = Some(format!("{how:?}"));
        }
        self.receiver = Receiver::Idle;
        self.notified = true;
    }

    /// `receiver::stream`, up to where WAL streams in.
    fn connect(
        &mut self,
        task: Task,
        now: Duration,
        primary: &Primary,
        connection: &mut Option<Connection>,
    ) -> Result<Box<Streaming>, Ended> {
        let failed = |error: ReceiveError| Ended::Failed((&error).into());
        let spool = &self.shared.spool;
        let has = |name: &str| self.directory.read(name).is_some();
        let ask = |timeline| Ok(primary.history(timeline));
        let store = |timeline, contents: &[u8]| spool.write_history(timeline, contents);
        timelines::fetch(task.timeline, primary.timeline, has, ask, store).map_err(failed)?;
        let early = task.timeline == primary.timeline;
        if early {
            spool.prepare_early();
        }
        let writer = spool.start_at(task.timeline, task.start).map_err(|error| failed(error.into()))?;
        let ends = match primary.answer(task).map_err(Ended::Failed)? {
            Answer::Ended => return Err(Ended::Timeline),
            Answer::Streams(ends) => ends,
        };
        let mut positions = Positions::new(TIMING);
        positions.connect(spool.held(), primary.flushed(), now);
        if !self.shared.machine().session_begins(task, now) {
            return Err(Ended::Asked);
        }
        let (to_standby, to_primary) = (VecDeque::new(), VecDeque::new());
        let before = connection.take().filter(|before| !before.deaf).into_iter();
        let late = before.flat_map(|before| before.late.into_iter().chain(before.to_primary)).collect();
        *connection = Some(Connection {
            task,
            early,
            ends,
            sent: task.start,
            to_standby,
            to_primary,
            late,
            cut: false,
            deaf: false,
            holed: false,
        });
        let intake = Intake::new(&writer, early);
        Ok(Box::new(Streaming { task, writer, intake, positions, full: false }))
    }

    /// A round of `Streaming::run`.
    fn stream(
        &mut self,
        streaming: &mut Streaming,
        now: Duration,
        connection: &mut Option<Connection>,
    ) -> Result<bool, Ended> {
        let connection = connection.as_mut().expect("there is one while WAL streams in");
        if self.ends {
            return Err(Ended::Asked);
        }
        let failed = |error: ReceiveError| Ended::Failed((&error).into());
        let (mut busy, mut done, mut error) = (false, false, None);
        while !streaming.full && !done && connection.to_standby.front().is_some_and(|(at, _)| *at <= now) {
            busy = true;
            match connection.to_standby.pop_front().expect("just seen").1 {
                Message::Done => done = true,
                Message::Payload(payload) => {
                    let Streaming { writer, intake, positions, .. } = streaming;
                    if let Err(why) = intake.take(&payload, positions, writer, now) {
                        error = Some(why);
                        break;
                    }
                }
            }
        }
        let cut = connection.cut && connection.to_standby.is_empty() && !done;
        let error = error.or(cut.then_some(ReceiveError::Closed));
        // `Streaming::write`
        match streaming.intake.write(&mut streaming.positions, &mut streaming.writer) {
            Ok(()) => streaming.full = false,
            Err(SpoolError::Full { .. }) => streaming.full = true,
            Err(error) => return Err(failed(error.into())),
        }
        if let Some(error) = error {
            return Err(failed(error));
        }
        if done {
            if streaming.full {
                return Err(failed(ReceiveError::Full));
            }
            let flushed = self.shared.spool.wait_flushed(streaming.writer.written());
            flushed.map_err(|error| failed(error.into()))?;
        }
        // `Board::report`
        let spool = &self.shared.spool;
        spool.check().map_err(|error| failed(error.into()))?;
        let positions = &mut streaming.positions;
        positions.catch_up(spool.held_durable(), (self.replayed, std::mem::take(&mut self.commits)));
        let link = if busy { Link::Busy } else { Link::Quiet };
        if let Some(report) = positions.report(link, now) {
            connection.to_primary.push_back(report);
        }
        if !streaming.full && positions.is_lost(now) {
            return Err(failed(ReceiveError::Silent));
        }
        streaming.writer.announce();
        if done { Err(Ended::Timeline) } else { Ok(busy) }
    }

    /// A step of replay (`follow_upstream`). `promises`: what is durable from now on, before anything that was held counts.
    pub fn replay(&mut self, now: Duration, promises: &mut dyn FnMut(TimelineId)) -> Step {
        match self.phase {
            Phase::Promoted => return Step::Idle,
            Phase::Look => self.look(now),
            Phase::ForWal { past, until } => {
                let (_, written) = self.shared.spool.timeline_and_written();
                if written <= past && now < until && !std::mem::take(&mut self.notified) {
                    return Step::Idle;
                }
                self.news = self.shared.machine().waited(written);
                self.phase = Phase::Look;
            }
            Phase::ForChange { until } => {
                if self.shared.machine().is_quiet() && now < until {
                    return Step::Idle;
                }
                self.perhaps();
            }
            Phase::Sleep { until } => {
                if now < until && !std::mem::take(&mut self.notified) {
                    return Step::Idle;
                }
                self.phase = Phase::Look;
            }
            Phase::Run { wanted, before } => {
                let replayed = self.load();
                if !replayed.is_empty() {
                    return Step::Replayed(replayed);
                }
                return self.end_of_wal(wanted, before, now, promises);
            }
        }
        Step::Replayed(Vec::new())
    }

    fn look(&mut self, now: Duration) {
        let wanted = self.shared.machine().wanted();
        if wanted == Wanted::Pause {
            self.wait(now);
            self.phase = Phase::Sleep { until: now + Duration::from_secs(1) };
            return;
        }
        match self.news {
            News::More => self.source.forget_missing(),
            News::Perhaps => self.source.close_all(),
        }
        self.phase = Phase::Run { wanted, before: self.replayed };
    }

    /// There may be files, and timelines.
    fn perhaps(&mut self) {
        self.news = News::Perhaps;
        self.phase = Phase::Look;
        if let Some(history) = newer_history(&self.source, self.replayed).expect("histories that make sense") {
            self.source.set_history(history);
        }
    }

    /// `Engine::run`, a part of it.
    fn load(&mut self) -> Vec<Known> {
        self.streamed |= self.shared.machine().streams_from().is_some();
        let mut records = Vec::new();
        for planned in self.loader.load(4, &self.source, &self.rels) {
            for &place in planned.stretch.places() {
                let (span, used) = (planned.stretch.span(place), planned.stretch.used(place));
                let record = Record::parse(Major::V18, planned.stretch.bytes(place), span.lsn, span.end);
                let data = record.expect("a record whose CRC is right").main_data;
                let id = data.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                records.push(Known { begin: span.lsn, end: span.end, id });
                (self.replayed, self.used) = (span.end, used.end);
                self.begins.push(span.lsn);
            }
            self.loader.recycle(planned);
        }
        self.commits |= !records.is_empty();
        records
    }

    fn end_of_wal(&mut self, wanted: Wanted, before: Lsn, now: Duration, promises: &mut dyn FnMut(TimelineId)) -> Step {
        if let Some(why) = self.shared.not_kept.lock().expect("no panic while locked").take() {
            self.failed = Some(why);
            return Step::Replayed(Vec::new());
        }
        // `Feed::ending`
        match self.loader.take_ending() {
            Some(Ending::Ends { at, page, .. }) => self.needed = page.max(at),
            Some(Ending::Goes(at)) => self.needed = at,
            Some(Ending::Failed(error)) => panic!("replay fails: {error}"),
            None => {}
        }
        match at_end(wanted, self.news, self.replayed > before) {
            AtEnd::Wait => self.wait(now),
            AtEnd::LookAgain => (self.news, self.phase) = (News::Perhaps, Phase::Look),
            AtEnd::Release => match self.release(promises) {
                Ok(true) => self.phase = Phase::Look,
                Ok(false) => {
                    self.phase = Phase::Promoted;
                    return Step::Promoted;
                }
                Err(error) => self.failed = Some(error.to_string()),
            },
        }
        // What streams in begins with a segment, and may not be where it was before; it will be.
        match std::mem::take(&mut self.first_end) && !self.streamed {
            true => Step::FirstEnd,
            false => Step::Replayed(Vec::new()),
        }
    }

    /// `Shell::news`, with what follows it.
    fn wait(&mut self, now: Duration) {
        if let Err(error) = self.shared.spool.check() {
            self.failed = Some(error.to_string());
            return;
        }
        let needed = self.needed.max(self.replayed);
        let missing =
            missing(&self.source, self.loader.format(), self.replayed, needed).expect("files that can be read");
        let wait = self.shared.machine().wait(missing, self.shared.stored(), segment_size());
        self.notified = false;
        match wait {
            Wait::No(News::More) => (self.news, self.phase) = (News::More, Phase::Look),
            Wait::No(News::Perhaps) => self.perhaps(),
            Wait::EndSession => {
                self.ends = true;
                self.perhaps();
            }
            Wait::ForWal { past } => self.phase = Phase::ForWal { past, until: now + LOOK_INTERVAL },
            Wait::ForChange { time, .. } => self.phase = Phase::ForChange { until: now + time },
            Wait::Failed => self.failed = Some("a fatal error of the receiver".to_owned()),
        }
    }

    /// `Shell::release`.
    fn release(&mut self, promises: &mut dyn FnMut(TimelineId)) -> Result<bool, ReplayError> {
        let (history, timeline) = (self.source.history(), self.source.timeline_at(self.used));
        let spool = &self.shared.spool;
        if !spool.holds_past(&history, self.used) {
            return Ok(false);
        }
        promises(timeline);
        let refused = |error: SpoolError| ReplayError::Refused(error.to_string());
        let (mut failed, size) = (None, self.loader.format().segment_size);
        let released = spool.release(&history, timeline, self.used, |at, bytes: &[u8]| {
            agrees(&self.source, size, at, bytes).or_else(|error| {
                failed = Some(error);
                Ok::<_, SpoolError>(false)
            })
        });
        failed.map_or(released.map_err(refused), |error| Err(error.into()))
    }

    /// Pages get into files: `Upstream::ensure_durable`, and `minRecoveryPoint`. `save` makes the control file durable.
    ///
    /// # Errors
    /// The spool has failed.
    pub fn write_pages(&mut self, control: &mut Control, save: &mut dyn FnMut(Control)) -> Result<(), SpoolError> {
        let upto = self.replayed;
        self.shared.spool.wait_flushed(upto)?;
        if upto > control.min_recovery.1 {
            control.min_recovery = (self.source.history().timeline_at(Lsn(upto.0 - 1)), upto);
        }
        save(*control);
        Ok(())
    }

    /// A restartpoint at one of the last records; `back` chooses which. What it makes needless goes only once it is durable.
    ///
    /// # Errors
    /// The spool has failed.
    pub fn restartpoint(
        &mut self,
        mut control: Control,
        back: usize,
        save: &mut dyn FnMut(Control),
    ) -> Result<(), SpoolError> {
        self.write_pages(&mut control, save)?;
        let Some(&redo) = self.begins.iter().rev().nth(back).filter(|redo| **redo > control.redo.1) else {
            return Ok(());
        };
        control.redo = (self.source.history().timeline_at(redo), redo);
        save(control);
        self.source.note_restartpoint(redo);
        Ok(())
    }
}

impl Control {
    /// Of a base backup.
    pub fn of_backup(first: Known) -> Control {
        let begin = (TimelineId(1), first.begin);
        Control { redo: begin, min_recovery: begin, promoting: None }
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        self.directory.watch_no_more();
    }
}
