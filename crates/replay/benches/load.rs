//! How long it takes to decode WAL, and to decode and plan it, which deals its changes of pages out to partitions: updates
//! and inserts on random pages, and commits.

use std::hint::black_box;
use std::io::{IoSliceMut, Read};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{ForkNumber, Lsn, Major, TimelineId};
use walrider_replay::load::Loader;
use walrider_replay::rels::RelTable;
use walrider_store::StoreError;
use walrider_store::read::ReadWal;
use walrider_wal::decode::{Stretch, WalFormat};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::pages::WalBuilder;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

const RECORDS: u32 = 100_000;
const START: Lsn = Lsn(16 << 20);
const FIRST: Lsn = Lsn(START.0 + 40);
const WINDOW: u64 = 2 << 20;

/// WAL in memory.
struct Memory(Vec<u8>);

impl ReadWal for Memory {
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError> {
        let mut there = self.0.get((from.0 - START.0) as usize..).unwrap_or(&[]);
        there.read_vectored(slices).map_err(|_| unreachable!("memory"))
    }

    fn timeline_at(&self, _lsn: Lsn) -> TimelineId {
        TimelineId(1)
    }

    fn describe(&self, lsn: Lsn) -> String {
        lsn.to_string()
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError> {
        Ok(lsn.0 < START.0 + self.0.len() as u64)
    }
}

fn format() -> WalFormat {
    WalFormat { major: Major::V18, segment_size: SegmentSize::default(), system_identifier: None }
}

fn wal() -> Memory {
    let mut wal = WalBuilder::new(SegmentSize::default(), TimelineId(1), START);
    for nth in 0..RECORDS {
        let block = nth.wrapping_mul(0x9E37_79B9) >> 16;
        let change = |info, main: usize, data: usize| {
            let builder = RecordBuilder::new(RmgrId::HEAP, info).xid(740).main_data(vec![0; main]);
            builder.block(0, TEST_REL, ForkNumber::Main, block).data(vec![7; data])
        };
        wal.record(match nth % 5 {
            0 => RecordBuilder::new(RmgrId::XACT, 0).xid(740).main_data([0; 8]),
            1 => change(0, 3, 34),
            _ => change(0x40, 14, 16),
        });
    }
    Memory(wal.bytes())
}

fn load(criterion: &mut Criterion) {
    let wal = wal();
    let mut group = criterion.benchmark_group("load");
    group.throughput(Throughput::Elements(u64::from(RECORDS)));
    let pages = wal.0.len() / 8192;
    let mut stretch = Stretch::new();
    group.bench_function("decode", |bencher| {
        bencher.iter(|| {
            stretch.reset(FIRST, true, Lsn(START.0 + wal.0.len() as u64), SegmentSize::default());
            let got = wal.read(START, &mut stretch.room(pages)).expect("memory");
            stretch.filled_up_to(Lsn(START.0 + got as u64));
            black_box(stretch.decode(&format(), TimelineId(1)));
            assert_eq!(stretch.places().len(), RECORDS as usize);
        });
    });
    let (rels, stretches) = (RelTable::default(), wal.0.len().div_ceil(WINDOW as usize));
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    // Buffers and plans go round, as in a replay.
    let mut spare = Vec::new();
    group.bench_function("decode and plan", |bencher| {
        bencher.iter(|| {
            let mut loader = Loader::new(format(), WINDOW, FIRST);
            spare.drain(..).for_each(|planned| loader.recycle(planned));
            spare = one_thread.install(|| loader.load(stretches, &wal, &rels));
            assert_eq!(spare.iter().map(|planned| planned.stretch.places().len()).sum::<usize>(), RECORDS as usize);
        });
    });
}

criterion_group!(benches, load);
criterion_main!(benches);
