//! Names of files that PostgreSQL archives, and where an archive has them (`access/xlog_internal.h`, PostgreSQL 18).

use walrider_layout::TimelineId;
use walrider_layout::history::parse_history_file_name;
use walrider_layout::wal::is_segment_name;

use crate::frame::Packing;

/// Below the archive's place: what all names begin with.
pub const WAL: &str = "wal";

/// What sort of file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A segment.
    Segment,
    /// The last segment of a timeline that was left within it (`.partial`).
    Partial,
    /// When and where a backup began and ended (`.backup`).
    Backup,
    /// A timeline's history.
    History(TimelineId),
}

/// The name of a file, as in `pg_wal`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalName {
    text: String,
    kind: Kind,
}

impl WalName {
    /// Reads a name; `None` if PostgreSQL archives nothing that is named so.
    ///
    /// ```
    /// use walrider_archive::name::{Kind, WalName};
    /// let kind = |name| WalName::parse(name).map(|name| name.kind());
    /// assert_eq!(kind("00000001000000000000000A"), Some(Kind::Segment));
    /// assert_eq!(kind("00000001000000000000000A.partial"), Some(Kind::Partial));
    /// assert_eq!(kind("00000001000000000000000A.00000028.backup"), Some(Kind::Backup));
    /// assert!(matches!(kind("00000002.history"), Some(Kind::History(_))));
    /// assert_eq!(kind("../00000002.history"), None);
    /// ```
    pub fn parse(name: &str) -> Option<WalName> {
        let kind = match parse_history_file_name(name) {
            Some(timeline) => Kind::History(timeline),
            None => {
                let (segment, ending) = (name.get(..24)?, name.get(24..)?);
                if !is_segment_name(segment) {
                    return None;
                }
                match ending {
                    "" => Kind::Segment,
                    ".partial" => Kind::Partial,
                    _ => {
                        let offset = ending.strip_prefix('.')?.strip_suffix(".backup")?;
                        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
                        (offset.len() == 8 && offset.bytes().all(is_hex)).then_some(Kind::Backup)?
                    }
                }
            }
        };
        Some(WalName { text: name.to_owned(), kind })
    }

    /// As it stands in `pg_wal`.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What sort of file it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether it is made of WAL pages, and so is packed.
    pub fn is_wal(&self) -> bool {
        matches!(self.kind, Kind::Segment | Kind::Partial)
    }

    /// Where an archive has it, packed so, relative to its place.
    pub fn key(&self, packing: Packing) -> String {
        match self.kind {
            Kind::History(_) => format!("{WAL}/{}", self.text),
            Kind::Backup => format!("{WAL}/{}/{}", &self.text[..8], self.text),
            Kind::Segment | Kind::Partial => {
                format!("{WAL}/{}/{}.{}", &self.text[..8], self.text, packing.ending())
            }
        }
    }

    /// All places where an archive may have it; the likeliest first.
    pub fn keys(&self) -> Vec<String> {
        let all: &[Packing] = if self.is_wal() { &Packing::ALL } else { &[Packing::Raw] };
        all.iter().map(|&packing| self.key(packing)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_none() {
        for name in [
            "",
            "é0000001000000000000000",
            "00000001000000000000000a",
            "00000001000000000000000A.zst",
            "00000001000000000000000A.28.backup",
            "00000001000000000000000A/../0.backup",
            "RECOVERYXLOG",
            "0000002.history",
        ] {
            assert_eq!(WalName::parse(name), None, "{name}");
        }
    }

    #[test]
    fn keys() {
        let name = WalName::parse("00000003000000010000000A").unwrap();
        assert_eq!(name.keys()[0], "wal/00000003/00000003000000010000000A.zst");
        assert_eq!(name.keys().len(), 3);
        assert_eq!(WalName::parse("00000003.history").unwrap().keys(), ["wal/00000003.history"]);
    }
}
