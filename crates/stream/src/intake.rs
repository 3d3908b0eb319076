//! What comes from the primary, on its way into the spool, message by message; without a connection and without a clock.

use std::time::Duration;

use walrider_layout::Lsn;
use walrider_layout::positions::WalPositions;
use walrider_spool::{SpoolError, Writer};
use walrider_wire::stream::Streamed;

use crate::error::ReceiveError;
use crate::positions::Positions;

/// A message with at least this much WAL is written as it is, without being copied together with others.
const LARGE_BYTES: usize = 64 << 10;
/// Most WAL past the primary's flush position that is held in memory, in bytes; its sender stays far below.
const MAX_AHEAD_BYTES: u64 = 256 << 20;

/// WAL that has come in one session, up to `received`; `held ≤ received` of the writer.
pub struct Intake {
    /// The primary sends WAL before it has flushed it.
    early: bool,
    /// Where the next byte from the primary belongs.
    received: Lsn,
    /// What came past what the writer holds, and is not written yet.
    pending: Vec<u8>,
}

impl Intake {
    /// A session begins at the writer's position. `early`: the primary sends WAL before it has flushed it.
    pub fn new(writer: &Writer, early: bool) -> Intake {
        Intake { early, received: writer.held(), pending: Vec::new() }
    }

    /// Up to where WAL has come.
    pub fn received(&self) -> Lsn {
        self.received
    }

    /// Takes a message; when it was sent, by the primary's clock.
    ///
    /// # Errors
    /// A message that makes no sense, WAL out of order or far past the horizon; trouble with the spool, other than a full disk.
    pub fn take(
        &mut self,
        payload: &[u8],
        positions: &mut Positions,
        writer: &mut Writer,
        now: Duration,
    ) -> Result<i64, ReceiveError> {
        let (start, wal_end, send_time, data) = match Streamed::parse(payload)? {
            Streamed::XLogData { start, wal_end, send_time, data } => (start, wal_end, send_time, data),
            Streamed::Keepalive { wal_end, send_time, reply_requested } => {
                positions.heard(wal_end, reply_requested, now);
                return Ok(send_time);
            }
        };
        if start != self.received {
            return Err(ReceiveError::OutOfOrder { expected: self.received, start });
        }
        self.received = Lsn(self.received.0 + data.len() as u64);
        positions.heard(if self.early { wal_end } else { wal_end.max(self.received) }, false, now);
        let horizon = positions.horizon();
        if self.received.0.saturating_sub(horizon.0) > MAX_AHEAD_BYTES {
            return Err(ReceiveError::TooFarAhead { received: self.received, horizon });
        }
        if !self.pending.is_empty() || data.len() < LARGE_BYTES {
            self.pending.extend_from_slice(data);
            return Ok(send_time);
        }
        match writer.write_ahead(start, data, horizon) {
            Ok(()) => {}
            Err(SpoolError::Full { .. }) => {
                let taken = (writer.held().0 - start.0) as usize;
                self.pending.extend_from_slice(&data[taken..]);
            }
            Err(error) => {
                // The rest of it is gone, and the session with it.
                self.received = writer.held();
                return Err(error.into());
            }
        }
        Ok(send_time)
    }

    /// Writes what has come. If the disk is full, what does not fit is kept, and comes with the next call.
    ///
    /// # Errors
    /// Trouble with the spool; [`SpoolError::Full`].
    pub fn write(&mut self, positions: &mut Positions, writer: &mut Writer) -> Result<(), SpoolError> {
        let (start, horizon) = (writer.held(), positions.horizon());
        // What came before may be visible now.
        let moves = writer.written() < horizon.min(start);
        let written = match self.pending.is_empty() && !moves {
            true => Ok(()),
            false => writer.write_ahead(start, &self.pending, horizon),
        };
        self.pending.drain(..(writer.held().0 - start.0) as usize);
        positions.holds(writer.held());
        written?;
        let (held, written) = (writer.held(), writer.written());
        debug_assert!(self.pending.is_empty() && held == self.received);
        WalPositions { received: self.received, held, written, ..WalPositions::default() }.check();
        Ok(())
    }
}
