//! Generic records, by which extensions log changes of pages (`access/generic_xlog.h`,
//! `access/rmgrdesc/genericdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use crate::record::Record;

/// A stretch of a page's bytes to be overwritten (`writeFragment` in `access/transam/generic_xlog.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment<'a> {
    /// Where on the page.
    pub offset: u16,
    /// With what.
    pub bytes: &'a [u8],
}

impl<'a> Fragment<'a> {
    fn read(reader: &mut Reader<'a>) -> Option<Fragment<'a>> {
        let (offset, len) = (reader.u16()?, reader.u16()?);
        Some(Fragment { offset, bytes: reader.take(len.into())? })
    }

    /// All fragments of a delta, which is the data of a block; ends with a `None` where it ends too early.
    pub fn all(delta: &'a [u8]) -> impl Iterator<Item = Option<Fragment<'a>>> {
        let mut reader = Reader::new(delta);
        std::iter::from_fn(move || {
            if reader.rest().is_empty() {
                return None;
            }
            let fragment = Fragment::read(&mut reader);
            if fragment.is_none() {
                reader = Reader::new(&[]);
            }
            Some(fragment)
        })
    }
}

/// The name of a record type: there is only one.
pub fn identify(_info: u8) -> Option<&'static str> {
    Some("Generic")
}

/// Appends what the record says: which bytes of a page it overwrites, if its main data should have them.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let mut separator = "";
    for Fragment { offset, bytes } in Fragment::all(record.main_data).flatten() {
        let _ = write!(out, "{separator}offset {offset}, length {}", bytes.len());
        separator = "; ";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn a_delta_that_ends_too_early_says_so_once() {
        let whole = Some(Fragment { offset: 24, bytes: &[7, 8] });
        for tail in [&[40][..], &[40, 0, 1], &[40, 0, 1, 0]] {
            let delta = [&[24, 0, 2, 0, 7, 8], tail].concat();
            assert_eq!(Fragment::all(&delta).collect::<Vec<_>>(), [whole, None]);
        }
    }
}
