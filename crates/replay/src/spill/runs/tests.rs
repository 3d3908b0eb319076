use walrider_layout::Lsn;
use walrider_redo::Change;
use walrider_seed::Random;
use walrider_wal::decode::Span;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::RecordBuilder;

use super::*;

/// How what was put apart lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Each run has a partition of its own.
    Alone,
    /// Two or three have one.
    Shared,
    /// There is too much in one for memory, or there are too many runs in it.
    TooLarge,
    TooMany,
    /// Runs are no longer than what is read in parts.
    InParts,
}

impl Lies {
    pub const ALL: [Lies; 5] = [Lies::Alone, Lies::Shared, Lies::TooLarge, Lies::TooMany, Lies::InParts];

    /// A spilled batch that lies so, of `runs` runs.
    pub fn spill(self, directory: &std::path::Path, runs: usize) -> Spill {
        let is_little = matches!(self, Lies::TooLarge | Lies::InParts);
        let settings = SpillSettings {
            directory: directory.to_owned(),
            file_bytes: 1 << 30,
            always: false,
            memory_bytes: 1000,
            gather_bytes: 0,
            write_bytes: 0,
            pass_bytes: if is_little { 2000 } else { 64 << 20 },
        };
        let partitions = match self {
            Lies::Shared => 1 + runs.div_ceil(MOST_RUNS),
            Lies::TooMany => 2,
            Lies::InParts => 1 + 2 * runs,
            _ => 1 + runs,
        };
        // Files do not end where runs of three would.
        let blocks = if self == Lies::InParts { LEAST_BLOCKS } else { 3 * LEAST_BLOCKS };
        let table = RunTable { blocks, ..RunTable::of_base(0, partitions) };
        Spill::in_partitions(&settings, table).unwrap()
    }

    /// Whether it must be sorted.
    pub fn is_sorted(self) -> bool {
        matches!(self, Lies::TooLarge | Lies::TooMany)
    }
}

impl Spill {
    /// Takes what a record does to one page.
    pub fn take_one(&mut self, fork: ForkNumber, span: Span, record: &[u8], operation: Operation) {
        let number = self.runs.number(self.runs.run_of(operation.key, fork));
        let partition = &mut self.partitions[number];
        entry::put(&mut partition.open, span, record, &[operation]).unwrap();
        partition.open_operations += 1;
        if partition.open.len() > 500 {
            partition.close_chunk(&self.store).unwrap();
            self.make_room().unwrap();
        }
    }
}

/// Each page has its operations, in their order, in the range that it is in; and no range is for nothing.
#[test]
fn every_page_has_its_own() {
    let record = RecordBuilder::new(RmgrId::XLOG, 0x20).main_data(b"what").build();
    walrider_seed::rounds(20, |seed| {
        let (mut random, directory) = (Random(seed), tempfile::tempdir().unwrap());
        for lies in Lies::ALL {
            let mut spill = lies.spill(directory.path(), 12);
            let mut expected: BTreeMap<PageKey, Vec<Lsn>> = BTreeMap::new();
            for lsn in (1..2000).map(|nth| Lsn(8 * nth)) {
                let within = random.below(6 * 256) as u32;
                let key = PageKey::new(random.below(2) as u32, RELSEG_SIZE - 3 * 256 + within);
                expected.entry(key).or_default().push(lsn);
                let span = Span { lsn, end: Lsn(lsn.0 + 8) };
                spill.take_one(ForkNumber::Main, span, &record, Operation { key, change: Change::Block(0) });
            }
            let ranges = spill.ranges().unwrap();
            assert_eq!(ranges.sorted_bytes > 0, lies.is_sorted(), "{lies:?}");
            let mut found: BTreeMap<PageKey, Vec<Lsn>> = BTreeMap::new();
            for fork in 0..2 {
                let mut block = 0;
                while block < BlockNumber::MAX {
                    let range = ranges.at(PageKey::new(fork, block));
                    assert!(range.first.block() == block && range.end > block, "{range:?}");
                    let begins_in = |block| block / RELSEG_SIZE;
                    assert!(range.partition.is_none() || begins_in(block) == begins_in(range.end - 1), "{range:?}");
                    let (mut next, mut bytes, mut is_more, mut is_wanted) = (0, Vec::new(), true, false);
                    while is_more {
                        is_more = ranges.read(range, &mut next, &mut bytes).unwrap();
                        entry::each(&bytes, |_, end, operation| {
                            if range.has(operation.key) {
                                is_wanted = true;
                                found.entry(operation.key).or_default().push(Lsn(end.0 - 8));
                            }
                        });
                    }
                    assert_eq!(is_wanted, range.partition.is_some(), "{lies:?} {range:?}");
                    block = range.end;
                }
            }
            assert_eq!(found, expected, "{lies:?}");
            let mut all: FxHashSet<PageKey> = ranges.ranges.keys().copied().collect();
            assert_eq!(ranges.left(&all), [0; 0]);
            all.remove(&ranges.at(PageKey::new(1, RELSEG_SIZE)).first);
            assert_eq!(ranges.left(&all).len(), 1);
        }
    });
}

#[test]
fn as_many_runs_as_there_are_partitions_for() {
    let blocks = |bytes, partitions| RunTable::of_base(bytes, partitions).blocks;
    assert_eq!(blocks(0, 256), USUAL_BLOCKS);
    assert_eq!(blocks(1, 256), LEAST_BLOCKS);
    assert_eq!(blocks(u64::MAX, 16), RELSEG_SIZE);
    for (bytes, partitions) in [(2_500_000_000, 384), (1 << 40, 8192)] {
        let of_all = bytes / BLCKSZ as u64 / u64::from(blocks(bytes, partitions));
        assert!((partitions as u64 / 2..partitions as u64 * 2 / 3).contains(&of_all), "{of_all} of {partitions}");
    }
    let mut table = RunTable::of_base(0, 4);
    assert_eq!(
        table.run_of(PageKey::new(3, RELSEG_SIZE + 4097), ForkNumber::Main),
        PageKey::new(3, RELSEG_SIZE + 4096)
    );
    let numbers = [5, 6, 5, 7, 8].map(|fork| table.number(PageKey::new(fork, 0)));
    assert_eq!(numbers, [1, 2, 1, 3, 1]);
    assert_eq!(table.number(table.run_of(PageKey::new(9, 7), ForkNumber::FreeSpaceMap)), MAPS);
}
