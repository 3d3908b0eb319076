//! A slow disk. Nothing is timed: what must not wait happens while what is slow stands still.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use walrider_layout::Lsn;
use walrider_seed::Random;

use super::{MB, ONE, name, on, options, wal, write_to};
use crate::testing::{Call, Gate, GateGuard, Model};
use crate::{Spool, SpoolOptions, Writer, max_unsynced};

/// Longer than anything here takes that is not held up.
const LONG: Duration = Duration::from_secs(60);

/// A spool at `MB` whose calls of one kind, on names that `which` picks, stop at the gate.
pub(super) fn held_up(
    call: Call,
    which: impl Fn(&str) -> bool + Send + Sync + 'static,
) -> (Arc<Spool>, Writer, GateGuard) {
    let (model, gate) = (Model::default(), Arc::new(Gate::default()));
    let spool = on(&model, options("".as_ref()));
    let at_gate = gate.clone();
    model.watch(move |seen, name| {
        if seen == call && which(name) {
            at_gate.pass();
        }
        Ok(())
    });
    let writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    (spool, writer, gate.guard())
}

/// Writes up to `end` in another thread.
fn writing(mut writer: Writer, end: u64) -> (mpsc::Receiver<()>, thread::JoinHandle<Writer>) {
    let (done, is_done) = mpsc::channel();
    let from = writer.written().0;
    let thread = thread::spawn(move || {
        write_to(&mut writer, &wal(from, end), from, end, 50_000, &mut Random(1));
        // Nobody listens when the test has failed.
        let _ = done.send(());
        writer
    });
    (is_done, thread)
}

#[test]
fn no_write_waits_for_an_fsync() {
    let (spool, mut writer, gate) = held_up(Call::SyncData, |_| true);
    gate.close();
    writer.write(Lsn(MB), &[1; 100]).unwrap();
    gate.await_someone();
    // The flusher now stands in its fdatasync, and goes on standing there, over several segments.
    let (is_done, thread) = writing(writer, 4 * MB + 77);
    is_done.recv_timeout(LONG).expect("writes while an fdatasync is held up");
    assert_eq!((spool.written(), spool.flushed()), (Lsn(4 * MB + 77), Lsn(MB)));
    assert_eq!(spool.wait_written_beyond(Lsn(4 * MB), spool.wakes(), Duration::ZERO), Lsn(4 * MB + 77));
    gate.open();
    spool.wait_flushed(Lsn(4 * MB + 77)).unwrap();
    assert_eq!(spool.flushed(), Lsn(4 * MB + 77));
    drop(thread.join().unwrap());
}

#[test]
fn flushed_moves_by_files_in_order() {
    let (spool, mut writer, gate) = held_up(Call::SyncData, |_| true);
    let (tell, told) = mpsc::channel();
    spool.on_flushed(Box::new(move |flushed| tell.send(flushed).unwrap()));
    gate.close();
    writer.write(Lsn(MB), &[1; 100]).unwrap();
    gate.await_someone();
    writer.write(Lsn(MB + 100), &vec![2; 2 * MB as usize]).unwrap();
    gate.open();
    for expected in [MB + 100, 2 * MB, 3 * MB, 3 * MB + 100] {
        assert_eq!(told.recv_timeout(LONG).unwrap(), Lsn(expected));
    }
}

#[test]
fn the_next_segment_is_there_before_it_is_needed_or_waited_for() {
    let next = format!("xlogtemp.walrider.{}", name(ONE, 2));
    let (spool, writer, gate) = held_up(Call::SyncAll, move |name| name == next);
    gate.close();
    // To the end of the first: the second is not ready, and not needed.
    let (is_done, thread) = writing(writer, 2 * MB);
    is_done.recv_timeout(LONG).expect("writes while the next segment is prepared");
    let writer = thread.join().unwrap();
    gate.await_someone();
    let (is_done, thread) = writing(writer, 2 * MB + 1);
    assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err(), "there is no second segment");
    assert_eq!(spool.written(), Lsn(2 * MB));
    gate.open();
    is_done.recv_timeout(LONG).unwrap();
    let waits = spool.stats().segment_waits;
    assert!((1..=2).contains(&waits), "{waits}");
    drop(thread.join().unwrap());
}

#[test]
fn receiving_begins_again_when_all_is_flushed() {
    let (spool, mut writer, gate) = held_up(Call::SyncData, |_| true);
    gate.close();
    writer.write(Lsn(MB), &vec![1; 2 * MB as usize + 5]).unwrap();
    gate.await_someone();
    drop(writer);
    let (begun, has_begun) = mpsc::channel();
    let again = spool.clone();
    let thread = thread::spawn(move || {
        let writer = again.start_at(ONE, Lsn(3 * MB)).unwrap();
        begun.send(()).unwrap();
        writer
    });
    assert!(has_begun.recv_timeout(Duration::from_millis(50)).is_err());
    assert_eq!(spool.written(), Lsn(3 * MB + 5));
    gate.open();
    has_begun.recv_timeout(LONG).unwrap();
    assert_eq!((spool.written(), spool.flushed()), (Lsn(3 * MB), Lsn(3 * MB)));
    drop(thread.join().unwrap());
}

#[test]
fn a_disk_that_lags_far_behind_stops_the_writer() {
    let (spool, mut writer, gate) = held_up(Call::SyncData, |_| true);
    gate.close();
    writer.write(Lsn(MB), &[1]).unwrap();
    gate.await_someone();
    let most = (max_unsynced() as u64 + 1) * MB;
    let (is_done, thread) = {
        let (done, is_done) = mpsc::channel();
        let piece = vec![1; MB as usize];
        let thread = thread::spawn(move || {
            while writer.written().0 < most + MB {
                let at = writer.written();
                writer.write(at, &piece[..(MB - at.0 % MB) as usize]).unwrap();
                writer.announce();
            }
            done.send(()).unwrap();
        });
        (is_done, thread)
    };
    while spool.written() < Lsn(most) {
        spool.wait_written_beyond(spool.written(), spool.wakes(), LONG);
    }
    assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err());
    assert_eq!(spool.written(), Lsn(most));
    gate.open();
    is_done.recv_timeout(LONG).unwrap();
    thread.join().unwrap();
}

#[test]
fn what_was_written_is_flushed_when_the_spool_is_dropped() {
    let model = Model::default();
    let spool = on(&model, options("".as_ref()));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let bytes = wal(MB, 2 * MB + 300);
    writer.write(Lsn(MB), &bytes).unwrap();
    drop((writer, spool));
    let left = model.after_power_loss(Random(1).draws());
    let read = [left.read(&name(ONE, 1)).unwrap(), left.read(&name(ONE, 2)).unwrap()].concat();
    assert!(read[..bytes.len()] == bytes);
}

/// A segment that was durable and still `.partial` was removed, and its renaming then failed.
#[test]
fn a_segment_is_not_removed_before_it_has_its_name() {
    let (model, gate) = (Model::default(), Arc::new(Gate::default()));
    let (whole, at_gate) = (name(ONE, 1), gate.clone());
    let renamed = whole.clone();
    model.watch(move |call, name| {
        if call == Call::Rename && name == renamed {
            at_gate.pass();
        }
        Ok(())
    });
    let spool = on(&model, SpoolOptions { partial: true, ..options("".as_ref()) });
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let gate = gate.guard();
    gate.close();
    writer.write(Lsn(MB), &vec![1; MB as usize + 1]).unwrap();
    gate.await_someone();
    assert_eq!(spool.flushed(), Lsn(MB), "nobody is told before it has its name");
    assert_eq!(spool.remove_before(Lsn(2 * MB), ONE).unwrap().removed, 0);
    gate.open();
    spool.wait_flushed(Lsn(2 * MB + 1)).unwrap();
    assert!(model.read(&whole).is_some());
    assert_eq!(spool.remove_before(Lsn(2 * MB), ONE).unwrap().removed, 1);
}

#[test]
fn what_an_earlier_run_did_not_flush_is_flushed_first() {
    let (model, gate) = (Model::default(), Arc::new(Gate::default()));
    let at_gate = gate.clone();
    model.watch(move |call, _| {
        if call == Call::SyncData {
            at_gate.pass();
        }
        Ok(())
    });
    let spool = on(&model, options("".as_ref()));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let gate = gate.guard();
    gate.close();
    let bytes = wal(MB, 3 * MB + 900);
    writer.write(Lsn(MB), &bytes).unwrap();
    gate.await_someone();
    let left = model.after_kill();
    // The next run goes on where this one stood, says that all before is flushed, and the power goes.
    let next = on(&left, options("".as_ref()));
    let next_writer = next.start_at(ONE, Lsn(3 * MB + 900)).unwrap();
    assert_eq!(next.flushed(), Lsn(3 * MB + 900));
    for seed in 0..20 {
        let left = left.after_power_loss(Random(seed).draws());
        let read: Vec<u8> = (1..=3).flat_map(|number| left.read(&name(ONE, number)).unwrap()).collect();
        assert!(read[..bytes.len()] == bytes, "seed {seed}");
    }
    drop(next_writer);
}

#[test]
fn a_recycled_segment_is_not_used_before_its_name_is_durable() {
    let (model, gate) = (Model::default(), Arc::new(Gate::default()));
    let at_gate = gate.clone();
    let fifth = format!("xlogtemp.walrider.{}", name(ONE, 5));
    model.watch(move |call, name| {
        // Nobody else syncs the directory by chance.
        let remover = call == Call::SyncDirectory && thread::current().name() == Some("remover");
        if remover || call == Call::Create && name == fifth {
            at_gate.pass();
        }
        Ok(())
    });
    let spool = on(&model, SpoolOptions { max_recycled: 2, ..options("".as_ref()) });
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    writer.write(Lsn(MB), &wal(MB, 2 * MB + 1)).unwrap();
    spool.wait_flushed(Lsn(2 * MB + 1)).unwrap();
    while model.read(&name(ONE, 3)).is_none() {
        thread::yield_now();
    }
    let gate = gate.guard();
    gate.close();
    // The first becomes the fourth, and that is not durable yet.
    let remover = {
        let spool = spool.clone();
        let remove = move || spool.remove_before(Lsn(2 * MB), ONE).unwrap();
        thread::Builder::new().name("remover".into()).spawn(remove).unwrap()
    };
    gate.await_someone();
    assert!(model.read(&name(ONE, 4)).is_some());
    let bytes = wal(2 * MB, 4 * MB + 900);
    writer.write(Lsn(2 * MB + 1), &bytes[1..]).unwrap();
    spool.wait_flushed(Lsn(4 * MB + 900)).unwrap();
    for seed in 0..20 {
        let left = model.after_power_loss(Random(seed).draws());
        let read = left.read(&name(ONE, 4)).expect("the recycled segment");
        assert!(read[..900] == bytes[2 * MB as usize..], "seed {seed}");
    }
    gate.open();
    assert_eq!(remover.join().unwrap().recycled, 1);
}
