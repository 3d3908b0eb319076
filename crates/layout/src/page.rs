//! The header and the line pointers of a relation page (`storage/bufpage.h`, `storage/itemid.h`; page layout
//! version 4, the same in every supported major).
//!
//! [`Page`] reads and [`PageMut`] also writes. Offsets that a page itself states are data of unknown origin:
//! check one before you follow it.

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::checksum::page_checksum;
use crate::{BLCKSZ, BlockNumber, Lsn, OffsetNumber, PageBytes, TransactionId};

/// Bytes of the page header, where line pointers begin (`SizeOfPageHeaderData`).
pub const PAGE_HEADER_SIZE: usize = 24;
/// Bytes of a line pointer (`sizeof(ItemIdData)`).
pub const ITEM_ID_SIZE: usize = 4;
/// Page size and layout version 4 as stored in `pd_pagesize_version`.
pub const PAGESIZE_VERSION: u16 = BLCKSZ as u16 | 4;

/// `pd_flags`: there may be unused line pointers.
pub const PD_HAS_FREE_LINES: u16 = 0x0001;
/// `pd_flags`: an update found too little room here.
pub const PD_PAGE_FULL: u16 = 0x0002;
/// `pd_flags`: all tuples are visible to everyone.
pub const PD_ALL_VISIBLE: u16 = 0x0004;

/// Why a page is not valid (`PageIsVerified`, `storage/page/bufpage.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageProblem {
    /// A page that was never initialised must be zero.
    #[error("it looks new but is not all zeros")]
    NotZero,
    /// `pd_checksum` is not that of its bytes.
    #[error("checksum {stored:04X} is stored, {computed:04X} was computed")]
    Checksum {
        /// What the page says.
        stored: u16,
        /// What it should say.
        computed: u16,
    },
    /// The header's offsets contradict each other.
    #[error("its header makes no sense")]
    Header,
}

/// State of a line pointer (`lp_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ItemState {
    /// Free for reuse, no storage (`LP_UNUSED`).
    Unused = 0,
    /// Points to a tuple (`LP_NORMAL`).
    Normal = 1,
    /// Points to another line pointer of the page (`LP_REDIRECT`).
    Redirect = 2,
    /// Dead, with or without storage (`LP_DEAD`).
    Dead = 3,
}

/// A line pointer (`ItemIdData`): 15 bits of offset, 2 of state, 15 of length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemId(pub u32);

impl ItemId {
    /// A line pointer to `len` bytes at `offset` of the page. Both fit in 15 bits.
    pub fn new(offset: usize, state: ItemState, len: usize) -> ItemId {
        debug_assert!(offset < 1 << 15 && len < 1 << 15);
        ItemId(offset as u32 | (state as u32) << 15 | (len as u32) << 17)
    }

    /// `ItemIdSetNormal`.
    pub fn normal(offset: usize, len: usize) -> ItemId {
        ItemId::new(offset, ItemState::Normal, len)
    }

    /// `ItemIdSetRedirect`.
    pub fn redirect(to: OffsetNumber) -> ItemId {
        ItemId::new(usize::from(to) & 0x7FFF, ItemState::Redirect, 0)
    }

    /// The bits that hold the state.
    pub const STATE_MASK: u32 = 3 << 15;
    /// `ItemIdSetDead`: dead without storage.
    pub const DEAD: ItemId = ItemId((ItemState::Dead as u32) << 15);
    /// `ItemIdSetUnused`.
    pub const UNUSED: ItemId = ItemId(0);

    /// Bytes from the beginning of the page (`lp_off`); for a redirect, the target line pointer's number.
    #[inline]
    pub fn offset(self) -> usize {
        (self.0 & 0x7FFF) as usize
    }

    /// Bytes of the tuple (`lp_len`).
    #[inline]
    pub fn len(self) -> usize {
        (self.0 >> 17) as usize
    }

    /// Whether there is no storage (`!ItemIdHasStorage`).
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// `lp_flags`.
    #[inline]
    pub fn state(self) -> ItemState {
        match self.0 >> 15 & 3 {
            0 => ItemState::Unused,
            1 => ItemState::Normal,
            2 => ItemState::Redirect,
            _ => ItemState::Dead,
        }
    }

    /// The same storage with another state.
    pub fn with_state(self, state: ItemState) -> ItemId {
        ItemId(self.0 & !(3 << 15) | (state as u32) << 15)
    }
}

/// Reads a page.
#[derive(Clone, Copy)]
pub struct Page<'a>(pub &'a PageBytes);

impl<'a> Page<'a> {
    /// `PageGetLSN`: the end of the last record that changed the page. Stored as two 32-bit halves, high first.
    #[inline]
    pub fn lsn(self) -> Lsn {
        Lsn(u64_at(self.0, 0).rotate_left(32))
    }

    /// `pd_checksum`.
    pub fn checksum(self) -> u16 {
        u16_at(self.0, 8)
    }

    /// `pd_flags`.
    #[inline]
    pub fn flags(self) -> u16 {
        u16_at(self.0, 10)
    }

    /// `pd_lower`: where free space begins.
    #[inline]
    pub fn lower(self) -> usize {
        usize::from(u16_at(self.0, 12))
    }

    /// `pd_upper`: where free space ends.
    #[inline]
    pub fn upper(self) -> usize {
        usize::from(u16_at(self.0, 14))
    }

    /// `pd_special`: where the special space begins.
    #[inline]
    pub fn special(self) -> usize {
        usize::from(u16_at(self.0, 16))
    }

    /// `pd_prune_xid`.
    #[inline]
    pub fn prune_xid(self) -> TransactionId {
        u32_at(self.0, 20)
    }

    /// `PageIsNew`: never initialised.
    #[inline]
    pub fn is_new(self) -> bool {
        self.upper() == 0
    }

    /// `PageIsEmpty`: no line pointers.
    pub fn is_empty(self) -> bool {
        self.lower() <= PAGE_HEADER_SIZE
    }

    /// Whether the header's own offsets make sense:
    /// header ≤ lower ≤ upper ≤ special ≤ page size, special aligned (`PageIsVerified`).
    #[inline]
    pub fn is_sane(self) -> bool {
        PAGE_HEADER_SIZE <= self.lower()
            && self.lower() <= self.upper()
            && self.upper() <= self.special()
            && self.special() <= BLCKSZ
            && self.special().is_multiple_of(8)
    }

    /// Compares the checksum; a page that was never initialised has none, and must be zero.
    ///
    /// # Errors
    /// It is another, or the page is not zero.
    pub fn verify_checksum(self, block: BlockNumber) -> Result<(), PageProblem> {
        if self.is_new() {
            return if self.0.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(PageProblem::NotZero) };
        }
        let (stored, computed) = (self.checksum(), page_checksum(self.0, block));
        if stored == computed { Ok(()) } else { Err(PageProblem::Checksum { stored, computed }) }
    }

    /// What `PageIsVerified` looks at; `checksums`: whether pages have them.
    ///
    /// # Errors
    /// What is wrong.
    pub fn verify(self, block: BlockNumber, checksums: bool) -> Result<(), PageProblem> {
        if checksums || self.is_new() {
            self.verify_checksum(block)?;
        }
        if self.is_new() || self.is_sane() { Ok(()) } else { Err(PageProblem::Header) }
    }

    /// `PageGetMaxOffsetNumber`: the number of line pointers; 0 for a page that is new. Never more than fit on a page.
    #[inline]
    pub fn max_offset(self) -> OffsetNumber {
        (self.lower().min(BLCKSZ).saturating_sub(PAGE_HEADER_SIZE) / ITEM_ID_SIZE) as OffsetNumber
    }

    /// The line pointer of this number, if the page has it.
    #[inline]
    pub fn item_id(self, number: OffsetNumber) -> Option<ItemId> {
        if number == 0 || number > self.max_offset() {
            return None;
        }
        Some(ItemId(u32_at(self.0, PAGE_HEADER_SIZE + ITEM_ID_SIZE * (usize::from(number) - 1))))
    }

    /// The storage of a line pointer, if it lies within the page (behind the header).
    #[inline]
    pub fn item(self, id: ItemId) -> Option<&'a [u8]> {
        if id.offset() < PAGE_HEADER_SIZE {
            return None;
        }
        self.0.get(id.offset()..id.offset() + id.len())
    }
}

/// Reads and changes a page.
pub struct PageMut<'a>(pub &'a mut PageBytes);

impl PageMut<'_> {
    /// The same page, for reading.
    #[inline]
    pub fn get(&self) -> Page<'_> {
        Page(self.0)
    }

    /// `PageSetLSN`.
    #[inline]
    pub fn set_lsn(&mut self, lsn: Lsn) {
        put_u64(self.0, 0, lsn.0.rotate_left(32));
    }

    /// Stores `pd_checksum`.
    pub fn set_checksum(&mut self, checksum: u16) {
        put_u16(self.0, 8, checksum);
    }

    /// `PageSetChecksumInplace`: stores the checksum that its bytes have at this block. One that is new has none.
    pub fn update_checksum(&mut self, block: BlockNumber) {
        if !self.get().is_new() {
            self.set_checksum(page_checksum(self.0, block));
        }
    }

    /// Stores `pd_flags`.
    #[inline]
    pub fn set_flags(&mut self, flags: u16) {
        put_u16(self.0, 10, flags);
    }

    /// Stores `pd_lower`.
    #[inline]
    pub fn set_lower(&mut self, lower: usize) {
        put_u16(self.0, 12, lower as u16);
    }

    /// Stores `pd_upper`.
    #[inline]
    pub fn set_upper(&mut self, upper: usize) {
        put_u16(self.0, 14, upper as u16);
    }

    /// Stores `pd_prune_xid`.
    #[inline]
    pub fn set_prune_xid(&mut self, xid: TransactionId) {
        put_u32(self.0, 20, xid);
    }

    /// `PageInit`: an empty page with `special_size` bytes (rounded up) of special space.
    pub fn init(&mut self, special_size: usize) {
        let special = BLCKSZ - crate::maxalign(special_size);
        self.0.fill(0);
        self.set_lower(PAGE_HEADER_SIZE);
        self.set_upper(special);
        put_u16(self.0, 16, special as u16);
        put_u16(self.0, 18, PAGESIZE_VERSION);
    }

    /// Stores a line pointer. Panics if the number is 0 or beyond what fits on a page.
    #[inline]
    pub fn set_item_id(&mut self, number: OffsetNumber, id: ItemId) {
        put_u32(self.0, PAGE_HEADER_SIZE + ITEM_ID_SIZE * (usize::from(number) - 1), id.0);
    }

    /// The storage of a line pointer, if it lies within the page (behind the header).
    #[inline]
    pub fn item_mut(&mut self, id: ItemId) -> Option<&mut [u8]> {
        if id.offset() < PAGE_HEADER_SIZE {
            return None;
        }
        self.0.get_mut(id.offset()..id.offset() + id.len())
    }
}
