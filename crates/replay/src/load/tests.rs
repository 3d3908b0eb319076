//! Loading of WAL that is made here, in stretches of any size, several at a time.

use std::io::{IoSliceMut, Read};

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, Major, TimelineId};
use walrider_store::StoreError;
use walrider_wal::decode::WalFormat;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::RecordBuilder;
use walrider_wal::testing::pages::WalBuilder;

use super::{Ending, Loader, ReadWal, read_record};
use crate::rels::RelTable;

const START: Lsn = Lsn(5 << 20);
const FIRST: Lsn = Lsn(START.0 + 40);

/// WAL in memory, of which the first `have` bytes are there.
struct Memory {
    bytes: Vec<u8>,
    have: usize,
}

impl ReadWal for Memory {
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError> {
        let mut there = self.bytes[..self.have].get((from.0 - START.0) as usize..).unwrap_or(&[]);
        there.read_vectored(slices).map_err(|_| unreachable!())
    }

    fn timeline_at(&self, _lsn: Lsn) -> TimelineId {
        TimelineId(1)
    }

    fn describe(&self, lsn: Lsn) -> String {
        lsn.to_string()
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError> {
        Ok(lsn.0 < START.0 + self.have as u64)
    }
}

fn loader(window: u64) -> Loader {
    let segment_size = SegmentSize::new(1 << 20).unwrap();
    let format = WalFormat { major: Major::V18, segment_size, system_identifier: Some(WalBuilder::SYSTEM_IDENTIFIER) };
    Loader::new(format, window, FIRST)
}

fn noop(len: usize) -> RecordBuilder {
    RecordBuilder::new(RmgrId::XLOG, 0x20).main_data(vec![len as u8; len])
}

/// Loads until the end, `count` stretches at a time.
fn load_all(loader: &mut Loader, wal: &Memory, count: usize) -> Vec<Lsn> {
    let rels = RelTable::default();
    let mut lsns = Vec::new();
    loop {
        let loaded = loader.load(count, wal, &rels);
        let whole = loaded.len();
        for planned in loaded {
            lsns.extend(planned.stretch.places().iter().map(|&place| planned.stretch.span(place).lsn));
            loader.recycle(planned);
        }
        if whole == 0
            && let Some(ending) = loader.take_ending()
        {
            assert!(matches!(ending, Ending::Ends { .. }), "{ending:?}");
            return lsns;
        }
    }
}

/// A control file, or a backup label, can state any position. In a build that checks arithmetic, the end of the stretch overflowed.
#[test]
fn a_position_where_no_wal_can_be_is_refused() {
    let (wal, at) = (Memory { bytes: Vec::new(), have: 0 }, Lsn(u64::MAX - 100));
    let mut loader = Loader { next: at, ..loader(1 << 16) };
    assert!(loader.load_ready(4, &wal, &RelTable::default()).is_empty());
    assert!(loader.load(4, &wal, &RelTable::default()).is_empty());
    let endings = [loader.take_ending().unwrap(), read_record(&wal, loader.format(), at).unwrap_err()];
    for ending in endings {
        assert!(
            matches!(&ending, Ending::Failed(error) if error.to_string().contains("FFFFFFFF/FFFFFF9B")),
            "{ending:?}"
        );
    }
}

/// `CHECKPOINT LOCATION` of a backup label can be any. In the last bytes of a page even the length of a record was read past it.
#[test]
fn a_position_that_no_record_has_is_refused() {
    let (wal, _) = wal();
    for at in [Lsn(START.0 + 8), Lsn(START.0 + (8 << 10) + 8), Lsn(FIRST.0 + 1), Lsn(START.0 + (8 << 10) - 3)] {
        let ending = read_record(&wal, loader(1 << 16).format(), at).unwrap_err();
        assert!(matches!(&ending, Ending::Failed(error) if error.to_string().contains(&at.to_string())), "{ending:?}");
    }
    assert!(read_record(&wal, loader(1 << 16).format(), FIRST).is_ok());
}

/// Records of many lengths, some over several stretches, one never finished, a switch of segments.
fn wal() -> (Memory, Vec<Lsn>) {
    let mut wal = WalBuilder::new(SegmentSize::new(1 << 20).unwrap(), TimelineId(1), START);
    let mut lsns = Vec::new();
    for len in (0..400).map(|nth| nth * 37 % 600).chain([100_000, 8_000, 50_000, 20, 8_100]) {
        lsns.push(wal.record(noop(len)));
    }
    wal.cut_record(noop(60_000));
    lsns.push(wal.record(noop(8)));
    lsns.push(wal.switch());
    lsns.extend((0..300).map(|len| wal.record(noop(len))));
    let bytes = wal.bytes();
    (Memory { have: bytes.len(), bytes }, lsns)
}

#[test]
fn every_record_is_loaded_whatever_the_stretches() {
    let (wal, lsns) = wal();
    for window in [8 << 10, 16 << 10, 64 << 10, 1 << 20] {
        for count in [1, 2, 7] {
            assert!(load_all(&mut loader(window), &wal, count) == lsns, "window {window}, {count} at a time");
        }
    }
}

/// With small stretches, as in following, one that holds nothing but a record that was never finished was taken for
/// damage.
#[test]
fn loading_goes_on_when_more_has_come() {
    let (mut wal, lsns) = wal();
    let whole = wal.bytes.len();
    for step in [8 << 10, 24 << 10, 200 << 10] {
        let mut loader = loader(16 << 10);
        let mut loaded = Vec::new();
        for have in (0..whole).step_by(step).chain([whole]) {
            wal.have = have;
            loaded.extend(load_all(&mut loader, &wal, 2));
        }
        assert!(loaded == lsns, "{step} bytes at a time");
    }
}

/// WAL that is there up to a position; who reads past it would have to wait.
struct Slow {
    wal: Memory,
    ready: Lsn,
}

impl ReadWal for Slow {
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError> {
        assert!(from < self.ready, "{from} is waited for");
        let room = (self.ready.0 - from.0) as usize;
        let have = self.wal.bytes.len().min((self.ready.0 - START.0) as usize);
        assert!(slices.iter().map(|slice| slice.len()).sum::<usize>() <= room, "{from} and what is past it");
        Memory { bytes: self.wal.bytes[..have].to_vec(), have }.read(from, slices)
    }

    fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        self.wal.timeline_at(lsn)
    }

    fn describe(&self, lsn: Lsn) -> String {
        lsn.to_string()
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError> {
        Ok(lsn < self.ready)
    }

    fn ready_up_to(&self, _from: Lsn) -> Lsn {
        self.ready
    }
}

/// Records go on from one stretch in the next, which may be in a segment that is still being fetched.
#[test]
fn beside_redo_nothing_is_waited_for() {
    let mut wal = WalBuilder::new(SegmentSize::new(1 << 20).unwrap(), TimelineId(1), START);
    for _ in 0..3000 {
        wal.record(noop(1000));
    }
    let bytes = wal.bytes();
    let mut slow = Slow { wal: Memory { have: bytes.len(), bytes }, ready: START };
    let mut loader = loader(256 << 10);
    let rels = RelTable::default();
    let mut loaded = Vec::new();
    for (ready, expected) in [(0, 0), (1, 3), (1, 3), (2, 7), (2, 7)] {
        slow.ready = Lsn(START.0 + (ready << 20));
        loaded.extend(loader.load_ready(100, &slow, &rels));
        assert_eq!(loaded.len(), expected, "{ready} segments");
        let stretches = (expected as u64) << 18;
        assert!((START.0 + stretches..START.0 + stretches + 2000).contains(&loader.position().0));
    }
    assert!(loader.take_ending().is_none());
}
