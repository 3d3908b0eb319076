//! The thread that reads, and that decides.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_layout::Lsn;
use walrider_observe::apply::ApplyState;
use walrider_session::{ConnectOptions, Connection};

use crate::apply::{Apply, Ended};
use crate::assemble::{Assembler, Transaction};
use crate::batch::{Batch, Part};
use crate::conflict::{Conflicts, OnConflict};
use crate::counters::Counters;
use crate::error::ApplyError;
use crate::last_update::Rule;
use crate::message::Protocol;
use crate::open_batch::{Batches, Bounds};
use crate::origins::{self, Durable};
use crate::source::{Event, Progress, Source, SourceError, SourceOptions, StreamingMode, Timing, Woken};
use crate::target::Table;
use crate::turn::{Phase, Turns};
use crate::worker::{Common, Worker};

/// Between two looks at locks and at what is durable.
const LOOK: Duration = Duration::from_millis(50);
/// The publisher hears of us at least so often, and is lost when it is silent for so long.
const TIMING: Timing = Timing { status_interval: Duration::from_secs(1), timeout: Duration::from_secs(60) };
/// What is under way may take so long when it is to stop.
const DRAIN: Duration = Duration::from_secs(60);
/// Messages that are read before others have their turn.
const READ_AT_ONCE: usize = 1000;
/// Batches that wait for a worker, for each worker.
const QUEUED: usize = 2;
/// Changes of a part of a transaction, at least: each part has a round trip of its own.
const LEAST_PART: u64 = 200;
/// While something is under way and more comes, it is fetched this often. A reader that is woken for each message costs the publisher,
/// which has to wake, more than the message does.
const NAP: Duration = Duration::from_micros(300);
/// The same where so many messages come in a second. What lies in the socket meanwhile fills the window, and the publisher's
/// system sends the next messages together instead of each by itself, which is half of what they cost it.
const FLOOD: f64 = 50_000.0;
const LONG_NAP: Duration = Duration::from_millis(10);
/// What the publisher may send ahead of us on the same host: more than one packet there, and no more than it writes in a millisecond.
/// The system would let it grow to what fits into a nap.
const WINDOW: usize = 80 << 10;
/// Under load, batches that are not full are at least so far apart; while others are executed, so far.
const LINGER: Duration = Duration::from_millis(2);
const BESIDE: Duration = Duration::from_millis(10);

/// How long each change is streamed at once, which costs both sides more.
const IMMEDIATE_FOR: Duration = Duration::from_secs(10);

/// A batch that is not known to have committed.
struct UnderWay {
    number: u64,
    end_lsn: Lsn,
    transactions: u64,
}

/// Why nothing more is read.
enum Ending {
    Stop(Instant),
    /// A publisher that is shut down waits for all who are connected; nobody who is paused may keep it.
    Pause,
    Until,
    Failed(ApplyError),
}

/// The state of a connection to both sides.
pub struct Reader<'s> {
    apply: &'s Apply,
    source: Source,
    /// Up to where the publisher has sent, or has nothing for us.
    received: Lsn,
    control: Connection,
    assembler: Assembler,
    batches: Batches,
    queue: VecDeque<Batch>,
    under_way: VecDeque<UnderWay>,
    turns: Arc<Turns>,
    workers: Vec<(Sender<Arc<Batch>>, ScopedJoinHandle<'s, ()>)>,
    failed: Receiver<ApplyError>,
    durable: Durable,
    /// End of the last transaction that was applied, or where it began.
    applied: Lsn,
    looked: Instant,
    /// Whether large transactions are executed while they come, and whether one has begun to be.
    by_parts: bool,
    in_parts: bool,
    part_bytes: Arc<AtomicUsize>,
    /// When a batch was closed before it was full.
    closed: Instant,
    /// When the last nap began, and how many messages were read since.
    napped: Instant,
    messages: usize,
    spilled: u64,
    /// When each change has been streamed at once for long enough.
    usual_at: Option<Instant>,
    ending: Option<Ending>,
}

/// What came of a look at what the publisher has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// Nothing, or nothing more is wanted now.
    Nothing,
    /// Something.
    Some,
    /// There may be more at once.
    More,
}

impl<'s> Reader<'s> {
    /// Connects to both sides, and starts the workers.
    pub fn start<'e>(apply: &'s Apply, scope: &'s Scope<'s, 'e>, quit: Arc<OwnedFd>) -> Result<Reader<'s>, ApplyError> {
        let settings = &apply.settings;
        apply.note(|progress| progress.state = ApplyState::Connecting);
        let mut target = ConnectOptions::resolve_ordinary(&settings.target, "walrider logical apply")?;
        target.give_up_after(Duration::from_secs(60));
        target.interrupt_with(quit.clone());
        let name = "walrider logical apply";
        let mut publisher =
            ConnectOptions::resolve_for_database(&settings.source, name).map_err(SourceError::Connect)?;
        publisher.give_up_after(TIMING.timeout);
        publisher.interrupt_with(quit.clone());
        let mut control = Connection::open(&target)?;
        origins::set_up_session(&mut control, settings.synchronous_commit)?;
        let sessions = origins::open_sessions(&mut control, &target, settings)?;
        let start = origins::start(&mut control, settings)?;
        let wanted = SourceOptions {
            slot: settings.slot.clone(),
            start,
            system_identifier: None,
            protocol: Protocol::V4,
            publications: settings.publications.clone(),
            streaming: match settings.streaming {
                true if apply.is_immediate() => StreamingMode::Immediate,
                true => StreamingMode::On,
                false => StreamingMode::Off,
            },
            binary: false,
            messages: false,
            any_origin: settings.any_origin,
            timing: TIMING,
        };
        let system = crate::source::identify(&publisher)?;
        origins::check_publisher(&mut control, settings, &system, start)?;
        let by_time = settings.on_conflict == OnConflict::LastUpdateWins;
        let rule = match by_time {
            true => Some(Rule::find(&mut control, &settings.origin, system.system_identifier)?),
            false => None,
        };
        let source = Source::open(&publisher, &wanted, Some(quit))?;
        source
            .connection()
            .narrow_window_on_same_host(WINDOW)
            .map_err(|error| ApplyError::System("set a socket's buffer", error))?;
        if source.slot().two_phase {
            origins::check_prepared(&mut control)?;
        }
        tracing::info!(
            "applying from {} (slot \"{}\") to {} from {start} on, with {} sessions",
            source.connection().peer(),
            settings.slot,
            control.peer(),
            settings.jobs
        );
        apply.note(|progress| {
            progress.state = ApplyState::Streaming;
            progress.connections += 1;
            progress.peers = Some((source.connection().peer().to_owned(), control.peer().to_owned()));
            progress.flushed = start;
        });
        let turns = Arc::new(Turns::new(settings.jobs));
        let part_bytes = Arc::new(AtomicUsize::new(0));
        let common = Common {
            turns: turns.clone(),
            counters: apply.counters.clone(),
            wake: apply.wake.clone(),
            on_conflict: settings.on_conflict,
            rule,
            conflicts: Arc::new(Conflicts::new()),
            origin: settings.origin.clone(),
            part_bytes: part_bytes.clone(),
        };
        let (fail, failed) = mpsc::channel();
        let mut workers = Vec::new();
        for (number, (connection, pid)) in sessions.into_iter().enumerate() {
            turns.introduce(number, pid);
            let worker = Worker::new(number, connection, common.clone())?;
            let (give, batches) = mpsc::channel();
            let fail = fail.clone();
            let run = move || worker.run(batches, fail);
            let thread = std::thread::Builder::new().name(format!("apply {number}")).spawn_scoped(scope, run);
            workers.push((give, thread.map_err(|error| ApplyError::System("start a thread", error))?));
        }
        // Each keeps its own time where times are compared.
        let bounds = Bounds { rows: if by_time { 1 } else { settings.batch_rows }, bytes: settings.batch_bytes };
        Ok(Reader {
            apply,
            assembler: Assembler::new(settings.memory, settings.spill_dir.clone()),
            source,
            received: start,
            control,
            batches: Batches::new(bounds),
            queue: VecDeque::new(),
            under_way: VecDeque::new(),
            turns,
            workers,
            failed,
            durable: Durable::new(settings.synchronous_commit, start),
            applied: start,
            looked: Instant::now(),
            by_parts: !by_time && settings.until.is_none() && settings.skip.is_none(),
            in_parts: false,
            part_bytes,
            closed: Instant::now(),
            napped: Instant::now(),
            messages: 0,
            spilled: 0,
            usual_at: apply.is_immediate().then(|| Instant::now() + IMMEDIATE_FOR),
            ending: None,
        })
    }

    /// Waits for the workers; `clean`: and for the publisher, until it has taken in what it was told.
    pub fn end(self, clean: bool) {
        self.turns.stop();
        for (give, thread) in self.workers {
            drop(give);
            // A panic there was printed.
            let _ = thread.join();
        }
        if let Err(error) = if clean { self.source.finish() } else { Ok(()) } {
            tracing::warn!("could not end the stream: {error}");
        }
    }

    /// Until it ends; `None`: because it is paused.
    pub fn run(&mut self) -> Result<Option<Ended>, ApplyError> {
        loop {
            if let Ok(error) = self.failed.try_recv() {
                return Err(error);
            }
            if self.apply.is_stopping() && !matches!(self.ending, Some(Ending::Stop(_))) {
                // What it would have ended with, had it not been asked to.
                match self.ending.replace(Ending::Stop(Instant::now())) {
                    Some(Ending::Failed(error)) if !error.is_internal() => tracing::error!("{error}"),
                    _ => {}
                }
            }
            if self.apply.is_paused() && self.ending.is_none() && !self.goes_on() {
                self.ending = Some(Ending::Pause);
            }
            if self.ending.is_none() && self.usual_at.is_some_and(|at| at <= Instant::now()) {
                self.ending = Some(Ending::Failed(ApplyError::Usual));
            }
            self.note_committed();
            let came = self.read()?;
            self.dispatch(came);
            self.look()?;
            self.tell()?;
            if let Some(ended) = self.has_ended() {
                return ended;
            }
            if came != Came::More {
                self.wait(came)?;
            }
        }
    }

    fn has_ended(&mut self) -> Option<Result<Option<Ended>, ApplyError>> {
        // What was read and not begun while it is paused stays undone: it is read again.
        let waits = match self.ending {
            Some(Ending::Stop(_)) => self.apply.is_paused(),
            Some(Ending::Pause) => true,
            _ => false,
        };
        // Nor is that of which the end did not come.
        let half = self.in_parts.then(|| self.batches.last());
        let begun = self.under_way.iter().any(|batch| Some(batch.number) != half);
        let queued = self.queue.iter().any(|batch| Some(batch.number) != half);
        let drained = !begun && (waits || (!queued && !self.batches.is_open()));
        let too_long = matches!(self.ending, Some(Ending::Stop(since)) if since.elapsed() > DRAIN);
        if !drained && !too_long {
            return None;
        }
        let ending = self.ending.take()?;
        if drained {
            let told = self.last_word(matches!(ending, Ending::Until));
            if let Err(error) = told {
                tracing::warn!("could not tell the publisher how far it is: {error}");
            }
        }
        Some(match ending {
            Ending::Stop(_) => Ok(Some(Ended::Stopped)),
            Ending::Pause => Ok(None),
            Ending::Until => Ok(Some(Ended::Reached)),
            Ending::Failed(error) => Err(error),
        })
    }

    /// Makes durable what was applied, and tells the publisher.
    fn last_word(&mut self, until: bool) -> Result<(), ApplyError> {
        origins::flush(&mut self.control, &self.apply.settings)?;
        let mut at = self.applied;
        if let (true, Some(until)) = (until, self.apply.settings.until) {
            at = at.max(until.min(self.received));
        }
        self.apply.note(|progress| progress.flushed = at);
        self.source.confirm(Progress { written: at.max(self.received), flushed: at, applied: at });
        Ok(self.source.tend()?)
    }

    /// How many batches may be with workers.
    fn may_dispatch(&self, number: u64) -> bool {
        number <= self.turns.committed() + self.workers.len() as u64
    }

    /// Whether nothing more is to be read now.
    fn is_full(&self) -> bool {
        self.ending.is_some()
            || self.part_bytes.load(Ordering::Relaxed) > self.apply.settings.memory
            || self.queue.len() > QUEUED * self.workers.len()
            || self.queue.iter().map(Batch::memory_bytes).sum::<usize>() > self.apply.settings.memory
    }

    /// Reads some of what is there, unless too much waits.
    fn read(&mut self) -> Result<Came, ApplyError> {
        if self.is_full() {
            return Ok(Came::Nothing);
        }
        let (mut out, mut messages) = (Vec::new(), 0);
        while self.ending.is_none() && messages < READ_AT_ONCE {
            let transaction = match self.source.next_event()? {
                None => break,
                Some(Event::Done) => return Err(SourceError::Closed.into()),
                Some(Event::Keepalive { wal_end, .. }) => {
                    self.received = self.received.max(wal_end);
                    None
                }
                Some(Event::Message { lsn, message, body, .. }) => {
                    self.received = self.received.max(lsn);
                    self.assembler.take(message, body)?
                }
            };
            messages += 1;
            match transaction {
                Some(transaction) => self.take(transaction, &mut out),
                None => self.take_part(&mut out),
            }
        }
        self.messages += messages;
        self.queue.extend(out);
        let spilled = self.assembler.spilled_bytes();
        Counters::add(&self.apply.counters.spilled_bytes, spilled - self.spilled);
        self.spilled = spilled;
        Ok(match messages {
            0 => Came::Nothing,
            READ_AT_ONCE => Came::More,
            _ => Came::Some,
        })
    }

    /// Hands on what has come of a transaction, if that is more than a batch.
    fn take_part(&mut self, out: &mut Vec<Batch>) {
        if !self.by_parts {
            return;
        }
        let settings = &self.apply.settings;
        let rows = settings.batch_rows.max(LEAST_PART);
        let part = self.assembler.take_part(rows, settings.batch_bytes, self.apply.whole_until());
        let Some(transaction) = part else { return };
        let part = match std::mem::replace(&mut self.in_parts, true) {
            true => Part::Middle,
            false => {
                tracing::debug!(
                    "the transaction that committed at {} is executed while it comes",
                    transaction.commit_lsn
                );
                Part::First
            }
        };
        if !self.add(transaction, part, out) && part == Part::First {
            self.in_parts = false;
        }
    }

    /// Puts a transaction into a batch. What cannot be applied ends it when all before is.
    fn take(&mut self, mut transaction: Transaction, out: &mut Vec<Batch>) {
        let settings = &self.apply.settings;
        if settings.until.is_some_and(|until| transaction.end_lsn > until) {
            self.ending = Some(Ending::Until);
            return;
        }
        if settings.skip == Some(transaction.commit_lsn) {
            tracing::warn!("leaving out the transaction that committed at {}", transaction.commit_lsn);
            transaction.changes = transaction.changes.without_rows();
        }
        let part = if std::mem::take(&mut self.in_parts) { Part::Last } else { Part::Whole };
        if !self.add(transaction, part, out) {
            // Its end does not come: what was begun of it is not waited for.
            self.in_parts = part == Part::Last;
        }
    }

    /// Whether it could be put into one; else all ends when what came before is applied.
    fn add(&mut self, transaction: Transaction, part: Part, out: &mut Vec<Batch>) -> bool {
        let committed = self.turns.committed();
        self.batches.committed(committed);
        let (control, source) = (&mut self.control, &mut self.source);
        let (mut find, mut tend) = (|relation| Table::find(control, relation), || Ok(source.tend()?));
        let added = self.batches.add(transaction, part, committed, (&mut find, &mut tend), out);
        match added {
            Ok(()) => true,
            Err(error) => {
                self.ending = Some(Ending::Failed(error));
                false
            }
        }
    }

    /// Whether the open batch may wait for more: others came while the one before it was executed, and that was not long ago.
    fn lingers(&self) -> bool {
        self.batches.is_one_of_many() && self.closed.elapsed() < LINGER
    }

    /// Whether a batch that is not full may begin now: a session is free and nothing is executed, or that takes so long that it is time to
    /// begin beside it. Many small batches cost more than they gain: each has its round trip, its commit, and sessions that are woken.
    fn may_close(&self) -> bool {
        let idle = self.under_way.is_empty() && !self.lingers();
        self.may_dispatch(self.batches.last() + 1) && (idle || self.closed.elapsed() >= BESIDE)
    }

    /// Whether a transaction has begun on the target of which not all has come, or not all was given to its worker.
    fn goes_on(&self) -> bool {
        self.in_parts || self.queue.iter().any(|batch| matches!(batch.part, Part::Middle | Part::Last))
    }

    /// Gives batches to workers. If more can be read at once, the open batch still grows.
    fn dispatch(&mut self, came: Came) {
        if (self.apply.is_paused() || matches!(self.ending, Some(Ending::Pause))) && !self.goes_on() {
            return;
        }
        let committed = self.turns.committed();
        let wants = self.queue.is_empty() && self.batches.is_open() && (came != Came::More || self.ending.is_some());
        let may = self.ending.is_some() || (self.may_close() && self.batches.open_begins_after(committed) == 0);
        if wants && may {
            let mut out = Vec::new();
            self.batches.close(&mut out);
            self.queue.extend(out);
            self.closed = Instant::now();
        }
        while self.queue.front().is_some_and(|batch| self.may_dispatch(batch.number)) {
            let batch = self.queue.pop_front().expect("there is one");
            let (number, end_lsn) = (batch.number, batch.end_lsn());
            if batch.part != Part::Whole {
                self.part_bytes.fetch_add(batch.memory_bytes(), Ordering::Relaxed);
            }
            match self.under_way.back_mut() {
                Some(last) if last.number == number => last.end_lsn = end_lsn,
                _ => self.under_way.push_back(UnderWay {
                    number,
                    end_lsn,
                    transactions: batch.transactions.len() as u64,
                }),
            }
            let worker = (number % self.workers.len() as u64) as usize;
            // One that has ended has said why.
            let _ = self.workers[worker].0.send(Arc::new(batch));
        }
    }

    fn note_committed(&mut self) {
        let committed = self.turns.committed();
        while self.under_way.front().is_some_and(|batch| batch.number <= committed) {
            let batch = self.under_way.pop_front().expect("there is one");
            // What was prepared before the slot was made comes with a position from then (ReorderBufferFinishPrepared).
            self.applied = self.applied.max(batch.end_lsn);
        }
        self.batches.committed(committed);
    }

    /// Whether everything that has committed, of what came, is applied.
    fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.queue.is_empty() && !self.batches.is_open() && self.assembler.is_between()
    }

    /// Now and then: locks, what is durable, the status.
    fn look(&mut self) -> Result<(), ApplyError> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        self.unblock()?;
        self.durable.look(&mut self.control, &self.apply.settings, self.applied)?;
        let seats = self.turns.seats();
        let count = |phases: &[Phase]| seats.iter().filter(|seat| phases.contains(&seat.phase)).count() as u64;
        let queued: u64 = self.under_way.iter().map(|batch| batch.transactions).sum();
        let queued = queued + self.queue.iter().map(|batch| batch.transactions.len() as u64).sum::<u64>();
        let (received, flushed, idle) = (self.received, self.durable.position(), self.is_idle());
        let state = if self.apply.is_paused() { ApplyState::Paused } else { ApplyState::Streaming };
        self.apply.note(|progress| {
            progress.state = state;
            progress.received = received;
            progress.waiting = count(&[Phase::Waiting]);
            progress.executing = count(&[Phase::Executing, Phase::Executed]);
            progress.queued = queued;
            progress.flushed = progress.flushed.max(flushed);
            progress.idle = idle;
            progress.was_idle = if idle { Some(Instant::now()) } else { progress.was_idle };
        });
        let until = self.apply.settings.until;
        if self.ending.is_none() && idle && until.is_some_and(|until| self.received >= until) {
            self.ending = Some(Ending::Until);
        }
        Ok(())
    }

    /// The oldest batch must not wait for the locks of a later one, which waits for it: that gives way.
    fn unblock(&mut self) -> Result<(), ApplyError> {
        let oldest = self.turns.committed() + 1;
        let seats = self.turns.seats();
        let stuck = |seat: &&crate::turn::Seat| {
            seat.batch == oldest && seat.phase == Phase::Executing && seat.since.elapsed() > LOOK
        };
        let Some(stuck) = seats.iter().find(stuck) else { return Ok(()) };
        if !seats.iter().any(|seat| seat.batch > oldest && matches!(seat.phase, Phase::Executing | Phase::Executed)) {
            return Ok(());
        }
        let blocking = origins::blocking_pids(&mut self.control, stuck.pid)?;
        for (worker, seat) in seats.iter().enumerate().filter(|(_, seat)| blocking.contains(&seat.pid)) {
            tracing::debug!("batch {} gives way to {oldest}", seat.batch);
            Counters::add(&self.apply.counters.gave_way, 1);
            if self.turns.give_way(worker, seat.batch) {
                origins::cancel(&mut self.control, seat.pid)?;
            }
        }
        Ok(())
    }

    /// Notes what the publisher is to be told, and when that is due tells it.
    fn tell(&mut self) -> Result<(), ApplyError> {
        let mut flushed = self.durable.position();
        let (mut written, mut applied) = (self.received.max(self.applied), self.applied);
        if self.is_idle() && flushed >= self.applied && self.ending.is_none() {
            // Nothing up to there was for us.
            (flushed, applied) = (self.received.max(flushed), self.received.max(applied));
            written = written.max(flushed);
        }
        self.source.confirm(Progress { written, flushed, applied });
        self.apply.note(|progress| progress.flushed = progress.flushed.max(flushed));
        Ok(self.source.tend()?)
    }

    /// How long to let more come before it is fetched; `None`: it is wanted at once.
    fn nap(&mut self) -> Option<Duration> {
        let since = self.napped.elapsed().max(NAP);
        let flood = self.messages as f64 >= FLOOD * since.as_secs_f64();
        (self.napped, self.messages) = (Instant::now(), 0);
        let busy = !self.under_way.is_empty() || self.lingers();
        match flood && (busy || self.source.is_inside()) {
            true => Some(LONG_NAP),
            false => busy.then_some(NAP),
        }
    }

    fn wait(&mut self, came: Came) -> Result<(), ApplyError> {
        let busy = !self.under_way.is_empty() || self.durable.is_waiting();
        let nap = if came == Came::Some { self.nap() } else { None };
        let time = match nap {
            Some(nap) => nap,
            None if self.lingers() => LINGER,
            None if busy && self.batches.is_open() => BESIDE,
            None if busy => LOOK,
            None => Duration::from_millis(200),
        };
        let wake = self.apply.wake.clone();
        if nap.is_some() || self.is_full() {
            let time = Timespec::try_from(time).ok();
            match poll(&mut [PollFd::new(&*wake, PollFlags::IN)], time.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(ApplyError::System("wait", error.into())),
            }
        } else if self.source.wait(&[wake.as_fd()], Some(time))? == Woken::Publisher {
            return Ok(());
        }
        wake.clear();
        Ok(())
    }
}
