//! Transactions of the publisher that are one transaction of the target.

use std::collections::HashMap;
use std::sync::Arc;

use walrider_layout::{Lsn, Oid};

use crate::assemble::{End, Transaction};
use crate::target::Table;

/// A change of a batch that is in memory.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Which of the batch's tables; of a TRUNCATE, which of its lists of tables.
    pub table: u32,
    /// Which of its transactions, and where the change is in it: see [`crate::assemble::Changes::body`].
    pub transaction: u32,
    /// Offset in bytes.
    pub at: usize,
    /// Length in bytes.
    pub len: usize,
}

/// What is to be done.
pub enum Work {
    /// Changes in memory, in order.
    Operations(Vec<Operation>),
    /// The changes of the only transaction, on disk. Which table a relation is, from which change on.
    Spilled(Vec<(u64, Oid, Arc<Table>)>),
    /// COMMIT PREPARED or ROLLBACK PREPARED.
    Finish,
}

/// What a batch is of its transaction: a large one is executed while it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it, or several.
    Whole,
    /// Its beginning.
    First,
    /// What follows on that.
    Middle,
    /// The rest, and its end.
    Last,
}

/// Consecutive transactions that are applied as one, or a part of one.
pub struct Batch {
    /// From 1, in the publisher's order. The parts of a transaction have the same.
    pub number: u64,
    /// Whether it is all.
    pub part: Part,
    /// The batch that has to have committed before this one begins.
    pub begins_after: u64,
    /// At least one. Several only if all end with [`End::Commit`].
    pub transactions: Vec<Transaction>,
    /// The tables of [`Operation::table`].
    pub tables: Vec<Arc<Table>>,
    /// The tables that each TRUNCATE empties.
    pub truncates: Vec<Vec<Arc<Table>>>,
    /// What is to be done.
    pub work: Work,
}

impl Batch {
    fn last(&self) -> &Transaction {
        self.transactions.last().expect("a batch has a transaction")
    }

    /// How it ends.
    pub fn end(&self) -> &End {
        &self.last().end
    }

    /// Where its last transaction ends.
    pub fn end_lsn(&self) -> Lsn {
        self.last().end_lsn
    }

    /// When that was, in microseconds since 2000-01-01.
    pub fn time(&self) -> i64 {
        self.last().time
    }

    /// The transaction's id on the publisher, where the batch is one that was prepared.
    pub fn xid(&self) -> u32 {
        self.last().xid
    }

    /// How many changes it has.
    pub fn changes(&self) -> u64 {
        self.transactions.iter().map(|transaction| transaction.changes.count()).sum()
    }

    /// Bytes of them in memory.
    pub fn memory_bytes(&self) -> usize {
        self.transactions.iter().map(|transaction| transaction.changes.memory_bytes()).sum()
    }

    /// The bytes of an operation.
    pub fn body(&self, operation: &Operation) -> &[u8] {
        self.transactions[operation.transaction as usize].changes.body(operation.at, operation.len)
    }
}

/// The publisher's relations as they are at one point of the stream.
pub type Relations = HashMap<Oid, Arc<Table>>;
