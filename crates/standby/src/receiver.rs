//! The thread that receives: makes a session whenever there is WAL to stream, and streams it into the spool.

use tracing::Level;
use walrider_receive::connect::{ConnectOptions, Start};
use walrider_receive::error::ReceiveError;
use walrider_receive::line::Line;
use walrider_receive::streaming::{End, Streaming};
use walrider_receive::upstream::Upstream;

use crate::follower::{Follower, Task};
use crate::repeats::Repeats;
use crate::settings::EarlyMode;

/// Receives until the standby stops or is promoted.
pub(crate) fn run(follower: &Follower, system_identifier: u64, major: u32) {
    let mut repeats = Repeats::default();
    while let Some(task) = follower.next_task() {
        let result = stream(follower, task, system_identifier, major, &mut repeats);
        let spool = follower.spool().expect("opened before there was a task");
        // What was written goes on where it is, if it is this task's.
        let next = Some(Task { start: spool.written(), timeline: task.timeline })
            .filter(|next| spool.timeline() == task.timeline && next.start >= task.start);
        match result {
            Ok(End::Asked) => follower.stream_ends(next.or(Some(task)), None, false),
            Ok(End::Timeline(branch)) => {
                let to = branch.map_or(String::new(), |(timeline, at)| format!(": timeline {timeline} begins at {at}"));
                let (timeline, at) = (task.timeline, spool.written());
                let ended = format!("replication terminated by primary server: end of timeline {timeline} at {at}{to}");
                repeats.say(Level::INFO, &ended);
                // More than once in a row only while replay has not found the way to the next timeline.
                follower.stream_ends(None, None, spool.written() == task.start);
            }
            Err(error) if follower.board.ends() => {
                tracing::debug!("ended: {error}");
                follower.stream_ends(next.or(Some(task)), None, false);
            }
            Err(error) if error.is_final() || (error.never_heals() && !follower.has_streamed()) => {
                // Replay may be busy for a while before it ends with that.
                tracing::error!("receiving has ended: {error}");
                follower.fail(error.into());
            }
            Err(error) => {
                let level = if error.never_heals() { Level::ERROR } else { Level::WARN };
                repeats.say(level, &format!("could not receive data from the primary: {error}"));
                let next = next.filter(|_| !error.is_missing_wal());
                follower.stream_ends(next, Some(error.to_string()), true);
            }
        }
    }
    repeats.settle();
}

fn stream(
    follower: &Follower,
    task: Task,
    system_identifier: u64,
    major: u32,
    repeats: &mut Repeats,
) -> Result<End, ReceiveError> {
    let settings = follower.settings();
    let spool = follower.spool().expect("opened before there was a task");
    let conninfo = settings.primary.as_deref().unwrap_or_default();
    let mut connect = ConnectOptions::resolve(conninfo, &settings.application_name_fallback)?;
    for warning in connect.warnings() {
        repeats.say(Level::WARN, warning);
    }
    connect.interrupt_with(follower.board.end_fd());
    connect.give_up_after(settings.receiver_timeout);
    let application_name = connect.application_name().to_owned();
    let database = match settings.early {
        EarlyMode::Off => None,
        EarlyMode::Auto | EarlyMode::On => {
            let mut database = ConnectOptions::resolve_for_database(conninfo, &settings.application_name_fallback)?;
            database.interrupt_with(follower.board.end_fd());
            database.give_up_after(settings.receiver_timeout);
            Some(database)
        }
    };
    let upstream = Upstream {
        connect,
        database,
        early_required: settings.early == EarlyMode::On,
        slot: settings.slot.clone(),
        create_slot: settings.create_slot,
        temporary_slot: settings.temporary_slot,
        system_identifier: Some(system_identifier),
        major: Some(major),
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
        let mut control = follower.control();
        control.primary = Some(peer.clone());
        control.application_name = Some(application_name);
        control.slot = opened.slot.clone();
    }
    if opened.early {
        spool.prepare_early();
    }
    let mut writer = spool.start_at(task.timeline, task.start)?;
    let early = match opened.start(&upstream, task.start, task.timeline)? {
        (Start::Ended(branch), _) => return Ok(End::Timeline(branch)),
        (Start::Streaming, early) => early,
    };
    let line = Line::new(opened.connection, spool, &follower.board, opened.identity.flushed);
    if !follower.stream_begins(task.timeline, early) {
        return Ok(End::Asked);
    }
    repeats.settle();
    let Task { start, timeline } = task;
    let how = if early { ", before the primary has flushed it" } else { "" };
    tracing::info!("started streaming WAL from primary at {start} on timeline {timeline} ({peer}){how}");
    Streaming::new(&mut writer, &follower.board).early(early).run(line)
}
