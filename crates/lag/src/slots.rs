//! What the primary's slots hold, and what is not seen for want of a right, an extension or a name.

use serde::Serialize;

use crate::sample::{Sample, Server, ServerSample};
use crate::split::Standby;

/// A replication slot of the primary.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SlotView {
    /// Its name.
    pub name: String,
    /// `physical` or `logical`.
    pub kind: String,
    /// Somebody uses it.
    pub active: bool,
    /// Who: its `application_name`.
    pub used_by: Option<String>,
    /// Bytes of WAL between its `restart_lsn` and the primary's flush; `None` if it holds nothing, or has lost it.
    pub held: Option<u64>,
    /// `reserved`, `extended`, `unreserved`, `lost`.
    pub wal_status: Option<String>,
    /// Bytes that may yet be written before WAL that it needs may go; `None` where `max_slot_wal_keep_size` sets no bound.
    pub safe_wal_size: Option<i64>,
}

/// Those of a primary, the one that holds most first.
pub fn slots(primary: &Server) -> Vec<SlotView> {
    let mut slots: Vec<SlotView> = primary
        .slots
        .iter()
        .map(|slot| {
            let user = primary.replication.iter().find(|sender| sender.slot.as_deref() == Some(&slot.slot_name));
            SlotView {
                name: slot.slot_name.clone(),
                kind: slot.slot_type.clone(),
                active: slot.active,
                used_by: user.map(|sender| sender.application_name.clone()).filter(|name| !name.is_empty()),
                held: primary.flush_lsn.zip(slot.restart_lsn).map(|(flush, restart)| flush.0.saturating_sub(restart.0)),
                wal_status: slot.wal_status.clone(),
                // PostgreSQL counts from the beginning of WAL for a slot that keeps nothing yet (`pg_get_replication_slots`, slotfuncs.c).
                safe_wal_size: slot.safe_wal_size.filter(|_| slot.restart_lsn.is_some()),
            }
        })
        .collect();
    slots.sort_by(|a, b| b.held.cmp(&a.held).then_with(|| a.name.cmp(&b.name)));
    slots
}

/// What is not seen, and what would show it.
pub fn notes(sample: &Sample, standbys: &[Standby]) -> Vec<String> {
    let mut notes = Vec::new();
    let shown = sample.primary().map(|(at, _)| at.name.as_str());
    for at in &sample.servers {
        let ServerSample { name, server: Some(server), .. } = at else {
            let unknown = at.error.as_ref().filter(|_| at.walrider.is_none());
            notes.extend(unknown.map(|error| format!("{}: {error}", at.name)));
            continue;
        };
        let unseen = at.wal.as_ref().and_then(|wal| wal.unseen.as_ref());
        notes.extend(unseen.map(|unseen| format!("{name}: {unseen}")));
        if !server.in_recovery && shown != Some(name) {
            notes.push(match &at.error {
                Some(error) => format!("{name}: it was a primary, and does not answer: {error}"),
                None => format!("{name}: a primary, too, and not shown: name one"),
            });
        }
        if !server.sees_all {
            let unseen = match server.in_recovery {
                true => "what its processes wait for",
                false => "positions of standbys and what sessions wait for",
            };
            notes.push(format!("{name}: {unseen} cannot be seen without pg_monitor: GRANT pg_monitor TO this user"));
        }
    }
    for standby in standbys.iter().filter(|standby| standby.connected && !standby.asked) {
        notes.push(format!(
            "{}: not asked, so why its replay lags is not seen: name it, too (a connection string, or http://HOST:PORT of its --http)",
            standby.name
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use walrider_layout::Lsn;

    use super::*;
    use crate::sample::{Slot, Walsender};

    fn slot(name: &str, restart_lsn: Option<u64>) -> Slot {
        Slot {
            slot_name: name.into(),
            slot_type: "physical".into(),
            restart_lsn: restart_lsn.map(Lsn),
            ..Slot::default()
        }
    }

    #[test]
    fn what_holds_most_comes_first_and_who_uses_it_is_named() {
        let sender = Walsender { application_name: "s1".into(), slot: Some("near".into()), ..Walsender::default() };
        let unused = Slot { safe_wal_size: Some(-1000), ..slot("lost", None) };
        let primary = Server {
            flush_lsn: Some(Lsn(1000)),
            slots: vec![unused, slot("near", Some(900)), slot("far", Some(100))],
            replication: vec![sender],
            ..Server::default()
        };
        assert!(slots(&primary).iter().all(|slot| slot.safe_wal_size.is_none()), "it keeps nothing, and loses nothing");
        let shown: Vec<_> = slots(&primary).into_iter().map(|slot| (slot.name, slot.held, slot.used_by)).collect();
        assert_eq!(
            shown,
            [
                ("far".into(), Some(900), None),
                ("near".into(), Some(100), Some("s1".into())),
                ("lost".into(), None, None)
            ]
        );
    }

    #[test]
    fn a_server_that_is_not_shown_is_named() {
        let primary = |name: &str| ServerSample {
            name: name.into(),
            server: Some(Server { sees_all: true, ..Server::default() }),
            ..ServerSample::default()
        };
        let dead = ServerSample { name: "c:1".into(), error: Some("refused".into()), ..ServerSample::default() };
        let sample = Sample { servers: vec![primary("a:1"), primary("b:1"), dead], ..Sample::default() };
        assert_eq!(notes(&sample, &[]), ["b:1: a primary, too, and not shown: name one", "c:1: refused"]);
    }

    #[test]
    fn what_is_not_seen_is_said() {
        let server = |in_recovery, sees_all| ServerSample {
            name: if in_recovery { "b:1" } else { "a:1" }.into(),
            server: Some(Server { in_recovery, sees_all, ..Server::default() }),
            ..ServerSample::default()
        };
        let standby = |connected, asked| Standby { name: "s".into(), connected, asked, ..Standby::default() };
        let sample = Sample { servers: vec![server(false, true), server(true, true)], ..Sample::default() };
        assert_eq!(notes(&sample, &[standby(true, true), standby(false, true)]), Vec::<String>::new());
        let sample = Sample { servers: vec![server(false, false), server(true, false)], ..Sample::default() };
        let said = notes(&sample, &[standby(true, false)]);
        assert!(said[0].starts_with("a:1: positions") && said[1].starts_with("b:1: what its processes"), "{said:?}");
        assert!(said[2].starts_with("s: not asked"), "{said:?}");
    }
}
