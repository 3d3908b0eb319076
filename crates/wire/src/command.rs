//! The commands of a walsender (`repl_gram.y`, PostgreSQL 17 and 18). The text goes into a Query message.

use walrider_layout::{Lsn, TimelineId};

/// Asks for system identifier, timeline and flush position.
pub const IDENTIFY_SYSTEM: &str = "IDENTIFY_SYSTEM";

/// Asks for a slot's type, `restart_lsn` and its timeline; all null if there is none of this name.
pub fn read_replication_slot(slot: &str) -> String {
    format!("READ_REPLICATION_SLOT {}", quote_identifier(slot))
}

/// Makes a physical slot that holds WAL from now on. A temporary one ends with the connection.
pub fn create_physical_slot(slot: &str, temporary: bool) -> String {
    let temporary = if temporary { " TEMPORARY" } else { "" };
    format!("CREATE_REPLICATION_SLOT {}{temporary} PHYSICAL (RESERVE_WAL)", quote_identifier(slot))
}

/// What CREATE_REPLICATION_SLOT does with the snapshot of the slot's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// Nobody wants it.
    Nothing,
    /// It can be imported in other sessions, until the next command of this one.
    Export,
    /// The transaction that this session has just begun reads with it.
    Use,
}

/// Makes a logical slot, from which what is committed from now on can be decoded.
///
/// ```
/// use walrider_wire::command::{Snapshot, create_logical_slot};
/// let command = create_logical_slot("s", "pgoutput", true, Snapshot::Nothing);
/// assert_eq!(command, r#"CREATE_REPLICATION_SLOT "s" LOGICAL "pgoutput" (SNAPSHOT 'nothing', TWO_PHASE true)"#);
/// ```
pub fn create_logical_slot(slot: &str, plugin: &str, two_phase: bool, snapshot: Snapshot) -> String {
    let (slot, plugin) = (quote_identifier(slot), quote_identifier(plugin));
    let snapshot = match snapshot {
        Snapshot::Nothing => "nothing",
        Snapshot::Export => "export",
        Snapshot::Use => "use",
    };
    format!("CREATE_REPLICATION_SLOT {slot} LOGICAL {plugin} (SNAPSHOT '{snapshot}', TWO_PHASE {two_phase})")
}

/// Asks a server of version 17 or newer for a slot, on a connection to a database; no row if there is none of this name.
pub fn slot_of_database(slot: &str) -> String {
    format!(
        "SELECT slot_type, plugin, database, active_pid, two_phase, confirmed_flush_lsn, invalidation_reason, synced \
         FROM pg_catalog.pg_replication_slots WHERE slot_name OPERATOR(pg_catalog.=) {}",
        quote_literal(slot)
    )
}

/// Drops a slot; `wait`: until nobody uses it any more, otherwise that is an error.
pub fn drop_replication_slot(slot: &str, wait: bool) -> String {
    format!("DROP_REPLICATION_SLOT {}{}", quote_identifier(slot), if wait { " WAIT" } else { "" })
}

/// Starts streaming WAL of `timeline` at `start`, inclusive.
///
/// ```
/// use walrider_layout::{Lsn, TimelineId};
/// let command = walrider_wire::command::start_replication(Some("a"), Lsn(0x1_0000_00A0), TimelineId(2));
/// assert_eq!(command, r#"START_REPLICATION SLOT "a" PHYSICAL 1/A0 TIMELINE 2"#);
/// ```
pub fn start_replication(slot: Option<&str>, start: Lsn, timeline: TimelineId) -> String {
    let slot = slot.map(|slot| format!("SLOT {} ", quote_identifier(slot))).unwrap_or_default();
    format!("START_REPLICATION {slot}PHYSICAL {start} TIMELINE {timeline}")
}

/// Starts decoding from a slot at `start`, or where the slot was left if that is later, with options for its plugin.
///
/// ```
/// use walrider_layout::Lsn;
/// let command = walrider_wire::command::start_logical_replication("s", Lsn(0xA0), &[("proto_version", "4")]);
/// assert_eq!(command, r#"START_REPLICATION SLOT "s" LOGICAL 0/A0 ("proto_version" '4')"#);
/// ```
pub fn start_logical_replication(slot: &str, start: Lsn, options: &[(&str, &str)]) -> String {
    let option = |(name, value): &(&str, &str)| format!("{} {}", quote_identifier(name), quote_literal(value));
    let options: Vec<String> = options.iter().map(option).collect();
    let options = if options.is_empty() { String::new() } else { format!(" ({})", options.join(", ")) };
    format!("START_REPLICATION SLOT {} LOGICAL {start}{options}", quote_identifier(slot))
}

/// Asks for the version of Walrider's extension in the database; no row without it.
pub const EXTENSION_VERSION: &str =
    "SELECT extversion FROM pg_catalog.pg_extension WHERE extname OPERATOR(pg_catalog.=) 'walrider'";

/// Starts the early stream: like [`start_replication`], on a connection to a database with the extension.
///
/// ```
/// use walrider_layout::{Lsn, TimelineId};
/// let command = walrider_wire::command::stream_wal(Some("a'b"), Lsn(0x1_0000_00A0), TimelineId(2));
/// assert_eq!(command, "CALL walrider.stream_wal('1/A0', 2, 'a''b')");
/// ```
pub fn stream_wal(slot: Option<&str>, start: Lsn, timeline: TimelineId) -> String {
    let slot = slot.map_or("NULL".to_owned(), quote_literal);
    format!("CALL walrider.stream_wal('{start}', {timeline}, {slot})")
}

/// Asks for a timeline's history file.
pub fn timeline_history(timeline: TimelineId) -> String {
    format!("TIMELINE_HISTORY {timeline}")
}

/// A name in double quotes. A zero byte, which would end the message, is left out: no name has one.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('\0', "").replace('"', "\"\""))
}

/// A text in single quotes, for commands and for SQL with `standard_conforming_strings`. Without zero bytes: no text has one.
pub fn quote_literal(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        assert_eq!(read_replication_slot("a\"b\0"), r#"READ_REPLICATION_SLOT "a""b""#);
        assert_eq!(create_physical_slot("s", true), r#"CREATE_REPLICATION_SLOT "s" TEMPORARY PHYSICAL (RESERVE_WAL)"#);
        assert_eq!(drop_replication_slot("s", true), r#"DROP_REPLICATION_SLOT "s" WAIT"#);
        assert_eq!(timeline_history(TimelineId(7)), "TIMELINE_HISTORY 7");
        assert_eq!(start_replication(None, Lsn(1), TimelineId(1)), "START_REPLICATION PHYSICAL 0/1 TIMELINE 1");
    }
}
