use std::fs;

use walrider_datadir::relation::RelationFiles;
use walrider_layout::{ForkNumber, Major, RelFileLocator};
use walrider_redo::{Env, FreeSpace};
use walrider_seed::Random;

use super::*;
use crate::cuts::{Cuts, Lengths};
use crate::gaps::Gaps;
use crate::partition::PageSettings;
use crate::partition::sweep::{Sweep, Tails};
use crate::rels::{PageKey, RelTable};

const REL: RelFileLocator = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };
const SLOTS: u32 = fsm::SLOTS_PER_PAGE as u32;

/// A map as PostgreSQL has it: changes are done in the order of the WAL, and of pages only what is dirty is written.
struct InOrder {
    file: Vec<PageBytes>,
    held: Vec<(PageBytes, bool)>,
}

impl FsmFork for InOrder {
    type Error = std::convert::Infallible;

    fn blocks(&mut self) -> Result<BlockNumber, Self::Error> {
        Ok(self.held.len() as u32)
    }

    fn page<R>(
        &mut self,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, Self::Error> {
        let Some((bytes, dirty)) = self.held.get_mut(block as usize) else { return Ok(None) };
        let mut target = Target { bytes, exists: true, dirty: *dirty };
        let result = change(&mut target);
        *dirty = target.dirty;
        Ok(Some(result))
    }
}

impl InOrder {
    fn tell(&mut self, heap_block: BlockNumber, category: u8) {
        let (block, slot) = fsm::location(heap_block);
        let exists = (block as usize) < self.held.len();
        self.held.resize(self.held.len().max(block as usize + 1), ([0; BLCKSZ], false));
        let (bytes, dirty) = &mut self.held[block as usize];
        let mut target = Target { bytes, exists, dirty: *dirty };
        fsm::record_free_space(&mut target, slot, category);
        *dirty = target.dirty;
    }

    fn truncate(&mut self, blocks: BlockNumber, env: &Env) {
        let Ok(Some(keep)) = fsm::prepare_truncate(self, blocks) else { return };
        self.held.truncate(keep as usize);
        self.file.truncate(keep as usize);
        let Ok(()) = fsm::vacuum_range(self, blocks, BlockNumber::MAX, env);
    }

    fn written(mut self) -> Vec<PageBytes> {
        self.file.resize(self.held.len(), [0; BLCKSZ]);
        for (page, (held, dirty)) in self.file.iter_mut().zip(&self.held) {
            if *dirty {
                *page = *held;
            }
        }
        self.file
    }
}

#[derive(Debug)]
enum Step {
    Tell(BlockNumber, u8),
    Truncate(BlockNumber),
}

fn some_block(random: &mut Random) -> BlockNumber {
    let leaf = SLOTS * random.below(3) as u32;
    match random.below(4) {
        0 => leaf,
        _ => leaf + random.below(30) as u32,
    }
}

/// A map of some pages, whose levels may disagree, as a crash leaves them.
fn some_map(random: &mut Random) -> Vec<PageBytes> {
    let mut pages = vec![[0; BLCKSZ]; random.below(6) as usize];
    for page in &mut pages {
        for _ in 0..random.below(4) {
            let mut target = Target { bytes: page, exists: true, dirty: false };
            fsm::record_free_space(&mut target, random.below(4) as u16, random.below(256) as u8);
            // Where the next search begins.
            target.bytes[24] = random.below(2) as u8;
        }
    }
    pages
}

/// Truncations that are taken into a batch, with what heap pages tell that stay, come to the same map as all of it in order: with
/// what heap pages tell that are cut off later, of which the batch does not know.
#[test]
fn maps_are_what_they_are_in_order() {
    let (mut taken, mut refused) = (0, 0);
    walrider_seed::rounds(400, |seed| {
        let mut random = Random(seed);
        let env = Env { major: Major::V18, hint_bits_are_logged: random.below(4) == 0 };
        let map = some_map(&mut random);
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("base/5")).unwrap();
        let path = dir.path().join("base/5/16384_fsm");
        if !map.is_empty() {
            fs::write(&path, map.as_flattened()).unwrap();
        }
        let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
        let (rels, gaps) = (RelTable::default(), Gaps::default());
        let settings = PageSettings { env, checksums: false, verify_images: false };
        let shared = Shared { rels: &rels, files: &files, settings };
        let mut cuts = Cuts::default();
        let mut steps: Vec<(Lsn, Step)> = Vec::new();
        for nth in 1..=random.below(12) {
            let lsn = Lsn(8 * nth);
            let block = some_block(&mut random);
            if random.below(3) > 0 {
                steps.push((lsn, Step::Tell(block, [0, 0, 40, 90, 255][random.below(5) as usize])));
                continue;
            }
            let lengths = Lengths { rels: &rels, files: &files, base: None, env };
            if !cuts.take(lsn, REL, block, 7, &lengths).unwrap() {
                refused += 1;
                break;
            }
            taken += 1;
            steps.push((lsn, Step::Truncate(block)));
        }
        let mut in_order = InOrder { file: map.clone(), held: map.iter().map(|page| (*page, false)).collect() };
        for (_, step) in &steps {
            match *step {
                Step::Tell(block, category) => in_order.tell(block, category),
                Step::Truncate(blocks) => in_order.truncate(blocks, &env),
            }
        }
        // As the batch does it.
        let needless = Needless::new(&cuts, &Default::default(), Vec::new(), &rels);
        let (heap, fsm) = (rels.number(REL, ForkNumber::Main), rels.number(REL, ForkNumber::FreeSpaceMap));
        let mut report = Report::default();
        for (lsn, step) in &steps {
            if let Step::Tell(block, category) = *step
                && !needless.is_cut(PageKey::new(heap, block), *lsn)
            {
                let free_bytes = if category == 255 { BLCKSZ } else { usize::from(category) * 32 };
                report.note_free_space(fsm, *lsn, FreeSpace { rel: REL, block, free_bytes });
            }
        }
        needless.cut_files(&shared).unwrap();
        let mut sweep = Sweep::new(&shared, &needless, Vec::new(), &gaps);
        let mut found = sweep.operations(&[]);
        Tails::from(needless.tails(|tail| tail.key.fork() == fsm)).add_to(&mut found, true);
        sweep.told(std::mem::take(&mut report.fsm), &mut found.maps);
        sweep.sweep(&mut found.maps, &[], &mut report);
        bring_up_to_date(&shared, &needless, &mut report).unwrap();
        assert!(report.failure.is_none(), "{:?}", report.failure);
        if let Some(blocks) = rels.fork(fsm).wanted_blocks() {
            files.extend(REL, ForkNumber::FreeSpaceMap, blocks).unwrap();
        }
        let (ours, theirs) = (fs::read(&path).unwrap_or_default(), in_order.written());
        assert_eq!(ours.len(), theirs.len() * BLCKSZ, "{steps:?}");
        for (block, (ours, theirs)) in ours.chunks(BLCKSZ).zip(&theirs).enumerate() {
            let differs = ours.iter().zip(theirs).position(|(a, b)| a != b);
            assert_eq!(differs, None, "block {block} after {steps:?}");
        }
    });
    assert!(taken > 100 && refused > 100, "{taken} taken, {refused} refused");
}
