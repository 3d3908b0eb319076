//! Archives in directories and in object stores do the same.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use walrider_archive::ahead::Ahead;
use walrider_archive::archive::{Backend, Look};
use walrider_archive::frame::Packing;
use walrider_archive::name::WalName;
use walrider_archive::objects::Objects;
use walrider_archive::restore::{Cluster, Request, Restored};
use walrider_archive::spool::Spool;
use walrider_archive::{Archive, ArchiveError, Place, Put};
use walrider_layout::wal::{LongHeader, SegmentSize, WalPageHeader, XLP_LONG_HEADER};
use walrider_layout::{Lsn, TimelineId};

const SIZE: u32 = 1 << 20;
const SYSTEM: u64 = 77;

fn segment(segment: u64, filler: u8) -> Vec<u8> {
    let long = LongHeader { system_identifier: SYSTEM, segment_size: SIZE, page_size: 8192 };
    let header = WalPageHeader {
        magic: 0xD118,
        info: XLP_LONG_HEADER,
        timeline: TimelineId(1),
        page_address: Lsn(segment * u64::from(SIZE)),
        remaining_len: 0,
        long: Some(long),
    };
    let mut contents = Vec::new();
    header.write(&mut contents);
    contents.resize(SIZE as usize, filler);
    contents
}

fn name(text: &str) -> WalName {
    WalName::parse(text).unwrap()
}

fn numbered(number: u64) -> WalName {
    name(&format!("0000000100000000{number:08X}"))
}

fn in_store(store: Arc<dyn ObjectStore>) -> Archive {
    Archive::new(Box::new(Objects::new(store, "a/prefix".into(), "s3://bucket/a/prefix").unwrap()))
}

/// Each kind of archive, empty.
fn each(check: impl Fn(&Archive)) {
    let dir = tempfile::tempdir().unwrap();
    check(&Archive::open(&Place::parse(dir.path().to_str().unwrap()).unwrap()).unwrap());
    check(&in_store(Arc::new(InMemory::new())));
    let dir = tempfile::tempdir().unwrap();
    check(&in_store(Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap())));
}

fn get(archive: &Archive, name: &WalName) -> Option<Vec<u8>> {
    archive.get(name, &mut || ()).unwrap().map(|fetched| fetched.contents)
}

#[test]
fn what_is_put_is_got() {
    each(|archive| {
        let history = name("00000002.history");
        assert!(matches!(archive.get(&history, &mut || ()), Err(ArchiveError::Empty { .. })));
        for (number, packing) in (1..).zip(Packing::ALL) {
            assert_eq!(archive.put(&numbered(number), &segment(number, 1), packing).unwrap(), Put::Done);
            assert_eq!(get(archive, &numbered(number)), Some(segment(number, 1)));
        }
        assert_eq!(get(archive, &history), None);
        assert_eq!(get(archive, &numbered(4)), None);
        let partial = name("000000010000000000000001.partial");
        let backup = name("000000010000000000000001.00000028.backup");
        assert_eq!(get(archive, &partial), None);
        archive.put(&history, b"1\t0/3000000\tno recovery target\n", Packing::Zstd).unwrap();
        archive.put(&partial, &segment(1, 2), Packing::Zstd).unwrap();
        archive.put(&backup, b"START", Packing::Lz4).unwrap();
        assert_eq!(get(archive, &history).unwrap(), b"1\t0/3000000\tno recovery target\n");
        assert_eq!(get(archive, &partial), Some(segment(1, 2)));
        assert_eq!(get(archive, &backup).unwrap(), b"START");
        assert_eq!(get(archive, &numbered(1)), Some(segment(1, 1)));
    });
}

#[test]
fn nothing_is_replaced() {
    each(|archive| {
        archive.put(&numbered(5), &segment(5, 1), Packing::Lz4).unwrap();
        for packing in Packing::ALL {
            assert_eq!(archive.put(&numbered(5), &segment(5, 1), packing).unwrap(), Put::Again);
            let error = archive.put(&numbered(5), &segment(5, 2), packing).unwrap_err();
            assert!(matches!(error, ArchiveError::Different { .. }), "{error}");
            assert!(error.to_string().contains("000000010000000000000005.lz4"), "{error}");
        }
        assert_eq!(get(archive, &numbered(5)), Some(segment(5, 1)));
        let error = archive.put(&numbered(6), &segment(5, 1), Packing::Zstd).unwrap_err().to_string();
        assert!(error.contains("it begins at 0/500000, and its name says 0/600000"), "{error}");
        assert_eq!(get(archive, &numbered(6)), None);
    });
}

#[test]
fn old_segments_expire() {
    each(|archive| {
        for number in 1..6 {
            archive.put(&numbered(number), &segment(number, 1), Packing::ALL[number as usize % 3]).unwrap();
        }
        archive.put(&name("000000010000000000000002.00000028.backup"), b"START", Packing::Raw).unwrap();
        archive.put(&name("00000002.history"), b"x", Packing::Raw).unwrap();
        assert_eq!(archive.expire(&name("000000020000000000000004"), true).unwrap(), 4);
        assert_eq!(archive.expire(&name("000000020000000000000004"), false).unwrap(), 4);
        assert_eq!(archive.expire(&name("000000020000000000000004"), false).unwrap(), 0);
        let left: Vec<u64> = (1..6).filter(|&number| get(archive, &numbered(number)).is_some()).collect();
        assert_eq!(left, [4, 5]);
        assert!(get(archive, &name("00000002.history")).is_some());
    });
}

#[test]
fn damage_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::open(&Place::Directory(dir.path().to_owned())).unwrap();
    archive.put(&numbered(5), &segment(5, 1), Packing::Raw).unwrap();
    let path = dir.path().join("wal/00000001/000000010000000000000005.raw");
    let good = fs::read(&path).unwrap();
    for (at, len) in [(500_000, good.len()), (3, good.len()), (40, good.len()), (0, 1000), (0, 0)] {
        let mut bad = good[..len].to_vec();
        if let Some(byte) = bad.get_mut(at) {
            *byte ^= 0x10;
        }
        fs::write(&path, bad).unwrap();
        let error = archive.get(&numbered(5), &mut || ()).unwrap_err();
        assert!(matches!(error, ArchiveError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("000000010000000000000005.raw\" is damaged"), "{error}");
        assert!(archive.put(&numbered(5), &segment(5, 1), Packing::Raw).is_err());
    }
    // Another segment's object under this name.
    archive.put(&numbered(6), &segment(6, 1), Packing::Raw).unwrap();
    fs::copy(path.with_file_name("000000010000000000000006.raw"), &path).unwrap();
    assert!(matches!(archive.get(&numbered(5), &mut || ()), Err(ArchiveError::Damaged { .. })));
}

/// What a `put` that was killed left behind is in nobody's way, and goes.
#[test]
fn what_was_left_unfinished_goes() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::open(&Place::Directory(dir.path().to_owned())).unwrap();
    let unfinished = dir.path().join("wal/unfinished");
    fs::create_dir_all(&unfinished).unwrap();
    fs::write(unfinished.join("000000010000000000000005.zst.1.0"), "half").unwrap();
    assert_eq!(get(&archive, &numbered(5)), None);
    archive.put(&numbered(5), &segment(5, 1), Packing::Zstd).unwrap();
    assert_eq!(fs::read_dir(&unfinished).unwrap().count(), 0);
    assert_eq!(archive.expire(&numbered(9), false).unwrap(), 1);
}

#[test]
fn a_directory_that_is_not_there_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::open(&Place::Directory(dir.path().join("mnt"))).unwrap();
    assert!(
        archive.put(&numbered(5), &segment(5, 1), Packing::Zstd).unwrap_err().to_string().contains("open directory")
    );
    assert!(archive.get(&numbered(5), &mut || ()).unwrap_err().to_string().contains("no archive"));
    assert!(!dir.path().join("mnt").exists());
}

/// Of many that put the same at once, with the same and with other contents, one contents wins, and stays.
#[test]
fn one_of_many_wins() {
    let dir = tempfile::tempdir().unwrap();
    let place = Place::Directory(dir.path().to_owned());
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for filler in 0..8 {
            let (place, done) = (&place, &done);
            scope.spawn(move || {
                let archive = Archive::open(place).unwrap();
                match archive.put(&numbered(5), &segment(5, filler / 2), Packing::Zstd) {
                    Ok(Put::Done) => assert_eq!(done.fetch_add(1, Ordering::Relaxed), 0),
                    Ok(Put::Again) | Err(ArchiveError::Different { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 1);
}

/// An archive that takes its time for every object.
struct Slow(Box<dyn Backend>, Duration);

impl Backend for Slow {
    fn read(&self, key: &str, found: &mut dyn FnMut()) -> walrider_archive::Result<Option<Vec<u8>>> {
        std::thread::sleep(self.1);
        self.0.read(key, found)
    }
    fn create(&self, key: &str, bytes: &[u8]) -> walrider_archive::Result<bool> {
        self.0.create(key, bytes)
    }
    fn settle(&self, key: &str) -> walrider_archive::Result<()> {
        self.0.settle(key)
    }
    fn which(&self, keys: &[String]) -> walrider_archive::Result<Option<String>> {
        self.0.which(keys)
    }
    fn look(&self, keys: &[String]) -> walrider_archive::Result<Look> {
        self.0.look(keys)
    }
    fn directories(&self) -> walrider_archive::Result<Vec<String>> {
        self.0.directories()
    }
    fn list(&self, directory: &str) -> walrider_archive::Result<Vec<String>> {
        self.0.list(directory)
    }
    fn remove(&self, keys: &[String]) -> walrider_archive::Result<()> {
        self.0.remove(keys)
    }
    fn shown(&self, key: &str) -> String {
        self.0.shown(key)
    }
}

fn slow(store: &Arc<InMemory>, delay: Duration) -> Archive {
    let objects = Objects::new(store.clone(), "".into(), "memory").unwrap();
    Archive::new(Box::new(Slow(Box::new(objects), delay)))
}

fn ahead(spool: &Spool, window: u64, idle: Duration) -> Ahead {
    Ahead { spool: spool.clone(), size: SegmentSize::new(SIZE).unwrap(), window, jobs: 8, idle }
}

/// Every segment is asked for by two at once, one after the other, while others fetch ahead: both have it, and most of the time is
/// hidden.
#[test]
fn what_is_fetched_ahead_is_handed_out() {
    const COUNT: u64 = 40;
    let delay = Duration::from_millis(100);
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    for number in 1..=COUNT {
        slow(&store, Duration::ZERO).put(&numbered(number), &segment(number, number as u8), Packing::Lz4).unwrap();
    }
    let cluster = Some(Cluster { system_identifier: SYSTEM, size: SegmentSize::new(SIZE) });
    let spool = Spool::of(&dir.path().join("spool"), &Place::parse("/memory").unwrap(), SYSTEM);
    let (began, spooled) = (Instant::now(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let start = |spool: &Spool, _: SegmentSize| {
            let (spool, store) = (spool.clone(), store.clone());
            scope.spawn(move || {
                ahead(&spool, 16, Duration::from_millis(500)).run(|| Ok(slow(&store, delay))).unwrap();
            });
        };
        let ask = |to: &Path, name: &WalName| {
            let request = Request { name, to, cluster, spool: Some(&spool), start: &start };
            request.restore(|| Ok(slow(&store, delay))).unwrap()
        };
        for number in 1..=COUNT {
            let to = dir.path().join(format!("to.{number}"));
            match ask(&to, &numbered(number)) {
                Restored::Spooled => spooled.fetch_add(1, Ordering::Relaxed),
                Restored::Fetched => 0,
                Restored::Missing => panic!("{number} is missing"),
            };
            assert_eq!(fs::read(&to).unwrap(), segment(number, number as u8));
        }
        let took = began.elapsed();
        assert!(took < delay * COUNT as u32 / 2, "{took:?}");
        assert_eq!(ask(&dir.path().join("no"), &numbered(COUNT + 1)), Restored::Missing);
        assert!(!dir.path().join("no").exists());
    });
    assert!(spooled.into_inner() > COUNT as usize - 5);
    assert!(!dir.path().join("spool").exists(), "it is removed once nobody asks");
}

/// A segment of another cluster in the archive is handed to nobody.
#[test]
fn another_clusters_segment_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    slow(&store, Duration::ZERO).put(&numbered(1), &segment(1, 1), Packing::Zstd).unwrap();
    let cluster = Some(Cluster { system_identifier: 1, size: None });
    let (to, name) = (dir.path().join("to"), numbered(1));
    let request = Request { name: &name, to: &to, cluster, spool: None, start: &|_, _| () };
    let error = request.restore(|| Ok(slow(&store, Duration::ZERO))).unwrap_err().to_string();
    assert!(error.contains("another cluster") && !to.exists(), "{error}");
}
