//! One connection, from its first byte to its last: who it is, and the commands of a walsender (`exec_replication_command`,
//! `replication/walsender.c`, PostgreSQL 18).

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_layout::history::history_file_name;
use walrider_layout::{Lsn, TimelineId};
use walrider_wire::WireError;
use walrider_wire::replication::{CommandError, Options, ReplicationCommand};
use walrider_wire::server::{self, FromClient, Opening, Replication, Startup, Type};
use walrider_wire::stream::StatusUpdate;

use crate::auth::authenticate;
use crate::backup::options::incremental;
use crate::backup::{self, Backup};
use crate::downstream::Downstream;
use crate::link::{Link, LinkError, wait_readable};
use crate::origin::{Left, Origin};
use crate::refusal::{Refusal, Stopped};
use crate::sender::{Sender, left_at, not_in_history};
use crate::server::Unknown;
use crate::service::{Access, Service};
use crate::slots::SlotError;

/// Packets before a session begins: TLS, GSSAPI, and the one that begins it.
const MAX_OPENINGS: usize = 4;

/// Before the first report.
const NOTHING_TOLD: StatusUpdate =
    StatusUpdate { write: Lsn(0), flush: Lsn(0), apply: Lsn(0), time: 0, reply_requested: false };
/// Until then somebody has to have said who it is (`authentication_timeout`).
const AUTHENTICATION_TIME: Duration = Duration::from_secs(60);
/// Characters of a command that are logged.
const MAX_LOGGED: usize = 1000;
/// How often DROP_REPLICATION_SLOT … WAIT looks whether the slot is free.
const DROP_INTERVAL: Duration = Duration::from_millis(100);
/// How long a refusal may take to be sent.
const REFUSAL_TIME: Duration = Duration::from_secs(5);

/// A connection.
pub(crate) struct Session<'a> {
    service: &'a Service,
    link: Link,
    address: Option<IpAddr>,
    number: u64,
    /// Until it is known who it is.
    unknown: Option<Unknown>,
}

/// Who has come in.
struct Client {
    wake: Arc<OwnedFd>,
    origin: Arc<Origin>,
}

impl Client {
    /// Takes all wakes so far.
    fn awake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

impl<'a> Session<'a> {
    /// `address`: `None` on a unix socket.
    pub fn new(service: &'a Service, link: Link, address: Option<IpAddr>, unknown: Unknown) -> Session<'a> {
        let number = service.next_number();
        Session { service, link, address, number, unknown: Some(unknown) }
    }

    /// To its end. What the client is refused is logged.
    pub fn run(mut self) {
        let who = self.address.map_or("a unix socket".to_owned(), |address| address.to_string());
        let ended = self.serve();
        self.service.slots.leave(self.number);
        self.service.downstreams.leave(self.number);
        match ended {
            Err(Stopped::Refused(refusal)) => {
                tracing::warn!("connection {} from {who}: {}", self.number, refusal.0);
                self.link.queue(|out| server::error_response(out, &refusal.fatal().0));
                let _ = self.link.flush_all(Instant::now() + REFUSAL_TIME);
            }
            Err(Stopped::Link(LinkError::Wire(error))) => {
                tracing::warn!("connection {} from {who}: {error}", self.number);
                let code = if matches!(error, WireError::Protocol(_)) { "0A000" } else { "08P01" };
                let refusal = Refusal::new(code, error.to_string()).fatal();
                self.link.queue(|out| server::error_response(out, &refusal.0));
                let _ = self.link.flush_all(Instant::now() + REFUSAL_TIME);
            }
            Err(Stopped::Link(LinkError::Closed)) | Ok(()) => {
                tracing::debug!("connection {} from {who} ended", self.number)
            }
            Err(Stopped::Link(error)) => tracing::warn!("connection {} from {who}: {error}", self.number),
        }
    }

    fn serve(&mut self) -> Result<(), Stopped> {
        let deadline = Instant::now() + AUTHENTICATION_TIME;
        // What counts when it comes counts to the end of its authentication.
        let access = self.service.access();
        let Some(startup) = self.open(&access, deadline)? else { return Ok(()) };
        let client = self.admit(&startup, &access, deadline)?;
        loop {
            let (tag, body) = self.wait_command(&client)?;
            match FromClient::parse(tag, &body)? {
                FromClient::Query(text) => match self.command(text, &client) {
                    Ok(()) => {}
                    Err(Stopped::Refused(refusal)) if !refusal.is_fatal() => {
                        let text: String = text.chars().take(MAX_LOGGED).collect();
                        tracing::info!("connection {}: {}; in: {text}", self.number, refusal.0);
                        self.link.queue(|out| server::error_response(out, &refusal.0));
                    }
                    Err(error) => return Err(error),
                },
                FromClient::Terminate => return Ok(()),
                // What was under way when the stream ended.
                FromClient::CopyData(_) | FromClient::CopyDone | FromClient::CopyFail(_) => continue,
                _ => {
                    let message = format!("unexpected message type 0x{tag:02X}: only simple queries are understood");
                    return Err(Refusal::new("08P01", message).into());
                }
            }
            self.link.queue(|out| server::ready_for_query(out, b'I'));
        }
    }

    /// Waits for the next message, or that the service ends.
    fn wait_command(&mut self, client: &Client) -> Result<(u8, Vec<u8>), Stopped> {
        loop {
            // Who does not read what it has asked for asks no more, and nothing is kept for it.
            while !self.link.flush()? {
                self.check_stop()?;
                self.link.wait_to_send(client.wake.as_fd())?;
                client.awake();
            }
            if let Some((tag, body)) = self.link.message()? {
                return Ok((tag, body.to_vec()));
            }
            self.check_stop()?;
            if !self.link.fill()? {
                self.link.wait(client.wake.as_fd(), None)?;
                client.awake();
            }
        }
    }

    fn check_stop(&self) -> Result<(), Refusal> {
        match self.service.is_stopping() {
            true => Err(Refusal::new("57P01", "terminating connection due to administrator command")),
            false => Ok(()),
        }
    }

    /// The packets before a session, TLS among them. `None`: it wanted nothing else (`ProcessStartupPacket`).
    fn open(&mut self, access: &Access, deadline: Instant) -> Result<Option<Startup>, Stopped> {
        for _ in 0..MAX_OPENINGS {
            let packet = self.link.startup_packet(deadline)?;
            match Opening::parse(&packet)? {
                Opening::Ssl => {
                    match access.tls.as_ref().filter(|_| self.link.tls().is_none() && self.address.is_some()) {
                        Some(tls) => {
                            self.link.queue(|out| out.push(b'S'));
                            self.link.flush_all(deadline)?;
                            let session = tls.accept().map_err(|error| Refusal::new("08P01", error.to_string()))?;
                            self.link.encrypt(session, deadline)?;
                        }
                        None => self.link.queue(|out| out.push(b'N')),
                    }
                }
                Opening::Gss => self.link.queue(|out| out.push(b'N')),
                // Nothing here takes long enough to be cancelled.
                Opening::Cancel { .. } => return Ok(None),
                Opening::Startup(startup) => return Ok(Some(startup)),
            }
            self.link.flush_all(deadline)?;
        }
        Err(Refusal::new("08P01", "too many packets before the session").into())
    }

    /// Who it is, and whether it may come in; says so, and what a server says of itself.
    fn admit(&mut self, startup: &Startup, access: &Access, deadline: Instant) -> Result<Client, Stopped> {
        if let Some((protocol, options)) = startup.negotiation() {
            self.link.queue(|out| server::negotiate_protocol_version(out, protocol, &options));
        }
        let user = startup.get("user").filter(|user| !user.is_empty());
        let user = user.ok_or_else(|| Refusal::new("28000", "no PostgreSQL user name specified in startup packet"))?;
        let replication = startup.replication();
        authenticate(&mut self.link, access, self.address, user, deadline)?;
        self.unknown = None;
        match replication {
            Some(Replication::Physical) => {}
            _ => {
                let refusal = Refusal::new("0A000", "only physical replication connections are served here");
                return Err(refusal.hint("Connect to the primary, or with \"replication=true\".").into());
            }
        }
        let origin = self.service.origin().filter(|origin| origin.end().0 != TimelineId(0)).cloned();
        let origin = origin.ok_or_else(|| {
            let refusal = Refusal::new("57P03", "the relay is starting up");
            refusal.detail("It has no WAL yet, and has not reached its primary.")
        })?;
        let wake = self.service.downstreams.enter(
            self.number,
            self.service.settings.max_connections,
            Downstream {
                application_name: startup.get("application_name").unwrap_or_default().to_owned(),
                user: user.to_owned(),
                address: self.address.map_or("local".to_owned(), |address| address.to_string()),
                since: SystemTime::now(),
                slot: None,
                streaming: None,
                sent: Lsn::INVALID,
                told: NOTHING_TOLD,
                feedback: None,
            },
        );
        let wake = wake.map_err(LinkError::Io)?;
        let wake = wake.ok_or_else(|| Refusal::new("53300", "sorry, too many clients already"))?;
        let parameters = [
            ("server_version", origin.identity().server_version.as_str()),
            ("server_encoding", "UTF8"),
            ("client_encoding", "UTF8"),
            ("integer_datetimes", "on"),
            ("in_hot_standby", "on"),
            ("default_transaction_read_only", "on"),
            ("standard_conforming_strings", "on"),
            ("application_name", startup.get("application_name").unwrap_or_default()),
        ];
        self.link.queue(|out| {
            server::authentication_ok(out);
            for (name, value) in parameters {
                server::parameter_status(out, name, value);
            }
            // A key that nobody can use: nothing here is cancelled.
            server::backend_key_data(out, self.number as u32, &[0; 4]);
            server::ready_for_query(out, b'I');
        });
        Ok(Client { wake, origin })
    }

    /// One command, with its answer but for ReadyForQuery.
    fn command(&mut self, text: &str, client: &Client) -> Result<(), Stopped> {
        let command =
            ReplicationCommand::parse(text).map_err(|error| Refusal::new(CommandError::SQLSTATE, error.to_string()))?;
        let origin = &client.origin;
        match command {
            // What there is only with a data directory.
            ReplicationCommand::BaseBackup { options } => {
                let replica = origin.replica().ok_or_else(no_backups)?;
                let link = &mut self.link;
                Backup { service: self.service, origin, replica, link, wake: &client.wake }.run(&options)?;
                self.link.queue(|out| server::command_complete(out, "BASE_BACKUP"));
            }
            ReplicationCommand::UploadManifest => {
                let refusal = if origin.replica().is_some() { incremental() } else { no_backups() };
                return Err(refusal.into());
            }
            ReplicationCommand::IdentifySystem => {
                let (timeline, end) = origin.end();
                let system = origin.identity().system_identifier.to_string();
                let columns = [
                    ("systemid", Type::Text),
                    ("timeline", Type::Int8),
                    ("xlogpos", Type::Text),
                    ("dbname", Type::Text),
                ];
                let row = [Some(system), Some(timeline.to_string()), Some(end.to_string()), None];
                self.answer(&columns, &row, "IDENTIFY_SYSTEM");
            }
            ReplicationCommand::Show { name } => {
                let value = self.parameter(&name, origin)?;
                self.answer(&[(&name, Type::Text)], &[Some(value)], "SHOW");
            }
            ReplicationCommand::TimelineHistory(timeline) => {
                let contents = origin.history_file(timeline)?.ok_or_else(|| {
                    let file = history_file_name(timeline);
                    Refusal::new("58P01", format!("could not open file \"{file}\": No such file or directory"))
                })?;
                self.link.queue(|out| {
                    server::row_description(out, &[("filename", Type::Text), ("content", Type::Text)]);
                    server::data_row(out, [Some(history_file_name(timeline).as_bytes()), Some(&contents)]);
                    server::command_complete(out, "TIMELINE_HISTORY");
                });
            }
            ReplicationCommand::ReadReplicationSlot { slot: name } => {
                let columns = [("slot_type", Type::Text), ("restart_lsn", Type::Text), ("restart_tli", Type::Int8)];
                let row = match self.service.slots.get(&name) {
                    None => [None, None, None],
                    Some(slot) => {
                        let timeline = match slot.restart_lsn {
                            Some(at) => Some(origin.history(origin.end().0)?.timeline_at(at).to_string()),
                            None => None,
                        };
                        [Some("physical".to_owned()), slot.restart_lsn.map(|at| at.to_string()), timeline]
                    }
                };
                self.answer(&columns, &row, "READ_REPLICATION_SLOT");
            }
            ReplicationCommand::CreatePhysicalSlot { slot: name, temporary, options } => {
                let (reserves, size) = (reserves_wal(&options)?, origin.segment_size());
                let from = || reserves.then(|| size.start_of(size.segment_of(reserved_from(origin))));
                // What it reserves must not be removed before it is held for it (ReplicationSlotReserveWal).
                let held = origin.spool().hold(Lsn(0));
                self.service.slots.create(&name, temporary.then_some(self.number), from)?;
                self.service.slot_made();
                drop(held);
                let columns =
                    ["slot_name", "consistent_point", "snapshot_name", "output_plugin"].map(|name| (name, Type::Text));
                self.answer(&columns, &[Some(name), Some("0/0".to_owned()), None, None], "CREATE_REPLICATION_SLOT");
            }
            ReplicationCommand::DropReplicationSlot { slot: name, wait } => {
                while let Err(error) = self.service.slots.drop_slot(&name, self.number) {
                    if !wait || !matches!(error, SlotError::Active(..)) {
                        return Err(error.into());
                    }
                    self.check_stop()?;
                    wait_readable(client.wake.as_fd(), DROP_INTERVAL)?;
                    client.awake();
                    // It may have gone away.
                    self.link.fill()?;
                }
                self.link.queue(|out| server::command_complete(out, "DROP_REPLICATION_SLOT"));
            }
            ReplicationCommand::AlterReplicationSlot { slot: name, options } => {
                check_alter(&options)?;
                // That it is in use, or not there, comes first, as in `ReplicationSlotAlter` (PostgreSQL 18).
                self.service.slots.acquire(&name, self.number)?;
                self.service.slots.release(&name, self.number);
                let why = "cannot use ALTER_REPLICATION_SLOT with a physical replication slot";
                return Err(Refusal::new("0A000", why).into());
            }
            ReplicationCommand::StartPhysical { slot, start, timeline } => {
                self.start(slot, start, timeline, client)?;
            }
            other => return Err(unsupported(&other).into()),
        }
        Ok(())
    }

    /// Rows of one.
    fn answer(&mut self, columns: &[(&str, Type)], row: &[Option<String>], tag: &str) {
        self.link.queue(|out| {
            server::row_description(out, columns);
            server::data_row(out, row.iter().map(|value| value.as_ref().map(|value| value.as_bytes())));
            server::command_complete(out, tag);
        });
    }

    /// What SHOW tells: what PostgreSQL's clients ask for.
    fn parameter(&self, name: &str, origin: &Origin) -> Result<String, Refusal> {
        let version = &origin.identity().server_version;
        Ok(match name {
            "wal_segment_size" => {
                let bytes = origin.segment_size().bytes();
                if bytes >= 1 << 30 { format!("{}GB", bytes >> 30) } else { format!("{}MB", bytes >> 20) }
            }
            // pg_receivewal and pg_basebackup make their files readable as the server's are.
            "data_directory_mode" => {
                use std::os::unix::fs::PermissionsExt;
                let mode = origin.replica().and_then(|replica| std::fs::metadata(replica.data_dir()).ok());
                format!("{:04o}", mode.map_or(0o700, |found| found.permissions().mode() & 0o777))
            }
            "server_version" => version.clone(),
            "in_hot_standby" => "on".to_owned(),
            "wal_sender_timeout" => format!("{}ms", self.service.settings.sender_timeout.as_millis()),
            _ => return Err(Refusal::new("42704", format!("unrecognized configuration parameter \"{name}\""))),
        })
    }

    /// START_REPLICATION (`StartReplication`).
    fn start(
        &mut self,
        slot: Option<String>,
        start: Lsn,
        timeline: Option<TimelineId>,
        client: &Client,
    ) -> Result<(), Stopped> {
        if let Some(slot) = &slot {
            self.service.slots.acquire(slot, self.number)?;
        }
        let streamed = self.stream(slot.clone(), start, timeline, client);
        self.service
            .downstreams
            .change(self.number, |downstream| (downstream.streaming, downstream.slot) = (None, None));
        if let Some(slot) = &slot {
            self.service.slots.release(slot, self.number);
        }
        let left = streamed?;
        if let Some((at, next)) = left {
            let columns = [("next_tli", Type::Int8), ("next_tli_startpos", Type::Text)];
            self.link.queue(|out| {
                server::row_description(out, &columns);
                server::data_row(out, [Some(next.to_string().as_bytes()), Some(at.to_string().as_bytes())]);
            });
        }
        // Two of them: libpq takes one for the end of the row, and walreceiver and pg_receivewal want another (`exec_replication_command`).
        self.link.queue(|out| {
            server::command_complete(out, "START_STREAMING");
            server::command_complete(out, "START_REPLICATION");
        });
        Ok(())
    }

    fn stream(
        &mut self,
        slot: Option<String>,
        start: Lsn,
        timeline: Option<TimelineId>,
        client: &Client,
    ) -> Result<Option<Left>, Stopped> {
        let origin = &client.origin;
        let (newest, end) = origin.end();
        let timeline = timeline.unwrap_or(newest);
        let left = match timeline == newest {
            true => None,
            false => {
                let left = left_at(&origin.history(newest)?, timeline).ok_or_else(|| not_in_history(timeline))?;
                if start > left.0 {
                    let message = format!(
                        "requested starting point {start} on timeline {timeline} is not in this server's history"
                    );
                    let detail = format!("This server's history forked from timeline {timeline} at {}.", left.0);
                    return Err(Refusal::new("XX000", message).detail(detail).into());
                }
                Some(left)
            }
        };
        if left.is_some_and(|(at, _)| at == start) {
            return Ok(left);
        }
        if left.is_none() && start > end {
            let message =
                format!("requested starting point {start} is ahead of the WAL flush position of this server {end}");
            return Err(Refusal::new("XX000", message).into());
        }
        if let Some(slot) = &slot
            && self.service.slots.go_back(slot, start)?
        {
            self.service.slot_made();
        }
        // Said before the stream begins, as far as it can be.
        if left.is_some() || start < end {
            origin.open_segment(start, timeline, left)?;
        }
        self.link.queue(server::copy_both_response);
        self.service.downstreams.change(self.number, |downstream| {
            (downstream.streaming, downstream.slot, downstream.sent) = (Some(timeline), slot.clone(), start);
            downstream.told = NOTHING_TOLD;
        });
        let sender = Sender {
            service: self.service,
            origin,
            link: &mut self.link,
            number: self.number,
            wake: &client.wake,
            slot,
            timeline,
            sent: start,
            left,
        };
        sender.run()
    }
}

/// From where on a new slot holds WAL: where a standby would begin that is a backup of here (`ReplicationSlotReserveWal`).
fn reserved_from(origin: &Origin) -> Lsn {
    let end = origin.end().1;
    let redo = origin.replica().and_then(|replica| backup::redo(replica).ok());
    redo.map_or(end, |redo| redo.min(end))
}

/// Whether a slot is to hold WAL from the start (`parseCreateReplSlotOptions`).
fn reserves_wal(options: &Options) -> Result<bool, Refusal> {
    let mut reserves = false;
    for (name, value) in options {
        match name.as_str() {
            "reserve_wal" => reserves = boolean(name, value.as_deref())?,
            _ => return Err(Refusal::new("42601", format!("unrecognized option: {name}"))),
        }
    }
    Ok(reserves)
}

/// `defGetBoolean` (`commands/define.c`, PostgreSQL 18).
fn boolean(name: &str, value: Option<&str>) -> Result<bool, Refusal> {
    match value.unwrap_or("true") {
        "true" | "on" | "1" => Ok(true),
        "false" | "off" | "0" => Ok(false),
        _ => Err(Refusal::new("42601", format!("{name} requires a Boolean value"))),
    }
}

/// Whether a slot could be altered so, if it were logical (`AlterReplicationSlot`, `replication/walsender.c`, PostgreSQL 18).
fn check_alter(options: &Options) -> Result<(), Refusal> {
    for (at, (name, value)) in options.iter().enumerate() {
        if !["failover", "two_phase"].contains(&name.as_str()) {
            return Err(Refusal::new("XX000", format!("unrecognized option: {name}")));
        }
        if options[..at].iter().any(|(other, _)| other == name) {
            return Err(Refusal::new("42601", "conflicting or redundant options"));
        }
        boolean(name, value.as_deref())?;
    }
    Ok(())
}

/// There is no data directory.
fn no_backups() -> Refusal {
    let refusal = Refusal::new("0A000", "a base backup is not supported by a relay");
    refusal.hint("Take it from the primary, or from a standby.")
}

/// What is not served, with what to do instead.
fn unsupported(command: &ReplicationCommand) -> Refusal {
    match command {
        ReplicationCommand::Sql => {
            Refusal::new("0A000", "cannot execute SQL commands in WAL sender for physical replication")
        }
        _ => Refusal::new("0A000", "logical replication is not supported by a relay").hint("Connect to the primary."),
    }
}
