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
        for _ in 0..columns {
            value(reader)?;
        }
        Ok(Tuple { columns, bytes: &all[..all.len() - reader.rest().len()] })
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
        Values { left: self.columns, reader: Reader::new(self.bytes, "tuple") }
    }
}

/// The values of a [`Tuple`].
#[derive(Clone)]
pub struct Values<'a> {
    left: u16,
    reader: Reader<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        Some(value(&mut self.reader).expect("checked when it was read"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.into(), Some(self.left.into()))
    }
}

impl ExactSizeIterator for Values<'_> {}

fn value<'a>(reader: &mut Reader<'a>) -> Result<Value<'a>, WireError> {
    let mark = reader.u8()?;
    match mark {
        b'n' => Ok(Value::Null),
        b'u' => Ok(Value::UnchangedToast),
        b't' | b'b' => {
            let len = reader.u32()?;
            let contents = reader.take(usize::try_from(len).map_err(|_| reader.malformed())?)?;
            Ok(if mark == b't' { Value::Text(contents) } else { Value::Binary(contents) })
        }
        _ => Err(reader.malformed()),
    }
}
