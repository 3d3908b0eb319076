//! Redo of the heap's second resource manager (`access/heap/heapam_xlog.c`, PostgreSQL 18.6).

use walrider_layout::ForkNumber;
use walrider_layout::OffsetNumber;
use walrider_layout::page::{ItemId, PageMut};
use walrider_wal::record::{BlockRef, Record};
use walrider_wal::records::heap::{
    BLKREF_HEAP, BLKREF_VM, HeapHeader, Lock, XLH_INSERT_ALL_FROZEN_SET, XLH_INSERT_ALL_VISIBLE_CLEARED,
    XLOG_HEAP_INIT_PAGE, XLOG_HEAP_OPMASK,
};
use walrider_wal::records::heap2::*;

use crate::heap::{
    begin, check_vm_page, clear_all_visible, clear_vm, report_free_space, report_low_free_space, set_all_visible,
};
use crate::heap_tuple::{NewTuple, TUPLE_HEADER_SIZE, header_mut};
use crate::rmgr::{Class, Touch};
use crate::{BlockRedo, Outcome, RedoError, items, vm};

/// Redoes one block (`heap2_redo`).
///
/// # Errors
/// When record or page do not make sense.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info() & XLOG_HEAP_OPMASK, redo.block.id) {
        (XLOG_HEAP2_PRUNE_ON_ACCESS | XLOG_HEAP2_PRUNE_VACUUM_SCAN | XLOG_HEAP2_PRUNE_VACUUM_CLEANUP, BLKREF_HEAP) => {
            prune(redo)
        }
        (XLOG_HEAP2_VISIBLE, VISIBLE_BLKREF_VM) => visible_vm(redo),
        (XLOG_HEAP2_VISIBLE, VISIBLE_BLKREF_HEAP) => visible_heap(redo),
        (XLOG_HEAP2_MULTI_INSERT, BLKREF_HEAP) => multi_insert(redo),
        (XLOG_HEAP2_LOCK_UPDATED, BLKREF_HEAP) => lock_updated(redo),
        (XLOG_HEAP2_MULTI_INSERT | XLOG_HEAP2_LOCK_UPDATED, BLKREF_VM) => clear_vm(redo),
        // Both serve logical decoding; what REWRITE writes is no page.
        (XLOG_HEAP2_NEW_CID | XLOG_HEAP2_REWRITE, _) => Ok(()),
        (_, id) => Err(RedoError::BlockReference(id)),
    }
}

/// What REWRITE writes is no page.
#[inline]
pub(crate) fn class(record: &Record<'_>) -> Class {
    if record.info() & XLOG_HEAP_OPMASK == XLOG_HEAP2_REWRITE { Class::Global } else { Class::Pages }
}

/// VISIBLE makes the page of the visibility map where it has to (`heap_xlog_visible`).
#[inline]
pub(crate) fn touch(record: &Record<'_>, block: &BlockRef<'_>) -> Touch {
    let creates = block.fork == ForkNumber::VisibilityMap
        && record.info() & XLOG_HEAP_OPMASK == XLOG_HEAP2_VISIBLE
        && block.id == VISIBLE_BLKREF_VM;
    if creates { Touch::ChangeOrCreate } else { Touch::Change }
}

/// `heap_xlog_prune_freeze`.
fn prune(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let prune = Prune::parse(redo.record.main_data).ok_or(RedoError::DataLength("prune"))?;
    if redo.needs_redo()? {
        let items = PruneItems::parse(redo.block.data, prune.flags).ok_or(RedoError::DataLength("prune items"))?;
        prune_items(&mut redo.page, &items, prune.flags & XLHP_CLEANUP_LOCK == 0)?;
        freeze(&mut redo.page, &items)?;
        redo.changed();
    }
    // The free space map is not part of an image, and may lag behind a page that was newer already.
    if redo.outcome != Outcome::NotFound && prune.changes_items() {
        let free_bytes = items::heap_free_space(redo.page.get());
        report_free_space(redo, free_bytes);
    }
    Ok(())
}

/// Changes line pointers, and gives back what that frees; without moving tuples where others may be reading them
/// (`heap_page_prune_execute`, `access/heap/pruneheap.c`).
fn prune_items(page: &mut PageMut<'_>, items: &PruneItems<'_>, truncate_only: bool) -> Result<(), RedoError> {
    if items.redirected.is_empty() && items.dead.is_empty() && items.unused.is_empty() {
        return Ok(());
    }
    // Checked once: then a number is a line pointer if it is not greater than that of the last one.
    let count = page.get().max_offset();
    let mut set = |number: OffsetNumber, id: ItemId| {
        if number == 0 || number > count {
            return Err(RedoError::LinePointer(number));
        }
        page.set_item_id(number, id);
        Ok(())
    };
    for redirection in items.redirected {
        let (from, to) = pair(redirection);
        set(from, ItemId::redirect(to))?;
    }
    for number in items.dead {
        set(u16::from_le_bytes(*number), ItemId::DEAD)?;
    }
    for number in items.unused {
        set(u16::from_le_bytes(*number), ItemId::UNUSED)?;
    }
    if truncate_only {
        items::truncate_line_pointers(page);
        Ok(())
    } else {
        items::repair_fragmentation(page)
    }
}

/// Replaces the headers of frozen tuples (`heap_execute_freeze_tuple`, `access/heapam.h`).
fn freeze(page: &mut PageMut<'_>, items: &PruneItems<'_>) -> Result<(), RedoError> {
    const COUNT: RedoError = RedoError::DataLength("tuples of freeze plans");
    const FROZEN_TRANSACTION_ID: u32 = 2;
    let mut numbers = items.freeze;
    for plan in items.plans {
        let plan = FreezePlan::read(plan);
        let (of_plan, rest) = numbers.split_at_checked(plan.tuples.into()).ok_or(COUNT)?;
        numbers = rest;
        for number in of_plan {
            let mut header = header_mut(page, u16::from_le_bytes(*number))?;
            header.set_xmax(plan.xmax);
            if plan.flags & XLH_FREEZE_XVAC != 0 {
                header.set_xvac(FROZEN_TRANSACTION_ID);
            }
            if plan.flags & XLH_INVALID_XVAC != 0 {
                header.set_xvac(0);
            }
            header.set_infomask(plan.infomask);
            header.set_infomask2(plan.infomask2);
        }
    }
    if numbers.is_empty() { Ok(()) } else { Err(COUNT) }
}

/// The heap page of `heap_xlog_visible`.
fn visible_heap(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let visible = Visible::parse(redo.record.main_data).ok_or(RedoError::DataLength("visible"))?;
    if redo.needs_redo()? {
        set_all_visible(&mut redo.page);
        // Where no image protects hint bits, the page has no image in this record either, and keeps its LSN.
        if redo.env.hint_bits_are_logged {
            redo.page.set_lsn(redo.record.end);
        }
        redo.dirty = true;
    }
    // VACUUM will skip the page from now on, and with it correcting the free space map.
    if redo.outcome != Outcome::NotFound && visible.flags & vm::VALID_BITS != 0 {
        let free_bytes = items::free_space(redo.page.get());
        report_free_space(redo, free_bytes);
    }
    Ok(())
}

/// The page of the visibility map of `heap_xlog_visible`; a page that does not exist or is new comes into being.
fn visible_vm(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let visible = Visible::parse(redo.record.main_data).ok_or(RedoError::DataLength("visible"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let heap = redo.record.block(VISIBLE_BLKREF_HEAP).ok_or(RedoError::BlockReference(VISIBLE_BLKREF_HEAP))?;
    check_vm_page(redo, heap.block)?;
    let bits = visible.flags & vm::VALID_BITS;
    if redo.page.get().is_new() {
        // PostgreSQL initialises the page in any case, but writes it only if a bit changes.
        if bits == 0 {
            return Ok(());
        }
        redo.page.init(0);
    }
    if vm::set_bits(&mut redo.page, heap.block, bits) {
        redo.changed();
    }
    Ok(())
}

/// `heap_xlog_multi_insert`.
fn multi_insert(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    const LENGTH: RedoError = RedoError::DataLength("multi-insert");
    let record = redo.record;
    let initialises = record.info() & XLOG_HEAP_INIT_PAGE != 0;
    let insert = MultiInsert::parse(record.main_data, initialises).ok_or(LENGTH)?;
    if !begin(redo, initialises)? {
        return Ok(());
    }
    let data = redo.block.data;
    let mut at = 0;
    for i in 0..insert.tuples {
        let number = match insert.numbers.get(usize::from(i)) {
            Some(number) => u16::from_le_bytes(*number),
            // A page just initialised is filled from the front; more tuples than fit are an error below.
            None => i.saturating_add(1),
        };
        let (inserted, end) = MultiInsertTuple::read(data, at).ok_or(LENGTH)?;
        at = end;
        let carried = HeapHeader { infomask2: inserted.infomask2, infomask: inserted.infomask, hoff: inserted.hoff };
        let mut tuple = NewTuple::add(&mut redo.page, number, TUPLE_HEADER_SIZE + inserted.data.len())?;
        tuple.header(&carried, record.xid(), 0, (redo.block.block, number))?;
        tuple.push(inserted.data)?;
    }
    if at != data.len() {
        return Err(LENGTH);
    }
    if insert.flags & XLH_INSERT_ALL_VISIBLE_CLEARED != 0 {
        clear_all_visible(&mut redo.page);
    }
    if insert.flags & XLH_INSERT_ALL_FROZEN_SET != 0 {
        set_all_visible(&mut redo.page);
    }
    redo.changed();
    report_low_free_space(redo);
    Ok(())
}

/// `heap_xlog_lock_updated`.
fn lock_updated(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let lock = Lock::parse(redo.record.main_data).ok_or(RedoError::DataLength("lock updated"))?;
    if !redo.needs_redo()? {
        return Ok(());
    }
    let mut header = header_mut(&mut redo.page, lock.number)?;
    header.set_infobits(lock.infobits);
    header.set_xmax(lock.xmax);
    redo.changed();
    Ok(())
}
