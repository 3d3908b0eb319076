//! What is wrong on a primary, and with servers that do not answer.

use super::{Finding, Series, Severity, Spoken};
use crate::words::bytes;

/// A slot that nobody uses may hold so much before it is worth a word.
const SLOT_BYTES: u64 = 64 << 20;
/// So many bytes in full-page images, as a share of all WAL, are worth a word.
const IMAGE_SHARE: f64 = 0.4;
/// WAL at less than this a second costs nobody anything.
const LEAST_WAL_RATE: f64 = 100_000.0;
/// So many waits for buffers a second slow commits down.
const FULL_BUFFERS: f64 = 1.0;

pub fn look(series: &Series, findings: &mut Vec<Finding>) {
    silent_servers(series, findings);
    for spoken in series.servers() {
        unsafe_settings(&spoken, findings);
        rights(&spoken, findings);
    }
    let Some(primary) = series.primary() else {
        findings.push(Finding {
            rule: "no_primary",
            severity: Severity::Notice,
            subject: String::new(),
            what: "no primary is among the servers: what is sent, and how old it is, is not seen".into(),
            evidence: Vec::new(),
            advice: "name the primary, too".into(),
            cost: String::new(),
        });
        return;
    };
    synchronous(series, &primary, findings);
    slots(series, &primary, findings);
    archiver(&primary, findings);
    checkpoints(series, &primary, findings);
    images(series, &primary, findings);
    buffers(series, &primary, findings);
    auditing(&primary, findings);
}

fn silent_servers(series: &Series, findings: &mut Vec<Finding>) {
    for at in series.samples.last().map_or(&[][..], |sample| &sample.servers) {
        let Some(error) = &at.error else { continue };
        findings.push(Finding {
            rule: "no_answer",
            severity: Severity::Warning,
            subject: at.name.clone(),
            what: "it does not answer".into(),
            evidence: vec![error.clone()],
            advice: "look whether it runs, takes connections, and whether something on it hangs".into(),
            cost: String::new(),
        });
    }
}

fn unsafe_settings(spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    for (name, danger) in [
        (
            "fsync",
            "a power cut or a crash of the system leaves a cluster that cannot be trusted, and standbys that have what it lost",
        ),
        ("full_page_writes", "a power cut may leave torn pages that recovery cannot mend"),
    ] {
        if spoken.last.is_on(name) == Some(false) {
            findings.push(Finding {
                rule: "unsafe_setting",
                severity: Severity::Critical,
                subject: spoken.name().to_owned(),
                what: format!("{name} is off: {danger}"),
                evidence: vec![format!("{name} = off")],
                advice: format!("set {name} = on"),
                cost: "commits wait for the disk, as they must".into(),
            });
        }
    }
}

fn rights(spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    if !spoken.last.sees_all {
        findings.push(Finding {
            rule: "rights",
            severity: Severity::Notice,
            subject: spoken.name().to_owned(),
            what: "this user may not see what other sessions wait for, nor where standbys are".into(),
            evidence: vec!["pg_has_role('pg_read_all_stats', 'USAGE') is false".into()],
            advice: "GRANT pg_monitor TO the user that asks".into(),
            cost: "none: it may read statistics and settings".into(),
        });
    }
}

/// Commits wait for a synchronous standby that is not there, or for long.
fn synchronous(series: &Series, primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let server = primary.last;
    let names = server.settings.get("synchronous_standby_names").map_or("", String::as_str);
    let waits = |sample: &crate::sample::Sample| {
        let at = sample.servers.iter().find(|at| at.name == primary.at.name);
        at.and_then(|at| at.server.as_ref()?.sync_waiters).unwrap_or(0)
    };
    let waited = series.samples.iter().filter(|sample| waits(sample) > 0).count();
    let is_synchronous = |state: &Option<String>| matches!(state.as_deref(), Some("sync" | "quorum"));
    let level = server.settings.get("synchronous_commit").map_or("on", String::as_str);
    if names.is_empty() || waited == 0 {
        return;
    }
    if !server.replication.iter().any(|sender| is_synchronous(&sender.sync_state)) {
        findings.push(Finding {
            rule: "no_synchronous_standby",
            severity: Severity::Critical,
            subject: primary.name().to_owned(),
            what: "commits wait, and no standby that they wait for is connected".into(),
            evidence: vec![
                format!("synchronous_standby_names = '{names}'"),
                format!("{} sessions wait (SyncRep)", server.sync_waiters.unwrap_or(0)),
            ],
            advice: "bring such a standby back, or take it out of synchronous_standby_names and reload".into(),
            cost: "without it, a commit that was acknowledged is lost with this server".into(),
        });
    } else if 2 * waited > series.samples.len() {
        let lags: Vec<String> = server
            .replication
            .iter()
            .filter(|sender| is_synchronous(&sender.sync_state))
            .filter_map(|sender| {
                let lag = |lag: Option<f64>| lag.map_or("-".to_owned(), |lag| format!("{:.1} ms", lag * 1e3));
                let (write, flush, replay) = (lag(sender.write_lag), lag(sender.flush_lag), lag(sender.replay_lag));
                (write != "-")
                    .then(|| format!("{}: write {write}, flush {flush}, replay {replay}", sender.application_name))
            })
            .collect();
        findings.push(Finding {
            rule: "synchronous_wait",
            severity: Severity::Notice,
            subject: primary.name().to_owned(),
            what: format!("sessions wait for synchronous standbys most of the time, with synchronous_commit = {level}"),
            evidence: [vec![format!("seen in {waited} of {} samples", series.samples.len())], lags].concat(),
            advice: "where the write lag is most of it, the network is what commits wait for; where the flush lag is more, the \
                     standby's disk: remote_write does not wait for that; where the replay lag is more, remote_apply is what \
                     costs"
                .into(),
            cost: "remote_write: what a standby's system has not written is lost if it and the primary lose power at once".into(),
        });
    }
}

fn slots(series: &Series, primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let server = primary.last;
    let flushed = series.view().and_then(|view| view.flushed);
    let bounded = server.number("max_slot_wal_keep_size").is_some_and(|size| size >= 0.0);
    for slot in &server.slots {
        let held = flushed.zip(slot.restart_lsn).map_or(0, |(flushed, restart)| flushed.0.saturating_sub(restart.0));
        let status = slot.wal_status.as_deref().unwrap_or_default();
        let lost = matches!(status, "lost" | "unreserved");
        if !lost && (slot.active || held < SLOT_BYTES) {
            continue;
        }
        let evidence = vec![
            format!("slot \"{}\" is {}", slot.slot_name, if slot.active { "active" } else { "not active" }),
            format!("it holds {} of WAL, wal_status = {status}", bytes(held as f64)),
        ];
        findings.push(Finding {
            rule: if lost { "slot_lost" } else { "slot_unused" },
            severity: Severity::Warning,
            subject: primary.name().to_owned(),
            what: match (lost, bounded) {
                (true, _) => format!("slot \"{}\" has lost WAL, or is about to", slot.slot_name),
                (false, true) => format!("nobody uses slot \"{}\", which keeps WAL", slot.slot_name),
                (false, false) => {
                    format!("nobody uses slot \"{}\", which keeps WAL until the disk is full", slot.slot_name)
                }
            },
            evidence,
            advice: match lost {
                true => {
                    "its standby needs an archive, or a new base backup; then drop the slot and make it again".into()
                }
                false => "bring its standby back, or drop the slot: SELECT pg_drop_replication_slot(...); set \
                          max_slot_wal_keep_size"
                    .into(),
            },
            cost: "a standby whose slot is dropped may need a new base backup".into(),
        });
    }
}

fn archiver(primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let Some(archiver) = &primary.last.archiver else { return };
    // Statistics outlive it: nothing of it fails any more.
    let off = primary.last.settings.get("archive_mode").is_some_and(|mode| mode == "off");
    if off || archiver.last_failed_at <= archiver.last_archived_at || archiver.last_failed_at.is_none() {
        return;
    }
    let failed = primary.grown(|server| Some(server.archiver.as_ref()?.failed));
    let command = primary.last.settings.get("archive_command").cloned().unwrap_or_default();
    findings.push(Finding {
        rule: "archiver_fails",
        severity: Severity::Critical,
        subject: primary.name().to_owned(),
        what: "WAL is not archived, and stays until the disk is full".into(),
        evidence: vec![
            format!("the last attempt failed, of {}", archiver.last_failed_wal.clone().unwrap_or_default()),
            format!("{} attempts failed meanwhile, {} in all", failed.unwrap_or(0), archiver.failed),
            format!("archive_command = '{command}'"),
        ],
        advice: "look into the server's log for what the command said".into(),
        cost: String::new(),
    });
}

/// Checkpoints come because of the amount of WAL, not because it is time.
fn checkpoints(series: &Series, primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let requested = primary.grown(|server| Some(server.checkpoints?.requested)).unwrap_or(0);
    let timed = primary.grown(|server| Some(server.checkpoints?.timed)).unwrap_or(0);
    let rate = series.view().and_then(|view| view.wal_rate).unwrap_or(0.0);
    let (Some(size), Some(timeout)) = (primary.last.number("max_wal_size"), primary.last.number("checkpoint_timeout"))
    else {
        return;
    };
    // Two thirds of the way, with the default completion target, the next one begins (`CalculateCheckpointSegments`).
    let target = primary.last.number("checkpoint_completion_target").unwrap_or(0.9);
    let distance = size * 1_048_576.0 / (1.0 + target);
    let wanted = rate * timeout;
    if requested < 2 || requested <= timed || rate < LEAST_WAL_RATE {
        return;
    }
    findings.push(Finding {
        rule: "max_wal_size",
        severity: Severity::Warning,
        subject: primary.name().to_owned(),
        what: "max_wal_size is too small: checkpoints come because there is so much WAL, and each of them makes full-page images".into(),
        evidence: vec![
            format!("{requested} requested checkpoints and {timed} timed ones in {:.0} s", series.seconds()),
            format!("{}/s of WAL fill the {} between two of them in {:.0} s", bytes(rate), bytes(distance), distance / rate),
        ],
        advice: format!(
            "set max_wal_size to at least {}, for one checkpoint each checkpoint_timeout = {timeout:.0} s",
            bytes(wanted * (1.0 + target))
        ),
        cost: "that much disk in pg_wal, and longer recovery after a crash".into(),
    });
}

/// Full-page images are most of the WAL.
fn images(series: &Series, primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let (Some(images), Some(written)) =
        (primary.grown(|server| Some(server.wal?.fpi)), primary.grown(|server| Some(server.wal?.bytes)))
    else {
        return;
    };
    let rate = written as f64 / series.seconds().max(0.1);
    let compression = primary.last.settings.get("wal_compression").map_or("off", String::as_str);
    // Without compression an image is a page, less a hole.
    let share = (images * 8192) as f64 / written.max(1) as f64;
    if rate < LEAST_WAL_RATE || share < IMAGE_SHARE || compression != "off" {
        return;
    }
    findings.push(Finding {
        rule: "full_page_images",
        severity: Severity::Notice,
        subject: primary.name().to_owned(),
        what: "most of the WAL is full-page images".into(),
        evidence: vec![format!("{images} images in {} of WAL, up to {:.0} % of it", bytes(written as f64), (share * 100.0).min(100.0))],
        advice: "make checkpoints rarer (max_wal_size, checkpoint_timeout); where the network or the archive is the limit, \
                 wal_compression = lz4"
            .into(),
        cost: "compression costs processor time on the primary and in replay; where the network allows, off replays fastest".into(),
    });
}

fn buffers(series: &Series, primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let full = primary.grown(|server| Some(server.wal?.buffers_full)).unwrap_or(0);
    let rate = full as f64 / series.seconds().max(0.1);
    if rate < FULL_BUFFERS {
        return;
    }
    let buffers = primary.last.number("wal_buffers").map_or("?".to_owned(), |pages| bytes(pages * 8192.0));
    findings.push(Finding {
        rule: "wal_buffers",
        severity: Severity::Warning,
        subject: primary.name().to_owned(),
        what: "sessions write WAL themselves, because its buffers are full".into(),
        evidence: vec![format!("{full} times in {:.0} s, with wal_buffers = {buffers}", series.seconds())],
        advice: "set wal_buffers to 64MB or more; a restart is needed".into(),
        cost: "that much shared memory".into(),
    });
}

fn auditing(primary: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let libraries = primary.last.settings.get("shared_preload_libraries").map_or("", String::as_str);
    if libraries.contains("pgaudit") {
        findings.push(Finding {
            rule: "pgaudit",
            severity: Severity::Notice,
            subject: primary.name().to_owned(),
            what: "pgaudit is loaded: each statement that it logs costs processor time and log writes".into(),
            evidence: vec![format!("shared_preload_libraries = '{libraries}'")],
            advice: "log with it what the rules ask for, and no more (pgaudit.log)".into(),
            cost: String::new(),
        });
    }
}
