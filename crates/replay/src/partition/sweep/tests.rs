use walrider_datadir::relation::RelationFiles;
use walrider_layout::Major;
use walrider_layout::page::PAGE_HEADER_SIZE;
use walrider_redo::Env;
use walrider_wal::decode::Span;
use walrider_wal::record::BKPIMAGE_APPLY;
use walrider_wal::records::xlog;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::cuts::{Cuts, Lengths};
use crate::partition::PageSettings;
use crate::rels::RelTable;

/// A file of five blocks is cut to three, and to seven later: between them a record makes the tenth block, and with it those before,
/// although nobody ever has anything to do with them again. The visibility map, all bits set between the two, loses those behind the
/// second: although what comes later is read before it, as it is of another run of the partition.
#[test]
fn between_truncations() {
    let dir = tempfile::tempdir().unwrap();
    let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
    let blocks = |fork| files.blocks(TEST_REL, fork).unwrap();
    std::fs::create_dir_all(dir.path().join(format!("base/{}", TEST_REL.database))).unwrap();
    files.extend(TEST_REL, ForkNumber::Main, 5).unwrap();
    files.extend(TEST_REL, ForkNumber::FreeSpaceMap, 3).unwrap();
    files.extend(TEST_REL, ForkNumber::VisibilityMap, 1).unwrap();
    let rels = RelTable::default();
    let env = Env { major: Major::V18, hint_bits_are_logged: false };
    let mut cuts = Cuts::default();
    let lengths = Lengths { rels: &rels, files: &files, base: None, env };
    for (lsn, keep) in [(100, 3), (300, 7)] {
        assert!(cuts.take(Lsn(lsn), TEST_REL, keep, 7, &lengths).unwrap());
    }
    let needless = Needless::new(&cuts, &Default::default(), Vec::new(), &rels);
    let settings = PageSettings { env, checksums: false, verify_images: false };
    let (shared, gaps) = (Shared { rels: &rels, files: &files, settings }, Gaps::default());
    let [main, map] = [ForkNumber::Main, ForkNumber::VisibilityMap].map(|fork| rels.number(TEST_REL, fork));
    let record = |fork, block, byte| {
        let builder = RecordBuilder::new(RmgrId::XLOG, xlog::XLOG_FPI).block(0, TEST_REL, rels.fork(fork).fork, block);
        let mut page = [0; BLCKSZ];
        PageMut(&mut page).init(0);
        page[PAGE_HEADER_SIZE..].fill(byte);
        builder.image(BKPIMAGE_APPLY, 0, 0, page).build()
    };
    let (mut entries, mut later) = (Vec::new(), Vec::new());
    for (lsn, fork, block, byte) in [
        (40, main, 4, 1),
        (50, main, 1, 2),
        (200, main, 9, 3),
        (210, main, 4, 4),
        (250, map, 0, 0xFF),
        (400, main, 2, 5),
    ] {
        let entries = if lsn == 400 { &mut later } else { &mut entries };
        let operation = Operation { key: PageKey::new(fork, block), change: Change::Overwrite(0) };
        let span = Span { lsn: Lsn(lsn), end: Lsn(lsn + 8) };
        entry::put(entries, span, &record(fork, block, byte), &[operation]).unwrap();
    }
    needless.cut_files(&shared).unwrap();
    assert_eq!(blocks(ForkNumber::Main), Some(3));
    let mut report = Report::default();
    let mut sweep = Sweep::new(&shared, &needless, needless.tails(|_| true), &gaps);
    for part in [&later, &entries] {
        sweep.pass(part, &mut Vec::new(), |_| true, &mut report);
    }
    sweep.end(&mut report);
    assert!(report.failure.is_none() && report.invalid.is_empty(), "{:?}", report.failure);
    assert_eq!(rels.fork(main).wanted_blocks(), Some(7));
    assert!(report.grown.contains(&main));
    let mut pages = vec![0; 5 * BLCKSZ];
    files.read(TEST_REL, ForkNumber::Main, 0, &mut pages).unwrap();
    // Behind the LSN, which redo stores.
    assert_eq!([0, 1, 2, 3, 4].map(|block| pages[block * BLCKSZ + 100]), [0, 2, 5, 0, 4]);
    files.read(TEST_REL, ForkNumber::VisibilityMap, 0, &mut pages[..BLCKSZ]).unwrap();
    assert_eq!(pages[24..28], [0xFF, 0x3F, 0, 0]);
}
