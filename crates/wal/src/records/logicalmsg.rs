//! Records of messages for logical decoding (`replication/message.h`, `access/rmgrdesc/logicalmsgdesc.c`,
//! PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::Oid;
use walrider_layout::bytes::Reader;

use super::parts::{c_string, push_text};
use crate::record::Record;

/// Record type: a message.
pub const XLOG_LOGICAL_MESSAGE: u8 = 0x00;

/// The data of [`XLOG_LOGICAL_MESSAGE`] (`xl_logical_message`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// `dbId`: the database it was sent in.
    pub database: Oid,
    /// `transactional`: it counts only if its transaction commits.
    pub transactional: bool,
    /// Who is meant, without the zero.
    pub prefix: &'a [u8],
    /// The message.
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads the main data of a record; `None` if it is too short or the prefix does not end.
    pub fn parse(main_data: &'a [u8]) -> Option<Message<'a>> {
        let mut reader = Reader::new(main_data);
        let database = reader.u32()?;
        let transactional = reader.bool()?;
        reader.take(3)?;
        let prefix_len = usize::try_from(reader.u64()?).ok()?;
        let payload_len = usize::try_from(reader.u64()?).ok()?;
        let prefix = c_string(reader.take(prefix_len)?)?;
        Some(Message { database, transactional, prefix, payload: reader.take(payload_len)? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    (info & 0xF0 == XLOG_LOGICAL_MESSAGE).then_some("MESSAGE")
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    if record.info() != XLOG_LOGICAL_MESSAGE {
        return;
    }
    let Some(message) = Message::parse(record.main_data) else { return };
    out.push_str(if message.transactional { "transactional" } else { "non-transactional" });
    out.push_str(", prefix \"");
    push_text(message.prefix, out);
    let _ = write!(out, "\"; payload ({} bytes): ", message.payload.len());
    let mut separator = "";
    for byte in message.payload {
        let _ = write!(out, "{separator}{byte:02X}");
        separator = " ";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let message = [&words([5, 1, 4, 0, 3, 0])[..], b"abc\0\x01\xFFz"].concat();
        let described = |data: &[u8]| described(RmgrId::LOGICALMSG, XLOG_LOGICAL_MESSAGE, data);
        assert_eq!(described(&message), "transactional, prefix \"abc\"; payload (3 bytes): 01 FF 7A");
        assert_eq!(described(&message[..message.len() - 1]), "");
        let huge = [&words([5, 1, 4, u32::MAX, 3, 0])[..], b"abc\0\x01\xFFz"].concat();
        assert_eq!(described(&huge), "");
    }
}
