//! The line to the primary: the connection, and what was told over it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_session::Connection;
use walrider_spool::Spool;
use walrider_wire::stream::StatusUpdate;

use crate::error::ReceiveError;
use crate::positions::{Positions, Report};

/// One session's. The receiver has it while it is awake, and leaves it on the board while it sleeps: who has news for the
/// primary then tells it.
pub struct Line {
    pub(crate) connection: Connection,
    pub(crate) positions: Positions,
    pub(crate) spool: Arc<Spool>,
    pub(crate) began: Instant,
}

impl Line {
    /// A descriptor of the connection's own, to wait for it.
    pub(crate) fn socket(&self) -> Result<OwnedFd, ReceiveError> {
        rustix::io::dup(&self.connection).map_err(|error| ReceiveError::Poll(error.into()))
    }

    /// Says it. What the connection does not take now waits for its flush.
    pub(crate) fn send(&mut self, report: &Report) {
        let &Report { write, flush, apply, reply_requested } = report;
        let time = TimestampTz::from(SystemTime::now()).0;
        let mut payload = Vec::with_capacity(34);
        StatusUpdate { write, flush, apply, time, reply_requested }.encode(&mut payload);
        // One that was not taken tells less than the next.
        let _ = self.connection.send_copy_data(&payload);
    }
}
