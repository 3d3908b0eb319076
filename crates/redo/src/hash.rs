//! Redo of hash indexes (`access/hash/hash_xlog.c`, PostgreSQL 18; the same in 17).
//!
//! PostgreSQL redoes all pages of a record in one go. Nothing that it does to one of them depends on what another one
//! holds: links are block numbers and buckets, which the record has, and the metapage's counts follow from the record
//! and the metapage alone. So each page is redone alone here. Block 0 of MOVE_PAGE_CONTENTS, SQUEEZE_PAGE and DELETE,
//! the bucket's first page, is in the record only to be locked, and stays as it is: see [`crate::rmgr::Touch`].

mod page;

use walrider_layout::bytes::Reader;
use walrider_layout::page::PageMut;
use walrider_layout::{OffsetNumber, maxalign};
use walrider_wal::record::{BlockRef, Record};
use walrider_wal::records::hash::*;
use walrider_wal::records::parts::Items;

use crate::index_tuple::tuple_size;
use crate::items::{add_index_item, index_multi_delete};
use crate::rmgr::Touch;
use crate::special::Special;
use crate::{BlockRedo, Outcome, RedoError, mask};
pub use page::HASHO_PAGE_ID;
use page::{
    INVALID, LH_BITMAP_PAGE, LH_BUCKET_NEEDS_SPLIT_CLEANUP, LH_BUCKET_PAGE, LH_META_PAGE, LH_OVERFLOW_PAGE,
    LH_PAGE_HAS_DEAD_TUPLES, LH_PAGE_TYPE, LH_UNUSED_PAGE, Meta, Opaque,
};

const SHORT: RedoError = RedoError::DataLength("hash index record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info(), redo.block.id) {
        (XLOG_HASH_INIT_META_PAGE, 0) => init_meta_page(redo),
        (XLOG_HASH_INIT_BITMAP_PAGE, 0) => {
            let InitBitmapPage { bmsize } = InitBitmapPage::parse(redo.record.main_data).ok_or(SHORT)?;
            init_bitmap_page(redo, bmsize)
        }
        (XLOG_HASH_INIT_BITMAP_PAGE, 1) => add_first_bitmap_page(redo),
        (XLOG_HASH_INSERT, 0) => insert(redo),
        (XLOG_HASH_INSERT, 1) => change_meta(redo, |meta| {
            meta.set_ntuples(meta.ntuples() + 1.0);
            Ok(())
        }),
        (XLOG_HASH_ADD_OVFL_PAGE, id @ 0..=4) => add_ovfl_page(redo, id),
        (XLOG_HASH_SPLIT_ALLOCATE_PAGE, id @ 0..=2) => split_allocate_page(redo, id),
        (XLOG_HASH_SPLIT_PAGE, 0) => match redo.outcome {
            Outcome::Restored => Ok(()),
            _ => Err(RedoError::CorruptRecord("split page of a hash index without a full-page image")),
        },
        (XLOG_HASH_SPLIT_COMPLETE, id @ 0..=1) => {
            let split = SplitComplete::parse(redo.record.main_data).ok_or(SHORT)?;
            let flag = if id == 0 { split.old_bucket_flag } else { split.new_bucket_flag };
            change_bucket(redo, |opaque| opaque.flag = flag)
        }
        (_, 0) if names_bucket(redo.record, redo.block) => redo.needs_redo().map(drop),
        (XLOG_HASH_MOVE_PAGE_CONTENTS, 1) => move_to_page(redo),
        (XLOG_HASH_MOVE_PAGE_CONTENTS, 2) => delete_tuples(redo, false),
        (XLOG_HASH_SQUEEZE_PAGE, id @ 1..=6) => squeeze_page(redo, id),
        (XLOG_HASH_DELETE, 1) => {
            let delete = Delete::parse(redo.record.main_data).ok_or(SHORT)?;
            delete_tuples(redo, delete.clear_dead_marking)
        }
        (XLOG_HASH_SPLIT_CLEANUP, 0) => {
            redo.change_special(|opaque: &mut Opaque| opaque.flag &= !LH_BUCKET_NEEDS_SPLIT_CLEANUP)
        }
        (XLOG_HASH_UPDATE_META_PAGE, 0) => {
            let UpdateMetaPage { ntuples } = UpdateMetaPage::parse(redo.record.main_data).ok_or(SHORT)?;
            change_meta(redo, |meta| {
                meta.set_ntuples(ntuples);
                Ok(())
            })
        }
        (XLOG_HASH_VACUUM_ONE_PAGE, id @ 0..=1) => vacuum_one_page(redo, id),
        (info, id) if identify(info).is_some() => Err(RedoError::BlockReference(id)),
        (info, _) => Err(RedoError::UnknownType(info)),
    }
}

/// What may differ between two pages (`hash_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header_and_hole(page)?;
    let mut opaque = Opaque::of(page.get())?;
    match opaque.flag & LH_PAGE_TYPE {
        LH_UNUSED_PAGE => mask::content(page),
        LH_OVERFLOW_PAGE | LH_BUCKET_PAGE => mask::lp_flags(page),
        _ => {}
    }
    opaque.flag &= !LH_PAGE_HAS_DEAD_TUPLES;
    opaque.put(page);
    Ok(())
}

/// The first page of a bucket of which another page is changed is only locked, unless its image is to be restored, or compared
/// with.
///
/// These are the pages that PostgreSQL registers with `REGBUF_NO_IMAGE` and `REGBUF_NO_CHANGE` (`access/hash/hash.c`,
/// `hashovfl.c`, PostgreSQL 18; the same in 17). No other record does that with page checksums; without them, nobody verifies
/// the heap page of `XLOG_HEAP2_VISIBLE`. An image may be there for `wal_consistency_checking`, which looks at the page.
#[inline]
pub(crate) fn touch(record: &Record<'_>, block: &BlockRef<'_>) -> Touch {
    if block.image.is_none() && names_bucket(record, block) { Touch::Lock } else { Touch::Change }
}

/// Whether the block is the first page of a bucket of which another page is changed.
#[inline]
fn names_bucket(record: &Record<'_>, block: &BlockRef<'_>) -> bool {
    block.id == 0 && matches!(record.info(), XLOG_HASH_MOVE_PAGE_CONTENTS | XLOG_HASH_SQUEEZE_PAGE | XLOG_HASH_DELETE)
}

/// Initialises a page (`XLogInitBufferForRedo`, `_hash_initbuf`).
fn init_page(redo: &mut BlockRedo<'_, '_>, opaque: Opaque) -> Result<(), RedoError> {
    redo.init_with(&opaque)?;
    redo.changed();
    Ok(())
}

/// The special space of a bucket's first page in a split: PostgreSQL changes it also if the page was just restored from its
/// image.
fn change_bucket(redo: &mut BlockRedo<'_, '_>, change: impl FnOnce(&mut Opaque)) -> Result<(), RedoError> {
    if redo.needs_redo()? || redo.outcome == Outcome::Restored { redo.changed_special(change) } else { Ok(()) }
}

/// Changes the existing metapage.
fn change_meta(
    redo: &mut BlockRedo<'_, '_>,
    change: impl FnOnce(&mut Meta<'_>) -> Result<(), RedoError>,
) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        change(&mut Meta::of(&mut redo.page))?;
        redo.changed();
    }
    Ok(())
}

/// Block data that is a number. There is none where the record has an image of the page.
fn number(data: &[u8]) -> Result<u32, RedoError> {
    Reader::new(data).u32().ok_or(SHORT)
}

/// Block 0 of INIT_META_PAGE (`hash_xlog_init_meta_page`).
fn init_meta_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let init = InitMetaPage::parse(redo.record.main_data).ok_or(SHORT)?;
    init_page(redo, Opaque::unchained(LH_META_PAGE))?;
    page::put_meta(&mut redo.page, &init);
    Ok(())
}

/// A new bitmap page (`_hash_initbitmapbuffer`).
fn init_bitmap_page(redo: &mut BlockRedo<'_, '_>, bmsize: u16) -> Result<(), RedoError> {
    init_page(redo, Opaque::unchained(LH_BITMAP_PAGE))?;
    page::put_bitmap(&mut redo.page, bmsize)
}

/// Block 1 of INIT_BITMAP_PAGE: the bitmap page is the one behind the buckets, which are behind the metapage
/// (`hash_xlog_init_bitmap_page`).
fn add_first_bitmap_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    change_meta(redo, |meta| meta.add_bitmap(meta.maxbucket().wrapping_add(2)))
}

/// Block 0 of INSERT (`hash_xlog_insert`).
fn insert(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Insert { offset } = Insert::parse(redo.record.main_data).ok_or(SHORT)?;
        add_index_item(&mut redo.page, redo.block.data, offset)?;
        redo.changed();
    }
    Ok(())
}

/// ADD_OVFL_PAGE (`hash_xlog_add_ovfl_page`).
fn add_ovfl_page(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let AddOvflPage { bmsize, bmpage_found } = AddOvflPage::parse(redo.record.main_data).ok_or(SHORT)?;
    match id {
        0 => {
            let (prevblkno, bucket) = (redo.block_number(1)?, number(redo.block.data)?);
            init_page(redo, Opaque { prevblkno, nextblkno: INVALID, bucket, flag: LH_OVERFLOW_PAGE })
        }
        1 => {
            let nextblkno = redo.block_number(0)?;
            redo.change_special(|opaque: &mut Opaque| opaque.nextblkno = nextblkno)
        }
        2 => change_bit(redo, true),
        3 => init_bitmap_page(redo, bmsize),
        _ => {
            let (data, new_bitmap_page) = (redo.block.data, redo.block_number(3).ok());
            change_meta(redo, |meta| {
                meta.set_firstfree(number(data)?);
                if !bmpage_found {
                    meta.add_spare()?;
                    if let Some(block) = new_bitmap_page {
                        meta.add_bitmap(block)?;
                        meta.add_spare()?;
                    }
                }
                Ok(())
            })
        }
    }
}

/// The block data tells a bit of the bitmap page.
fn change_bit(redo: &mut BlockRedo<'_, '_>, in_use: bool) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        page::set_bit(&mut redo.page, number(redo.block.data)?, in_use)?;
        redo.changed();
    }
    Ok(())
}

/// SPLIT_ALLOCATE_PAGE (`hash_xlog_split_allocate_page`).
fn split_allocate_page(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let split = SplitAllocatePage::parse(redo.record.main_data).ok_or(SHORT)?;
    let new_bucket = split.new_bucket;
    match id {
        0 => change_bucket(redo, |opaque| {
            opaque.flag = split.old_bucket_flag;
            opaque.prevblkno = new_bucket;
        }),
        1 => {
            let flag = split.new_bucket_flag;
            init_page(redo, Opaque { prevblkno: new_bucket, nextblkno: INVALID, bucket: new_bucket, flag })
        }
        _ => {
            let mut data = Reader::new(redo.block.data);
            change_meta(redo, |meta| {
                meta.set_maxbucket(new_bucket);
                if split.flags & XLH_SPLIT_META_UPDATE_MASKS != 0 {
                    meta.set_masks(data.u32().ok_or(SHORT)?, data.u32().ok_or(SHORT)?);
                }
                if split.flags & XLH_SPLIT_META_UPDATE_SPLITPOINT != 0 {
                    meta.set_splitpoint(data.u32().ok_or(SHORT)?, data.u32().ok_or(SHORT)?)?;
                }
                Ok(())
            })
        }
    }
}

/// Block 1 of MOVE_PAGE_CONTENTS (`hash_xlog_move_page_contents`).
fn move_to_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let MovePageContents { ntups, .. } = MovePageContents::parse(redo.record.main_data).ok_or(SHORT)?;
        add_tuples(redo, ntups)?;
        redo.changed();
    }
    Ok(())
}

/// Adds the tuples of the block data, which come behind the line pointer numbers that they get.
fn add_tuples(redo: &mut BlockRedo<'_, '_>, ntups: u16) -> Result<(), RedoError> {
    let mut data = Reader::new(redo.block.data);
    let offsets = Items::<OffsetNumber>::take(&mut data, ntups.into()).ok_or(SHORT)?;
    for offset in offsets.iter() {
        let len = maxalign(tuple_size(data.rest())?);
        add_index_item(&mut redo.page, data.take(len).ok_or(SHORT)?, offset)?;
    }
    if data.rest().is_empty() { Ok(()) } else { Err(RedoError::DataLength("moved tuples of a hash index")) }
}

/// The tuples whose line pointers the block data lists go.
fn delete_tuples(redo: &mut BlockRedo<'_, '_>, clear_dead_marking: bool) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let data = redo.block.data;
        let offsets = Items::<OffsetNumber>::take(&mut Reader::new(data), data.len() as i32 / 2).ok_or(SHORT)?;
        delete(redo, offsets, clear_dead_marking)?;
    }
    Ok(())
}

fn delete(
    redo: &mut BlockRedo<'_, '_>,
    offsets: Items<'_, OffsetNumber>,
    clear_dead_marking: bool,
) -> Result<(), RedoError> {
    index_multi_delete(&mut redo.page, offsets.iter())?;
    redo.changed_special(|opaque: &mut Opaque| {
        if clear_dead_marking {
            opaque.flag &= !LH_PAGE_HAS_DEAD_TUPLES;
        }
    })
}

/// SQUEEZE_PAGE, but for the bucket's first page (`hash_xlog_squeeze_page`).
fn squeeze_page(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let squeeze = SqueezePage::parse(redo.record.main_data).ok_or(SHORT)?;
    match id {
        1 => squeeze_into(redo, &squeeze),
        2 => {
            if redo.needs_redo()? {
                redo.page.init(Opaque::SIZE);
                Opaque::unchained(LH_UNUSED_PAGE).put(&mut redo.page);
                redo.changed();
            }
            Ok(())
        }
        // The page before was changed as block 1.
        3 if squeeze.is_prev_bucket_same_wrt => Err(RedoError::BlockReference(3)),
        3 => redo.change_special(|opaque: &mut Opaque| opaque.nextblkno = squeeze.nextblkno),
        4 => redo.change_special(|opaque: &mut Opaque| opaque.prevblkno = squeeze.prevblkno),
        5 => change_bit(redo, false),
        _ => {
            let data = redo.block.data;
            change_meta(redo, |meta| {
                meta.set_firstfree(number(data)?);
                Ok(())
            })
        }
    }
}

/// The page that gets the freed page's tuples. Without any, and if the freed page is not the next one, it is in the
/// record only to be locked, and does not get the record's LSN either.
fn squeeze_into(redo: &mut BlockRedo<'_, '_>, squeeze: &SqueezePage) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        if squeeze.ntups > 0 {
            add_tuples(redo, squeeze.ntups)?;
            redo.changed();
        }
        if squeeze.is_prev_bucket_same_wrt {
            redo.changed_special(|opaque: &mut Opaque| opaque.nextblkno = squeeze.nextblkno)?;
        }
    }
    Ok(())
}

/// VACUUM_ONE_PAGE (`hash_xlog_vacuum_one_page`).
fn vacuum_one_page(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let vacuum = VacuumOnePage::parse(redo.record.main_data).ok_or(SHORT)?;
    if id == 1 {
        return change_meta(redo, |meta| {
            meta.set_ntuples(meta.ntuples() - f64::from(vacuum.ntuples));
            Ok(())
        });
    }
    if redo.needs_redo()? {
        delete(redo, vacuum.offsets().ok_or(SHORT)?, true)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
