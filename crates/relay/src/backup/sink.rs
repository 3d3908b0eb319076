//! Messages of a backup to its client, no faster than it wants them, and none kept in memory for it (`backup/basebackup_copy.c`,
//! `backup/basebackup_throttle.c`, PostgreSQL 18).

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use walrider_wire::backend::ServerMessage;
use walrider_wire::server;

use crate::link::{Link, wait_readable};
use crate::refusal::{Refusal, Stopped};
use crate::service::Service;

/// Bytes that are sent as one message, so that small files do not make small messages.
const PIECE: usize = 64 << 10;
/// How often the client hears how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Where a backup goes.
pub(super) struct Sink<'a> {
    service: &'a Service,
    link: &'a mut Link,
    wake: &'a OwnedFd,
    /// In bytes a second.
    rate: Option<u64>,
    /// Nothing is sent before.
    next_at: Instant,
    /// Of the archive, and not sent yet.
    piece: Vec<u8>,
    /// Bytes of archives that were sent.
    done: u64,
    told_at: Instant,
}

impl<'a> Sink<'a> {
    pub fn new(service: &'a Service, link: &'a mut Link, wake: &'a OwnedFd, rate: Option<u64>) -> Sink<'a> {
        let now = Instant::now();
        Sink { service, link, wake, rate, next_at: now, piece: Vec::new(), done: 0, told_at: now }
    }

    /// Whether the service goes on.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.service.is_stopping() {
            let message = "terminating connection due to administrator command";
            return Err(Refusal::new("57P01", message).fatal().into());
        }
        Ok(())
    }

    /// Sends what `write` appends; returns when nothing is left to be sent.
    pub fn send(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Stopped> {
        self.link.queue(write);
        loop {
            // Before the look at the flag: who sets it wakes us then.
            self.forget_wake();
            self.check()?;
            if self.link.flush()? {
                return Ok(());
            }
            self.link.wait_to_send(self.wake.as_fd())?;
        }
    }

    fn forget_wake(&self) {
        let _ = rustix::io::read(self.wake, &mut [0; 8]);
    }

    /// Something to know, beside the archive.
    pub fn notice(&mut self, severity: &str, code: &str, message: String) -> Result<(), Stopped> {
        let notice =
            ServerMessage { severity: severity.into(), code: code.into(), message, ..ServerMessage::default() };
        self.send(|out| server::notice_response(out, &notice))
    }

    /// A message of the backup's: its kind, and what it has.
    fn message(&mut self, kind: u8, payload: &[u8]) -> Result<(), Stopped> {
        self.send(|out| {
            out.extend(server::copy_data_header(1 + payload.len()));
            out.push(kind);
            out.extend(payload);
        })
    }

    /// The archive of this name begins, of the tablespace at this place; that of the data directory has none.
    pub fn begin_archive(&mut self, name: &str, location: &[u8]) -> Result<(), Stopped> {
        self.message(b'n', &[name.as_bytes(), b"\0", location, b"\0"].concat())
    }

    /// More of the archive.
    pub fn data(&mut self, bytes: &[u8]) -> Result<(), Stopped> {
        for part in bytes.chunks(PIECE) {
            if self.piece.len() + part.len() > PIECE {
                self.send_piece()?;
            }
            self.piece.extend_from_slice(part);
        }
        Ok(())
    }

    /// More zeros of the archive.
    pub fn zeros(&mut self, mut len: u64) -> Result<(), Stopped> {
        const ZEROS: [u8; 8192] = [0; 8192];
        while len > 0 {
            let part = len.min(ZEROS.len() as u64);
            self.data(&ZEROS[..part as usize])?;
            len -= part;
        }
        Ok(())
    }

    fn send_piece(&mut self) -> Result<(), Stopped> {
        let piece = std::mem::take(&mut self.piece);
        self.hold_back(piece.len())?;
        self.message(b'd', &piece)?;
        self.done += piece.len() as u64;
        self.piece = piece;
        self.piece.clear();
        let now = Instant::now();
        if now - self.told_at >= PROGRESS_INTERVAL {
            self.tell_progress()?;
        }
        Ok(())
    }

    /// Waits until so many bytes may be sent.
    fn hold_back(&mut self, len: usize) -> Result<(), Stopped> {
        let Some(rate) = self.rate else { return Ok(()) };
        loop {
            self.forget_wake();
            self.check()?;
            let left = self.next_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait_readable(self.wake.as_fd(), left)?;
        }
        // What was not used in time is not made up for.
        self.next_at = Instant::now() + Duration::from_secs_f64(len as f64 / rate as f64);
        Ok(())
    }

    fn tell_progress(&mut self) -> Result<(), Stopped> {
        self.told_at = Instant::now();
        self.message(b'p', &self.done.to_be_bytes())
    }

    /// The archive has ended.
    pub fn end_archive(&mut self) -> Result<(), Stopped> {
        if !self.piece.is_empty() {
            self.send_piece()?;
        }
        self.tell_progress()
    }

    /// The manifest follows.
    pub fn begin_manifest(&mut self) -> Result<(), Stopped> {
        self.message(b'm', &[])
    }

    /// More of it.
    pub fn manifest(&mut self, bytes: &[u8]) -> Result<(), Stopped> {
        self.hold_back(bytes.len())?;
        self.message(b'd', bytes)
    }

    /// Waits a little, for something that nobody wakes us for.
    pub fn pause(&mut self, time: Duration) -> Result<(), Stopped> {
        self.forget_wake();
        self.check()?;
        wait_readable(self.wake.as_fd(), time)?;
        Ok(())
    }
}
