//! Records of sequences (`commands/sequence.h`, `access/rmgrdesc/seqdesc.c`, PostgreSQL 18).

use std::fmt::Write;

use walrider_layout::RelFileLocator;
use walrider_layout::bytes::Reader;

use super::parts::Item;
use crate::record::Record;

/// Record type: the sequence's page is rewritten.
pub const XLOG_SEQ_LOG: u8 = 0x00;

/// The data of [`XLOG_SEQ_LOG`] (`xl_seq_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqLog<'a> {
    /// The sequence.
    pub rel: RelFileLocator,
    /// The only tuple of its only page.
    pub tuple: &'a [u8],
}

impl<'a> SeqLog<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<SeqLog<'a>> {
        let mut reader = Reader::new(main_data);
        let rel = RelFileLocator::read(&reader.array::<12>()?);
        Some(SeqLog { rel, tuple: reader.rest() })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    (info & 0xF0 == XLOG_SEQ_LOG).then_some("LOG")
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    if record.info() == XLOG_SEQ_LOG
        && let Some(seq) = SeqLog::parse(record.main_data)
    {
        let _ = write!(out, "rel {}", seq.rel);
    }
}
