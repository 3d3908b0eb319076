//! The statements that apply changes, and their order in a pipeline.

use std::collections::{HashMap, HashSet};

use walrider_session::{Connection, Outcome, Pipeline};

use crate::assemble::End;
use crate::batch::{Batch, Operation, Part, Relations, Work};
use crate::coalesce;
use crate::conflict::{ASKED, ASKED_SEVERAL};
use crate::error::ApplyError;
use crate::last_update::Rule;
use crate::message::Tuple;
use crate::message::{Decoder, Message, OldTuple, Value};
use crate::origins;
use crate::target::{EQUAL, IS_NULL, Kind, SET, Table, truncate_sql};
use crate::worker::Mode;

/// Prepared statements of a session; with more all are dropped, and those in use prepared again.
const MAX_STATEMENTS: usize = 500;
/// So many new rows of a table, one after the other, go into a COPY.
const COPY_FROM: usize = 4;
/// Bytes of rows in one message of a COPY.
const COPY_CHUNK: usize = 32 << 10;
/// Rows that are changed by one statement, at least and at most, and the bytes of their values.
const UPDATE_MANY_FROM: usize = 4;
const UPDATES: usize = 200;
const UPDATE_BYTES: usize = 256 << 10;
/// Changes that cannot be applied and are skipped in one batch.
const MAX_SKIPPED: usize = 1000;
/// No change: what belongs to the transaction as a whole.
const NO_CHANGE: u64 = u64::MAX;

/// What a session has prepared.
pub struct Statements {
    /// The statement that says how far the session is.
    progress: String,
    /// By the table's generation, kind and pattern, as bytes.
    names: HashMap<Vec<u8>, String>,
    next: u64,
    /// Changes of the batch that are left out.
    pub skipped: HashSet<u64>,
    /// Which of two changes of a row counts, where it is not always the publisher's.
    rule: Option<Rule>,
}

impl Statements {
    const COMMIT: &str = "wc";
    const BEGIN: &str = "wb";
    const PROGRESS: &str = "wp";
    const ORIGIN: &str = "wo";

    /// Prepares what every batch needs.
    pub fn new(connection: &mut Connection, progress: &str, rule: Option<Rule>) -> Result<Statements, ApplyError> {
        let mut pipeline = connection.pipeline()?;
        pipeline.prepare(0, Statements::BEGIN, "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")?;
        pipeline.prepare(0, Statements::COMMIT, "COMMIT")?;
        pipeline.prepare(0, Statements::PROGRESS, progress)?;
        pipeline.prepare(0, Statements::ORIGIN, &origins::xact_setup_sql("$1", "$2"))?;
        if let Some((_, error)) = pipeline.finish()?.failure {
            return Err(walrider_session::ConnectError::Server(error).into());
        }
        Ok(Statements { progress: progress.to_owned(), names: HashMap::new(), next: 0, skipped: HashSet::new(), rule })
    }

    /// Leaves a change out when the batch is executed again.
    pub fn skip(&mut self, number: u64) -> Result<(), ApplyError> {
        if self.skipped.len() == MAX_SKIPPED || !self.skipped.insert(number) {
            let text = format!("more than {MAX_SKIPPED} rows of one transaction conflict; is this the right target?");
            return Err(ApplyError::Conflict(text));
        }
        Ok(())
    }

    /// Drops all when there are too many.
    pub fn make_room(&mut self, connection: &mut Connection) -> Result<(), ApplyError> {
        if self.names.len() >= MAX_STATEMENTS || self.next - self.names.len() as u64 > MAX_STATEMENTS as u64 {
            connection.simple_query("DEALLOCATE ALL")?;
            let skipped = std::mem::take(&mut self.skipped);
            *self = Statements { skipped, ..Statements::new(connection, &self.progress, self.rule.take())? };
        }
        Ok(())
    }
}

/// Queues COMMIT, and before it, as late as it can be, what the origin is told: an abort would tell it too.
pub fn queue_commit(pipeline: &mut Pipeline<'_>, batch: &Batch) -> Result<(), ApplyError> {
    let (lsn, time) = (batch.end_lsn().to_string(), batch.time().to_string());
    let values = [Some(lsn.as_bytes()), Some(time.as_bytes())];
    pipeline.execute(NO_CHANGE, Statements::ORIGIN, values, None)?;
    Ok(pipeline.execute(NO_CHANGE, Statements::COMMIT, [], None)?)
}

/// A run of new rows.
#[derive(Default)]
struct Run<'a> {
    /// Not sent yet: their numbers and messages.
    waiting: Vec<(u64, Vec<u8>)>,
    table: Option<&'a Table>,
    /// A COPY is open, and has so many rows.
    copied: Option<u64>,
    chunk: Vec<u8>,
    updates: Updates,
}

/// Updates of different rows, of the same columns, that are not sent yet.
#[derive(Default)]
struct Updates {
    pattern: Vec<u8>,
    rows: Vec<(u64, Vec<Option<Vec<u8>>>)>,
    keys: HashSet<u64>,
    bytes: usize,
}

impl Updates {
    /// Whether one more fits, of this pattern and with this key.
    fn takes(&self, pattern: &[u8], key: u64) -> bool {
        self.rows.is_empty()
            || (self.pattern == pattern
                && self.rows.len() < UPDATES
                && self.bytes < UPDATE_BYTES
                && !self.keys.contains(&key))
    }
}

/// Writes a batch into a pipeline.
pub struct Writer<'a> {
    pipeline: Pipeline<'a>,
    statements: &'a mut Statements,
    /// Prepared in this pipeline, in their order.
    fresh: Vec<Vec<u8>>,
    mode: Mode,
    /// New rows that exist are left alone.
    or_nothing: bool,
    decoder: Decoder,
    key: Vec<u8>,
    /// When the batch was committed on the publisher, as text.
    time: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Into a pipeline that was just begun.
    pub fn new(pipeline: Pipeline<'a>, statements: &'a mut Statements, mode: Mode, or_nothing: bool) -> Writer<'a> {
        Writer {
            pipeline,
            statements,
            fresh: Vec::new(),
            mode,
            or_nothing,
            decoder: Decoder::again(true),
            key: Vec::new(),
            time: Vec::new(),
        }
    }

    /// BEGIN, and how far the session is with the batch; of what is prepared, that it was. Of parts, the first begins, and the last
    /// tells how far it is.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        self.time = batch.time().to_string().into_bytes();
        if matches!(batch.part, Part::Whole | Part::First) {
            self.pipeline.execute(NO_CHANGE, Statements::BEGIN, [], None)?;
        }
        if *batch.end() == End::Commit && matches!(batch.part, Part::Whole | Part::Last) {
            let lsn = batch.end_lsn().to_string();
            self.pipeline.execute(NO_CHANGE, Statements::PROGRESS, [Some(lsn.as_bytes())], None)?;
        }
        Ok(())
    }

    /// Ends the pipeline, and keeps what was prepared. `commit`: with COMMIT.
    pub fn finish(mut self, commit: Option<&Batch>) -> Result<Outcome, ApplyError> {
        if let Some(batch) = commit {
            queue_commit(&mut self.pipeline, batch)?;
        }
        let outcome = self.pipeline.finish()?;
        for key in &self.fresh[outcome.prepared..] {
            self.statements.names.remove(key);
        }
        Ok(outcome)
    }

    /// The changes of a batch.
    pub fn batch(&mut self, batch: &Batch) -> Result<(), ApplyError> {
        match &batch.work {
            Work::Finish => Ok(()),
            Work::Spilled(relations) => self.spilled(batch, relations),
            Work::Operations(operations) => {
                let alone = batch.tables.iter().any(|table| table.keys.alone);
                if self.mode == Mode::Careful || alone {
                    return self.in_order(batch, operations);
                }
                self.by_table(batch, operations)
            }
        }
    }

    fn in_order(&mut self, batch: &Batch, operations: &[Operation]) -> Result<(), ApplyError> {
        for (number, operation) in operations.iter().enumerate() {
            let body = batch.body(operation);
            if body[0] == b'T' {
                self.truncate(number as u64, body, &batch.truncates[operation.table as usize])?;
            } else {
                self.change(number as u64, body, &batch.tables[operation.table as usize], &mut Run::default())?;
            }
        }
        Ok(())
    }

    /// Table by table: nothing that one does is seen by another, and all is seen at once by others. What is stored in
    /// partitions of one table stays together.
    fn by_table(&mut self, batch: &Batch, operations: &[Operation]) -> Result<(), ApplyError> {
        let mut roots: Vec<(u64, Vec<usize>)> = Vec::new();
        let of: Vec<usize> = batch
            .tables
            .iter()
            .map(|table| {
                roots.iter().position(|(root, _)| *root == table.keys.table).unwrap_or_else(|| {
                    roots.push((table.keys.table, Vec::new()));
                    roots.len() - 1
                })
            })
            .collect();
        let superseded = coalesce::superseded(&mut self.decoder, batch, operations)?;
        for (number, operation) in operations.iter().enumerate() {
            let body = batch.body(operation);
            if superseded[number] {
                continue;
            }
            if body[0] == b'T' {
                self.roots(batch, operations, &mut roots)?;
                self.truncate(number as u64, body, &batch.truncates[operation.table as usize])?;
            } else {
                roots[of[operation.table as usize]].1.push(number);
            }
        }
        self.roots(batch, operations, &mut roots)
    }

    fn roots(
        &mut self,
        batch: &Batch,
        operations: &[Operation],
        roots: &mut [(u64, Vec<usize>)],
    ) -> Result<(), ApplyError> {
        for (_, numbers) in roots {
            let mut run = Run::default();
            for number in numbers.drain(..) {
                let operation = &operations[number];
                let table = &batch.tables[operation.table as usize];
                self.of_table(table, &mut run)?;
                self.change(number as u64, batch.body(operation), table, &mut run)?;
            }
            self.end_run(&mut run)?;
        }
        Ok(())
    }

    /// The next change is one of this table.
    fn of_table<'t>(&mut self, table: &'t Table, run: &mut Run<'t>) -> Result<(), ApplyError> {
        if run.table.is_none_or(|of| of.generation != table.generation) {
            self.end_run(run)?;
            run.table = Some(table);
        }
        Ok(())
    }

    fn spilled(&mut self, batch: &Batch, relations: &[(u64, u32, std::sync::Arc<Table>)]) -> Result<(), ApplyError> {
        // What comes from a disk is checked again.
        self.decoder = Decoder::again(false);
        let mut known = Relations::new();
        let mut next = relations.iter().peekable();
        let mut run = Run::default();
        batch.transactions[0].changes.each(|number, _, body| -> Result<(), ApplyError> {
            while let Some((_, id, table)) = next.next_if(|(from, ..)| *from <= number) {
                known.insert(*id, table.clone());
            }
            let table = |id: u32| relations.iter().rev().find(|(from, of, _)| *from <= number && *of == id);
            match body[0] {
                b'R' => Ok(()),
                b'T' => {
                    self.end_run(&mut run)?;
                    let Ok(Message::Truncate { relations, .. }) = self.decoder.decode(body) else { return Ok(()) };
                    let tables: Vec<_> = relations.iter().filter_map(|id| known.get(&id).cloned()).collect();
                    self.truncate(number, body, &tables)
                }
                _ => {
                    let id = u32::from_be_bytes(body[1..5].try_into().expect("four bytes"));
                    // The reader has looked each of them up.
                    let Some((.., table)) = table(id) else { return Ok(()) };
                    self.of_table(table, &mut run)?;
                    self.change(number, body, table, &mut run)
                }
            }
        })?;
        self.end_run(&mut run)
    }

    fn truncate(&mut self, number: u64, body: &[u8], tables: &[std::sync::Arc<Table>]) -> Result<(), ApplyError> {
        if tables.is_empty() || self.statements.skipped.contains(&number) {
            return Ok(());
        }
        let Ok(Message::Truncate { restart_identity, .. }) = self.decoder.decode(body) else { return Ok(()) };
        let sql = truncate_sql(tables, restart_identity);
        // Prepared without being kept: the same tables seldom come again.
        self.statements.next += 1;
        let name = format!("w{}", self.statements.next);
        self.fresh.push(Vec::new());
        self.pipeline.prepare(number, &name, &sql)?;
        Ok(self.pipeline.execute(number, &name, [], None)?)
    }

    fn change(&mut self, number: u64, body: &[u8], table: &Table, run: &mut Run<'_>) -> Result<(), ApplyError> {
        if self.statements.skipped.contains(&number) {
            return Ok(());
        }
        let columns = table.relation.columns.len();
        let message = self.decoder.decode(body).map_err(crate::assemble::AssembleError::Wire)?;
        let fits = |tuple: &Tuple<'_>| tuple.len() == columns;
        match message {
            Message::Insert { new, .. } if fits(&new) => self.insert(number, body, new, table, run),
            Message::Update { old, new, .. } if fits(&new) && old.is_none_or(|old| fits(old.tuple())) => {
                self.end_inserts(run)?;
                self.update(number, old, new, table, run)
            }
            Message::Delete { old, .. } if fits(old.tuple()) => {
                self.end_run(run)?;
                self.delete(number, *old.tuple(), table)
            }
            _ => Err(ApplyError::Schema(format!("a row of \"{}\" does not have the columns of its table", table.name))),
        }
    }

    fn insert(
        &mut self,
        number: u64,
        body: &[u8],
        new: Tuple<'_>,
        table: &Table,
        run: &mut Run<'_>,
    ) -> Result<(), ApplyError> {
        let copies = self.mode == Mode::Fast && run.table.is_some() && !table.keys.alone && !new.is_empty();
        if !copies {
            return self.insert_one(number, new, table);
        }
        self.end_updates(run)?;
        if run.copied.is_none() {
            run.waiting.push((number, body.to_vec()));
            return if run.waiting.len() == COPY_FROM { self.begin_copy(run) } else { Ok(()) };
        }
        copy_row(&mut run.chunk, new);
        run.copied = run.copied.map(|rows| rows + 1);
        if run.chunk.len() >= COPY_CHUNK {
            self.pipeline.copy_data(&run.chunk)?;
            run.chunk.clear();
        }
        Ok(())
    }

    fn insert_one(&mut self, number: u64, new: Tuple<'_>, table: &Table) -> Result<(), ApplyError> {
        let rows = if table.keys.alone { None } else { Some(1) };
        let kind = Kind::Insert { or_nothing: self.or_nothing && !table.has_deferrable_keys() };
        let values = new.values().map(bytes);
        if self.mode == Mode::Fast {
            return self.execute(number, table, kind, &[], values, rows);
        }
        self.ask_several(number, table, &vec![SET; new.len()], new, new)?;
        if self.statements.rule.is_none() || !table.can_replace() {
            return self.execute(number, table, kind, &[], values, rows);
        }
        let identity = table.identity_pattern();
        self.execute(number | ASKED, table, Kind::Ask, &identity, found(new, &identity), Some(0))?;
        let time = self.time.clone();
        let values = values.chain([Some(time.as_slice())]);
        self.execute(number, table, Kind::InsertOrUpdate, &[], values, rows)
    }

    /// Row by row it can be asked whether several unique keys have rows in the way of a new version of a row.
    fn ask_several(
        &mut self,
        number: u64,
        table: &Table,
        pattern: &[u8],
        by: Tuple<'_>,
        new: Tuple<'_>,
    ) -> Result<(), ApplyError> {
        if self.mode == Mode::Fast || !table.has_several_keys() {
            return Ok(());
        }
        let pattern = table.several_pattern(pattern);
        if !pattern.iter().any(|wanted| wanted & SET != 0) || pattern.iter().any(|wanted| wanted & IS_NULL != 0) {
            return Ok(());
        }
        let set = new.values().zip(&pattern).filter(|(_, wanted)| *wanted & SET != 0).map(|(value, _)| bytes(value));
        let values = set.chain(found(by, &pattern));
        self.execute(number | ASKED_SEVERAL, table, Kind::AskSeveral, &pattern, values, Some(0))
    }

    /// An UPDATE or DELETE, by the rule if there is one.
    fn execute_by_rule<'v>(
        &mut self,
        number: u64,
        table: &Table,
        kind: Kind,
        pattern: &[u8],
        by: Tuple<'_>,
        values: impl Iterator<Item = Option<&'v [u8]>>,
    ) -> Result<(), ApplyError> {
        let rows = if table.keys.alone { None } else { Some(1) };
        if self.statements.rule.is_none() {
            return self.execute(number, table, kind, pattern, values, rows);
        }
        let ask: Vec<u8> = pattern.iter().map(|wanted| wanted & !SET).collect();
        self.execute(number | ASKED, table, Kind::AskDiffers, &ask, found(by, &ask), Some(0))?;
        let time = self.time.clone();
        let values = values.map(|value| value.map(<[u8]>::to_vec)).chain([Some(time)]).collect::<Vec<_>>();
        self.execute(number, table, kind, pattern, values.iter().map(Option::as_deref), rows)
    }

    fn begin_copy(&mut self, run: &mut Run<'_>) -> Result<(), ApplyError> {
        let table = run.table.expect("a run has a table");
        self.execute(run.waiting[0].0, table, Kind::Copy, &[], [].into_iter(), None)?;
        run.copied = Some(run.waiting.len() as u64);
        for (_, body) in run.waiting.drain(..) {
            if let Ok(Message::Insert { new, .. }) = self.decoder.decode(&body) {
                copy_row(&mut run.chunk, new);
            }
        }
        Ok(())
    }

    /// What was collected is sent.
    fn end_run(&mut self, run: &mut Run<'_>) -> Result<(), ApplyError> {
        self.end_updates(run)?;
        self.end_inserts(run)
    }

    /// Changed rows: those that are too few for arrays one by one.
    fn end_updates(&mut self, run: &mut Run<'_>) -> Result<(), ApplyError> {
        let Updates { pattern, rows, .. } = std::mem::take(&mut run.updates);
        let Some(&(first, _)) = rows.first() else { return Ok(()) };
        let table = run.table.expect("a run has a table");
        if rows.len() < UPDATE_MANY_FROM {
            for (number, row) in &rows {
                let values = row.iter().map(Option::as_deref);
                self.execute(*number, table, Kind::Update, &pattern, values, Some(1))?;
            }
            return Ok(());
        }
        let mut arrays = vec![vec![b'{']; rows[0].1.len()];
        for (_, row) in &rows {
            for (array, value) in arrays.iter_mut().zip(row) {
                array_element(array, value.as_deref());
            }
        }
        arrays.iter_mut().for_each(|array| array.push(b'}'));
        let count = rows.len().to_string();
        let values = arrays.iter().map(Vec::as_slice).chain([count.as_bytes()]).map(Some);
        // It says itself if not all were found.
        self.execute(first, table, Kind::UpdateMany, &pattern, values, None)
    }

    /// New rows: those that are too few for a COPY one by one.
    fn end_inserts(&mut self, run: &mut Run<'_>) -> Result<(), ApplyError> {
        for (number, body) in run.waiting.drain(..) {
            let table = run.table.expect("a run has a table");
            if let Message::Insert { new, .. } =
                self.decoder.decode(&body).map_err(crate::assemble::AssembleError::Wire)?
            {
                self.insert_one(number, new, table)?;
            }
        }
        if run.copied.take().is_some() {
            self.pipeline.copy_data(&run.chunk)?;
            run.chunk.clear();
            self.pipeline.copy_done()?;
        }
        Ok(())
    }

    fn update(
        &mut self,
        number: u64,
        old: Option<OldTuple<'_>>,
        new: Tuple<'_>,
        table: &Table,
        run: &mut Run<'_>,
    ) -> Result<(), ApplyError> {
        let by = old.map_or(new, |old| *old.tuple());
        let mut pattern = Vec::with_capacity(new.len());
        for (at, (value, key)) in new.values().zip(by.values()).enumerate() {
            let mut wanted = 0;
            // Without an old row the key is what it was; to set it costs, and identity columns refuse it.
            let is_kept = table.is_key(at) && old.is_none() || table.refuses_values(at) && value == key;
            if value != Value::UnchangedToast && !is_kept {
                wanted |= SET;
            }
            if table.is_key(at) {
                wanted |= if key == Value::Null { IS_NULL } else { EQUAL };
            }
            pattern.push(wanted);
        }
        if pattern.iter().all(|wanted| wanted & SET == 0) {
            return Ok(());
        }
        let set = new.values().zip(&pattern).filter(|(_, wanted)| *wanted & SET != 0).map(|(value, _)| bytes(value));
        let values = set.chain(found(by, &pattern));
        let key =
            table.keys.identity_hash(by).filter(|_| old.is_none() && self.mode == Mode::Fast && run.table.is_some());
        let together = self.statements.rule.is_none() && !table.keys.alone;
        if let Some(key) = key.filter(|_| together && table.takes_arrays(&pattern)) {
            if !run.updates.takes(&pattern, key) {
                self.end_updates(run)?;
            }
            let row: Vec<Option<Vec<u8>>> = values.map(|value| value.map(<[u8]>::to_vec)).collect();
            run.updates.bytes += row.iter().flatten().map(Vec::len).sum::<usize>();
            run.updates.rows.push((number, row));
            run.updates.keys.insert(key);
            run.updates.pattern = pattern;
            return Ok(());
        }
        self.end_updates(run)?;
        self.ask_several(number, table, &pattern, by, new)?;
        self.execute_by_rule(number, table, Kind::Update, &pattern, by, values)
    }

    fn delete(&mut self, number: u64, old: Tuple<'_>, table: &Table) -> Result<(), ApplyError> {
        let wanted = |(at, value): (usize, Value<'_>)| match value {
            _ if !table.is_key(at) => 0,
            Value::Null => IS_NULL,
            _ => EQUAL,
        };
        let pattern: Vec<u8> = old.values().enumerate().map(wanted).collect();
        self.execute_by_rule(number, table, Kind::Delete, &pattern, old, found(old, &pattern))
    }

    fn execute<'v>(
        &mut self,
        number: u64,
        table: &Table,
        kind: Kind,
        pattern: &[u8],
        values: impl Iterator<Item = Option<&'v [u8]>>,
        rows: Option<u64>,
    ) -> Result<(), ApplyError> {
        if self.pipeline.has_failed() {
            return Ok(());
        }
        self.key.clear();
        self.key.extend(table.generation.to_be_bytes());
        self.key.push(match kind {
            Kind::Insert { or_nothing } => u8::from(or_nothing),
            Kind::Copy => 2,
            Kind::Update => 3,
            Kind::Delete => 4,
            Kind::UpdateMany => 5,
            Kind::Ask => 6,
            Kind::AskDiffers => 7,
            Kind::InsertOrUpdate => 8,
            Kind::AskSeveral => 9,
        });
        self.key.extend(pattern);
        if !self.statements.names.contains_key(&self.key) {
            self.statements.next += 1;
            let name = format!("w{}", self.statements.next);
            let text = table.sql(kind, pattern) + &self.by_rule(table, kind, pattern);
            self.pipeline.prepare(number, &name, &text)?;
            self.fresh.push(self.key.clone());
            self.statements.names.insert(self.key.clone(), name);
        }
        let name = &self.statements.names[&self.key];
        Ok(self.pipeline.execute(number, name, values, rows)?)
    }

    /// What the rule adds to a statement; its last parameter is the time.
    fn by_rule(&self, table: &Table, kind: Kind, pattern: &[u8]) -> String {
        let Some(rule) = &self.statements.rule else { return String::new() };
        let parameters = |wish: u8| pattern.iter().filter(|wanted| *wanted & wish != 0).count();
        match kind {
            Kind::AskDiffers => rule.differs(),
            Kind::Update | Kind::Delete => rule.wins(parameters(SET) + parameters(EQUAL) + 1, false),
            Kind::InsertOrUpdate => rule.wins(table.relation.columns.len() + 1, true),
            _ => String::new(),
        }
    }
}

/// The values that a row is found by.
fn found<'t>(by: Tuple<'t>, pattern: &[u8]) -> impl Iterator<Item = Option<&'t [u8]>> {
    by.values().zip(pattern).filter(|(_, wanted)| *wanted & EQUAL != 0).map(|(value, _)| bytes(value))
}

fn bytes(value: Value<'_>) -> Option<&[u8]> {
    match value {
        Value::Null | Value::UnchangedToast => None,
        Value::Text(bytes) | Value::Binary(bytes) => Some(bytes),
    }
}

/// An element of an array as text, after those before it (`array_out`, arrayfuncs.c); in quotes, which always is right.
fn array_element(out: &mut Vec<u8>, value: Option<&[u8]>) {
    if out.len() > 1 {
        out.push(b',');
    }
    let Some(value) = value else { return out.extend(b"NULL") };
    out.push(b'"');
    for &byte in value {
        if matches!(byte, b'"' | b'\\') {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out.push(b'"');
}

/// Whether COPY's text format has another spelling for it.
fn is_special(byte: u8) -> bool {
    (byte == b'\\') | (byte == b'\n') | (byte == b'\r') | (byte == b'\t')
}

/// A row in COPY's text format (`CopyAttributeOutText`, copyto.c).
fn copy_row(out: &mut Vec<u8>, tuple: Tuple<'_>) {
    out.reserve(tuple.byte_len());
    for (at, value) in tuple.values().enumerate() {
        if at > 0 {
            out.push(b'\t');
        }
        let Some(mut bytes) = bytes(value) else {
            out.extend(b"\\N");
            continue;
        };
        // All at once, which is quick; nearly always there is none.
        if bytes.iter().fold(false, |found, &byte| found | is_special(byte)) {
            while let Some(special) = bytes.iter().position(|&byte| is_special(byte)) {
                out.extend(&bytes[..special]);
                out.push(b'\\');
                out.push(match bytes[special] {
                    b'\n' => b'n',
                    b'\r' => b'r',
                    b'\t' => b't',
                    other => other,
                });
                bytes = &bytes[special + 1..];
            }
        }
        out.extend(bytes);
    }
    out.push(b'\n');
}
