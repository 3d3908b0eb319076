//! What redo of passing heap pages tells free space maps, until their own pages have their turn: a byte for each heap page, at most.
//!
//! A map's pages come after all that tell them something, so that this is kept for the whole of a batch. Of a slot the last value counts.
//! In which order slots get theirs does not matter, but where something else happens to the map's page in between.

use rustc_hash::{FxHashMap, FxHashSet};
use walrider_layout::Lsn;
use walrider_redo::fsm;
use walrider_redo::{Change, Target};

use super::sweep::{Op, What};
use super::{FsmChange, FsmOp};
use crate::rels::PageKey;

/// What happens to pages of free space maps but for what heap pages tell them.
#[derive(Default)]
pub struct MapRecords {
    /// Of pages that records give every byte of, the end of the last of these.
    overwritten: FxHashMap<PageKey, Lsn>,
    /// Pages to which something else happens: all keeps its place in the WAL.
    ordered: FxHashSet<PageKey>,
}

impl MapRecords {
    /// Notes what the next operations, in the order of the WAL, do to them.
    pub fn note(&mut self, ops: &[Op]) {
        for op in ops {
            if matches!(op.what, What::Redo(_, Change::Overwrite(_))) {
                self.overwritten.insert(op.key, Lsn(op.order));
            } else {
                self.ordered.insert(op.key);
            }
        }
    }

    /// Whether anything happens to a page but that records give every byte of it.
    pub fn is_ordered(&self, key: PageKey) -> bool {
        self.ordered.contains(&key)
    }

    /// Whether a page is overwritten after the record that ends here, and nobody asks what it held in between.
    pub fn is_needless(&self, key: PageKey, end: Lsn) -> bool {
        !self.is_ordered(key) && self.overwritten.get(&key).is_some_and(|&last| end < last)
    }
}

/// What pages of free space maps were told.
#[derive(Default)]
pub struct Told {
    records: MapRecords,
    pages: FxHashMap<PageKey, Box<ToldPage>>,
    /// Of pages where the order matters.
    in_order: Vec<FsmOp>,
}

/// What a page was told.
#[derive(Default)]
pub struct ToldPage {
    /// Of each slot, up to the last that was told anything: most maps are of small tables.
    last: Vec<u8>,
    /// The slots that were told anything, a bit each.
    is_told: Vec<u64>,
    /// Whether any slot had a value at any time: with its first one a page is initialised.
    had_value: bool,
}

impl Told {
    /// Nothing yet, of pages to which these records do something.
    pub fn new(records: MapRecords) -> Told {
        Told { records, ..Told::default() }
    }

    /// Takes what is told, of each heap page in the order of the WAL.
    pub fn take(&mut self, told: Vec<FsmOp>) {
        for op in told {
            let FsmChange::Set { slot, category } = op.change else { unreachable!("only redo of heap pages tells") };
            if self.records.is_needless(op.key, op.lsn) {
                continue;
            }
            if self.records.is_ordered(op.key) {
                self.in_order.push(op);
                continue;
            }
            self.pages.entry(op.key).or_default().take(slot.into(), category);
        }
    }

    /// What records do to the pages; what must keep its order with that; and for all other pages what comes behind it.
    pub fn into_parts(self) -> (MapRecords, Vec<FsmOp>, impl Iterator<Item = Op>) {
        let pages = self.pages.into_iter().map(|(key, page)| Op { key, order: u64::MAX, what: What::Told(page) });
        (self.records, self.in_order, pages)
    }
}

impl ToldPage {
    fn take(&mut self, slot: usize, category: u8) {
        if self.last.len() <= slot {
            self.last.resize(slot + 1, 0);
            self.is_told.resize(slot / 64 + 1, 0);
        }
        self.last[slot] = category;
        self.is_told[slot / 64] |= 1 << (slot % 64);
        self.had_value |= category != 0;
    }

    /// Stores what slots were told last.
    pub fn record(&self, target: &mut Target<'_>) {
        if let Some((slot, _)) = self.values().next().filter(|_| self.had_value) {
            // Any value does.
            fsm::record_free_space(target, slot, 1);
        }
        self.values().for_each(|(slot, value)| fsm::record_free_space(target, slot, value));
    }

    fn values(&self) -> impl Iterator<Item = (u16, u8)> {
        let is_told = |slot: usize| self.is_told[slot / 64] >> (slot % 64) & 1 != 0;
        self.last.iter().enumerate().filter(move |&(slot, _)| is_told(slot)).map(|(slot, &last)| (slot as u16, last))
    }
}

#[cfg(test)]
mod tests;
