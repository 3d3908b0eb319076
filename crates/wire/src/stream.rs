//! What travels inside CopyData while WAL is streamed ("Streaming Replication Protocol" in PostgreSQL's manual;
//! `walsender.c`, `walreceiver.c`). Times are microseconds since 2000-01-01, as `TimestampTz`.
//!
//! ```
//! use walrider_layout::Lsn;
//! use walrider_wire::stream::{FromStandby, StatusUpdate};
//! let status = StatusUpdate { write: Lsn(3), flush: Lsn(2), apply: Lsn(1), time: 0, reply_requested: false };
//! let mut bytes = Vec::new();
//! status.encode(&mut bytes);
//! assert_eq!(FromStandby::parse(&bytes), Ok(FromStandby::Status(status)));
//! ```

use walrider_layout::Lsn;

use crate::WireError;
use crate::reader::Reader;

/// Length in bytes of what precedes the WAL in an [`Streamed::XLogData`].
pub const XLOG_DATA_HEADER: usize = 1 + 8 + 8 + 8;

/// From the sender to the standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streamed<'a> {
    /// A piece of WAL (`'w'`).
    XLogData {
        /// Position of the first byte of `data`.
        start: Lsn,
        /// End of what the sender has to send; a stock sender's flush position.
        wal_end: Lsn,
        /// The sender's clock.
        send_time: i64,
        /// The WAL.
        data: &'a [u8],
    },
    /// Nothing but a sign of life (`'k'`).
    Keepalive {
        /// End of what the sender has to send.
        wal_end: Lsn,
        /// The sender's clock.
        send_time: i64,
        /// The sender wants a status update now.
        reply_requested: bool,
    },
}

impl<'a> Streamed<'a> {
    /// Reads the payload of a CopyData.
    pub fn parse(payload: &'a [u8]) -> Result<Streamed<'a>, WireError> {
        let (&kind, rest) = payload.split_first().ok_or(WireError::Malformed("replication"))?;
        match kind {
            b'w' => {
                let mut reader = Reader::new(rest, "XLogData");
                let start = Lsn(reader.u64()?);
                let (wal_end, send_time) = (Lsn(reader.u64()?), reader.i64()?);
                let data = reader.rest();
                start.0.checked_add(data.len() as u64).ok_or(reader.malformed())?;
                Ok(Streamed::XLogData { start, wal_end, send_time, data })
            }
            b'k' => {
                let mut reader = Reader::new(rest, "keepalive");
                let (wal_end, send_time) = (Lsn(reader.u64()?), reader.i64()?);
                let reply_requested = reader.u8()? != 0;
                reader.end()?;
                Ok(Streamed::Keepalive { wal_end, send_time, reply_requested })
            }
            other => Err(WireError::Unexpected(other)),
        }
    }

    /// Appends the payload of a CopyData.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Streamed::XLogData { start, wal_end, send_time, data } => {
                out.push(b'w');
                out.extend(start.0.to_be_bytes());
                out.extend(wal_end.0.to_be_bytes());
                out.extend(send_time.to_be_bytes());
                out.extend(data);
            }
            Streamed::Keepalive { wal_end, send_time, reply_requested } => {
                out.push(b'k');
                out.extend(wal_end.0.to_be_bytes());
                out.extend(send_time.to_be_bytes());
                out.push(reply_requested.into());
            }
        }
    }
}

/// How far the standby is (`'r'`). Positions are ends, exclusive; zero where there is nothing to tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusUpdate {
    /// Given to the operating system.
    pub write: Lsn,
    /// Durable.
    pub flush: Lsn,
    /// Replayed.
    pub apply: Lsn,
    /// Our clock.
    pub time: i64,
    /// We want a keepalive now.
    pub reply_requested: bool,
}

impl StatusUpdate {
    /// Appends the payload of a CopyData, 34 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(b'r');
        out.extend(self.write.0.to_be_bytes());
        out.extend(self.flush.0.to_be_bytes());
        out.extend(self.apply.0.to_be_bytes());
        out.extend(self.time.to_be_bytes());
        out.push(self.reply_requested.into());
    }
}

/// Which rows the standby's readers still need (`'h'`); transaction ids with their epoch, zero for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HotStandbyFeedback {
    /// Our clock.
    pub time: i64,
    /// Oldest transaction that readers may see, without slots' catalogs.
    pub xmin: u32,
    /// Its epoch.
    pub xmin_epoch: u32,
    /// The same for catalogs, held by slots.
    pub catalog_xmin: u32,
    /// Its epoch.
    pub catalog_xmin_epoch: u32,
}

impl HotStandbyFeedback {
    /// Appends the payload of a CopyData, 25 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(b'h');
        out.extend(self.time.to_be_bytes());
        for number in [self.xmin, self.xmin_epoch, self.catalog_xmin, self.catalog_xmin_epoch] {
            out.extend(number.to_be_bytes());
        }
    }
}

/// From a standby to the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromStandby {
    /// How far it is.
    Status(StatusUpdate),
    /// What its readers need.
    Feedback(HotStandbyFeedback),
}

impl FromStandby {
    /// Reads the payload of a CopyData.
    pub fn parse(payload: &[u8]) -> Result<FromStandby, WireError> {
        let (&kind, rest) = payload.split_first().ok_or(WireError::Malformed("standby"))?;
        let mut reader = Reader::new(rest, "standby");
        let message = match kind {
            b'r' => FromStandby::Status(StatusUpdate {
                write: Lsn(reader.u64()?),
                flush: Lsn(reader.u64()?),
                apply: Lsn(reader.u64()?),
                time: reader.i64()?,
                reply_requested: reader.u8()? != 0,
            }),
            b'h' => FromStandby::Feedback(HotStandbyFeedback {
                time: reader.i64()?,
                xmin: reader.u32()?,
                xmin_epoch: reader.u32()?,
                catalog_xmin: reader.u32()?,
                catalog_xmin_epoch: reader.u32()?,
            }),
            other => return Err(WireError::Unexpected(other)),
        };
        reader.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_read_what_they_write() {
        let messages = [
            Streamed::XLogData { start: Lsn(1 << 40), wal_end: Lsn(7), send_time: -5, data: b"wal" },
            Streamed::Keepalive { wal_end: Lsn(9), send_time: 11, reply_requested: true },
        ];
        for message in messages {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert_eq!(Streamed::parse(&bytes), Ok(message));
            for len in 0..bytes.len().min(XLOG_DATA_HEADER) {
                assert!(Streamed::parse(&bytes[..len]).is_err(), "{len} bytes of {message:?}");
            }
        }
        let feedback =
            HotStandbyFeedback { time: 1, xmin: 2, xmin_epoch: 3, catalog_xmin: 4, catalog_xmin_epoch: u32::MAX };
        let mut bytes = Vec::new();
        feedback.encode(&mut bytes);
        assert_eq!(FromStandby::parse(&bytes), Ok(FromStandby::Feedback(feedback)));
        bytes.push(0);
        assert_eq!(FromStandby::parse(&bytes), Err(WireError::Malformed("standby")));
    }

    #[test]
    fn wal_that_would_pass_the_last_position_is_refused() {
        let mut bytes = Vec::new();
        Streamed::XLogData { start: Lsn(u64::MAX), wal_end: Lsn(0), send_time: 0, data: b"x" }.encode(&mut bytes);
        assert_eq!(Streamed::parse(&bytes), Err(WireError::Malformed("XLogData")));
        assert_eq!(Streamed::parse(b"x"), Err(WireError::Unexpected(b'x')));
        assert!(Streamed::parse(b"").is_err());
    }
}
