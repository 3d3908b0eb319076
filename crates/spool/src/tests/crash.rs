//! Crashes, in the middle of everything: at each call a picture is taken of what a power loss or a kill would leave, and
//! the next start made on it (`docs/spool.md`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;

use super::{MB, ONE, name, on, options, wal, write_to};
use crate::files::Directory;
use crate::testing::Model;
use crate::{ArchiveStatus, SpoolOptions, start};

const START: u64 = 3 * MB;

/// What had been promised, or done, when a picture was taken.
#[derive(Default)]
struct Promises {
    /// Newest position that was reported as flushed: before the picture.
    flushed: AtomicU64,
    /// Newest position that `write` returned for: before the picture.
    written: AtomicU64,
    /// Newest position that `write` was called for: after the picture.
    handed: AtomicU64,
    /// What may be removed: after the picture.
    keep: AtomicU64,
}

struct Picture {
    left: Model,
    /// Not a power loss.
    killed: bool,
    /// All before it must be there.
    promised: u64,
    /// Nothing from here on can look like WAL.
    handed: u64,
    keep: u64,
    what: String,
}

/// Writes WAL with all that goes with it, while pictures are taken; checks them. Says how many.
fn round(partial: bool, bytes: Arc<Vec<u8>>, random: &mut Random) -> u64 {
    let end = START + bytes.len() as u64;
    let model = Model::default();
    let archive_status = [ArchiveStatus::None, ArchiveStatus::Done][random.below(2) as usize];
    let options =
        SpoolOptions { partial, archive_status, max_recycled: random.below(4), ..options("the model".as_ref()) };
    let promises = Arc::new(Promises::default());
    for position in [&promises.flushed, &promises.written, &promises.handed, &promises.keep] {
        position.store(START, Ordering::SeqCst);
    }
    // One at a time: a picture is some megabytes.
    let (take, taken) = mpsc::sync_channel::<Picture>(0);
    let checker = {
        let (bytes, options, mut random) = (bytes.clone(), options.clone(), Random(random.number()));
        thread::spawn(move || taken.iter().map(|picture| check(&picture, &bytes, &options, &mut random)).count() as u64)
    };
    let spool = on(&model, options);
    let told = promises.clone();
    spool.on_flushed(Box::new(move |flushed| {
        told.flushed.fetch_max(flushed.0, Ordering::SeqCst);
    }));
    let (seen, told, chance) = (model.clone(), promises.clone(), Mutex::new(Random(random.number())));
    let take = Mutex::new(Some(take));
    let camera = Arc::new(take);
    let shutter = camera.clone();
    model.watch(move |call, name| {
        let mut chance = chance.lock().unwrap();
        if !chance.one_in(8) {
            return Ok(());
        }
        let power_loss = !chance.one_in(4);
        let promised = if power_loss { &told.flushed } else { &told.written }.load(Ordering::SeqCst);
        let left = if power_loss { seen.after_power_loss(chance.draws()) } else { seen.after_kill() };
        let handed = told.handed.load(Ordering::SeqCst);
        let keep = told.keep.load(Ordering::SeqCst);
        let what = format!("{} before {call:?} \"{name}\"", if power_loss { "power loss" } else { "kill" });
        if let Some(take) = &*shutter.lock().unwrap() {
            // Nobody takes it when a check has failed; that is seen at the end.
            let _ = take.send(Picture { left, killed: !power_loss, promised, handed, keep, what });
        }
        Ok(())
    });

    let mut writer = spool.start_at(ONE, Lsn(START)).unwrap();
    while writer.written().0 < end {
        let at = writer.written().0;
        let most = [500, 40_000, 300_000][random.below(3) as usize];
        let to = end.min(at + 1 + random.below(most));
        promises.handed.fetch_max(to, Ordering::SeqCst);
        writer.write(Lsn(at), &bytes[(at - START) as usize..(to - START) as usize]).unwrap();
        promises.written.fetch_max(to, Ordering::SeqCst);
        match random.below(40) {
            0 => {
                let keep = spool.flushed().0;
                promises.keep.fetch_max(keep - keep % MB, Ordering::SeqCst);
                spool.remove_before(Lsn(keep), ONE).unwrap();
            }
            1 => {
                // The connection is lost; the segment comes again.
                drop(writer);
                let again = spool.written().0;
                writer = spool.start_at(ONE, Lsn(again - again % MB)).unwrap();
            }
            2 => spool.write_history(TimelineId(2), b"1\t0/300000\tno reason\n").unwrap(),
            3..8 => spool.wait_flushed(Lsn(to)).unwrap(),
            _ => {}
        }
    }
    drop((writer, spool));
    model.watch_no_more();
    camera.lock().unwrap().take();
    checker.join().expect("a check failed, above")
}

/// The contents of a segment, under whichever name.
fn segment(model: &Model, number: u64) -> Option<Vec<u8>> {
    let name = name(ONE, number);
    model.read(&name).or_else(|| model.read(&format!("{name}.partial")))
}

/// Compares what a directory has from `from` to `to`.
fn compare(model: &Model, bytes: &[u8], from: u64, to: u64, what: &str) {
    for number in from / MB..to.div_ceil(MB) {
        let (begin, end) = (from.max(number * MB), to.min((number + 1) * MB));
        let Some(segment) = segment(model, number) else { panic!("{what}: segment {number} is missing") };
        let expected = &bytes[(begin - START) as usize..(end - START) as usize];
        let found = &segment[(begin - number * MB) as usize..(end - number * MB) as usize];
        if expected != found {
            let at = expected.iter().zip(found).position(|(expected, found)| expected != found);
            let at = Lsn(begin + at.unwrap_or_default() as u64);
            panic!("{what}: what was promised up to {} differs at {at}", Lsn(to));
        }
    }
}

fn check(picture: &Picture, bytes: &[u8], options: &SpoolOptions, random: &mut Random) {
    let Picture { left, killed, promised, handed, keep, what } = picture;
    compare(left, bytes, *keep, (*promised).max(*keep), what);

    // A reader of WAL ends where it should: no page past it has its own address.
    for file in left.names().unwrap() {
        let Some((_, number)) = options.segment_size.parse_file_name(file.trim_end_matches(".partial")) else {
            continue;
        };
        for (page, contents) in (number * MB..).step_by(8192).zip(left.read(&file).unwrap().chunks(8192)) {
            if page >= *handed && contents.len() >= 16 {
                assert_ne!(contents[8..16], page.to_le_bytes(), "{what}: page {} of \"{file}\" looks valid", Lsn(page));
            }
        }
    }

    // The next start: nothing is skipped, and all comes to a good end.
    let found = start::find(left, options.segment_size).unwrap();
    let at = if options.partial {
        let at = found.map_or(START, |(timeline, at)| {
            assert_eq!(timeline, ONE);
            at.0
        });
        // A write may have got further than it has said, and so may a segment that is complete.
        assert!(at <= *handed, "{what}: starts at {}", Lsn(at));
        // The primary keeps from there on what was told as flushed. Found by a review: a segment whose end was told and which had not got its final name
        // began again, and the primary had it no more.
        assert!(*killed || at >= promised - promised % MB, "{what}: starts at {}", Lsn(at));
        compare(left, bytes, *keep, at.max(*keep), &format!("{what}, then start at {}", Lsn(at)));
        at
    } else {
        promised - promised % MB
    };
    let end = START + bytes.len() as u64;
    let spool = on(left, options.clone());
    let mut writer = spool.start_at(ONE, Lsn(at)).unwrap();
    write_to(&mut writer, bytes, START, end, 200_000, random);
    drop((writer, spool));
    let names = left.names().unwrap();
    let names: Vec<String> =
        names.into_iter().filter(|name| name.starts_with("xlogtemp.") || name.ends_with(".partial")).collect();
    let expected = if options.partial { vec![format!("{}.partial", name(ONE, end / MB))] } else { vec![] };
    assert_eq!(names, expected, "{what}, then received again");
    compare(
        &left.after_power_loss(random.draws()),
        bytes,
        (*keep).max(START),
        end,
        &format!("{what}, then received again"),
    );
}

fn rounds(partial: bool) {
    let mut random = Random::printed();
    let bytes = Arc::new(wal(START, START + 5 * MB + 12_345));
    let pictures: u64 = (0..4).map(|_| round(partial, bytes.clone(), &mut random)).sum();
    println!("{pictures} pictures");
    assert!(pictures > 50, "{pictures} pictures only");
}

#[test]
fn a_crash_loses_nothing_that_was_reported() {
    rounds(false);
}

#[test]
fn a_crash_of_receive_loses_nothing_that_was_reported() {
    rounds(true);
}
