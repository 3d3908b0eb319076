//! WAL that comes before its primary has flushed it: what is in segments, what is held, and what is left of it after crashes
//! of everybody (`docs/spool.md`).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;

use super::slow::held_up;
use super::{MB, ONE, name, on, options, wal};
use crate::files::Directory;
use crate::prepare::TEMPORARY_PREFIX;
use crate::testing::{Call, Gate, Model};
use crate::{Spool, SpoolError, SpoolOptions};

const START: u64 = 3 * MB;

fn early_options() -> SpoolOptions {
    options("".as_ref())
}

/// What segments have from `START` on, up to the first page of zeros.
fn segments(model: &Model, len: u64) -> Vec<u8> {
    let count = (START + len).div_ceil(MB);
    (START / MB..count).flat_map(|number| model.read(&name(ONE, number)).unwrap_or(vec![0; MB as usize])).collect()
}

/// Releases what is held where replay reads what segments have; those that are gone were replayed.
fn release(spool: &Arc<Spool>, model: &Model, used: Lsn) -> bool {
    let same = |at: Lsn, bytes: &[u8]| {
        let (mut at, mut rest) = (at.0, bytes);
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(rest.len().min((MB - at % MB) as usize));
            let from = (at % MB) as usize;
            if model.read(&name(ONE, at / MB)).is_some_and(|file| file[from..from + piece.len()] != *piece) {
                return Ok::<_, SpoolError>(false);
            }
            (at, rest) = (at + piece.len() as u64, more);
        }
        Ok(true)
    };
    spool.release(&TimelineHistory::alone(ONE), ONE, used, same).unwrap()
}

/// A spool on what is left, and what it would promote of the WAL from `START` on, given that replay finds `valid` bytes.
fn promoted(left: &Model, valid: u64) -> Vec<u8> {
    let spool = on(left, early_options());
    let held = spool.shared.lock().tail.1.end().0;
    release(&spool, left, Lsn(START + valid));
    let end = held.max(START + valid) - START;
    let mut bytes = segments(left, end);
    bytes.truncate(end as usize);
    bytes
}

#[test]
fn segments_have_what_the_primary_has_flushed_and_no_more() {
    let model = Model::default();
    let spool = on(&model, early_options());
    let bytes = wal(START, START + 1000);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &bytes[..300], Lsn(START + 100)).unwrap();
    assert_eq!((writer.held(), spool.held()), (Lsn(START + 300), Lsn(START + 300)));
    assert_eq!((writer.written(), spool.written()), (Lsn(START + 100), Lsn(START + 100)));
    writer.write_ahead(Lsn(START + 300), &bytes[300..400], Lsn(START)).unwrap();
    assert_eq!(segments(&model, 1), [&bytes[..100], &vec![0; MB as usize - 100]].concat());
    writer.write_ahead(Lsn(START + 400), &[], Lsn(START + 350)).unwrap();
    assert_eq!((writer.held(), writer.written()), (Lsn(START + 400), Lsn(START + 350)));
    assert_eq!(segments(&model, 1), [&bytes[..350], &vec![0; MB as usize - 350]].concat());
    // A horizon that is ahead of all that came says nothing of what is to come.
    writer.write_ahead(Lsn(START + 400), &[], Lsn(START + 900)).unwrap();
    assert_eq!(writer.written(), Lsn(START + 400));
    writer.write_ahead(Lsn(START + 400), &bytes[400..], Lsn(START + 900)).unwrap();
    assert_eq!(segments(&model, 1), [&bytes[..900], &vec![0; MB as usize - 900]].concat());
    drop(writer);
    spool.wait_flushed(Lsn(START + 900)).unwrap();
    drop(spool);
    assert_eq!(promoted(&model.after_kill(), 900), bytes);
    // An incomplete record at the end: replay finds less than there is.
    assert_eq!(promoted(&model.after_kill(), 850), bytes);
}

#[test]
fn a_flush_is_told_when_the_log_is_durable_and_segments_follow_later() {
    let model = Model::default();
    let synced = Arc::new(Mutex::new(Vec::new()));
    let seen = synced.clone();
    model.watch(move |call, name| {
        if call == Call::SyncData {
            seen.lock().unwrap().push(name.to_owned());
        }
        Ok(())
    });
    let spool = on(&model, early_options());
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    let bytes = wal(START, START + 2000);
    for at in (0..2000).step_by(100) {
        writer.write_ahead(Lsn(START + at), &bytes[at as usize..][..100], Lsn(START + at)).unwrap();
        while spool.held_durable() < Lsn(START + at + 100) {
            std::thread::yield_now();
        }
    }
    assert_eq!((spool.flushed(), spool.written()), (Lsn(START), Lsn(START + 1900)));
    assert!(synced.lock().unwrap().iter().all(|name| name.starts_with("walrider.early.")));
    // Replay is about to write a page.
    spool.wait_flushed(Lsn(START + 1900)).unwrap();
    assert!(synced.lock().unwrap().last().unwrap().ends_with(&name(ONE, 3)));
    assert_eq!(spool.flushed(), Lsn(START + 1900));
}

#[test]
fn what_is_held_stays_until_it_comes_again_or_something_else_does() {
    let model = Model::default();
    let spool = on(&model, early_options());
    let old = wal(START, START + 600);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &old, Lsn(START + 200)).unwrap();
    drop(writer);
    // Only the connection was lost.
    let mut writer = spool.start_at(ONE, Lsn(START + 200)).unwrap();
    assert_eq!((spool.held(), spool.held_durable()), (Lsn(START + 200), Lsn(START + 200)));
    writer.write_ahead(Lsn(START + 200), &old[200..300], Lsn(START + 250)).unwrap();
    assert_eq!(promoted(&model.after_kill(), 250), old);
    drop(writer);
    // The primary has lost what it had not flushed, and begins with something else.
    let mut new = old[..400].to_vec();
    new.extend([0xEE; 50]);
    let mut writer = spool.start_at(ONE, Lsn(START + 250)).unwrap();
    writer.write_ahead(Lsn(START + 250), &new[250..350], Lsn(START + 250)).unwrap();
    assert_eq!(promoted(&model.after_kill(), 250), old, "nothing speaks against it yet");
    writer.write_ahead(Lsn(START + 350), &new[350..], Lsn(START + 250)).unwrap();
    assert_eq!(promoted(&model.after_kill(), 250), new);
}

/// What had been reported of the old timeline counts until as much of the new one has come: two primaries may be lost in a row.
#[test]
fn what_is_held_stays_until_another_timeline_has_come_as_far() {
    let model = Model::default();
    let spool = on(&model, early_options());
    let bytes = wal(START, START + 600);
    let mut writer = spool.start_at(TimelineId(2), Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &bytes, Lsn(START + 200)).unwrap();
    drop(writer);
    // The one before it is streamed once more: that has nothing to do with it.
    drop(spool.start_at(ONE, Lsn(START)).unwrap());
    assert!(!release(&spool, &model, Lsn(START)));
    // The next one begins past what is held, and not so far with what has come.
    let text = "2\t0/300200\tx\n";
    let three = TimelineHistory::parse(TimelineId(3), text).unwrap();
    spool.write_history(TimelineId(3), text.as_bytes()).unwrap();
    let mut writer = spool.start_at(TimelineId(3), Lsn(START)).unwrap();
    writer.write(Lsn(START), &bytes[..100]).unwrap();
    drop((writer, spool));
    for left in [model.after_kill(), model.after_power_loss(Random::printed().draws())] {
        let spool = on(&left, early_options());
        assert!(spool.holds_past(&three, Lsn(START + 100)));
        let same = |_: Lsn, before: &[u8]| Ok::<_, SpoolError>(before.is_empty());
        assert!(spool.release(&three, TimelineId(3), Lsn(START + 100), same).unwrap());
        assert_eq!(left.read(&name(TimelineId(3), 3)).unwrap()[100..0x200], bytes[100..0x200]);
        assert_eq!(left.read(&name(TimelineId(3), 3)).unwrap()[0x200], 0, "the old timeline was left there");
    }
    // Once WAL of the new one is held, only that counts, and what precedes is durable.
    let spool = on(&model, early_options());
    let mut writer = spool.start_at(TimelineId(3), Lsn(START + 100)).unwrap();
    writer.write(Lsn(START + 100), &[3; 600]).unwrap();
    writer.write_ahead(Lsn(START + 700), &[4; 10], Lsn(START + 700)).unwrap();
    let left = model.after_power_loss(Random::printed().draws());
    assert_eq!(left.read(&name(TimelineId(3), 3)).unwrap()[100..700], [3; 600]);
    drop((writer, spool));
    let spool = on(&model, early_options());
    assert_eq!(spool.shared.lock().tail.1.start(), Lsn(START + 700));
}

/// A stock server was started on the directory, and has received other WAL.
#[test]
fn what_somebody_else_has_received_since_counts() {
    let model = Model::default();
    let spool = on(&model, early_options());
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &[1; 600], Lsn(START + 200)).unwrap();
    drop((writer, spool));
    let file = model.open(&name(ONE, 3)).unwrap();
    file.write_at(&[2; 300], 200).unwrap();
    let spool = on(&model, early_options());
    assert!(!release(&spool, &model, Lsn(START + 500)));
    assert!(!release(&spool, &model, Lsn(START + 700)));
    assert!(release(&spool, &model, Lsn(START + 200)));
}

/// WAL that was flushed when it came, between two entries of the log: the second must not make the first one be forgotten, as
/// long as segments do not have durably what that holds.
#[test]
fn the_log_has_no_gaps_while_it_is_needed() {
    let mut random = Random::printed();
    for _ in 0..20 {
        let (model, gate) = (Model::default(), Arc::new(Gate::default()));
        let spool = on(&model, early_options());
        let at_gate = gate.clone();
        let gate = gate.guard();
        model.watch(move |call, name| {
            if call == Call::SyncData && !name.contains("early") {
                at_gate.pass();
            }
            Ok(())
        });
        let bytes = wal(START, START + 4000);
        let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
        gate.close();
        let mut write = |to: u64, horizon: u64| {
            let at = writer.held().0 - START;
            writer.write_ahead(Lsn(START + at), &bytes[at as usize..to as usize], Lsn(START + horizon)).unwrap();
        };
        write(1000, 1000);
        gate.await_someone();
        // The flusher is on its way with the first thousand.
        write(2000, 1000);
        write(2000, 2000);
        write(3000, 3000);
        gate.let_one_pass();
        while spool.held_durable() < Lsn(START + 2000) {
            std::thread::yield_now();
        }
        let (durable, fsyncs) = (spool.held_durable().0 - START, spool.stats().fsyncs);
        write(4000, 3000);
        while spool.stats().fsyncs == fsyncs {
            std::thread::yield_now();
        }
        let left = model.after_power_loss(random.draws());
        let truth = Truth { bytes: bytes.clone(), horizon: 3000, durable, received: 4000 };
        check(&left, durable, &truth);
        gate.open();
    }
}

#[test]
fn a_full_disk_loses_nothing() {
    let model = Model::default();
    let full = Arc::new(Mutex::new(None::<&str>));
    let which = full.clone();
    model.watch(move |call, name| match *which.lock().unwrap() {
        Some(full) if matches!(call, Call::Write | Call::Create) && name.contains(full) => {
            Err(io::ErrorKind::StorageFull.into())
        }
        _ => Ok(()),
    });
    let spool = on(&model, early_options());
    let bytes = wal(START, START + 900);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    for (at, full_file) in [(0, "early"), (300, "early"), (600, "0000000")] {
        *full.lock().unwrap() = Some(full_file);
        let horizon = Lsn(START + at + 100);
        let error = writer.write_ahead(Lsn(START + at), &bytes[at as usize..][..300], horizon).unwrap_err();
        assert!(error.is_full(), "{error}");
        *full.lock().unwrap() = None;
        let received = writer.held();
        writer.write_ahead(received, &bytes[(received.0 - START) as usize..at as usize + 300], horizon).unwrap();
        assert_eq!((writer.held().0, writer.written().0), (START + at + 300, START + at + 100));
    }
    drop((writer, spool));
    assert_eq!(promoted(&model, 700), bytes);
}

/// The log has more than segments: a restartpoint removed those before its redo position. A promotion compared what was gone,
/// and could never be.
#[test]
fn what_restartpoints_have_removed_is_not_compared() {
    let model = Model::default();
    let spool = on(&model, early_options());
    let bytes = wal(START, START + 2 * MB + 600);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &bytes, Lsn(START)).unwrap();
    writer.write_ahead(writer.held(), &[], Lsn(START + 2 * MB + 100)).unwrap();
    drop((writer, spool));
    let spool = on(&model, early_options());
    assert_eq!(spool.shared.lock().tail.1.start(), Lsn(START));
    let removed = spool.remove_before(Lsn(START + 2 * MB), ONE).unwrap();
    assert_eq!((removed.recycled + removed.removed, model.read(&name(ONE, 3))), (2, None));
    assert!(release(&spool, &model, Lsn(START + 2 * MB + 100)));
    assert_eq!(model.read(&name(ONE, 5)).unwrap()[..600], bytes[2 * MB as usize..]);
}

/// What the log had of one timeline passed for durable on the next.
#[test]
fn nothing_of_another_timeline_is_durable() {
    let (spool, mut writer, gate) = held_up(Call::SyncData, |_| true);
    writer.write_ahead(Lsn(MB), &[1; 1000], Lsn(MB)).unwrap();
    while spool.held_durable() < Lsn(MB + 1000) {
        std::thread::yield_now();
    }
    writer.write_ahead(Lsn(MB + 1000), &[], Lsn(MB + 1000)).unwrap();
    drop(writer);
    let mut writer = spool.start_at(TimelineId(2), Lsn(MB)).unwrap();
    gate.close();
    writer.write(Lsn(MB), &[2; 800]).unwrap();
    assert_eq!(spool.held_durable(), Lsn(MB));
    gate.open();
    while spool.held_durable() < Lsn(MB + 800) {
        std::thread::yield_now();
    }
}

/// A power loss took the last entry of one file, which was not durable, and left the first of the next. What came before both
/// was promised, and was forgotten for the gap.
#[test]
fn an_entry_that_does_not_follow_counts_as_lost() {
    const ENTRY: u64 = 256 << 10;
    let model = Model::default();
    let spool = on(&model, early_options());
    let bytes = wal(START, START + 5 * ENTRY);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &bytes, Lsn(START)).unwrap();
    drop((writer, spool));
    let logs: Vec<String> =
        model.names().unwrap().into_iter().filter(|name| name.starts_with("walrider.early.")).collect();
    // The first has three of them.
    model.open(&logs[0]).unwrap().write_at(&[0xEE], 2 * (24 + ENTRY) + 100).unwrap();
    // What comes in later runs follows what is left.
    let mut bytes = bytes[..2 * ENTRY as usize].to_vec();
    for more in [500, 700, 0] {
        let spool = on(&model, early_options());
        let held = spool.shared.lock().tail.1.clone();
        assert_eq!((held.start(), held.end()), (Lsn(START), Lsn(START + bytes.len() as u64)));
        assert!(held.slice(held.start(), held.end()) == bytes);
        let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
        bytes.extend(vec![7; more]);
        writer.write_ahead(Lsn(START), &bytes, Lsn(START)).unwrap();
    }
}

/// The segment for what is flushed could not be made; what lies past got into the log, and all of it passed for written.
#[test]
fn what_a_full_disk_does_not_take_is_not_received() {
    let (model, made) = (Model::default(), Mutex::new(0));
    let full = Arc::new(AtomicBool::new(true));
    let is_full = full.clone();
    model.watch(move |call, name| {
        if call == Call::Create && name.starts_with(TEMPORARY_PREFIX) {
            let mut made = made.lock().unwrap();
            if *made > 0 && is_full.load(Ordering::SeqCst) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *made += 1;
        }
        Ok(())
    });
    let spool = on(&model, early_options());
    let bytes = wal(START, START + MB + 200);
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    let at = MB - 100;
    writer.write(Lsn(START), &bytes[..at as usize]).unwrap();
    let horizon = Lsn(START + MB + 50);
    let error = writer.write_ahead(Lsn(START + at), &bytes[at as usize..], horizon).unwrap_err();
    assert!(error.is_full(), "{error}");
    let received = writer.held().0 - START;
    let left = promoted(&model.after_kill(), at.min(received));
    assert_eq!(left[..received as usize], bytes[..received as usize]);
    full.store(false, Ordering::SeqCst);
    writer.write_ahead(writer.held(), &bytes[received as usize..], horizon).unwrap();
    assert_eq!((writer.held(), writer.written()), (Lsn(START + MB + 200), horizon));
}

/// What is true when a picture is taken.
struct Truth {
    bytes: Vec<u8>,
    /// The newest horizon that the spool was told.
    horizon: u64,
    /// All up to there is promised to survive a power loss, and a kill.
    durable: u64,
    received: u64,
}

/// A primary that crashes, links that fail, a standby that is killed or loses power, and at any moment: nothing in segments
/// that the primary had not flushed; nothing missing that was promised.
///
/// What is done, and in which order, the seed decides. How far the flusher's thread has got at each moment, and with it what a
/// power loss leaves and where the standby goes on, is up to timing: the second run of a seed may not fail where the first did.
#[test]
fn crashes_of_everybody() {
    let mut random = Random::printed();
    for _ in 0..4 {
        round(Random(random.number()));
    }
}

/// Chance has two sources. What `random` decides is the same for a seed; a power loss draws for each block that is not
/// synced, and how many these are is up to timing, so that it has `disk` to itself.
fn round(mut random: Random) {
    let mut disk = Random(random.number());
    let len = 12 * MB;
    let mut model = Model::default();
    let mut spool = on(&model, early_options());
    let mut truth = Truth { bytes: wal(START, START + len), horizon: 0, durable: 0, received: 0 };
    let mut at = 0;
    while truth.horizon < len / 2 {
        let mut writer = spool.start_at(ONE, Lsn(START + at)).unwrap();
        for _ in 0..random.below(60) {
            let most = [0, 300, 9_000, 300_000, 1_500_000][random.below(5) as usize];
            let to = (at + random.below(most + 1)).min(len);
            // The primary flushes something, perhaps more than it has sent, but not more than it has.
            if random.one_in(2) {
                let more = random.below(to.saturating_sub(truth.horizon) + 5_000);
                truth.horizon = (truth.horizon + more).min(len);
            }
            let piece = &truth.bytes[at as usize..to as usize];
            writer.write_ahead(Lsn(START + at), piece, Lsn(START + truth.horizon)).unwrap();
            at = to;
            truth.received = truth.received.max(at);
            truth.durable = truth.durable.max(spool.held_durable().0 - START);
            match random.below(30) {
                0 => check(&model.after_power_loss(disk.draws()), truth.durable, &truth),
                1 => check(&model.after_kill(), truth.received, &truth),
                2 => spool.wait_flushed(spool.written()).unwrap(),
                _ => {}
            }
        }
        drop(writer);
        at = spool.written().0 - START;
        let (what, lost) = (random.below(4), random.number());
        match what {
            // The link is lost.
            0 => {}
            // The primary crashes: other WAL from somewhere past its last flush.
            1 => {
                let lost = truth.horizon + lost % (truth.received.saturating_sub(truth.horizon) + 1);
                for byte in &mut truth.bytes[lost as usize..] {
                    *byte = byte.wrapping_add(2) | 1;
                }
                // All that it had flushed is there, and nobody was promised more.
                truth.durable = truth.durable.min(truth.horizon);
                truth.received = truth.received.min(truth.horizon);
            }
            _ => {
                let killed = what == 2;
                model = if killed { model.after_kill() } else { model.after_power_loss(disk.draws()) };
                let promised = if killed { truth.received } else { truth.durable };
                check(&model.after_kill(), promised, &truth);
                drop(spool);
                spool = on(&model, early_options());
                // From the beginning of the segment, as a standby does that is started again; what was promised before is held.
                let valid = valid_end(&segments(&model, truth.horizon + MB), &truth);
                at = valid - valid % MB;
                truth.received = promised;
            }
        }
    }
}

/// How much of the WAL in segments is there without gaps.
fn valid_end(found: &[u8], truth: &Truth) -> u64 {
    let equal = found.iter().zip(&truth.bytes).take(truth.horizon as usize).position(|(found, byte)| found != byte);
    equal.map_or(truth.horizon.min(found.len() as u64), |equal| equal as u64)
}

fn check(left: &Model, promised: u64, truth: &Truth) {
    let found = segments(left, truth.horizon + 2 * MB);
    assert!(
        found[truth.horizon as usize..] == vec![0; found.len() - truth.horizon as usize],
        "WAL past the horizon in a segment"
    );
    let valid = valid_end(&found, truth);
    let promoted = promoted(left, valid);
    assert!(promoted.len() as u64 >= promised, "{} bytes are left of {promised}", promoted.len());
    let same = promoted.iter().zip(&truth.bytes).take(promised as usize).position(|(left, byte)| left != byte);
    assert_eq!(same, None, "of {promised} promised bytes; {valid} in segments, horizon {}", truth.horizon);
}

#[test]
fn entries_that_are_not_whole_are_not_there() {
    let model = Model::default();
    let spool: Arc<Spool> = on(&model, early_options());
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &[1; 100], Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START + 100), &[2; 100], Lsn(START)).unwrap();
    drop((writer, spool));
    let log = model.names().unwrap().into_iter().find(|name| name.starts_with("walrider.early.")).unwrap();
    let second = 24 + 104;
    for (offset, left) in [(second, 100), (second + 5, 100), (second + 16, 100), (second + 24 + 99, 100), (0, 0)] {
        let broken = model.after_kill();
        let byte = broken.read(&log).unwrap()[offset];
        broken.open(&log).unwrap().write_at(&[byte ^ 0x80], offset as u64).unwrap();
        let spool = on(&broken, early_options());
        let held = spool.shared.lock().tail.1.clone();
        assert_eq!(held.end().0 - held.start().0, left, "changed at {offset}");
    }
}

/// A sync of the log was under way when WAL of another timeline came in the place of what it was about: that counted as durable, and the primary was
/// told so.
#[test]
fn a_sync_that_another_timeline_overtakes_says_nothing_of_it() {
    let (model, calls, passes) = (Model::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, may_pass) = (calls.clone(), passes.clone());
    model.watch(move |call, name| {
        if call == Call::SyncData && name.starts_with("walrider.early.") {
            let number = seen.fetch_add(1, Ordering::SeqCst);
            while may_pass.load(Ordering::SeqCst) <= number {
                std::thread::yield_now();
            }
        }
        Ok(())
    });
    let until = |number: usize| {
        while calls.load(Ordering::SeqCst) < number {
            std::thread::yield_now();
        }
    };
    let spool = on(&model, early_options());
    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    writer.write_ahead(Lsn(START), &wal(START, START + 200), Lsn(START + 100)).unwrap();
    until(1);
    drop(writer);
    spool.write_history(TimelineId(2), b"1\t0/300078\tx\n").unwrap();
    let mut writer = spool.start_at(TimelineId(2), Lsn(START + 100)).unwrap();
    writer.write_ahead(Lsn(START + 100), &[2; 30], Lsn(START + 130)).unwrap();
    writer.write_ahead(Lsn(START + 130), &[2; 170], Lsn(START + 130)).unwrap();
    spool.wait_flushed(Lsn(START + 130)).unwrap();
    passes.store(1, Ordering::SeqCst);
    until(2);
    assert_eq!(spool.held_durable(), Lsn(START + 130));
    passes.store(usize::MAX, Ordering::SeqCst);
    while spool.held_durable() < Lsn(START + 300) {
        std::thread::yield_now();
    }
}
