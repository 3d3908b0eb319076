//! Physical replication slots of those downstream: how far back WAL must stay. They are kept in one file beside the segments.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use walrider_datadir::durable;
use walrider_layout::Lsn;
use walrider_observe::status::text;

/// Its name.
pub const SLOTS_FILE: &str = "walrider.slots.json";
/// The file is no longer than this: some ten thousand slots.
const MAX_FILE: u64 = 4 << 20;
/// The longest name (`NAMEDATALEN` - 1).
const MAX_NAME: usize = 63;
/// Most slots.
pub const MAX_SLOTS: usize = 1000;

/// A slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// WAL from there on is needed; none before the slot is first used.
    #[serde(with = "text")]
    pub restart_lsn: Option<Lsn>,
    /// WAL that it needed was removed, because the limit was reached.
    #[serde(default)]
    pub lost: bool,
    /// Who uses it, by the number of the connection.
    #[serde(skip)]
    pub active: Option<u64>,
    /// It ends with the connection that made it.
    #[serde(skip)]
    pub temporary: bool,
    /// What the file says of `restart_lsn`.
    #[serde(skip)]
    saved: Option<Lsn>,
}

/// Why a slot cannot be had; the text is PostgreSQL's.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// There is one.
    #[error("replication slot \"{0}\" already exists")]
    Exists(String),
    /// There is none.
    #[error("replication slot \"{0}\" does not exist")]
    Missing(String),
    /// Somebody uses it.
    #[error("replication slot \"{0}\" is active for PID {1}")]
    Active(String, u64),
    /// What it held is gone.
    #[error("can no longer access replication slot \"{0}\"")]
    Lost(String),
    /// The name cannot be one (`ReplicationSlotValidateName`).
    #[error("replication slot name \"{0}\" is not valid: it has 1 to 63 lower case letters, digits and underscores")]
    Name(String),
    /// Too many.
    #[error("all replication slots are in use")]
    Full,
    /// The file.
    #[error("could not save replication slots to \"{path}\": {source}")]
    Save {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is none.
    #[error(
        "could not read replication slots from \"{path}\": {why}; it is JSON that Walrider wrote: restore it, or remove it and create the slots again"
    )]
    Load {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

impl SlotError {
    /// PostgreSQL's code for it.
    pub fn sqlstate(&self) -> &'static str {
        match self {
            SlotError::Exists(_) => "42710",
            SlotError::Missing(_) => "42704",
            SlotError::Active(..) => "55006",
            SlotError::Lost(_) => "55000",
            SlotError::Name(_) => "42602",
            SlotError::Full => "53400",
            SlotError::Save { .. } | SlotError::Load { .. } => "58030",
        }
    }
}

/// All slots.
pub struct Slots {
    path: PathBuf,
    /// Held while the file is written, and taken before that of the slots.
    file: Mutex<()>,
    slots: Mutex<BTreeMap<String, Slot>>,
}

impl Slots {
    /// Those that the directory has.
    ///
    /// # Errors
    /// [`SlotError::Load`].
    pub fn load(directory: &Path) -> Result<Slots, SlotError> {
        let path = directory.join(SLOTS_FILE);
        let failed = |why: String| SlotError::Load { path: path.clone(), why };
        let contents = durable::read_file(&path, MAX_FILE).map_err(|error| failed(error.to_string()))?;
        let mut slots: BTreeMap<String, Slot> = match contents {
            None => BTreeMap::new(),
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?,
        };
        for (name, slot) in &mut slots {
            check_name(name).map_err(|error| failed(error.to_string()))?;
            slot.saved = slot.restart_lsn;
        }
        Ok(Slots { path, file: Mutex::new(()), slots: Mutex::new(slots) })
    }

    /// A slot by name.
    pub fn get(&self, name: &str) -> Option<Slot> {
        self.lock().get(name).cloned()
    }

    /// All of them, by name.
    pub fn all(&self) -> BTreeMap<String, Slot> {
        self.lock().clone()
    }

    /// Makes a slot; durable on return unless it is temporary, of that connection then. `from` tells where WAL is held from: it is asked
    /// while nobody finds out what may be removed.
    ///
    /// # Errors
    /// There is one of this name, the name cannot be one, or there are too many.
    pub fn create(
        &self,
        name: &str,
        temporary: Option<u64>,
        from: impl FnOnce() -> Option<Lsn>,
    ) -> Result<(), SlotError> {
        check_name(name)?;
        let _file = self.file.lock().expect("no panic while locked");
        let mut slots = self.lock();
        if slots.contains_key(name) {
            return Err(SlotError::Exists(name.to_owned()));
        }
        if slots.len() >= MAX_SLOTS {
            return Err(SlotError::Full);
        }
        let slot = Slot { restart_lsn: from(), temporary: temporary.is_some(), active: temporary, ..Slot::default() };
        slots.insert(name.to_owned(), slot);
        match self.save(&mut slots) {
            Ok(()) => Ok(()),
            Err(error) => {
                slots.remove(name);
                Err(error)
            }
        }
    }

    /// Drops a slot that nobody else than `by` uses; durable on return.
    ///
    /// # Errors
    /// There is none, or somebody uses it.
    pub fn drop_slot(&self, name: &str, by: u64) -> Result<(), SlotError> {
        let _file = self.file.lock().expect("no panic while locked");
        let mut slots = self.lock();
        let slot = slots.get(name).ok_or_else(|| SlotError::Missing(name.to_owned()))?;
        if let Some(user) = slot.active.filter(|user| *user != by) {
            return Err(SlotError::Active(name.to_owned(), user));
        }
        let gone = slots.remove(name).expect("just seen");
        match self.save(&mut slots) {
            Ok(()) => Ok(()),
            Err(error) => {
                slots.insert(name.to_owned(), gone);
                Err(error)
            }
        }
    }

    /// A connection uses it from now on.
    ///
    /// # Errors
    /// There is none, somebody else uses it, or what it held is gone.
    pub fn acquire(&self, name: &str, by: u64) -> Result<(), SlotError> {
        let mut slots = self.lock();
        let slot = slots.get_mut(name).ok_or_else(|| SlotError::Missing(name.to_owned()))?;
        match slot.active {
            Some(user) if user != by => Err(SlotError::Active(name.to_owned(), user)),
            _ if slot.lost => Err(SlotError::Lost(name.to_owned())),
            _ => {
                slot.active = Some(by);
                Ok(())
            }
        }
    }

    /// It does not stream from it any more. A temporary slot stays its own.
    pub fn release(&self, name: &str, by: u64) {
        if let Some(slot) = self.lock().get_mut(name).filter(|slot| slot.active == Some(by) && !slot.temporary) {
            slot.active = None;
        }
    }

    /// A connection has ended: its temporary slots go.
    pub fn leave(&self, by: u64) {
        let mut slots = self.lock();
        slots.retain(|_, slot| !(slot.temporary && slot.active == Some(by)));
        slots.values_mut().filter(|slot| slot.active == Some(by)).for_each(|slot| slot.active = None);
    }

    /// Who uses the slot has made WAL durable up to there (`PhysicalConfirmReceivedLocation`). Kept in memory; the file follows with
    /// [`Slots::keep_from`].
    pub fn confirm(&self, name: &str, flushed: Lsn) {
        if let Some(slot) = self.lock().get_mut(name) {
            slot.restart_lsn = slot.restart_lsn.max(Some(flushed));
        }
    }

    /// Who uses the slot begins before what it has kept so far, as with one that was made for an older backup: from now on it keeps WAL from there
    /// on, as far as there is any (`PhysicalConfirmReceivedLocation` goes back, too). Whether it moved; durable on return.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn go_back(&self, name: &str, start: Lsn) -> Result<bool, SlotError> {
        let _file = self.file.lock().expect("no panic while locked");
        let mut kept = self.lock().clone();
        let Some(slot) = kept.get_mut(name).filter(|slot| slot.restart_lsn.is_some_and(|at| at > start)) else {
            return Ok(false);
        };
        slot.restart_lsn = Some(start);
        if !slot.temporary {
            self.write(&kept)?;
        }
        if let Some(slot) = self.lock().get_mut(name) {
            (slot.restart_lsn, slot.saved) = (Some(start), Some(start));
        }
        Ok(true)
    }

    /// Saves what has moved, and tells from where on WAL is needed: what the file says, so that no crash makes a slot need what is gone.
    /// Slots that would hold back WAL before `limit` are given up, and named. Who confirms does not wait for the file.
    ///
    /// # Errors
    /// The file cannot be written; nothing may be removed then.
    pub fn keep_from(&self, limit: Lsn) -> Result<(Option<Lsn>, Vec<String>), SlotError> {
        let _file = self.file.lock().expect("no panic while locked");
        let is_too_old = |slot: &Slot| !slot.lost && slot.restart_lsn.is_some_and(|at| at < limit);
        let mut kept = self.lock().clone();
        let mut given_up = Vec::new();
        for (name, slot) in kept.iter_mut().filter(|(_, slot)| is_too_old(slot)) {
            slot.lost = true;
            given_up.push(name.clone());
        }
        if !given_up.is_empty() || kept.values().any(|slot| !slot.temporary && slot.saved != slot.restart_lsn) {
            self.write(&kept)?;
            for (name, slot) in &mut *self.lock() {
                let Some(written) = kept.get(name) else { continue };
                slot.saved = written.restart_lsn;
                slot.lost |= written.lost;
            }
        }
        let held = |slot: &Slot| if slot.temporary { slot.restart_lsn } else { slot.saved };
        Ok((self.lock().values().filter(|slot| !slot.lost).filter_map(held).min(), given_up))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().expect("no panic while locked")
    }

    /// Writes the file of those that are not temporary.
    fn write(&self, slots: &BTreeMap<String, Slot>) -> Result<(), SlotError> {
        let kept: BTreeMap<&String, &Slot> = slots.iter().filter(|(_, slot)| !slot.temporary).collect();
        let mut contents = serde_json::to_vec_pretty(&kept).expect("plain values");
        contents.push(b'\n');
        let failed = |source| SlotError::Save { path: self.path.clone(), source };
        durable::write_file(&self.path, &contents).map_err(|error| failed(io::Error::other(error)))
    }

    /// The same, and they are as the file says then.
    fn save(&self, slots: &mut BTreeMap<String, Slot>) -> Result<(), SlotError> {
        self.write(slots)?;
        slots.values_mut().for_each(|slot| slot.saved = slot.restart_lsn);
        Ok(())
    }
}

/// What a name may be (`ReplicationSlotValidateName`, `slot.c`, PostgreSQL 18).
fn check_name(name: &str) -> Result<(), SlotError> {
    let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
    match !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(fits) {
        true => Ok(()),
        false => Err(SlotError::Name(name.chars().take(MAX_NAME + 1).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(directory: &Path) -> Slots {
        Slots::load(directory).unwrap()
    }

    #[test]
    fn a_slot_is_there_after_a_restart_and_a_temporary_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let first = slots(directory.path());
        first.create("a", None, || Some(Lsn(100))).unwrap();
        first.create("unused", None, || None).unwrap();
        first.create("t", Some(7), || Some(Lsn(50))).unwrap();
        assert!(matches!(first.create("a", None, || None), Err(SlotError::Exists(_))));
        assert_eq!(first.keep_from(Lsn(0)).unwrap().0, Some(Lsn(50)));
        first.leave(7);
        assert_eq!(first.keep_from(Lsn(0)).unwrap().0, Some(Lsn(100)));
        let again = slots(directory.path());
        assert_eq!(again.all().keys().collect::<Vec<_>>(), ["a", "unused"]);
        assert_eq!(again.get("a").unwrap().restart_lsn, Some(Lsn(100)));
    }

    /// Found by a review: one that was made for an older backup, or a temporary one, kept nothing of what who used it was still to be sent.
    #[test]
    fn who_begins_further_back_is_kept_for() {
        let directory = tempfile::tempdir().unwrap();
        let first = slots(directory.path());
        first.create("a", None, || Some(Lsn(100))).unwrap();
        first.create("t", Some(7), || Some(Lsn(100))).unwrap();
        assert!(!first.go_back("a", Lsn(100)).unwrap() && !first.go_back("none", Lsn(1)).unwrap());
        assert!(first.go_back("a", Lsn(60)).unwrap() && first.go_back("t", Lsn(50)).unwrap());
        assert_eq!(first.keep_from(Lsn(0)).unwrap().0, Some(Lsn(50)));
        assert_eq!(slots(directory.path()).get("a").unwrap().restart_lsn, Some(Lsn(60)));
        first.confirm("t", Lsn(70));
        assert_eq!(first.keep_from(Lsn(0)).unwrap().0, Some(Lsn(60)));
    }

    /// A crash sets a slot back to what the file says, which must not be gone.
    #[test]
    fn what_counts_is_what_the_file_says() {
        let directory = tempfile::tempdir().unwrap();
        let first = slots(directory.path());
        first.create("a", None, || Some(Lsn(100))).unwrap();
        first.confirm("a", Lsn(300));
        first.confirm("a", Lsn(200));
        assert_eq!(slots(directory.path()).get("a").unwrap().restart_lsn, Some(Lsn(100)));
        assert_eq!(first.keep_from(Lsn(0)).unwrap().0, Some(Lsn(300)), "saved first");
        assert_eq!(slots(directory.path()).get("a").unwrap().restart_lsn, Some(Lsn(300)));
        std::fs::remove_dir_all(directory.path()).unwrap();
        first.confirm("a", Lsn(400));
        assert!(first.keep_from(Lsn(0)).is_err(), "nothing may be removed");
    }

    #[test]
    fn one_connection_uses_a_slot_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let slots = slots(directory.path());
        slots.create("a", None, || Some(Lsn(1))).unwrap();
        slots.acquire("a", 1).unwrap();
        slots.acquire("a", 1).unwrap();
        assert!(matches!(slots.acquire("a", 2), Err(SlotError::Active(_, 1))));
        assert!(matches!(slots.drop_slot("a", 2), Err(SlotError::Active(_, 1))));
        slots.leave(1);
        slots.acquire("a", 2).unwrap();
        slots.drop_slot("a", 2).unwrap();
        assert!(matches!(slots.acquire("a", 2), Err(SlotError::Missing(_))));
    }

    #[test]
    fn a_slot_that_holds_too_much_is_given_up_for_good() {
        let directory = tempfile::tempdir().unwrap();
        let first = slots(directory.path());
        first.create("slow", None, || Some(Lsn(100))).unwrap();
        first.create("fast", None, || Some(Lsn(900))).unwrap();
        assert_eq!(first.keep_from(Lsn(500)).unwrap(), (Some(Lsn(900)), vec!["slow".to_owned()]));
        assert_eq!(first.keep_from(Lsn(500)).unwrap(), (Some(Lsn(900)), vec![]));
        assert!(matches!(slots(directory.path()).acquire("slow", 1), Err(SlotError::Lost(_))));
    }

    #[test]
    fn names_and_files_are_checked() {
        let directory = tempfile::tempdir().unwrap();
        let first = slots(directory.path());
        for name in ["", "A", "a-b", "a b", "../a", &"x".repeat(64), "é"] {
            assert!(matches!(first.create(name, None, || None), Err(SlotError::Name(_))), "{name}");
        }
        first.create(&"x".repeat(63), None, || None).unwrap();
        for text in ["", "[]", "{\"a\": 1}", "{\"../a\": {\"restart_lsn\": null}}", "{\"a\": {\"restart_lsn\": \"x\"}}"]
        {
            std::fs::write(directory.path().join(SLOTS_FILE), text).unwrap();
            assert!(matches!(Slots::load(directory.path()), Err(SlotError::Load { .. })), "{text}");
        }
    }
}
