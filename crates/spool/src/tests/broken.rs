//! A disk that is full, and one that fails.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use walrider_layout::history::MAX_HISTORY_BYTES;
use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;

use super::{MB, ONE, name, on, options, wal};
use crate::testing::{Call, Model};
use crate::{Spool, SpoolError, SpoolOptions};

/// Makes calls of one kind fail while the flag is set.
fn breaking(model: &Model, call: Call, kind: ErrorKind) -> Arc<AtomicBool> {
    let broken = Arc::new(AtomicBool::new(false));
    let flag = broken.clone();
    model.watch(move |seen, _| if seen == call && flag.load(Ordering::SeqCst) { Err(kind.into()) } else { Ok(()) });
    broken
}

/// Waits until the next segment has been prepared, or given up.
fn await_preparation(spool: &Spool) {
    use crate::state::Preparation::{Failed, Idle, Ready};
    while !matches!(spool.shared.lock().preparation, Idle | Ready(_) | Failed(_)) {
        std::thread::yield_now();
    }
}

#[test]
fn on_a_full_disk_nothing_moves_and_the_same_call_succeeds_later() {
    for (call, kind) in [
        (Call::Write, ErrorKind::StorageFull),
        (Call::Write, ErrorKind::QuotaExceeded),
        (Call::Create, ErrorKind::StorageFull),
        (Call::SyncAll, ErrorKind::StorageFull),
        (Call::Rename, ErrorKind::StorageFull),
    ] {
        for partial in [false, true] {
            let model = Model::default();
            let broken = breaking(&model, call, kind);
            let spool = on(&model, SpoolOptions { partial, ..options("".as_ref()) });
            let bytes = wal(MB, 3 * MB + 500);
            broken.store(true, Ordering::SeqCst);
            let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
            for _ in 0..3 {
                let error = writer.write(Lsn(MB), &bytes[..1000]).unwrap_err();
                assert!(error.is_full() && !error.is_final(), "{error}");
                assert!(error.to_string().ends_with("receiving goes on when there is space"), "{error}");
                assert_eq!((writer.written(), spool.written(), spool.flushed()), (Lsn(MB), Lsn(MB), Lsn(MB)));
            }
            broken.store(false, Ordering::SeqCst);
            writer.write(Lsn(MB), &bytes[..1000]).unwrap();
            await_preparation(&spool);
            spool.wait_flushed(Lsn(MB + 1000)).unwrap();
            if call != Call::Rename || !partial {
                // Across segments: what fits is written, but does not count. (That a complete segment cannot be renamed is
                // another matter: below.)
                broken.store(true, Ordering::SeqCst);
                let error = writer.write(Lsn(MB + 1000), &bytes[1000..]).unwrap_err();
                assert!(error.is_full(), "{error}");
                assert_eq!((writer.written(), spool.written()), (Lsn(MB + 1000), Lsn(MB + 1000)));
                broken.store(false, Ordering::SeqCst);
            }
            writer.write(Lsn(MB + 1000), &bytes[1000..]).unwrap();
            spool.wait_flushed(Lsn(3 * MB + 500)).unwrap();
            drop((writer, spool));
            let last = if partial { format!("{}.partial", name(ONE, 3)) } else { name(ONE, 3) };
            let read = |name: &str| model.read(name).unwrap();
            let all = [read(&name(ONE, 1)), read(&name(ONE, 2)), read(&last)].concat();
            assert!(all[..bytes.len()] == bytes);
            assert_eq!(temporary_files(&model), 0);
        }
    }
}

fn temporary_files(model: &Model) -> usize {
    use crate::files::Directory;
    model.names().unwrap().iter().filter(|name| name.starts_with("xlogtemp.")).count()
}

#[test]
fn space_that_came_back_is_found_without_asking_twice() {
    let model = Model::default();
    let broken = breaking(&model, Call::Create, ErrorKind::StorageFull);
    let spool = on(&model, options("".as_ref()));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    await_preparation(&spool);
    broken.store(true, Ordering::SeqCst);
    // The first is there; that the second cannot be prepared is not told before it is needed.
    writer.write(Lsn(MB), &vec![1; MB as usize]).unwrap();
    await_preparation(&spool);
    broken.store(false, Ordering::SeqCst);
    writer.write(Lsn(2 * MB), &[1]).unwrap();
}

#[test]
fn a_failed_fsync_is_final() {
    let model = Model::default();
    let broken = breaking(&model, Call::SyncData, ErrorKind::Other);
    let spool = on(&model, options("".as_ref()));
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    spool.on_flushed(Box::new(move |flushed| seen.lock().unwrap().push(flushed)));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    writer.write(Lsn(MB), &[1; 100]).unwrap();
    spool.wait_flushed(Lsn(MB + 100)).unwrap();
    broken.store(true, Ordering::SeqCst);
    // Though there is space: nobody knows what became of the pages.
    writer.write(Lsn(MB + 100), &[1; 100]).unwrap();
    let error = spool.wait_flushed(Lsn(MB + 200)).unwrap_err();
    assert!(error.is_final() && error.to_string().starts_with("could not fdatasync file \"model/"), "{error}");
    // It does not heal.
    broken.store(false, Ordering::SeqCst);
    let text = error.to_string();
    let same = |result: Result<(), SpoolError>| assert_eq!(result.unwrap_err().to_string(), text);
    same(writer.write(Lsn(MB + 200), &[1]));
    same(spool.wait_flushed(Lsn(MB + 200)));
    same(spool.check());
    same(spool.remove_before(Lsn(MB), ONE).map(drop));
    same(spool.write_history(TimelineId(2), b"").map(drop));
    assert_eq!(spool.flushed(), Lsn(MB + 100));
    assert_eq!(spool.wait_written_beyond(Lsn(9 * MB), spool.wakes(), Duration::MAX), Lsn(MB + 200));
    drop(writer);
    same(spool.start_at(ONE, Lsn(MB)).map(drop));
    // Its threads have done all they do.
    drop(spool);
    let calls = calls.lock().unwrap();
    assert_eq!(calls.last(), Some(&Lsn(MB + 100)), "woken once more, to find the failure: {calls:?}");
    assert!(calls.len() >= 2);
}

#[test]
fn a_directory_that_cannot_be_synced_is_final() {
    for partial in [false, true] {
        let model = Model::default();
        let broken = breaking(&model, Call::SyncDirectory, ErrorKind::Other);
        let spool = on(&model, SpoolOptions { partial, ..options("".as_ref()) });
        broken.store(true, Ordering::SeqCst);
        let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
        let written = writer.write(Lsn(MB), &[1]);
        assert_eq!(written.is_ok(), partial, "a .partial file's name is synced by the flusher");
        let error = spool.wait_flushed(Lsn(MB + 1)).and(spool.check()).unwrap_err();
        assert!(error.is_final() && error.to_string().starts_with("could not fsync directory"), "{error}");
        assert_eq!(spool.flushed(), Lsn(MB));
    }
}

#[test]
fn a_complete_segment_that_cannot_be_renamed_is_final() {
    let model = Model::default();
    let whole = name(ONE, 1);
    let refused = whole.clone();
    model.watch(move |call, name| match call {
        Call::Rename if name == refused => Err(io::Error::from(ErrorKind::PermissionDenied)),
        _ => Ok(()),
    });
    let spool = on(&model, SpoolOptions { partial: true, ..options("".as_ref()) });
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    writer.write(Lsn(MB), &vec![1; MB as usize]).unwrap();
    // It is durable under the other name, but from there it would be received again.
    spool.wait_flushed(Lsn(2 * MB)).unwrap_err();
    assert!(spool.flushed() < Lsn(2 * MB));
    assert!(spool.check().unwrap_err().to_string().starts_with("could not rename to \"model/"));
    assert!(model.read(&whole).is_none() && model.read(&format!("{whole}.partial")).is_some());
}

#[test]
fn marks_for_the_archiver_may_fail() {
    let model = Model::default();
    model.watch(|call, name| match call {
        Call::Create if name.starts_with("archive_status") => Err(ErrorKind::StorageFull.into()),
        _ => Ok(()),
    });
    let spool = on(&model, SpoolOptions { archive_status: crate::ArchiveStatus::Done, ..options("".as_ref()) });
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    writer.write(Lsn(MB), &vec![1; MB as usize + 1]).unwrap();
    drop(writer);
    // Waits until the flusher is at rest.
    let writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    assert_eq!(spool.stats().archive_status_failures, 1);
    spool.check().unwrap();
    drop(writer);
}

#[test]
fn a_history_file_that_cannot_be_written_leaves_the_old_one() {
    let model = Model::default();
    let spool = on(&model, options("".as_ref()));
    spool.write_history(TimelineId(2), b"old").unwrap();
    for call in [Call::Create, Call::Write, Call::SyncAll, Call::Rename] {
        let broken = breaking(&model, call, ErrorKind::StorageFull);
        broken.store(true, Ordering::SeqCst);
        assert!(spool.write_history(TimelineId(2), b"new").unwrap_err().is_full(), "{call:?}");
        assert_eq!(model.read("00000002.history").unwrap(), b"old");
        assert_eq!(temporary_files(&model), 0);
    }
    model.watch_no_more();
    spool.write_history(TimelineId(2), b"new").unwrap();
    assert_eq!(model.after_power_loss(Random(1).draws()).read("00000002.history").unwrap(), b"new");
    let long = vec![b'#'; MAX_HISTORY_BYTES as usize + 1];
    assert!(matches!(spool.write_history(TimelineId(2), &long), Err(SpoolError::Refused(_))));
}

#[test]
fn an_interrupted_call_is_made_again() {
    let model = Model::default();
    let calls = AtomicU64::new(0);
    model.watch(move |call, _| match call {
        Call::Write if calls.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) => Err(ErrorKind::Interrupted.into()),
        _ => Ok(()),
    });
    let spool = on(&model, options("".as_ref()));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let bytes = wal(MB, 2 * MB + 10);
    writer.write(Lsn(MB), &bytes).unwrap();
    drop((writer, spool));
    assert!(model.read(&name(ONE, 1)).unwrap() == bytes[..MB as usize]);
}
