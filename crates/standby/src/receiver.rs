//! The thread that receives: makes a session whenever there is WAL to stream, and streams it into the spool.

use tracing::Level;
use walrider_session::{ConnectOptions, Start};
use walrider_stream::error::ReceiveError;
use walrider_stream::line::Line;
use walrider_stream::streaming::{End, Streaming};
use walrider_stream::upstream::Upstream;

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
    let &Opened { ref spool, system_identifier, major } = opened;
    let conninfo = settings.primary.as_deref().unwrap_or_default();
    let mut connect = ConnectOptions::resolve(conninfo, &settings.application_name_fallback)?;
    for warning in connect.warnings() {
        repeats.say(Level::WARN, warning);
    }
    connect.interrupt_with(shell.board.end_fd());
    connect.give_up_after(settings.receiver_timeout);
    let application_name = connect.application_name().to_owned();
    let database = match settings.early {
        EarlyMode::Off => None,
        EarlyMode::Auto | EarlyMode::On => {
            let mut database = ConnectOptions::resolve_for_database(conninfo, &settings.application_name_fallback)?;
            database.interrupt_with(shell.board.end_fd());
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
        let shown = &mut shell.state().shown;
        shown.primary = Some(peer.clone());
        shown.application_name = Some(application_name);
        shown.slot = opened.slot.clone();
    }
    if opened.early {
        spool.prepare_early();
    }
    let mut writer = spool.start_at(task.timeline, task.start)?;
    let early = match opened.start(&upstream, task.start, task.timeline)? {
        (Start::Ended(branch), _) => return Ok(End::Timeline(branch)),
        (Start::Streaming, early) => early,
    };
    let line = Line::new(opened.connection, spool, &shell.board, opened.identity.flushed);
    if !shell.session_begins(task, early) {
        return Ok(End::Asked);
    }
    repeats.settle();
    let Task { start, timeline } = task;
    let how = if early { ", before the primary has flushed it" } else { "" };
    tracing::info!("started streaming WAL from primary at {start} on timeline {timeline} ({peer}){how}");
    Streaming::new(&mut writer, &shell.board).early(early).run(line)
}
