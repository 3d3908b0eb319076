//! What the command line changes of the configuration, and where WAL is looked for.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use walrider_datadir::config::{self, Config};
use walrider_datadir::recovery_settings::{RecoverySettings, RecoveryTarget, TargetTimeline};
use walrider_datadir::{DataDir, DataDirError};
use walrider_store::directory::Directory;
use walrider_store::driver::Driver;
use walrider_store::restore::RestoreCommand;

use super::Options;
use crate::error::ReplayError;

/// Lets the command line override the configuration. Returns what PostgreSQL must be told to finish at the same place.
pub(super) fn override_settings(
    options: &Options,
    settings: &mut RecoverySettings,
) -> Result<Vec<(String, String)>, ReplayError> {
    // First what is emptied: where another target comes before, PostgreSQL takes that for two (assign_recovery_target).
    let mut wanted = if options.configured_target { Vec::new() } else { forget_target(options, settings) };
    if let Some(target) = &options.target {
        if let Some(other) = settings.target.as_ref().filter(|old| old.parameter() != target.parameter()) {
            wanted.push((other.parameter().to_owned(), String::new()));
        }
        settings.target = Some(target.clone());
        let value = match target {
            RecoveryTarget::Immediate => "immediate".into(),
            RecoveryTarget::Lsn(lsn) => lsn.to_string(),
            RecoveryTarget::Name(name) => name.clone(),
            RecoveryTarget::Time(time) => time.to_string(),
            RecoveryTarget::Xid(xid) => xid.to_string(),
        };
        wanted.push((target.parameter().to_owned(), value));
    }
    if let Some(inclusive) = options.inclusive {
        settings.target_inclusive = inclusive;
        wanted.push(("recovery_target_inclusive".into(), if inclusive { "on" } else { "off" }.into()));
    }
    if let Some(timeline) = options.timeline {
        settings.target_timeline = timeline;
        let value = match timeline {
            TargetTimeline::Latest => "latest".into(),
            TargetTimeline::Current => "current".into(),
            TargetTimeline::Number(number) => number.to_string(),
        };
        wanted.push(("recovery_target_timeline".into(), value));
    }
    if let Some(wal) = options.wal.as_ref().filter(|_| settings.restore_command.is_none()) {
        let wal = fs::canonicalize(wal).map_err(|error| DataDirError::io("open", wal, error))?;
        let quoted = wal.display().to_string().replace('%', "%%").replace('\'', "'\\''");
        wanted.push(("restore_command".into(), format!("cp '{quoted}'/%f '%p'")));
    }
    if let Some(archive) = options.archive.as_ref().filter(|_| settings.restore_command.is_none()) {
        wanted.push(("restore_command".into(), archive.restore_command.clone()));
    }
    Ok(wanted)
}

/// Forgets where recovery is to end by the configuration, which is that of a base backup: it is left of an earlier recovery. Returns what
/// PostgreSQL must be told to do so, too.
fn forget_target(options: &Options, settings: &mut RecoverySettings) -> Vec<(String, String)> {
    let defaults = RecoverySettings::default();
    let mut emptied = Vec::new();
    if let Some(target) = settings.target.take() {
        emptied.push((target.parameter().to_owned(), String::new()));
    }
    if std::mem::replace(&mut settings.target_inclusive, defaults.target_inclusive) != defaults.target_inclusive {
        emptied.push(("recovery_target_inclusive".to_owned(), "on".to_owned()));
    }
    if std::mem::replace(&mut settings.target_action, defaults.target_action) != defaults.target_action {
        emptied.push(("recovery_target_action".to_owned(), "pause".to_owned()));
    }
    if std::mem::replace(&mut settings.target_timeline, defaults.target_timeline) != defaults.target_timeline {
        emptied.push(("recovery_target_timeline".to_owned(), "latest".to_owned()));
    }
    let given = [
        options.target.as_ref().map(RecoveryTarget::parameter),
        options.inclusive.map(|_| "recovery_target_inclusive"),
        options.timeline.map(|_| "recovery_target_timeline"),
    ];
    emptied.retain(|(name, _)| !given.contains(&Some(name.as_str())));
    emptied
}

/// Parameters that say where a recovery ends.
const TARGETS: [&str; 6] = [
    "recovery_target",
    "recovery_target_lsn",
    "recovery_target_name",
    "recovery_target_time",
    "recovery_target_xid",
    "recovery_target_inclusive",
];

/// Removes recovery targets from `postgresql.auto.conf`, those that the command line gave and those of earlier runs, once recovery has ended: a
/// base backup of the new primary would have them, too, and recovery of that would end there. Returns the names of those that it gave.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn remove_targets(data_dir: &Path, wanted: &[(String, String)]) -> Result<Vec<String>, ReplayError> {
    let names = wanted.iter().map(|(name, _)| name.clone());
    let names: Vec<String> = names.filter(|name| name.starts_with("recovery_target")).collect();
    let is_target = |name: &str| TARGETS.contains(&name.to_ascii_lowercase().as_str());
    config::unset_auto_conf(data_dir, |name| {
        is_target(name) || names.iter().any(|one| one.eq_ignore_ascii_case(name))
    })?;
    Ok(names)
}

/// Writes the signal file and the settings that the command line gave, unless they stand there already.
pub(super) fn write_settings(
    data_dir: &DataDir,
    options: &Options,
    wanted: &[(String, String)],
) -> Result<Vec<(String, String)>, ReplayError> {
    let configured = Config::read(data_dir.path(), options.config_file.as_deref())?;
    let missing: Vec<(String, String)> = wanted
        .iter()
        .filter(|(name, value)| configured.get(name).is_none_or(|setting| setting.value != *value))
        .cloned()
        .collect();
    if !missing.is_empty() {
        let pairs: Vec<(&str, &str)> = missing.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        config::set_auto_conf(data_dir.path(), &pairs)?;
    }
    match options.upstream {
        Some(_) => config::write_standby_signal(data_dir.path())?,
        None if !data_dir.signals().archive_recovery() => config::write_recovery_signal(data_dir.path())?,
        None => {}
    }
    Ok(missing)
}

/// Where WAL is looked for: what the command line or `restore_command` says, then `pg_wal`, as PostgreSQL does.
pub(super) fn places(
    options: &Options,
    data_dir: &DataDir,
    settings: &RecoverySettings,
    archive_recovery: bool,
) -> Vec<Arc<dyn Driver>> {
    let mut places: Vec<Arc<dyn Driver>> = Vec::new();
    if let Some(archive) = &options.archive {
        places.push(archive.driver.clone());
    } else if let Some(wal) = &options.wal {
        places.push(Arc::new(Directory::new(wal)));
    } else if let Some(command) = settings.restore_command.as_ref().filter(|_| archive_recovery) {
        let command = RestoreCommand::new(command, data_dir.path(), data_dir.control().segment_size)
            .with_jobs(options.fetch_jobs)
            .growing(options.follow || options.upstream.is_some());
        places.push(Arc::new(command));
    }
    places.push(Arc::new(Directory::new(data_dir.path().join("pg_wal"))));
    places
}
