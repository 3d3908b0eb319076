//! A slot's stream into a sink, over as many connections as it takes: what was complete is confirmed when the sink has it, and not
//! before.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_layout::Lsn;
use walrider_session::{ConnectError, ConnectOptions};

use crate::journal::JournalError;
use crate::json::JsonError;
use crate::message::Message;
use crate::source::{Event, Progress, Source, SourceError, SourceOptions, Woken};

/// So many bytes of messages are taken before the sink passes them on, where they come without end.
const PASS_ON_BYTES: usize = 64 * 1024;
/// While they do, what was passed on is made durable this often.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// Where it comes little by little, not more often than this: an fsync may take longer than what it waits for.
const SYNC_PAUSE: Duration = Duration::from_millis(50);

/// Why streaming failed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The publisher, or the connection.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A change that does not fit its table.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// The file.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Another output.
    #[error("could not write: {0}")]
    Output(io::Error),
    /// Nobody reads the output any more.
    #[error("the output was closed")]
    OutputClosed,
}

impl StreamError {
    /// Whether another connection may do.
    fn heals(&self) -> bool {
        matches!(self, StreamError::Source(error) if !error.never_heals() && !is_interrupted(error))
    }
}

fn is_interrupted(error: &SourceError) -> bool {
    matches!(error, SourceError::Connect(ConnectError::Interrupted))
}

/// Where messages go.
pub trait Sink {
    /// A message that came with the position `lsn`, was sent at `send_time`, and has `len` bytes.
    ///
    /// # Errors
    /// It makes no sense.
    fn take(&mut self, lsn: Lsn, send_time: i64, message: &Message<'_>, len: usize) -> Result<(), StreamError>;

    /// Gives the operating system all that was taken. Where that takes long, `tend` is called every few seconds, and its error
    /// ends it.
    ///
    /// # Errors
    /// Writing fails.
    fn pass_on(&mut self, tend: &mut dyn FnMut() -> Result<(), StreamError>) -> Result<(), StreamError>;

    /// Makes that durable.
    ///
    /// # Errors
    /// It fails.
    fn sync(&mut self) -> Result<(), StreamError>;

    /// The connection has ended. What was begun and is not complete is void: it comes again.
    ///
    /// # Errors
    /// Saying so fails.
    fn disconnected(&mut self) -> Result<(), StreamError>;

    /// Time has passed; `seen`: all before it was received. When to be called again, if nothing else happens.
    fn tick(&mut self, seen: Lsn) -> Option<Duration>;

    /// A descriptor that becomes readable when nobody reads the output any more.
    fn closes(&self) -> Option<BorrowedFd<'_>>;
}

/// What to stream, and until when.
#[derive(Clone, Debug)]
pub struct Stream {
    /// How to connect to the slot's database.
    pub connect: ConnectOptions,
    /// What to ask for. `start` moves.
    pub options: SourceOptions,
    /// Connect again after so long when the connection is lost.
    pub reconnect: Option<Duration>,
    /// End when everything that was committed before is passed on and durable.
    pub end: Option<Lsn>,
    /// Tell the publisher what it need not send again.
    pub confirm: bool,
}

/// How far a session is. `flushed <= written <= seen`.
#[derive(Clone, Copy, Default)]
struct Positions {
    seen: Lsn,
    written: Lsn,
    flushed: Lsn,
}

impl Stream {
    /// Streams until `end`, `interrupt` is readable, or nobody reads the output. What was passed on is durable then, and confirmed.
    ///
    /// # Errors
    /// Another connection does not help, or is not wanted.
    pub fn run(mut self, sink: &mut dyn Sink, interrupt: &Arc<OwnedFd>) -> Result<(), StreamError> {
        let reconnect = self.reconnect;
        let ended = insist(reconnect, interrupt, || {
            let ended = self.session(sink, interrupt);
            match ended {
                Err(StreamError::OutputClosed) => return Ok(()),
                _ => sink.disconnected()?,
            }
            ended
        });
        ended.map(|_| ())
    }

    fn session(&mut self, sink: &mut dyn Sink, interrupt: &Arc<OwnedFd>) -> Result<(), StreamError> {
        let source = Source::open(&self.connect, &self.options, Some(interrupt.clone()))?;
        let (slot, peer) = (source.slot(), source.connection().peer());
        let start = slot.confirmed_flush.max(self.options.start);
        tracing::info!("streaming from {peer}, slot \"{}\", plugin {}, from {start}", self.options.slot, slot.plugin);
        let positions = Positions { seen: start, written: start, flushed: start };
        let mut session = Session {
            source,
            sink,
            interrupt,
            confirm: self.confirm,
            end: self.end,
            positions,
            synced_at: Instant::now(),
        };
        let ended = session.run();
        let positions = session.positions;
        // What was complete when it was passed on does not come again, confirmed or not.
        self.options.start = self.options.start.max(positions.written);
        match ended {
            Err(StreamError::Source(error)) if !is_interrupted(&error) => {
                // The server's reason, if it gave one, is in the error.
                let _ = session.settle();
                self.options.start = self.options.start.max(session.positions.written);
                Err(error.into())
            }
            Ok(()) | Err(StreamError::Source(_)) => session.finish(),
            Err(error) => Err(error),
        }
    }
}

/// Tries until it succeeds, after pauses of `reconnect`; `None`: `interrupt` came first.
///
/// # Errors
/// To try again does not help, or is not wanted.
pub fn insist<T>(
    reconnect: Option<Duration>,
    interrupt: &Arc<OwnedFd>,
    mut attempt: impl FnMut() -> Result<T, StreamError>,
) -> Result<Option<T>, StreamError> {
    loop {
        let error = match attempt() {
            Ok(done) => return Ok(Some(done)),
            Err(StreamError::Source(error)) if is_interrupted(&error) => return Ok(None),
            Err(error) => error,
        };
        let Some(pause) = reconnect.filter(|_| error.heals()) else { return Err(error) };
        tracing::error!("{error}; connecting again in {} s", pause.as_secs_f64());
        if pauses(interrupt, pause) {
            return Ok(None);
        }
    }
}

/// A connection that streams.
struct Session<'a> {
    source: Source,
    sink: &'a mut dyn Sink,
    interrupt: &'a Arc<OwnedFd>,
    confirm: bool,
    end: Option<Lsn>,
    positions: Positions,
    synced_at: Instant,
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), StreamError> {
        let mut taken = 0;
        loop {
            let inside = self.source.is_inside();
            match self.source.next_event()? {
                Some(Event::Message { lsn, send_time, message, body }) => {
                    if self.end.is_some_and(|end| message.is_past(lsn, end)) {
                        return Ok(());
                    }
                    self.sink.take(lsn, send_time, &message, body.len())?;
                    self.positions.seen = self.positions.seen.max(message.complete_at().unwrap_or_default());
                    taken += body.len();
                }
                Some(Event::Keepalive { wal_end, .. }) if !inside => {
                    self.positions.seen = self.positions.seen.max(wal_end);
                    if self.end.is_some_and(|end| wal_end >= end) {
                        return Ok(());
                    }
                }
                Some(Event::Keepalive { .. }) => {}
                Some(Event::Done) => {
                    self.settle()?;
                    return Err(SourceError::Closed.into());
                }
                None => {
                    taken = 0;
                    let next = self.rest()?;
                    self.wait(next)?;
                }
            }
            if taken >= PASS_ON_BYTES {
                taken = 0;
                self.pass_on()?;
                if self.synced_at.elapsed() >= SYNC_INTERVAL {
                    self.sync()?;
                }
                self.sink.tick(self.positions.seen);
                self.log_notices();
                if pauses(self.interrupt, Duration::ZERO) {
                    return Err(SourceError::from(ConnectError::Interrupted).into());
                }
            }
        }
    }

    fn wait(&mut self, next: Option<Duration>) -> Result<(), StreamError> {
        self.log_notices();
        let closes = self.sink.closes();
        match self.source.wait(closes.as_slice(), next)? {
            Woken::Caller => Err(StreamError::OutputClosed),
            Woken::Publisher | Woken::Timeout => Ok(()),
        }
    }

    fn log_notices(&mut self) {
        for notice in self.source.take_notices() {
            tracing::warn!("{notice}");
        }
    }

    fn pass_on(&mut self) -> Result<(), StreamError> {
        let (source, interrupt) = (&mut self.source, self.interrupt);
        self.sink.pass_on(&mut || match pauses(interrupt, Duration::ZERO) {
            true => Err(SourceError::from(ConnectError::Interrupted).into()),
            false => Ok(source.tend()?),
        })?;
        self.positions.written = self.positions.seen;
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StreamError> {
        self.sink.sync()?;
        self.synced_at = Instant::now();
        let Positions { seen, written, ref mut flushed } = self.positions;
        *flushed = written;
        assert!(written <= seen);
        if self.confirm {
            self.source.confirm(Progress { written, flushed: written, applied: written });
        }
        Ok(())
    }

    /// Nothing more is there now: passes on what was taken, and makes it durable if that was not done a moment ago. When to look
    /// again.
    fn rest(&mut self) -> Result<Option<Duration>, StreamError> {
        self.pass_on()?;
        let due = SYNC_PAUSE.saturating_sub(self.synced_at.elapsed());
        let next = self.sink.tick(self.positions.seen);
        if self.positions.flushed == self.positions.written {
            return Ok(next);
        }
        if due.is_zero() {
            self.sync()?;
            return Ok(next);
        }
        Ok(Some(next.map_or(due, |next| next.min(due))))
    }

    /// Passes on what was taken, makes it durable, and has it confirmed.
    fn settle(&mut self) -> Result<(), StreamError> {
        self.pass_on()?;
        self.sync()?;
        self.sink.tick(self.positions.seen);
        Ok(())
    }

    /// Ends it from our side.
    fn finish(mut self) -> Result<(), StreamError> {
        if let Err(error) = self.settle() {
            // Only what keeps us from ending is left out: the signal has come.
            return if matches!(&error, StreamError::Source(error) if is_interrupted(error)) {
                Ok(())
            } else {
                Err(error)
            };
        }
        if let Err(error) = self.source.finish() {
            tracing::warn!("could not end the stream cleanly, what was confirmed last may come again: {error}");
        }
        Ok(())
    }
}

/// Waits so long; whether `interrupt` came first.
fn pauses(interrupt: &Arc<OwnedFd>, pause: Duration) -> bool {
    let until = Instant::now() + pause;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::from_borrowed_fd(interrupt.as_fd(), PollFlags::IN)], left.as_ref()) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            // There is nothing to wait for.
            Err(_) => return true,
        }
    }
}
