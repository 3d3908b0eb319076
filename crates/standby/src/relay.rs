//! What `walrider relay` and `walrider standby` receive, served to those downstream; what they tell, told to the primary; and WAL that they
//! need, kept.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use walrider_datadir::DataDirError;
use walrider_datadir::durable;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_observe::status::{DownstreamStatus, SlotStatus, Time, text};
use walrider_relay::acks::{Acks, Reached};
use walrider_relay::backup::{Replica, Standing};
use walrider_relay::downstream::{Downstream, Downstreams, feedback};
use walrider_relay::origin::{Identity, Origin};
use walrider_relay::server::Listeners;
use walrider_relay::service::{Access, Service, ServiceSettings};
use walrider_relay::slots::Slots;
use walrider_spool::{Hold, Spool, streaming_start};
use walrider_store::foreign_archive::has_wal;
use walrider_stream::board::Board;
use walrider_stream::error::ReceiveError;
use walrider_stream::positions::Limit;
use walrider_stream::upstream::Opened;

use crate::error::StandbyError;
use crate::receive::{Receive, ReceiveSettings};

/// What the relay knows of the cluster before it is connected.
const IDENTITY_FILE: &str = "walrider.relay.json";
/// Held by each sender.
const LOCK_FILE: &str = "walrider.relay.lock";
/// It is a few lines.
const MAX_IDENTITY: u64 = 64 << 10;
/// How often to look for WAL that nobody needs.
const REMOVE_INTERVAL: Duration = Duration::from_secs(1);

/// What `walrider relay` is told besides what it receives.
#[derive(Clone, Debug)]
pub struct RelaySettings {
    /// Where to listen, as `HOST:PORT`.
    pub listen: Vec<String>,
    /// Bytes of WAL that stay although no slot needs them (`wal_keep_size`). A standby keeps what its own setting says.
    pub keep: u64,
    /// Bytes of WAL that a slot can hold back (`max_slot_wal_keep_size`).
    pub max_slot_keep: Option<u64>,
    /// Whom the primary's commits wait for.
    pub acks: Acks,
    /// How it is served.
    pub service: ServiceSettings,
}

/// A relay.
pub struct Relay {
    itself: Weak<Relay>,
    directory: PathBuf,
    settings: RelaySettings,
    service: Arc<Service>,
    board: OnceLock<Arc<Board>>,
    /// Nobody else has the slots.
    _lock: File,
    /// A standby removes WAL itself; this keeps it from removing what a slot needs.
    hold: Mutex<Option<Hold>>,
    /// What a standby's replay has told.
    replica: Arc<Directory>,
    /// The furthest that the acknowledgements have got on a timeline: who has gone does not take them back.
    reached: Mutex<(TimelineId, Reached)>,
}

/// A standby's data directory, for base backups.
struct Directory {
    path: PathBuf,
    standing: Mutex<Standing>,
}

impl Replica for Directory {
    fn data_dir(&self) -> &Path {
        &self.path
    }

    fn standing(&self) -> Standing {
        *self.standing.lock().expect("no panic while locked")
    }
}

/// What the identity's file says.
#[derive(Serialize, Deserialize)]
struct Known {
    #[serde(with = "text")]
    system_identifier: Option<u64>,
    server_version: String,
    wal_segment_size: u32,
}

impl Relay {
    /// Listens in front of what will be received. A client that comes before there is WAL is told so. `directory` is where the slots are kept.
    ///
    /// # Errors
    /// An address cannot be had, or the slots' file is none.
    pub fn listen(directory: &Path, settings: RelaySettings, access: Access) -> Result<Arc<Relay>, StandbyError> {
        let lock = lock(directory, LOCK_FILE)?;
        let slots = Slots::load(directory)?;
        let listeners = Listeners::open(&settings.listen)?;
        for address in listeners.addresses() {
            tracing::info!("listening on {address}");
        }
        let relay = Arc::new_cyclic(|itself: &Weak<Relay>| {
            let relay = itself.clone();
            let told = move || {
                if let Some(relay) = relay.upgrade() {
                    relay.tell();
                }
            };
            let service = Service::new(slots, Downstreams::new(Box::new(told)), access, settings.service.clone());
            Relay {
                itself: itself.clone(),
                directory: directory.to_owned(),
                service: Arc::new(service),
                board: OnceLock::new(),
                _lock: lock,
                hold: Mutex::default(),
                replica: Arc::new(Directory { path: directory.to_owned(), standing: Mutex::default() }),
                reached: Mutex::default(),
                settings,
            }
        });
        listeners.serve(&relay.service)?;
        let removing = Arc::downgrade(&relay);
        let thread = thread::Builder::new().name("relay-remove".into()).spawn(move || remove_old(&removing));
        thread.map_err(|source| StandbyError::System { operation: "start a thread", source })?;
        Ok(relay)
    }

    /// Refuses a directory with WAL that no relay has received, as of `pg_receivewal` or `walrider receive`: who has it wants to keep it, and
    /// may not know that a relay removes what is old.
    ///
    /// # Errors
    /// Such a one, or one that cannot be read.
    pub fn refuse_anothers_wal(directory: &Path) -> Result<(), StandbyError> {
        if has_wal(directory)? && !directory.join(IDENTITY_FILE).exists() {
            return Err(DataDirError::Refused(format!(
                "\"{}\" has WAL that no relay has received, and a relay removes what is older than --wal-keep-size: say how much is to stay, or \
                 name another directory",
                directory.display()
            ))
            .into());
        }
        Ok(())
    }

    /// A receiver whose WAL is served.
    ///
    /// # Errors
    /// Those of [`Receive::new`] and [`Relay::listen`].
    pub fn start(
        receive: ReceiveSettings,
        settings: RelaySettings,
        access: Access,
    ) -> Result<(Receive, Arc<Relay>), StandbyError> {
        let directory = receive.directory.clone();
        let receive = Receive::new(receive)?;
        let relay = Relay::listen(&directory, settings, access)?;
        relay.tells(receive.board().clone());
        receive.relay(relay.clone());
        Ok((receive, relay))
    }

    /// What those downstream tell is told to the primary by way of this.
    pub(crate) fn tells(&self, board: Arc<Board>) {
        let _ = self.board.set(board);
        if self.settings.acks != Acks::default() {
            // Nothing is acknowledged on the word of the spool alone, not even before somebody is here.
            self.tell();
        }
    }

    /// Others may come in from now on.
    pub fn set_access(&self, access: Access) {
        self.service.set_access(access);
    }

    /// Ends all connections.
    pub fn stop(&self) {
        self.service.stop();
    }

    /// What an earlier run has found out: whose WAL the directory has, and the size of its segments.
    pub(crate) fn known(&self) -> Result<Option<(Identity, SegmentSize)>, StandbyError> {
        let path = self.directory.join(IDENTITY_FILE);
        let Some(contents) = durable::read_file(&path, MAX_IDENTITY)? else { return Ok(None) };
        let wrong = || StandbyError::Identity(path.clone());
        let known: Known = serde_json::from_slice(&contents).map_err(|_| wrong())?;
        let size = SegmentSize::new(known.wal_segment_size).ok_or_else(wrong)?;
        let system_identifier = known.system_identifier.ok_or_else(wrong)?;
        Ok(Some((Identity { system_identifier, server_version: known.server_version }, size)))
    }

    /// Serves what the spool has, from now on.
    pub(crate) fn serve(&self, identity: Identity, spool: &Arc<Spool>) -> Result<(), StandbyError> {
        let size = spool.segment_size();
        let is_known = self.known()?.is_some_and(|known| known == (identity.clone(), size));
        if !is_known {
            let known = Known {
                system_identifier: Some(identity.system_identifier),
                server_version: identity.server_version.clone(),
                wal_segment_size: size.bytes() as u32,
            };
            let mut contents = serde_json::to_vec_pretty(&known).expect("plain values");
            contents.push(b'\n');
            durable::write_file(&self.directory.join(IDENTITY_FILE), &contents)?;
        }
        if self.service.origin().is_none() {
            let end = streaming_start(&self.directory, size)?.unwrap_or((TimelineId(0), Lsn::INVALID));
            self.service.serve(Arc::new(Origin::new(identity, &self.directory, spool.clone(), false, end)));
        }
        Ok(())
    }

    /// Serves base backups of a standby, and its `pg_wal`, up to what it has replayed or is sent; what slots need stays from now on.
    pub(crate) fn serve_standby(
        &self,
        identity: Identity,
        pg_wal: &Path,
        spool: &Arc<Spool>,
        end: (TimelineId, Lsn),
    ) -> Result<(), StandbyError> {
        let origin = Origin::new(identity, pg_wal, spool.clone(), true, end).with_replica(self.replica.clone());
        let origin = Arc::new(origin);
        *self.hold.lock().expect("no panic while locked") = Some(spool.hold(Lsn(0)));
        self.keep_for_slots(&origin)?;
        let (relay, kept) = (self.itself.clone(), origin.clone());
        self.service.on_slot_made(Box::new(move || {
            // A restartpoint may come before we look again.
            if let Some(Err(error)) = relay.upgrade().map(|relay| relay.keep_for_slots(&kept)) {
                tracing::error!("{error}");
            }
        }));
        self.service.serve(origin);
        Ok(())
    }

    /// Replay has got there.
    pub(crate) fn replayed(&self, standing: Standing) {
        *self.replica.standing.lock().expect("no panic while locked") = standing;
        let reaches = |origin: &Arc<Origin>| origin.reaches(standing.timeline, standing.replayed);
        if self.service.origin().is_some_and(reaches) {
            self.service.downstreams.wake_all();
        }
    }

    /// A session of streaming begins.
    pub(crate) fn session_begins(&self, opened: &mut Opened) -> Result<(), ReceiveError> {
        if let Some(board) = self.board.get().filter(|board| board.limits_flush()) {
            board.set_floor(opened.floor()?);
        }
        // It may be on another timeline, where less is written.
        self.service.downstreams.wake_all();
        Ok(())
    }

    /// Somebody downstream has told something: the primary is told what follows from it.
    fn tell(&self) {
        let Some(board) = self.board.get() else { return };
        {
            // From the look at them to the board in one go: who looks later knows no less.
            let mut kept = self.reached.lock().expect("no panic while locked");
            let timeline = self.service.origin().map_or(TimelineId(0), |origin| origin.end().0);
            if kept.0 != timeline {
                *kept = (timeline, Reached::default());
            }
            let (reached, feedback) = self.service.downstreams.look(|all| {
                let all: Vec<&Downstream> = all.collect();
                let said: Vec<_> = all.iter().filter_map(|one| one.feedback).collect();
                (self.settings.acks.reached(&all, timeline), feedback(&said))
            });
            kept.1 = kept.1.max(reached);
            let Reached { write, flush, apply } = kept.1;
            let counts = self.settings.acks.apply.is_some();
            board.set_downstream(Limit { write, flush, apply: if counts { apply } else { Lsn(u64::MAX) } }, feedback);
            if counts && !self.is_of_standby() {
                // Those downstream are those who apply. What they applied is durable here, or told when it is.
                board.applied(apply, true, || Lsn::INVALID);
            }
        }
        board.tell();
    }

    /// Whether the WAL is a standby's, which replays it and removes it.
    fn is_of_standby(&self) -> bool {
        self.hold.lock().expect("no panic while locked").is_some()
    }

    /// From where on slots need WAL, which is kept from `keep` on for nobody. Those that need too much are given up.
    fn needed(&self, origin: &Origin, end: Lsn, keep: Lsn) -> Result<Option<Lsn>, StandbyError> {
        let size = origin.segment_size();
        let limit = self.settings.max_slot_keep.map_or(Lsn(0), |bytes| Lsn(end.0.saturating_sub(bytes)));
        // What is there anyway, nobody loses.
        let limit = limit.min(size.start_of(size.segment_of(keep)));
        let (needed, given_up) = self.service.slots.keep_from(limit)?;
        for name in given_up {
            tracing::warn!("slot \"{name}\" is given up: it held back more WAL than --max-slot-wal-keep-size");
        }
        Ok(needed)
    }

    /// Holds WAL that slots need.
    fn keep_for_slots(&self, origin: &Origin) -> Result<(), StandbyError> {
        // A session that comes later knows of more slots: a hold of one who looked before must not replace it.
        let mut held = self.hold.lock().expect("no panic while locked");
        let end = origin.end().1;
        // A hold does not go back, and a new slot may need more than those before.
        *held = Some(origin.spool().hold(self.needed(origin, end, end)?.unwrap_or(Lsn(u64::MAX))));
        Ok(())
    }

    fn remove_once(&self, origin: &Origin) -> Result<(), StandbyError> {
        if self.is_of_standby() {
            return self.keep_for_slots(origin);
        }
        let (timeline, end) = origin.end();
        let keep = Lsn(end.0.saturating_sub(self.settings.keep));
        origin
            .spool()
            .remove_before(self.needed(origin, end, keep)?.map_or(keep, |needed| needed.min(keep)), timeline)?;
        Ok(())
    }

    /// Who is served.
    pub(crate) fn downstreams(&self) -> Vec<DownstreamStatus> {
        let end = self.service.origin().map_or(Lsn::INVALID, |origin| origin.end().1);
        let known = |lsn: Lsn| lsn.is_valid().then_some(lsn);
        let all = self.service.downstreams.all().into_iter();
        let status = |(number, one): (u64, Downstream)| DownstreamStatus {
            pid: number,
            application_name: one.application_name,
            user: one.user,
            address: one.address,
            since: Time(one.since),
            slot: one.slot,
            streaming: one.streaming.is_some(),
            sent_lsn: known(one.sent),
            write_lsn: known(one.told.write),
            flush_lsn: known(one.told.flush),
            replay_lsn: known(one.told.apply),
            behind_bytes: known(one.sent).map(|_| end.0.saturating_sub(one.told.flush.0.max(one.told.write.0))),
        };
        all.map(status).collect()
    }

    /// The slots.
    pub(crate) fn slots(&self) -> BTreeMap<String, SlotStatus> {
        let status = |slot: walrider_relay::slots::Slot| SlotStatus {
            restart_lsn: slot.restart_lsn,
            active: slot.active.is_some(),
            temporary: slot.temporary,
            lost: slot.lost,
        };
        self.service.slots.all().into_iter().map(|(name, slot)| (name, status(slot))).collect()
    }
}

/// Slots are known to one process alone.
pub(crate) fn lock(directory: &Path, name: &str) -> Result<File, StandbyError> {
    let path = directory.join(name);
    let failed = |source| DataDirError::io("lock file", &path, source);
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(failed(error).into()),
        Err(TryLockError::WouldBlock) => {
            let why = format!(
                "another walrider receives into \"{0}\" or serves it already: it has {0}/{name}",
                directory.display()
            );
            Err(DataDirError::Refused(why).into())
        }
    }
}

/// Removes WAL that nobody needs, or has it kept, from time to time, until the service ends.
fn remove_old(relay: &Weak<Relay>) {
    let mut last_error = String::new();
    loop {
        thread::sleep(REMOVE_INTERVAL);
        let Some(relay) = relay.upgrade().filter(|relay| !relay.service.is_stopping()) else { return };
        let Some(origin) = relay.service.origin() else { continue };
        let error = relay.remove_once(origin).err().map(|error| error.to_string()).unwrap_or_default();
        if !error.is_empty() && error != last_error {
            tracing::error!("{error}");
        }
        last_error = error;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.service.stop();
    }
}
