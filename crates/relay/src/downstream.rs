//! Those who are served, and what they have told: for the status, for the primary, and for removing WAL.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use rustix::event::{EventfdFlags, eventfd};
use walrider_layout::{Lsn, TimelineId};
use walrider_wire::stream::{HotStandbyFeedback, StatusUpdate};

/// One that is connected.
#[derive(Clone, Debug)]
pub struct Downstream {
    /// `application_name`.
    pub application_name: String,
    /// User.
    pub user: String,
    /// Address, or "local".
    pub address: String,
    /// When it was accepted.
    pub since: SystemTime,
    /// The slot that it streams from.
    pub slot: Option<String>,
    /// The timeline that is streamed to it, while one is.
    pub streaming: Option<TimelineId>,
    /// End of what it was sent.
    pub sent: Lsn,
    /// What it has told last; zeros before.
    pub told: StatusUpdate,
    /// What its queries still need, if it says so.
    pub feedback: Option<HotStandbyFeedback>,
}

/// All of them.
pub struct Downstreams {
    all: Mutex<BTreeMap<u64, (Downstream, Arc<OwnedFd>)>>,
    /// Called when one has told something.
    told: Box<dyn Fn() + Send + Sync>,
}

impl Downstreams {
    /// Nobody yet. `told` is called after each report of one.
    pub fn new(told: Box<dyn Fn() + Send + Sync>) -> Downstreams {
        Downstreams { all: Mutex::new(BTreeMap::new()), told }
    }

    /// One more, by the number of its connection; `None` if there are as many as may be. Returns what wakes it.
    ///
    /// # Errors
    /// When the system gives no event descriptor.
    pub(crate) fn enter(&self, number: u64, most: usize, downstream: Downstream) -> io::Result<Option<Arc<OwnedFd>>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut all = self.lock();
        if all.len() >= most {
            return Ok(None);
        }
        all.insert(number, (downstream, wake.clone()));
        Ok(Some(wake))
    }

    pub(crate) fn leave(&self, number: u64) {
        // One that never came in has told nothing.
        let gone = self.lock().remove(&number);
        if gone.is_some() {
            (self.told)();
        }
    }

    pub(crate) fn change(&self, number: u64, change: impl FnOnce(&mut Downstream)) {
        if let Some((downstream, _)) = self.lock().get_mut(&number) {
            change(downstream);
        }
    }

    /// It has told something.
    pub(crate) fn tells(&self, number: u64, change: impl FnOnce(&mut Downstream)) {
        self.change(number, change);
        (self.told)();
    }

    /// Has all of them look.
    pub fn wake_all(&self) {
        for (_, wake) in self.lock().values() {
            // Full: it is awake.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    /// How they stand, by number.
    pub fn all(&self) -> BTreeMap<u64, Downstream> {
        self.lock().iter().map(|(number, (downstream, _))| (*number, downstream.clone())).collect()
    }

    /// Looks at all of them at one moment.
    pub fn look<T>(&self, look: impl FnOnce(&mut dyn Iterator<Item = &Downstream>) -> T) -> T {
        look(&mut self.lock().values().map(|(downstream, _)| downstream))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, (Downstream, Arc<OwnedFd>)>> {
        self.all.lock().expect("no panic while locked")
    }
}

/// What the queries of all need together: the oldest of each kind, as a primary takes it from one standby. `None`: nobody says anything.
pub fn feedback(said: &[HotStandbyFeedback]) -> Option<HotStandbyFeedback> {
    let oldest = |of: fn(&HotStandbyFeedback) -> (u32, u32)| {
        let valid = said.iter().map(of).filter(|(_, xid)| *xid != 0);
        valid.min().unwrap_or((0, 0))
    };
    let (xmin_epoch, xmin) = oldest(|said| (said.xmin_epoch, said.xmin));
    let (catalog_xmin_epoch, catalog_xmin) = oldest(|said| (said.catalog_xmin_epoch, said.catalog_xmin));
    let time = said.iter().map(|said| said.time).max()?;
    Some(HotStandbyFeedback { time, xmin, xmin_epoch, catalog_xmin, catalog_xmin_epoch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_each_kind_counts() {
        let said = |time, (xmin_epoch, xmin), (catalog_xmin_epoch, catalog_xmin)| HotStandbyFeedback {
            time,
            xmin,
            xmin_epoch,
            catalog_xmin,
            catalog_xmin_epoch,
        };
        assert_eq!(feedback(&[]), None);
        let all = [said(1, (1, 5), (0, 0)), said(3, (0, u32::MAX), (2, 9)), said(2, (0, 0), (2, 8))];
        assert_eq!(feedback(&all), Some(said(3, (0, u32::MAX), (2, 8))));
    }
}
