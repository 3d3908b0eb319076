//! Messages as JSON, a line each, for `walrider logical stream`; `docs/logical.md` says what the keys mean. A message of type
//! TYPE has no line of its own: tables name their columns' types.

use std::collections::HashMap;
use std::rc::Rc;

use jiff::Timestamp;
use walrider_layout::{Lsn, Oid, POSTGRES_EPOCH, TransactionId};

use crate::message::{Message, OldTuple, Prepare, Relation, ReplicaIdentity, Tuple, Value};
use crate::types;

/// A change that does not fit what was told of its table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// It was not described.
    #[error("the publisher sent a change of relation {0}, and had not described it")]
    UnknownRelation(Oid),
    /// It has other columns.
    #[error("the publisher sent a row of {sent} columns for relation {relation}, which has {described}")]
    Columns {
        /// The table.
        relation: Oid,
        /// The row's columns.
        sent: usize,
        /// The table's.
        described: usize,
    },
}

/// How a type's values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Boolean,
    Number,
    Text,
}

struct Column {
    /// As a key: quoted, with its colon.
    key: String,
    name: String,
    form: Form,
    identity: bool,
}

struct Table {
    /// The keys `schema` and `table` with their values.
    named: String,
    columns: Vec<Column>,
}

type Tables = HashMap<Oid, Rc<Table>>;

/// Remembers what tables and types were told, and which transaction is open.
#[derive(Default)]
pub struct Lines {
    tables: Tables,
    /// What was told in a transaction in progress counts for that alone until it is committed.
    in_progress: HashMap<TransactionId, Tables>,
    types: HashMap<Oid, String>,
    /// The transaction that the next change belongs to.
    xid: Option<TransactionId>,
    /// It is one in progress.
    chunk: bool,
}

impl Lines {
    /// A connection begins.
    pub fn new() -> Lines {
        Lines::default()
    }

    /// The transaction that was begun and has not ended, or whose chunk has not.
    pub fn open(&self) -> Option<TransactionId> {
        self.xid
    }

    /// Appends the message's line, if it has one; `lsn` is the position that came with it.
    ///
    /// # Errors
    /// It does not fit what was told before; nothing was appended.
    pub fn write(&mut self, lsn: Lsn, message: &Message<'_>, out: &mut Vec<u8>) -> Result<(), JsonError> {
        match message {
            Message::Type { described, .. } => {
                // A domain is told as what it is made of, so a number is one here too.
                let name = if described.namespace == "pg_catalog" {
                    described.name.to_owned()
                } else {
                    format!("{}.{}", described.namespace, described.name)
                };
                self.types.insert(described.oid, name);
            }
            Message::Relation { relation, .. } => self.relation(relation, out),
            Message::Insert { xid, relation, new } => {
                let table = self.table(*relation, &[new])?;
                let mut line = self.change("insert", *xid, lsn, out).table(&table);
                line.row("new", &table, new, false);
                line.end();
            }
            Message::Update { xid, relation, old, new } => {
                let rows = [Some(new), old.as_ref().map(OldTuple::tuple)];
                let table = self.table(*relation, &rows.into_iter().flatten().collect::<Vec<_>>())?;
                let mut line = self.change("update", *xid, lsn, out).table(&table);
                if let Some(old) = old {
                    line.old(&table, old);
                }
                line.row("new", &table, new, false);
                line.end();
            }
            Message::Delete { xid, relation, old } => {
                let table = self.table(*relation, &[old.tuple()])?;
                let mut line = self.change("delete", *xid, lsn, out).table(&table);
                line.old(&table, old);
                line.end();
            }
            Message::Truncate { xid, cascade, restart_identity, relations } => {
                let tables = relations.iter().map(|id| self.table(id, &[])).collect::<Result<Vec<_>, _>>()?;
                let mut line = self.change("truncate", *xid, lsn, out);
                line.list("tables", &tables, |line, table| {
                    line.out.push(b'{');
                    line.out.extend(table.named.as_bytes());
                    line.out.push(b'}');
                });
                line.raw("cascade", cascade).raw("restart_identity", restart_identity).end();
            }
            Message::Logical { xid, transactional, lsn, prefix, content } => {
                let mut line = if *transactional {
                    self.change("message", *xid, *lsn, out)
                } else {
                    Line::new("message", out).text("lsn", lsn)
                };
                line = line.raw("transactional", transactional).text("prefix", prefix);
                line.key("content");
                let hex = line.bytes(content);
                line.raw_if(hex, "hex").end();
            }
            _ => self.boundary(message, out),
        }
        Ok(())
    }

    /// What begins or ends something.
    fn boundary(&mut self, message: &Message<'_>, out: &mut Vec<u8>) {
        match message {
            Message::Begin { final_lsn, commit_time, xid } => {
                self.begin(*xid, false);
                let line = Line::new("begin", out).raw("xid", xid).text("commit_lsn", final_lsn);
                line.time("commit_time", *commit_time).end();
            }
            Message::Commit { commit_lsn, end_lsn, commit_time } => {
                let line = Line::new("commit", out).xid(self.xid).text("commit_lsn", commit_lsn);
                line.text("end_lsn", end_lsn).time("commit_time", *commit_time).end();
                self.xid = None;
            }
            Message::Origin { lsn, name } => {
                Line::new("origin", out).xid(self.xid).text("origin", name).text("origin_lsn", lsn).end();
            }
            Message::BeginPrepare(prepare) => {
                self.begin(prepare.xid, false);
                Line::new("begin_prepare", out).prepare(prepare);
            }
            Message::Prepare(prepare) => {
                self.xid = None;
                Line::new("prepare", out).prepare(prepare);
            }
            Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid } => {
                let line = Line::new("commit_prepared", out).raw("xid", xid).text("gid", gid);
                let line = line.text("commit_lsn", commit_lsn).text("end_lsn", end_lsn);
                line.time("commit_time", *commit_time).end();
            }
            Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid } => {
                let line = Line::new("rollback_prepared", out).raw("xid", xid).text("gid", gid);
                let line = line.text("prepare_end_lsn", prepare_end_lsn).text("end_lsn", end_lsn);
                line.time("prepare_time", *prepare_time).time("rollback_time", *rollback_time).end();
            }
            other => self.stream(other, out),
        }
    }

    /// The same of transactions in progress.
    fn stream(&mut self, message: &Message<'_>, out: &mut Vec<u8>) {
        match message {
            Message::StreamStart { xid, first } => {
                self.begin(*xid, true);
                if *first {
                    self.in_progress.remove(xid);
                }
                Line::new("stream_start", out).raw("xid", xid).raw("first", first).end();
            }
            Message::StreamStop => {
                Line::new("stream_stop", out).xid(self.xid).end();
                (self.xid, self.chunk) = (None, false);
            }
            Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time } => {
                self.keep_tables(*xid);
                let line = Line::new("stream_commit", out).raw("xid", xid).text("commit_lsn", commit_lsn);
                line.text("end_lsn", end_lsn).time("commit_time", *commit_time).end();
            }
            Message::StreamPrepare(prepare) => {
                self.keep_tables(prepare.xid);
                Line::new("stream_prepare", out).prepare(prepare);
            }
            Message::StreamAbort { xid, subxid, abort } => {
                if xid == subxid {
                    self.in_progress.remove(xid);
                }
                let mut line = Line::new("stream_abort", out).raw("xid", xid).raw("subxid", subxid);
                if let Some((lsn, time)) = abort {
                    line = line.text("abort_lsn", lsn).time("abort_time", *time);
                }
                line.end();
            }
            other => unreachable!("{other:?} has a line of its own"),
        }
    }

    fn begin(&mut self, xid: TransactionId, chunk: bool) {
        assert!(self.xid.is_none(), "the decoder lets none begin within another");
        (self.xid, self.chunk) = (Some(xid), chunk);
    }

    /// What a transaction in progress was told of tables counts for all from now on.
    fn keep_tables(&mut self, xid: TransactionId) {
        self.tables.extend(self.in_progress.remove(&xid).into_iter().flatten());
    }

    /// The table, whose rows these can be.
    fn table(&self, id: Oid, rows: &[&Tuple<'_>]) -> Result<Rc<Table>, JsonError> {
        let own = self.xid.filter(|_| self.chunk).and_then(|xid| self.in_progress.get(&xid)?.get(&id));
        let table = own.or_else(|| self.tables.get(&id)).ok_or(JsonError::UnknownRelation(id))?;
        let described = table.columns.len();
        match rows.iter().map(|row| row.len()).find(|len| *len != described) {
            Some(sent) => Err(JsonError::Columns { relation: id, sent, described }),
            None => Ok(table.clone()),
        }
    }

    fn relation(&mut self, relation: &Relation, out: &mut Vec<u8>) {
        let mut named = Vec::new();
        let mut put = |key: &str, value: &str| {
            named.extend(key.as_bytes());
            string(value, &mut named);
        };
        put("\"schema\":", &relation.namespace);
        put(",\"table\":", &relation.name);
        let named = text(named);
        let type_name = |oid| self.types.get(&oid).cloned().or_else(|| types::name(oid));
        let columns = relation.columns.iter().map(|column| {
            let mut key = Vec::new();
            string(&column.name, &mut key);
            key.push(b':');
            let form = type_name(column.type_oid).map_or(Form::Text, |name| form(&name));
            Column { key: text(key), name: column.name.clone(), form, identity: column.key }
        });
        let table = Rc::new(Table { named, columns: columns.collect() });
        let identity = match relation.identity {
            ReplicaIdentity::Default => "default",
            ReplicaIdentity::Nothing => "nothing",
            ReplicaIdentity::Full => "full",
            ReplicaIdentity::Index => "index",
        };
        let mut line = Line::new("relation", out).xid(self.xid).raw("relation", &relation.id).table(&table);
        line = line.text("identity", &identity);
        line.list("columns", &relation.columns, |line, column| {
            line.out.extend(b"{\"name\":");
            string(&column.name, line.out);
            match type_name(column.type_oid) {
                Some(name) => line.put(",\"type\":").string(&name),
                None => line.put(",\"type\":null"),
            };
            let (oid, modifier, key) = (column.type_oid, column.type_modifier, column.key);
            line.put(&format!(",\"oid\":{oid},\"typmod\":{modifier},\"key\":{key}}}"));
        });
        line.end();
        let tables = match self.xid.filter(|_| self.chunk) {
            Some(xid) => self.in_progress.entry(xid).or_default(),
            None => &mut self.tables,
        };
        tables.insert(relation.id, table);
    }

    /// The line of a change: which transaction, and where.
    fn change<'a>(&self, kind: &str, xid: Option<TransactionId>, lsn: Lsn, out: &'a mut Vec<u8>) -> Line<'a> {
        let line = Line::new(kind, out).xid(self.xid);
        let line = match xid.filter(|xid| Some(*xid) != self.xid) {
            Some(subxid) => line.raw("subxid", &subxid),
            None => line,
        };
        line.text("lsn", &lsn)
    }
}

fn form(type_name: &str) -> Form {
    match type_name {
        "bool" => Form::Boolean,
        "int2" | "int4" | "int8" | "float4" | "float8" | "numeric" | "oid" => Form::Number,
        _ => Form::Text,
    }
}

/// A line that is being written. Dropped without [`Line::end`], it is not ended.
struct Line<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Line<'a> {
    fn new(kind: &str, out: &'a mut Vec<u8>) -> Line<'a> {
        out.extend(b"{\"kind\":\"");
        out.extend(kind.as_bytes());
        out.push(b'"');
        Line { out }
    }

    fn put(&mut self, text: &str) -> &mut Line<'a> {
        self.out.extend(text.as_bytes());
        self
    }

    fn string(&mut self, value: &str) -> &mut Line<'a> {
        string(value, self.out);
        self
    }

    fn key(&mut self, key: &str) -> &mut Line<'a> {
        self.put(",\"").put(key).put("\":")
    }

    /// What shows itself as JSON.
    fn raw(mut self, key: &str, value: &impl ToString) -> Line<'a> {
        self.key(key).put(&value.to_string());
        self
    }

    fn raw_if(self, condition: bool, key: &str) -> Line<'a> {
        if condition { self.raw(key, &true) } else { self }
    }

    fn text(mut self, key: &str, value: &(impl ToString + ?Sized)) -> Line<'a> {
        self.key(key).string(&value.to_string());
        self
    }

    fn xid(self, xid: Option<TransactionId>) -> Line<'a> {
        match xid {
            Some(xid) => self.raw("xid", &xid),
            None => self,
        }
    }

    fn time(self, key: &str, time: i64) -> Line<'a> {
        self.text(key, &timestamp(time))
    }

    fn prepare(self, prepare: &Prepare<'_>) {
        let line = self.raw("xid", &prepare.xid).text("gid", prepare.gid).text("prepare_lsn", &prepare.prepare_lsn);
        line.text("end_lsn", &prepare.end_lsn).time("prepare_time", prepare.prepare_time).end();
    }

    fn table(mut self, table: &Table) -> Line<'a> {
        self.put(",").put(&table.named);
        self
    }

    fn list<T>(&mut self, key: &str, items: &[T], mut write: impl FnMut(&mut Line<'a>, &T)) {
        self.key(key).put("[");
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.put(",");
            }
            write(self, item);
        }
        self.put("]");
    }

    fn old(&mut self, table: &Table, old: &OldTuple<'_>) {
        match old {
            OldTuple::Key(key) => self.row("key", table, key, true),
            OldTuple::Full(row) => self.row("old", table, row, false),
        }
    }

    /// A row as an object, or of its columns only those of the replica identity; then what could not stand in it.
    fn row(&mut self, key: &str, table: &Table, row: &Tuple<'_>, only_key: bool) {
        self.key(key).put("{");
        let (mut unchanged, mut hex) = (Vec::new(), Vec::new());
        let mut first = true;
        for (column, value) in table.columns.iter().zip(row.values()) {
            if value == Value::UnchangedToast {
                unchanged.push(column.name.as_str());
            }
            if value == Value::UnchangedToast || only_key && !column.identity {
                continue;
            }
            if !std::mem::take(&mut first) {
                self.put(",");
            }
            self.put(&column.key);
            if self.value(column.form, value) {
                hex.push(column.name.as_str());
            }
        }
        self.put("}");
        for (what, names) in [("unchanged", unchanged), ("hex", hex)] {
            if !names.is_empty() {
                let key = if key == "new" { what.to_owned() } else { format!("{key}_{what}") };
                self.list(&key, &names, |line, name| {
                    line.string(name);
                });
            }
        }
    }

    /// Whether it had to be written in hexadecimal digits.
    fn value(&mut self, form: Form, value: Value<'_>) -> bool {
        match (value, form) {
            (Value::Null | Value::UnchangedToast, _) => self.put("null"),
            (Value::Text(b"t"), Form::Boolean) => self.put("true"),
            (Value::Text(b"f"), Form::Boolean) => self.put("false"),
            (Value::Text(number), Form::Number) if is_number(number) => {
                self.out.extend(number);
                self
            }
            (Value::Text(contents), _) => return self.bytes(contents),
            (Value::Binary(contents), _) => self.hex(contents),
        };
        matches!(value, Value::Binary(_))
    }

    /// As text if it is UTF-8, which a database in SQL_ASCII need not have; whether it was not.
    fn bytes(&mut self, contents: &[u8]) -> bool {
        match std::str::from_utf8(contents) {
            Ok(contents) => {
                self.string(contents);
                false
            }
            Err(_) => {
                self.hex(contents);
                true
            }
        }
    }

    fn hex(&mut self, contents: &[u8]) -> &mut Line<'a> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        self.out.push(b'"');
        for byte in contents {
            self.out.extend([DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        self.put("\"")
    }

    fn end(self) {
        self.out.extend(b"}\n");
    }
}

/// Whether JSON has this number as it stands; not `NaN` and `Infinity`, which PostgreSQL has.
fn is_number(text: &[u8]) -> bool {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let rest = text.strip_prefix(b"-").unwrap_or(text);
    let whole = digits(rest);
    if whole == 0 || whole > 1 && rest[0] == b'0' {
        return false;
    }
    let mut rest = &rest[whole..];
    if let Some(fraction) = rest.strip_prefix(b".") {
        match digits(fraction) {
            0 => return false,
            count => rest = &fraction[count..],
        }
    }
    if let Some(exponent) = rest.strip_prefix(b"e") {
        let exponent = exponent.strip_prefix(b"+").or(exponent.strip_prefix(b"-")).unwrap_or(exponent);
        return !exponent.is_empty() && digits(exponent) == exponent.len();
    }
    rest.is_empty()
}

/// Appends a string in quotes.
fn string(value: &str, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("a vector takes all");
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("made of UTF-8")
}

/// Microseconds since 2000-01-01 UTC as RFC 3339 has them; as a number of microseconds where that has none.
pub fn timestamp(time: i64) -> String {
    let since_1970 = time.checked_add(POSTGRES_EPOCH.as_micros() as i64);
    let timestamp = since_1970.and_then(|time| Timestamp::from_microsecond(time).ok());
    timestamp.map_or(time.to_string(), |timestamp| timestamp.to_string())
}

#[cfg(test)]
mod tests;
