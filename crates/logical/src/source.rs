//! The publisher's stream of one slot: a connection, its messages in order, and what it is told of our progress
//! (`LogicalRepApplyLoop`, `src/backend/replication/logical/worker.c`; `StartLogicalReplication`, `walsender.c`; PostgreSQL 18).
//!
//! A caller takes what has come with [`Source::next_event`], says how far it is with [`Source::confirm`], and waits with
//! [`Source::wait`]. To connect again after an error is the caller's.

mod error;
mod slot;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_layout::{Lsn, POSTGRES_EPOCH};
use walrider_session::{ConnectError, ConnectOptions, Connection, CopyEvent, Read, SlotOfDatabase};
use walrider_wire::pulse::Link;
use walrider_wire::stream::{StatusUpdate, Streamed};

use crate::message::{Decoder, Message, Protocol};
use crate::progress::Feedback;

pub use walrider_wire::pulse::Timing;

pub use crate::progress::Progress;
pub use error::SourceError;
pub use slot::{PLUGINS, SESSION_SETTINGS, confirmed, create_slot, drop_slot, identify};

/// Whether transactions are sent before they are committed (`streaming`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamingMode {
    /// No: the publisher keeps them until then.
    Off,
    /// Large ones, in chunks; protocol 2.
    On,
    /// Each change of each, at once (`debug_logical_replication_streaming`, 17).
    Immediate,
    /// The same, and aborts say where and when; protocol 4.
    Parallel,
}

/// What to ask the publisher for.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// The slot.
    pub slot: String,
    /// What was committed before is not wanted; zero: from where the slot was left. The slot's position counts if it is later.
    pub start: Lsn,
    /// Which cluster it must be, if that is known.
    pub system_identifier: Option<u64>,
    /// `proto_version`.
    pub protocol: Protocol,
    /// The names of the publications, at least one.
    pub publications: Vec<String>,
    /// `streaming`.
    pub streaming: StreamingMode,
    /// Values in binary form where the type has one.
    pub binary: bool,
    /// What `pg_logical_emit_message` writes, too.
    pub messages: bool,
    /// Also what came to the publisher from elsewhere (`origin = any`).
    pub any_origin: bool,
    /// When to speak.
    pub timing: Timing,
}

/// What the publisher has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A message of the plugin's.
    Message {
        /// The position that it belongs to: of a change, its record; of what ends a transaction, the end of that record.
        lsn: Lsn,
        /// The publisher's clock, microseconds since 2000-01-01 UTC.
        send_time: i64,
        /// The message.
        message: Message<'a>,
        /// The same as it came.
        body: &'a [u8],
    },
    /// Nothing but a sign of life.
    Keepalive {
        /// All that was committed before it was sent before.
        wal_end: Lsn,
        /// The publisher's clock, microseconds since 2000-01-01 UTC.
        send_time: i64,
    },
    /// The publisher has ended the stream, to shut down: all that was committed before, it has sent, and will not stop before
    /// that is confirmed. [`Source::finish`] is next.
    Done,
}

/// Why [`Source::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// The publisher may have sent something, or it was time to speak.
    Publisher,
    /// One of the caller's descriptors is readable.
    Caller,
    /// The caller's timeout is over.
    Timeout,
}

/// A session that streams.
pub struct Source {
    connection: Connection,
    decoder: Decoder,
    feedback: Feedback,
    slot: SlotOfDatabase,
    began: Instant,
    interrupt: Option<Arc<OwnedFd>>,
}

impl Source {
    /// Connects, checks the slot and the publications, and starts streaming. `options` are a connection to a database, as of
    /// [`ConnectOptions::resolve_for_database`]. `interrupt` ends any waiting as in [`ConnectOptions::interrupt_with`].
    ///
    /// # Errors
    /// No connection, or the slot is none that can be used here; says what to do about it.
    pub fn open(
        connect: &ConnectOptions,
        options: &SourceOptions,
        interrupt: Option<Arc<OwnedFd>>,
    ) -> Result<Source, SourceError> {
        let mut connect = connect.clone();
        connect.give_up_after(options.timing.timeout);
        if let Some(fd) = &interrupt {
            connect.interrupt_with(fd.clone());
        }
        let mut connection = slot::connect(&connect)?;
        if let Some(expected) = options.system_identifier {
            let found = connection.identify_system()?.system_identifier;
            if found != expected {
                return Err(SourceError::OtherSystem { expected, found });
            }
        }
        let slot = slot::check(&mut connection, &options.slot, connect.database(), options.protocol)?;
        slot::check_publications(&mut connection, &options.publications, connect.database())?;
        if options.streaming == StreamingMode::Immediate {
            connection.simple_query("SET debug_logical_replication_streaming = immediate")?;
        }
        let named = plugin_options(options, slot.two_phase);
        let named: Vec<(&str, &str)> = named.iter().map(|(name, value)| (*name, value.as_str())).collect();
        connection.start_logical_replication(&options.slot, options.start, &named)?;
        let decoder = Decoder::new(options.protocol);
        let feedback = Feedback::new(options.timing);
        Ok(Source { connection, decoder, feedback, slot, began: Instant::now(), interrupt })
    }

    /// The slot as it was before.
    pub fn slot(&self) -> &SlotOfDatabase {
        &self.slot
    }

    /// The connection, to ask what it is.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The server's notices since the last call; they belong into a log.
    pub fn take_notices(&mut self) -> Vec<walrider_wire::backend::ServerMessage> {
        self.connection.take_notices()
    }

    /// What has come next; `None`: nothing more now. Does not wait.
    ///
    /// # Errors
    /// The connection is lost, or what came makes no sense.
    pub fn next_event(&mut self) -> Result<Option<Event<'_>>, SourceError> {
        if !self.receive()? {
            return Ok(None);
        }
        let Some(event) = self.connection.next_message()? else { return Ok(None) };
        let payload = match event {
            CopyEvent::Data(payload) => payload,
            CopyEvent::Done => return Ok(Some(Event::Done)),
        };
        match Streamed::parse(payload)? {
            Streamed::XLogData { start, send_time, data, .. } => {
                let message = self.decoder.decode(data)?;
                Ok(Some(Event::Message { lsn: start, send_time, message, body: data }))
            }
            Streamed::Keepalive { wal_end, send_time, reply_requested } => {
                self.feedback.heard(reply_requested, self.began.elapsed());
                Ok(Some(Event::Keepalive { wal_end, send_time }))
            }
        }
    }

    /// Sees to it that a whole message is there; false: none is now.
    fn receive(&mut self) -> Result<bool, SourceError> {
        while !self.connection.has_message()? {
            self.speak(Link::Busy)?;
            match self.connection.read_some()? {
                Read::Bytes(_) => self.feedback.heard(false, self.began.elapsed()),
                Read::WouldBlock => return Ok(false),
                Read::Closed => return Err(SourceError::Closed),
            }
        }
        Ok(true)
    }

    /// Whether a transaction, or a chunk of one, has begun and not ended: a position of a [`Event::Keepalive`] covers none of it.
    pub fn is_inside(&self) -> bool {
        self.decoder.is_inside()
    }

    /// We are that far. The publisher is told when it is waited for next, or before long.
    pub fn confirm(&mut self, progress: Progress) {
        self.feedback.confirm(progress);
    }

    /// What the publisher was told last.
    pub fn told(&self) -> Progress {
        self.feedback.told()
    }

    /// Tells the publisher what is due: for a caller who is kept from waiting here for seconds.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn tend(&mut self) -> Result<(), SourceError> {
        self.speak(Link::Busy)
    }

    fn speak(&mut self, link: Link) -> Result<(), SourceError> {
        if let Some((progress, reply_requested)) = self.feedback.report(link, self.began.elapsed()) {
            let Progress { written, flushed, applied } = progress;
            let status = StatusUpdate { write: written, flush: flushed, apply: applied, time: now(), reply_requested };
            let mut payload = Vec::with_capacity(34);
            status.encode(&mut payload);
            // One that was not taken tells less than the next.
            let _ = self.connection.send_copy_data(&payload);
        }
        if self.connection.wants_write() {
            self.connection.flush()?;
        }
        Ok(())
    }

    /// Tells the publisher what is new, and waits until it may have sent something, one of `others` is readable, or `timeout` is
    /// over. To be called when [`Source::next_event`] has nothing more.
    ///
    /// # Errors
    /// The connection is lost, the publisher silent for too long, or [`ConnectError::Interrupted`].
    pub fn wait(&mut self, others: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Woken, SourceError> {
        self.speak(Link::Quiet)?;
        let now = self.began.elapsed();
        if self.feedback.is_lost(now) {
            return Err(SourceError::Silent);
        }
        let pulse = self.feedback.deadline().map(|deadline| deadline.saturating_sub(now));
        let left = [pulse, timeout].into_iter().flatten().min();
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.connection.wants_write());
        let mut fds = vec![PollFd::new(&self.connection, wanted)];
        fds.extend(
            others
                .iter()
                .chain(&self.interrupt.as_ref().map(|fd| std::os::fd::AsFd::as_fd(fd)))
                .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)),
        );
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(SourceError::Poll(error.into())),
        }
        let readable = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if fds[1 + others.len()..].iter().any(readable) {
            return Err(ConnectError::Interrupted.into());
        }
        if fds[1..1 + others.len()].iter().any(readable) {
            return Ok(Woken::Caller);
        }
        let over = timeout.is_some_and(|timeout| self.began.elapsed() - now >= timeout);
        Ok(if over && !readable(&fds[0]) { Woken::Timeout } else { Woken::Publisher })
    }

    /// Ends the stream: tells what was confirmed, has the server end it, and waits for that. What is under way is thrown away; it
    /// comes again.
    ///
    /// # Errors
    /// The connection is lost: what was confirmed last may not have arrived.
    pub fn finish(mut self) -> Result<(), SourceError> {
        self.feedback.heard(true, self.began.elapsed());
        self.speak(Link::Quiet)?;
        self.connection.ignore_interrupts();
        self.connection.set_response_timeout(Some(Duration::from_secs(10)));
        match self.connection.end_copy() {
            // A server that shuts down closes it.
            Ok(_) | Err(ConnectError::Closed) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Our clock, as `TimestampTz`.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + POSTGRES_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// The options of `pgoutput` (`parse_output_parameters`, `pgoutput.c`). `two_phase` is the slot's: one that has it sends prepared
/// transactions whether they are asked for or not (`CreateDecodingContext`, `logical.c`), and asking for it would change the slot.
fn plugin_options(options: &SourceOptions, two_phase: bool) -> Vec<(&'static str, String)> {
    let names: Vec<String> =
        options.publications.iter().map(|name| walrider_wire::command::quote_identifier(name)).collect();
    let mut named = vec![("proto_version", options.protocol.to_string()), ("publication_names", names.join(","))];
    match options.streaming {
        StreamingMode::Off => {}
        StreamingMode::On | StreamingMode::Immediate => named.push(("streaming", "on".to_owned())),
        StreamingMode::Parallel => named.push(("streaming", "parallel".to_owned())),
    }
    let flags = [("two_phase", two_phase), ("binary", options.binary), ("messages", options.messages)];
    named.extend(flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| (name, "on".to_owned())));
    if !options.any_origin {
        named.push(("origin", "none".to_owned()));
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_named_as_pgoutput_does() {
        let mut options = SourceOptions {
            slot: "s".into(),
            start: Lsn(0),
            system_identifier: None,
            protocol: Protocol::V1,
            publications: vec!["a".into(), "B\"'".into()],
            streaming: StreamingMode::Off,
            binary: false,
            messages: false,
            any_origin: true,
            timing: Timing { status_interval: Duration::ZERO, timeout: Duration::ZERO },
        };
        let text = |options: &SourceOptions, two_phase| {
            let named = plugin_options(options, two_phase);
            named.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        let names = r#"publication_names="a","B""'""#;
        assert_eq!(text(&options, false), format!("proto_version=1 {names}"));
        options.protocol = Protocol::V4;
        options.streaming = StreamingMode::Parallel;
        (options.binary, options.messages, options.any_origin) = (true, true, false);
        let rest = "streaming=parallel two_phase=on binary=on messages=on origin=none";
        assert_eq!(text(&options, true), format!("proto_version=4 {names} {rest}"));
    }
}
