//! [`Machine`] itself under every order of events that a small world allows: a primary that has some WAL and loses what is old, an
//! archive that gets it late, a receiver and replay, each at any speed, and somebody who pauses, reloads, promotes and stops.
//!
//! What stands in is what the machine tells to do: the shell's receiver and `follow_upstream` as steps. WAL is counted in halves of a
//! segment. Not tried: more than one timeline, the lengths of pauses (a wait may end at any moment), crashes; the simulator does these.

use std::time::Duration;

use stateright::{Checker, Model, Property};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_replay::follow::{AtEnd, at_end};
use walrider_replay::upstream::{Missing, News, Wanted};
use walrider_standby::machine::{
    self, Action, Ended, Failure, Link, Machine, Next, Rules, Stored, Task, Verdict, Wait,
};

/// A unit of WAL: half a segment.
type Unit = u8;

const ONE: TimelineId = TimelineId(1);
const SEGMENT: u64 = 1 << 20;
const UNITS: Unit = 4;
const NOW: Duration = Duration::ZERO;
const RULES: Rules = Rules { has_primary: true, retry_interval: Duration::ZERO };
/// So many steps of each thread are enough for whatever is to come about.
const PATIENCE: usize = 60;

fn lsn(unit: Unit) -> Lsn {
    Lsn(3 * SEGMENT + u64::from(unit) * SEGMENT / 2)
}

fn unit(lsn: Lsn) -> Unit {
    ((lsn.0 - 3 * SEGMENT) / (SEGMENT / 2)) as Unit
}

fn size() -> SegmentSize {
    SegmentSize::new(SEGMENT as u32).expect("a size that there is")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Receiver {
    Idle,
    Connecting(Task),
    Streaming(Task),
    Finished,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Outcome {
    Stopped,
    Promoted,
    Failed,
}

/// Where replay is in `follow_upstream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Replay {
    Look,
    /// It has replayed all that it finds, perhaps nothing.
    Ran {
        wanted: Wanted,
        moved: bool,
    },
    ForWal,
    ForChange,
    Over(Outcome),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    machine: Machine,
    /// The primary's WAL: up to there it has some, from there on it still has it, up to there the archive has it.
    inserted: Unit,
    oldest: Unit,
    archived: Unit,
    receiver: Receiver,
    /// `Board::ends`.
    ends: bool,
    stored: Stored,
    /// Which units of `pg_wal` are whole, and which segments have a file.
    pg_wal: [bool; UNITS as usize],
    files: [bool; UNITS as usize / 2],
    replay: Replay,
    news: News,
    replayed: Unit,
    /// What the primary had sent early is held, and was released.
    held: bool,
    released: bool,
    /// How often what happened.
    ended: u8,
    pauses: u8,
    reloads: u8,
    fatal: bool,
    gave_up: bool,
    from_archive: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Insert,
    Archive,
    Recycle,
    Hear(Heard),
    Receive,
    /// A connection cannot be made, or is lost.
    Fail(Broken),
    Replay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Heard {
    Stop,
    Promote,
    Pause(bool),
    Reconnect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    Passing,
    Misdirected,
    Final,
}

impl World {
    /// A directory that has so much WAL from an earlier run, of which nothing is replayed yet.
    fn new(whole: Unit, (oldest, inserted): (Unit, Unit), held: bool) -> World {
        World {
            machine: Machine::new(RULES),
            inserted,
            oldest,
            archived: 0,
            receiver: Receiver::Idle,
            ends: false,
            stored: Stored { timeline: TimelineId(0), written: Lsn::INVALID },
            pg_wal: std::array::from_fn(|unit| unit < usize::from(whole)),
            files: std::array::from_fn(|segment| 2 * segment < usize::from(whole)),
            replay: Replay::Look,
            news: News::Perhaps,
            replayed: 0,
            held,
            released: false,
            ended: 0,
            pauses: 0,
            reloads: 0,
            fatal: false,
            gave_up: false,
            from_archive: false,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.replay, Replay::Over(_))
    }

    /// Nothing comes in, nor will anything.
    fn receives_nothing(&self) -> bool {
        let promotes = self.machine.wishes().promotes || self.machine.wishes().stops;
        promotes && matches!(self.receiver, Receiver::Idle | Receiver::Finished)
    }

    /// `Shell::hear`.
    fn hear(&mut self, heard: Heard) {
        let actions = self.machine.hear(match heard {
            Heard::Stop => machine::Event::Stop,
            Heard::Promote => machine::Event::Promote,
            Heard::Pause(paused) => machine::Event::Pause(paused),
            Heard::Reconnect => machine::Event::Reload { rules: RULES, reconnects: true },
        });
        self.ends |= actions.contains(&Action::EndSession);
    }

    /// A step of the thread that receives (`receiver::run`), where nothing fails; whether there was one.
    fn receive(&mut self) -> bool {
        match self.receiver {
            Receiver::Finished => return false,
            Receiver::Idle => {
                let next = self.machine.next_session(NOW);
                self.ends &= next == Next::Finish;
                self.receiver = match next {
                    Next::Begin(task) => Receiver::Connecting(task),
                    Next::Sleep(_) => return false,
                    Next::Finish => Receiver::Finished,
                };
            }
            Receiver::Connecting(task) | Receiver::Streaming(task) if self.ends => self.end(task, Ended::Asked),
            Receiver::Connecting(task) => {
                // `Spool::start_at`
                self.stored = Stored { timeline: ONE, written: task.start };
                match task.start < lsn(self.oldest) || task.start > lsn(self.inserted) {
                    true => self.end(task, Ended::Failed(Failure::MissingWal)),
                    false if self.machine.session_begins(task, NOW) => self.receiver = Receiver::Streaming(task),
                    false => self.end(task, Ended::Asked),
                }
            }
            Receiver::Streaming(_) => {
                let unit = unit(self.stored.written);
                if unit == self.inserted {
                    return false;
                }
                self.pg_wal[usize::from(unit)] = true;
                self.files[usize::from(unit / 2)] = true;
                self.stored.written = lsn(unit + 1);
            }
        }
        true
    }

    fn end(&mut self, task: Task, how: Ended) {
        let verdict = self.machine.session_ends(task, self.stored, how, NOW);
        self.fatal |= verdict == Verdict::Fatal;
        self.receiver = Receiver::Idle;
        self.ended += 1;
    }

    fn fail(&mut self, broken: Broken) {
        let (Receiver::Connecting(task) | Receiver::Streaming(task)) = self.receiver else { return };
        let failure = match broken {
            Broken::Passing => Failure::Passing,
            Broken::Misdirected => Failure::Misdirected,
            Broken::Final => Failure::Final,
        };
        self.end(task, Ended::Failed(failure));
    }

    /// Whether there is a unit for replay, and if it is in the archive (`Finder`, `Source`).
    fn find(&self, unit: Unit) -> Option<bool> {
        let segment = |lsn| size().segment_of(lsn);
        let asks = self.machine.streams_from().is_none_or(|from| segment(from) > segment(lsn(unit)));
        let visible = self.machine.visible(self.stored).is_none_or(|visible| lsn(unit) < visible);
        match () {
            () if unit == UNITS => None,
            () if asks && unit < self.archived => Some(true),
            () if visible && self.pg_wal[usize::from(unit)] => Some(false),
            () => None,
        }
    }

    /// A step of replay (`follow_upstream`).
    fn replay(&mut self) {
        match self.replay {
            Replay::Over(_) => {}
            Replay::Look => match self.machine.wanted() {
                Wanted::Stop => self.replay = Replay::Over(Outcome::Stopped),
                Wanted::Pause => {
                    // What the wait brings is asked for again.
                    let news = self.news;
                    self.wait();
                    if self.replay == Replay::ForWal {
                        self.machine.waited(self.stored.written);
                    }
                    if !self.is_over() {
                        (self.replay, self.news) = (Replay::Look, news);
                    }
                }
                wanted @ (Wanted::Follow | Wanted::Promote) => {
                    let before = self.replayed;
                    while let Some(archive) = self.find(self.replayed) {
                        self.from_archive |= archive && self.machine.sessions() > 0;
                        self.replayed += 1;
                    }
                    self.replay = Replay::Ran { wanted, moved: self.replayed > before };
                }
            },
            Replay::Ran { wanted, moved } => match at_end(wanted, self.news, moved) {
                AtEnd::Wait => self.wait(),
                AtEnd::LookAgain => (self.news, self.replay) = (News::Perhaps, Replay::Look),
                AtEnd::Release if self.held && self.replayed < UNITS => {
                    (self.held, self.released) = (false, true);
                    self.pg_wal[usize::from(self.replayed)] = true;
                    self.stored = Stored { timeline: ONE, written: lsn(self.replayed + 1) };
                    self.replay = Replay::Look;
                }
                AtEnd::Release => self.replay = Replay::Over(Outcome::Promoted),
            },
            Replay::ForWal => (self.news, self.replay) = (self.machine.waited(self.stored.written), Replay::Look),
            Replay::ForChange => (self.news, self.replay) = (News::Perhaps, Replay::Look),
        }
    }

    /// `Shell::news`
    fn wait(&mut self) {
        let has_wal = self.files.get(usize::from(self.replayed / 2)).is_some_and(|has| *has);
        let needed = lsn(self.replayed);
        let missing = Missing { replayed: needed, needed, timeline: ONE, has_wal };
        self.replay = match self.machine.wait(missing, self.stored, size()) {
            Wait::No(news) => {
                self.news = news;
                Replay::Look
            }
            Wait::EndSession => {
                (self.ends, self.news, self.gave_up) = (true, News::Perhaps, true);
                Replay::Look
            }
            Wait::ForWal { .. } => Replay::ForWal,
            Wait::ForChange { .. } => Replay::ForChange,
            Wait::Failed => Replay::Over(Outcome::Failed),
        };
    }

    /// Whether it comes to that where nothing fails any more, and the archive gets all that is whole; whoever is quicker.
    fn comes_to(&self, holds: impl Fn(&World) -> bool) -> bool {
        [true, false].into_iter().all(|receiver_first| {
            let mut world = self.clone();
            world.archived = world.inserted / 2 * 2;
            world.hear(Heard::Pause(false));
            (0..PATIENCE).any(|_| {
                while receiver_first && world.receive() {}
                world.replay();
                if !receiver_first {
                    world.receive();
                }
                holds(&world)
            })
        })
    }
}

/// How much may happen.
#[derive(Clone)]
struct Bounds {
    /// Sessions that end, and attempts.
    ended: u8,
    pauses: u8,
    reloads: u8,
}

impl Model for Bounds {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        // The primary has all; or not the segment that is damaged here; what is here was acknowledged.
        vec![World::new(1, (0, 3), true), World::new(1, (2, 4), false), World::new(3, (0, 4), false)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.is_over() {
            return;
        }
        if world.inserted < UNITS {
            steps.push(Step::Insert);
        }
        if world.archived + 2 <= world.inserted {
            steps.push(Step::Archive);
        }
        if world.oldest < world.archived {
            steps.push(Step::Recycle);
        }
        let wishes = world.machine.wishes();
        if !wishes.stops {
            steps.push(Step::Hear(Heard::Stop));
        }
        if !wishes.promotes {
            steps.push(Step::Hear(Heard::Promote));
        }
        if wishes.paused || world.pauses < self.pauses {
            steps.push(Step::Hear(Heard::Pause(!wishes.paused)));
        }
        if world.reloads < self.reloads {
            steps.push(Step::Hear(Heard::Reconnect));
        }
        steps.push(Step::Receive);
        if let Receiver::Connecting(_) | Receiver::Streaming(_) = world.receiver {
            steps.extend([Broken::Passing, Broken::Misdirected, Broken::Final].map(Step::Fail));
        }
        steps.push(Step::Replay);
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Insert => world.inserted += 1,
            Step::Archive => world.archived += 2,
            Step::Recycle => world.oldest = world.archived,
            Step::Hear(heard) => {
                world.pauses += u8::from(heard == Heard::Pause(true));
                world.reloads += u8::from(heard == Heard::Reconnect);
                world.hear(heard);
            }
            Step::Receive => drop(world.receive()),
            Step::Fail(broken) => world.fail(broken),
            Step::Replay => world.replay(),
        }
        Some(world)
    }

    fn within_boundary(&self, world: &World) -> bool {
        world.ended <= self.ended
    }

    fn properties(&self) -> Vec<Property<Self>> {
        [never_wrong(), always_a_way_on(), seen_at_all()].concat()
    }
}

/// What it does is what was asked.
fn never_wrong() -> Vec<Property<Bounds>> {
    vec![
        Property::always("it is promoted where that was asked, and nothing comes in any more", |_, world: &World| {
            let ends =
                matches!(world.replay, Replay::Over(Outcome::Promoted) | Replay::Ran { wanted: Wanted::Promote, .. });
            !(ends || world.released) || (world.machine.wishes().promotes && world.receives_nothing())
        }),
        Property::always("a stop during the hand-over does not undo it", |_, world: &World| {
            let promote = Replay::Ran { wanted: Wanted::Promote, moved: false };
            let mut next = world.clone();
            next.hear(Heard::Stop);
            next.replay();
            let hands_over = world.replay == promote && world.news == News::Perhaps && !world.held;
            !hands_over || next.replay == Replay::Over(Outcome::Promoted)
        }),
        Property::always("it is promoted with all that came", |_, world: &World| {
            world.replay != Replay::Over(Outcome::Promoted)
                || world.pg_wal.get(usize::from(world.replayed)) != Some(&true)
        }),
        Property::always("it stops where that was asked", |_, world: &World| {
            world.replay != Replay::Over(Outcome::Stopped) || world.machine.wishes().stops
        }),
        Property::always("it fails where nothing helps", |_, world: &World| {
            world.replay != Replay::Over(Outcome::Failed) || world.fatal
        }),
        Property::always("the receiver finishes where nothing is to come in any more", |_, world: &World| {
            world.receiver != Receiver::Finished || world.receives_nothing()
        }),
        Property::always("the link is shown as it is", |_, world: &World| {
            let link = match world.receiver {
                Receiver::Idle | Receiver::Finished => Link::Down,
                Receiver::Connecting(_) => Link::Connecting,
                Receiver::Streaming(_) => Link::Up,
            };
            world.machine.link() == link
        }),
    ]
}

/// Whoever is quicker, it gets where it is to get.
fn always_a_way_on() -> Vec<Property<Bounds>> {
    vec![
        Property::always("a stop ends it", |_, world: &World| {
            !world.machine.wishes().stops || world.comes_to(World::is_over)
        }),
        Property::always("a promotion comes about", |_, world: &World| {
            let wishes = world.machine.wishes();
            let promoted = |end: &World| end.replay == Replay::Over(Outcome::Promoted);
            !wishes.promotes || wishes.stops || world.fatal || world.comes_to(promoted)
        }),
        Property::always("left alone, it catches up", |_, world: &World| {
            let wishes = world.machine.wishes();
            wishes.promotes
                || wishes.stops
                || world.fatal
                || world.comes_to(|end| end.replayed == end.inserted && !end.is_over())
        }),
    ]
}

/// The model gets where it might go wrong.
fn seen_at_all() -> Vec<Property<Bounds>> {
    vec![
        Property::sometimes("promoted after WAL has streamed in", |_, world: &World| {
            world.replay == Replay::Over(Outcome::Promoted) && world.machine.sessions() > 0
        }),
        Property::sometimes("promoted although a stop was asked", |_, world: &World| {
            world.replay == Replay::Over(Outcome::Promoted) && world.machine.wishes().stops
        }),
        Property::sometimes("stopped although a promotion was asked", |_, world: &World| {
            world.replay == Replay::Over(Outcome::Stopped) && world.machine.wishes().promotes
        }),
        Property::sometimes("stopped after what was held was released", |_, world: &World| {
            world.replay == Replay::Over(Outcome::Stopped) && world.released
        }),
        Property::sometimes("a promotion is asked while it connects", |_, world: &World| {
            world.machine.wishes().promotes && matches!(world.receiver, Receiver::Connecting(_))
        }),
        Property::sometimes("it fails", |_, world: &World| world.replay == Replay::Over(Outcome::Failed)),
        Property::sometimes("the archive helps out after a session", |_, world: &World| world.from_archive),
        Property::sometimes("a stream past the damage is given up", |_, world: &World| world.gave_up),
    ]
}

fn check(bounds: Bounds) {
    let checker = bounds.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!("{} states", checker.unique_state_count());
}

#[test]
fn whoever_is_quicker_it_does_what_was_asked() {
    check(Bounds { ended: 1, pauses: 1, reloads: 0 });
}

/// Four million states: `cargo test --profile soak -p walrider-standby --test model -- --ignored`.
#[test]
#[ignore = "takes half a minute"]
fn whoever_is_quicker_it_does_what_was_asked_in_a_larger_world() {
    check(Bounds { ended: 1, pauses: 1, reloads: 1 });
}
