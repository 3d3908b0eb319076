//! Batches as they grow: which transactions go together, and what they access.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use walrider_layout::Oid;

use crate::assemble::{AssembleError, End, Transaction};
use crate::batch::{Batch, Operation, Part, Work};
use crate::error::ApplyError;
use crate::keys::{self, RowChange};
use crate::message::{Decoder, Message, Relation};
use crate::origins::PROGRESS_NAMES;
use crate::schedule::{Access, Schedule};
use crate::target::Table;

/// Rows of one transaction whose keys are looked at; of a larger one its tables are accessed as a whole.
const MAX_KEYS: usize = 200_000;

/// Transactions in a batch that came while another was executed: with so many it is no writer who waits for the last to be applied.
const MANY: usize = 3;

/// Bounds of a batch. One transaction may be more.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Changes.
    pub rows: u64,
    /// Bytes of them.
    pub bytes: usize,
}

/// Looks relations up on the target.
pub type Find<'a> = &'a mut dyn FnMut(Relation) -> Result<Table, ApplyError>;

/// Tells the publisher that we are there, if that is due.
pub type Tend<'a> = &'a mut dyn FnMut() -> Result<(), ApplyError>;

/// Bytes of changes that are looked through between two calls of [`Tend`].
const TEND_AT: usize = 4 << 20;

#[derive(Default)]
struct Open {
    begins_after: u64,
    transactions: Vec<Transaction>,
    tables: Vec<Arc<Table>>,
    numbers: HashMap<u64, u32>,
    truncates: Vec<Vec<Arc<Table>>>,
    operations: Vec<Operation>,
    accesses: Vec<Access>,
    rows: u64,
    bytes: usize,
}

/// What a transaction does, as far as others have to know.
#[derive(Default)]
struct Looked {
    accesses: Vec<Access>,
    touched: HashSet<u64>,
    /// The last of them.
    last_touched: Option<u64>,
    /// Tables that are accessed as a whole.
    whole: HashSet<u64>,
    rows: usize,
    /// Of changes in memory: their tables, by relation.
    operations: Vec<(Operation, Place)>,
    /// Relations that were looked up, from which change on.
    relations: Vec<(u64, Oid, Arc<Table>)>,
}

/// A relation of the publisher. It is looked up when it is used: the partitions of a table that is published by its root are
/// described too, and need not be on the target.
struct Known {
    relation: Relation,
    table: Option<Arc<Table>>,
}

enum Place {
    Row(Arc<Table>),
    Truncate(Vec<Arc<Table>>),
}

/// Puts transactions into batches.
pub struct Batches {
    bounds: Bounds,
    relations: HashMap<Oid, Known>,
    schedule: Schedule,
    open: Open,
    last: u64,
}

impl Batches {
    /// Nothing is known of the publisher's relations.
    pub fn new(bounds: Bounds) -> Batches {
        let (relations, schedule) = (HashMap::new(), Schedule::new());
        Batches { bounds, relations, schedule, open: Open::default(), last: 0 }
    }

    /// All batches up to this one have committed.
    pub fn committed(&mut self, batch: u64) {
        self.schedule.committed(batch);
    }

    /// Number of the newest batch that was closed.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Whether a transaction waits in a batch that is not closed.
    pub fn is_open(&self) -> bool {
        !self.open.transactions.is_empty()
    }

    /// Whether so much has come into the open batch that more is coming.
    pub fn is_one_of_many(&self) -> bool {
        self.open.transactions.len() >= MANY
    }

    /// What the open batch has to wait for; zero if it may begin.
    pub fn open_begins_after(&self, committed: u64) -> u64 {
        if self.open.begins_after > committed { self.open.begins_after } else { 0 }
    }

    /// Takes a transaction, or a part of it. Batches that are complete with it, or before it, go to `out`. `tend` is called now and then:
    /// to look through a large transaction takes time.
    pub fn add(
        &mut self,
        transaction: Transaction,
        part: Part,
        committed: u64,
        (find, tend): (Find<'_>, Tend<'_>),
        out: &mut Vec<Batch>,
    ) -> Result<(), ApplyError> {
        let mut looked = self.look(&transaction, find, tend)?;
        let single = part != Part::Whole || transaction.end != End::Commit || !transaction.changes.in_memory();
        if single {
            self.close(out);
            self.single(transaction, part, looked, out);
            return Ok(());
        }
        let after = self.schedule.begins_after(&looked.accesses);
        let bytes = transaction.changes.memory_bytes();
        let full = self.open.rows + transaction.changes.count() > self.bounds.rows
            || self.open.bytes + bytes > self.bounds.bytes;
        // One that could begin now does not wait for what another has to wait for.
        let ready = self.open_begins_after(committed) == 0;
        if self.is_open() && (full || (ready && after > committed)) {
            self.close(out);
        }
        let after = self.schedule.begins_after(&looked.accesses).max(after);
        let open = &mut self.open;
        open.begins_after = open.begins_after.max(after);
        let number = open.transactions.len() as u32;
        for (mut operation, place) in looked.operations.drain(..) {
            operation.transaction = number;
            operation.table = match place {
                Place::Row(table) => open.table(&table),
                Place::Truncate(tables) => {
                    open.truncates.push(tables);
                    open.truncates.len() as u32 - 1
                }
            };
            open.operations.push(operation);
        }
        open.rows += transaction.changes.count();
        open.bytes += bytes;
        open.accesses.append(&mut looked.accesses);
        open.transactions.push(transaction);
        if open.rows >= self.bounds.rows || open.bytes >= self.bounds.bytes {
            self.close(out);
        }
        Ok(())
    }

    /// Closes the open batch, if there is one.
    pub fn close(&mut self, out: &mut Vec<Batch>) {
        if !self.is_open() {
            return;
        }
        let open = std::mem::take(&mut self.open);
        self.last += 1;
        self.schedule.add(self.last, &open.accesses);
        out.push(Batch {
            number: self.last,
            part: Part::Whole,
            begins_after: open.begins_after,
            transactions: open.transactions,
            tables: open.tables,
            truncates: open.truncates,
            work: Work::Operations(open.operations),
        });
    }

    /// A batch of one transaction, or of a part of one.
    fn single(&mut self, transaction: Transaction, part: Part, looked: Looked, out: &mut Vec<Batch>) {
        let mut accesses = looked.accesses;
        let (mut tables, mut truncates) = (Open::default(), Vec::new());
        let work = match transaction.end {
            End::CommitPrepared | End::RollbackPrepared => Work::Finish,
            _ if !transaction.changes.in_memory() => Work::Spilled(looked.relations),
            _ => Work::Operations(
                looked
                    .operations
                    .into_iter()
                    .map(|(mut operation, place)| {
                        operation.table = match place {
                            Place::Row(table) => tables.table(&table),
                            Place::Truncate(list) => {
                                truncates.push(list);
                                truncates.len() as u32 - 1
                            }
                        };
                        operation
                    })
                    .collect(),
            ),
        };
        if transaction.end != End::Commit {
            // What is prepared keeps its locks, and other sessions end it: in order, that is no question.
            keys::alone(&mut accesses);
        }
        self.last += u64::from(matches!(part, Part::Whole | Part::First));
        // Who accessed something before an earlier part did so is not known any more: then all before have to have committed.
        let begins_after = self.schedule.begins_after(&accesses).min(self.last - 1);
        self.schedule.add(self.last, &accesses);
        out.push(Batch {
            number: self.last,
            part,
            begins_after,
            transactions: vec![transaction],
            tables: tables.tables,
            truncates,
            work,
        });
    }

    /// Goes through a transaction's changes.
    fn look(&mut self, transaction: &Transaction, find: Find<'_>, tend: Tend<'_>) -> Result<Looked, ApplyError> {
        let mut looked = Looked::default();
        let in_memory = transaction.changes.in_memory();
        if !in_memory {
            let tables = self.relations.iter().filter_map(|(id, known)| Some((0, *id, known.table.clone()?)));
            looked.relations.extend(tables);
        }
        let relations = &mut self.relations;
        let mut decoder = Decoder::again(in_memory);
        let mut seen = 0_usize;
        transaction.changes.each(|number, at, body| -> Result<(), ApplyError> {
            seen += body.len();
            if seen > TEND_AT {
                seen = 0;
                tend()?;
            }
            let message = decoder.decode(body).map_err(AssembleError::Wire)?;
            let operation = Operation { table: 0, transaction: 0, at, len: body.len() };
            let (id, change) = match message {
                Message::Relation { relation, .. } => {
                    looked.relation(relation, relations);
                    return Ok(());
                }
                Message::Truncate { relations: ids, .. } => {
                    let mut tables = Vec::new();
                    for id in ids.iter() {
                        tables.push(looked.table(number, id, relations, find)?);
                    }
                    tables.iter().for_each(|table| table.keys.truncate(&mut looked.accesses));
                    if in_memory {
                        looked.operations.push((operation, Place::Truncate(tables)));
                    }
                    return Ok(());
                }
                Message::Insert { relation, new, .. } => (relation, RowChange::Insert(new)),
                Message::Update { relation, old, new, .. } => (relation, RowChange::Update(old, new)),
                Message::Delete { relation, old, .. } => (relation, RowChange::Delete(old)),
                _ => return Ok(()),
            };
            if is_progress(relations, id) {
                return Ok(());
            }
            let table = looked.table(number, id, relations, find)?;
            if !matches!(change, RowChange::Insert(_)) {
                needs_key(&table)?;
            }
            looked.row(&table, change, in_memory.then_some(operation));
            Ok(())
        })?;
        Ok(looked)
    }
}

impl Open {
    fn table(&mut self, table: &Arc<Table>) -> u32 {
        *self.numbers.entry(table.generation).or_insert_with(|| {
            self.tables.push(table.clone());
            self.tables.len() as u32 - 1
        })
    }
}

impl Looked {
    fn relation(&mut self, relation: Relation, known: &mut HashMap<Oid, Known>) {
        match known.get(&relation.id) {
            Some(before) if before.relation == relation => return,
            // What its rows are known by may not be what it was.
            Some(before) if before.table.is_some() => keys::alone(&mut self.accesses),
            _ => (),
        }
        known.insert(relation.id, Known { relation, table: None });
    }

    fn table(
        &mut self,
        number: u64,
        id: Oid,
        known: &mut HashMap<Oid, Known>,
        find: Find<'_>,
    ) -> Result<Arc<Table>, ApplyError> {
        let unknown = AssembleError::Order { tag: b'R', what: "a relation was changed that was not described" };
        let known = known.get_mut(&id).ok_or(ApplyError::Assemble(unknown))?;
        if let Some(table) = &known.table {
            return Ok(table.clone());
        }
        let table = Arc::new(find(known.relation.clone())?);
        self.relations.push((number, id, table.clone()));
        known.table = Some(table.clone());
        Ok(table)
    }

    fn row(&mut self, table: &Arc<Table>, change: RowChange<'_>, operation: Option<Operation>) {
        if self.last_touched.replace(table.keys.table) != Some(table.keys.table)
            && self.touched.insert(table.keys.table)
        {
            table.keys.touch(&mut self.accesses);
        }
        self.rows += 1;
        if self.rows <= MAX_KEYS {
            table.keys.row(change, &mut self.accesses);
        } else if self.whole.insert(table.keys.table) {
            table.keys.truncate(&mut self.accesses);
        }
        if let Some(operation) = operation {
            self.operations.push((operation, Place::Row(table.clone())));
        }
    }
}

/// The progress of another `apply`, into the publisher, which publishes all its tables.
fn is_progress(known: &HashMap<Oid, Known>, id: Oid) -> bool {
    let names = known.get(&id).map(|known| (known.relation.namespace.as_str(), known.relation.name.as_str()));
    names == Some(PROGRESS_NAMES)
}

fn needs_key(table: &Table) -> Result<(), ApplyError> {
    table.no_key().map_or(Ok(()), |why| Err(ApplyError::Schema(why.to_owned())))
}
