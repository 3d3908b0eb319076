//! A record as one line of text, as `pg_waldump` prints it (`XLogDumpDisplayRecord` in `bin/pg_waldump/pg_waldump.c`,
//! `XLogRecGetBlockRefInfo` in `access/rmgrdesc/xlogdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::{ForkNumber, Lsn};

use crate::record::Record;
use crate::stats::{fpi_bytes, type_name};

/// Appends what the record's own resource manager says about it.
pub fn describe(record: &Record<'_>, out: &mut String) {
    if let Some(known) = record.header.rmgr.get() {
        (known.describe)(record, out);
    }
}

/// Appends the line, without its end.
pub fn describe_line(record: &Record<'_>, out: &mut String) {
    let header = &record.header;
    let padded = |Lsn(lsn)| format!("{:X}/{:08X}", lsn >> 32, lsn as u32);
    let _ = write!(
        out,
        "rmgr: {:11} len (rec/tot): {:6}/{:6}, tx: {:10}, lsn: {}, prev {}, desc: {} ",
        header.rmgr.to_string(),
        u64::from(header.total_len) - fpi_bytes(record),
        header.total_len,
        header.xid,
        padded(record.lsn),
        padded(header.prev),
        type_name(header.rmgr, header.info),
    );
    describe(record, out);
    for block in &record.blocks {
        let _ = write!(out, ", blkref #{}: rel {}", block.id, block.rel);
        if block.fork != ForkNumber::Main {
            let _ = write!(out, " fork {}", block.fork.name());
        }
        let _ = write!(out, " blk {}", block.block);
        if let Some(image) = block.image {
            out.push_str(if image.apply() { " FPW" } else { " FPW for WAL verification" });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};

    fn line(builder: &RecordBuilder) -> String {
        let bytes = builder.build();
        let mut out = String::new();
        describe_line(&RecordBuilder::parse(&bytes, Lsn(0x1_0000_0028)), &mut out);
        out
    }

    #[test]
    fn lines_read_like_those_of_pg_waldump() {
        let insert = RecordBuilder::new(RmgrId::HEAP, 0x80)
            .xid(740)
            .prev(Lsn(0xFFFF_FF00))
            .main_data([1, 0, 0])
            .block(0, TEST_REL, ForkNumber::Main, 7)
            .full_image(&[0; 8192])
            .block(2, TEST_REL, ForkNumber::VisibilityMap, 0);
        assert_eq!(
            line(&insert),
            "rmgr: Heap        len (rec/tot):     62/  8254, tx:        740, lsn: 1/00000028, prev 0/FFFFFF00, \
             desc: INSERT+INIT off: 1, flags: 0x00, blkref #0: rel 1663/5/16384 blk 7 FPW, \
             blkref #2: rel 1663/5/16384 fork vm blk 0"
        );
        assert_eq!(
            line(&RecordBuilder::new(RmgrId(200), 0xA3)),
            "rmgr: custom200   len (rec/tot):     24/    24, tx:          0, lsn: 1/00000028, prev 0/00000000, \
             desc: UNKNOWN (a0) "
        );
    }
}
