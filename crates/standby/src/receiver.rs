//! The thread that receives: makes a session whenever there is WAL to stream, and streams it into the spool.

use tracing::Level;
use walrider_session::{ConnectOptions, Start};
use walrider_stream::error::ReceiveError;
use walrider_stream::streaming::{End, Streaming};
use walrider_stream::upstream::{Early, Expected, Slot, Upstream};

use crate::machine::{Ended, Task, Verdict};
use crate::repeats::Repeats;
use crate::settings::EarlyMode;
use crate::shell::{Opened, Shell};

/// Receives until the standby stops or is promoted.
pub(crate) fn run(shell: &Shell) {
    let mut repeats = Repeats::default();
    while let Some(task) = shell.next_task() {
        let opened = shell.opened().expect("opened before there was a task");
        let spool = &opened.spool;
        let (how, said, mut error) = match stream(shell, opened, task, &mut repeats) {
            Ok(End::Asked) => (Ended::Asked, "as was asked".to_owned(), None),
            Ok(End::Timeline(branch)) => {
                let to = branch.map_or(String::new(), |(timeline, at)| format!(": timeline {timeline} begins at {at}"));
                let (timeline, at) = (task.timeline, spool.written());
                let ended = format!("replication terminated by primary server: end of timeline {timeline} at {at}{to}");
                (Ended::Timeline, ended, None)
            }
            Err(error) => {
                let said = format!("could not receive data from the primary: {error}");
                (Ended::Failed((&error).into()), said, Some(error))
            }
        };
        match shell.session_ends(task, spool, how, &mut error) {
            Verdict::Expected => tracing::debug!("ended: {said}"),
            Verdict::Note => repeats.say(Level::INFO, &said),
            Verdict::Warn => repeats.say(Level::WARN, &said),
            Verdict::Complain => repeats.say(Level::ERROR, &said),
            // It has been said.
            Verdict::Fatal => {}
        }
    }
    repeats.settle();
}

fn stream(shell: &Shell, opened: &Opened, task: Task, repeats: &mut Repeats) -> Result<End, ReceiveError> {
    let settings = shell.settings();
    let &Opened { ref spool, system_identifier, major, .. } = opened;
    let conninfo = settings.primary.as_deref().unwrap_or_default();
    let fallback = &settings.application_name_fallback;
    let patient = |mut options: ConnectOptions| {
        options.interrupt_with(shell.board.end_fd());
        options.give_up_after(settings.receiver_timeout);
        options
    };
    let connect = patient(ConnectOptions::resolve(conninfo, fallback)?);
    for warning in connect.warnings() {
        repeats.say(Level::WARN, warning);
    }
    let application_name = connect.application_name().to_owned();
    let database = || ConnectOptions::resolve_for_database(conninfo, fallback).map(patient);
    let upstream = Upstream {
        connect,
        expected: Expected { system_identifier: Some(system_identifier), major: Some(major) },
        early: match settings.early {
            EarlyMode::Off => Early::Off,
            EarlyMode::Auto => Early::Auto(database()?),
            EarlyMode::On => Early::Required(database()?),
        },
        slot: match settings.slot.clone() {
            Some(name) => Slot::Named { name, create: settings.create_slot },
            None if settings.temporary_slot => Slot::Temporary,
            None => Slot::None,
        },
    };
    let mut opened = upstream.open()?;
    if let Some(why) = &opened.not_early {
        repeats.say(
            Level::INFO,
            &format!("no early stream ({why}): the primary sends WAL after it has flushed it, as ever"),
        );
    }
    let pg_wal = settings.data_dir.join("pg_wal");
    let has = |name: &str| pg_wal.join(name).exists();
    opened.fetch_histories(task.timeline, has, |timeline, contents| {
        tracing::info!("fetched the history of timeline {timeline} from the primary");
        spool.write_history(timeline, contents)
    })?;
    let peer = opened.connection.peer().to_owned();
    {
        let shown = &mut shell.state().shown;
        shown.primary = Some(peer.clone());
        shown.application_name = Some(application_name);
        shown.slot = opened.slot.clone();
    }
    if opened.early {
        spool.prepare_early();
    }
    let mut writer = spool.start_at(task.timeline, task.start)?;
    if let Some(relay) = shell.relay() {
        relay.session_begins(&mut opened)?;
    }
    let early = match opened.start(&upstream, task.start, task.timeline)? {
        (Start::Ended(branch), _) => {
            writer.end_timeline();
            return Ok(End::Timeline(branch));
        }
        (Start::Streaming, early) => early,
    };
    if !shell.session_begins(task, early) {
        return Ok(End::Asked);
    }
    repeats.settle();
    let Task { start, timeline } = task;
    let how = if early { ", before the primary has flushed it" } else { "" };
    tracing::info!("started streaming WAL from primary at {start} on timeline {timeline} ({peer}){how}");
    let streaming = Streaming::new(&mut writer, &shell.board).early(early);
    let ended = streaming.run(opened.connection, spool, opened.identity.flushed);
    if matches!(ended, Ok(End::Timeline(_))) {
        writer.end_timeline();
    }
    ended
}
