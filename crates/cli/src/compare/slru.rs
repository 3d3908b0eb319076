//! Compares one segment of an SLRU: transaction states, commit timestamps, multixacts.

use std::sync::atomic::AtomicU64;

use walrider_layout::BLCKSZ;

use super::classes::Class;
use super::relation::{Pair, Sides};
use super::tally::{Place, ReadError, Tally, excerpt};
use super::walk::Slru;

/// Pages of a segment file (`SLRU_PAGES_PER_SEGMENT`).
const PAGES_PER_SEGMENT: u64 = 32;
/// Bytes of a commit timestamp entry (`SizeOfCommitTimestampEntry`).
const COMMIT_TS_ENTRY: u64 = 10;
/// Bytes of a group of four multixact members and their flags (`MULTIXACT_MEMBERGROUP_SIZE`).
const MEMBER_GROUP: u64 = 20;

/// Compares a segment. Zero pages past the end of the shorter file are a class of their own.
pub fn compare_slru(
    which: Slru,
    number: u64,
    name: &str,
    paths: Sides<'_>,
    tally: &mut Tally,
    done_bytes: &AtomicU64,
) -> Result<(), ReadError> {
    let mut pair = Pair::open(paths)?;
    let mut first = 0;
    while let Some([a, b]) = pair.next(done_bytes)? {
        if a != b {
            let pages = a.len().max(b.len()).div_ceil(BLCKSZ);
            for at in 0..pages {
                compare_page(which, number, name, first + at as u32, [page(a, at), page(b, at)], tally);
            }
        }
        first += (a.len().max(b.len()) / BLCKSZ) as u32;
    }
    Ok(())
}

/// What there is of a page.
fn page(bytes: &[u8], at: usize) -> &[u8] {
    let from = (at * BLCKSZ).min(bytes.len());
    &bytes[from..(from + BLCKSZ).min(bytes.len())]
}

fn compare_page(which: Slru, number: u64, name: &str, page: u32, [a, b]: [&[u8]; 2], tally: &mut Tally) {
    if a == b {
        return;
    }
    let longer = if a.len() > b.len() { a } else { b };
    if a.len().min(b.len()) == 0 && longer.iter().all(|&byte| byte == 0) {
        let place = Place { block: Some(page), offset: None, field: "page".into() };
        let show = |page: &[u8]| if page.is_empty() { "past the end" } else { "zero" };
        return tally.find(Class::SlruTrailingZero, name, place, show(a), show(b));
    }
    let offset = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    let field = entry(which, number * PAGES_PER_SEGMENT + u64::from(page), offset, a, b);
    let place = Place { block: Some(page), offset: Some(offset), field };
    tally.find(Class::Slru, name, place, excerpt(a, offset), excerpt(b, offset));
}

/// The entry that a byte of an SLRU belongs to; `page` counts over all segments.
fn entry(which: Slru, page: u64, offset: usize, a: &[u8], b: &[u8]) -> String {
    let (offset, size) = (offset as u64, BLCKSZ as u64);
    match which {
        // CLOG_BITS_PER_XACT is 2.
        Slru::Xact => {
            let at = offset as usize;
            let changed = a.get(at).unwrap_or(&0) ^ b.get(at).unwrap_or(&0);
            let xid = (page * size + offset) * 4 + u64::from(changed.trailing_zeros().min(7) / 2);
            format!("state of transaction {}", xid as u32)
        }
        Slru::CommitTs => {
            let xid = page * (size / COMMIT_TS_ENTRY) + offset / COMMIT_TS_ENTRY;
            format!("commit timestamp of transaction {}", xid as u32)
        }
        Slru::MultiXactOffsets => format!("offset of multixact {}", (page * size + offset) / 4),
        Slru::MultiXactMembers => {
            let group = page * (size / MEMBER_GROUP) + offset / MEMBER_GROUP;
            let member = match offset % MEMBER_GROUP {
                flags @ 0..4 => flags,
                xids => (xids - 4) / 4,
            };
            format!("multixact member {}", group * 4 + member)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_named_by_its_entry() {
        let (zeros, ones) = (vec![0_u8; BLCKSZ], vec![0x10_u8; BLCKSZ]);
        let entry = |which, page, offset| entry(which, page, offset, &zeros, &ones);
        assert_eq!(entry(Slru::Xact, 1, 1), "state of transaction 32774");
        assert_eq!(entry(Slru::CommitTs, 2, 25), "commit timestamp of transaction 1640");
        assert_eq!(entry(Slru::MultiXactOffsets, 1, 9), "offset of multixact 2050");
        assert_eq!(entry(Slru::MultiXactMembers, 0, 22), "multixact member 6");
        assert_eq!(entry(Slru::MultiXactMembers, 1, 28), "multixact member 1641");
    }
}
