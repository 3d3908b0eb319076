//! The status of a standby, or of `walrider receive`, at one moment: each key of `/status`, and what it means. What is not known
//! is null.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use walrider_layout::positions::WalPositions;
use walrider_layout::{Lsn, POSTGRES_EPOCH};

use crate::health::{self, Limits};
use crate::{Observed, metrics};

/// What [`StandbyStatus::schema_version`] is: a key that goes, or means something else, raises it. A new key does not: readers
/// pass over keys and states that they do not know, and take keys that are missing for unknown.
pub const SCHEMA_VERSION: u32 = 1;

/// A moment; in JSON in UTC, as RFC 3339 writes it, to the microsecond, and null past the year 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub SystemTime);

impl Time {
    /// Of the system's clock.
    pub fn now() -> Time {
        Time(SystemTime::now())
    }

    /// The time that PostgreSQL writes as microseconds since 2000-01-01 00:00 UTC (`TimestampTz`). `None` for zero, which
    /// stands for no time at all, and for what is before 1970.
    ///
    /// ```
    /// use walrider_observe::status::Time;
    /// assert_eq!(Time::from_timestamptz(0), None);
    /// assert_eq!(Time::from_timestamptz(1_500_000).unwrap().unix_seconds(), 946_684_801.5);
    /// ```
    pub fn from_timestamptz(microseconds: i64) -> Option<Time> {
        let since = Duration::from_micros(microseconds.unsigned_abs());
        let epoch = SystemTime::UNIX_EPOCH + POSTGRES_EPOCH;
        let time = match microseconds {
            0 => None,
            1.. => epoch.checked_add(since),
            _ => epoch.checked_sub(since).filter(|&time| time >= SystemTime::UNIX_EPOCH),
        };
        time.map(Time)
    }

    /// Seconds since 1970; 0 for what is before.
    pub fn unix_seconds(self) -> f64 {
        self.seconds_since(Time::default())
    }

    /// Seconds since another time; 0 if that is later, as clocks that differ make it.
    fn seconds_since(self, from: Time) -> f64 {
        self.0.duration_since(from.0).map_or(0.0, |since| since.as_secs_f64())
    }
}

impl Default for Time {
    fn default() -> Time {
        Time(SystemTime::UNIX_EPOCH)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        jiff::Timestamp::try_from(self.0).ok().map(|time| format!("{time:.6}")).serialize(to)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Time, D::Error> {
        let time = String::deserialize(from)?.parse::<jiff::Timestamp>().map_err(de::Error::custom)?;
        Ok(Time(time.into()))
    }
}

/// Values as text: LSNs, and numbers beyond the 53 bits that many readers of JSON keep.
pub mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use super::{Deserialize, Deserializer, Serialize, Serializer, de};

    /// For `#[serde(with = "text")]`.
    pub fn serialize<T: Display, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        value.as_ref().map(T::to_string).serialize(to)
    }

    /// For `#[serde(with = "text")]`.
    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(de::Error::custom)).transpose()
    }
}

/// What kind of run this is; shown as on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Command {
    /// `walrider standby`.
    #[default]
    Standby,
    /// `walrider receive`: nothing is replayed.
    Receive,
    /// `walrider relay`: the same, and what is received is served.
    Relay,
    /// One that a newer Walrider has.
    #[serde(other)]
    Unknown,
}

/// What it is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
    /// PostgreSQL has the directory, and answers queries (`walrider standby --readable`).
    Readable,
    /// The disk is full: nothing is received until there is space.
    #[serde(rename = "waiting for disk")]
    WaitingForDisk,
    /// Replay is paused; receiving goes on.
    Paused,
    /// Replaying what is left, to hand the directory over.
    Promoting,
    /// Stopped cleanly, or promoted.
    Stopped,
    /// Stopped by an error.
    Failed,
    /// One that a newer Walrider has.
    #[serde(other)]
    Unknown,
}

impl State {
    /// All that this Walrider has.
    pub const ALL: [State; 10] = [
        State::Starting,
        State::Recovering,
        State::Connecting,
        State::Streaming,
        State::Readable,
        State::WaitingForDisk,
        State::Paused,
        State::Promoting,
        State::Stopped,
        State::Failed,
    ];
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Where a stage stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Position {
    /// The end of what it has done, exclusive.
    #[serde(with = "text")]
    pub lsn: Option<Lsn>,
    /// Bytes from there to the horizon: 0 for what is past it.
    pub behind_bytes: Option<u64>,
}

/// Where each stage stands: `checkpoint_redo <= replayed`, `reported <= replayed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Positions {
    /// [`WalPositions::received`].
    pub received: Position,
    /// [`WalPositions::held`].
    pub written: Position,
    /// [`WalPositions::held_durable`].
    pub flushed: Position,
    /// [`WalPositions::applied`].
    pub replayed: Position,
    /// Told to the primary as applied.
    pub reported: Position,
    /// The redo pointer of the last restartpoint: a crash makes recovery begin here.
    pub checkpoint_redo: Position,
}

impl Positions {
    /// All of them, by name.
    pub fn stages(&self) -> [(&'static str, Position); 6] {
        [
            ("received", self.received),
            ("written", self.written),
            ("flushed", self.flushed),
            ("replayed", self.replayed),
            ("reported", self.reported),
            ("checkpoint_redo", self.checkpoint_redo),
        ]
    }
}

/// What replay has done since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
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
    /// Batches larger than memory, whose WAL was put apart by where its pages are.
    pub sweeps: u64,
    /// Seconds of each stage so far. It is in one of them at each moment.
    pub stages: BTreeMap<String, f64>,
    /// The stage that it is in.
    pub stage: Option<String>,
}

/// What the spool has done since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spool {
    /// Bytes of WAL written.
    pub bytes: u64,
    /// Calls that wrote them.
    pub writes: u64,
    /// Bytes of WAL written before that to the log of what the primary has not flushed.
    pub early_bytes: u64,
    /// Calls that wrote them.
    pub early_writes: u64,
    /// How long all these calls took, all together.
    pub write_seconds: f64,
    /// Calls of fsync.
    pub fsyncs: u64,
    /// How long they took, all together.
    pub fsync_seconds: f64,
    /// An upper bound in seconds, inclusive, ascending, and how many took no longer, and longer than the bound before. Those that
    /// took longer than the last are in `fsyncs` alone. For `/metrics`.
    #[serde(skip)]
    pub fsync_buckets: Vec<(f64, u64)>,
    /// Segments made ahead of their use.
    pub segments_created: u64,
    /// Segments renamed to future ones.
    pub segments_recycled: u64,
    /// Segments removed.
    pub segments_removed: u64,
    /// How often writing waited for its next segment.
    pub segment_waits: u64,
    /// How long, all together: until that, or one before, was durable.
    pub segment_wait_seconds: f64,
}

/// An error that the run survived, or the one that ended it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastError {
    /// When.
    pub time: Time,
    /// The message; without passwords.
    pub message: String,
}

/// One that a relay serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DownstreamStatus {
    /// What a server has the number of its process for.
    pub pid: u64,
    /// `application_name`.
    pub application_name: String,
    /// User.
    pub user: String,
    /// Address, or "local".
    pub address: String,
    /// When it came.
    pub since: Time,
    /// The slot that it streams from.
    pub slot: Option<String>,
    /// Whether WAL is streamed to it.
    pub streaming: bool,
    /// End of what it was sent.
    #[serde(with = "text")]
    pub sent_lsn: Option<Lsn>,
    /// What it has written, as it has told.
    #[serde(with = "text")]
    pub write_lsn: Option<Lsn>,
    /// What is durable there.
    #[serde(with = "text")]
    pub flush_lsn: Option<Lsn>,
    /// What it has replayed.
    #[serde(with = "text")]
    pub replay_lsn: Option<Lsn>,
    /// Bytes from what it has written to what the relay has.
    pub behind_bytes: Option<u64>,
}

/// A replication slot of a relay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotStatus {
    /// WAL from there on is kept for it.
    #[serde(with = "text")]
    pub restart_lsn: Option<Lsn>,
    /// Somebody uses it.
    pub active: bool,
    /// It ends with its connection.
    pub temporary: bool,
    /// What it needed is gone.
    pub lost: bool,
}

/// Archiving of what is received (`pg_stat_archiver`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Archiver {
    /// Where to; none: nothing is archived.
    pub place: Option<String>,
    /// Files archived since the start, also those that were there.
    pub archived_count: u64,
    /// The last of them.
    pub last_archived_wal: Option<String>,
    /// When.
    pub last_archived_time: Option<Time>,
    /// Attempts that failed.
    pub failed_count: u64,
    /// The file of the last of them.
    pub last_failed_wal: Option<String>,
    /// When.
    pub last_failed_time: Option<Time>,
    /// Why.
    pub last_failed_error: Option<String>,
    /// Segments that were given up: the archive lacks them.
    pub given_up_count: u64,
    /// Files that wait to be archived.
    pub ready_count: u64,
}

/// All that is told. A snapshot: the one that fills it in copies counters, and holds no lock for longer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StandbyStatus {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What kind of run this is.
    pub command: Command,
    /// Process id.
    pub pid: u32,
    /// Of Walrider.
    pub version: String,
    /// When the snapshot was taken.
    pub time: Time,
    /// When the process began.
    pub started_at: Time,
    /// What it is doing.
    pub state: State,
    /// Replay is paused, whatever the state.
    pub paused: bool,
    /// The directory could be handed over: replay has passed the end of the backup and `minRecoveryPoint`.
    pub consistent: bool,
    /// The data directory, or that of the WAL.
    pub data_dir: String,
    /// Of the cluster.
    #[serde(with = "text")]
    pub system_identifier: Option<u64>,
    /// The timeline that is received or replayed.
    pub timeline: Option<NonZeroU32>,
    /// One is to be followed, reached or not; else only an archive.
    pub has_primary: bool,
    /// Host and port of the primary, without user and password; none if there is only an archive.
    pub primary: Option<String>,
    /// Replication slot.
    pub slot: Option<String>,
    /// `application_name`, as in `synchronous_standby_names`.
    pub application_name: Option<String>,
    /// When the present connection was made.
    pub connected_since: Option<Time>,
    /// Connections made since the start.
    pub connections: u64,
    /// How often PostgreSQL has had the directory, since the start.
    pub turns: u64,
    /// WAL comes before the primary has flushed it.
    pub early: bool,
    /// The last thing that went wrong.
    pub last_error: Option<LastError>,
    /// The newest flush position that the primary has told.
    #[serde(with = "text")]
    pub horizon: Option<Lsn>,
    /// Where each stage stands.
    pub positions: Positions,
    /// When the primary sent its last message, by its clock.
    pub last_message_sent: Option<Time>,
    /// When that came in, by ours.
    pub last_message_received: Option<Time>,
    /// Seconds since the primary was last heard.
    pub silent_seconds: Option<f64>,
    /// Seconds that the primary's last message took, if the clocks agree.
    pub transfer_seconds: Option<f64>,
    /// Commit time of the last transaction replayed, by the primary's clock.
    pub replayed_commit: Option<Time>,
    /// Seconds by which replay is behind the primary: since when the primary has had more than what is replayed, none if all that it told of
    /// is; where that was before it was first heard, the age of the last commit replayed, by two clocks.
    pub replay_lag_seconds: Option<f64>,
    /// `recovery_min_apply_delay`.
    pub min_apply_delay_seconds: f64,
    /// What replay has done.
    pub replay: Replay,
    /// What the spool has done.
    pub spool: Spool,
    /// Those that a relay serves.
    pub downstreams: Vec<DownstreamStatus>,
    /// The slots of a relay, by name.
    pub slots: BTreeMap<String, SlotStatus>,
    /// What is archived.
    pub archiver: Archiver,
}

impl StandbyStatus {
    /// This process, when it has just begun.
    pub fn new() -> StandbyStatus {
        StandbyStatus {
            schema_version: SCHEMA_VERSION,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time: Time::now(),
            started_at: Time::now(),
            ..StandbyStatus::default()
        }
    }

    /// Sets the positions, [`Lsn::INVALID`] where nothing is known, and last of all what follows from them and from the times. `age`: how many
    /// seconds ago the primary had flushed more than what is replayed, and whether that is the least.
    pub fn at(
        mut self,
        wal: &WalPositions,
        reported: Lsn,
        checkpoint_redo: Lsn,
        age: Option<(f64, bool)>,
    ) -> StandbyStatus {
        let known = |lsn: Lsn| lsn.is_valid().then_some(lsn);
        let horizon = known(wal.horizon);
        let position = |lsn| {
            let lsn = known(lsn);
            Position { lsn, behind_bytes: horizon.zip(lsn).map(|(horizon, lsn)| horizon.0.saturating_sub(lsn.0)) }
        };
        self.horizon = horizon;
        self.positions = Positions {
            received: position(wal.received),
            written: position(wal.held),
            flushed: position(wal.held_durable),
            replayed: position(wal.applied),
            reported: position(reported),
            checkpoint_redo: position(checkpoint_redo),
        };
        let message = self.last_message_sent.zip(self.last_message_received);
        self.silent_seconds = self.last_message_received.map(|received| self.time.seconds_since(received));
        self.transfer_seconds = message.map(|(sent, received)| received.seconds_since(sent));
        let commit = self.replayed_commit.map(|commit| self.time.seconds_since(commit));
        self.replay_lag_seconds = match (self.positions.replayed.behind_bytes, age) {
            (Some(0), _) => Some(0.0),
            // One transaction may take an hour, and the last before it may be older than a night.
            (Some(_), Some((age, false))) => Some(age),
            (_, age) => commit.or(age.map(|(least, _)| least)),
        };
        self
    }

    /// The JSON of `/status`, its keys in order; docs/standby.md says to users what is in it.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("it has no keys but text")
    }
}

impl Observed for StandbyStatus {
    fn to_json(&self) -> serde_json::Value {
        StandbyStatus::to_json(self)
    }

    fn metrics(&self) -> String {
        metrics::render(self)
    }

    fn health(&self, limits: &Limits) -> Result<(), String> {
        health::check(self, limits)
    }

    fn is_ready(&self) -> bool {
        self.state != State::Starting
    }

    fn summary(&self) -> String {
        let mut words = self.state.to_string();
        if let Some(primary) = self.primary.as_ref().filter(|_| self.connected_since.is_some()) {
            words += &format!(" from {primary}");
        }
        if let Some(replayed) = self.positions.replayed.lsn {
            words += &format!(", replayed {replayed}");
        } else if let Some(flushed) = self.positions.flushed.lsn {
            words += &format!(", flushed {flushed}");
        }
        words
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A standby that streams, 16 bytes behind, with every field set.
    pub(crate) fn streaming() -> StandbyStatus {
        let at = |seconds| Some(Time(SystemTime::UNIX_EPOCH + POSTGRES_EPOCH + Duration::from_secs_f64(seconds)));
        StandbyStatus {
            pid: 4711,
            version: "0.1.0".into(),
            time: at(100.0).unwrap(),
            started_at: at(0.0).unwrap(),
            state: State::Streaming,
            consistent: true,
            data_dir: "/data".into(),
            system_identifier: Some(u64::MAX),
            timeline: NonZeroU32::new(3),
            has_primary: true,
            primary: Some("db1:5432".into()),
            slot: Some("s1".into()),
            application_name: Some("walrider".into()),
            connected_since: at(50.0),
            connections: 2,
            turns: 1014,
            early: true,
            last_error: Some(LastError { time: at(49.0).unwrap(), message: "connection \"lost\"\\\n".into() }),
            last_message_sent: at(99.25),
            last_message_received: at(99.5),
            replayed_commit: at(98.0),
            min_apply_delay_seconds: 1.5,
            replay: Replay {
                records: 1001,
                transactions: 1002,
                aborts: 1003,
                pages_read: 1004,
                pages_written: 1005,
                restartpoints: 1006,
                sweeps: 1019,
                stages: BTreeMap::from([("apply".into(), 30.5), ("wait".into(), 60.0)]),
                stage: Some("apply".into()),
            },
            spool: Spool {
                bytes: 1007,
                writes: 1008,
                early_bytes: 1013,
                early_writes: 1014,
                write_seconds: 0.5,
                fsyncs: 9,
                fsync_seconds: 0.25,
                fsync_buckets: vec![(0.001, 5), (0.01, 3)],
                segments_created: 1009,
                segments_recycled: 1010,
                segments_removed: 1011,
                segment_waits: 1012,
                segment_wait_seconds: 0.75,
            },
            archiver: Archiver {
                place: Some("s3://bucket/main".into()),
                archived_count: 1015,
                last_archived_wal: Some("000000030000000000000001".into()),
                last_archived_time: at(97.0),
                failed_count: 1016,
                last_failed_wal: Some("000000030000000000000002".into()),
                last_failed_time: at(96.0),
                last_failed_error: Some("no".into()),
                given_up_count: 1017,
                ready_count: 1018,
            },
            ..StandbyStatus::new()
        }
        .at(&WAL, Lsn(0x1_0000_0030), Lsn(0x1_0000_0000), None)
    }

    const WAL: WalPositions = WalPositions {
        horizon: Lsn(0x1_0000_0040),
        received: Lsn(0x1_0000_0050),
        held: Lsn(0x1_0000_0040),
        held_durable: Lsn(0x1_0000_0038),
        written: Lsn::INVALID,
        flushed: Lsn::INVALID,
        applied: Lsn(0x1_0000_0030),
    };

    /// What users have built on: it changes with [`SCHEMA_VERSION`] alone, but for new keys.
    #[test]
    fn keys_and_values_stay() {
        let told: Value = serde_json::from_str(include_str!("../tests/status.json")).unwrap();
        assert_eq!(streaming().to_json(), told);
    }

    #[test]
    fn it_is_read_back() {
        let mut status = streaming();
        let read = |json: &str| serde_json::from_str::<StandbyStatus>(json).unwrap();
        let told = status.to_json().to_string();
        status.spool.fsync_buckets.clear();
        assert_eq!(read(&told), status);
        let unknown = StandbyStatus::default().to_json().to_string();
        assert_eq!(read(&unknown), StandbyStatus::default());
    }

    /// Between an upgrade and the restart, two versions talk to each other.
    #[test]
    fn other_versions_are_understood() {
        let newer =
            r#"{ "state": "relaying", "command": "telepathy", "is_new": [1], "spool": { "new": 1, "bytes": 5 } }"#;
        let status: StandbyStatus = serde_json::from_str(newer).unwrap();
        assert_eq!((status.state, status.command, status.spool.bytes), (State::Unknown, Command::Unknown, 5));
        assert_eq!(status.positions.flushed, Position::default());
    }

    /// Every key, those of inner objects too.
    fn keys(value: &Value) -> Vec<String> {
        let Value::Object(object) = value else { return Vec::new() };
        object.iter().flat_map(|(key, value)| std::iter::once(key.clone()).chain(keys(value))).collect()
    }

    #[test]
    fn the_same_keys_are_there_whatever_is_known() {
        let mut known = StandbyStatus { last_error: None, ..streaming() };
        // These are names of stages.
        known.replay.stages.clear();
        assert_eq!(keys(&known.to_json()), keys(&StandbyStatus::new().to_json()));
    }

    #[test]
    fn all_keys_and_states_are_documented() {
        let text = include_str!("../../../docs/standby.md");
        let section = text.split("### /status").nth(1).and_then(|rest| rest.split("### /metrics").next()).unwrap();
        let states = State::ALL.map(|state| state.to_string());
        for key in keys(&streaming().to_json()).into_iter().chain(states) {
            assert!(section.contains(&format!("`{key}`")), "{key}");
        }
    }

    #[test]
    fn what_is_not_known_is_null() {
        let told = StandbyStatus::new().at(&WalPositions::default(), Lsn::INVALID, Lsn::INVALID, None).to_json();
        for key in ["system_identifier", "timeline", "primary", "horizon", "last_error", "replay_lag_seconds"] {
            assert!(told[key].is_null(), "{key}");
        }
        assert_eq!(told["positions"]["flushed"], json!({ "lsn": null, "behind_bytes": null }));
    }

    #[test]
    fn all_replayed_is_no_lag_however_long_ago() {
        let lag = |applied, status: StandbyStatus| {
            status.at(&WalPositions { applied, ..WAL }, Lsn::INVALID, Lsn::INVALID, None).replay_lag_seconds
        };
        assert_eq!(lag(WAL.horizon, streaming()), Some(0.0));
        assert_eq!(lag(Lsn::INVALID, streaming()), Some(2.0));
        let ahead = Some(Time(streaming().time.0 + Duration::from_secs(9)));
        let primary_is_ahead = StandbyStatus { replayed_commit: ahead, ..streaming() };
        assert_eq!(lag(Lsn::INVALID, primary_is_ahead), Some(0.0));
    }

    /// Found by a review: while one long transaction was replayed, or after a quiet night, a standby that kept up had the lag of the last
    /// commit's age, and was unhealthy.
    #[test]
    fn what_is_known_of_the_primary_counts_and_not_the_last_commit() {
        let lag = |age| {
            let wal = WalPositions { applied: Lsn(WAL.horizon.0 - 8), ..WAL };
            streaming().at(&wal, Lsn::INVALID, Lsn::INVALID, age).replay_lag_seconds
        };
        assert_eq!(lag(Some((0.5, false))), Some(0.5));
        assert_eq!(lag(Some((0.5, true))), Some(2.0));
    }

    #[test]
    fn any_time_of_the_wire_is_taken() {
        for microseconds in [i64::MIN, -1, 1, i64::MAX] {
            let status = StandbyStatus { replayed_commit: Time::from_timestamptz(microseconds), ..streaming() };
            assert!(status.to_json().is_object());
        }
        assert_eq!(Time::from_timestamptz(i64::MIN), None);
    }
}
