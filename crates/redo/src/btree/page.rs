//! What is special about pages and tuples of a B-tree (`access/nbtree.h`, `access/itup.h`, PostgreSQL 18).

use walrider_layout::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at};
use walrider_layout::page::{ITEM_ID_SIZE, ItemId, PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, OffsetNumber, maxalign};
use walrider_wal::records::btree::Metadata;
use walrider_wal::records::parts::FullTransactionId;

use crate::RedoError;
use crate::index_tuple::{TID_SIZE, TUPLE_HEADER_SIZE, make_tid, tuple_size};
use crate::special::Special;

/// `btpo_flags`: leaf page.
pub const BTP_LEAF: u16 = 1 << 0;
/// `btpo_flags`: root page.
pub const BTP_ROOT: u16 = 1 << 1;
/// `btpo_flags`: no longer in the tree.
pub const BTP_DELETED: u16 = 1 << 2;
/// `btpo_flags`: the metapage.
pub const BTP_META: u16 = 1 << 3;
/// `btpo_flags`: empty, but still in the tree.
pub const BTP_HALF_DEAD: u16 = 1 << 4;
/// `btpo_flags`: the last page of those that a split since a VACUUM began has made of one.
pub const BTP_SPLIT_END: u16 = 1 << 5;
/// `btpo_flags`: some line pointers may be dead.
pub const BTP_HAS_GARBAGE: u16 = 1 << 6;
/// `btpo_flags`: the right sibling has no downlink yet.
pub const BTP_INCOMPLETE_SPLIT: u16 = 1 << 7;
/// `btpo_flags`: a deleted page with a 64-bit transaction id.
pub const BTP_HAS_FULLXID: u16 = 1 << 8;

/// No sibling.
pub const P_NONE: BlockNumber = 0;
/// Line pointer of the high key, on a page that has a right sibling.
pub const P_HIKEY: OffsetNumber = 1;

/// Largest tuple on a leaf page (`BTMaxItemSize`): three must fit, with a TID to spare each.
pub const MAX_ITEM_SIZE: usize =
    (((BLCKSZ - maxalign(PAGE_HEADER_SIZE + 3 * ITEM_ID_SIZE) - Opaque::SIZE) / 3) & !7) - maxalign(TID_SIZE);

/// `t_info`: `t_tid` is not a TID but tells a posting list, or how many attributes a pivot tuple has.
pub const INDEX_ALT_TID_MASK: u16 = 0x2000;

/// The special space (`BTPageOpaqueData`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opaque {
    /// Left sibling.
    pub prev: BlockNumber,
    /// Right sibling.
    pub next: BlockNumber,
    /// Level above the leaves.
    pub level: u32,
    /// `BTP_…`.
    pub flags: u16,
    /// Which VACUUM was running at the page's last split.
    pub cycle_id: u16,
}

impl Special for Opaque {
    const SIZE: usize = 16;
    const NOT_ONE: &'static str = "not a B-tree page";

    #[inline]
    fn read(bytes: &[u8]) -> Option<Opaque> {
        Some(Opaque {
            prev: u32_at(bytes, 0),
            next: u32_at(bytes, 4),
            level: u32_at(bytes, 8),
            flags: u16_at(bytes, 12),
            cycle_id: u16_at(bytes, 14),
        })
    }

    #[inline]
    fn store(&self, bytes: &mut [u8]) {
        put_u32(bytes, 0, self.prev);
        put_u32(bytes, 4, self.next);
        put_u32(bytes, 8, self.level);
        put_u16(bytes, 12, self.flags);
        put_u16(bytes, 14, self.cycle_id);
    }
}

impl Opaque {
    /// The first line pointer behind the high key (`P_FIRSTDATAKEY`).
    pub fn first_data_key(&self) -> OffsetNumber {
        if self.next == P_NONE { P_HIKEY } else { P_HIKEY + 1 }
    }
}

/// Fills an initialised metapage (`BTMetaPageData`).
pub fn put_meta(page: &mut PageMut<'_>, metadata: &Metadata) {
    const BTREE_MAGIC: u32 = 0x0005_3162;
    const META_SIZE: usize = 48;
    let meta = &mut page.0[PAGE_HEADER_SIZE..][..META_SIZE];
    put_u32(meta, 0, BTREE_MAGIC);
    put_u32(meta, 4, metadata.version);
    put_u32(meta, 8, metadata.root);
    put_u32(meta, 12, metadata.level);
    put_u32(meta, 16, metadata.fast_root);
    put_u32(meta, 20, metadata.fast_level);
    put_u32(meta, 24, metadata.last_cleanup_num_delpages);
    // Number of heap tuples at the last clean-up: unknown, and no longer used.
    put_u64(meta, 32, (-1.0f64).to_bits());
    meta[40] = metadata.all_equal_image.into();
    // Else a full-page image would leave the metadata out.
    page.set_lower(PAGE_HEADER_SIZE + META_SIZE);
}

/// Gives an initialised page the contents of a deleted one (`BTPageSetDeleted`).
pub fn put_safe_xid(page: &mut PageMut<'_>, safe_xid: FullTransactionId) {
    put_u64(page.0, PAGE_HEADER_SIZE, safe_xid.0);
    page.set_lower(PAGE_HEADER_SIZE + 8);
}

/// The high key of a half-dead leaf: no attributes, only a block number (`BTreeTupleSetTopParent`).
pub fn top_parent_tuple(top_parent: BlockNumber) -> [u8; TUPLE_HEADER_SIZE] {
    let mut tuple = [0; TUPLE_HEADER_SIZE];
    tuple[..TID_SIZE].copy_from_slice(&make_tid(top_parent, 0));
    put_u16(&mut tuple, 6, TUPLE_HEADER_SIZE as u16 | INDEX_ALT_TID_MASK);
    tuple
}

/// Fills an initialised page with tuples that lie one behind the other (`_bt_restore_page`).
///
/// The data begins with the last line pointer's tuple: adding one tuple after the other from the data's end would
/// store the very same bytes at the end of the page, so they are copied in one go.
///
/// # Errors
/// When the data does not consist of tuples, or does not fit.
pub fn restore_items(page: &mut PageMut<'_>, data: &[u8]) -> Result<(), RedoError> {
    let sizes = || {
        let mut rest = data;
        std::iter::from_fn(move || {
            (!rest.is_empty()).then(|| {
                let size = maxalign(tuple_size(rest)?);
                rest = rest.get(size..).ok_or(RedoError::DataLength("tuples of an index page"))?;
                Ok::<usize, RedoError>(size)
            })
        })
    };
    let mut count = 0;
    for size in sizes() {
        size?;
        count += 1;
    }
    let lower = page.get().lower() + ITEM_ID_SIZE * count;
    let upper = match page.get().upper().checked_sub(data.len()) {
        Some(upper) if lower <= upper => upper,
        _ => return Err(RedoError::NoRoom(data.len())),
    };
    page.0[upper..upper + data.len()].copy_from_slice(data);
    let mut offset = upper;
    for (size, number) in sizes().flatten().zip((1..=count as OffsetNumber).rev()) {
        page.set_item_id(number, ItemId::normal(offset, size));
        offset += size;
    }
    page.set_lower(lower);
    page.set_upper(upper);
    Ok(())
}
