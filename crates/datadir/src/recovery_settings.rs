//! The settings that recovery looks at, taken from the configuration as a starting server would take them
//! (`utils/misc/guc_tables.c`; check and assign hooks in `access/transam/xlogrecovery.c`, PostgreSQL 18).

use walrider_layout::{Lsn, Major, TimelineId, TransactionId};

use crate::config::{Config, Setting, Unit};
use crate::error::Result;
use crate::timestamp::{TimestampTz, parse_timestamptz};

/// Longest name of a restore point, plus one (`MAXFNAMELEN`).
const MAX_NAME: usize = 64;

/// Where recovery is to end (`RecoveryTargetType`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecoveryTarget {
    /// `recovery_target = 'immediate'`: as soon as the directory is consistent.
    Immediate,
    /// `recovery_target_lsn`.
    Lsn(Lsn),
    /// `recovery_target_name`: a restore point.
    Name(String),
    /// `recovery_target_time`.
    Time(TimestampTz),
    /// `recovery_target_xid`.
    Xid(TransactionId),
}

impl RecoveryTarget {
    /// The parameter that sets it.
    pub fn parameter(&self) -> &'static str {
        match self {
            RecoveryTarget::Immediate => "recovery_target",
            RecoveryTarget::Lsn(_) => "recovery_target_lsn",
            RecoveryTarget::Name(_) => "recovery_target_name",
            RecoveryTarget::Time(_) => "recovery_target_time",
            RecoveryTarget::Xid(_) => "recovery_target_xid",
        }
    }
}

/// `recovery_target_timeline`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TargetTimeline {
    /// The newest one in the archive that descends from the backup's.
    #[default]
    Latest,
    /// The backup's own.
    Current,
    /// This one.
    Number(TimelineId),
}

/// `recovery_target_action`: what a server does when it has reached the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TargetAction {
    /// Wait for somebody to look; without hot_standby, shut down.
    #[default]
    Pause,
    /// Begin a new timeline and open.
    Promote,
    /// Stop.
    Shutdown,
}

/// What recovery looks at. Empty commands count as none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoverySettings {
    /// `restore_command`.
    pub restore_command: Option<String>,
    /// `archive_cleanup_command`.
    pub archive_cleanup_command: Option<String>,
    /// `archive_mode` is `on` or `always`: a primary archives its WAL (`XLogArchivingActive`).
    pub archiving: bool,
    /// `recovery_end_command`.
    pub recovery_end_command: Option<String>,
    /// `primary_conninfo`.
    pub primary_conninfo: Option<String>,
    /// Which of `recovery_target…` is set.
    pub target: Option<RecoveryTarget>,
    /// `recovery_target_inclusive`.
    pub target_inclusive: bool,
    /// `recovery_target_timeline`.
    pub target_timeline: TargetTimeline,
    /// `recovery_target_action`.
    pub target_action: TargetAction,
    /// `recovery_min_apply_delay`, in milliseconds.
    pub min_apply_delay_ms: i64,
    /// `wal_log_hints`.
    pub wal_log_hints: bool,
    /// `full_page_writes`.
    pub full_page_writes: bool,
    /// `allow_in_place_tablespaces`.
    pub allow_in_place_tablespaces: bool,
    /// `timezone`: that of times without one.
    pub timezone: String,
}

impl Default for RecoverySettings {
    /// A server's own defaults.
    fn default() -> RecoverySettings {
        RecoverySettings {
            restore_command: None,
            archive_cleanup_command: None,
            archiving: false,
            recovery_end_command: None,
            primary_conninfo: None,
            target: None,
            target_inclusive: true,
            target_timeline: TargetTimeline::Latest,
            target_action: TargetAction::Pause,
            min_apply_delay_ms: 0,
            wal_log_hints: false,
            full_page_writes: true,
            allow_in_place_tablespaces: false,
            timezone: "GMT".to_owned(),
        }
    }
}

impl RecoverySettings {
    /// Takes them from a configuration, as a server of this major does. Errors name file and line.
    pub fn from_config(config: &Config, major: Major) -> Result<RecoverySettings> {
        let mut settings = RecoverySettings::default();
        if let Some(zone) = config.get("timezone") {
            settings.timezone.clone_from(&zone.value);
        }
        for setting in config.effective() {
            let text = || Some(setting.value.clone()).filter(|value| !value.is_empty());
            match setting.name.as_str() {
                "restore_command" => settings.restore_command = text(),
                "archive_cleanup_command" => settings.archive_cleanup_command = text(),
                "archive_mode" => {
                    settings.archiving = setting.value.eq_ignore_ascii_case("always") || setting.bool()?;
                }
                "recovery_end_command" => settings.recovery_end_command = text(),
                "primary_conninfo" => settings.primary_conninfo = text(),
                "recovery_target_inclusive" => settings.target_inclusive = setting.bool()?,
                "recovery_target_timeline" => settings.target_timeline = target_timeline(setting)?,
                "recovery_target_action" => settings.target_action = target_action(setting)?,
                "recovery_min_apply_delay" => settings.min_apply_delay_ms = setting.number(Unit::Milliseconds)?,
                "wal_log_hints" => settings.wal_log_hints = setting.bool()?,
                "full_page_writes" => settings.full_page_writes = setting.bool()?,
                "allow_in_place_tablespaces" => settings.allow_in_place_tablespaces = setting.bool()?,
                "recovery_target"
                | "recovery_target_lsn"
                | "recovery_target_name"
                | "recovery_target_time"
                | "recovery_target_xid" => settings.set_target(setting, major)?,
                _ => {}
            }
        }
        Ok(settings)
    }

    /// At most one target may be set; to empty one that is not set is allowed, if none of the others came before
    /// (`assign_recovery_target` and its like).
    fn set_target(&mut self, setting: &Setting, major: Major) -> Result<()> {
        let new = target(setting, &self.timezone, major)?;
        if self.target.as_ref().is_some_and(|old| old.parameter() != setting.name) {
            return Err(setting.error(
                "multiple recovery targets specified: at most one of \"recovery_target\", \"recovery_target_lsn\", \
                 \"recovery_target_name\", \"recovery_target_time\", \"recovery_target_xid\" may be set",
            ));
        }
        self.target = new;
        Ok(())
    }
}

/// The target that one setting names; none if it is empty.
fn target(setting: &Setting, timezone: &str, major: Major) -> Result<Option<RecoveryTarget>> {
    let value = setting.value.as_str();
    let invalid = |expected: &str| {
        setting.error(format!("invalid value for parameter \"{}\": \"{value}\"; {expected}", setting.name))
    };
    if value.is_empty() {
        return Ok(None);
    }
    Ok(Some(match setting.name.as_str() {
        "recovery_target" if value == "immediate" => RecoveryTarget::Immediate,
        "recovery_target" => return Err(invalid("the only allowed value is \"immediate\"")),
        "recovery_target_lsn" => {
            RecoveryTarget::Lsn(value.parse().map_err(|_| invalid("expected an LSN, as in 16/B374D848"))?)
        }
        "recovery_target_name" if value.len() >= MAX_NAME => {
            return Err(invalid("names of restore points have at most 63 characters"));
        }
        "recovery_target_name" => RecoveryTarget::Name(value.to_owned()),
        "recovery_target_time" => {
            let abbreviations = major.format().session_zone_abbreviations;
            RecoveryTarget::Time(parse_timestamptz(value, timezone, abbreviations).map_err(|reason| invalid(&reason))?)
        }
        _ => {
            let number = unsigned(value).ok_or_else(|| invalid("expected a transaction id"))?;
            // As in PostgreSQL: the epoch of a 64-bit id is dropped.
            RecoveryTarget::Xid(number as TransactionId)
        }
    }))
}

fn target_timeline(setting: &Setting) -> Result<TargetTimeline> {
    match setting.value.as_str() {
        "latest" => Ok(TargetTimeline::Latest),
        "current" => Ok(TargetTimeline::Current),
        number => {
            let timeline = unsigned(number).and_then(|number| u32::try_from(number).ok()).filter(|&number| number > 0);
            timeline.map(|number| TargetTimeline::Number(TimelineId(number))).ok_or_else(|| {
                setting.error(format!(
                    "invalid value for parameter \"recovery_target_timeline\": \"{number}\"; expected \"latest\", \
                     \"current\" or a number"
                ))
            })
        }
    }
}

fn target_action(setting: &Setting) -> Result<TargetAction> {
    match setting.value.to_ascii_lowercase().as_str() {
        "pause" => Ok(TargetAction::Pause),
        "promote" => Ok(TargetAction::Promote),
        "shutdown" => Ok(TargetAction::Shutdown),
        other => Err(setting.error(format!(
            "invalid value for parameter \"recovery_target_action\": \"{other}\"; expected \"pause\", \"promote\" or \
             \"shutdown\""
        ))),
    }
}

/// `strtou64` with base 0: decimal, `0x…` or octal.
fn unsigned(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits_only = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parse = |digits: &str, radix| digits_only(digits).then(|| u64::from_str_radix(digits, radix).ok()).flatten();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => parse(digits, 16),
        None if text.len() > 1 && text.starts_with('0') => parse(text, 8),
        None => parse(text, 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<RecoverySettings> {
        read_as(Major::V18, text)
    }

    fn read_as(major: Major, text: &str) -> Result<RecoverySettings> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("postgresql.conf"), text).unwrap();
        RecoverySettings::from_config(&Config::read(dir.path(), None).unwrap(), major)
    }

    #[test]
    fn nothing_set_is_a_servers_default() {
        assert_eq!(read("port = 1\nrestore_command = ''\n").unwrap(), RecoverySettings::default());
    }

    #[test]
    fn what_a_backup_tool_writes() {
        let settings = read(
            "timezone = 'Europe/Rome'\nrestore_command = 'pgbackrest archive-get %f \"%p\"'\n\
             recovery_target_time = '2026-11-21 11:42:26'\nRecovery_Target_Action = PROMOTE\n\
             recovery_target_inclusive = false\nrecovery_target_timeline = '0x3'\nhot_standby = off\n\
             recovery_min_apply_delay = '2s'\n",
        )
        .unwrap();
        assert_eq!(settings.restore_command.as_deref(), Some("pgbackrest archive-get %f \"%p\""));
        let Some(RecoveryTarget::Time(time)) = settings.target else { panic!("{:?}", settings.target) };
        assert_eq!(time.to_string(), "2026-11-21 10:42:26+00");
        assert_eq!(settings.target_action, TargetAction::Promote);
        assert_eq!(settings.target_timeline, TargetTimeline::Number(TimelineId(3)));
        assert!(!settings.target_inclusive && settings.min_apply_delay_ms == 2000);
    }

    #[test]
    fn before_18_abbreviations_of_time_zones_are_not_certain() {
        let text = "timezone = 'Asia/Kolkata'\nrecovery_target_time = '2026-11-21 11:42:26 IST'\n";
        assert!(read_as(Major::V18, text).is_ok());
        let error = read_as(Major::V17, text).unwrap_err().to_string();
        assert!(error.contains("\"IST\" is not certain"), "{error}");
    }

    #[test]
    fn one_target_at_most() {
        let target = |text: &str| read(text).map(|settings| settings.target);
        assert_eq!(target("recovery_target = 'immediate'").unwrap(), Some(RecoveryTarget::Immediate));
        assert_eq!(
            target("recovery_target_xid = 1\nrecovery_target_name = ''\nrecovery_target_xid = '4294967297'").unwrap(),
            Some(RecoveryTarget::Xid(1)),
        );
        assert_eq!(target("recovery_target_lsn = '1/2'\nrecovery_target_lsn = ''").unwrap(), None);
        let error = target("recovery_target_lsn = '1/2'\nrecovery_target_name = 'x'").unwrap_err().to_string();
        assert!(error.contains("postgresql.conf:2: multiple recovery targets specified"), "{error}");
    }

    #[test]
    fn bad_values_are_refused() {
        for bad in [
            "recovery_target = 'now'",
            "recovery_target_lsn = 'x'",
            "recovery_target_time = 'now'",
            "recovery_target_xid = 'x'",
            "recovery_target_xid = '+1'",
            "recovery_target_timeline = 'old'",
            "recovery_target_timeline = 0",
            "recovery_target_action = 'stop'",
            "recovery_target_inclusive = maybe",
            "recovery_min_apply_delay = '1MB'",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(read(&format!("recovery_target_name = '{}'", "x".repeat(64))).is_err());
    }
}
