//! Redo of the heap (`access/heap/heapam_xlog.c`, PostgreSQL 18.6).

use walrider_layout::page::{ItemState, PD_ALL_VISIBLE, PageMut};
use walrider_layout::xid::precedes;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, TransactionId, maxalign};
use walrider_wal::record::{BlockRef, Record};
use walrider_wal::records::heap::*;

use crate::heap_tuple::{self, HeaderMut, MOVED_PARTITIONS, NewTuple, TUPLE_HEADER_SIZE, header_mut};
use crate::rmgr::Class;
use crate::{BlockRedo, FreeSpace, Outcome, RedoError, items, mask, vm};

/// Below this, the free space of a page that was inserted into is passed on to the free space map: a fifth of a page.
const LOW_FREE_SPACE: usize = BLCKSZ / 5;

/// Redoes one block (`heap_redo`).
///
/// # Errors
/// When record or page do not make sense.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info() & XLOG_HEAP_OPMASK, redo.block.id) {
        (XLOG_HEAP_INSERT, BLKREF_HEAP) => insert(redo),
        (XLOG_HEAP_DELETE, BLKREF_HEAP) => delete(redo),
        (XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE, UPDATE_BLKREF_HEAP_NEW) => update_new_page(redo),
        (XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE, UPDATE_BLKREF_HEAP_OLD) => update_old_page(redo),
        (XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE, UPDATE_BLKREF_VM_NEW) => update_vm(redo, true),
        (XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE, UPDATE_BLKREF_VM_OLD) => update_vm(redo, false),
        // What TRUNCATE does to files is in records of the storage manager.
        (XLOG_HEAP_TRUNCATE, _) => Ok(()),
        (XLOG_HEAP_CONFIRM, BLKREF_HEAP) => confirm(redo),
        (XLOG_HEAP_LOCK, BLKREF_HEAP) => lock(redo),
        (XLOG_HEAP_INSERT | XLOG_HEAP_DELETE | XLOG_HEAP_LOCK, BLKREF_VM) => clear_vm(redo),
        (XLOG_HEAP_INPLACE, BLKREF_HEAP) => inplace(redo),
        (_, id) => Err(RedoError::BlockReference(id)),
    }
}

/// What may differ between two pages (`heap_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>, block: BlockNumber) -> Result<(), RedoError> {
    mask::header_and_hole(page)?;
    for number in 1..=page.get().max_offset() {
        let Some(id) = page.get().item_id(number) else { break };
        let outside = RedoError::LinePointer(number);
        if id.state() == ItemState::Normal {
            let header = page.0.get_mut(id.offset()..).and_then(|tail| tail.first_chunk_mut());
            HeaderMut(header.ok_or(outside.clone())?).mask(block, number);
        }
        // Padding is whatever lay there before.
        let (end, padded) = (id.offset() + id.len(), id.offset() + maxalign(id.len()));
        if !id.is_empty() {
            page.0.get_mut(end..padded).ok_or(outside)?.fill(0);
        }
    }
    Ok(())
}

/// INPLACE carries invalidations, as commits do.
#[inline]
pub(crate) fn class(record: &Record<'_>) -> Class {
    if record.info() & XLOG_HEAP_OPMASK == XLOG_HEAP_INPLACE { Class::Global } else { Class::Pages }
}

/// A block that the record must refer to.
#[inline]
fn block_ref<'r>(redo: &BlockRedo<'r, '_>, id: u8) -> Result<&'r BlockRef<'r>, RedoError> {
    redo.record.block(id).ok_or(RedoError::BlockReference(id))
}

/// Whether the page, which the record may initialise, is to be changed; both places where it says so must agree
/// (`XLogReadBufferForRedoExtended`).
#[inline]
pub(crate) fn begin(redo: &mut BlockRedo<'_, '_>, initialises: bool) -> Result<bool, RedoError> {
    if !initialises {
        return redo.needs_redo();
    }
    match redo.outcome {
        Outcome::Restored if redo.block.will_init => Ok(false),
        _ => redo.init_page(0).map(|()| true),
    }
}

/// `PageClearAllVisible`.
#[inline]
pub(crate) fn clear_all_visible(page: &mut PageMut<'_>) {
    let flags = page.get().flags();
    page.set_flags(flags & !PD_ALL_VISIBLE);
}

/// `PageSetAllVisible`.
#[inline]
pub(crate) fn set_all_visible(page: &mut PageMut<'_>) {
    let flags = page.get().flags();
    page.set_flags(flags | PD_ALL_VISIBLE);
}

/// Notes the oldest transaction whose end makes it worth to prune the page (`PageSetPrunable`).
#[inline]
fn set_prunable(page: &mut PageMut<'_>, xid: TransactionId) {
    let oldest = page.get().prune_xid();
    if oldest == 0 || precedes(xid, oldest) {
        page.set_prune_xid(xid);
    }
}

/// Passes the page's free space on if it became low.
#[inline]
pub(crate) fn report_low_free_space(redo: &mut BlockRedo<'_, '_>) {
    let free_bytes = items::heap_free_space(redo.page.get());
    if free_bytes < LOW_FREE_SPACE {
        report_free_space(redo, free_bytes);
    }
}

/// Passes the page's free space on to the free space map (`XLogRecordPageWithFreeSpace`).
#[inline]
pub(crate) fn report_free_space(redo: &mut BlockRedo<'_, '_>, free_bytes: usize) {
    redo.effects.free_space = Some(FreeSpace { rel: redo.block.rel, block: redo.block.block, free_bytes });
}

/// Clears bits of the record's heap block on the registered page of the visibility map (`heap_xlog_vm_clear`, where
/// the page is registered; for where it is not, see [`vm::unregistered_clears`]).
pub(crate) fn clear_vm(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let heap_block = block_ref(redo, BLKREF_HEAP)?.block;
    let cleared = vm::cleared(redo.record).transpose()?.is_some();
    if cleared && redo.needs_redo()? && clear_on_vm_page(redo, heap_block)? {
        redo.changed();
    }
    Ok(())
}

/// Clears bits on the page of the visibility map being redone; whether one was set.
fn clear_on_vm_page(redo: &mut BlockRedo<'_, '_>, heap_block: BlockNumber) -> Result<bool, RedoError> {
    check_vm_page(redo, heap_block)?;
    Ok(vm::clear_bits(&mut redo.page, heap_block, vm::bits_cleared(redo.record)))
}

/// Whether the page being redone is that of the visibility map which has the bits of a heap block.
pub(crate) fn check_vm_page(redo: &BlockRedo<'_, '_>, heap_block: BlockNumber) -> Result<(), RedoError> {
    if redo.block.fork != ForkNumber::VisibilityMap || redo.block.block != vm::map_block(heap_block) {
        return Err(RedoError::CorruptRecord("visibility map page is not that of the heap block"));
    }
    Ok(())
}

/// `heap_xlog_insert`.
fn insert(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let record = redo.record;
    let insert = Insert::parse(record.main_data).ok_or(RedoError::DataLength("insert"))?;
    if !begin(redo, record.info() & XLOG_HEAP_INIT_PAGE != 0)? {
        return Ok(());
    }
    let (carried, data) = HeapHeader::split(redo.block.data).ok_or(RedoError::DataLength("inserted tuple"))?;
    let mut tuple = NewTuple::add(&mut redo.page, insert.number, TUPLE_HEADER_SIZE + data.len())?;
    tuple.header(&carried, record.xid(), 0, (redo.block.block, insert.number))?;
    tuple.push(data)?;
    if insert.flags & XLH_INSERT_ALL_VISIBLE_CLEARED != 0 {
        clear_all_visible(&mut redo.page);
    }
    redo.changed();
    report_low_free_space(redo);
    Ok(())
}

/// `heap_xlog_delete`.
fn delete(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let record = redo.record;
    let delete = Delete::parse(record.main_data).ok_or(RedoError::DataLength("delete"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let mut header = header_mut(&mut redo.page, delete.number)?;
    header.set_infobits(delete.infobits);
    header.set_hot_updated(false);
    if delete.flags & XLH_DELETE_IS_SUPER == 0 {
        header.set_xmax(delete.xmax);
    } else {
        header.set_xmin(0);
    }
    header.set_first_command();
    let moved = delete.flags & XLH_DELETE_IS_PARTITION_MOVE != 0;
    header.set_ctid(if moved { MOVED_PARTITIONS } else { (redo.block.block, delete.number) });
    set_prunable(&mut redo.page, record.xid());
    if delete.flags & XLH_DELETE_ALL_VISIBLE_CLEARED != 0 {
        clear_all_visible(&mut redo.page);
    }
    redo.changed();
    Ok(())
}

/// The page of the new tuple, and of the old one too unless the record refers to another (`heap_xlog_update`).
fn update_new_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let record = redo.record;
    let update = Update::parse(record.main_data).ok_or(RedoError::DataLength("update"))?;
    let same_page = match record.block(UPDATE_BLKREF_HEAP_OLD) {
        None => true,
        Some(old) => old.block == redo.block.block,
    };
    if !begin(redo, record.info() & XLOG_HEAP_INIT_PAGE != 0 && !same_page)? {
        return Ok(());
    }
    if same_page {
        update_old_tuple(redo, &update, redo.block.block)?;
    }
    add_updated_tuple(redo, &update, same_page)?;
    if update.flags & XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED != 0 {
        clear_all_visible(&mut redo.page);
    }
    redo.changed();
    // After a crash, either version of a HOT update is dead and soon pruned; the page then has as much free as before.
    if record.info() & XLOG_HEAP_OPMASK != XLOG_HEAP_HOT_UPDATE {
        report_low_free_space(redo);
    }
    Ok(())
}

/// The page of the old tuple, where that is not the new one's (`heap_xlog_update`).
fn update_old_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let update = Update::parse(redo.record.main_data).ok_or(RedoError::DataLength("update"))?;
    let new_block = block_ref(redo, UPDATE_BLKREF_HEAP_NEW)?.block;
    // Both references to one block: the old tuple was changed together with the new one.
    if !redo.needs_redo()? || new_block == redo.block.block {
        return Ok(());
    }
    update_old_tuple(redo, &update, new_block)?;
    redo.changed();
    Ok(())
}

/// Ends the life of the old tuple, and links it to its successor.
#[inline]
fn update_old_tuple(redo: &mut BlockRedo<'_, '_>, update: &Update, new_block: BlockNumber) -> Result<(), RedoError> {
    let mut header = header_mut(&mut redo.page, update.old_number)?;
    header.set_infobits(update.old_infobits);
    header.set_hot_updated(redo.record.info() & XLOG_HEAP_OPMASK == XLOG_HEAP_HOT_UPDATE);
    header.set_xmax(update.old_xmax);
    header.set_first_command();
    header.set_ctid((new_block, update.new_number));
    set_prunable(&mut redo.page, redo.record.xid());
    if update.flags & XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED != 0 {
        clear_all_visible(&mut redo.page);
    }
    Ok(())
}

/// Adds the new tuple, from the record and, where both are on one page, from the beginning and the end of the old
/// tuple's data.
#[inline]
fn add_updated_tuple(redo: &mut BlockRedo<'_, '_>, update: &Update, same_page: bool) -> Result<(), RedoError> {
    const SHORT: RedoError = RedoError::DataLength("updated tuple");
    const BEYOND_OLD: RedoError = RedoError::CorruptRecord("new tuple needs more bytes than the old one has");
    let mut data = redo.block.data;
    let mut take_len = |flag: u8| -> Result<usize, RedoError> {
        if update.flags & flag == 0 {
            return Ok(0);
        }
        let (len, rest) = data.split_first_chunk().ok_or(SHORT)?;
        data = rest;
        Ok(usize::from(u16::from_le_bytes(*len)))
    };
    let prefix_len = take_len(XLH_UPDATE_PREFIX_FROM_OLD)?;
    let suffix_len = take_len(XLH_UPDATE_SUFFIX_FROM_OLD)?;
    let (carried, data) = HeapHeader::split(data).ok_or(SHORT)?;
    let (mut prefix_at, mut suffix_at) = (0, 0);
    if prefix_len > 0 || suffix_len > 0 {
        if !same_page {
            return Err(RedoError::CorruptRecord("new tuple needs bytes of an old one on another page"));
        }
        let old = heap_tuple::tuple_at(redo.page.get(), update.old_number)?;
        prefix_at = old.start + heap_tuple::hoff(&redo.page.0[old.clone()]);
        suffix_at = old.end.checked_sub(suffix_len).filter(|at| *at >= old.start).ok_or(BEYOND_OLD)?;
        if prefix_len > 0 && prefix_at + prefix_len > old.end {
            return Err(BEYOND_OLD);
        }
    }
    let len = TUPLE_HEADER_SIZE + prefix_len + data.len() + suffix_len;
    let mut tuple = NewTuple::add(&mut redo.page, update.new_number, len)?;
    let ctid = (redo.block.block, update.new_number);
    tuple.header(&carried, redo.record.xid(), update.new_xmax, ctid)?;
    let mut data = data;
    if prefix_len > 0 {
        // The null bitmap and its padding are before the prefix, and always in the record.
        let bitmap_len = usize::from(carried.hoff).checked_sub(TUPLE_HEADER_SIZE).ok_or(SHORT)?;
        let (bitmap, rest) = data.split_at_checked(bitmap_len).ok_or(SHORT)?;
        tuple.push(bitmap)?;
        tuple.push_from_page(prefix_at, prefix_len)?;
        data = rest;
    }
    tuple.push(data)?;
    if suffix_len > 0 {
        tuple.push_from_page(suffix_at, suffix_len)?;
    }
    Ok(())
}

/// The visibility map page of the new tuple's page or of the old one's; where the old one's bits are on that of the new one
/// too, it stands for both (`heap_xlog_update`).
fn update_vm(redo: &mut BlockRedo<'_, '_>, of_new: bool) -> Result<(), RedoError> {
    let Some(flags) = vm::cleared(redo.record).transpose()? else { return Ok(()) };
    if !redo.needs_redo()? {
        return Ok(());
    }
    let new = block_ref(redo, UPDATE_BLKREF_HEAP_NEW)?;
    let old = redo.record.block(UPDATE_BLKREF_HEAP_OLD).unwrap_or(new);
    let mut changed = of_new && clear_on_vm_page(redo, new.block)?;
    // That no page is registered for the old bits does not mean that they are here: they may be on another page and
    // have been clear.
    let both = flags & XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED != 0 && vm::map_block(old.block) == redo.block.block;
    if both || !of_new {
        changed |= clear_on_vm_page(redo, old.block)?;
    }
    if changed {
        redo.changed();
    }
    Ok(())
}

/// `heap_xlog_confirm`.
fn confirm(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let confirm = Confirm::parse(redo.record.main_data).ok_or(RedoError::DataLength("confirm"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let own_ctid = (redo.block.block, confirm.number);
    header_mut(&mut redo.page, confirm.number)?.set_ctid(own_ctid);
    redo.changed();
    Ok(())
}

/// `heap_xlog_lock`.
fn lock(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let lock = Lock::parse(redo.record.main_data).ok_or(RedoError::DataLength("lock"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let mut header: HeaderMut<'_> = header_mut(&mut redo.page, lock.number)?;
    header.set_infobits(lock.infobits);
    // Where nobody updates the tuple, there is no next version.
    if header.xmax_only_locks() {
        header.set_hot_updated(false);
        header.set_ctid((redo.block.block, lock.number));
    }
    header.set_xmax(lock.xmax);
    header.set_first_command();
    redo.changed();
    Ok(())
}

/// `heap_xlog_inplace`, as far as the page goes; the invalidations mean nothing to a directory without a server.
fn inplace(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let inplace = Inplace::parse(redo.record.major, redo.record.main_data).ok_or(RedoError::DataLength("inplace"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let data = redo.block.data;
    let tuple = heap_tuple::tuple_mut(&mut redo.page, inplace.number)?;
    let old_data = heap_tuple::hoff(tuple);
    match tuple.get_mut(old_data..) {
        Some(old) if old.len() == data.len() => old.copy_from_slice(data),
        _ => return Err(RedoError::CorruptRecord("tuple to be overwritten has another length")),
    }
    redo.changed();
    Ok(())
}

#[cfg(test)]
mod tests;
