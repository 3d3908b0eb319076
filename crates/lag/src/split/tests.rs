//! Cases that are hard to make for real.

use super::*;
use crate::sample::Receiver;

/// A walsender that a slow network holds up waits in `WalSenderMain`, as an idle one does, and sends now and then: found under load,
/// where that was taken for one that is slow itself.
#[test]
fn a_walsender_that_is_held_up_between_two_looks() {
    let at = |wait: Option<&str>, sent| Walsender {
        pid: 7,
        wait: wait.map(str::to_owned),
        sent_lsn: Some(Lsn(sent)),
        write_lsn: Some(Lsn(1000)),
        ..Walsender::default()
    };
    let server = |sender: &Walsender| Server {
        flush_lsn: Some(Lsn(2_000_000)),
        replication: vec![sender.clone()],
        ..Server::default()
    };
    let sample = |wait: Option<&str>| Sample {
        servers: vec![ServerSample { server: Some(server(&at(wait, 1_000_000))), ..ServerSample::default() }],
        ..Sample::default()
    };
    let held_up = |before: &[Option<&str>], now: Walsender| {
        let observer = Observer { recent: before.iter().copied().map(sample).collect(), ..Observer::default() };
        let server = server(&now);
        let standby = observer.standby(Some((&ServerSample::default(), &server)), Some(&now), None);
        observer.is_held_up(&standby, &server, &now)
    };
    let main = Some("Activity:WalSenderMain");
    assert!(held_up(&[], at(main, 1_000_000)));
    assert!(!held_up(&[], at(None, 1_000_000)), "it does something");
    assert!(!held_up(&[], at(main, 2_000_000)), "nothing is left to send");
    assert!(!held_up(&[], at(main, 1000)), "all that was sent has come: it is stopped");
    assert!(held_up(&[None, main, main], at(None, 1_000_000)));
    assert!(!held_up(&[None, main, main], Walsender { pid: 8, ..at(None, 1_000_000) }));
    assert!(!held_up(&[None, main, None], at(None, 1_000_000)));
}

/// Standbys of a primary that died have no lag that anybody knows; they do not look as if they were fine.
#[test]
fn a_primary_that_does_not_answer() {
    let sender = Walsender {
        application_name: "s".into(),
        state: Some("streaming".into()),
        sent_lsn: Some(Lsn(1000)),
        replay_lsn: Some(Lsn(1000)),
        flush_lsn: Some(Lsn(1000)),
        ..Walsender::default()
    };
    let server = Server { flush_lsn: Some(Lsn(1000)), replication: vec![sender], ..Server::default() };
    let at = |time, error| ServerSample {
        name: "p:1".into(),
        answered_at: time,
        error,
        server: Some(server.clone()),
        ..ServerSample::default()
    };
    let sample = |at| Sample { servers: vec![at], ..Sample::default() };
    let mut observer = Observer::default();
    let standby = observer.look(&sample(at(1.0, None))).standbys.remove(0);
    assert_eq!((standby.connected, standby.replay.seconds, standby.replay.bytes), (true, Some(0.0), Some(0)));
    let view = observer.look(&sample(at(1.0, Some("gone".into()))));
    let standby = &view.standbys[0];
    assert_eq!((standby.connected, standby.state.as_str(), view.wal_rate), (false, "unknown", None));
    for stage in [standby.sent, standby.write, standby.flush, standby.replay] {
        assert_eq!((stage.bytes, stage.seconds), (None, None));
    }
    assert_eq!(standby.replay.lsn, Some(Lsn(1000)));
}

fn sender(name: &str, slot: Option<&str>, at: u64) -> Walsender {
    let at = Some(Lsn(at));
    Walsender {
        application_name: name.into(),
        slot: slot.map(str::to_owned),
        state: Some("streaming".into()),
        sent_lsn: at,
        write_lsn: at,
        flush_lsn: at,
        replay_lsn: at,
        ..Walsender::default()
    }
}

fn primary(name: &str, time: f64, flushed: u64, replication: Vec<Walsender>) -> ServerSample {
    let server = Server { flush_lsn: Some(Lsn(flushed)), sees_all: true, replication, ..Server::default() };
    ServerSample { name: name.into(), answered_at: time, server: Some(server), ..ServerSample::default() }
}

/// A standby that has flushed and replayed so much; `receiver`: the slot that it uses, if it receives.
fn standby(name: &str, time: f64, flushed: Option<u64>, replayed: u64, receiver: Option<Option<&str>>) -> ServerSample {
    let server = Server {
        in_recovery: true,
        sees_all: true,
        cluster_name: Some("s".into()),
        receive_lsn: flushed.map(Lsn),
        replay_lsn: Some(Lsn(replayed)),
        receiver: receiver.map(|slot| Receiver {
            flushed_lsn: flushed.map(Lsn),
            slot_name: slot.map(str::to_owned),
            ..Receiver::default()
        }),
        ..Server::default()
    };
    ServerSample { name: name.into(), answered_at: time, server: Some(server), ..ServerSample::default() }
}

fn sample(time: f64, servers: Vec<ServerSample>) -> Sample {
    Sample { time, servers, ..Sample::default() }
}

/// Found by a review: a standby that was cut off was taken for the only other one, which nobody had named, and its lag for a slow disk.
#[test]
fn one_that_receives_nothing_is_nobody_elses_walsender() {
    let mut observer = Observer::default();
    observer.look(&sample(1.0, vec![primary("p:1", 1.0, 1000, vec![])]));
    let cut_off = standby("a:1", 9.0, Some(1000), 1000, None);
    let servers = vec![primary("p:1", 9.0, 9000, vec![sender("b", None, 9000)]), cut_off.clone()];
    let view = observer.look(&sample(9.0, servers));
    let of = |view: &View, address: &str| view.standbys.iter().find(|one| one.address == address).cloned().unwrap();
    let found = of(&view, "a:1");
    assert_eq!((found.connected, found.parts.as_slice()), (false, &[(Part::NotConnected, 8.0)][..]));
    // Of one name, and the other has the slot.
    let servers = vec![
        primary("p:1", 9.0, 9000, vec![sender("s", Some("b"), 9000)]),
        cut_off,
        standby("b:1", 9.0, Some(9000), 9000, Some(Some("b"))),
    ];
    let view = observer.look(&sample(9.0, servers));
    assert_eq!((of(&view, "a:1").connected, of(&view, "b:1").connected), (false, true));
    // One that does not answer comes after one that does.
    let silent = ServerSample { error: Some("gone".into()), ..standby("a:1", 9.0, Some(1000), 1000, Some(None)) };
    let servers = vec![
        primary("p:1", 9.0, 9000, vec![sender("s", None, 9000)]),
        silent,
        standby("b:1", 9.0, Some(9000), 9000, Some(None)),
    ];
    let view = observer.look(&sample(9.0, servers));
    assert_eq!((of(&view, "a:1").connected, of(&view, "b:1").connected), (false, true));
}

/// Found by a review: the lag was shown, and beside it "no lag", or a part that was longer than all of it.
#[test]
fn parts_are_the_lag_also_where_nothing_is_received() {
    let lag = |standby: ServerSample| {
        let mut observer = Observer::default();
        for time in [0.0, 100.0] {
            let servers = vec![primary("p:1", time, 1000 + time as u64 * 100, vec![]), standby.clone()];
            let view = observer.look(&sample(time, servers));
            let found = view.standbys[0].clone();
            if time > 0.0 {
                return (found.replay.seconds.unwrap(), found.parts);
            }
        }
        unreachable!()
    };
    // It has never received anything, from an archive or not.
    assert_eq!(lag(standby("s:1", 100.0, None, 1000, None)), (100.0, vec![(Part::NotConnected, 100.0)]));
    let mut archive = standby("s:1", 100.0, None, 1000, None);
    archive.server.as_mut().unwrap().settings.insert("restore_command".into(), "cp /archive/%f %p".into());
    assert_eq!(lag(archive), (100.0, vec![(Part::WalFetch, 100.0)]));
    // It received long ago, and has had the rest from an archive.
    assert_eq!(lag(standby("s:1", 100.0, Some(1000), 6000, None)), (50.0, vec![(Part::NotConnected, 50.0)]));
    assert_eq!(lag(standby("s:1", 100.0, Some(1000), 11_000, None)), (0.0, vec![]));
}

/// Found by a review: the one that died stayed the primary, and its standbys had no lag that anybody knew.
#[test]
fn one_that_took_over_is_the_primary() {
    let mut observer = Observer::default();
    let servers = vec![primary("a:1", 1.0, 1000, vec![]), standby("b:1", 1.0, Some(1000), 1000, None)];
    assert_eq!(observer.look(&sample(1.0, servers)).primary, "a:1");
    let dead = ServerSample { error: Some("gone".into()), ..primary("a:1", 1.0, 1000, vec![]) };
    let view = observer.look(&sample(2.0, vec![dead.clone(), primary("b:1", 2.0, 2000, vec![])]));
    assert_eq!((view.primary.as_str(), view.error, view.flushed), ("b:1", None, Some(Lsn(2000))));
    assert_eq!(view.notes, ["a:1: it was a primary, and does not answer: gone"]);
    // Until then it is the one that does not answer.
    let view = observer.look(&sample(2.0, vec![dead, standby("b:1", 1.0, Some(1000), 1000, None)]));
    assert_eq!((view.primary.as_str(), view.error.as_deref()), ("a:1", Some("gone")));
    assert_eq!((view.standbys[0].state.as_str(), view.slots.len()), (UNKNOWN, 0));
    // Nobody has ever answered that is one.
    let view = Observer::default().look(&sample(2.0, vec![standby("b:1", 1.0, Some(1000), 1000, None)]));
    assert_eq!((view.standbys[0].connected, view.standbys[0].state.as_str()), (false, UNKNOWN));
}
