//! The initial copy: tables in parts, each by one COPY from the source into the target, several side by side.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use walrider_session::{ConnectOptions, Connection};

use crate::origins::name_of;
use crate::setup::{SetupError, Side};
use crate::sql::{identifier, literal};

/// A part of a table is at least so large, in blocks: 64 MB where they have 8 kB. Smaller ones would be many for what each costs.
const LEAST_PART: u64 = 8192;
/// Parts of a table for each worker: the last ones to end differ by that much less.
const PARTS_PER_WORKER: u64 = 4;

/// A table that is published, and so is copied: under this name on both servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// The columns that are published.
    pub columns: Vec<String>,
    /// The condition for rows to be published, as SQL.
    pub filter: Option<String>,
    /// What holds its rows: the table itself, or the leaves of a partitioned one that is published as a whole.
    pub storage: Vec<Storage>,
}

/// A relation with rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// Its length when it was looked at.
    pub blocks: u64,
}

impl Table {
    /// Schema and name, quoted.
    pub fn quoted(&self) -> String {
        format!("{}.{}", identifier(&self.schema), identifier(&self.name))
    }

    /// Its length.
    pub fn blocks(&self) -> u64 {
        self.storage.iter().map(|storage| storage.blocks).sum()
    }
}

/// What one COPY takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Of the list of tables.
    table: usize,
    /// Of the table's storage.
    storage: usize,
    /// The first block, and the one behind the last; `None`: to the end, also of what is longer by now.
    from: u64,
    to: Option<u64>,
    /// Its size, for the progress.
    blocks: u64,
}

/// Cuts tables into parts, the largest first, so that no large one is begun last.
pub(crate) fn cut(tables: &[Table], workers: u64) -> Vec<Part> {
    let mut parts = Vec::new();
    for (table, published) in tables.iter().enumerate() {
        for (at, storage) in published.storage.iter().enumerate() {
            let size = storage.blocks.div_ceil(workers * PARTS_PER_WORKER).max(LEAST_PART);
            let mut from = 0;
            loop {
                let last = storage.blocks <= from + size;
                let to = (!last).then_some(from + size);
                parts.push(Part { table, storage: at, from, to, blocks: to.unwrap_or(storage.blocks) - from });
                let Some(to) = to else { break };
                from = to;
            }
        }
    }
    parts.sort_by_key(|part| std::cmp::Reverse(part.blocks));
    parts
}

/// The two commands of a part: for the source, for the target.
fn commands(table: &Table, part: &Part) -> (String, String) {
    let columns: Vec<String> = table.columns.iter().map(|column| identifier(column)).collect();
    let columns = columns.join(", ");
    let mut conditions = Vec::new();
    if part.from > 0 {
        conditions.push(format!("ctid >= '({},0)'", part.from));
    }
    if let Some(to) = part.to {
        conditions.push(format!("ctid < '({to},0)'"));
    }
    conditions.extend(table.filter.as_ref().map(|filter| format!("({filter})")));
    let condition = if conditions.is_empty() { String::new() } else { format!(" WHERE {}", conditions.join(" AND ")) };
    let storage = &table.storage[part.storage];
    let from = format!("{}.{}", identifier(&storage.schema), identifier(&storage.name));
    // ONLY: its children are published as tables of their own.
    let out = format!("COPY (SELECT {columns} FROM ONLY {from}{condition}) TO STDOUT");
    // A table may publish no column at all; there is no list of none.
    let list = if columns.is_empty() { String::new() } else { format!(" ({columns})") };
    (out, format!("COPY {}{list} FROM STDIN", table.quoted()))
}

/// How far a copy is; read by others while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Blocks of parts that are done.
    pub blocks: AtomicU64,
    /// Blocks of all parts.
    pub blocks_total: AtomicU64,
    /// Rows of parts that are done.
    pub rows: AtomicU64,
    /// Bytes of rows in COPY's text format.
    pub bytes: AtomicU64,
}

/// What is needed to copy.
pub(crate) struct Copy<'a> {
    pub source: &'a ConnectOptions,
    pub target: &'a ConnectOptions,
    pub tables: &'a [Table],
    /// The exported snapshot.
    pub snapshot: &'a str,
    pub workers: usize,
    /// What the names of replication origins begin with that the workers have.
    pub origin: Option<&'a str>,
    pub progress: &'a Progress,
    /// Ends the waiting of all workers.
    pub stop: &'a Arc<OwnedFd>,
}

impl Copy<'_> {
    /// Copies everything, or ends with the first error; then the target has some of the rows.
    pub(crate) fn run(&self) -> Result<(), SetupError> {
        let parts = cut(self.tables, self.workers as u64);
        self.progress.blocks_total.store(parts.iter().map(|part| part.blocks).sum(), Ordering::Relaxed);
        let workers = self.workers.min(parts.len());
        let queue = Mutex::new(VecDeque::from(parts));
        let (queue, failure) = (&queue, &Mutex::new(None));
        thread::scope(|scope| {
            for number in 0..workers {
                scope.spawn(move || {
                    if let Err(error) = self.work(number, queue) {
                        // The first is the cause; the others were interrupted.
                        let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                        failure.get_or_insert(error);
                        raise(self.stop);
                    }
                });
            }
        });
        failure.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn work(&self, number: usize, queue: &Mutex<VecDeque<Part>>) -> Result<(), SetupError> {
        let mut source = Side::Source.open(self.source)?;
        let mut target = Side::Target.open(self.target)?;
        let snapshot = format!("SET TRANSACTION SNAPSHOT {}", literal(self.snapshot));
        Side::Source.run(&mut source, "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")?;
        Side::Source.run(&mut source, &snapshot)?;
        // It becomes durable all together, at the end.
        Side::Target.run(&mut target, "SET synchronous_commit = off")?;
        Side::Target.run(&mut target, "SET session_replication_role = replica")?;
        if let Some(origin) = self.origin {
            let name = literal(&name_of(origin, number));
            Side::Target.run(&mut target, &format!("SELECT pg_replication_origin_session_setup({name})"))?;
        }
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(part) = next else { return Ok(()) };
            self.copy(&mut source, &mut target, &part)?;
        }
    }

    fn copy(&self, source: &mut Connection, target: &mut Connection, part: &Part) -> Result<(), SetupError> {
        let table = &self.tables[part.table];
        let (out, into) = commands(table, part);
        let failed = |side: Side| move |error| side.failed(&format!("could not copy table {}", table.quoted()), error);
        source.copy_out(&out).map_err(failed(Side::Source))?;
        target.copy_in(&into).map_err(failed(Side::Target))?;
        while let Some(row) = source.read_copy().map_err(failed(Side::Source))? {
            self.progress.bytes.fetch_add(row.len() as u64, Ordering::Relaxed);
            target.write_copy(row).map_err(failed(Side::Target))?;
        }
        let rows = target.finish_copy().map_err(failed(Side::Target))?;
        self.progress.rows.fetch_add(rows, Ordering::Relaxed);
        self.progress.blocks.fetch_add(part.blocks, Ordering::Relaxed);
        Ok(())
    }
}

/// Makes an eventfd readable.
pub(crate) fn raise(fd: &OwnedFd) {
    // It fails only where it is readable already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, blocks: &[u64]) -> Table {
        let storage =
            |(at, &blocks): (usize, &u64)| Storage { schema: "s".into(), name: format!("{name}{at}"), blocks };
        Table {
            schema: "s".into(),
            name: name.into(),
            columns: vec!["a".into(), "B\"".into()],
            filter: None,
            storage: blocks.iter().enumerate().map(storage).collect(),
        }
    }

    #[test]
    fn every_block_is_in_one_part() {
        let tables = [table("empty", &[0]), table("t", &[100_000, 8193, 8192]), table("small", &[5])];
        for workers in [1, 2, 7, 64] {
            let parts = cut(&tables, workers);
            assert!(parts.is_sorted_by(|a, b| a.blocks >= b.blocks));
            for (number, table) in tables.iter().enumerate() {
                for (at, storage) in table.storage.iter().enumerate() {
                    let mut own: Vec<_> =
                        parts.iter().filter(|part| (part.table, part.storage) == (number, at)).collect();
                    own.sort_by_key(|part| part.from);
                    assert_eq!(own[0].from, 0);
                    assert!(own.windows(2).all(|pair| pair[0].to == Some(pair[1].from)));
                    assert_eq!(own.last().unwrap().to, None);
                    assert_eq!(own.iter().map(|part| part.blocks).sum::<u64>(), storage.blocks);
                }
            }
        }
    }

    #[test]
    fn commands_name_rows_and_columns() {
        let mut table = table("t", &[20_000]);
        let parts = cut(std::slice::from_ref(&table), 1);
        table.filter = Some("a > 1 OR a < 0".into());
        let middle = parts.iter().find(|part| part.from == 8192).unwrap();
        let (out, into) = commands(&table, middle);
        assert_eq!(
            out,
            r#"COPY (SELECT "a", "B""" FROM ONLY "s"."t0" WHERE ctid >= '(8192,0)' AND ctid < '(16384,0)' AND (a > 1 OR a < 0)) TO STDOUT"#
        );
        assert_eq!(into, r#"COPY "s"."t" ("a", "B""") FROM STDIN"#);
        table.columns.clear();
        table.filter = None;
        let whole = Part { table: 0, storage: 0, from: 0, to: None, blocks: 0 };
        assert_eq!(commands(&table, &whole).1, r#"COPY "s"."t" FROM STDIN"#);
    }
}
