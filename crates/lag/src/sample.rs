//! What servers tell about replication at one moment. A recording is a line of JSON for each [`Sample`].
//!
//! What a server does not have, or does not let its user see, is `None`: older servers have fewer views, and newer ones may
//! have lost some. Unknown keys are passed over.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use walrider_layout::Lsn;
use walrider_observe::status::{StandbyStatus, text};

use crate::content::WalContent;

/// What [`Sample::schema_version`] is; raised when a key goes, or means something else.
pub const SCHEMA_VERSION: u32 = 1;

/// All servers that are watched, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Seconds since 1970, of the clock here.
    pub time: f64,
    /// In the order of the command line.
    pub servers: Vec<ServerSample>,
}

impl Sample {
    /// The primary: of several the first that answers. One that died is still there beside the one that took over.
    pub fn primary(&self) -> Option<(&ServerSample, &Server)> {
        let primaries = || {
            let said = self.servers.iter().filter_map(|at| Some((at, at.server.as_ref()?)));
            said.filter(|(_, server)| !server.in_recovery)
        };
        primaries().find(|(at, _)| at.error.is_none()).or_else(|| primaries().next())
    }
}

/// One server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerSample {
    /// Host and port, without user and password.
    pub name: String,
    /// Seconds since 1970 when it answered, of the clock here.
    pub answered_at: f64,
    /// How long the answer took, in seconds.
    pub took: f64,
    /// Why there is no newer answer; the rest is from before then.
    pub error: Option<String>,
    /// What a PostgreSQL server says.
    pub server: Option<Server>,
    /// What `walrider standby` says (`/status`).
    pub walrider: Option<StandbyStatus>,
    /// What the process that replays was seen doing since the last sample: a wait event as `Type:Event`, empty for none, and how
    /// often.
    pub replaying: BTreeMap<String, u32>,
    /// The same of the process that receives.
    pub receiving: BTreeMap<String, u32>,
    /// What the system says of the process that replays, where this runs on the same host.
    pub process: Option<Process>,
    /// What its WAL was last made of, if somebody asked.
    pub wal: Option<WalContent>,
}

/// What `/proc` says of a process (`proc_pid_stat(5)`, `proc_pid_io(5)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// `S`, `R`, `D`, `T`, ...
    pub state: char,
    /// Processor time in the program, in seconds.
    pub user_seconds: f64,
    /// Processor time in the system, in seconds.
    pub system_seconds: f64,
    /// Time it waited for disks, in seconds (`delayacct_blkio_ticks`); zero where the system does not count it.
    pub block_io_seconds: f64,
    /// Bytes read from disks; `None` where it is not ours to see.
    pub read_bytes: Option<u64>,
    /// Bytes written to them.
    pub write_bytes: Option<u64>,
    /// Calls of `read` and the like.
    pub read_calls: Option<u64>,
    /// Calls of `write` and the like.
    pub write_calls: Option<u64>,
    /// `auditd` runs on its host.
    pub auditd: bool,
}

/// What one PostgreSQL server says. Times are in seconds, of its clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// Its clock, since 1970.
    pub now: f64,
    /// `server_version_num`.
    pub version: u32,
    /// `pg_is_in_recovery()`.
    pub in_recovery: bool,
    /// When the postmaster began.
    pub started_at: f64,
    /// Of the cluster, as text.
    pub system_identifier: Option<String>,
    /// `cluster_name`
    pub cluster_name: Option<String>,
    /// `pg_current_wal_insert_lsn()`
    #[serde(with = "text")]
    pub insert_lsn: Option<Lsn>,
    /// `pg_current_wal_flush_lsn()`
    #[serde(with = "text")]
    pub flush_lsn: Option<Lsn>,
    /// `pg_last_wal_receive_lsn()`
    #[serde(with = "text")]
    pub receive_lsn: Option<Lsn>,
    /// `pg_last_wal_replay_lsn()`
    #[serde(with = "text")]
    pub replay_lsn: Option<Lsn>,
    /// `pg_last_xact_replay_timestamp()`, since 1970.
    pub replayed_commit: Option<f64>,
    /// `pg_is_wal_replay_paused()`
    pub paused: Option<bool>,
    /// Whether this user may see what other sessions do (`pg_read_all_stats`).
    pub sees_all: bool,
    /// `pg_stat_replication`
    pub replication: Vec<Walsender>,
    /// `pg_replication_slots`
    pub slots: Vec<Slot>,
    /// `pg_stat_wal_receiver`
    pub receiver: Option<Receiver>,
    /// The process that replays.
    pub startup: Option<Backend>,
    /// Sessions that wait for a synchronous standby.
    pub sync_waiters: Option<u64>,
    /// Sessions by what they wait for, as `Type:Event`; empty for none. Active ones only.
    pub active: BTreeMap<String, u64>,
    /// `pg_stat_wal`
    pub wal: Option<WalStats>,
    /// Checkpoints or restartpoints, timed and requested.
    pub checkpoints: Option<Checkpoints>,
    /// Queries cancelled for replay, by reason, in all databases.
    pub conflicts: BTreeMap<String, u64>,
    /// `pg_stat_recovery_prefetch`
    pub prefetch: Option<Prefetch>,
    /// `pg_stat_archiver`
    pub archiver: Option<Archiver>,
    /// Of all databases: transactions committed.
    pub commits: Option<u64>,
    /// Settings that matter for replication, as `pg_settings` shows them, in its units.
    pub settings: BTreeMap<String, String>,
    /// Extensions in the database that is connected to.
    pub extensions: Vec<String>,
}

/// A standby as its primary sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Walsender {
    /// Of the walsender.
    pub pid: i64,
    /// As the standby calls itself.
    pub application_name: String,
    /// Where it is, if not on the same host.
    pub client_addr: Option<String>,
    /// `streaming`, `catchup`, `backup`, ...
    pub state: Option<String>,
    /// `async`, `sync`, `potential`, `quorum`.
    pub sync_state: Option<String>,
    /// The slot that it uses.
    pub slot: Option<String>,
    /// Sent.
    #[serde(with = "text")]
    pub sent_lsn: Option<Lsn>,
    /// In the standby's operating system.
    #[serde(with = "text")]
    pub write_lsn: Option<Lsn>,
    /// Durable there.
    #[serde(with = "text")]
    pub flush_lsn: Option<Lsn>,
    /// Replayed there.
    #[serde(with = "text")]
    pub replay_lsn: Option<Lsn>,
    /// How long recent WAL took until that was reported.
    pub write_lag: Option<f64>,
    /// The same for its flush.
    pub flush_lag: Option<f64>,
    /// The same for its replay.
    pub replay_lag: Option<f64>,
    /// Since the standby said something.
    pub reply_age: Option<f64>,
    /// What the walsender waits for, as `Type:Event`.
    pub wait: Option<String>,
    /// It sends what is decoded, not WAL.
    pub logical: bool,
}

/// A replication slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slot {
    /// Its name.
    pub slot_name: String,
    /// `physical` or `logical`.
    pub slot_type: String,
    /// Somebody uses it.
    pub active: bool,
    /// WAL is kept from there on.
    #[serde(with = "text")]
    pub restart_lsn: Option<Lsn>,
    /// `reserved`, `extended`, `unreserved`, `lost`.
    pub wal_status: Option<String>,
    /// Bytes until it may be lost.
    pub safe_wal_size: Option<i64>,
}

/// The WAL receiver of a standby.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Receiver {
    /// Its process.
    pub pid: i64,
    /// `streaming`, `waiting`, ...
    pub status: Option<String>,
    /// In the operating system.
    #[serde(with = "text")]
    pub written_lsn: Option<Lsn>,
    /// Durable.
    #[serde(with = "text")]
    pub flushed_lsn: Option<Lsn>,
    /// What the primary last said it has.
    #[serde(with = "text")]
    pub latest_end_lsn: Option<Lsn>,
    /// When the primary sent its last message, since 1970, of the primary's clock.
    pub sent_at: Option<f64>,
    /// When that came in.
    pub received_at: Option<f64>,
    /// The slot in use.
    pub slot_name: Option<String>,
    /// The primary.
    pub sender_host: Option<String>,
    /// Its port.
    pub sender_port: Option<i64>,
    /// `application_name` of its connection.
    pub application_name: Option<String>,
    /// What it waits for, as `Type:Event`.
    pub wait: Option<String>,
}

/// A process of the server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Backend {
    /// Its id.
    pub pid: u32,
    /// What it waits for, as `Type:Event`.
    pub wait: Option<String>,
}

/// How much WAL is written, since the statistics were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WalStats {
    /// Records.
    pub records: u64,
    /// Full-page images.
    pub fpi: u64,
    /// Bytes.
    pub bytes: u64,
    /// How often WAL was written because its buffers were full.
    pub buffers_full: u64,
}

/// Checkpoints, since the statistics were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Checkpoints {
    /// Because it was time.
    pub timed: u64,
    /// Because there was so much WAL, or somebody asked.
    pub requested: u64,
}

/// Reading ahead of replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prefetch {
    /// Blocks read ahead.
    pub prefetch: u64,
    /// Blocks that were in the buffers already.
    pub hit: u64,
    /// Blocks ahead that are being looked at.
    pub block_distance: i64,
    /// Reads under way.
    pub io_depth: i64,
}

/// The archiver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Archiver {
    /// Files archived.
    pub archived: u64,
    /// Attempts that failed.
    pub failed: u64,
    /// The last file that failed.
    pub last_failed_wal: Option<String>,
    /// When, since 1970.
    pub last_failed_at: Option<f64>,
    /// When the last one was archived.
    pub last_archived_at: Option<f64>,
}

impl Server {
    /// A setting as a number.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.settings.get(name)?.parse().ok()
    }

    /// A setting that is on or off.
    pub fn is_on(&self, name: &str) -> Option<bool> {
        self.settings.get(name).map(|value| value == "on")
    }

    /// 18 for 18.6.
    pub fn major(&self) -> u32 {
        self.version / 10_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is recorded is what was seen, to the last bit: explain-lag says the same as top did. `serde_json` rounds as it reads
    /// unless its `float_roundtrip` is on.
    #[test]
    fn times_come_back_as_they_were() {
        for nth in 0..10_000 {
            let sample = Sample { time: 1.78e9 + f64::from(nth) * 0.123_456_7, ..Sample::default() };
            let text = serde_json::to_string(&sample).unwrap();
            assert_eq!(serde_json::from_str::<Sample>(&text).unwrap().time.to_bits(), sample.time.to_bits(), "{text}");
        }
    }
}
