use std::io::IoSlice;

use walrider_datadir::relation::RelationFiles;
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{Major, PageBytes};
use walrider_redo::{Change, Env};
use walrider_seed::Random;
use walrider_wal::decode::Span;
use walrider_wal::record::BKPIMAGE_APPLY;
use walrider_wal::records::xlog;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::partition::PageSettings;
use crate::rels::RelTable;
use crate::spill::entry::Operation;
use crate::spill::runs::tests::Lies;

/// Blocks of the file that passes, and of what it becomes.
const PASS: u32 = 600;
const ALL: u32 = 1000;

fn page(byte: u8) -> PageBytes {
    let mut page = [0; BLCKSZ];
    PageMut(&mut page).init(0);
    page[PAGE_HEADER_SIZE..].fill(byte);
    page
}

/// However what is put apart lies there, pages that pass and those behind them come to the same; what is done is not read again. Runs that
/// memory has room for are begun ahead. Several files side by side are not tried here.
#[test]
fn pages_that_pass_and_those_behind() {
    walrider_seed::rounds(2, |seed| Lies::ALL.into_iter().for_each(|lies| pages_of(lies, true, seed)));
}

/// They come to the same where they lie in the directory already, and none passes.
#[test]
fn pages_of_files() {
    walrider_seed::rounds(2, |seed| Lies::ALL.into_iter().for_each(|lies| pages_of(lies, false, seed)));
}

fn pages_of(lies: Lies, pass: bool, seed: u64) {
    let (mut random, dir) = (Random(seed), tempfile::tempdir().unwrap());
    let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
    std::fs::create_dir_all(dir.path().join(format!("base/{}", TEST_REL.database))).unwrap();
    let rels = RelTable::default();
    let env = Env { major: Major::V18, hint_bits_are_logged: false };
    let settings = PageSettings { env, checksums: false, verify_images: false };
    let (shared, gaps) = (Shared { rels: &rels, files: &files, settings }, Gaps::default());
    let number = rels.number(TEST_REL, ForkNumber::Main);
    let mut spill = lies.spill(dir.path(), 4);
    let mut expected: Vec<u8> = (0..ALL).map(|block| if block < PASS { 1 } else { 0 }).collect();
    for lsn in (1..1500).map(|nth| Lsn(1000 * nth)) {
        let (block, byte) = (random.below(ALL.into()) as u32, 2 + random.below(200) as u8);
        expected[block as usize] = byte;
        let record = RecordBuilder::new(RmgrId::XLOG, xlog::XLOG_FPI)
            .block(0, TEST_REL, ForkNumber::Main, block)
            .image(BKPIMAGE_APPLY, 0, 0, page(byte))
            .build();
        let operation = Operation { key: PageKey::new(number, block), change: Change::Overwrite(0) };
        spill.take_one(ForkNumber::Main, Span { lsn, end: Lsn(lsn.0 + 8) }, &record, operation);
    }
    let needless = Needless::default();
    let passing = Passing::new(&shared, &needless, spill.ranges().unwrap(), &gaps).unwrap();
    if pass {
        pass_all(&passing, &files, number, lies);
    } else {
        files
            .write(TEST_REL, ForkNumber::Main, 0, &mut [IoSlice::new(page(1).repeat(PASS as usize).as_slice())])
            .unwrap();
    }
    let report = passing.finish(&Stages::default());
    assert!(report.failure.is_none() && report.invalid.is_empty(), "{:?}", report.failure);
    let mut pages = vec![0; ALL as usize * BLCKSZ];
    let blocks = files.blocks(TEST_REL, ForkNumber::Main).unwrap().unwrap();
    files.read(TEST_REL, ForkNumber::Main, 0, &mut pages[..blocks as usize * BLCKSZ]).unwrap();
    // Behind the LSN, which redo stores.
    let found: Vec<u8> = pages.chunks(BLCKSZ).map(|page| page[100]).collect();
    assert_eq!(found, expected, "{lies:?}");
}

fn pass_all(passing: &Passing<'_>, files: &RelationFiles, number: u32, lies: Lies) {
    let file = SegmentFile { rel: TEST_REL, fork: ForkNumber::Main, segment: 0 };
    for first in (0..PASS).step_by(128) {
        let mut piece = page(1).repeat((PASS - first).min(128) as usize);
        passing.pass(file, first, &mut piece).unwrap();
        files.write(TEST_REL, ForkNumber::Main, first, &mut [IoSlice::new(&piece)]).unwrap();
        if first == 0 {
            let ahead = passing.at_work.lock().unwrap()[&file].ahead.len();
            assert_eq!(ahead > 0, !matches!(lies, Lies::TooLarge | Lies::InParts), "{lies:?}: {ahead}");
        }
    }
    passing.passed(file, PASS);
    let behind = |first: &PageKey| first.block() >= PASS;
    assert!(!passing.passed.lock().unwrap().done.iter().any(behind));
    let begun = passing.ranges.at(PageKey::new(number, PASS - 1));
    let done = passing.passed.lock().unwrap().done.clone();
    // The range that the file ends in is all that has passed and is not done.
    for block in 0..begun.first.block() {
        let first = passing.ranges.at(PageKey::new(number, block)).first;
        assert!(done.contains(&first), "{lies:?}: {first:?}");
    }
    assert!(!done.contains(&begun.first) && !passing.ranges.left(&done).is_empty(), "{lies:?}");
}
