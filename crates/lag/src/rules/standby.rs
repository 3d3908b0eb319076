//! What is wrong with a standby.

use std::collections::BTreeMap;

use super::{Finding, Series, Severity, Spoken, mean};
use crate::sample::{Process, ServerSample};
use crate::split::{Part, Standby, receive_part, replay_part};
use crate::words::bytes;

/// Lag of less is none, in seconds, and bytes.
const LEAST_LAG: (f64, u64) = (1.0, 1 << 20);
/// A process that replays for so much of the time is near its limit.
const BUSY: f64 = 0.8;
/// Replay that waits for disks so much of the time would gain by reading ahead.
const READS: f64 = 0.3;
/// Replay that computes for so much of the time, most of it in the system, makes too many calls.
const COMPUTES: f64 = 0.5;
/// A process that receives and is in fsync for so much of the time has a slow disk.
const SYNCS: f64 = 0.5;

pub fn look(series: &Series, findings: &mut Vec<Finding>) {
    let Some(view) = series.view() else { return };
    for standby in &view.standbys {
        if !standby.connected && !view.primary.is_empty() && view.error.is_none() {
            not_connected(standby, findings);
        }
        bottleneck(series, standby, findings);
        headroom(series, standby, findings);
    }
    for spoken in series.servers().filter(|spoken| spoken.last.in_recovery) {
        conflicts(series, &spoken, findings);
        prefetch(series, &spoken, findings);
        fsync(series, &spoken, findings);
        file_sizes(&spoken, findings);
        host(series, &spoken, findings);
    }
}

fn not_connected(standby: &Standby, findings: &mut Vec<Finding>) {
    let lag = standby.replay.seconds.map_or("?".to_owned(), |seconds| {
        format!("{}{seconds:.0} s", if standby.replay.at_least { "more than " } else { "" })
    });
    findings.push(Finding {
        rule: "not_connected",
        severity: Severity::Critical,
        subject: standby.name.clone(),
        what: "it is not connected to the primary".into(),
        evidence: vec![
            "the primary has no walsender for it".into(),
            format!(
                "it has replayed up to {}, {lag} ago",
                standby.replay.lsn.map_or("?".to_owned(), |lsn| lsn.to_string())
            ),
        ],
        advice: "look into its log: what walreceiver says of primary_conninfo, of the slot, or of WAL that was removed"
            .into(),
        cost: String::new(),
    });
}

/// The means of all views: what lag is made of, in seconds.
fn mean_parts(series: &Series, standby: &Standby) -> Vec<(Part, f64)> {
    let mut sums: BTreeMap<Part, f64> = BTreeMap::new();
    let mut views = 0.0;
    // The first has not been looked at for long.
    for standby in series.of(standby).skip(1) {
        views += 1.0;
        standby.parts.iter().for_each(|(part, seconds)| *sums.entry(*part).or_default() += seconds);
    }
    let mut parts: Vec<_> = sums.into_iter().map(|(part, sum)| (part, sum / f64::max(views, 1.0))).collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    parts
}

/// Seconds that replay is behind, as a mean of all views.
fn mean_lag(series: &Series, standby: &Standby) -> f64 {
    mean(series.of(standby).skip(1).filter_map(|standby| standby.replay.seconds)).unwrap_or(0.0)
}

fn bottleneck(series: &Series, standby: &Standby, findings: &mut Vec<Finding>) {
    let lag = mean_lag(series, standby);
    let behind = standby.replay.bytes.unwrap_or(0);
    let parts = mean_parts(series, standby);
    let Some((worst, seconds)) = parts.first().copied().filter(|_| lag >= LEAST_LAG.0 && behind >= LEAST_LAG.1) else {
        return;
    };
    if worst == Part::NotConnected {
        // Said already.
        return;
    }
    let (what, advice, cost) = explain(worst);
    let shares: Vec<String> = parts.iter().map(|(part, seconds)| format!("{} {seconds:.1} s", part.name())).collect();
    let seen = |shares: &BTreeMap<String, f64>| {
        let mut shares: Vec<_> = shares.iter().collect();
        shares.sort_by(|a, b| b.1.total_cmp(a.1));
        let word = |wait: &str| if wait.is_empty() { "computes".to_owned() } else { wait.to_owned() };
        shares
            .iter()
            .take(3)
            .map(|(wait, share)| format!("{} {:.0} %", word(wait), *share * 100.0))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut evidence = vec![format!("{lag:.1} s and {} behind; of that {}", bytes(behind as f64), shares.join(", "))];
    evidence.extend((!standby.receiving.is_empty()).then(|| format!("walreceiver: {}", seen(&standby.receiving))));
    evidence.extend((!standby.replaying.is_empty()).then(|| {
        format!("{}: {}", if standby.walrider { "replay" } else { "startup process" }, seen(&standby.replaying))
    }));
    evidence.extend((worst == Part::ReplayCpu).then(|| settings_that_cost(series)).flatten());
    findings.push(Finding {
        rule: rule_of(worst),
        severity: if worst == Part::ApplyDelay { Severity::Notice } else { Severity::Warning },
        subject: standby.name.clone(),
        what: format!("{what} ({seconds:.1} of {lag:.1} s)"),
        evidence,
        advice: advice.into(),
        cost: cost.into(),
    });
}

fn rule_of(part: Part) -> &'static str {
    match part {
        Part::NotConnected => "not_connected",
        Part::NotSent => "lag_not_sent",
        Part::Network => "lag_network",
        Part::StandbyWrite => "lag_standby_write",
        Part::StandbyFsync => "lag_standby_fsync",
        Part::Replay => "lag_replay",
        Part::ReplayCpu => "lag_replay_cpu",
        Part::ReplayRead => "lag_replay_read",
        Part::ReplayWrite => "lag_replay_write",
        Part::WalFetch => "lag_wal_fetch",
        Part::Conflict => "lag_conflict",
        Part::ApplyDelay => "lag_apply_delay",
        Part::Paused => "lag_paused",
        Part::Stopped => "lag_stopped",
        Part::ReplayOther => "lag_replay_other",
    }
}

/// What it means that most of the lag is this, what to do, and what that costs.
fn explain(part: Part) -> (&'static str, &'static str, &'static str) {
    match part {
        Part::NotConnected => ("nothing is sent", "", ""),
        Part::NotSent => (
            "the primary does not send: its walsender does something else, or does not get on",
            "look at the walsender's wait event and at the primary's processors; WAL that is read from disk again (a standby far \
             behind) competes with its other reads",
            "",
        ),
        Part::Network => (
            "the network is slower than the WAL",
            "measure the line (iperf3); TCP windows over a long one: raise net.core.rmem_max and wmem_max; wal_compression = lz4 makes \
             full-page images smaller",
            "compression costs processor time on the primary, and in replay",
        ),
        Part::StandbyWrite => (
            "the standby writes WAL slower than it comes",
            "look at the disk of its pg_wal (iostat -x); give pg_wal a disk of its own",
            "",
        ),
        Part::StandbyFsync => (
            "the standby's fsync is slow: nothing is received while it lasts",
            "look at the disk of its pg_wal (iostat -x, pg_test_fsync); give pg_wal a disk with a write cache that survives a power \
             cut; walrider standby receives and makes durable side by side",
            "",
        ),
        Part::Replay => (
            "WAL is there, and is not replayed",
            "name the standby, too: then it is seen what its replay waits for",
            "",
        ),
        Part::ReplayCpu => (
            "one process replays, and computes all the time",
            "make less WAL (fewer full-page images, fewer indexes, no wal_log_hints), or replay it in parallel: walrider standby",
            "nobody can read while Walrider replays: with --readable PostgreSQL has the directory near the end of WAL",
        ),
        Part::ReplayRead => (
            "replay waits for pages from disk",
            "recovery_prefetch = on (try is the default), maintenance_io_concurrency at what the disk can take, more \
             shared_buffers; full_page_writes makes most reads needless right after a checkpoint",
            "memory, and reads at once",
        ),
        Part::ReplayWrite => (
            "replay waits for files that it writes or extends",
            "look at the data disk of the standby (iostat -x); more shared_buffers, so that replay need not write pages itself",
            "memory",
        ),
        Part::WalFetch => (
            "replay waits for WAL from the archive",
            "restore_command takes longer than replay: an archive that fetches ahead (pgbackrest archive-async), or streaming with a \
             slot, so that the archive is not needed; walrider fetches eight files at once (--fetch-jobs)",
            "",
        ),
        Part::Conflict => (
            "replay waits for queries on the standby",
            "hot_standby_feedback = on, or a smaller max_standby_streaming_delay; send long queries to a standby of their own",
            "feedback keeps dead rows on the primary for as long as the queries last; a smaller delay cancels them",
        ),
        Part::ApplyDelay => ("recovery_min_apply_delay is set", "nothing, if that is wanted", ""),
        Part::Paused => ("replay is paused", "SELECT pg_wal_replay_resume(), or walrider resume", ""),
        Part::Stopped => {
            ("the startup process is stopped by a signal", "kill -CONT its pid; find out who stopped it", "")
        }
        Part::ReplayOther => (
            "replay waits for something else",
            "look up the wait event of the startup process in PostgreSQL's chapter on monitoring",
            "",
        ),
    }
}

/// It keeps up, and would not with a little more WAL.
fn headroom(series: &Series, standby: &Standby, findings: &mut Vec<Finding>) {
    let busy = mean(series.of(standby).skip(1).filter_map(|standby| standby.speed.utilisation));
    let capacity = mean(series.of(standby).skip(1).filter_map(|standby| standby.speed.capacity));
    let (Some(busy), Some(capacity)) = (busy, capacity) else { return };
    if busy < BUSY || mean_lag(series, standby) >= LEAST_LAG.0 {
        return;
    }
    findings.push(Finding {
        rule: "little_headroom",
        severity: Severity::Notice,
        subject: standby.name.clone(),
        what: format!("replay is near its limit: it falls behind above {}/s of WAL", bytes(capacity)),
        evidence: vec![format!("the startup process is busy {:.0} % of the time", busy * 100.0)],
        advice: "make less WAL, or replay it in parallel: walrider standby".into(),
        cost:
            "nobody can read while Walrider replays: with --readable PostgreSQL has the directory near the end of WAL"
                .into(),
    });
}

fn conflicts(series: &Series, spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let grown: Vec<String> = spoken
        .last
        .conflicts
        .iter()
        .filter_map(|(reason, now)| {
            let grown = now.checked_sub(*spoken.first.conflicts.get(reason)?)?;
            (grown > 0).then(|| format!("{grown} for {reason}"))
        })
        .collect();
    if grown.is_empty() {
        return;
    }
    findings.push(Finding {
        rule: "queries_cancelled",
        severity: Severity::Warning,
        subject: spoken.name().to_owned(),
        what: "queries on the standby are cancelled for replay".into(),
        evidence: vec![format!("{} in {:.0} s", grown.join(", "), series.seconds())],
        advice: "hot_standby_feedback = on, a larger max_standby_streaming_delay, or a standby of their own for long queries".into(),
        cost: "feedback keeps dead rows on the primary; a larger delay makes replay wait".into(),
    });
}

fn prefetch(series: &Series, spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let reads = mean(looks(series, spoken, |at| &at.replaying, |wait| replay_part(wait) == Some(Part::ReplayRead)));
    let setting = spoken.last.settings.get("recovery_prefetch").map(String::as_str);
    let depth = spoken.last.number("maintenance_io_concurrency");
    let starved = setting == Some("off") || depth == Some(0.0);
    let Some(reads) = reads.filter(|reads| starved && *reads >= READS) else { return };
    findings.push(Finding {
        rule: "recovery_prefetch",
        severity: Severity::Warning,
        subject: spoken.name().to_owned(),
        what: "replay waits for pages from disk, and does not read ahead".into(),
        evidence: vec![
            format!("the startup process waits for reads {:.0} % of the time", reads * 100.0),
            format!(
                "recovery_prefetch = {}, maintenance_io_concurrency = {}",
                setting.unwrap_or("?"),
                depth.unwrap_or(0.0)
            ),
        ],
        advice: "set recovery_prefetch = try and maintenance_io_concurrency = 10 or more".into(),
        cost: "reads at once on the data disk".into(),
    });
}

/// The process that receives is in fsync most of the time. `pg_stat_io` has the times of its fsyncs only once it ends.
fn fsync(series: &Series, spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let Some(syncs) =
        mean(looks(series, spoken, |at| &at.receiving, |wait| receive_part(wait) == Some(Part::StandbyFsync)))
    else {
        return;
    };
    if syncs < SYNCS {
        return;
    }
    findings.push(Finding {
        rule: "slow_fsync",
        severity: Severity::Warning,
        subject: spoken.name().to_owned(),
        what: "most of the time received WAL is being made durable: commits that wait for that wait for the disk"
            .into(),
        evidence: vec![format!("walreceiver is in fsync {:.0} % of the time", syncs * 100.0)],
        advice: "look at the disk of pg_wal (iostat -x, pg_test_fsync)".into(),
        cost: String::new(),
    });
}

/// How often a process was seen doing something, as a share of the looks of each sample.
fn looks<'a>(
    series: &'a Series,
    spoken: &'a Spoken<'_>,
    process: fn(&ServerSample) -> &BTreeMap<String, u32>,
    does: impl Fn(&str) -> bool + 'a,
) -> impl Iterator<Item = f64> + 'a {
    series.samples.iter().filter_map(move |sample| {
        let seen = process(sample.servers.iter().find(|at| at.name == spoken.at.name)?);
        let all: u32 = seen.values().sum();
        let doing: u32 = seen.iter().filter(|(wait, _)| does(wait)).map(|(_, times)| times).sum();
        (all > 0).then(|| f64::from(doing) / f64::from(all))
    })
}

/// Before 14, replay asks for the size of a file with each record that it looks at (`smgrnblocks`, not cached in recovery).
fn file_sizes(spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    if spoken.last.major() >= 14 || spoken.last.version == 0 {
        return;
    }
    findings.push(Finding {
        rule: "file_sizes",
        severity: Severity::Notice,
        subject: spoken.name().to_owned(),
        what: "this version looks up the size of a file for each record that it replays".into(),
        evidence: vec![format!("server_version_num = {}; since 14 sizes are remembered", spoken.last.version)],
        advice: "count the calls: strace -c -f -p the startup process; upgrade".into(),
        cost: String::new(),
    });
}

/// What the standby's host tells, where that is this one.
fn host(series: &Series, spoken: &Spoken<'_>, findings: &mut Vec<Finding>) {
    let mut processes = series.processes(spoken.name());
    let Some((from, first)) = processes.next() else { return };
    let (to, last) = processes.last().unwrap_or((from, first));
    if last.auditd {
        findings.push(Finding {
            rule: "auditd",
            severity: Severity::Notice,
            subject: spoken.name().to_owned(),
            what: "auditd runs on its host: where it has rules, each system call of replay is looked up in them".into(),
            evidence: vec!["a process auditd".into()],
            advice: "auditctl -l; leave the server's user out of rules for all calls (-a never,exit -F uid=postgres)"
                .into(),
            cost: "what that user does is not audited".into(),
        });
    }
    if to <= from || first.pid != last.pid {
        return;
    }
    let share = |of: fn(&Process) -> f64| (of(&last) - of(&first)) / (to - from);
    let (user, system) = (share(|process| process.user_seconds), share(|process| process.system_seconds));
    if user + system < COMPUTES || system < user {
        return;
    }
    let calls = |of: fn(&Process) -> Option<u64>| Some((of(&last)?.checked_sub(of(&first)?)?) as f64 / (to - from));
    let mut evidence =
        vec![format!("in the system {:.0} % of the time, in itself {:.0} %", system * 100.0, user * 100.0)];
    if let (Some(reads), Some(writes)) = (calls(|process| process.read_calls), calls(|process| process.write_calls)) {
        evidence.push(format!("{reads:.0} reads and {writes:.0} writes a second"));
    }
    findings.push(Finding {
        rule: "system_calls",
        severity: Severity::Notice,
        subject: spoken.name().to_owned(),
        what: "the startup process spends more time in system calls than in replay".into(),
        evidence,
        advice: "count them (strace -c -p its pid): reads and writes go with larger shared_buffers, lseek with PostgreSQL 14, and \
                 what is left may be made slow by auditd or a hypervisor"
            .into(),
        cost: "memory; or an upgrade".into(),
    });
}

/// What makes replay compute, of the settings.
fn settings_that_cost(series: &Series) -> Option<String> {
    let primary = series.primary()?;
    let is = |name: &str, value: &str| primary.last.settings.get(name).is_some_and(|set| set == value);
    let costs = [
        (is("data_checksums", "on"), "data_checksums = on (of each page that is read or written)"),
        (is("wal_compression", "pglz"), "wal_compression = pglz (lz4 is quicker to undo)"),
        (is("wal_compression", "zstd"), "wal_compression = zstd (lz4 is quicker to undo)"),
        (is("wal_log_hints", "on"), "wal_log_hints = on"),
    ];
    let costs: Vec<&str> = costs.into_iter().filter_map(|(is, words)| is.then_some(words)).collect();
    (!costs.is_empty()).then(|| format!("what also costs replay processor time: {}", costs.join(", ")))
}
