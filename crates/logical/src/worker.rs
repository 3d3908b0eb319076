//! A session with the target that executes batches.
//!
//! The keys of [`crate::keys`] do not see everything: values that are equal in two spellings, indexes over expressions. So a batch
//! that is executed before another has committed is never trusted. If anything fails in it, or a row is not found, it is rolled
//! back, and executed again when it is the oldest; and if the oldest waits for its locks, it gives way. Only what the oldest
//! finds is a conflict. Since batches commit in order, each then does what it would have done alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use walrider_session::{Connection, Outcome, Transaction};
use walrider_wire::backend::ServerMessage;
use walrider_wire::command::quote_literal;

use crate::assemble::End;
use crate::batch::{Batch, Part, Work};
use crate::conflict::{ASKED, ASKED_SEVERAL, Conflicts, OnConflict};
use crate::counters::Counters;
use crate::error::ApplyError;
use crate::last_update::Rule;
use crate::origins::{self, PROGRESS};
use crate::statements::{Statements, Writer, queue_commit};
use crate::turn::{Phase, Turn, Turns};
use crate::wake::Wake;

/// Errors that an attempt more may not meet: serialization, deadlock, cancelled, lock not available (`errcodes.txt`).
const AGAIN: [&str; 4] = ["40001", "40P01", CANCELED, "55P03"];

/// `query_canceled`.
const CANCELED: &str = "57014";
/// How often the oldest batch is executed again after such an error.
const MAX_ATTEMPTS: u32 = 50;

/// What a worker needs besides its session.
#[derive(Clone)]
pub struct Common {
    /// Whose turn it is.
    pub turns: Arc<Turns>,
    /// What is counted.
    pub counters: Arc<Counters>,
    /// Told when a batch has committed.
    pub wake: Arc<Wake>,
    /// What to do with conflicts.
    pub on_conflict: OnConflict,
    /// Which of two changes of a row counts, where it is not always the publisher's.
    pub rule: Option<Rule>,
    /// Bounds what is logged of them.
    pub conflicts: Arc<Conflicts>,
    /// Names prepared transactions.
    pub origin: String,
    /// Bytes of parts of transactions that wait for their worker.
    pub part_bytes: Arc<AtomicUsize>,
}

/// How a batch is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As fast as it can be: rows of a table together, in COPY.
    Fast,
    /// Row by row, so that an error is that of a row.
    Careful,
}

/// Whether all of a batch that was executed ahead, or in part, went well.
fn is_as_expected(batch: &Batch, outcome: &Outcome) -> bool {
    match &outcome.failure {
        Some((_, error)) => tracing::debug!("batch {}, executed ahead: {error}", batch.number),
        None if outcome.unexpected_total > 0 => {
            tracing::debug!("batch {}, executed ahead: a row was not found, or not as expected", batch.number)
        }
        None => return true,
    }
    false
}

/// Tells that a thread panicked: nobody waits for it for ever.
struct Told<'a>(&'a Sender<ApplyError>, &'a Common);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = std::io::Error::other("a thread that applies panicked");
            // Nobody is left who could be told.
            let _ = self.0.send(ApplyError::System("go on", error));
            self.1.turns.stop();
            self.1.wake.wake();
        }
    }
}

/// A worker: its number, its session, its batches.
pub struct Worker {
    number: usize,
    connection: Connection,
    statements: Statements,
    common: Common,
    /// Changes of the parts of a transaction that is open.
    part_changes: u64,
}

impl Worker {
    /// On a session that was set up.
    pub fn new(number: usize, mut connection: Connection, common: Common) -> Result<Worker, ApplyError> {
        let progress = origins::progress_sql(&common.origin, &origins::part(number), "$1");
        let statements = Statements::new(&mut connection, &progress, common.rule.clone())?;
        Ok(Worker { number, connection, statements, common, part_changes: 0 })
    }

    /// Executes batches until there are no more.
    pub fn run(mut self, batches: Receiver<Arc<Batch>>, failed: Sender<ApplyError>) {
        let common = self.common.clone();
        let _told = Told(&failed, &common);
        while let Ok(batch) = batches.recv() {
            let result = if batch.part == Part::Whole { self.batch(&batch) } else { self.part(&batch) };
            match result {
                Ok(()) => common.wake.wake(),
                Err(error) => {
                    // The receiver ends with the whole; then nobody wants to know. Those who stop because of this come after it.
                    let _ = failed.send(error);
                    common.turns.stop();
                    common.wake.wake();
                    return;
                }
            }
        }
    }

    /// Waits until it may begin, and sees to it that it commits in its turn.
    fn batch(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        let turns = self.common.turns.clone();
        // What was left out of the batch before has these numbers, too.
        self.statements.skipped.clear();
        turns.enter(self.number, Phase::Waiting, batch.number);
        if !turns.wait_committed(batch.begins_after) {
            return Err(ApplyError::Stopped);
        }
        turns.enter(self.number, Phase::Executing, batch.number);
        if !turns.is_oldest(batch.number) {
            if self.ahead(batch)? {
                return self.committed(batch);
            }
            Counters::add(&self.common.counters.retries, 1);
            turns.enter(self.number, Phase::Waiting, batch.number);
            if !turns.wait_committed(batch.number - 1) {
                return Err(ApplyError::Stopped);
            }
            turns.enter(self.number, Phase::Executing, batch.number);
        }
        self.oldest(batch)?;
        self.committed(batch)
    }

    /// Executes a part of a transaction that is still coming, and commits with the last. It is not kept, so whatever goes wrong, all
    /// is read again, and the transaction is then executed when it is whole.
    fn part(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        let turns = self.common.turns.clone();
        self.statements.skipped.clear();
        let whole = || ApplyError::Whole(batch.transactions[0].commit_lsn);
        if batch.part == Part::First {
            turns.enter(self.number, Phase::Executing, batch.number);
        }
        match turns.wait_turn(self.number, batch.begins_after + 1) {
            Turn::Stop => return Err(ApplyError::Stopped),
            Turn::Mine if !turns.gives_way(self.number) => (),
            Turn::GiveWay | Turn::Mine => return Err(whole()),
        }
        let outcome = self.execute(batch, Mode::Fast, false)?;
        if !is_as_expected(batch, &outcome) || (batch.part == Part::Last && !self.commit_in_turn(batch)?) {
            Counters::add(&self.common.counters.retries, 1);
            return Err(whole());
        }
        self.common.part_bytes.fetch_sub(batch.memory_bytes(), Ordering::Relaxed);
        if batch.part == Part::Last {
            return self.committed(batch);
        }
        self.part_changes += batch.changes();
        Ok(())
    }

    fn committed(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        let counters = &self.common.counters;
        Counters::add(&counters.transactions, batch.transactions.len() as u64);
        Counters::add(&counters.changes, batch.changes() + std::mem::take(&mut self.part_changes));
        Counters::add(&counters.batches, 1);
        counters.applied.store(batch.end_lsn().0, std::sync::atomic::Ordering::Relaxed);
        counters.applied_time.store(batch.time(), std::sync::atomic::Ordering::Relaxed);
        self.common.turns.commit(batch.number);
        self.common.turns.enter(self.number, Phase::Idle, 0);
        Ok(())
    }

    /// Executes a batch beside those before it, and commits it in its turn. `false`: it was rolled back, and is to be executed
    /// again when it is the oldest.
    fn ahead(&mut self, batch: &Batch) -> Result<bool, ApplyError> {
        if matches!(batch.work, Work::Finish) || *batch.end() != End::Commit {
            return Ok(false);
        }
        let outcome = self.execute(batch, Mode::Fast, false)?;
        if !is_as_expected(batch, &outcome) {
            self.roll_back()?;
            return Ok(false);
        }
        self.commit_in_turn(batch)
    }

    /// Commits what was executed when it is the oldest. `false`: it had to give way, or could not, and was rolled back.
    fn commit_in_turn(&mut self, batch: &Batch) -> Result<bool, ApplyError> {
        if self.common.turns.gives_way(self.number) {
            self.roll_back()?;
            return Ok(false);
        }
        self.common.turns.enter(self.number, Phase::Executed, batch.number);
        match self.common.turns.wait_turn(self.number, batch.number) {
            Turn::Stop => Err(ApplyError::Stopped),
            Turn::GiveWay => {
                self.roll_back()?;
                Ok(false)
            }
            Turn::Mine => {
                self.common.turns.enter(self.number, Phase::Executing, batch.number);
                let mut pipeline = self.connection.pipeline()?;
                queue_commit(&mut pipeline, batch)?;
                let outcome = pipeline.finish()?;
                // A deferred constraint, or one who cancelled.
                if outcome.transaction != Transaction::None {
                    self.roll_back()?;
                }
                Ok(outcome.failure.is_none())
            }
        }
    }

    /// Executes the oldest batch, whatever that takes, and commits it.
    fn oldest(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        let mut mode = Mode::Fast;
        let mut attempts = 0;
        loop {
            let one_go = *batch.end() == End::Commit && !matches!(batch.work, Work::Finish);
            let outcome = if one_go { self.execute(batch, mode, true)? } else { self.two_phase(batch, mode)? };
            let Some((number, error)) = outcome.failure else {
                return self.count_unexpected(batch, &outcome.unexpected, outcome.unexpected_total);
            };
            if outcome.transaction != Transaction::None {
                self.roll_back()?;
            }
            attempts += 1;
            if AGAIN.contains(&error.code.as_str()) && attempts < MAX_ATTEMPTS {
                Counters::add(&self.common.counters.retries, 1);
                std::thread::sleep(Duration::from_millis(u64::from(attempts.min(10)) * 5));
            } else if mode == Mode::Fast && !matches!(batch.work, Work::Finish) {
                tracing::debug!("batch {}, row by row because of: {error}", batch.number);
                Counters::add(&self.common.counters.retries, 1);
                mode = Mode::Careful;
            } else {
                let number = if number == u64::MAX { number } else { number & !(ASKED | ASKED_SEVERAL) };
                let several = outcome.unexpected.iter().any(|(of, _)| *of == number | ASKED_SEVERAL);
                self.failed(batch, number, &error, several)?;
            }
        }
    }

    /// A row that cannot be applied: skips it, or ends with it.
    fn failed(&mut self, batch: &Batch, number: u64, error: &ServerMessage, several: bool) -> Result<(), ApplyError> {
        let found = self.common.conflicts.judge(batch, number, error, several, self.common.on_conflict)?;
        Counters::add(&self.common.counters.conflicts[found as usize], 1);
        self.statements.skip(number)
    }

    fn count_unexpected(&mut self, batch: &Batch, unexpected: &[(u64, u64)], total: u64) -> Result<(), ApplyError> {
        if total > 0 {
            self.common.conflicts.unexpected(batch, unexpected, total, &self.common.counters);
        }
        Ok(())
    }

    fn roll_back(&mut self) -> Result<(), ApplyError> {
        match self.connection.simple_query("ROLLBACK") {
            // Who asked it to give way was late.
            Err(walrider_session::ConnectError::Server(error)) if error.code == CANCELED => {
                self.connection.simple_query("ROLLBACK")?;
            }
            done => _ = done?,
        }
        Ok(())
    }

    /// From BEGIN on; `commit`: to COMMIT.
    fn execute(&mut self, batch: &Batch, mode: Mode, commit: bool) -> Result<Outcome, ApplyError> {
        self.statements.make_room(&mut self.connection)?;
        let or_nothing = mode == Mode::Careful && self.common.on_conflict == OnConflict::Skip;
        let pipeline = self.connection.pipeline()?;
        let mut writer = Writer::new(pipeline, &mut self.statements, mode, or_nothing);
        writer.begin(batch)?;
        if !matches!(batch.work, Work::Finish) {
            writer.batch(batch)?;
        }
        writer.finish(commit.then_some(batch))
    }

    /// PREPARE TRANSACTION with its changes, or the end of one that was prepared. Neither can say in the same transaction how far
    /// it is: what is prepared keeps the row, and COMMIT PREPARED changes none. So each can be done twice. What is prepared
    /// already is not prepared again, and it has a row of its own, which shows when it has committed.
    ///
    /// A second row tells that it was prepared here. Without that, there is nothing to commit: before 18, a publisher sends COMMIT
    /// PREPARED, but not PREPARE TRANSACTION, for what has only locked rows (`ReorderBufferFinishPrepared`, reorderbuffer.c, 17).
    fn two_phase(&mut self, batch: &Batch, mode: Mode) -> Result<Outcome, ApplyError> {
        let gid = quote_literal(&format!("walrider_{}_{}", self.common.origin, batch.xid()));
        let (part, here) = (origins::prepared_part(batch.xid()), origins::was_prepared_part(batch.xid()));
        let origin = quote_literal(&self.common.origin);
        let row = |part| format!("FROM {PROGRESS} WHERE origin = {origin} AND part = {}", quote_literal(part));
        let mut is_there = |rows: String| -> Result<bool, ApplyError> {
            Ok(!self.connection.simple_query(&format!("SELECT {rows}"))?.is_empty())
        };
        let is_prepared = is_there(format!("FROM pg_catalog.pg_prepared_xacts WHERE gid = {gid}"))?;
        let has_committed = is_there(row(&part))?;
        let was_prepared = is_there(row(&here))?;
        let mut outcome = Outcome {
            failure: None,
            unexpected: Vec::new(),
            unexpected_total: 0,
            prepared: 0,
            transaction: Transaction::None,
        };
        let command = match batch.end() {
            End::Prepare if is_prepared || has_committed => None,
            End::Prepare => {
                outcome = self.execute(batch, mode, false)?;
                if outcome.failure.is_some() {
                    return Ok(outcome);
                }
                let lsn = quote_literal(&batch.end_lsn().to_string());
                self.connection.simple_query(&origins::progress_sql(&self.common.origin, &part, &lsn))?;
                Some(format!("PREPARE TRANSACTION {gid}"))
            }
            End::CommitPrepared if (has_committed || !was_prepared) && !is_prepared => None,
            End::CommitPrepared => Some(format!("COMMIT PREPARED {gid}")),
            // It may have been prepared before the slot was made: then it is not here, as native apply has it.
            End::RollbackPrepared => is_prepared.then(|| format!("ROLLBACK PREPARED {gid}")),
            End::Commit => unreachable!("it commits in one go"),
        };
        let lsn = quote_literal(&batch.end_lsn().to_string());
        if let Some(command) = command {
            // The session has that of an earlier transaction (RecordTransactionCommitPrepared, EndPrepare).
            self.connection.simple_query(&origins::xact_setup_sql(&lsn, &quote_literal(&batch.time().to_string())))?;
            match self.connection.simple_query(&command) {
                Ok(_) => outcome.transaction = Transaction::None,
                Err(walrider_session::ConnectError::Server(error)) if error.severity == "ERROR" => {
                    outcome.failure = Some((u64::MAX, error));
                    return Ok(outcome);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let progress = origins::progress_sql(&self.common.origin, &origins::part(self.number), &lsn);
        let rows = match batch.end() {
            End::Prepare => origins::progress_sql(&self.common.origin, &here, &lsn),
            _ => format!("DELETE {}; DELETE {}", row(&part), row(&here)),
        };
        self.connection.simple_query(&format!("BEGIN; {progress}; {rows}; COMMIT"))?;
        Ok(outcome)
    }
}
