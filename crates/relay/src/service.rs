//! What all connections share.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

use crate::downstream::Downstreams;
use crate::origin::Origin;
use crate::rules::Rules;
use crate::scram::Mock;
use crate::server::UnknownCounts;
use crate::slots::Slots;
use crate::tls::Acceptor;

/// For [`Mock::new`]; `None` where the system has no random bytes.
pub fn random_key() -> Option<[u8; 32]> {
    let mut key = [0; 32];
    SystemRandom::new().fill(&mut key).ok().map(|()| key)
}

/// Who is served; read again at a reload.
pub struct Access {
    /// Who may come in, and how.
    pub rules: Rules,
    /// TLS, if there is a certificate.
    pub tls: Option<Acceptor>,
    /// For users that are not there.
    pub mock: Mock,
}

/// How it is served.
#[derive(Clone, Debug)]
pub struct ServiceSettings {
    /// Most connections.
    pub max_connections: usize,
    /// Who says nothing for so long is lost (`wal_sender_timeout`); zero: never.
    pub sender_timeout: Duration,
}

/// The service.
pub struct Service {
    origin: OnceLock<Arc<Origin>>,
    /// Slots.
    pub slots: Slots,
    /// Who is connected.
    pub downstreams: Downstreams,
    access: Mutex<Arc<Access>>,
    /// How.
    pub settings: ServiceSettings,
    /// Connections that have not said who they are.
    pub(crate) unknown: Arc<UnknownCounts>,
    /// Called when there is a new slot, before its client knows.
    slot_made: OnceLock<Box<dyn Fn() + Send + Sync>>,
    numbers: AtomicU32,
    stopping: AtomicBool,
}

impl Service {
    /// A service that has nothing to serve yet.
    pub fn new(slots: Slots, downstreams: Downstreams, access: Access, settings: ServiceSettings) -> Service {
        Service {
            origin: OnceLock::new(),
            slots,
            downstreams,
            access: Mutex::new(Arc::new(access)),
            settings,
            unknown: Arc::default(),
            slot_made: OnceLock::new(),
            numbers: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    /// What is served, once that is known.
    pub fn origin(&self) -> Option<&Arc<Origin>> {
        self.origin.get()
    }

    /// It is known; what was told first counts. Those who are connected are woken whenever there is more.
    pub fn serve(self: &Arc<Self>, origin: Arc<Origin>) {
        let service = Arc::downgrade(self);
        origin.spool().on_written(Box::new(move || {
            if let Some(service) = service.upgrade() {
                service.downstreams.wake_all();
            }
        }));
        let _ = self.origin.set(origin);
    }

    /// Has somebody keep WAL for a new slot, before its client knows of it.
    pub fn on_slot_made(&self, keep: Box<dyn Fn() + Send + Sync>) {
        let _ = self.slot_made.set(keep);
    }

    /// There is a new slot.
    pub(crate) fn slot_made(&self) {
        if let Some(keep) = self.slot_made.get() {
            keep();
        }
    }

    /// Who may come in now.
    pub fn access(&self) -> Arc<Access> {
        self.access.lock().expect("no panic while locked").clone()
    }

    /// Others may from now on; who is in stays.
    pub fn set_access(&self, access: Access) {
        *self.access.lock().expect("no panic while locked") = Arc::new(access);
    }

    /// The number of the next connection: what a server has its process's number for.
    pub(crate) fn next_number(&self) -> u64 {
        // Never zero, and positive as an int4 is.
        u64::from(self.numbers.fetch_add(1, Ordering::Relaxed) % (i32::MAX as u32 - 1)) + 1
    }

    /// Ends all connections, and takes no more.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.downstreams.wake_all();
    }

    /// Whether it is to end.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}
