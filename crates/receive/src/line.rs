//! The line to the primary: the connection, and what was told over it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::Lsn;
use walrider_spool::Spool;
use walrider_wire::stream::StatusUpdate;

use crate::board::Board;
use crate::connect::Connection;
use crate::error::ReceiveError;
use crate::positions::{Link, Positions, Report};

/// One session's. The receiver has it while it is awake, and leaves it on the [`Board`] while it sleeps: whoever has news for
/// the primary then tells them himself.
pub struct Line {
    pub(crate) connection: Connection,
    pub(crate) positions: Positions,
    pub(crate) spool: Arc<Spool>,
    pub(crate) began: Instant,
}

impl Line {
    /// Streaming has begun on the connection at the spool's position; `primary_flushed` is what the primary has told before.
    pub fn new(connection: Connection, spool: &Arc<Spool>, board: &Board, primary_flushed: Lsn) -> Line {
        let mut positions = Positions::new(board.timing());
        positions.connect(spool.held(), primary_flushed, Duration::ZERO);
        Line { connection, positions, spool: spool.clone(), began: Instant::now() }
    }

    /// A descriptor of the connection's own, to wait for it.
    pub(crate) fn socket(&self) -> Result<OwnedFd, ReceiveError> {
        rustix::io::dup(&self.connection).map_err(|error| ReceiveError::Poll(error.into()))
    }

    /// Tells the primary what is new; whether the connection took all of it.
    ///
    /// # Errors
    /// The connection is lost, or the spool has failed. Both stay so.
    pub(crate) fn report(&mut self, board: &Board, link: Link) -> Result<bool, ReceiveError> {
        self.spool.check()?;
        self.positions.holds_durably(self.spool.held_durable().min(self.positions.held()));
        let (applied, commits) = board.take_applied();
        self.positions.applied(applied, commits);
        if let Some(report) = self.positions.report(link, self.began.elapsed()) {
            self.send(&report);
            board.set_reported(report.apply);
        }
        Ok(self.connection.flush()?)
    }

    fn send(&mut self, report: &Report) {
        let &Report { write, flush, apply, reply_requested } = report;
        let time = TimestampTz::from(SystemTime::now()).0;
        let mut payload = Vec::with_capacity(34);
        StatusUpdate { write, flush, apply, time, reply_requested }.encode(&mut payload);
        // One that was not taken tells less than the next.
        let _ = self.connection.send_copy_data(&payload);
    }
}
