//! One session of streaming: from the connection into the spool, and reports back. What to report, and when, is
//! the business of [`crate::positions`]; this is the loop around it (`WalReceiverMain`, `replication/walreceiver.c`,
//! PostgreSQL 18).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::{Lsn, TimelineId};
use walrider_session::{Connection, CopyEvent, Read};
use walrider_spool::{Spool, SpoolError, Writer};
use walrider_wire::pulse::Link;

use crate::board::Board;
use crate::error::ReceiveError;
use crate::intake::Intake;
use crate::line::Line;

/// WAL that is taken from the connection before it is written and reported: small messages become one write, and there is a
/// bound to what is in memory.
const MAX_PENDING_BYTES: usize = 1 << 20;
/// How often to try again to write where the disk is full.
const FULL_INTERVAL: Duration = Duration::from_secs(1);

/// Why streaming ended, other than by an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// [`Board::end`].
    Asked,
    /// The primary left the timeline; which one follows, and where, if it said so.
    Timeline(Option<(TimelineId, Lsn)>),
}

/// A session that streams.
pub struct Streaming<'a> {
    writer: &'a mut Writer,
    board: &'a Board,
    intake: Intake,
    /// Where to end, if anywhere.
    until: Option<Lsn>,
    /// The connection may have something.
    readable: bool,
    /// Since when the disk is full.
    full_since: Option<Instant>,
}

impl<'a> Streaming<'a> {
    /// Streaming has begun, at the writer's position.
    pub fn new(writer: &'a mut Writer, board: &'a Board) -> Streaming<'a> {
        let intake = Intake::new(writer, false);
        board.set_received(intake.received());
        Streaming { writer, board, intake, until: None, readable: true, full_since: None }
    }

    /// The primary sends WAL before it has flushed it.
    pub fn early(mut self, early: bool) -> Streaming<'a> {
        self.intake = Intake::new(self.writer, early);
        self
    }

    /// Ends once WAL up to there is durable.
    pub fn until(mut self, until: Option<Lsn>) -> Streaming<'a> {
        self.until = until;
        self
    }

    /// Streams until the primary ends it, somebody asks for it, or it fails. All that was received is written then, unless
    /// writing failed. `primary_flushed` is what the primary has told before.
    ///
    /// # Errors
    /// The connection is lost or the primary silent, the spool fails, or what came makes no sense.
    pub fn run(
        mut self,
        connection: Connection,
        spool: &Arc<Spool>,
        primary_flushed: Lsn,
    ) -> Result<End, ReceiveError> {
        debug_assert_eq!(spool.held(), self.writer.held(), "they are of one spool");
        // A session before may have ended while it was.
        self.board.set_disk_full(false);
        let mut line = Box::new(Line::new(connection, spool, self.board.timing(), primary_flushed));
        let socket = line.socket()?;
        loop {
            if self.board.ends() {
                return Ok(End::Asked);
            }
            line.positions.set_timing(self.board.timing());
            let link = match self.full_since {
                None if self.readable => match self.receive(&mut line) {
                    Ok(Some(link)) => link,
                    Ok(None) => return self.finish(&mut line),
                    Err(error) => {
                        // What came before counts.
                        self.write(&mut line)?;
                        self.writer.announce();
                        return Err(error);
                    }
                },
                _ => Link::Quiet,
            };
            // In the order in which somebody waits: the flusher, the primary, replay.
            let was_full = self.full_since.is_some();
            self.write(&mut line)?;
            self.report(&mut line, link)?;
            self.writer.announce();
            if was_full && self.full_since.is_none() {
                // What had come before is in memory, and nothing else may come to tell of it.
                self.readable = true;
                continue;
            }
            if self.until.is_some_and(|until| self.writer.written() >= until) {
                line.spool.wait_flushed(self.writer.written())?;
                self.report(&mut line, Link::Quiet)?;
                return Ok(End::Asked);
            }
            if link == Link::Quiet {
                line = self.wait(line, &socket)?;
            }
        }
    }

    /// Takes what has come, up to a bound. `None`: the primary has ended the stream.
    fn receive(&mut self, line: &mut Line) -> Result<Option<Link>, ReceiveError> {
        let upto = Lsn(self.intake.received().0 + MAX_PENDING_BYTES as u64);
        loop {
            while let Some(event) = line.connection.next_message()? {
                let payload = match event {
                    CopyEvent::Data(payload) => payload,
                    CopyEvent::Done => return Ok(None),
                };
                let now = line.began.elapsed();
                let sent_at = self.intake.take(payload, &mut line.positions, self.writer, now)?;
                self.board.set_last_message(sent_at, TimestampTz::from(SystemTime::now()).0);
                if self.intake.received() >= upto {
                    return Ok(Some(Link::Busy));
                }
            }
            match line.connection.read_some()? {
                Read::Bytes(_) => {}
                Read::WouldBlock => return Ok(Some(Link::Quiet)),
                Read::Closed => return Err(ReceiveError::Closed),
            }
        }
    }

    /// Writes what has come. If the disk is full, it is kept, and nothing more is taken from the connection.
    fn write(&mut self, line: &mut Line) -> Result<(), ReceiveError> {
        self.board.set_received(self.intake.received());
        self.board.set_horizon(line.positions.horizon());
        match self.intake.write(&mut line.positions, self.writer) {
            Ok(()) => {}
            Err(error @ SpoolError::Full { .. }) => {
                if self.full_since.replace(Instant::now()).is_none() {
                    self.board.set_disk_full(true);
                    tracing::error!("{error}");
                }
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        if self.full_since.take().is_some() {
            self.board.set_disk_full(false);
            tracing::info!("there is space again: receiving goes on at {}", self.writer.held());
            // The primary was silent because nobody listened.
            line.positions.heard(Lsn::INVALID, false, line.began.elapsed());
        }
        Ok(())
    }

    /// Tells the primary what is new, unless it is lost.
    fn report(&self, line: &mut Line, link: Link) -> Result<(), ReceiveError> {
        self.board.report(line, link)?;
        if self.full_since.is_none() && line.positions.is_lost(line.began.elapsed()) {
            return Err(ReceiveError::Silent);
        }
        Ok(())
    }

    /// Waits until something comes, somebody has news, or it is time to speak. Meanwhile others speak for us.
    fn wait(&mut self, line: Box<Line>, socket: &OwnedFd) -> Result<Box<Line>, ReceiveError> {
        let deadline = line.positions.deadline().map(|deadline| deadline.saturating_sub(line.began.elapsed()));
        let timeout = match self.full_since {
            Some(_) => Some(deadline.map_or(FULL_INTERVAL, |deadline| deadline.min(FULL_INTERVAL))),
            None => deadline,
        };
        let timeout =
            timeout.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) });
        let mut wanted = if self.full_since.is_none() { PollFlags::IN } else { PollFlags::empty() };
        if line.connection.wants_write() {
            wanted |= PollFlags::OUT;
        }
        self.board.leave(line);
        let wake = self.board.wake_fd();
        let mut fds = [PollFd::new(socket, wanted), PollFd::new(&wake, PollFlags::IN)];
        let polled = poll(&mut fds, timeout.as_ref());
        let line = self.board.take();
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ReceiveError::Poll(error.into())),
        }
        self.readable = !fds[0].revents().is_empty();
        if fds[1].revents().contains(PollFlags::IN) {
            self.board.awake();
        }
        Ok(line)
    }

    /// The primary has nothing more on this timeline.
    fn finish(mut self, line: &mut Line) -> Result<End, ReceiveError> {
        self.write(line)?;
        self.writer.announce();
        if self.full_since.is_some() {
            // It is streamed again when there is space.
            return Err(ReceiveError::Full);
        }
        line.spool.wait_flushed(self.writer.written())?;
        self.report(line, Link::Quiet)?;
        Ok(End::Timeline(line.connection.end_copy()?))
    }
}
