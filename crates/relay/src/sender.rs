//! WAL to one downstream, as long as it wants it (`WalSndLoop`, `XLogSendPhysical`; `replication/walsender.c`, PostgreSQL 18).

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::{Lsn, TimelineId};
use walrider_wire::pulse::{Pulse, Timing};
use walrider_wire::server::{self, FromClient};
use walrider_wire::stream::{FromStandby, StatusUpdate, Streamed, XLOG_DATA_HEADER};

use crate::link::{Link, LinkError};
use crate::origin::{Left, Origin};
use crate::refusal::{Refusal, Stopped};
use crate::service::Service;

/// The longest piece of WAL in one message, in bytes. A walsender's is an eighth of it (`MAX_SEND_SIZE`); to send this much at a time takes
/// less of the processor, and a standby that is behind has time.
const MAX_PIECE: u64 = 1 << 20;

/// One stream.
pub(crate) struct Sender<'a> {
    pub service: &'a Service,
    pub origin: &'a Origin,
    pub link: &'a mut Link,
    pub number: u64,
    pub wake: &'a OwnedFd,
    pub slot: Option<String>,
    pub timeline: TimelineId,
    /// End of what was sent.
    pub sent: Lsn,
    /// The timeline has ended.
    pub left: Option<Left>,
}

/// What is open of the segments.
struct Open {
    segment: u64,
    file: Arc<File>,
    /// It has the timeline that is sent up to there.
    upto: Lsn,
}

impl Sender<'_> {
    /// Until the downstream ends it, or the timeline has: the one that follows is returned then.
    pub fn run(mut self) -> Result<Option<Left>, Stopped> {
        let began = Instant::now();
        let timing = Timing { status_interval: Duration::ZERO, timeout: self.service.settings.sender_timeout };
        let mut pulse = Pulse::begin(began.elapsed());
        let (mut ended, mut has_ended) = (false, false);
        let mut open = None;
        loop {
            // Before the look at what there is: who comes later wakes us.
            let _ = rustix::io::read(self.wake, &mut [0; 8]);
            if self.service.is_stopping() {
                let message = "terminating connection due to administrator command";
                return Err(Refusal::new("57P01", message).fatal().into());
            }
            let heard = self.link.fill()?;
            if heard {
                pulse.heard(false, began.elapsed());
            }
            has_ended |= self.listen(&mut pulse, began)?;
            let end = self.end()?;
            // A piece at a time: a standby that takes them faster than we read them is heard in between.
            if self.link.flush()? && !ended && !has_ended && self.sent < end {
                self.send_piece(end, &mut open)?;
            }
            let at_end = self.left.is_some_and(|(at, _)| self.sent >= at);
            if !ended && (has_ended || at_end) {
                self.link.queue(server::copy_done);
                ended = true;
            }
            let sent_all = self.link.flush()?;
            if ended && has_ended {
                return Ok(self.left);
            }
            let now = began.elapsed();
            if pulse.is_lost(timing, now) {
                return Err(LinkError::Timeout.into());
            }
            if pulse.is_ping_due(timing, now) {
                // The end of the stream asks for an answer, too.
                if !ended {
                    self.keep_alive(true);
                }
                pulse.told(true, now);
                continue;
            }
            if heard || (sent_all && !ended && self.sent < end) {
                continue;
            }
            let deadline = pulse.deadline(timing).map(|deadline| deadline.saturating_sub(began.elapsed()));
            self.link.wait(self.wake.as_fd(), deadline)?;
        }
    }

    /// Takes what the downstream has said; whether it has ended the stream.
    fn listen(&mut self, pulse: &mut Pulse, began: Instant) -> Result<bool, Stopped> {
        let mut has_ended = false;
        let mut asked = false;
        // What follows the end of the stream is another command's.
        while !has_ended && let Some((tag, body)) = self.link.message()? {
            match FromClient::parse(tag, body)? {
                FromClient::CopyData(payload) => match FromStandby::parse(payload)? {
                    FromStandby::Status(status) => {
                        // Of what it was not sent, it cannot have anything of ours: it may be on a timeline of its own.
                        let sent = |lsn: Lsn| lsn.min(self.sent);
                        let (write, flush, apply) = (sent(status.write), sent(status.flush), sent(status.apply));
                        let told = StatusUpdate { write, flush, apply, ..status };
                        self.service.downstreams.tells(self.number, |downstream| downstream.told = told);
                        if let Some(slot) = self.slot.as_ref().filter(|_| flush.is_valid()) {
                            self.service.slots.confirm(slot, flush);
                        }
                        asked |= status.reply_requested;
                    }
                    FromStandby::Feedback(feedback) => {
                        let feedback = Some(feedback).filter(|said| said.xmin != 0 || said.catalog_xmin != 0);
                        self.service.downstreams.tells(self.number, |downstream| downstream.feedback = feedback);
                    }
                },
                FromClient::CopyDone => has_ended = true,
                FromClient::Terminate => return Err(LinkError::Closed.into()),
                _ => {
                    let message = format!("invalid standby message type \"{}\"", tag as char);
                    return Err(Refusal::new("08P01", message).fatal().into());
                }
            }
        }
        // One that asks and does not read has WAL to read first.
        if asked && !self.link.is_pending() {
            self.keep_alive(false);
            pulse.told(false, began.elapsed());
        }
        Ok(has_ended)
    }

    /// The end of what may be sent now.
    fn end(&mut self) -> Result<Lsn, Stopped> {
        let (newest, end) = self.origin.end();
        if self.left.is_none() && newest != self.timeline {
            let history = self.origin.history(newest)?;
            self.left = Some(left_at(&history, self.timeline).ok_or_else(|| not_in_history(self.timeline))?);
        }
        // Of a timeline that was left as much as is known to be here: the newest passes where it was left once all of that is.
        Ok(self.left.map_or(end, |(at, _)| at.min(end)))
    }

    /// Queues a message with WAL up to `end`, to the end of a segment at most.
    fn send_piece(&mut self, end: Lsn, open: &mut Option<Open>) -> Result<(), Stopped> {
        let size = self.origin.segment_size();
        let segment = size.segment_of(self.sent);
        let (mut file, upto) = match open {
            Some(open) if open.segment == segment && self.sent < open.upto => (open.file.clone(), open.upto),
            _ => {
                let (file, upto) = self.origin.open_segment(self.sent, self.timeline, self.left)?;
                (Arc::new(file), upto)
            }
        };
        let offset = size.offset_of(self.sent);
        let len = (end.min(upto).0 - self.sent.0).min(MAX_PIECE);
        let header = Streamed::XLogData { start: self.sent, wal_end: end, send_time: now(), data: &[] };
        // A file that may be written again is read, and looked at, before any of it is sent (`CheckXLogRemoved`).
        let read = match self.origin.recycles() {
            true => Some(self.read_piece(&mut file, offset, len)?),
            false => None,
        };
        *open = Some(Open { segment, file: file.clone(), upto });
        self.link.queue(|out| {
            out.extend(server::copy_data_header(XLOG_DATA_HEADER + len as usize));
            header.encode(out);
            out.extend(read.as_deref().unwrap_or_default());
        });
        if read.is_none() {
            self.link.queue_file(file, offset, len);
        }
        self.sent = Lsn(self.sent.0 + len);
        self.service.downstreams.change(self.number, |downstream| downstream.sent = self.sent);
        Ok(())
    }

    /// Reads a piece of a segment, which was not renamed before that was done. One from an archive may have taken its place: then that
    /// is read (`WalSndRqstFileReload`).
    fn read_piece(&self, file: &mut Arc<File>, offset: u64, len: u64) -> Result<Vec<u8>, Stopped> {
        let mut piece = vec![0; len as usize];
        loop {
            file.read_exact_at(&mut piece, offset).map_err(LinkError::Io)?;
            let (now, _) = self.origin.open_segment(self.sent, self.timeline, self.left)?;
            let inode = |file: &File| file.metadata().map(|found| (found.dev(), found.ino())).map_err(LinkError::Io);
            if inode(file)? == inode(&now)? {
                return Ok(piece);
            }
            *file = Arc::new(now);
        }
    }

    fn keep_alive(&mut self, reply_requested: bool) {
        let keepalive = Streamed::Keepalive { wal_end: self.sent, send_time: now(), reply_requested };
        let mut payload = Vec::new();
        keepalive.encode(&mut payload);
        self.link.queue(|out| server::copy_data(out, &payload));
    }
}

/// Where a timeline was left on the way to another, and for which.
pub(crate) fn left_at(history: &walrider_layout::history::TimelineHistory, timeline: TimelineId) -> Option<Left> {
    let at = history.switch_point(timeline)?;
    Some((at, history.timeline_at(at)))
}

/// Nothing leads from there to here.
pub(crate) fn not_in_history(timeline: TimelineId) -> Refusal {
    Refusal::new("XX000", format!("requested timeline {timeline} is not in this server's history"))
}

/// Our clock, as `TimestampTz`.
fn now() -> i64 {
    TimestampTz::from(SystemTime::now()).0
}
