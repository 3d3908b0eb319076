//! How far each replication origin has been applied (`replication/logical/origin.c`, PostgreSQL 18).

use walrider_layout::Lsn;

/// No origin (`InvalidRepOriginId`).
const NO_ORIGIN: u16 = 0;
/// The origin whose progress is not tracked (`DoNotReplicateId`).
const UNTRACKED_ORIGIN: u16 = u16::MAX;

/// Progress of every origin, in the order in which PostgreSQL's slots would hold them: the file follows it. There are at
/// most as many as there are numbers for them, 65,534.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// A slot that is free is used again first.
    slots: Vec<Option<(u16, Lsn)>>,
    /// What the file holds, durably, once a restartpoint has written it.
    written: Option<Vec<(u16, Lsn)>>,
}

impl Origins {
    /// From the file (`StartupReplicationOrigin`).
    pub(super) fn start(states: impl IntoIterator<Item = (u16, Lsn)>) -> Origins {
        Origins { slots: states.into_iter().map(Some).collect(), written: None }
    }

    /// Moves an origin to a remote position, only forward unless forced (`replorigin_advance`).
    pub(super) fn advance(&mut self, origin: u16, remote: Lsn, backward: bool) {
        if origin == UNTRACKED_ORIGIN || origin == NO_ORIGIN {
            return;
        }
        if let Some((_, position)) = self.slots.iter_mut().flatten().find(|(slot, _)| *slot == origin) {
            if backward || *position < remote {
                *position = remote;
            }
            return;
        }
        match self.slots.iter_mut().find(|slot| slot.is_none()) {
            Some(free) => *free = Some((origin, remote)),
            None => self.slots.push(Some((origin, remote))),
        }
    }

    /// `XLOG_REPLORIGIN_DROP` (`replorigin_redo`).
    pub(super) fn remove(&mut self, origin: u16) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.is_some_and(|(number, _)| number == origin)) {
            *slot = None;
        }
    }

    /// What the file is to hold, in this order (`CheckPointReplicationOrigin`).
    pub(super) fn states(&self) -> impl Iterator<Item = (u16, Lsn)> {
        self.slots.iter().copied().flatten()
    }

    /// Has `write` replace the file, durably, unless a restartpoint before has left just that there.
    pub(super) fn checkpoint<E>(&mut self, write: impl FnOnce(&[(u16, Lsn)]) -> Result<(), E>) -> Result<(), E> {
        let states: Vec<_> = self.states().collect();
        if self.written.as_ref() != Some(&states) {
            self.written = None;
            write(&states)?;
            self.written = Some(states);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_keep_the_order_of_postgresqls_slots() {
        let mut origins = Origins::start([(1, Lsn(10)), (2, Lsn(20))]);
        origins.advance(3, Lsn(30), false);
        origins.remove(1);
        origins.advance(2, Lsn(15), false);
        origins.advance(3, Lsn(25), true);
        origins.advance(4, Lsn(40), false);
        origins.advance(UNTRACKED_ORIGIN, Lsn(50), false);
        origins.advance(NO_ORIGIN, Lsn(50), false);
        let states: Vec<_> = origins.states().collect();
        assert_eq!(states, [(4, Lsn(40)), (2, Lsn(20)), (3, Lsn(25))], "the first free slot is used again");
    }

    /// The first restartpoint writes the file whatever it holds, because nothing says that it is there and durable; one that failed
    /// has written nothing.
    #[test]
    fn the_file_is_replaced_where_it_changes() {
        let mut origins = Origins::start([(1, Lsn(10))]);
        let mut writes = Vec::new();
        let mut checkpoint = |origins: &mut Origins, fails: bool| {
            let _ = origins.checkpoint(|states| {
                writes.push(states.to_vec());
                if fails { Err(()) } else { Ok(()) }
            });
        };
        checkpoint(&mut origins, false);
        checkpoint(&mut origins, false);
        origins.advance(1, Lsn(20), false);
        checkpoint(&mut origins, true);
        checkpoint(&mut origins, false);
        origins.advance(1, Lsn(15), false);
        checkpoint(&mut origins, false);
        assert_eq!(writes, [[(1, Lsn(10))], [(1, Lsn(20))], [(1, Lsn(20))]]);
    }
}
