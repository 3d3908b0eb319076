//! Rows that are not as the publisher had them, named as PostgreSQL 18 names them (`conflict.h`, `ConflictType`).

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use walrider_wire::backend::ServerMessage;

use crate::batch::{Batch, Work};
use crate::counters::Counters;
use crate::error::ApplyError;
use crate::message::Tuple;
use crate::message::{Decoder, Message, OldTuple, Value};
use crate::target::Table;

/// A kind of conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A new row is there already.
    InsertExists,
    /// A row to be changed was last changed by somebody else.
    UpdateOriginDiffers,
    /// Another row has what a row was changed to.
    UpdateExists,
    /// A row to be changed is not there.
    UpdateMissing,
    /// A row to be deleted was last changed by somebody else.
    DeleteOriginDiffers,
    /// A row to be deleted is not there.
    DeleteMissing,
    /// Rows are there with the values of several unique keys of one row.
    MultipleUniqueConflicts,
}

impl Kind {
    /// In the order of their numbers.
    pub const ALL: [Kind; 7] = [
        Kind::InsertExists,
        Kind::UpdateOriginDiffers,
        Kind::UpdateExists,
        Kind::UpdateMissing,
        Kind::DeleteOriginDiffers,
        Kind::DeleteMissing,
        Kind::MultipleUniqueConflicts,
    ];

    /// PostgreSQL's name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::InsertExists => "insert_exists",
            Kind::UpdateOriginDiffers => "update_origin_differs",
            Kind::UpdateExists => "update_exists",
            Kind::UpdateMissing => "update_missing",
            Kind::DeleteOriginDiffers => "delete_origin_differs",
            Kind::DeleteMissing => "delete_missing",
            Kind::MultipleUniqueConflicts => "multiple_unique_conflicts",
        }
    }
}

/// What is done with a row that exists already; one that is missing is skipped and counted, as native apply has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// Applying ends.
    Error,
    /// The change is skipped, and counted.
    Skip,
    /// Of two changes of a row the later counts, by the times of their commits, wherever they were made.
    LastUpdateWins,
}

/// Added to the number of a change: no change, but the question whether the row is as the publisher left it.
pub const ASKED: u64 = 1 << 62;
/// The question whether several unique keys have rows in its way.
pub const ASKED_SEVERAL: u64 = 1 << 61;

/// Conflicts that are logged in one minute.
const LOGGED: u32 = 100;
/// Characters of a row that are shown.
const SHOWN: usize = 300;

/// Bounds what is logged.
#[derive(Debug)]
pub struct Conflicts {
    /// Since when, and how many.
    logged: Mutex<(Instant, u32)>,
}

/// A change of a batch, for messages.
struct Row {
    kind: u8,
    table: String,
    key: String,
    place: String,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            b'I' => "INSERT into",
            b'U' => "UPDATE of",
            b'D' => "DELETE from",
            _ => "change of",
        };
        write!(f, "{what} \"{}\", row {}, {}", self.table, self.key, self.place)
    }
}

impl Conflicts {
    /// Nothing was logged.
    pub fn new() -> Conflicts {
        Conflicts { logged: Mutex::new((Instant::now(), 0)) }
    }

    /// An error of the oldest batch, executed row by row: the conflict that it is, if that is to be skipped. `several`: more than one
    /// unique key has rows in the way.
    pub fn judge(
        &self,
        batch: &Batch,
        number: u64,
        error: &ServerMessage,
        several: bool,
        policy: OnConflict,
    ) -> Result<Kind, ApplyError> {
        let row = find(batch, number);
        let place = row.as_ref().map_or_else(|| place(batch, 0), ToString::to_string);
        // unique_violation, exclusion_violation
        let exists = error.is("23505") || error.is("23P01");
        let kind = match row.as_ref().map(|row| row.kind) {
            Some(b'I' | b'U') if exists && several => Kind::MultipleUniqueConflicts,
            Some(b'I') if exists => Kind::InsertExists,
            Some(b'U') if exists => Kind::UpdateExists,
            _ => return Err(ApplyError::Conflict(refused(batch, error, &place))),
        };
        if policy == OnConflict::Skip {
            self.log(&format!("conflict {}: skipped {place}: {}", kind.name(), brief(error)));
            return Ok(kind);
        }
        let unsettled = match policy {
            OnConflict::LastUpdateWins => "; it is another row, with which that one's time is not compared",
            _ => "",
        };
        Err(ApplyError::Conflict(format!(
            "conflict {}: {place}: {}{unsettled}; remove that row on the target, or let such changes be skipped with --on-conflict skip, \
             or the whole transaction with --skip {}, and start again",
            kind.name(),
            brief(error),
            transaction(batch, number).commit_lsn
        )))
    }

    /// Rows that the oldest batch did not find, and what its questions found ([`ASKED`]).
    pub fn unexpected(&self, batch: &Batch, unexpected: &[(u64, u64)], total: u64, counters: &Counters) {
        let mut last = Kind::UpdateMissing;
        let mut at = 0;
        while let Some(&(first, _)) = unexpected.get(at) {
            let number = first & !(ASKED | ASKED_SEVERAL);
            // All that is said of one change stands together: what was asked, and whether it then was made.
            let said = unexpected[at..].iter().take_while(|(of, _)| of & !(ASKED | ASKED_SEVERAL) == number);
            let said: Vec<u64> = said.map(|(of, _)| *of).collect();
            at += said.len();
            let several = said.iter().any(|of| of & ASKED_SEVERAL != 0);
            let differs = said.iter().any(|of| of & ASKED != 0);
            let kept = said.contains(&number);
            let row = find(batch, number);
            last = match row.as_ref().map(|row| row.kind) {
                Some(b'I' | b'U') if several => Kind::MultipleUniqueConflicts,
                Some(b'I') => Kind::InsertExists,
                Some(b'U') if differs => Kind::UpdateOriginDiffers,
                Some(b'D') if differs => Kind::DeleteOriginDiffers,
                Some(b'D') => Kind::DeleteMissing,
                _ => Kind::UpdateMissing,
            };
            Counters::add(&counters.conflicts[last as usize], 1);
            if let Some(row) = row {
                let done = if kept { "skipped" } else { "applied all the same" };
                self.log(&format!("conflict {}: {done} {row}", last.name()));
            }
        }
        Counters::add(&counters.conflicts[last as usize], total - unexpected.len() as u64);
    }

    fn log(&self, text: &str) {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.0.elapsed() > Duration::from_secs(60) {
            *logged = (Instant::now(), 0);
        }
        logged.1 += 1;
        if logged.1 <= LOGGED {
            tracing::warn!("{text}");
        }
        if logged.1 == LOGGED {
            tracing::warn!("more conflicts are only counted for a minute");
        }
    }
}

fn brief(error: &ServerMessage) -> String {
    let detail = if error.detail.is_empty() { String::new() } else { format!("; {}", error.detail) };
    format!("{}{detail}", error.message)
}

/// An error that is no conflict.
fn refused(batch: &Batch, error: &ServerMessage, place: &str) -> String {
    let advice = match error.code.as_str() {
        "42501" => "; grant that on the target, and start again",
        code if code.starts_with("42") => {
            "; is the target's schema that of the publisher? set it right, and start again"
        }
        code if code.starts_with("53") => "; make room on the target, and start again",
        _ => "; set that right, and start again",
    };
    let hint = if error.hint.is_empty() { String::new() } else { format!("; {}", error.hint) };
    let skip = format!("; --skip {} leaves the transaction out", batch.transactions[0].commit_lsn);
    let skip = if batch.transactions.len() == 1 { skip } else { String::new() };
    format!("could not apply: {place}: {}{hint}{advice}{skip}", brief(error))
}

fn place(batch: &Batch, transaction: usize) -> String {
    let transaction = &batch.transactions[transaction];
    format!("of the transaction that committed at {} on the publisher", transaction.commit_lsn)
}

fn transaction(batch: &Batch, number: u64) -> &crate::assemble::Transaction {
    match &batch.work {
        Work::Operations(operations) => {
            let of = operations.get(number as usize).map_or(0, |operation| operation.transaction);
            &batch.transactions[of as usize]
        }
        _ => &batch.transactions[0],
    }
}

fn find(batch: &Batch, number: u64) -> Option<Row> {
    let decoder = Decoder::again(false);
    match &batch.work {
        Work::Operations(operations) => {
            let operation = operations.get(number as usize)?;
            let body = batch.body(operation);
            if body[0] == b'T' {
                return None;
            }
            let table = &batch.tables[operation.table as usize];
            Some(row(&decoder, body, table, place(batch, operation.transaction as usize)))
        }
        Work::Spilled(relations) => {
            let mut found = None;
            // That the file cannot be read will be told when it is read to be applied.
            let _ = batch.transactions[0].changes.each(|at, _, body| {
                if at == number && matches!(body[0], b'I' | b'U' | b'D') {
                    let id = u32::from_be_bytes(body[1..5].try_into().expect("four bytes"));
                    let table = relations.iter().rev().find(|(from, relation, _)| *from <= at && *relation == id);
                    found = table.map(|(_, _, table)| row(&decoder, body, table, place(batch, 0)));
                }
                Ok::<(), std::io::Error>(())
            });
            found
        }
        Work::Finish => None,
    }
}

fn row(decoder: &Decoder, body: &[u8], table: &Table, place: String) -> Row {
    let tuple = match decoder.clone().decode(body) {
        Ok(Message::Insert { new, .. } | Message::Update { old: None, new, .. }) => Some(new),
        Ok(
            Message::Update { old: Some(OldTuple::Key(old) | OldTuple::Full(old)), .. }
            | Message::Delete { old: OldTuple::Key(old) | OldTuple::Full(old), .. },
        ) => Some(old),
        _ => None,
    };
    let key = tuple.map(|tuple| key(table, tuple)).unwrap_or_default();
    Row { kind: body[0], table: table.name.clone(), key, place }
}

/// "(id)=(7)", as PostgreSQL shows a key; all columns where there is none.
fn key(table: &Table, tuple: Tuple<'_>) -> String {
    let any = (0..table.relation.columns.len()).any(|at| table.is_key(at));
    let (mut names, mut values) = (Vec::new(), Vec::new());
    for (at, (column, value)) in table.relation.columns.iter().zip(tuple.values()).enumerate() {
        if any && !table.is_key(at) {
            continue;
        }
        names.push(column.name.as_str());
        values.push(match value {
            Value::Null => "null".to_owned(),
            Value::UnchangedToast => "…".to_owned(),
            Value::Text(bytes) | Value::Binary(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        });
    }
    let text = format!("({})=({})", names.join(", "), values.join(", "));
    text.chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
