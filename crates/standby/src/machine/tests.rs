use super::*;

const ONE: TimelineId = TimelineId(1);
const SECOND: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(5);
const MB: u64 = 1 << 20;
const NOTHING: Stored = Stored { timeline: TimelineId(0), written: Lsn::INVALID };

fn machine() -> Machine {
    Machine::new(Rules { has_primary: true, retry_interval: LONGEST })
}

fn size() -> SegmentSize {
    SegmentSize::new(MB as u32).expect("a size that there is")
}

fn missing(at: u64) -> Missing {
    Missing { replayed: Lsn(at), needed: Lsn(at), timeline: ONE, has_wal: true }
}

fn at(written: u64) -> Stored {
    Stored { timeline: ONE, written: Lsn(written) }
}

/// Replay has run out of WAL at `from`; a session begins.
fn begin(machine: &mut Machine, from: u64, now: Duration) -> Task {
    assert!(matches!(machine.wait(missing(from), NOTHING, size()), Wait::ForChange { requests: Some(_), .. }));
    let Next::Begin(task) = machine.next_session(now) else { panic!("{machine:?}") };
    assert!(machine.session_begins(task, now));
    task
}

#[test]
fn it_connects_where_a_segment_begins_and_goes_on_where_it_was() {
    let mut machine = machine();
    assert_eq!(machine.next_session(SECOND), Next::Sleep(None), "nobody has asked yet");
    let task = begin(&mut machine, 3 * MB + 5, SECOND);
    assert_eq!(task, Task { start: Lsn(3 * MB), timeline: ONE });
    assert!(machine.streams_from() == Some(Lsn(3 * MB)) && machine.link() == Link::Up);
    assert_eq!(machine.visible(at(3 * MB + 7)), Some(Lsn(3 * MB + 7)));
    // The connection is lost; replay lags far behind.
    let verdict = machine.session_ends(task, at(4 * MB + 9), Ended::Failed(Failure::Passing), 2 * SECOND);
    assert_eq!(verdict, Verdict::Warn);
    assert!(machine.streams_from().is_some(), "replay goes on with what came");
    assert_eq!(machine.next_session(2 * SECOND), Next::Sleep(Some(FIRST_PAUSE)));
    let next = Task { start: Lsn(4 * MB + 9), timeline: ONE };
    assert_eq!(machine.next_session(2 * SECOND + FIRST_PAUSE), Next::Begin(next));
    assert!(machine.session_begins(next, 3 * SECOND));
    assert_eq!(machine.streams_from(), Some(Lsn(3 * MB)), "what came before is there, too");
}

#[test]
fn pauses_double_up_to_the_longest_and_begin_again_after_a_session_that_lasted() {
    let mut machine = machine();
    let mut now = SECOND;
    let mut task = begin(&mut machine, MB, now);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        machine.session_ends(task, at(MB), Ended::Failed(Failure::Passing), now);
        let Next::Sleep(Some(pause)) = machine.next_session(now) else { panic!("{machine:?}") };
        pauses.push(pause.as_millis());
        now += pause;
        let Next::Begin(next) = machine.next_session(now) else { panic!("{machine:?}") };
        task = next;
    }
    assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
    assert!(machine.session_begins(task, now));
    now += LONGEST + SECOND;
    machine.session_ends(task, at(MB), Ended::Failed(Failure::Passing), now);
    assert_eq!(machine.next_session(now), Next::Sleep(Some(FIRST_PAUSE)));
    // Other settings: at once.
    let rules = Rules { has_primary: true, retry_interval: LONGEST };
    assert!(machine.hear(Event::Reload { rules, reconnects: true }).contains(&Action::EndSession));
    assert!(matches!(machine.next_session(now), Next::Begin(_)));
}

/// Found by a review: a reload that took the primary away ended the session, and the next went to wherever an empty connection string leads.
#[test]
fn without_a_primary_nobody_is_asked() {
    let rules = Rules { has_primary: false, retry_interval: LONGEST };
    let mut streams = machine();
    let task = begin(&mut streams, MB, SECOND);
    streams.hear(Event::Reload { rules, reconnects: true });
    streams.session_ends(task, at(MB), Ended::Asked, SECOND);
    assert_eq!(streams.next_session(SECOND), Next::Sleep(None));
    let mut asks = machine();
    assert!(matches!(asks.wait(missing(MB), NOTHING, size()), Wait::ForChange { requests: Some(_), .. }));
    asks.hear(Event::Reload { rules, reconnects: true });
    assert_eq!(asks.next_session(SECOND), Next::Sleep(None));
}

#[test]
fn archives_are_looked_at_again_when_all_is_replayed_and_nothing_comes() {
    let mut machine = machine();
    let task = begin(&mut machine, MB, SECOND);
    let wait = |machine: &mut Machine, written| machine.wait(missing(MB), at(written), size());
    assert_eq!(wait(&mut machine, MB), Wait::No(News::Perhaps), "what was found elsewhere may have come once more");
    assert_eq!(wait(&mut machine, MB), Wait::ForWal { past: Lsn(MB) });
    assert_eq!(machine.waited(Lsn(MB + 3)), News::More);
    assert_eq!(wait(&mut machine, MB + 8), Wait::No(News::More));
    machine.session_ends(task, at(MB + 8), Ended::Failed(Failure::Passing), SECOND);
    assert!(machine.streams_from().is_some());
    assert_eq!(wait(&mut machine, MB + 8), Wait::No(News::Perhaps));
    assert!(machine.streams_from().is_none(), "archives are looked at");
    assert_eq!(wait(&mut machine, MB + 8), Wait::No(News::Perhaps), "and timelines, because a session has ended");
    let Wait::ForChange { time: LONGEST, requests } = wait(&mut machine, MB + 8) else { panic!("{machine:?}") };
    assert_eq!(requests, Some(Task { start: Lsn(MB + 8), timeline: ONE }), "what was streamed is there without gaps");
}

#[test]
fn wal_that_the_primary_lacks_is_not_asked_for_again_at_once() {
    for how in [Ended::Failed(Failure::MissingWal), Ended::Timeline] {
        let mut machine = machine();
        let task = begin(&mut machine, MB, SECOND);
        machine.session_ends(task, at(MB), how, SECOND);
        assert!(machine.streams_from().is_none() && !machine.is_quiet(), "replay looks elsewhere");
        assert_eq!(machine.next_session(SECOND), Next::Sleep(Some(FIRST_PAUSE)));
        assert_eq!(machine.next_session(2 * SECOND), Next::Sleep(None), "nobody has asked");
    }
}

#[test]
fn errors_that_nothing_helps_against_end_it_and_others_do_not() {
    let end = |streams: bool, failure| {
        let mut machine = machine();
        assert!(matches!(machine.wait(missing(MB), NOTHING, size()), Wait::ForChange { .. }));
        let Next::Begin(task) = machine.next_session(SECOND) else { panic!("{machine:?}") };
        assert!(!streams || machine.session_begins(task, SECOND));
        let verdict = machine.session_ends(task, at(MB), Ended::Failed(failure), SECOND);
        let failed = machine.wait(missing(MB), at(MB), size()) == Wait::Failed;
        assert_eq!(failed, verdict == Verdict::Fatal);
        verdict
    };
    assert_eq!(end(false, Failure::Final), Verdict::Fatal);
    assert_eq!(end(true, Failure::Final), Verdict::Fatal);
    assert_eq!(end(false, Failure::Misdirected), Verdict::Fatal);
    assert_eq!(end(true, Failure::Misdirected), Verdict::Complain, "it was the right primary, and may be again");
    assert_eq!(end(false, Failure::Passing), Verdict::Warn);
}

#[test]
fn a_promotion_begins_once_nothing_more_comes_in() {
    let mut machine = machine();
    let task = begin(&mut machine, MB, SECOND);
    machine.hear(Event::Pause(true));
    assert_eq!(machine.wanted(), Wanted::Pause);
    let log = Action::Log("received promote request");
    assert_eq!(machine.hear(Event::Promote), [log, Action::EndSession]);
    assert_eq!(machine.hear(Event::Promote), [Action::EndSession], "said once");
    assert_eq!(machine.wanted(), Wanted::Follow, "the session has not ended");
    assert_eq!(machine.wait(missing(MB), at(MB), size()), Wait::No(News::Perhaps));
    // That it fails now is no news.
    let verdict = machine.session_ends(task, at(MB + 1), Ended::Failed(Failure::Final), SECOND);
    assert_eq!(verdict, Verdict::Expected);
    assert_eq!(machine.next_session(SECOND), Next::Finish);
    assert_eq!((machine.wanted(), machine.visible(at(MB + 1))), (Wanted::Promote, None), "all that there is counts");
    machine.hear(Event::Stop);
    assert_eq!(machine.wanted(), Wanted::Stop);
}

/// Found by the model: replay was paused before WAL that an earlier run had acknowledged, and what streamed in again was not there
/// yet. The connection was lost, and a promotion ended recovery where it had got to.
#[test]
fn a_promotion_waits_until_all_counts_that_is_there() {
    let mut machine = machine();
    let task = begin(&mut machine, 3 * MB, SECOND);
    machine.session_ends(task, at(3 * MB + 9), Ended::Failed(Failure::Passing), SECOND);
    machine.hear(Event::Promote);
    assert_eq!(machine.visible(at(3 * MB + 9)), Some(Lsn(3 * MB + 9)));
    assert_eq!(machine.wanted(), Wanted::Follow);
    assert_eq!(machine.next_session(SECOND), Next::Finish);
    assert_eq!((machine.wanted(), machine.visible(at(3 * MB + 9))), (Wanted::Promote, None));
}

#[test]
fn a_session_that_comes_about_after_a_stop_is_not_wanted() {
    let mut machine = machine();
    assert!(matches!(machine.wait(missing(MB), NOTHING, size()), Wait::ForChange { .. }));
    let Next::Begin(task) = machine.next_session(SECOND) else { panic!("{machine:?}") };
    machine.hear(Event::Stop);
    assert!(!machine.session_begins(task, SECOND));
    assert_eq!(machine.session_ends(task, NOTHING, Ended::Asked, SECOND), Verdict::Expected);
    assert_eq!(machine.next_session(SECOND), Next::Finish);
}

#[test]
fn files_are_looked_for_now_and_then() {
    let mut machine = machine();
    assert_eq!(machine.look(SECOND), Look::First);
    assert_eq!(machine.look(SECOND + LOOK_INTERVAL / 2), Look::No);
    assert_eq!(machine.look(SECOND + LOOK_INTERVAL), Look::Again);
}

/// A power loss had damaged a record that goes on in the next segment, and that was the one that was streamed: for ever, while
/// the damage lay before it.
#[test]
fn a_stream_that_begins_past_the_damage_is_given_up() {
    let mut machine = machine();
    let task = begin(&mut machine, 2 * MB, SECOND);
    let damaged = Missing { needed: Lsn(MB + 9), replayed: Lsn(MB + 9), ..missing(0) };
    assert_eq!(
        machine.wait(damaged, at(2 * MB + 9), size()),
        Wait::No(News::Perhaps),
        "what is there is looked at first"
    );
    assert_eq!(machine.wait(damaged, at(2 * MB + 9), size()), Wait::EndSession);
    assert_eq!(machine.wait(damaged, at(2 * MB + 9), size()), Wait::ForWal { past: Lsn(2 * MB + 9) }, "once");
    assert_eq!(machine.session_ends(task, at(2 * MB + 9), Ended::Asked, SECOND), Verdict::Expected);
    assert_eq!(machine.next_session(SECOND), Next::Sleep(None));
    assert_eq!(machine.wait(damaged, at(2 * MB + 9), size()), Wait::No(News::Perhaps));
    let Wait::ForChange { requests, .. } = machine.wait(damaged, at(2 * MB + 9), size()) else { panic!("{machine:?}") };
    assert_eq!(requests, Some(Task { start: Lsn(MB), timeline: ONE }));
}

/// The primary had no WAL any more of where the record begins, which the archive has, and the damage was in the next segment.
#[test]
fn where_a_segment_is_there_and_refused_the_next_one_is_tried() {
    let mut machine = machine();
    let damaged = Missing { needed: Lsn(MB + 9), replayed: Lsn(MB + 9), ..missing(0) };
    let request = |machine: &mut Machine, missing| match machine.wait(missing, NOTHING, size()) {
        Wait::ForChange { requests: Some(task), .. } => task.start.0,
        other => panic!("{other:?}"),
    };
    let mut now = SECOND;
    let mut refuse = |machine: &mut Machine| {
        now += LONGEST;
        let Next::Begin(task) = machine.next_session(now) else { panic!("{machine:?}") };
        machine.session_ends(task, NOTHING, Ended::Failed(Failure::MissingWal), now);
        assert_eq!(machine.wait(damaged, NOTHING, size()), Wait::No(News::Perhaps), "an archive may help");
    };
    assert_eq!(request(&mut machine, damaged), MB);
    refuse(&mut machine);
    assert_eq!(request(&mut machine, Missing { has_wal: false, ..damaged }), MB);
    refuse(&mut machine);
    assert_eq!(request(&mut machine, damaged), 2 * MB);
    refuse(&mut machine);
    assert_eq!(request(&mut machine, damaged), MB, "in turn");
    refuse(&mut machine);
    assert_eq!(request(&mut machine, damaged), 2 * MB);
    let Next::Begin(task) = machine.next_session(100 * SECOND) else { panic!("{machine:?}") };
    assert!(machine.session_begins(task, 100 * SECOND));
    assert_eq!(machine.wait(damaged, at(2 * MB), size()), Wait::No(News::Perhaps));
    assert_eq!(machine.wait(damaged, at(2 * MB), size()), Wait::ForWal { past: Lsn(2 * MB) }, "it stays");
}

/// The connection was lost in the middle of a segment, which the primary removed before it could be made again; the archive had all
/// of it. What had come before was asked for again and again, and refused, although replay was past it (the simulator's seed 2698).
#[test]
fn where_a_stream_cannot_go_on_it_begins_past_what_the_archive_had() {
    let mut machine = machine();
    let task = begin(&mut machine, MB, SECOND);
    machine.session_ends(task, at(MB + 8), Ended::Failed(Failure::Passing), SECOND);
    // The archive had the rest of the segment; the record at MB + 8 goes on in the next.
    let next = Missing { replayed: Lsn(MB + 8), needed: Lsn(2 * MB), has_wal: false, ..missing(0) };
    let mut asked = Vec::new();
    for round in 1..=3 {
        let mut wait = || machine.wait(next, at(MB + 8), size());
        let requests = std::iter::repeat_with(&mut wait).take(4).find_map(|wait| match wait {
            Wait::ForChange { requests, .. } => requests,
            _ => None,
        });
        asked.push(requests.expect("a session is asked for").start.0);
        let Next::Begin(task) = machine.next_session(100 * round * SECOND) else { panic!("{machine:?}") };
        machine.session_ends(task, at(MB + 8), Ended::Failed(Failure::MissingWal), 100 * round * SECOND);
    }
    assert_eq!(asked, [MB + 8, 2 * MB, MB + 8]);
}
