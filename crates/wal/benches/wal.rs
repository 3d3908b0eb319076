//! Records taken apart, and full-page images restored.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major, PageBytes};
use walrider_wal::image::restore;
use walrider_wal::record::{
    BKPIMAGE_APPLY, BKPIMAGE_COMPRESS_LZ4, BKPIMAGE_COMPRESS_PGLZ, BKPIMAGE_COMPRESS_ZSTD, BKPIMAGE_HAS_HOLE, Image,
    Record, crc_is_valid,
};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

/// A page with a hole of zeros, which compresses about as well as a heap page.
fn page() -> PageBytes {
    let mut page = [0; BLCKSZ];
    for (at, byte) in page.iter_mut().enumerate().filter(|(at, _)| !(HOLE_BEGIN..HOLE_END).contains(at)) {
        *byte = if at % 128 < 28 { (at * at / 31) as u8 | 1 } else { b' ' };
    }
    page
}

const HOLE_BEGIN: usize = 240;
const HOLE_END: usize = 1600;

/// Begins a record whose first block, if it has any, is of a table.
fn record(rmgr: RmgrId, info: u8, main: usize) -> RecordBuilder {
    RecordBuilder::new(rmgr, info).xid(740).main_data(vec![7; main])
}

fn records() -> Vec<(&'static str, RecordBuilder)> {
    let main = |builder: RecordBuilder, id| builder.block(id, TEST_REL, ForkNumber::Main, 4711);
    vec![
        ("HOT_UPDATE", main(record(RmgrId::HEAP, 0x40, 14), 0).data([7; 16])),
        ("INSERT", main(record(RmgrId::HEAP, 0, 3), 0).data([7; 34])),
        ("PRUNE", main(record(RmgrId::HEAP2, 0x10, 6), 0).data([7; 6])),
        ("COMMIT", record(RmgrId::XACT, 0, 8)),
        ("INSERT_LEAF", main(record(RmgrId::BTREE, 0, 2), 0).data([7; 16])),
        ("VISIBLE", main(record(RmgrId::HEAP2, 0x40, 5).block(0, TEST_REL, ForkNumber::VisibilityMap, 0), 1)),
        ("UPDATE of two pages", main(main(record(RmgrId::HEAP, 0x20, 14), 0).data([7; 105]), 1)),
        (
            "HOT_UPDATE with image",
            main(record(RmgrId::HEAP, 0x40, 14), 0).image_with_hole(&page(), HOLE_BEGIN, HOLE_END - HOLE_BEGIN),
        ),
    ]
}

fn parse(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("record");
    for (name, builder) in records() {
        let bytes = builder.build();
        let mut record = Record::empty(Major::V18);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                record.read(black_box(&bytes), Lsn(40), Lsn(140)).expect("the builder makes a record");
                black_box(&record);
            });
        });
    }
    let bytes = records()[0].1.build();
    group.bench_function("CRC", |bencher| bencher.iter(|| crc_is_valid(black_box(&bytes))));
}

/// As the compressor of PostgreSQL would store what repeats at the distance of a tuple, in tags of up to 17 bytes.
fn pglz(bytes: &[u8]) -> Vec<u8> {
    const DISTANCE: usize = 128;
    let (mut at, mut out) = (0, Vec::new());
    while at < bytes.len() {
        let control = out.len();
        out.push(0);
        for bit in 0..8 {
            let same = |len: &usize| {
                bytes.get(at + len).is_some_and(|byte| at >= DISTANCE && *byte == bytes[at + len - DISTANCE])
            };
            match (0..17).take_while(same).count() {
                len @ 3.. => {
                    out[control] |= 1 << bit;
                    out.extend([(len - 3) as u8, DISTANCE as u8]);
                    at += len;
                }
                _ => {
                    out.extend(bytes.get(at));
                    at += 1;
                }
            }
        }
    }
    out
}

fn images(criterion: &mut Criterion) {
    let page = page();
    let stored = [&page[..HOLE_BEGIN], &page[HOLE_END..]].concat();
    let hole = (HOLE_BEGIN, HOLE_END - HOLE_BEGIN);
    let images = [
        ("whole", 0, (0, 0), page.to_vec()),
        ("with hole", 0, hole, stored.clone()),
        ("pglz", BKPIMAGE_COMPRESS_PGLZ, hole, pglz(&stored)),
        ("lz4", BKPIMAGE_COMPRESS_LZ4, hole, lz4_flex::block::compress(&stored)),
        ("zstd", BKPIMAGE_COMPRESS_ZSTD, hole, zstd::bulk::compress(&stored, 3).expect("it can be compressed")),
    ];
    let mut group = criterion.benchmark_group("image");
    group.throughput(Throughput::Bytes(BLCKSZ as u64));
    for (name, method, (hole_offset, hole_len), bytes) in &images {
        let has_hole = if *hole_len > 0 { BKPIMAGE_HAS_HOLE } else { 0 };
        let (hole_offset, hole_len) = (*hole_offset as u16, *hole_len as u16);
        let image = Image { info: method | has_hole | BKPIMAGE_APPLY, hole_offset, hole_len, bytes };
        let mut restored = Box::new([0xEE; BLCKSZ]);
        group.bench_function(*name, |bencher| {
            bencher.iter(|| restore(black_box(&image), &mut restored).expect("it is an image"));
        });
        assert!(*restored == page, "{name}");
    }
}

criterion_group!(benches, parse, images);
criterion_main!(benches);
