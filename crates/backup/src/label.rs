//! `backup_label` and `tablespace_map` as they are written (`build_backup_content`, `access/transam/xlogbackup.c`; `do_pg_backup_start`,
//! `access/transam/xlog.c`; PostgreSQL 18). `datadir` reads them.

use walrider_layout::Oid;
use walrider_layout::control::ControlFile;

use crate::header::now;
use crate::manifest::utc;

/// The contents of `backup_label` of a directory that is in recovery, where it begins with this control file.
pub fn backup_label(control: &ControlFile, label: &str) -> String {
    let (start, timeline) = (control.checkpoint_copy.redo, control.checkpoint_copy.timeline);
    let size = control.segment_size;
    let segment = size.file_name(timeline, size.segment_of(start));
    let (checkpoint, time) = (control.checkpoint, utc(now()));
    format!(
        "START WAL LOCATION: {start} (file {segment})\nCHECKPOINT LOCATION: {checkpoint}\nBACKUP METHOD: streamed\n\
         BACKUP FROM: standby\nSTART TIME: {time} UTC\nLABEL: {label}\nSTART TIMELINE: {timeline}\n"
    )
}

/// The contents of `tablespace_map`: where the links lead, with a backslash before what would end a line.
pub fn tablespace_map<'t>(links: impl IntoIterator<Item = (Oid, &'t [u8])>) -> Vec<u8> {
    let mut map = Vec::new();
    for (oid, location) in links {
        map.extend(format!("{oid} ").into_bytes());
        for &byte in location {
            if matches!(byte, b'\n' | b'\r' | b'\\') {
                map.push(b'\\');
            }
            map.push(byte);
        }
        map.push(b'\n');
    }
    map
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use walrider_datadir::backup_label::{BackupLabel, parse_tablespace_map};
    use walrider_layout::control::{CheckPoint, DbState};
    use walrider_layout::wal::SegmentSize;
    use walrider_layout::{Lsn, Major, TimelineId};

    use super::*;

    fn control() -> ControlFile {
        let checkpoint = CheckPoint {
            redo: Lsn(0x2_0500_0028),
            timeline: TimelineId(3),
            full_page_writes: true,
            ..CheckPoint::default()
        };
        ControlFile {
            major: Major::V18,
            system_identifier: 1,
            catalog_version: Major::V18.catalog_version(),
            state: DbState::InArchiveRecovery,
            time: 0,
            checkpoint: Lsn(0x2_0500_0100),
            checkpoint_copy: checkpoint,
            unlogged_lsn: Lsn(1000),
            min_recovery_point: Lsn(0x2_0600_0000),
            min_recovery_point_timeline: TimelineId(3),
            backup_start_point: Lsn(0),
            backup_end_point: Lsn(0),
            backup_end_required: false,
            wal_level: 1,
            wal_log_hints: false,
            max_connections: 100,
            max_worker_processes: 8,
            max_wal_senders: 10,
            max_prepared_xacts: 0,
            max_locks_per_xact: 64,
            track_commit_timestamp: false,
            segment_size: SegmentSize::new(16 << 20).unwrap(),
            data_checksum_version: 1,
            default_char_signedness: Some(true),
            mock_authentication_nonce: [0; 32],
        }
    }

    #[test]
    fn the_label_is_read_as_a_standbys() {
        let control = control();
        let text = backup_label(&control, "two words: LABEL");
        assert!(text.starts_with("START WAL LOCATION: 2/5000028 (file 000000030000000200000005)\n"), "{text}");
        let read = BackupLabel::parse(&text).unwrap();
        assert!(read.streamed && read.from_standby);
        assert_eq!(
            (read.start_lsn, read.start_timeline, read.checkpoint),
            (control.checkpoint_copy.redo, TimelineId(3), control.checkpoint)
        );
        assert_eq!(read.label.as_deref(), Some("two words: LABEL"));
    }

    #[test]
    fn the_map_has_the_links() {
        let odd = "/some\nwhere\\odd";
        let map = parse_tablespace_map(&tablespace_map([(20000, odd.as_bytes())])).unwrap();
        assert_eq!(map.iter().map(|one| (one.oid, one.path.as_path())).collect::<Vec<_>>(), [(20000, Path::new(odd))]);
    }
}
