//! Bringing global state to disk, and back.

use walrider_datadir::origins as origins_file;
use walrider_layout::xid::{FIRST_NORMAL_XID, precedes};
use walrider_layout::{Major, TransactionId};

use super::origins::Origins;
use super::pages::Pages;
use super::{DIRTY_PAGES, GlobalError, Globals, Prepared, PreparedState, SeenCheckpoint, decoding};

impl Globals {
    /// Reads origins and prepared transactions (`StartupReplicationOrigin`, `restoreTwoPhaseData`).
    pub(super) fn restore_files(&mut self, major: Major) -> Result<(), GlobalError> {
        self.origins = Origins::start(origins_file::read(&self.root)?);
        for file in self.twophase_files.list()? {
            let xid = file as TransactionId;
            // One at or past the checkpoint's next id has its PREPARE still to come. Special ids count as ended
            // (`TransactionLogFetch`).
            let too_new = !precedes(xid, self.next_xid.xid());
            if too_new || xid < FIRST_NORMAL_XID || self.xid_status(xid)?.is_some() {
                self.prepared.discard_file(file);
            } else {
                let state = self.twophase_files.read(file)?;
                let (gid, newest) = super::xact::prepared_gid(major, &state)?;
                self.prepared.restore(file, gid, newest);
            }
        }
        Ok(())
    }

    /// Whether so many pages have changed that some may soon be written to make room for others: then `minRecoveryPoint`
    /// should be moved to the end of the last record, durably, and [`Globals::flush`] be called.
    pub fn wants_flush(&self) -> bool {
        self.slrus().iter().any(|pages| pages.dirty_pages() > DIRTY_PAGES)
    }

    /// Writes all changes to the SLRUs; not and removes nothing.
    ///
    /// # Errors
    /// A file that cannot be written. Replay must end.
    pub fn flush(&mut self) -> Result<(), GlobalError> {
        for pages in self.slrus_mut() {
            pages.flush()?;
        }
        Ok(())
    }

    /// Makes global state durable for a restartpoint at a new checkpoint record (`CheckPointGuts`,
    /// `access/transam/xlog.c`): decoding's files, origins, SLRUs. `minRecoveryPoint` must be durably at or past the last
    /// record that was redone. The files of prepared transactions come last, after the relation pages:
    /// [`Globals::checkpoint_prepared`].
    ///
    /// # Errors
    /// A file that cannot be written. Replay must end, and begin at the last restartpoint.
    pub fn checkpoint(&mut self, _checkpoint: &SeenCheckpoint) -> Result<(), GlobalError> {
        decoding::checkpoint(&self.root)?;
        self.origins.checkpoint(|states| origins_file::write(&self.root, states.iter().copied()))?;
        for pages in self.slrus_mut() {
            pages.sync()?;
        }
        Ok(())
    }

    /// Removes the files of prepared transactions that have ended; at the beginning also those whose PREPARE is still to come
    /// (`restoreTwoPhaseData`).
    ///
    /// # Errors
    /// A file that cannot be removed. Replay must end, and begin at the last restartpoint.
    pub fn remove_stale_files(&mut self) -> Result<(), GlobalError> {
        for file in self.prepared.take_stale_files() {
            self.twophase_files.remove(file)?;
        }
        Ok(())
    }

    /// Whether [`Globals::checkpoint_prepared`] writes a file of a transaction that a recovery which begins where `next_xid` is
    /// the next id would take for one of the future. PostgreSQL 17 and 18 mean to remove such a file, but look for it under
    /// the name of the epoch before; then it is in the way of the PREPARE (`RemoveTwoPhaseFile`,
    /// `AdjustToFullTransactionId`, `PrepareRedoAdd`).
    pub fn writes_future_files(&self, checkpoint: &SeenCheckpoint, next_xid: u64) -> bool {
        let future = |&xid: &TransactionId| !precedes(xid, next_xid as TransactionId);
        self.prepared.without_file(checkpoint.body.redo).iter().any(future)
    }

    /// Writes a file for each transaction that is prepared and whose PREPARE ended at or before the checkpoint's redo
    /// position, and removes those of transactions that have ended (`CheckPointTwoPhase`). To be called when everything
    /// else is durable, but for the control file.
    ///
    /// # Errors
    /// A file that cannot be written. Replay must end, and begin at the last restartpoint.
    pub fn checkpoint_prepared(&mut self, checkpoint: &SeenCheckpoint) -> Result<(), GlobalError> {
        self.remove_stale_files()?;
        for xid in self.prepared.without_file(checkpoint.body.redo) {
            let prepared = self.prepared.get(xid);
            if let Some(Prepared { full_xid, state: PreparedState::InMemory { data, .. }, .. }) = prepared {
                self.twophase_files.write(*full_xid, data)?;
            }
            self.prepared.has_file(xid);
        }
        Ok(())
    }

    fn slrus(&self) -> [&Pages; 4] {
        [&self.clog.slru, &self.commit_ts.slru, &self.multixacts.offsets, &self.multixacts.members]
    }

    fn slrus_mut(&mut self) -> [&mut Pages; 4] {
        let Globals { clog, commit_ts, multixacts, .. } = self;
        [&mut clog.slru, &mut commit_ts.slru, &mut multixacts.offsets, &mut multixacts.members]
    }
}
