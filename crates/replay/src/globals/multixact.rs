//! `pg_multixact`: who holds locks on a row together. Each multixact id has an offset (`pg_multixact/offsets`), where its
//! members begin (`pg_multixact/members`); they end where those of the next id begin (`access/transam/multixact.c`,
//! PostgreSQL 18.6).

use walrider_datadir::slru::{PAGES_PER_SEGMENT, Slru};
use walrider_layout::bytes::put_u32;
use walrider_layout::control::CheckPoint;
use walrider_layout::{BLCKSZ, MultiXactId, Oid};
use walrider_wal::records::multixact::Member;

use super::GlobalError;
use super::pages::Pages;
use super::xid::{page_precedes_modulo, precedes_modulo};

/// The smallest multixact id (`FirstMultiXactId`).
const FIRST_MULTI: MultiXactId = 1;
/// Offsets per page (`MULTIXACT_OFFSETS_PER_PAGE`).
pub const OFFSETS_PER_PAGE: u32 = (BLCKSZ / 4) as u32;
/// Members whose flags share a word (`MULTIXACT_MEMBERS_PER_MEMBERGROUP`): a byte each.
const MEMBERS_PER_GROUP: u32 = 4;
/// Bytes of a group (`MULTIXACT_MEMBERGROUP_SIZE`): a flag byte for each member, then a transaction id for each.
const GROUP_SIZE: usize = 20;
/// Members per page (`MULTIXACT_MEMBERS_PER_PAGE`); 12 bytes at the end of a page stay unused.
pub const MEMBERS_PER_PAGE: u32 = (BLCKSZ / GROUP_SIZE) as u32 * MEMBERS_PER_GROUP;
/// The highest member status (`MultiXactStatusUpdate`).
const LAST_STATUS: u32 = 5;

const LAST_OFFSETS_PAGE: u64 = (u32::MAX / OFFSETS_PER_PAGE) as u64;
const LAST_MEMBERS_PAGE: u64 = (u32::MAX / MEMBERS_PER_PAGE) as u64;

/// Page, and byte within it, of an id's offset (`MultiXactIdToOffsetPage`, `MultiXactIdToOffsetEntry`).
fn offset_place(multi: MultiXactId) -> (u64, usize) {
    (u64::from(multi / OFFSETS_PER_PAGE), (multi % OFFSETS_PER_PAGE) as usize * 4)
}

/// Page of a member; byte within it of its flags, and of its transaction id (`MXOffsetToMemberPage`,
/// `MXOffsetToFlagsOffset` with `MXOffsetToFlagsBitShift`, `MXOffsetToMemberOffset`).
fn member_place(offset: u32) -> (u64, usize, usize) {
    let in_page = offset % MEMBERS_PER_PAGE;
    let group = (in_page / MEMBERS_PER_GROUP) as usize * GROUP_SIZE;
    let in_group = (in_page % MEMBERS_PER_GROUP) as usize;
    (u64::from(offset / MEMBERS_PER_PAGE), group + in_group, group + MEMBERS_PER_GROUP as usize + in_group * 4)
}

/// Multixacts, offsets and members.
pub(super) struct MultiXacts {
    pub(super) offsets: Pages,
    pub(super) members: Pages,
    /// What a truncation of the offsets must not reach (`latest_page_number`).
    latest_offsets_page: u64,
    /// `nextMXact`.
    pub(super) next_multi: MultiXactId,
    /// `nextOffset`.
    pub(super) next_offset: u32,
    /// The oldest id that may be in a table (`oldestMultiXactId`), and the database that has it.
    pub(super) oldest: (MultiXactId, Oid),
    /// The newest offsets page that this replay knows to exist (`last_initialized_offsets_page`).
    last_initialized: Option<u64>,
    /// An offsets page made ahead of its own record, which must then not clear it (`pre_initialized_offsets_page`).
    pre_initialized: Option<u64>,
}

impl MultiXacts {
    /// `StartupMultiXact`: changes no file.
    pub(super) fn start(offsets: Slru, members: Slru, checkpoint: &CheckPoint) -> MultiXacts {
        let (next_multi, next_offset) = (checkpoint.next_multi, checkpoint.next_multi_offset);
        MultiXacts {
            offsets: Pages::new(offsets),
            members: Pages::new(members),
            latest_offsets_page: offset_place(next_multi).0,
            next_multi,
            next_offset,
            oldest: (checkpoint.oldest_multi, checkpoint.oldest_multi_db),
            last_initialized: None,
            pre_initialized: None,
        }
    }

    /// `XLOG_MULTIXACT_ZERO_OFF_PAGE` (`multixact_redo`).
    pub(super) fn zero_offsets_page(&mut self, page: i64) -> Result<(), GlobalError> {
        let page = super::page_number(page, LAST_OFFSETS_PAGE)?;
        if self.pre_initialized != Some(page) {
            self.clear_offsets_page(page)?;
        }
        self.pre_initialized = None;
        Ok(())
    }

    fn clear_offsets_page(&mut self, page: u64) -> Result<(), GlobalError> {
        self.offsets.zero_page(page)?;
        self.latest_offsets_page = page;
        self.last_initialized = Some(page);
        Ok(())
    }

    /// `XLOG_MULTIXACT_ZERO_MEM_PAGE` (`multixact_redo`).
    pub(super) fn zero_members_page(&mut self, page: i64) -> Result<(), GlobalError> {
        self.members.zero_page(super::page_number(page, LAST_MEMBERS_PAGE)?)?;
        Ok(())
    }

    /// `XLOG_MULTIXACT_CREATE_ID` (`multixact_redo`, `RecordNewMultiXact`).
    pub(super) fn create(
        &mut self,
        multi: MultiXactId,
        offset: u32,
        members: impl ExactSizeIterator<Item = Member> + Clone,
    ) -> Result<(), GlobalError> {
        if members.clone().any(|member| member.status > LAST_STATUS) {
            return Err(GlobalError::CorruptRecord("a member of a multixact has an undefined status"));
        }
        self.pre_initialized = None;
        let next = multi.wrapping_add(1).max(FIRST_MULTI);
        let end = offset.wrapping_add(members.len() as u32);
        let (page, at) = offset_place(multi);
        let (next_page, next_at) = offset_place(next);
        if next_page != page && self.lacks_next_page(page, next_page)? {
            self.clear_offsets_page(next_page)?;
            self.pre_initialized = Some(next_page);
        }
        put_u32(self.offsets.page_mut(page)?, at, offset);
        // An offset of 0 would mean "not set": the primary never hands it out.
        put_u32(self.offsets.page_mut(next_page)?, next_at, end.max(1));

        for (nth, member) in members.enumerate() {
            let (page, flags_at, xid_at) = member_place(offset.wrapping_add(nth as u32));
            let bytes = self.members.page_mut(page)?;
            bytes[flags_at] = member.status as u8;
            put_u32(bytes, xid_at, member.xid);
        }
        self.advance_next(multi.wrapping_add(1), end);
        Ok(())
    }

    /// Whether the page of the next id does not exist. Earlier minor versions wrote only an id's own offset, and
    /// logged the next page when its first id was used, which is after the record that now writes there; WAL of theirs
    /// must work. Pages are logged in order, so the newest one that was logged tells; before there was one, the files do.
    fn lacks_next_page(&mut self, page: u64, next_page: u64) -> Result<bool, GlobalError> {
        match self.last_initialized {
            Some(newest) => Ok(newest == page),
            None => Ok(!self.offsets.exists(next_page)?),
        }
    }

    /// Counters of an online checkpoint, or implied by a record (`MultiXactAdvanceNextMXact`).
    pub(super) fn advance_next(&mut self, multi: MultiXactId, offset: u32) {
        if precedes_modulo(self.next_multi, multi) {
            self.next_multi = multi;
        }
        if precedes_modulo(self.next_offset, offset) {
            self.next_offset = offset;
        }
    }

    /// The oldest id of a checkpoint (`MultiXactAdvanceOldest`).
    pub(super) fn advance_oldest(&mut self, multi: MultiXactId, database: Oid) {
        if precedes_modulo(self.oldest.0, multi) {
            self.oldest = (multi, database);
        }
    }

    /// `XLOG_MULTIXACT_TRUNCATE_ID` (`PerformMembersTruncation`, `PerformOffsetsTruncation`). Members are removed by
    /// range, up to the segment where the oldest ones that stay begin: they may use the whole range of offsets, where
    /// "older" means nothing.
    pub(super) fn truncate(
        &mut self,
        members_from: u32,
        members_to: u32,
        oldest_multi: MultiXactId,
    ) -> Result<(), GlobalError> {
        let segment = |offset| member_place(offset).0 / PAGES_PER_SEGMENT;
        let (from, to, last) = (segment(members_from), segment(members_to), segment(u32::MAX));
        let goes = |segment| match from <= to {
            true => (from..to).contains(&segment),
            false => (from..=last).contains(&segment) || segment < to,
        };
        self.members.remove_segments(goes)?;
        // One id back: the first id of a page may not have been used yet, nor its page been made.
        let newest_gone = if oldest_multi == FIRST_MULTI { u32::MAX } else { oldest_multi.wrapping_sub(1) };
        let (cutoff, _) = offset_place(newest_gone);
        let precedes = |page, cutoff| page_precedes_modulo(page, cutoff, OFFSETS_PER_PAGE, FIRST_MULTI + 1);
        if !precedes(self.latest_offsets_page, cutoff) {
            self.offsets.truncate(cutoff, precedes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use walrider_layout::TransactionId;
    use walrider_layout::bytes::u32_at;

    use super::*;

    impl MultiXacts {
        /// An id's offset, 0 if it has none.
        fn offset(&mut self, multi: MultiXactId) -> u32 {
            let (page, at) = offset_place(multi);
            u32_at(self.offsets.page(page).unwrap(), at)
        }

        /// A member.
        fn member(&mut self, offset: u32) -> Member {
            let (page, flags_at, xid_at) = member_place(offset);
            let bytes = self.members.page(page).unwrap();
            Member { xid: u32_at(bytes, xid_at), status: bytes[flags_at].into() }
        }
    }

    fn multixacts(next_multi: MultiXactId, next_offset: u32) -> (tempfile::TempDir, MultiXacts) {
        let dir = tempfile::tempdir().unwrap();
        for part in ["offsets", "members"] {
            std::fs::create_dir(dir.path().join(part)).unwrap();
        }
        let slru = |part| Slru::new(dir.path().join(part), 8);
        let checkpoint = CheckPoint { next_multi, next_multi_offset: next_offset, ..CheckPoint::default() };
        let multixacts = MultiXacts::start(slru("offsets"), slru("members"), &checkpoint);
        (dir, multixacts)
    }

    fn members(xids: &[(TransactionId, u32)]) -> impl ExactSizeIterator<Item = Member> + Clone {
        xids.iter().map(|&(xid, status)| Member { xid, status })
    }

    #[test]
    fn members_are_in_groups_of_four_with_their_flags_in_front() {
        assert_eq!(member_place(0), (0, 0, 4));
        assert_eq!(member_place(3), (0, 3, 16));
        assert_eq!(member_place(4), (0, 20, 24));
        assert_eq!(member_place(1635), (0, 408 * 20 + 3, 408 * 20 + 16));
        assert_eq!(member_place(1636), (1, 0, 4));
        assert_eq!(member_place(u32::MAX).0, LAST_MEMBERS_PAGE);
    }

    #[test]
    fn a_multixact_ends_where_the_next_begins() {
        let (dir, mut multixacts) = multixacts(1, 1);
        multixacts.zero_offsets_page(0).unwrap();
        multixacts.zero_members_page(0).unwrap();
        multixacts.zero_members_page(1).unwrap();
        multixacts.create(7, 1634, members(&[(700, 5), (701, 0), (702, 1)])).unwrap();
        assert_eq!((multixacts.offset(7), multixacts.offset(8)), (1634, 1637));
        assert_eq!(multixacts.member(1635), Member { xid: 701, status: 0 });
        assert_eq!(multixacts.member(1636), Member { xid: 702, status: 1 }, "on the next page");
        assert_eq!((multixacts.next_multi, multixacts.next_offset), (8, 1637));
        multixacts.members.sync().unwrap();
        let file = std::fs::read(dir.path().join("members/0000")).unwrap();
        assert_eq!(file[408 * 20..408 * 20 + 20], [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xBC, 2, 0, 0, 0xBD, 2, 0, 0]);
        assert_eq!(file[8180..8192], [0; 12], "the end of a page stays unused");
        assert!(multixacts.create(8, 1, members(&[(1, 6)])).is_err(), "an undefined status");
    }

    #[test]
    fn offset_zero_is_skipped_and_ids_wrap_to_one() {
        let (_dir, mut multixacts) = multixacts(u32::MAX, u32::MAX);
        multixacts.create(u32::MAX, u32::MAX, members(&[(9, 1)])).unwrap();
        assert_eq!((multixacts.offset(u32::MAX), multixacts.offset(1)), (u32::MAX, 1));
        assert_eq!(multixacts.member(u32::MAX), Member { xid: 9, status: 1 });
    }

    #[test]
    fn a_page_made_ahead_of_its_record_is_not_cleared_by_it() {
        let (_dir, mut multixacts) = multixacts(2040, 1);
        multixacts.zero_offsets_page(0).unwrap();
        multixacts.create(2047, 50, members(&[(9, 1), (10, 1)])).unwrap();
        assert_eq!(multixacts.offset(2048), 52);
        multixacts.zero_offsets_page(1).unwrap();
        assert_eq!(multixacts.offset(2048), 52, "WAL of an earlier minor version logs the page only now");
        multixacts.zero_offsets_page(1).unwrap();
        assert_eq!(multixacts.offset(2048), 0, "once");
    }

    #[test]
    fn the_files_tell_whether_the_next_page_exists_before_the_first_zero_record() {
        let (dir, mut before) = multixacts(2040, 1);
        before.zero_offsets_page(0).unwrap();
        before.zero_offsets_page(1).unwrap();
        put_u32(before.offsets.page_mut(1).unwrap(), 4, 77);
        before.offsets.sync().unwrap();
        let slru = |part| Slru::new(dir.path().join(part), 8);
        let checkpoint = CheckPoint { next_multi: 2040, next_multi_offset: 1, ..CheckPoint::default() };
        let mut multixacts = MultiXacts::start(slru("offsets"), slru("members"), &checkpoint);
        multixacts.create(2047, 50, members(&[(9, 1)])).unwrap();
        assert_eq!((multixacts.offset(2048), multixacts.offset(2049)), (51, 77), "not cleared");
    }

    #[test]
    fn members_are_removed_by_range_around_the_end() {
        let (dir, mut multixacts) = multixacts(10, 1);
        let per_segment = PAGES_PER_SEGMENT as u32 * MEMBERS_PER_PAGE;
        let last = member_place(u32::MAX).0;
        for page in [0, 32, 64, last as i64] {
            multixacts.zero_members_page(page).unwrap();
        }
        multixacts.members.sync().unwrap();
        multixacts.truncate(u32::MAX - 5, per_segment + 3, 10).unwrap();
        multixacts.members.sync().unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path().join("members")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["0001", "0002"], "from the last segment, over the first, up to that of the end");
        multixacts.truncate(7, 9, 10).unwrap();
        multixacts.members.sync().unwrap();
        assert!(dir.path().join("members/0001").exists());
    }

    #[test]
    fn offsets_are_truncated_by_age() {
        let (dir, mut multixacts) = multixacts(200 * OFFSETS_PER_PAGE, 1);
        for page in [0, 32, 64, 200] {
            multixacts.zero_offsets_page(page).unwrap();
        }
        multixacts.truncate(0, 0, 64 * OFFSETS_PER_PAGE).unwrap();
        multixacts.offsets.sync().unwrap();
        let exists = |name| dir.path().join("offsets").join(name).exists();
        assert!(!exists("0000") && exists("0001") && exists("0002"), "one id back lies in the segment before");
        multixacts.truncate(0, 0, 64 * OFFSETS_PER_PAGE + 1).unwrap();
        multixacts.offsets.sync().unwrap();
        assert!(!exists("0001") && exists("0002"));
    }
}
