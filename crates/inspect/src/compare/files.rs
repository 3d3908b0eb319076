//! Compares what is neither relation nor SLRU: maps, two-phase state, replication origins, the control file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use walrider_datadir::origins;
use walrider_datadir::relmap::MAX_MAPPINGS;
use walrider_layout::Lsn;
use walrider_layout::control::{CheckPoint, ControlFile};

use super::classes::Class;
use super::tally::{Location, ReadError, Tally, excerpt};

fn read(path: &Path) -> Result<Vec<u8>, ReadError> {
    fs::read(path).map_err(ReadError::at(path))
}

/// Compares two files byte by byte.
pub fn compare_bytes(name: &str, paths: [&Path; 2], tally: &mut Tally) -> Result<(), ReadError> {
    report_bytes(name, &read(paths[0])?, &read(paths[1])?, tally);
    Ok(())
}

fn report_bytes(name: &str, a: &[u8], b: &[u8], tally: &mut Tally) {
    if a == b {
        return;
    }
    let offset = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    let field = if name.ends_with("pg_filenode.map") { map_field(offset) } else { String::new() };
    let place = Location { block: None, offset: Some(offset), field };
    tally.find(Class::File, name, place, excerpt(a, offset), excerpt(b, offset));
}

/// The field of a relation map at a byte (`RelMapFile`).
fn map_field(offset: usize) -> String {
    match (offset / 4, offset / 8) {
        (0, _) => "magic".to_owned(),
        (1, _) => "num_mappings".to_owned(),
        (word, pair) if pair <= MAX_MAPPINGS as usize => {
            format!("mappings[{}].{}", pair - 1, if word % 2 == 0 { "mapoid" } else { "mapfilenumber" })
        }
        _ => "crc".to_owned(),
    }
}

/// Compares `replorigin_checkpoint`: by origin, because their order is that of their slots in shared memory. An absent
/// file has no origins (`StartupReplicationOrigin`).
pub fn compare_origins(name: &str, paths: [Option<&Path>; 2], tally: &mut Tally) -> Result<(), ReadError> {
    let mut bytes = [Vec::new(), Vec::new()];
    for (bytes, path) in bytes.iter_mut().zip(paths) {
        if let Some(path) = path {
            *bytes = read(path)?;
        }
    }
    let [a, b] = &bytes;
    if a == b {
        return Ok(());
    }
    let parse = |side: usize| match paths[side] {
        Some(_) => origins::parse(&bytes[side]).ok().map(BTreeMap::from_iter),
        None => Some(BTreeMap::new()),
    };
    let (Some(left), Some(right)) = (parse(0), parse(1)) else {
        report_bytes(name, a, b, tally);
        return Ok(());
    };
    if left == right {
        let class = if a.is_empty() || b.is_empty() { Class::EmptyFile } else { Class::OriginOrder };
        tally.find(class, name, Location::default(), format!("{} bytes", a.len()), format!("{} bytes", b.len()));
        return Ok(());
    }
    let mut origins: Vec<u16> = left.keys().chain(right.keys()).copied().collect();
    origins.sort_unstable();
    origins.dedup();
    for origin in origins.into_iter().filter(|origin| left.get(origin) != right.get(origin)) {
        let place = Location { block: None, offset: None, field: format!("remote_lsn of origin {origin}") };
        let show = |side: &BTreeMap<u16, Lsn>| side.get(&origin).map_or("absent".to_owned(), Lsn::to_string);
        tally.find(Class::Origin, name, place, show(&left), show(&right));
    }
    Ok(())
}

/// Compares two control files field by field.
pub fn compare_control(name: &str, a: &ControlFile, b: &ControlFile, tally: &mut Tally) {
    for ((field, a), (_, b)) in control_fields(a).into_iter().zip(control_fields(b)) {
        if a != b {
            let class = if field == "time" { Class::ControlTime } else { Class::Control };
            tally.find(class, name, Location { block: None, offset: None, field: field.to_owned() }, a, b);
        }
    }
}

/// The fields of a control file, under PostgreSQL's names. What [`ControlFile`] has no field for is the same in all
/// files that it accepts.
fn control_fields(control: &ControlFile) -> Vec<(&'static str, String)> {
    // Names every field, so that a new one cannot be forgotten here.
    let ControlFile {
        major,
        system_identifier,
        catalog_version,
        state,
        time,
        checkpoint,
        checkpoint_copy,
        unlogged_lsn,
        min_recovery_point,
        min_recovery_point_timeline,
        backup_start_point,
        backup_end_point,
        backup_end_required,
        wal_level,
        wal_log_hints,
        max_connections,
        max_worker_processes,
        max_wal_senders,
        max_prepared_xacts,
        max_locks_per_xact,
        track_commit_timestamp,
        segment_size,
        data_checksum_version,
        default_char_signedness,
        mock_authentication_nonce,
    } = control;
    let mut fields = vec![
        ("system_identifier", system_identifier.to_string()),
        ("pg_control_version", major.control_version().to_string()),
        ("catalog_version_no", catalog_version.to_string()),
        ("state", state.name().to_owned()),
        ("time", time.to_string()),
        ("checkPoint", checkpoint.to_string()),
    ];
    fields.extend(checkpoint_fields(checkpoint_copy));
    fields.extend([
        ("unloggedLSN", unlogged_lsn.to_string()),
        ("minRecoveryPoint", min_recovery_point.to_string()),
        ("minRecoveryPointTLI", min_recovery_point_timeline.to_string()),
        ("backupStartPoint", backup_start_point.to_string()),
        ("backupEndPoint", backup_end_point.to_string()),
        ("backupEndRequired", backup_end_required.to_string()),
        ("wal_level", wal_level.to_string()),
        ("wal_log_hints", wal_log_hints.to_string()),
        ("MaxConnections", max_connections.to_string()),
        ("max_worker_processes", max_worker_processes.to_string()),
        ("max_wal_senders", max_wal_senders.to_string()),
        ("max_prepared_xacts", max_prepared_xacts.to_string()),
        ("max_locks_per_xact", max_locks_per_xact.to_string()),
        ("track_commit_timestamp", track_commit_timestamp.to_string()),
        ("xlog_seg_size", segment_size.bytes().to_string()),
        ("data_checksum_version", data_checksum_version.to_string()),
        ("default_char_signedness", default_char_signedness.map_or("none".into(), |signed| signed.to_string())),
        ("mock_authentication_nonce", mock_authentication_nonce.iter().map(|byte| format!("{byte:02x}")).collect()),
    ]);
    fields
}

fn checkpoint_fields(checkpoint: &CheckPoint) -> Vec<(&'static str, String)> {
    let CheckPoint {
        redo,
        timeline,
        previous_timeline,
        full_page_writes,
        wal_level,
        next_xid,
        next_oid,
        next_multi,
        next_multi_offset,
        oldest_xid,
        oldest_xid_db,
        oldest_multi,
        oldest_multi_db,
        time,
        oldest_commit_ts_xid,
        newest_commit_ts_xid,
        oldest_active_xid,
        // Between the fields: whatever was in the memory of the server that wrote the record.
        padding: _,
    } = checkpoint;
    vec![
        ("checkPointCopy.redo", redo.to_string()),
        ("checkPointCopy.ThisTimeLineID", timeline.to_string()),
        ("checkPointCopy.PrevTimeLineID", previous_timeline.to_string()),
        ("checkPointCopy.fullPageWrites", full_page_writes.to_string()),
        ("checkPointCopy.wal_level", wal_level.to_string()),
        ("checkPointCopy.nextXid", format!("{}:{}", next_xid >> 32, *next_xid as u32)),
        ("checkPointCopy.nextOid", next_oid.to_string()),
        ("checkPointCopy.nextMulti", next_multi.to_string()),
        ("checkPointCopy.nextMultiOffset", next_multi_offset.to_string()),
        ("checkPointCopy.oldestXid", oldest_xid.to_string()),
        ("checkPointCopy.oldestXidDB", oldest_xid_db.to_string()),
        ("checkPointCopy.oldestMulti", oldest_multi.to_string()),
        ("checkPointCopy.oldestMultiDB", oldest_multi_db.to_string()),
        ("checkPointCopy.time", time.to_string()),
        ("checkPointCopy.oldestCommitTsXid", oldest_commit_ts_xid.to_string()),
        ("checkPointCopy.newestCommitTsXid", newest_commit_ts_xid.to_string()),
        ("checkPointCopy.oldestActiveXid", oldest_active_xid.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_relation_map_have_names() {
        assert_eq!(map_field(5), "num_mappings");
        assert_eq!(map_field(8), "mappings[0].mapoid");
        assert_eq!(map_field(15), "mappings[0].mapfilenumber");
        assert_eq!(map_field(516), "mappings[63].mapfilenumber");
        assert_eq!(map_field(520), "crc");
    }

    #[test]
    fn origins_are_compared_whatever_their_order() {
        let compared = |a: &[(u16, Lsn)], b: &[(u16, Lsn)]| {
            let dirs = [a, b].map(|entries| {
                let dir = tempfile::tempdir().unwrap();
                fs::create_dir(dir.path().join("pg_logical")).unwrap();
                origins::write(dir.path(), entries.iter().copied()).unwrap();
                dir
            });
            let [a, b] = dirs.each_ref().map(|dir| dir.path().join("pg_logical/replorigin_checkpoint"));
            let mut tally = Tally::new(false, 10);
            compare_origins("o", [Some(&a), Some(&b)], &mut tally).unwrap();
            (tally.of(Class::OriginOrder), tally.of(Class::Origin))
        };
        let (one, other) = ((1, Lsn(7)), (2, Lsn(8)));
        assert_eq!(compared(&[one, other], &[one, other]), (0, 0));
        assert_eq!(compared(&[one, other], &[other, one]), (1, 0));
        assert_eq!(compared(&[one, other], &[one, (2, Lsn(9))]), (0, 1));
        assert_eq!(compared(&[one], &[]), (0, 1));
    }
}
