//! Compares one segment of an SLRU: transaction states, commit timestamps, multixacts.

use std::sync::atomic::AtomicU64;

use walrider_datadir::slru::PAGES_PER_SEGMENT;
use walrider_layout::control::ControlFile;
use walrider_layout::xid::{FIRST_NORMAL_XID, precedes};
use walrider_layout::{BLCKSZ, TransactionId};

use super::classes::Class;
use super::relation::{Pair, Sides};
use super::tally::{Location, ReadError, Tally, excerpt};
use super::walk::Slru;

/// Bytes of a commit timestamp entry (`SizeOfCommitTimestampEntry`).
const COMMIT_TS_ENTRY: u64 = 10;
/// Commit timestamp entries of a page (`COMMIT_TS_XACTS_PER_PAGE`).
const COMMIT_TS_ENTRIES: u64 = BLCKSZ as u64 / COMMIT_TS_ENTRY;
/// Bytes of a group of four multixact members and their flags (`MULTIXACT_MEMBERGROUP_SIZE`).
const MEMBER_GROUP: u64 = 20;

/// What nobody can read in `pg_commit_ts`. `TransactionIdGetCommitTsData` (`access/transam/commit_ts.c`) answers for no
/// transaction before `oldestCommitTsXid`, whatever stands there. And there may stand anything: when tracking is turned
/// off, `DeactivateCommitTs` removes the files, not the buffers, and those that were not yet written make files again.
#[derive(Clone, Copy, Debug)]
pub struct CommitTsLimits {
    /// Of either directory: a server that starts there reads nothing before.
    oldest: [TransactionId; 2],
    /// Neither directory has anything to be read.
    none: bool,
}

impl CommitTsLimits {
    /// Where the control files put them. Without `oldestCommitTsXid`, turning tracking on makes it the next transaction
    /// id, and makes the page of that if it is not there (`ActivateCommitTs`).
    pub fn of(controls: [&ControlFile; 2]) -> CommitTsLimits {
        let oldest = controls.map(|control| match control.checkpoint_copy.oldest_commit_ts_xid {
            0 => control.checkpoint_copy.next_xid as TransactionId,
            oldest => oldest,
        });
        let none = controls.iter().all(|control| control.checkpoint_copy.oldest_commit_ts_xid == 0);
        CommitTsLimits { oldest, none }
    }

    /// Whether nobody can read the entry. Special ids have none.
    fn hides(&self, xid: TransactionId) -> bool {
        xid >= FIRST_NORMAL_XID && self.oldest.iter().all(|&oldest| precedes(xid, oldest))
    }

    /// Whether nobody can read what stands at a byte of a page. What is no entry counts as one that can be read.
    fn hides_byte(&self, page: u64, offset: usize) -> bool {
        let entry = offset as u64 / COMMIT_TS_ENTRY;
        entry < COMMIT_TS_ENTRIES && self.hides((page * COMMIT_TS_ENTRIES + entry) as TransactionId)
    }

    /// Whether a page that only one directory has may as well be absent: nobody reads it, and if it is the one where
    /// tracking would go on, nothing stands there yet.
    fn may_lack(&self, page: u64, bytes: &[u8]) -> bool {
        let last = ((page + 1) * COMMIT_TS_ENTRIES - 1) as TransactionId;
        let hidden = |(offset, byte): (usize, &u8)| *byte == 0 || self.hides_byte(page, offset);
        (self.none || self.hides(last)) && bytes.iter().enumerate().all(hidden)
    }

    /// The pages of a segment that only one directory has, if it may as well be absent.
    pub fn pages_of_lone_segment(&self, number: u64, bytes: &[u8]) -> Option<u64> {
        let mut pages = (number * PAGES_PER_SEGMENT..).zip(bytes.chunks(BLCKSZ));
        let all = pages.all(|(page, bytes)| self.may_lack(page, bytes));
        (all && !bytes.is_empty()).then(|| bytes.len().div_ceil(BLCKSZ) as u64)
    }
}

/// Compares a segment. Zero pages past the end of the shorter file are a class of their own.
pub fn compare_slru(
    which: Slru,
    limits: CommitTsLimits,
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
                compare_page(which, limits, number, name, first + at as u32, [page(a, at), page(b, at)], tally);
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

fn compare_page(
    which: Slru,
    limits: CommitTsLimits,
    number: u64,
    name: &str,
    page: u32,
    [a, b]: [&[u8]; 2],
    tally: &mut Tally,
) {
    if a == b {
        return;
    }
    let (shorter, longer) = if a.len() > b.len() { (b, a) } else { (a, b) };
    if shorter.is_empty() && longer.iter().all(|&byte| byte == 0) {
        let place = Location { block: Some(page), offset: None, field: "page".into() };
        let show = |page: &[u8]| if page.is_empty() { "past the end" } else { "zero" };
        return tally.find(Class::SlruTrailingZero, name, place, show(a), show(b));
    }
    let in_all = number * PAGES_PER_SEGMENT + u64::from(page);
    let mut different = (0..longer.len()).filter(|&at| a.get(at) != b.get(at));
    let offset = match which {
        Slru::CommitTs if shorter.is_empty() && limits.may_lack(in_all, longer) => None,
        Slru::CommitTs if !shorter.is_empty() => different.find(|&at| !limits.hides_byte(in_all, at)),
        _ => different.next(),
    };
    let Some(offset) = offset else { return tally.count(Class::CommitTsBeforeOldest) };
    let field = entry(which, in_all, offset, a, b);
    let place = Location { block: Some(page), offset: Some(offset), field };
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
            let xid = page * COMMIT_TS_ENTRIES + offset / COMMIT_TS_ENTRY;
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

    fn limits(oldest: TransactionId, none: bool) -> CommitTsLimits {
        CommitTsLimits { oldest: [oldest; 2], none }
    }

    #[test]
    fn entries_before_both_limits_are_hidden() {
        let hides = |a, b, xid| CommitTsLimits { oldest: [a, b], none: false }.hides(xid);
        assert!(hides(900, 1000, 899) && !hides(900, 1000, 900) && !hides(1000, 900, 950));
        assert!(hides(10, 10, u32::MAX) && hides(10, 10, 9) && !hides(10, 10, 2) && !hides(10, 10, 10));
        assert!(!hides(u32::MAX, u32::MAX, 5));
        let limits = limits(1639, false);
        assert!(limits.hides_byte(2, 9) && !limits.hides_byte(2, 10));
        assert!(limits.hides_byte(1, 8189) && !limits.hides_byte(1, 8190), "bytes of no entry");
    }

    #[test]
    fn pages_that_one_may_lack() {
        let with = |at: usize| {
            let mut bytes = vec![0; BLCKSZ];
            bytes[at] = 1;
            bytes
        };
        let (tracked, untracked) = (limits(1639, false), limits(1639, true));
        assert!(tracked.may_lack(1, &with(8189)) && !tracked.may_lack(1, &with(8190)));
        assert!(!tracked.may_lack(2, &with(9)), "the page is needed");
        assert!(untracked.may_lack(2, &with(9)) && !untracked.may_lack(2, &with(10)));
        assert_eq!(untracked.pages_of_lone_segment(0, &[with(30), with(1), with(2)].concat()), Some(3));
        assert_eq!(tracked.pages_of_lone_segment(0, &[with(30), with(1), with(2)].concat()), None);
        assert_eq!(tracked.pages_of_lone_segment(0, &[]), None);
    }

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
