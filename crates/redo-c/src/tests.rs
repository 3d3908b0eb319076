use std::io::Write;
use std::process::{Command, Stdio};
use std::ptr::null;

use super::*;
use walrider_layout::BLCKSZ;
use walrider_layout::page::{Page, PageMut};
use walrider_wal::records::heap::XLOG_HEAP_INSERT;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

/// Calls the interface with the parts of a record as the server's decoder would hold them.
fn call(record: &Record<'_>, block_id: u8, page: &mut PageBytes, major: u32) -> (i32, i64) {
    let blocks: Vec<_> = record
        .blocks
        .iter()
        .map(|it| WalriderBlock {
            tablespace: it.rel.tablespace,
            database: it.rel.database,
            relation: it.rel.relation,
            block: it.block,
            id: it.id,
            fork: it.fork as u8,
            will_init: it.will_init.into(),
            has_image: it.image.is_some().into(),
            image_info: it.image.map_or(0, |image| image.info),
            has_data: it.has_data.into(),
            hole_offset: it.image.map_or(0, |image| image.hole_offset),
            hole_len: it.image.map_or(0, |image| image.hole_len),
            image: it.image.map_or(null(), |image| image.bytes.as_ptr()),
            image_len: it.image.map_or(0, |image| image.bytes.len()),
            data: it.data.as_ptr(),
            data_len: it.data.len(),
        })
        .collect();
    let from = WalriderRecord {
        begin: record.lsn.0,
        end: record.end.0,
        prev: record.header.prev.0,
        total_len: record.header.total_len,
        xid: record.header.xid,
        toplevel_xid: record.toplevel_xid,
        origin: record.origin,
        info: record.header.info,
        rmgr: record.header.rmgr.0,
        main_data: record.main_data.as_ptr(),
        main_len: record.main_data.len(),
        blocks: blocks.as_ptr(),
        nblocks: blocks.len(),
    };
    let mut free = 0;
    // SAFETY: all of it lives in this function or with its caller, and is borrowed for the call.
    let code = unsafe { walrider_redo_block(&from, block_id, page, major, 1, &mut free) };
    (code, free)
}

fn heap_page() -> PageBytes {
    let mut page = [0; BLCKSZ];
    PageMut(&mut page).init(0);
    page
}

/// An insert at this line pointer: `xl_heap_insert`, and `xl_heap_header` with a null bitmap's place and eight bytes.
fn insert(number: u8) -> Vec<u8> {
    let mut data = vec![1, 0, 0, 8, 24, 0];
    data.extend([7; 8]);
    RecordBuilder::new(RmgrId::HEAP, XLOG_HEAP_INSERT)
        .xid(700)
        .main_data([number, 0, 0])
        .block(0, TEST_REL, ForkNumber::Main, 3)
        .data(data)
        .build()
}

#[test]
fn a_page_comes_out_as_the_engine_makes_it_and_only_once() {
    let bytes = insert(1);
    let record = RecordBuilder::parse(&bytes, Lsn(4000));
    let mut by_engine = heap_page();
    let mut target = Target { bytes: &mut by_engine, exists: true, dirty: false };
    let env = Env { major: Major::V18, hint_bits_are_logged: true };
    redo_block(&record, record.block(0).unwrap(), &mut target, &env, &mut Effects::default()).unwrap();

    let mut page = heap_page();
    assert_eq!(call(&record, 0, &mut page, 18).0, CHANGED);
    assert!(page == by_engine && page != heap_page());
    assert_eq!(call(&record, 0, &mut page, 18).0, SKIPPED);
    assert!(page == by_engine);
}

#[test]
fn an_image_is_restored() {
    let mut wanted = heap_page();
    wanted[5000] = 9;
    let builder = RecordBuilder::new(RmgrId::HEAP, XLOG_HEAP_INSERT).main_data([1, 0, 0]);
    let bytes = builder.block(0, TEST_REL, ForkNumber::Main, 3).full_image(&wanted).build();
    let record = RecordBuilder::parse(&bytes, Lsn(4000));
    let mut page = heap_page();
    assert_eq!(call(&record, 0, &mut page, 18).0, CHANGED);
    PageMut(&mut wanted).set_lsn(record.end);
    assert!(page == wanted);
}

#[test]
fn a_page_is_left_as_it_was_where_redo_is_refused() {
    // A gap in the line pointers.
    let bytes = insert(5);
    let record = RecordBuilder::parse(&bytes, Lsn(4000));
    assert_eq!(call(&record, 0, &mut heap_page(), 18), (FAILED, -1));
    let mut page = heap_page();
    assert_eq!(call(&record, 1, &mut page, 18), (REFUSED, -1));
    assert_eq!(call(&record, 0, &mut page, 16), (REFUSED, -1));
    let five = (0..5).fold(RecordBuilder::new(RmgrId::HEAP, XLOG_HEAP_INSERT), |builder, id| {
        builder.block(id, TEST_REL, ForkNumber::Main, id.into())
    });
    let bytes = five.build();
    assert_eq!(call(&RecordBuilder::parse(&bytes, Lsn(4000)), 0, &mut page, 18), (REFUSED, -1));
    assert!(page == heap_page());
    let bytes = insert(1);
    let mut new = [0; BLCKSZ];
    assert_eq!(call(&RecordBuilder::parse(&bytes, Lsn(4000)), 0, &mut new, 18), (REFUSED, -1));
    assert!(new == [0; BLCKSZ]);
}

#[test]
fn an_entry_of_gin_waits_for_the_heap_blocks_of_its_items() {
    // `ginxlogInsertEntry`: a tuple whose one item, compressed, at byte 8, is in block 65,541.
    let entry = [1, 0, 0, 0, 0, 0x80, 8, 0, 1, 0, 16, 0, 1, 0, 5, 0, 1, 0, 0, 0];
    let (none, mut some) = ([0; WAITS / 32], [0; WAITS / 32]);
    some[0] = 1 << 5;
    let waits = |data: &[u8], tree: i32, waits: &[u32], before: *const u32| {
        // SAFETY: the tables have their size, the data is borrowed.
        unsafe { walrider_gin_items_wait(data.as_ptr(), data.len(), tree, waits.as_ptr(), before) }
    };
    assert_eq!(waits(&entry, 0, &none, null()), 0);
    assert_eq!(waits(&entry, 0, &some, null()), 1);
    assert_eq!(waits(&entry, 0, &none, some.as_ptr()), 1);
    assert_eq!(waits(&entry, 0, &none, none.as_ptr()), 0);
    // What is no posting list does not tell.
    assert_eq!(waits(&entry[..16], 0, &none, null()), 1);
    assert_eq!(waits(&[], 1, &none, null()), 1);
}

#[test]
fn free_space_goes_where_the_engine_puts_it() {
    for heap_block in [0, 1, 4068, 4069, 1_000_000, u32::MAX - 1, u32::MAX] {
        let (block, slot) = fsm::location(heap_block);
        assert_eq!(walrider_free_space_block(heap_block), block);
        let mut page = fsm::page_with(0);
        assert_eq!(walrider_record_free_space(&mut page, heap_block, 1000), CHANGED);
        assert_eq!(fsm::get_avail(Page(&page), slot), fsm::category(1000));
        assert_eq!(walrider_record_free_space(&mut page, heap_block, 1000), SKIPPED);
    }
    // Neither a page of nonsense nor a size that cannot be is a panic.
    assert!(walrider_record_free_space(&mut [0xFF; BLCKSZ], 7, usize::MAX) >= 0);
}

/// A C compiler reads the header: each field is where this side has it, and each code is the same.
#[test]
fn the_header_says_the_same() {
    macro_rules! offsets {
        ($of:ident: $($field:ident)*) => {
            [$((stringify!($of), stringify!($field), std::mem::offset_of!($of, $field))),*]
        };
    }
    let blocks = offsets!(WalriderBlock: tablespace database relation block id fork will_init has_image image_info has_data
        hole_offset hole_len image image_len data data_len);
    let records = offsets!(WalriderRecord: begin end prev total_len xid toplevel_xid origin info rmgr main_data main_len
        blocks nblocks);
    let mut source = String::from("#include \"walrider_redo.h\"\n");
    for (of, field, at) in blocks.iter().chain(&records) {
        source += &format!("_Static_assert(offsetof({of}, {field}) == {at}, \"{of}.{field}\");\n");
    }
    let codes =
        [("PANIC", PANIC), ("FAILED", FAILED), ("REFUSED", REFUSED), ("SKIPPED", SKIPPED), ("CHANGED", CHANGED)];
    for (name, code) in codes {
        source += &format!("_Static_assert(WALRIDER_REDO_{name} == {code}, \"{name}\");\n");
    }
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let mut compiler = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", include, "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("cc, which links this test, runs");
    compiler.stdin.take().expect("it is piped").write_all(source.as_bytes()).expect("cc reads");
    let output = compiler.wait_with_output().expect("cc ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
