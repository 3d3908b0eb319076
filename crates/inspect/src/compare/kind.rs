//! What a page of a relation is, told from its own bytes.
//!
//! Access methods mark their pages at the end of the special space for tools like this one (`HASHO_PAGE_ID`,
//! `access/hash.h`), so one page is enough. The only values in common: a sequence's special space would be that of a
//! GIN page with a right link to block 5911; but a sequence has only block 0, which is GIN's meta page, marked so.

use walrider_layout::bytes::{u16_at, u32_at};
use walrider_layout::page::Page;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, PageBytes};
use walrider_redo::brin::{BRIN_PAGETYPE_META, BRIN_PAGETYPE_REGULAR};
use walrider_redo::gist::GIST_PAGE_ID;
use walrider_redo::hash::HASHO_PAGE_ID;
use walrider_redo::seq::SEQ_MAGIC;
use walrider_redo::spgist::SPGIST_PAGE_ID;
use walrider_wal::rmgr::RmgrId;

/// `MAX_BT_CYCLE_ID` (`access/nbtree.h`): below all page ids.
const MAX_BT_CYCLE_ID: u16 = 0xFF7F;
/// All bits that `GinPageOpaqueData.flags` may have (`access/ginblock.h`).
const GIN_FLAGS: u16 = 0x00FF;

/// Which rules hold for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Never initialised, or a page whose header makes no sense: nothing but LSN and checksum can be masked.
    Opaque,
    /// A page of the free space map: no line pointers, and no hole to be masked.
    FreeSpaceMap,
    /// A page of the visibility map; likewise.
    VisibilityMap,
    /// A page of this resource manager, under its mask.
    Of(RmgrId),
}

/// The kind of a page at this block of a fork.
pub fn page_kind(page: &PageBytes, fork: ForkNumber, block: BlockNumber) -> PageKind {
    match fork {
        ForkNumber::FreeSpaceMap => return PageKind::FreeSpaceMap,
        ForkNumber::VisibilityMap => return PageKind::VisibilityMap,
        ForkNumber::Main | ForkNumber::Init => {}
    }
    let header = Page(page);
    if header.is_new() || !header.is_sane() {
        return PageKind::Opaque;
    }
    let id = u16_at(page, BLCKSZ - 2);
    let rmgr = match BLCKSZ - header.special() {
        0 => RmgrId::HEAP,
        8 if u32_at(page, header.special()) == SEQ_MAGIC && block == 0 => RmgrId::SEQ,
        8 if id == SPGIST_PAGE_ID => RmgrId::SPGIST,
        8 if (BRIN_PAGETYPE_META..=BRIN_PAGETYPE_REGULAR).contains(&id) => RmgrId::BRIN,
        8 if id & !GIN_FLAGS == 0 => RmgrId::GIN,
        16 if id == HASHO_PAGE_ID => RmgrId::HASH,
        16 if id == GIST_PAGE_ID => RmgrId::GIST,
        16 if id <= MAX_BT_CYCLE_ID => RmgrId::BTREE,
        // Access methods of extensions, as contrib/bloom: their pages change by generic records.
        _ => RmgrId::GENERIC,
    };
    PageKind::Of(rmgr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::bytes::{put_u16, put_u32};
    use walrider_layout::page::PageMut;

    fn page(special: usize, id: u16, first: u32) -> Box<PageBytes> {
        let mut page = Box::new([0; BLCKSZ]);
        PageMut(&mut page).init(special);
        if special > 0 {
            put_u32(&mut *page, BLCKSZ - special, first);
            put_u16(&mut *page, BLCKSZ - 2, id);
        }
        page
    }

    #[test]
    fn pages_tell_what_they_are() {
        let of = |page: Box<PageBytes>, block| page_kind(&page, ForkNumber::Main, block);
        assert_eq!(of(page(0, 0, 0), 7), PageKind::Of(RmgrId::HEAP));
        assert_eq!(of(page(16, 0, 3), 7), PageKind::Of(RmgrId::BTREE));
        assert_eq!(of(page(16, 0xFF7F, 3), 7), PageKind::Of(RmgrId::BTREE));
        assert_eq!(of(page(16, 0xFF80, 3), 7), PageKind::Of(RmgrId::HASH));
        assert_eq!(of(page(16, 0xFF81, 3), 7), PageKind::Of(RmgrId::GIST));
        assert_eq!(of(page(8, 0xFF82, 3), 7), PageKind::Of(RmgrId::SPGIST));
        assert_eq!(of(page(8, 0xF092, 0), 1), PageKind::Of(RmgrId::BRIN));
        assert_eq!(of(page(8, 0x0083, 9), 7), PageKind::Of(RmgrId::GIN));
        assert_eq!(of(page(8, 0, 0x1717), 0), PageKind::Of(RmgrId::SEQ));
        assert_eq!(of(page(8, 0, 0x1717), 1), PageKind::Of(RmgrId::GIN));
        assert_eq!(of(page(8, 0xFF83, 9), 7), PageKind::Of(RmgrId::GENERIC));
        assert_eq!(of(page(24, 0xFF80, 9), 7), PageKind::Of(RmgrId::GENERIC));
        assert_eq!(of(Box::new([0; BLCKSZ]), 7), PageKind::Opaque);
        assert_eq!(page_kind(&page(0, 0, 0), ForkNumber::VisibilityMap, 0), PageKind::VisibilityMap);
    }
}
