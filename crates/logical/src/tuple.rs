//! Rows in messages (`logicalrep_write_tuple`, `src/backend/replication/logical/proto.c`, PostgreSQL 18).

use walrider_wire::WireError;
use walrider_wire::reader::Reader;

/// A column's value in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// Null.
    Null,
    /// A value outside of the row that the change left as it was: it is not sent.
    UnchangedToast,
    /// As the type's output function writes it, in the connection's encoding.
    Text(&'a [u8]),
    /// As the type's send function writes it; only where `binary` was asked for.
    Binary(&'a [u8]),
}

/// A row, or an old row in which only the key's columns are not null. Checked when it was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    columns: u16,
    bytes: &'a [u8],
}

impl<'a> Tuple<'a> {
    /// Takes a row from the front of a message, all of it checked.
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Tuple<'a>, WireError> {
        let columns = reader.u16()?;
        let all = reader.rest();
        let mut rest = all;
        for _ in 0..columns {
            (_, rest) = split(rest).ok_or(reader.malformed())?;
        }
        Ok(Tuple { columns, bytes: reader.take(all.len() - rest.len())? })
    }

    /// The row that a message ends with, where the message was checked before.
    pub(crate) fn read_last(reader: &mut Reader<'a>) -> Result<Tuple<'a>, WireError> {
        let columns = reader.u16()?;
        Ok(Tuple { columns, bytes: reader.take(reader.rest().len())? })
    }

    /// How many columns it has; those of its relation, or the message before it was another one's.
    pub fn len(&self) -> usize {
        self.columns.into()
    }

    /// Whether it has no column at all, as a table may.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// Its length in the message, in bytes.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// The values, in the order of the relation's columns.
    pub fn values(&self) -> Values<'a> {
        Values { left: self.columns, bytes: self.bytes }
    }
}

/// The values of a [`Tuple`].
#[derive(Clone)]
pub struct Values<'a> {
    left: u16,
    bytes: &'a [u8],
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    #[inline]
    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (value, rest) = split(self.bytes).expect("checked when it was read");
        self.bytes = rest;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.into(), Some(self.left.into()))
    }
}

impl ExactSizeIterator for Values<'_> {}

/// The value at the front, and what comes after it; `None` if there is none.
#[inline]
fn split(bytes: &[u8]) -> Option<(Value<'_>, &[u8])> {
    let (&mark, rest) = bytes.split_first()?;
    match mark {
        b'n' => Some((Value::Null, rest)),
        b'u' => Some((Value::UnchangedToast, rest)),
        b't' | b'b' => {
            let (len, rest) = rest.split_first_chunk()?;
            let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
            let (contents, rest) = rest.split_at_checked(len)?;
            Some((if mark == b't' { Value::Text(contents) } else { Value::Binary(contents) }, rest))
        }
        _ => None,
    }
}
