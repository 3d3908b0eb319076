//! From arbitrary bytes to records and pages, and through redo. Shared with the targets under `fuzz/`.
#![allow(dead_code, reason = "each user takes what it needs")]

use walrider_layout::bytes::{put_u16, put_u32, put_u64};
use walrider_layout::page::{ItemId, ItemState, PageMut};
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major, PageBytes};
use walrider_redo::items::{AtExisting, ItemsOf, add_item};
use walrider_redo::{Effects, Env, Outcome, RedoError, Target, mask, redo_block, vm};
use walrider_wal::image;
use walrider_wal::record::{Image, Record};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

/// A block reference of a case.
#[derive(Clone, Debug)]
pub struct Block {
    pub id: u8,
    pub fork: ForkNumber,
    pub number: u32,
    pub will_init: bool,
    pub data: Vec<u8>,
}

/// A record, in parts, and the page on which each of its blocks is redone.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: &'static str,
    pub rmgr: RmgrId,
    pub info: u8,
    pub main: Vec<u8>,
    pub blocks: Vec<Block>,
    pub page: Box<PageBytes>,
}

impl Case {
    /// The record's bytes.
    pub fn record(&self) -> Vec<u8> {
        let mut builder = RecordBuilder::new(self.rmgr, self.info).xid(740).main_data(&self.main);
        for block in &self.blocks {
            builder = builder.block(block.id, TEST_REL, block.fork, block.number).data(&block.data);
            if block.will_init {
                builder = builder.will_init();
            }
        }
        builder.build()
    }

    /// Redoes every block of the record, each on the page as it was.
    pub fn run(&self) -> Vec<(u8, Result<Outcome, RedoError>)> {
        let bytes = self.record();
        match Record::parse(Major::V18, &bytes, Lsn(0x0100_0028), Lsn(0x0200_0000)) {
            Ok(record) => redo_all(&record, &self.page),
            Err(_) => Vec::new(),
        }
    }
}

/// Redoes every block of a record, describes and masks.
fn redo_all(record: &Record<'_>, page: &PageBytes) -> Vec<(u8, Result<Outcome, RedoError>)> {
    let env = Env { major: record.major, hint_bits_are_logged: record.lsn.0 & 8 != 0 };
    if let Some(rmgr) = record.header.rmgr.get() {
        (rmgr.describe)(record, &mut String::new());
        let _ = (rmgr.identify)(record.info());
    }
    if let Ok(clears) = vm::unregistered_clears(record) {
        for clear in &clears {
            let mut bytes = *page;
            vm::clear_unregistered(&mut Target { bytes: &mut bytes, exists: true, dirty: false }, clear);
        }
    }
    let redo_one = |block| {
        let mut bytes = *page;
        let mut target = Target { bytes: &mut bytes, exists: true, dirty: false };
        let result = redo_block(record, block, &mut target, &env, &mut Effects::default());
        let _ = mask::check_image(record, block, &bytes);
        mask::mask_page(record.header.rmgr, &mut bytes, block.block);
        let _ = mask::first_difference(&bytes, page);
        result
    };
    record.blocks.iter().map(|block| (block.id, redo_one(block))).collect()
}

/// Takes any bytes as a record, of one major or the other, and redoes it on an empty page.
pub fn record(bytes: &[u8]) {
    let major = Major::ALL[bytes.len() % Major::ALL.len()];
    let Ok(record) = Record::parse(major, bytes, Lsn(0x0100_0028), Lsn(0x0200_0000)) else { return };
    let mut page = [0; BLCKSZ];
    PageMut(&mut page).init(16);
    redo_all(&record, &page);
}

/// Takes any bytes as a full-page image.
pub fn image(bytes: &[u8]) {
    let mut input = Input(bytes);
    let image =
        Image { info: input.byte(), hole_offset: input.number(), hole_len: input.number(), bytes: input.rest() };
    let _ = image::restore(&image, &mut [0; BLCKSZ]);
}

/// Builds a record and a page out of any bytes, and redoes.
pub fn redo(bytes: &[u8]) {
    let mut input = Input(bytes);
    let rmgrs = [9, 0, 10, 11, 11, 12, 13, 14, 15, 16, 17, 20].map(RmgrId);
    let rmgr = match input.byte() {
        byte @ 0..=249 => rmgrs[usize::from(byte) % rmgrs.len()],
        _ => RmgrId(input.byte()),
    };
    let info = input.byte();
    let page = page(&mut input, rmgr);
    let main = data(&mut input);
    let mut blocks: Vec<Block> = Vec::new();
    for _ in 0..=input.byte() % 4 {
        let flags = input.byte();
        let id = match blocks.last() {
            Some(previous) => previous.id + 1 + (flags >> 7),
            None => flags >> 6 & 1,
        };
        let fork = if flags & 0x30 == 0x30 { ForkNumber::VisibilityMap } else { ForkNumber::Main };
        let number = input.number().into();
        blocks.push(Block { id, fork, number, will_init: flags & 1 != 0, data: data(&mut input) });
    }
    Case { name: "", rmgr, info, main, blocks, page }.run();
}

/// Data of a record: numbers that could be line pointers or lengths, index tuples, or bytes.
fn data(input: &mut Input<'_>) -> Vec<u8> {
    let mut data = Vec::new();
    for _ in 0..input.byte() % 16 {
        match input.byte() % 6 {
            0 => data.push(input.byte()),
            1 | 2 => data.extend(input.number().to_le_bytes()),
            3 => data.extend(u32::from(input.number()).to_le_bytes()),
            4 => data.extend(index_tuple(input)),
            _ => {
                let len = usize::from(input.byte() % 64);
                data.extend(input.take(len));
            }
        }
    }
    data
}

/// An index tuple, perhaps with a posting list that more or less fits.
fn index_tuple(input: &mut Input<'_>) -> Vec<u8> {
    let size = 8 * (1 + usize::from(input.byte() % 16));
    let mut tuple = vec![input.byte(); size];
    let flags = input.byte();
    let stated = if flags & 0x0F == 0 { input.number() } else { size as u16 };
    put_u16(&mut tuple, 6, stated & 0x1FFF | u16::from(flags & 0x80) << 6);
    put_u16(&mut tuple, 0, if flags & 0x70 == 0 { input.number() } else { 0 });
    put_u16(&mut tuple, 2, u16::from(input.byte() % 32) * 4);
    put_u16(&mut tuple, 4, input.number() & 0x1FFF | 0x2000);
    tuple
}

/// A page, more or less in order.
fn page(input: &mut Input<'_>, rmgr: RmgrId) -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let kind = input.byte();
    if kind < 8 {
        return bytes;
    }
    if kind < 16 {
        let fill = [input.byte(), input.byte(), input.byte()];
        bytes.iter_mut().zip(fill.iter().cycle()).for_each(|(byte, fill)| *byte = *fill);
        return bytes;
    }
    let mut page = PageMut(&mut bytes);
    let special = match rmgr {
        RmgrId::BTREE | RmgrId::GIST | RmgrId::HASH => 16,
        RmgrId::SEQ | RmgrId::GIN | RmgrId::SPGIST | RmgrId::BRIN => 8,
        _ => 0,
    };
    page.init(if kind < 32 { usize::from(input.byte()) } else { special });
    for _ in 0..input.byte() % 24 {
        let mut item = index_tuple(input);
        item.extend([kind; 20]);
        let len = item.len() - usize::from(input.byte() % 28);
        let _ = add_item(&mut page, &item[..len], 0, AtExisting::Overwrite, ItemsOf::Index);
    }
    if rmgr == RmgrId::BTREE {
        put_u32(page.0, BLCKSZ - 12, u32::from(input.byte() & 1));
        put_u16(page.0, BLCKSZ - 4, input.number());
    }
    if rmgr == RmgrId::GIST {
        mark_gist(&mut page, input.number());
    }
    if rmgr == RmgrId::SPGIST {
        mark_spgist(&mut page, input.number());
    }
    if rmgr == RmgrId::GIN {
        mark_gin(&mut page, input.number(), u16::from(input.byte()));
    }
    for _ in 0..input.byte() % 4 {
        let number = u16::from(input.byte() % 32);
        let states = [ItemState::Unused, ItemState::Normal, ItemState::Redirect, ItemState::Dead];
        let state = states[usize::from(input.byte() % 4)];
        if let Some(id) = page.get().item_id(number) {
            let new = if input.byte() & 1 == 0 { ItemId::new(0, state, 0) } else { id.with_state(state) };
            page.set_item_id(number, new);
        }
    }
    for _ in 0..input.byte() % 3 {
        let at = if input.byte() & 1 == 0 { input.number() % 200 } else { input.number() };
        put_u16(page.0, usize::from(at) % (BLCKSZ - 1), input.number());
    }
    if input.byte() & 0x0F == 0 {
        put_u64(page.0, 0, u64::MAX);
    }
    bytes
}

/// Gives a page with 16 bytes of special space the flags and the mark of GiST.
pub fn mark_gist(page: &mut PageMut<'_>, flags: u16) {
    put_u16(page.0, BLCKSZ - 4, flags);
    put_u16(page.0, BLCKSZ - 2, 0xFF81);
}

/// Gives a page with 8 bytes of special space the flags, some counts and the mark of SP-GiST.
pub fn mark_spgist(page: &mut PageMut<'_>, flags: u16) {
    for (at, value) in [flags, 1, 2, 0xFF82].into_iter().enumerate() {
        put_u16(page.0, BLCKSZ - 8 + 2 * at, value);
    }
}

/// Gives a page with 8 bytes of special space the number of its items and the flags of GIN.
pub fn mark_gin(page: &mut PageMut<'_>, count: u16, flags: u16) {
    put_u32(page.0, BLCKSZ - 8, u32::MAX);
    put_u16(page.0, BLCKSZ - 4, count);
    put_u16(page.0, BLCKSZ - 2, flags);
}

/// Bytes, taken from the front; zeros once they are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        front
    }

    fn rest(&mut self) -> &'a [u8] {
        self.take(usize::MAX)
    }

    /// Mostly a small number.
    fn number(&mut self) -> u16 {
        match self.byte() {
            byte @ 0..=127 => u16::from(byte % 16),
            byte @ 128..=191 => u16::from(byte - 128) * 8,
            192..=199 => 8192,
            _ => u16::from_le_bytes([self.byte(), self.byte()]),
        }
    }
}
