//! What a change accesses, for [`crate::schedule`].
//!
//! A row is known by the values of its replica identity, and of every unique index of the target that is made of plain columns.
//! What this does not see, as values that are equal in two spellings, is caught when it is executed: see `worker.rs`.

use crate::message::Tuple;
use crate::message::{OldTuple, Value};
use crate::schedule::Access;

/// Columns whose values tell rows apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Where they are in the publisher's rows, in the order of their names.
    pub columns: Vec<usize>,
    /// Which key of which table, hashed: see [`Key::space`].
    pub space: u64,
    /// Whether rows with nulls in them are told apart too.
    pub nulls_equal: bool,
}

impl Key {
    /// A number for the columns of these names, of a table; the same for an index and a replica identity that have the same
    /// columns, and for all partitions of a table, which are told by their root.
    pub fn space(root: u32, names: &[&str]) -> u64 {
        let mut hash = Hash::new(u64::from(root));
        names.iter().for_each(|name| hash.add(Some(name.as_bytes())));
        hash.0
    }
}

/// What accesses depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The table as a whole.
    pub table: u64,
    /// The replica identity, as far as there is one.
    pub identity: Option<Key>,
    /// Unique indexes with other columns.
    pub unique: Vec<Key>,
    /// Triggers run with the changes, and may do anything: nothing else is executed beside them.
    pub alone: bool,
}

/// A change of a row.
#[derive(Clone, Copy, Debug)]
pub enum RowChange<'a> {
    /// A new row.
    Insert(Tuple<'a>),
    /// A changed one.
    Update(Option<OldTuple<'a>>, Tuple<'a>),
    /// One that is gone.
    Delete(OldTuple<'a>),
}

/// What every batch reads: one that writes it is executed alone.
pub const EVERYTHING: u64 = 0;

/// Something that must not be executed beside anything else.
pub fn alone(accesses: &mut Vec<Access>) {
    accesses.push(Access { hash: EVERYTHING, write: true });
}

impl Keys {
    /// Adds the accesses of a TRUNCATE.
    pub fn truncate(&self, accesses: &mut Vec<Access>) {
        accesses.push(Access { hash: EVERYTHING, write: self.alone });
        accesses.push(Access { hash: self.table, write: true });
    }

    /// Adds the accesses of any change: the table is not emptied meanwhile.
    pub fn touch(&self, accesses: &mut Vec<Access>) {
        accesses.push(Access { hash: EVERYTHING, write: self.alone });
        accesses.push(Access { hash: self.table, write: false });
    }

    /// Adds the accesses of a change of a row, without those of [`Keys::touch`].
    pub fn row(&self, change: RowChange<'_>, accesses: &mut Vec<Access>) {
        match change {
            RowChange::Insert(new) => self.rows(new, true, accesses),
            RowChange::Update(old, new) => {
                match old {
                    Some(OldTuple::Full(old)) => self.rows(old, true, accesses),
                    Some(OldTuple::Key(old)) => self.rows(old, false, accesses),
                    None => (),
                }
                self.rows(new, true, accesses);
            }
            RowChange::Delete(OldTuple::Full(old)) => self.rows(old, true, accesses),
            RowChange::Delete(OldTuple::Key(old)) => self.rows(old, false, accesses),
        }
    }

    /// The hash of a row's replica identity; `None` if it has none.
    pub fn identity_hash(&self, tuple: Tuple<'_>) -> Option<u64> {
        self.identity.as_ref().and_then(|key| hash(key, tuple))
    }

    fn rows(&self, tuple: Tuple<'_>, whole: bool, accesses: &mut Vec<Access>) {
        let unique = if whole { self.unique.as_slice() } else { &[] };
        let hashes = self.identity.iter().chain(unique).filter_map(|key| hash(key, tuple));
        accesses.extend(hashes.map(|hash| Access { hash, write: true }));
    }
}

/// `None`: a value is null, so that there is no other row like this, or was not sent.
fn hash(key: &Key, tuple: Tuple<'_>) -> Option<u64> {
    let mut hash = Hash::new(key.space);
    // Most often the key is in the first columns, in their order.
    let (mut values, mut at) = (tuple.values(), 0);
    for &column in &key.columns {
        if column < at {
            (values, at) = (tuple.values(), 0);
        }
        let value = values.nth(column - at)?;
        at = column + 1;
        match value {
            Value::Null if key.nulls_equal => hash.add(None),
            Value::Null | Value::UnchangedToast => return None,
            Value::Text(bytes) | Value::Binary(bytes) => hash.add(Some(bytes)),
        }
    }
    Some(hash.0.max(EVERYTHING + 1))
}

/// Eight bytes at a time, multiplied and folded, as wyhash does. It guards against nobody who looks for collisions: they only
/// make batches wait.
struct Hash(u64);

impl Hash {
    fn new(seed: u64) -> Hash {
        let mut hash = Hash(0x9e37_79b9_7f4a_7c15);
        hash.word(seed);
        hash
    }

    fn word(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * u128::from(0xe703_7ed1_a0b4_28db_u64);
        self.0 = (product as u64) ^ (product >> 64) as u64 ^ word.rotate_left(32);
    }

    fn add(&mut self, value: Option<&[u8]>) {
        let Some(bytes) = value else { return self.word(u64::MAX) };
        self.word(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }
}

#[cfg(test)]
mod tests {
    use walrider_wire::reader::Reader;

    use super::*;

    fn row(values: &[Option<&str>]) -> Vec<u8> {
        let mut bytes = (values.len() as u16).to_be_bytes().to_vec();
        for value in values {
            match value {
                None => bytes.push(b'n'),
                Some(text) => {
                    bytes.push(b't');
                    bytes.extend((text.len() as u32).to_be_bytes());
                    bytes.extend(text.as_bytes());
                }
            }
        }
        bytes
    }

    fn accesses(keys: &Keys, old: Option<&[Option<&str>]>, new: &[Option<&str>]) -> Vec<u64> {
        let (old, new) = (old.map(row), row(new));
        let tuple = |bytes| Tuple::read(&mut Reader::new(bytes, "row")).unwrap();
        let old = old.as_ref().map(|old| OldTuple::Key(tuple(old)));
        let mut found = Vec::new();
        keys.row(RowChange::Update(old, tuple(&new)), &mut found);
        assert!(found.iter().all(|access| access.write));
        found.iter().map(|access| access.hash).collect()
    }

    #[test]
    fn rows_with_a_key_in_common_meet() {
        let key = |columns: &[usize], names: &[&str]| Key {
            columns: columns.to_vec(),
            space: Key::space(7, names),
            nulls_equal: false,
        };
        let keys =
            Keys { table: 1, identity: Some(key(&[0], &["a"])), unique: vec![key(&[2, 1], &["b", "c"])], alone: false };
        let all = |old, new| accesses(&keys, old, new);
        let one = all(None, &[Some("1"), Some("x"), Some("y")]);
        assert_eq!(one.len(), 2);
        assert_eq!(all(None, &[Some("1"), None, Some("y")]), one[..1]);
        assert_eq!(all(None, &[Some("2"), Some("x"), Some("y")])[1], one[1]);
        assert_ne!(all(None, &[Some("2"), Some("y"), Some("x")])[1], one[1]);
        let moved = all(Some(&[Some("1"), None, None]), &[Some("3"), None, None]);
        assert_eq!((moved.len(), moved[0]), (2, one[0]));
        assert_ne!(Key::space(7, &["ab", "c"]), Key::space(7, &["a", "bc"]));
        assert_ne!(Key::space(7, &["a"]), Key::space(8, &["a"]));
    }

    #[test]
    fn hashes_are_spread() {
        let hashes: std::collections::HashSet<u64> = (0..200_000_u32)
            .map(|n| {
                let mut hash = Hash::new(5);
                hash.add(Some(n.to_string().as_bytes()));
                hash.0
            })
            .collect();
        assert_eq!(hashes.len(), 200_000);
    }
}
