//! Files that are written while others are made durable.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use walrider_datadir::relation::RelationFiles;
use walrider_layout::{BLCKSZ, ForkNumber, RelFileLocator};

/// Writes to see; of 20,000 in memory, 796 were forgotten.
const WRITES: usize = 3000;

/// Pages in each.
const PAGES: u32 = 256;

/// A file was marked before it was written. A restartpoint's thread took the mark, and had synced the file before all was written: the next
/// restartpoint did not sync it, and went past what a power cut could still take. Not tried is a power cut.
#[test]
fn a_write_that_a_sync_overlaps_is_not_forgotten() {
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    std::fs::create_dir_all(dir.path().join("base/5")).unwrap();
    let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
    let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };
    // Which write the last page was of when it was synced last; held while a sync is under way.
    let (ended, synced) = (AtomicBool::new(false), Mutex::new(0));
    let synced = || synced.lock().unwrap_or_else(PoisonError::into_inner);
    let mut forgotten = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let mut last = synced();
                for file in files.take_unsynced() {
                    let mut page = [0; BLCKSZ];
                    files.read(rel, ForkNumber::Main, PAGES - 1, &mut page).unwrap();
                    files.sync(file).unwrap();
                    *last = page[0];
                }
                drop(last);
                std::thread::yield_now();
            }
        });
        for number in (0..WRITES).map(|nth| nth as u8) {
            let page = [number; BLCKSZ];
            files.write(rel, ForkNumber::Main, 0, &mut [IoSlice::new(&page); PAGES as usize]).unwrap();
            let last = synced();
            forgotten += usize::from(files.take_unsynced().is_empty() && *last != number);
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(forgotten, 0, "of {WRITES}");
}
