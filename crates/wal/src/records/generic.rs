//! Generic records, by which extensions log changes of pages (`access/generic_xlog.h`,
//! `access/rmgrdesc/genericdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use crate::record::Record;

/// The name of a record type: there is only one.
pub fn identify(_info: u8) -> Option<&'static str> {
    Some("Generic")
}

/// Appends what the record says: which bytes of a page it overwrites, if its main data should have them.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let mut data = Reader::new(record.main_data);
    let mut separator = "";
    while let Some((offset, len)) = data.u16().zip(data.u16()) {
        let _ = write!(out, "{separator}offset {offset}, length {len}");
        separator = "; ";
        if data.take(len.into()).is_none() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::records::parts::tests::described;
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        assert_eq!(
            described(RmgrId::GENERIC, 0, &[24, 0, 2, 0, 7, 7, 40, 0, 1, 0, 7]),
            "offset 24, length 2; offset 40, length 1"
        );
        assert_eq!(described(RmgrId::GENERIC, 0, &[]), "");
    }
}
