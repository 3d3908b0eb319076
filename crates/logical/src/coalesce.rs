//! Updates of a batch that nobody will see, since another update of the same row follows in it: the hot row is changed once.

use crate::assemble::AssembleError;
use crate::batch::{Batch, Operation};
use crate::hashed::{Hashed, Spread};
use crate::message::{Decoder, Message, ReplicaIdentity, Tuple, Value};
use crate::target::Table;

/// Which operations a later one makes superfluous: updates of a row whose key stays, and that another such update follows which
/// sets all columns, with nothing else of that row in between.
///
/// Unique columns that move between rows may then meet in an order in which they did not: the server refuses that, and the batch is
/// executed row by row.
pub fn superseded(decoder: &mut Decoder, batch: &Batch, operations: &[Operation]) -> Result<Vec<bool>, AssembleError> {
    let mut found = vec![false; operations.len()];
    if !operations.iter().any(|operation| batch.body(operation)[0] == b'U') {
        return Ok(found);
    }
    // The last update of each row, by the hash of its key.
    let mut last: Hashed<(usize, Tuple<'_>)> = Hashed::with_capacity_and_hasher(operations.len(), Spread::new());
    for (number, operation) in operations.iter().enumerate() {
        match decoder.decode(batch.body(operation))? {
            Message::Update { old: None, new, .. } => {
                let table = &batch.tables[operation.table as usize];
                let Some(hash) = table.keys.identity_hash(new) else { continue };
                let before = last.insert(hash, (number, new));
                if let Some((before, row)) = before
                    && operations[before].table == operation.table
                    && table.relation.identity != ReplicaIdentity::Full
                    && new.values().all(|value| value != Value::UnchangedToast)
                    && same_key(table, row, new)
                {
                    found[before] = true;
                }
            }
            Message::Insert { new, .. } => forget(&mut last, &batch.tables[operation.table as usize], new),
            Message::Update { old: Some(old), new, .. } => {
                let table = &batch.tables[operation.table as usize];
                forget(&mut last, table, *old.tuple());
                forget(&mut last, table, new);
            }
            Message::Delete { old, .. } => forget(&mut last, &batch.tables[operation.table as usize], *old.tuple()),
            _ => last.clear(),
        }
    }
    Ok(found)
}

fn forget(last: &mut Hashed<(usize, Tuple<'_>)>, table: &Table, row: Tuple<'_>) {
    if let Some(hash) = table.keys.identity_hash(row) {
        last.remove(&hash);
    }
}

fn same_key(table: &Table, one: Tuple<'_>, other: Tuple<'_>) -> bool {
    let mut values = one.values().zip(other.values()).enumerate();
    values.all(|(at, (one, other))| !table.is_key(at) || one == other)
}
