use walrider_datadir::relation::{RelationFiles, SegmentFile};
use walrider_layout::{BLCKSZ, Major, RELSEG_SIZE};
use walrider_redo::vm::HEAP_BLOCKS_PER_PAGE;

use super::*;
use crate::base::PassPages;
use crate::partition::PageSettings;

const ENV: Env = Env { major: Major::V18, hint_bits_are_logged: false };

/// A directory with one database.
struct World {
    dir: tempfile::TempDir,
    rels: RelTable,
    files: RelationFiles,
    cuts: Cuts,
    lsn: Lsn,
    logs_hint_bits: bool,
}

fn rel(relation: u32) -> RelFileLocator {
    RelFileLocator { tablespace: 1663, database: 5, relation }
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("base/5")).unwrap();
        let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
        World { dir, rels: RelTable::default(), files, cuts: Cuts::default(), lsn: Lsn(8), logs_hint_bits: false }
    }

    /// Relation files of so many blocks; 0: there is none.
    fn with(self, relation: u32, heap: u32, vm: u32, fsm: u32) -> World {
        let forks = [(ForkNumber::Main, heap), (ForkNumber::VisibilityMap, vm), (ForkNumber::FreeSpaceMap, fsm)];
        for (fork, blocks) in forks.into_iter().filter(|&(_, blocks)| blocks > 0) {
            self.files.extend(rel(relation), fork, blocks).unwrap();
        }
        self
    }

    fn take_of(&mut self, base: Option<&dyn Base>, relation: u32, blocks: u32, flags: u32) -> bool {
        self.lsn.0 += 8;
        let lengths = Lengths {
            rels: &self.rels,
            files: &self.files,
            base,
            env: Env { hint_bits_are_logged: self.logs_hint_bits, ..ENV },
        };
        self.cuts.take(self.lsn, rel(relation), blocks, flags, &lengths).unwrap()
    }

    fn take(&mut self, relation: u32, blocks: u32) -> bool {
        self.take_of(None, relation, blocks, TRUNCATE_ALL)
    }

    fn needless(&self, drops: &[u32]) -> Needless {
        Needless::new(&self.cuts, &drops.iter().map(|&relation| rel(relation)).collect(), Vec::new(), &self.rels)
    }
}

/// An online backup has the second segment of a table from before the primary cut it, and the first from after that. What is put apart of the
/// second is left out; then nothing was cut, as the first was not longer than it should be, and old rows came back once the table had grown.
#[test]
fn a_segment_behind_one_that_was_cut_is_cut_too() {
    let mut world = World::new().with(1, RELSEG_SIZE + 5, 1, 40);
    let segment = |nth| SegmentFile { rel: rel(1), fork: ForkNumber::Main, segment: nth };
    let path = |world: &World, nth| world.dir.path().join(world.files.relative_path(segment(nth)));
    let first = std::fs::OpenOptions::new().write(true).open(path(&world, 0)).unwrap();
    first.set_len(100 * BLCKSZ as u64).unwrap();
    assert!(world.take(1, 100));
    let settings = PageSettings { env: ENV, checksums: false, verify_images: false };
    let needless = world.needless(&[]);
    needless.cut_files(&Shared { rels: &world.rels, files: &world.files, settings }).unwrap();
    assert_eq!(std::fs::metadata(path(&world, 1)).unwrap().len(), 0);
    world.files.extend(rel(1), ForkNumber::Main, RELSEG_SIZE).unwrap();
    assert_eq!(world.files.blocks(rel(1), ForkNumber::Main).unwrap(), Some(RELSEG_SIZE));
}

#[test]
fn what_later_truncations_leave() {
    let cuts = ForkCuts::new(vec![(Lsn(10), 50), (Lsn(20), 30), (Lsn(30), 40)]);
    assert_eq!(cuts.least(), 30);
    let after = [5, 10, 19, 20, 29, 30].map(|lsn| cuts.least_after(Lsn(lsn)));
    assert_eq!(after, [30, 30, 30, 40, 40, u32::MAX]);
    assert!(
        cuts.is_between(Lsn(10), Lsn(21)) && !cuts.is_between(Lsn(10), Lsn(20)) && !cuts.is_between(Lsn(30), Lsn(90))
    );
}

#[test]
fn certain_is_what_the_maps_have_before() {
    let mut world = World::new().with(1, 200, 1, 3).with(2, 200, 1, 4).with(3, 200, 0, 3).with(4, 200, 1, 0);
    assert!(!world.take_of(None, 1, 100, SMGR_TRUNCATE_HEAP));
    assert!(world.take(1, 100) && world.take(1, 150));
    // What it removes counted for the last one, which has initialised upper levels, or not.
    assert!(!world.take(1, 50));
    // The page that has the largest value of what is left would be gone.
    assert!(!world.take(1, 0));
    // It may be that it has only that page, or none.
    assert!(world.take(2, 0) && world.take(2, 0));
    assert!(!world.take(2, 100));
    // Nobody has anything to do with the visibility map; or somebody may have made it.
    assert!(world.take(3, 100));
    world.cuts = Cuts::default();
    world.rels.number(rel(3), ForkNumber::VisibilityMap);
    assert!(!world.take(3, 100) && world.take(3, 0));
    assert!(!world.take(4, 100) && !world.take(4, 0));
}

/// Whether the map had a page that the truncation removes, and so whether upper levels change, only what is left out knows.
#[test]
fn upper_levels_that_would_change_are_not_certain() {
    let mut world = World::new().with(1, 200, 0, 2);
    assert!(world.take(1, 0));
    world.cuts = Cuts::default();
    let path = world.dir.path().join("base/5/1_fsm");
    let mut bytes = std::fs::read(&path).unwrap();
    let mut page: [u8; BLCKSZ] = bytes[BLCKSZ..].try_into().unwrap();
    let mut target = Target { bytes: &mut page, exists: true, dirty: false };
    fsm::record_free_space(&mut target, 0, 7);
    bytes[BLCKSZ..].copy_from_slice(&page);
    std::fs::write(&path, &bytes).unwrap();
    assert!(!world.take(1, 0));
}

struct Manifest(Option<BlockNumber>);

impl Base for Manifest {
    fn unpack(&self, _: &dyn PassPages) -> Result<(), ReplayError> {
        unreachable!("only lengths are asked for")
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn blocks(&self, _: RelFileLocator, _: ForkNumber) -> Option<BlockNumber> {
        self.0
    }
}

#[test]
fn of_files_that_are_not_there_yet_the_manifest_tells() {
    let mut world = World::new();
    let mut take = |known, blocks| world.take_of(Some(&Manifest(known)), 1, blocks, TRUNCATE_ALL);
    assert!(!take(None, 100));
    assert!(!take(Some(2), 100));
    // Nobody has looked at the upper levels.
    assert!(!take(Some(2), 0));
    assert!(take(Some(3), 100));
}

#[test]
fn files_are_cut_to_what_all_leave() {
    let mut world = World::new().with(1, 200, 2, 30).with(2, 200, 1, 3);
    world.logs_hint_bits = true;
    let far = HEAP_BLOCKS_PER_PAGE + 6;
    assert!(world.take(1, far));
    // Both maps stay as long as the first has left them.
    assert!(world.take(1, far - 2) && world.take(1, far - 1) && world.take(2, 100));
    let needless = world.needless(&[2]);
    let number = |fork| world.rels.find(rel(1), fork).unwrap();
    let key = |fork, block| PageKey::new(number(fork), block);
    assert!(
        needless.is_cut(key(ForkNumber::Main, far - 2), Lsn(16))
            && !needless.is_cut(key(ForkNumber::Main, far - 3), Lsn(16))
    );
    assert!(!needless.is_cut(key(ForkNumber::Main, far - 1), Lsn(world.lsn.0 - 8)));
    let of = |fork| {
        needless.tails(|tail| tail.key.fork() == number(fork)).iter().map(|tail| tail.key.block()).collect::<Vec<_>>()
    };
    assert_eq!(of(ForkNumber::VisibilityMap), [1, 1, 1]);
    assert_eq!(of(ForkNumber::FreeSpaceMap), [10, 10, 10]);
    assert_eq!(needless.vacuums().len(), 3);
    let settings = PageSettings { env: ENV, checksums: false, verify_images: false };
    needless.cut_files(&Shared { rels: &world.rels, files: &world.files, settings }).unwrap();
    let blocks = |relation, fork| world.files.blocks(rel(relation), fork).unwrap();
    assert_eq!(ForkNumber::ALL.map(|fork| blocks(1, fork)), [Some(200), Some(11), Some(2), None]);
    assert_eq!(blocks(2, ForkNumber::Main), Some(200));
}

/// The tail of a page that a later truncation removes is nothing to it.
#[test]
fn tails_of_pages_that_go_are_left_out() {
    let mut world = World::new().with(1, 200, 3, 3);
    world.logs_hint_bits = true;
    assert!(world.take(1, 3000) && world.take(1, 10));
    assert_eq!(world.needless(&[]).tails(|tail| matches!(tail.change, TailChange::VisibilityMap(_))).len(), 2);
    let mut world = World::new().with(1, 200, 3, 30);
    world.logs_hint_bits = true;
    assert!(world.take(1, HEAP_BLOCKS_PER_PAGE + 6) && world.take(1, HEAP_BLOCKS_PER_PAGE));
    let tails = world.needless(&[]).tails(|tail| matches!(tail.change, TailChange::VisibilityMap(_)));
    assert_eq!(tails, []);
}
