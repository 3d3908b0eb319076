//! The status of a standby, or of `walrider receive`, at one moment.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use walrider_layout::positions::WalPositions;
use walrider_layout::{Lsn, POSTGRES_EPOCH, TimelineId};

/// The time that PostgreSQL writes as microseconds since 2000-01-01 00:00 UTC (`TimestampTz`). `None` for zero, which
/// stands for no time at all, and for what is before 1970.
///
/// ```
/// use walrider_observe::status::from_timestamptz;
/// assert_eq!(from_timestamptz(0), None);
/// let time = from_timestamptz(1_500_000).unwrap();
/// assert_eq!(time.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64(), 946_684_801.5);
/// ```
pub fn from_timestamptz(microseconds: i64) -> Option<SystemTime> {
    let since = Duration::from_micros(microseconds.unsigned_abs());
    let epoch = SystemTime::UNIX_EPOCH + POSTGRES_EPOCH;
    match microseconds {
        0 => None,
        1.. => epoch.checked_add(since),
        _ => epoch.checked_sub(since).filter(|&time| time >= SystemTime::UNIX_EPOCH),
    }
}

/// What kind of run this is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Command {
    /// `walrider standby`.
    #[default]
    Standby,
    /// `walrider receive`: nothing is replayed.
    Receive,
}

impl Command {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Command::Standby => "standby",
            Command::Receive => "receive",
        }
    }
}

/// What it is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Taking the directory over.
    #[default]
    Starting,
    /// Replaying WAL from the archive or from `pg_wal`.
    Recovering,
    /// Between two connections to the primary.
    Connecting,
    /// Receiving and replaying.
    Streaming,
    /// The disk is full: nothing is received until there is space.
    WaitingForDisk,
    /// Replay is paused; receiving goes on.
    Paused,
    /// Replaying what is left, to hand the directory over.
    Promoting,
    /// Stopped cleanly, or promoted.
    Stopped,
    /// Stopped by an error.
    Failed,
}

impl State {
    /// All of them.
    pub const ALL: [State; 9] = [
        State::Starting,
        State::Recovering,
        State::Connecting,
        State::Streaming,
        State::WaitingForDisk,
        State::Paused,
        State::Promoting,
        State::Stopped,
        State::Failed,
    ];

    /// As the label of a metric: [`State::name`] without spaces.
    pub fn label(self) -> &'static str {
        match self {
            State::WaitingForDisk => "waiting_for_disk",
            state => state.name(),
        }
    }

    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Recovering => "recovering",
            State::Connecting => "connecting",
            State::Streaming => "streaming",
            State::WaitingForDisk => "waiting for disk",
            State::Paused => "paused",
            State::Promoting => "promoting",
            State::Stopped => "stopped",
            State::Failed => "failed",
        }
    }
}

/// Where each stage stands: ends of what it has done, exclusive; [`Lsn::INVALID`] where nothing is known.
/// `checkpoint_redo <= applied`, `reported <= applied`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// Of WAL on its way. What the others lag behind is counted from the horizon.
    pub wal: WalPositions,
    /// Told to the primary as applied.
    pub reported: Lsn,
    /// The redo pointer of the last restartpoint: a crash makes recovery begin here.
    pub checkpoint_redo: Lsn,
}

impl Positions {
    /// All that may lag behind the horizon, with the names under which users know them.
    pub fn stages(&self) -> [(&'static str, Lsn); 6] {
        [
            ("received", self.wal.received),
            ("written", self.wal.held),
            ("flushed", self.wal.held_durable),
            ("replayed", self.wal.applied),
            ("reported", self.reported),
            ("checkpoint_redo", self.checkpoint_redo),
        ]
    }

    /// Bytes from `lsn` to the horizon; `None` while one of them is not known. What is past the horizon is not behind.
    pub fn behind_bytes(&self, lsn: Lsn) -> Option<u64> {
        (self.wal.horizon.is_valid() && lsn.is_valid()).then(|| self.wal.horizon.0.saturating_sub(lsn.0))
    }
}

/// What replay has done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// Records.
    pub records: u64,
    /// Transactions committed, prepared ones included.
    pub transactions: u64,
    /// Transactions rolled back.
    pub aborts: u64,
    /// Pages read from relation files.
    pub pages_read: u64,
    /// Pages written to them.
    pub pages_written: u64,
    /// Restartpoints made.
    pub restartpoints: u64,
}

/// How long something took, counted by length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Upper bounds of the buckets in seconds, inclusive, ascending.
    pub bounds_seconds: Vec<f64>,
    /// How many fell into each bucket; the last, one more than there are bounds, is what was longer.
    pub counts: Vec<u64>,
    /// All of them together, in seconds.
    pub sum_seconds: f64,
}

impl Histogram {
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// What the spool has done since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spool {
    /// Bytes of WAL written.
    pub bytes: u64,
    /// Calls that wrote them.
    pub writes: u64,
    /// Bytes of WAL written before that to the log of what the primary has not flushed.
    pub early_bytes: u64,
    /// Calls that wrote them.
    pub early_writes: u64,
    /// How long each fsync took.
    pub fsync: Histogram,
    /// Segments made ahead of their use.
    pub segments_created: u64,
    /// Segments renamed to future ones.
    pub segments_recycled: u64,
    /// Segments removed.
    pub segments_removed: u64,
    /// How often writing waited for its next segment.
    pub segment_waits: u64,
}

/// An error that the run survived, or the one that ended it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    /// When.
    pub time: SystemTime,
    /// The message; without passwords.
    pub message: String,
}

/// All that is told. A snapshot: whoever fills it in copies counters, and holds no lock for longer.
#[derive(Clone, Debug)]
pub struct StandbyStatus {
    /// What kind of run this is.
    pub command: Command,
    /// Process id.
    pub pid: u32,
    /// Of Walrider.
    pub version: String,
    /// When the snapshot was taken.
    pub time: SystemTime,
    /// When the process began.
    pub started_at: SystemTime,
    /// What it is doing.
    pub state: State,
    /// Replay is paused, whatever the state.
    pub paused: bool,
    /// The directory could be handed over: replay has passed the end of the backup and `minRecoveryPoint`.
    pub consistent: bool,
    /// The data directory, or that of the WAL.
    pub data_dir: PathBuf,
    /// Of the cluster; 0 if not known yet.
    pub system_identifier: u64,
    /// The timeline that is received or replayed; 0 if not known yet.
    pub timeline: TimelineId,
    /// Host and port of the primary, without user and password; none if there is only an archive.
    pub primary: Option<String>,
    /// Replication slot.
    pub slot: Option<String>,
    /// `application_name`, as in `synchronous_standby_names`.
    pub application_name: Option<String>,
    /// When the present connection was made.
    pub connected_since: Option<SystemTime>,
    /// Connections made since the start.
    pub connections: u64,
    /// WAL comes before the primary has flushed it.
    pub early: bool,
    /// The last thing that went wrong.
    pub last_error: Option<LastError>,
    /// Where each stage stands.
    pub positions: Positions,
    /// When the primary sent its last message, by its clock.
    pub last_message_sent: Option<SystemTime>,
    /// When that came in, by ours.
    pub last_message_received: Option<SystemTime>,
    /// Commit time of the last transaction replayed, by the primary's clock.
    pub replayed_commit: Option<SystemTime>,
    /// `recovery_min_apply_delay`.
    pub min_apply_delay: Duration,
    /// What replay has done.
    pub replay: Replay,
    /// What the spool has done.
    pub spool: Spool,
}

impl Default for StandbyStatus {
    /// A process that has just begun.
    fn default() -> StandbyStatus {
        let now = SystemTime::now();
        StandbyStatus {
            command: Command::Standby,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time: now,
            started_at: now,
            state: State::Starting,
            paused: false,
            consistent: false,
            data_dir: PathBuf::new(),
            system_identifier: 0,
            timeline: TimelineId(0),
            primary: None,
            slot: None,
            application_name: None,
            connected_since: None,
            connections: 0,
            early: false,
            last_error: None,
            positions: Positions::default(),
            last_message_sent: None,
            last_message_received: None,
            replayed_commit: None,
            min_apply_delay: Duration::ZERO,
            replay: Replay::default(),
            spool: Spool::default(),
        }
    }
}

impl StandbyStatus {
    /// Seconds by which replay is behind the primary: none if all that the primary told of is replayed, else the age of
    /// the last commit replayed. Where the clocks differ, so does this. `None` if nothing is known to count from.
    pub fn replay_lag_seconds(&self) -> Option<f64> {
        match self.positions.behind_bytes(self.positions.wal.applied) {
            Some(0) => Some(0.0),
            _ => self.replayed_commit.map(|commit| seconds_between(commit, self.time)),
        }
    }

    /// Seconds since the primary was last heard.
    pub fn silent_seconds(&self) -> Option<f64> {
        self.last_message_received.map(|received| seconds_between(received, self.time))
    }

    /// Seconds that the primary's last message took, if the clocks agree.
    pub fn transfer_seconds(&self) -> Option<f64> {
        Some(seconds_between(self.last_message_sent?, self.last_message_received?))
    }

    /// The JSON of `/status`; docs/standby.md says what is in it. What is not known is null.
    pub fn to_json(&self) -> Value {
        let text = |lsn: Lsn| lsn.is_valid().then(|| lsn.to_string());
        let time = |time: Option<SystemTime>| time.and_then(shown);
        let stages: serde_json::Map<String, Value> = self
            .positions
            .stages()
            .into_iter()
            .map(|(name, lsn)| {
                (name.to_owned(), json!({ "lsn": text(lsn), "behind_bytes": self.positions.behind_bytes(lsn) }))
            })
            .collect();
        let Replay { records, transactions, aborts, pages_read, pages_written, restartpoints } = self.replay;
        json!({
            "schema_version": 1,
            "command": self.command.name(),
            "pid": self.pid,
            "version": self.version,
            "time": shown(self.time),
            "started_at": shown(self.started_at),
            "state": self.state.name(),
            "paused": self.paused,
            "consistent": self.consistent,
            "data_dir": self.data_dir.display().to_string(),
            // As text: many readers of JSON keep 53 bits of a number.
            "system_identifier": (self.system_identifier != 0).then(|| self.system_identifier.to_string()),
            "timeline": (self.timeline.0 != 0).then_some(self.timeline.0),
            "primary": self.primary,
            "slot": self.slot,
            "application_name": self.application_name,
            "connected_since": time(self.connected_since),
            "connections": self.connections,
            "early": self.early,
            "last_error": self.last_error.as_ref().map(|error| {
                json!({ "time": shown(error.time), "message": error.message })
            }),
            "horizon": text(self.positions.wal.horizon),
            "positions": stages,
            "last_message_sent": time(self.last_message_sent),
            "last_message_received": time(self.last_message_received),
            "silent_seconds": self.silent_seconds(),
            "transfer_seconds": self.transfer_seconds(),
            "replayed_commit": time(self.replayed_commit),
            "replay_lag_seconds": self.replay_lag_seconds(),
            "min_apply_delay_seconds": self.min_apply_delay.as_secs_f64(),
            "replay": {
                "records": records,
                "transactions": transactions,
                "aborts": aborts,
                "pages_read": pages_read,
                "pages_written": pages_written,
                "restartpoints": restartpoints,
            },
            "spool": {
                "bytes": self.spool.bytes,
                "writes": self.spool.writes,
                "early_bytes": self.spool.early_bytes,
                "early_writes": self.spool.early_writes,
                "fsyncs": self.spool.fsync.count(),
                "fsync_seconds": self.spool.fsync.sum_seconds,
                "segments_created": self.spool.segments_created,
                "segments_recycled": self.spool.segments_recycled,
                "segments_removed": self.spool.segments_removed,
                "segment_waits": self.spool.segment_waits,
            },
        })
    }
}

/// Seconds since 1970; 0 for what is before.
pub(crate) fn unix_seconds(time: SystemTime) -> f64 {
    seconds_between(SystemTime::UNIX_EPOCH, time)
}

/// Seconds from one time to another; 0 if the other is earlier, as clocks that differ make it.
fn seconds_between(from: SystemTime, to: SystemTime) -> f64 {
    to.duration_since(from).map_or(0.0, |since| since.as_secs_f64())
}

/// In UTC, as RFC 3339 writes it, to the microsecond; `None` past the year 9999.
fn shown(time: SystemTime) -> Option<String> {
    jiff::Timestamp::try_from(time).ok().map(|time| format!("{time:.6}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A standby that streams, 16 bytes behind, with every field set.
    pub(crate) fn streaming() -> StandbyStatus {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + POSTGRES_EPOCH + Duration::from_secs_f64(seconds));
        StandbyStatus {
            pid: 4711,
            time: at(100.0).unwrap(),
            started_at: at(0.0).unwrap(),
            state: State::Streaming,
            consistent: true,
            data_dir: "/data".into(),
            system_identifier: u64::MAX,
            timeline: TimelineId(3),
            primary: Some("db1:5432".into()),
            slot: Some("s1".into()),
            application_name: Some("walrider".into()),
            connected_since: at(50.0),
            connections: 2,
            early: true,
            last_error: Some(LastError { time: at(49.0).unwrap(), message: "connection \"lost\"\\\n".into() }),
            positions: Positions {
                wal: WalPositions {
                    horizon: Lsn(0x1_0000_0040),
                    received: Lsn(0x1_0000_0050),
                    held: Lsn(0x1_0000_0040),
                    held_durable: Lsn(0x1_0000_0038),
                    applied: Lsn(0x1_0000_0030),
                    ..WalPositions::default()
                },
                reported: Lsn(0x1_0000_0030),
                checkpoint_redo: Lsn(0x1_0000_0000),
            },
            last_message_sent: at(99.25),
            last_message_received: at(99.5),
            replayed_commit: at(98.0),
            min_apply_delay: Duration::from_millis(1500),
            replay: Replay {
                records: 1001,
                transactions: 1002,
                aborts: 1003,
                pages_read: 1004,
                pages_written: 1005,
                restartpoints: 1006,
            },
            spool: Spool {
                bytes: 1007,
                writes: 1008,
                early_bytes: 1013,
                early_writes: 1014,
                fsync: Histogram { bounds_seconds: vec![0.001, 0.01], counts: vec![5, 3, 1], sum_seconds: 0.25 },
                segments_created: 1009,
                segments_recycled: 1010,
                segments_removed: 1011,
                segment_waits: 1012,
            },
            ..StandbyStatus::default()
        }
    }

    #[test]
    fn what_is_told() {
        let told = streaming().to_json();
        assert_eq!(told["state"], "streaming");
        assert_eq!(told["system_identifier"], "18446744073709551615");
        assert_eq!(told["time"], "2000-01-01T00:01:40.000000Z");
        assert_eq!(told["horizon"], "1/40");
        assert_eq!(told["positions"]["received"], json!({ "lsn": "1/50", "behind_bytes": 0 }));
        assert_eq!(told["positions"]["replayed"], json!({ "lsn": "1/30", "behind_bytes": 16 }));
        assert_eq!((&told["replay_lag_seconds"], &told["silent_seconds"]), (&json!(2.0), &json!(0.5)));
        assert_eq!((&told["transfer_seconds"], &told["min_apply_delay_seconds"]), (&json!(0.25), &json!(1.5)));
        let spool = &told["spool"];
        assert_eq!((&spool["bytes"], &spool["segment_waits"]), (&json!(1007), &json!(1012)));
        assert_eq!((&spool["fsyncs"], &spool["fsync_seconds"]), (&json!(9), &json!(0.25)));
        assert_eq!(told["last_error"]["time"], "2000-01-01T00:00:49.000000Z");
    }

    /// Every key, those of inner objects too.
    fn keys(value: &Value) -> Vec<String> {
        let Value::Object(object) = value else { return Vec::new() };
        object.iter().flat_map(|(key, value)| std::iter::once(key.clone()).chain(keys(value))).collect()
    }

    #[test]
    fn the_same_keys_are_there_whatever_is_known() {
        let known = StandbyStatus { last_error: None, ..streaming() };
        assert_eq!(keys(&known.to_json()), keys(&StandbyStatus::default().to_json()));
    }

    #[test]
    fn all_keys_and_states_are_documented() {
        let text = include_str!("../../../docs/standby.md");
        let section = text.split("### /status").nth(1).and_then(|rest| rest.split("### /metrics").next()).unwrap();
        let states = State::ALL.map(|state| state.name().to_owned());
        for key in keys(&streaming().to_json()).into_iter().chain(states) {
            assert!(section.contains(&format!("`{key}`")), "{key}");
        }
    }

    #[test]
    fn what_is_not_known_is_null() {
        let told = StandbyStatus::default().to_json();
        for key in ["system_identifier", "timeline", "primary", "horizon", "last_error", "replay_lag_seconds"] {
            assert!(told[key].is_null(), "{key}");
        }
        assert_eq!(told["positions"]["flushed"], json!({ "lsn": null, "behind_bytes": null }));
    }

    #[test]
    fn all_replayed_is_no_lag_however_long_ago() {
        let mut status = streaming();
        status.positions.wal.applied = status.positions.wal.horizon;
        assert_eq!(status.replay_lag_seconds(), Some(0.0));
        status.positions.wal.applied = Lsn::INVALID;
        assert_eq!(status.replay_lag_seconds(), Some(2.0));
        // The primary's clock is ahead.
        status.replayed_commit = Some(status.time + Duration::from_secs(9));
        assert_eq!(status.replay_lag_seconds(), Some(0.0));
    }

    #[test]
    fn any_time_of_the_wire_is_taken() {
        for microseconds in [i64::MIN, -1, 1, i64::MAX] {
            let status = StandbyStatus { replayed_commit: from_timestamptz(microseconds), ..streaming() };
            assert!(status.to_json().is_object());
        }
        assert_eq!(from_timestamptz(i64::MIN), None);
    }
}
