//! The thread that reads, and that decides.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_layout::Lsn;
use walrider_observe::apply::ApplyState;
use walrider_session::{ConnectOptions, Connection};

use crate::apply::{Apply, Ended};
use crate::assemble::{Assembler, Directory, Transaction};
use crate::batch::Batch;
use crate::conflict::Conflicts;
use crate::counters::Counters;
use crate::error::ApplyError;
use crate::feed::{Event, Feed, Wanted};
use crate::open_batch::{Batches, Bounds};
use crate::origins::{self, Durable};
use crate::target::Table;
use crate::turn::{Phase, Turns};
use crate::worker::{Common, Worker};

/// Between two looks at locks and at what is durable.
const LOOK: Duration = Duration::from_millis(50);
/// The publisher hears of us at least so often.
const TELL: Duration = Duration::from_secs(1);
/// What is under way may take so long when it is to stop.
const DRAIN: Duration = Duration::from_secs(60);
/// Batches that wait for a worker, for each worker.
const QUEUED: usize = 2;

/// A batch that is not known to have committed.
struct UnderWay {
    number: u64,
    end_lsn: Lsn,
    transactions: u64,
}

/// Why nothing more is read.
enum Ending {
    Stop(Instant),
    Until,
    Failed(ApplyError),
}

/// The state of a connection to both sides.
pub struct Reader<'s> {
    apply: &'s Apply,
    feed: Feed,
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
    told: (Instant, Lsn),
    tell_now: bool,
    looked: Instant,
    spilled: u64,
    ending: Option<Ending>,
}

impl<'s> Reader<'s> {
    /// Connects to both sides, and starts the workers.
    pub fn start<'e>(apply: &'s Apply, scope: &'s Scope<'s, 'e>, quit: Arc<OwnedFd>) -> Result<Reader<'s>, ApplyError> {
        let settings = &apply.settings;
        apply.note(|progress| progress.state = ApplyState::Connecting);
        let mut target = ConnectOptions::resolve_ordinary(&settings.target, "walrider logical apply")?;
        target.give_up_after(Duration::from_secs(60));
        target.interrupt_with(quit.clone());
        let mut source = ConnectOptions::resolve_for_database(&settings.source, "walrider logical apply")
            .map_err(ApplyError::Source)?;
        source.give_up_after(Duration::from_secs(60));
        source.interrupt_with(quit);
        let mut control = Connection::open(&target)?;
        origins::set_up_session(&mut control, settings.synchronous_commit)?;
        let sessions = origins::open_sessions(&mut control, &target, settings)?;
        let start = origins::start(&mut control, settings)?;
        let wanted = Wanted {
            slot: settings.slot.clone(),
            publications: settings.publications.clone(),
            origin: settings.source_origin.clone(),
            streaming: settings.streaming,
        };
        let feed = Feed::start(&source, &wanted, start)?;
        if feed.two_phase {
            origins::check_prepared(&mut control)?;
        }
        tracing::info!(
            "applying from {} (slot \"{}\") to {} from {start} on, with {} sessions",
            feed.peer(),
            settings.slot,
            control.peer(),
            settings.jobs
        );
        apply.note(|progress| {
            progress.state = ApplyState::Streaming;
            progress.connections += 1;
            progress.peers = Some((feed.peer().to_owned(), control.peer().to_owned()));
            progress.flushed = start;
        });
        let turns = Arc::new(Turns::new(settings.jobs));
        let common = Common {
            turns: turns.clone(),
            counters: apply.counters.clone(),
            wake: apply.wake.clone(),
            on_conflict: settings.on_conflict,
            conflicts: Arc::new(Conflicts::new()),
            origin: settings.origin.clone(),
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
        let spill = Box::new(Directory(settings.spill_dir.clone()));
        let bounds = Bounds { rows: settings.batch_rows, bytes: settings.batch_bytes };
        Ok(Reader {
            apply,
            assembler: Assembler::new(feed.protocol, settings.memory, spill),
            feed,
            control,
            batches: Batches::new(bounds),
            queue: VecDeque::new(),
            under_way: VecDeque::new(),
            turns,
            workers,
            failed,
            durable: Durable::new(settings.synchronous_commit, start),
            applied: start,
            told: (Instant::now(), Lsn(0)),
            tell_now: true,
            looked: Instant::now(),
            spilled: 0,
            ending: None,
        })
    }

    /// Waits for the workers.
    pub fn end(self) {
        self.turns.stop();
        for (give, thread) in self.workers {
            drop(give);
            // A panic there was printed.
            let _ = thread.join();
        }
    }

    /// Until it ends.
    pub fn run(&mut self) -> Result<Ended, ApplyError> {
        loop {
            if let Ok(error) = self.failed.try_recv() {
                return Err(self.first_failure(error));
            }
            if self.apply.is_stopping() && self.ending.is_none() {
                self.ending = Some(Ending::Stop(Instant::now()));
            }
            self.note_committed();
            let read = self.read()?;
            self.dispatch(read);
            self.look()?;
            self.tell()?;
            if let Some(ended) = self.has_ended() {
                return ended;
            }
            if !read {
                self.wait()?;
            }
        }
    }

    /// Workers that end because another one failed say so too: that one is who knows.
    fn first_failure(&self, first: ApplyError) -> ApplyError {
        let is_echo = |error: &ApplyError| matches!(error, ApplyError::Stopped);
        if !is_echo(&first) {
            return first;
        }
        let end = Duration::from_millis(500);
        self.failed.recv_timeout(end).ok().filter(|error| !is_echo(error)).unwrap_or(first)
    }

    fn has_ended(&mut self) -> Option<Result<Ended, ApplyError>> {
        let drained = self.under_way.is_empty() && self.queue.is_empty() && !self.batches.is_open();
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
            Ending::Stop(_) => Ok(Ended::Stopped),
            Ending::Until => Ok(Ended::Reached),
            Ending::Failed(error) => Err(error),
        })
    }

    /// Makes durable what was applied, and tells the publisher.
    fn last_word(&mut self, until: bool) -> Result<(), ApplyError> {
        origins::flush(&mut self.control, &self.apply.settings)?;
        let mut at = self.applied;
        if let (true, Some(until)) = (until, self.apply.settings.until) {
            at = at.max(until.min(self.feed.wal_end));
        }
        self.apply.note(|progress| progress.flushed = at);
        self.feed.tell(at, at, at)
    }

    /// How many batches may be with workers.
    fn may_dispatch(&self, number: u64) -> bool {
        number <= self.turns.committed() + self.workers.len() as u64
    }

    /// Reads what is there, unless too much waits. Whether something was read.
    fn read(&mut self) -> Result<bool, ApplyError> {
        if self.ending.is_some() || self.queue.len() > QUEUED * self.workers.len() {
            return Ok(false);
        }
        if !self.feed.receive()? {
            return Ok(false);
        }
        let mut out = Vec::new();
        while self.ending.is_none() {
            let transaction = match self.feed.next()? {
                None => break,
                Some(Event::Keepalive { reply_requested, .. }) => {
                    self.tell_now |= reply_requested;
                    continue;
                }
                Some(Event::Message(body)) => self.assembler.take(body)?,
            };
            if let Some(transaction) = transaction {
                self.take(transaction, &mut out);
            }
        }
        self.queue.extend(out);
        let spilled = self.assembler.spilled_bytes();
        Counters::add(&self.apply.counters.spilled_bytes, spilled - self.spilled);
        self.spilled = spilled;
        Ok(true)
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
        let committed = self.turns.committed();
        self.batches.committed(committed);
        let (batches, control) = (&mut self.batches, &mut self.control);
        let added = batches.add(transaction, committed, &mut |relation| Table::find(control, relation), out);
        if let Err(error) = added {
            self.ending = Some(Ending::Failed(error));
        }
    }

    /// Gives batches to workers. `more`: there may be more to read at once, so that the open batch still grows.
    fn dispatch(&mut self, more: bool) {
        let committed = self.turns.committed();
        if self.queue.is_empty() && self.batches.is_open() && (!more || self.ending.is_some()) {
            let free = self.may_dispatch(self.batches.last() + 1);
            if self.ending.is_some() || (free && self.batches.open_begins_after(committed) == 0) {
                let mut out = Vec::new();
                self.batches.close(&mut out);
                self.queue.extend(out);
            }
        }
        while self.queue.front().is_some_and(|batch| self.may_dispatch(batch.number)) {
            let batch = self.queue.pop_front().expect("there is one");
            let (number, end_lsn) = (batch.number, batch.end_lsn());
            self.under_way.push_back(UnderWay { number, end_lsn, transactions: batch.transactions.len() as u64 });
            let worker = (number % self.workers.len() as u64) as usize;
            // One that has ended has said why.
            let _ = self.workers[worker].0.send(Arc::new(batch));
        }
    }

    fn note_committed(&mut self) {
        let committed = self.turns.committed();
        while self.under_way.front().is_some_and(|batch| batch.number <= committed) {
            let batch = self.under_way.pop_front().expect("there is one");
            assert!(batch.end_lsn >= self.applied, "transactions are applied in order");
            self.applied = batch.end_lsn;
        }
        self.batches.committed(committed);
    }

    /// Whether everything that came is applied.
    fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.queue.is_empty() && !self.batches.is_open() && self.assembler.is_empty()
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
        let (received, flushed, idle) = (self.feed.wal_end, self.durable.position(), self.is_idle());
        self.apply.note(|progress| {
            progress.received = received;
            progress.waiting = count(&[Phase::Waiting]);
            progress.executing = count(&[Phase::Executing, Phase::Executed]);
            progress.queued = queued;
            progress.flushed = progress.flushed.max(flushed);
            progress.idle = idle;
        });
        let until = self.apply.settings.until;
        if self.ending.is_none() && idle && until.is_some_and(|until| self.feed.wal_end >= until) {
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

    fn tell(&mut self) -> Result<(), ApplyError> {
        let mut flush = self.durable.position();
        let (mut write, mut apply) = (self.feed.wal_end.max(self.applied), self.applied);
        if self.is_idle() && flush >= self.applied && self.ending.is_none() {
            // Nothing up to there was for us.
            (flush, apply) = (self.feed.wal_end.max(flush), self.feed.wal_end.max(apply));
            write = write.max(flush);
        }
        let moved = flush > self.told.1 && self.told.0.elapsed() >= LOOK;
        if self.tell_now || moved || self.told.0.elapsed() >= TELL {
            self.feed.tell(write, flush, apply)?;
            self.told = (Instant::now(), flush);
            self.tell_now = false;
            self.apply.note(|progress| progress.flushed = progress.flushed.max(flush));
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), ApplyError> {
        let busy = !self.under_way.is_empty() || self.durable.is_waiting();
        let time = Timespec::try_from(if busy { LOOK } else { Duration::from_millis(200) }).ok();
        let full = self.ending.is_some() || self.queue.len() > QUEUED * self.workers.len();
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, !full);
        events.set(PollFlags::OUT, self.feed.wants_write());
        let mut fds = [PollFd::new(&self.feed, events), PollFd::new(&*self.apply.wake, PollFlags::IN)];
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(ApplyError::System("wait", error.into())),
        }
        self.apply.wake.clear();
        self.feed.flush()
    }
}
