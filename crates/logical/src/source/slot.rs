//! Before the stream: the session's settings, the slot, the publications.

use walrider_layout::Lsn;
use walrider_session::{ConnectError, ConnectOptions, Connection, SlotOfDatabase, SystemIdentity};
use walrider_wire::command::{Snapshot, quote_literal};

use super::SourceError;
use crate::message::Protocol;

/// The output plugins that we can read.
pub const PLUGINS: [&str; 2] = ["pgoutput", "walrider_pgoutput"];

/// Settings of the session that say how values are written (`libpqrcv_connect`, `libpqwalreceiver.c`; there the encoding is the
/// subscriber's).
pub const SESSION_SETTINGS: [(&str, &str); 5] = [
    ("client_encoding", "UTF8"),
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("extra_float_digits", "3"),
    ("search_path", ""),
];

/// Makes a slot with one of [`PLUGINS`]; returns where decoding begins. Waits for all transactions that run. `if_not_exists`: one
/// that is there will do, whatever it is, and nothing is returned.
///
/// # Errors
/// No connection, or no slot; says why, and what to do where the plugin is not there or not allowed.
pub fn create_slot(
    connect: &ConnectOptions,
    name: &str,
    plugin: &str,
    two_phase: bool,
    if_not_exists: bool,
) -> Result<Option<Lsn>, SourceError> {
    let mut connection = self::connect(connect)?;
    if if_not_exists && connection.slot_of_database(name)?.is_some() {
        return Ok(None);
    }
    connection.set_response_timeout(None);
    match connection.create_logical_slot(name, plugin, two_phase, Snapshot::Nothing) {
        Ok(made) => Ok(Some(made.consistent_point)),
        Err(error) => Err(match hint(&error) {
            Some(hint) => SourceError::NotCreated { slot: name.to_owned(), error: Box::new(error), hint },
            None => error.into(),
        }),
    }
}

/// Drops a slot that nobody uses.
///
/// # Errors
/// No connection, no such slot, or one in use.
pub fn drop_slot(connect: &ConnectOptions, name: &str) -> Result<(), SourceError> {
    Ok(self::connect(connect)?.drop_slot(name)?)
}

/// Who the publisher is, and what a slot there was told last; zero without one.
///
/// # Errors
/// No connection, or no answer.
pub fn confirmed(connect: &ConnectOptions, name: &str) -> Result<(SystemIdentity, Lsn), SourceError> {
    let mut connection = self::connect(connect)?;
    let slot = connection.slot_of_database(name)?;
    Ok((connection.identify_system()?, slot.map_or(Lsn(0), |slot| slot.confirmed_flush)))
}

/// Who the publisher is.
///
/// # Errors
/// No connection, or no answer.
pub fn identify(connect: &ConnectOptions) -> Result<SystemIdentity, SourceError> {
    Ok(self::connect(connect)?.identify_system()?)
}

/// What to do where the server does not say.
fn hint(error: &ConnectError) -> Option<&'static str> {
    let message = &error.server_message()?.message;
    if message.contains("may not be used as an output plugin") {
        return Some(
            "the server uses only output plugins that it is told to: add it to output_plugin_libraries, as in 'pgoutput, \
             walrider_pgoutput', and reload",
        );
    }
    if error.is_sqlstate("58P01") {
        return Some("install the plugin on the publisher: make -C extension install");
    }
    None
}

/// Connects, with [`SESSION_SETTINGS`].
pub(super) fn connect(options: &ConnectOptions) -> Result<Connection, SourceError> {
    let mut connection = Connection::open(options)?;
    let version = connection.server_version_num();
    if version < 170_000 {
        return Err(SourceError::OldServer(version / 10_000));
    }
    let set = |(name, value): (&str, &str)| {
        format!("pg_catalog.set_config({}, {}, false)", quote_literal(name), quote_literal(value))
    };
    connection.simple_query(&format!("SELECT {}", SESSION_SETTINGS.map(set).join(", ")))?;
    Ok(connection)
}

/// Looks whether the slot can be used from here.
pub(super) fn check(
    connection: &mut Connection,
    name: &str,
    connected: &str,
    protocol: Protocol,
) -> Result<SlotOfDatabase, SourceError> {
    match connection.slot_of_database(name)? {
        Some(slot) => verdict(slot, name, connected, protocol),
        None => Err(SourceError::NoSlot(name.to_owned())),
    }
}

fn verdict(
    slot: SlotOfDatabase,
    name: &str,
    connected: &str,
    protocol: Protocol,
) -> Result<SlotOfDatabase, SourceError> {
    let name = name.to_owned();
    if !slot.logical {
        return Err(SourceError::Physical(name));
    }
    if slot.database != connected {
        return Err(SourceError::Database { slot: name, database: slot.database, connected: connected.to_owned() });
    }
    if !PLUGINS.contains(&slot.plugin.as_str()) {
        return Err(SourceError::Plugin { slot: name, plugin: slot.plugin });
    }
    if let Some(reason) = slot.invalidation_reason {
        return Err(SourceError::Invalidated { slot: name, reason });
    }
    if slot.synced {
        return Err(SourceError::Synced(name));
    }
    if slot.two_phase && protocol < Protocol::V3 {
        return Err(SourceError::TwoPhase(name));
    }
    // Last: of what can be said of a slot, that alone passes.
    match slot.active_pid {
        Some(pid) => Err(SourceError::InUse { slot: name, pid }),
        None => Ok(slot),
    }
}

/// A publication that is missing is an error in the middle of the stream, or is passed over in silence (PostgreSQL 18): looks for
/// them before.
pub(super) fn check_publications(
    connection: &mut Connection,
    names: &[String],
    database: &str,
) -> Result<(), SourceError> {
    let rows = connection.simple_query("SELECT pubname FROM pg_catalog.pg_publication")?;
    let is_there =
        |name: &String| rows.iter().any(|row| row.first().is_some_and(|it| it.as_deref() == Some(name.as_bytes())));
    let names: Vec<String> = names.iter().filter(|name| !is_there(name)).cloned().collect();
    if names.is_empty() { Ok(()) } else { Err(SourceError::NoPublication { names, database: database.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_that_cannot_be_used_is_told_apart() {
        let fits = SlotOfDatabase {
            logical: true,
            plugin: "pgoutput".into(),
            database: "d".into(),
            active_pid: None,
            two_phase: false,
            confirmed_flush: Lsn(1),
            invalidation_reason: None,
            synced: false,
        };
        let refused = |slot: SlotOfDatabase, part: &str| {
            let error = verdict(slot, "s", "d", Protocol::V2).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
            error.never_heals()
        };
        assert!(refused(SlotOfDatabase { logical: false, plugin: String::new(), ..fits.clone() }, "physical"));
        assert!(refused(SlotOfDatabase { database: "e".into(), ..fits.clone() }, "dbname=e"));
        assert!(refused(SlotOfDatabase { plugin: "test_decoding".into(), ..fits.clone() }, "test_decoding"));
        assert!(refused(
            SlotOfDatabase { invalidation_reason: Some("wal_removed".into()), ..fits.clone() },
            "wal_removed"
        ));
        assert!(refused(SlotOfDatabase { synced: true, ..fits.clone() }, "standby"));
        assert!(refused(SlotOfDatabase { two_phase: true, ..fits.clone() }, "protocol 3"));
        assert!(!refused(SlotOfDatabase { active_pid: Some(7), ..fits.clone() }, "process 7"));
        assert_eq!(verdict(fits.clone(), "s", "d", Protocol::V2).unwrap(), fits);
        let two_phase = SlotOfDatabase { two_phase: true, plugin: "walrider_pgoutput".into(), ..fits };
        assert!(verdict(two_phase, "s", "d", Protocol::V3).is_ok());
    }
}
