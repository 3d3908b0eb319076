//! What is special about pages of a GiST index (`access/gist.h`, PostgreSQL 18).

use walrider_layout::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{BlockNumber, Lsn};
use walrider_wal::records::parts::FullTransactionId;

use crate::RedoError;
use crate::special::Special;

/// `flags`: leaf page.
pub const F_LEAF: u16 = 1 << 0;
/// `flags`: no longer in the tree.
pub const F_DELETED: u16 = 1 << 1;
/// `flags`: tuples were removed from the page.
pub const F_TUPLES_DELETED: u16 = 1 << 2;
/// `flags`: the right sibling has no downlink yet.
pub const F_FOLLOW_RIGHT: u16 = 1 << 3;
/// `flags`: some line pointers may be dead.
pub const F_HAS_GARBAGE: u16 = 1 << 4;

/// The root page, for ever (`access/gist_private.h`).
pub const GIST_ROOT_BLKNO: BlockNumber = 0;
/// No sibling (`InvalidBlockNumber`).
pub const NO_BLOCK: BlockNumber = u32::MAX;

/// Marks the page as one of GiST.
pub const GIST_PAGE_ID: u16 = 0xFF81;

/// The special space (`GISTPageOpaqueData`), without the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque {
    /// Node sequence number: the LSN at which the page was last split and its right sibling got a downlink.
    pub nsn: Lsn,
    /// Right sibling.
    pub right_link: BlockNumber,
    /// `F_…`.
    pub flags: u16,
}

impl Special for Opaque {
    const SIZE: usize = 16;
    const NOT_ONE: &'static str = "not a GiST page";

    fn read(bytes: &[u8]) -> Option<Opaque> {
        (u16_at(bytes, 14) == GIST_PAGE_ID).then(|| Opaque {
            // Two halves, high first, as page LSNs are.
            nsn: Lsn(u64_at(bytes, 0).rotate_left(32)),
            right_link: u32_at(bytes, 8),
            flags: u16_at(bytes, 12),
        })
    }

    fn store(&self, bytes: &mut [u8]) {
        put_u64(bytes, 0, self.nsn.0.rotate_left(32));
        put_u32(bytes, 8, self.right_link);
        put_u16(bytes, 12, self.flags);
        put_u16(bytes, 14, GIST_PAGE_ID);
    }
}

/// Gives a page without tuples the contents of a deleted one (`GistPageSetDeleted`).
///
/// # Errors
/// When there are tuples, or there is no room.
pub fn put_delete_xid(page: &mut PageMut<'_>, delete_xid: FullTransactionId) -> Result<(), RedoError> {
    const END: usize = PAGE_HEADER_SIZE + 8;
    if !page.get().is_empty() || page.get().upper() < END {
        return Err(RedoError::CorruptPage("page to be deleted is not empty"));
    }
    put_u64(page.0, PAGE_HEADER_SIZE, delete_xid.0);
    page.set_lower(END);
    Ok(())
}
