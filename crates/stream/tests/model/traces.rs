//! The model's traces against the code that runs: a [`Spool`] on a disk, its writer, and [`Positions`]. After each event both hold
//! the same; at the end, what is promoted is the same.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use stateright::{Checker, Expectation, Model};
use tempfile::TempDir;
use walrider_layout::history::TimelineHistory;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;
use walrider_spool::{Spool, SpoolError, SpoolOptions, Writer};
use walrider_stream::positions::Positions;

use super::{Bounds, Event, NEVER, NOW, Run, World};

const TIMELINE: TimelineId = TimelineId(1);
const SEGMENT: u32 = 1 << 20;
/// Where the first record is: the records lie across the end of a segment.
const START: u64 = 2 * SEGMENT as u64 - 1;

/// The standby of the model, real.
struct Real {
    directory: TempDir,
    spool: Option<Arc<Spool>>,
    writer: Option<Writer>,
    positions: Positions,
}

fn open(directory: &Path) -> Arc<Spool> {
    let segment_size = SegmentSize::new(SEGMENT).expect("a size that there is");
    let options = SpoolOptions { directory: directory.to_owned(), segment_size, ..SpoolOptions::default() };
    Spool::open(options).expect("a spool")
}

/// The files of `directory`; `None` where one was renamed meanwhile.
fn files(directory: &Path) -> Option<BTreeMap<OsString, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let entry = entry.expect("a name");
        match fs::read(entry.path()) {
            Ok(contents) => drop(files.insert(entry.file_name(), contents)),
            Err(error) if error.kind() == ErrorKind::IsADirectory => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => panic!("{}: {error}", entry.path().display()),
        }
    }
    Some(files)
}

/// The files as they were at one moment, though the spool's threads prepare segments and flush beside: they were read twice
/// and are the same. One reading could have an old log and a new segment, which no crash leaves.
fn moment(directory: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let mut before = files(directory);
    loop {
        match files(directory) {
            Some(files) if before.as_ref() == Some(&files) => return files,
            now => before = now,
        }
    }
}

fn place(records: usize) -> Lsn {
    Lsn(START + records as u64)
}

impl Real {
    fn new() -> Real {
        let directory = tempfile::tempdir().expect("a directory");
        let spool = open(directory.path());
        // The beginning of the segment is there.
        drop(spool.start_at(TIMELINE, place(0)).expect("a writer"));
        Real { directory, spool: Some(spool), writer: None, positions: Positions::new(NEVER) }
    }

    fn spool(&self) -> &Arc<Spool> {
        self.spool.as_ref().expect("it runs")
    }

    /// What segments have, up to so many records and one more.
    fn segments(&self, records: usize) -> Vec<Run> {
        let size = SegmentSize::new(SEGMENT).expect("a size that there is");
        (0..=records)
            .map(|record| {
                let name = size.file_name(TIMELINE, size.segment_of(place(record)));
                let file = fs::read(self.directory.path().join(name)).unwrap_or_default();
                file.get(size.offset_of(place(record)) as usize).copied().unwrap_or_default()
            })
            .collect()
    }

    /// Does what the model did in `world`, where it led to `next`.
    fn follow(&mut self, world: &World, event: &Event, next: &World) {
        match event {
            Event::StandbyReceives => {
                let sent = &world.session.as_ref().expect("a session").to_standby[0];
                self.positions.heard(place(sent.wal_end), false, NOW);
                let writer = self.writer.as_mut().expect("a session");
                let bytes: Vec<Run> = sent.record.into_iter().collect();
                writer.write_ahead(writer.held(), &bytes, self.positions.horizon()).expect("there is space");
                self.positions.holds(writer.held());
            }
            Event::LogIsFlushed => {
                let wanted = place(next.standby.durable());
                while self.spool().held_durable() < wanted {
                    std::thread::yield_now();
                }
            }
            Event::SegmentsAreFlushed(_) => self.spool().wait_flushed(self.spool().written()).expect("a disk"),
            Event::PrimaryCrashes { .. } | Event::LinkFails => self.writer = None,
            Event::StandbyCrashes { .. } => {
                let left = tempfile::tempdir().expect("a directory");
                for (name, contents) in moment(self.directory.path()) {
                    fs::write(left.path().join(name), contents).expect("a copy");
                }
                self.writer = None;
                self.spool = None;
                self.directory = left;
                self.positions = Positions::new(NEVER);
            }
            Event::StandbyRestarts => self.spool = Some(open(self.directory.path())),
            Event::Connect => {
                let start = place(world.standby.segments.len());
                self.writer = Some(self.spool().start_at(TIMELINE, start).expect("a writer"));
                self.positions.connect(start, place(world.primary.flushed), NOW);
            }
            Event::Promote => {
                self.writer = None;
                let used = place(world.standby.segments.len());
                let alone = TimelineHistory::alone(TIMELINE);
                self.spool().release(&alone, TIMELINE, used, |_, _| Ok::<_, SpoolError>(true)).expect("a disk");
            }
            _ => {}
        }
        let standby = &next.standby;
        let mut expected = standby.segments.clone();
        expected.push(0);
        assert_eq!(self.segments(standby.segments.len()), expected, "segments, and nothing past them");
        if next.session.is_some() {
            let writer = self.writer.as_ref().expect("a session");
            assert_eq!(writer.held(), place(standby.positions.held().0 as usize));
            // The disk may be ahead of the model, never behind.
            assert!(self.spool().held_durable() <= writer.held());
        }
    }
}

fn replay(model: &Bounds, events: &[Event]) {
    let mut world = model.init_states().remove(0);
    let mut real = Real::new();
    for (done, event) in events.iter().enumerate() {
        let next = model.next_state(&world, event.clone()).expect("an event that can be");
        let before = std::panic::AssertUnwindSafe((&mut real, &world));
        let followed = std::panic::catch_unwind(move || {
            let before = before;
            let std::panic::AssertUnwindSafe((real, world)) = before;
            real.follow(world, event, &next);
            next
        });
        world = followed.unwrap_or_else(|_| panic!("after {:?}", &events[..=done]));
    }
}

#[test]
fn the_traces_that_matter() {
    for bounds in [
        Bounds { records: 2, primary_crashes: 1, standby_crashes: 1, link_losses: 0, power_losses: false },
        Bounds { records: 2, primary_crashes: 2, standby_crashes: 0, link_losses: 0, power_losses: false },
    ] {
        let checker = bounds.clone().checker().threads(2).spawn_bfs().join();
        let traces = checker.discoveries();
        assert_eq!(traces.len(), 5, "all that can happen, and nothing that must not");
        for trace in traces.into_values() {
            replay(&bounds, &trace.into_actions());
        }
    }
}

/// Any way through a world that is too large to be looked at whole; what must always hold does at each step.
fn walk(bounds: &Bounds, random: &mut Random) -> Vec<Event> {
    let properties = bounds.properties();
    let mut world = bounds.init_states().remove(0);
    let mut events: Vec<Event> = Vec::new();
    for _ in 0..120 {
        let mut actions = Vec::new();
        bounds.actions(&world, &mut actions);
        // What happens often in the world happens often here.
        let rare = |event: &Event| {
            matches!(
                event,
                Event::PrimaryCrashes { .. } | Event::PrimaryIsLost | Event::StandbyCrashes { .. } | Event::LinkFails
            )
        };
        if random.index(8) != 0 && actions.iter().any(|event| !rare(event)) {
            actions.retain(|event| !rare(event));
        }
        if actions.is_empty() {
            break;
        }
        let event = actions.swap_remove(random.index(actions.len()));
        events.push(event.clone());
        world = std::panic::catch_unwind(|| bounds.next_state(&world, event))
            .unwrap_or_else(|_| panic!("after {events:?}"))
            .expect("an event that can be");
        for property in properties.iter().filter(|property| property.expectation == Expectation::Always) {
            assert!((property.condition)(bounds, &world), "not {:?} after {events:?}", property.name);
        }
    }
    events
}

#[test]
fn walks() {
    let mut random = Random::printed();
    let bounds = Bounds { records: 12, primary_crashes: 4, standby_crashes: 4, link_losses: 4, power_losses: false };
    for _ in 0..100 {
        replay(&bounds, &walk(&bounds, &mut random));
    }
}

/// With power losses, which the disk of the test cannot have: in the model alone.
#[test]
fn walks_in_the_dark() {
    let mut random = Random::printed();
    let bounds = Bounds { records: 12, primary_crashes: 2, standby_crashes: 4, link_losses: 2, power_losses: true };
    for _ in 0..100_000 {
        walk(&bounds, &mut random);
    }
}
