//! The line to the primary: the connection, and what was told over it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::Lsn;
use walrider_session::Connection;
use walrider_spool::Spool;
use walrider_wire::pulse::Timing;
use walrider_wire::stream::{HotStandbyFeedback, StatusUpdate};

use crate::error::ReceiveError;
use crate::positions::{Positions, Report};

/// So long after connecting, nobody counts as needing nothing.
const GRACE: Duration = Duration::from_secs(10);

/// One session's. The receiver has it while it is awake, and leaves it on the board while it sleeps: who has news for the
/// primary then tells it.
pub(crate) struct Line {
    pub connection: Connection,
    pub positions: Positions,
    pub spool: Arc<Spool>,
    pub began: Instant,
    /// What queries need, as it was told last on this connection; the slot may have more of an earlier one.
    fed_back: Option<Option<HotStandbyFeedback>>,
}

impl Line {
    /// Streaming has begun on the connection at the spool's position; `primary_flushed` is what the primary has told before.
    pub fn new(connection: Connection, spool: &Arc<Spool>, timing: Timing, primary_flushed: Lsn) -> Line {
        let mut positions = Positions::new(timing);
        positions.connect(spool.held(), primary_flushed, Duration::ZERO);
        Line { connection, positions, spool: spool.clone(), began: Instant::now(), fed_back: None }
    }

    /// A descriptor of the connection's own, to wait for it.
    pub fn socket(&self) -> Result<OwnedFd, ReceiveError> {
        rustix::io::dup(&self.connection).map_err(|error| ReceiveError::Poll(error.into()))
    }

    /// Says it. What the connection does not take now waits for its flush.
    pub fn send(&mut self, report: &Report) {
        let &Report { write, flush, apply, reply_requested } = report;
        let time = TimestampTz::from(SystemTime::now()).0;
        let mut payload = Vec::with_capacity(34);
        StatusUpdate { write, flush, apply, time, reply_requested }.encode(&mut payload);
        // One that was not taken tells less than the next.
        let _ = self.connection.send_copy_data(&payload);
    }

    /// Says what queries need, if that is news (`XLogWalRcvSendHSFeedback`, `walreceiver.c`). Where nobody needs anything any more, that is
    /// said, too; and where nobody did so far, after a while: those who do may be about to connect.
    pub fn feed_back(&mut self, feedback: Option<HotStandbyFeedback>) {
        let needs = |said: Option<HotStandbyFeedback>| said.map(|said| HotStandbyFeedback { time: 0, ..said });
        let is_known = self.fed_back.is_some_and(|told| needs(told) == needs(feedback));
        if is_known || (feedback.is_none() && self.fed_back.is_none() && self.began.elapsed() < GRACE) {
            return;
        }
        let time = TimestampTz::from(SystemTime::now()).0;
        let none = HotStandbyFeedback { time, xmin: 0, xmin_epoch: 0, catalog_xmin: 0, catalog_xmin_epoch: 0 };
        let mut payload = Vec::with_capacity(25);
        feedback.map_or(none, |said| HotStandbyFeedback { time, ..said }).encode(&mut payload);
        // Only what was taken is known.
        if self.connection.send_copy_data(&payload) {
            self.fed_back = Some(feedback);
        }
    }
}
