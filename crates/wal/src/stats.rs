//! How many records of which type there are, and how many bytes they and their full-page images take, counted and
//! printed as `pg_waldump --stats` does (`access/transam/xlogstats.c`, `XLogDumpDisplayStats` in
//! `bin/pg_waldump/pg_waldump.c`, PostgreSQL 18).

use std::borrow::Cow;
use std::fmt;

use walrider_layout::Lsn;

use crate::record::Record;
use crate::records::xact::XLOG_XACT_OPMASK;
use crate::rmgr::RmgrId;

/// Record types per resource manager: the upper four bits of `xl_info` (`MAX_XLINFO_TYPES`).
const TYPES: usize = 16;
const RMGRS: usize = 256;

/// Records of some kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many.
    pub count: u64,
    /// Their bytes, without full-page images.
    pub record_bytes: u64,
    /// Bytes of their full-page images, as stored.
    pub fpi_bytes: u64,
}

impl Counts {
    /// All of their bytes.
    pub fn total_bytes(&self) -> u64 {
        self.record_bytes + self.fpi_bytes
    }

    fn add(&mut self, other: &Counts) {
        self.count += other.count;
        self.record_bytes += other.record_bytes;
        self.fpi_bytes += other.fpi_bytes;
    }
}

/// Bytes of a record's full-page images, as stored (`XLogRecGetLen`). The rest of its length is the record proper.
pub fn fpi_bytes(record: &Record<'_>) -> u64 {
    record.blocks.iter().filter_map(|block| block.image).map(|image| image.bytes.len() as u64).sum()
}

/// The name of a record type as `pg_waldump` prints it behind the resource manager's.
pub fn type_name(rmgr: RmgrId, info: u8) -> Cow<'static, str> {
    let info = info & 0xF0;
    match rmgr.get().and_then(|known| (known.identify)(info)) {
        Some(name) => name.into(),
        None => format!("UNKNOWN ({info:x})").into(),
    }
}

/// What rows of a table stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Resource managers (`--stats=rmgr`).
    Rmgr,
    /// Record types (`--stats=record`).
    Record,
}

/// What was counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalStats {
    counts: Vec<Counts>,
    /// Where the first record begins; zero if there was none.
    pub start: Lsn,
    /// One past the end of the last record; zero if there was none.
    pub end: Lsn,
}

impl Default for WalStats {
    fn default() -> WalStats {
        WalStats { counts: vec![Counts::default(); RMGRS * TYPES], start: Lsn::INVALID, end: Lsn::INVALID }
    }
}

impl WalStats {
    /// Nothing counted yet.
    pub fn new() -> WalStats {
        WalStats::default()
    }

    /// Counts a record (`XLogRecStoreStats`).
    pub fn add(&mut self, record: &Record<'_>) {
        let fpi_bytes = fpi_bytes(record);
        let rmgr = record.header.rmgr;
        let info = match rmgr {
            // The uppermost bit tells nothing about the type here.
            RmgrId::XACT => record.info() & XLOG_XACT_OPMASK,
            _ => record.info(),
        };
        let record_bytes = u64::from(record.header.total_len) - fpi_bytes;
        let counts = &mut self.counts[usize::from(rmgr.0) * TYPES + usize::from(info >> 4)];
        counts.add(&Counts { count: 1, record_bytes, fpi_bytes });
        if !self.start.is_valid() {
            self.start = record.lsn;
        }
        self.end = record.end;
    }

    /// Record types that there are, by resource manager and `xl_info`.
    pub fn types(&self) -> impl Iterator<Item = (RmgrId, u8, Counts)> {
        let all = self.counts.iter().enumerate().filter(|(_, counts)| counts.count > 0);
        all.map(|(at, counts)| (RmgrId((at / TYPES) as u8), (at % TYPES) as u8 * 0x10, *counts))
    }

    /// Resource managers, as `pg_waldump` lists them: all of PostgreSQL's own, and custom ones that there are.
    pub fn rmgrs(&self) -> impl Iterator<Item = (RmgrId, Counts)> {
        let sums = self.counts.chunks_exact(TYPES).enumerate().map(|(rmgr, types)| {
            let mut sum = Counts::default();
            types.iter().for_each(|counts| sum.add(counts));
            (RmgrId(rmgr as u8), sum)
        });
        sums.filter(|(rmgr, sum)| rmgr.get().is_some() || sum.count > 0)
    }

    /// All records.
    pub fn total(&self) -> Counts {
        let mut total = Counts::default();
        self.counts.iter().for_each(|counts| total.add(counts));
        total
    }

    /// The table that `pg_waldump` prints; nothing if there was no record.
    pub fn table(&self, by: By) -> impl fmt::Display + '_ {
        Table { stats: self, by }
    }
}

struct Table<'a> {
    stats: &'a WalStats,
    by: By,
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WalStats { start, end, .. } = self.stats;
        if !end.is_valid() {
            return Ok(());
        }
        let total = self.stats.total();
        writeln!(f, "WAL statistics between {start} and {end}:")?;
        let columns = ["N", "Record size", "FPI size", "Combined size"];
        heading(f, "Type", columns, "(%)")?;
        heading(f, "----", columns.map(|title| &"-------------"[..title.len()]), "---")?;
        match self.by {
            By::Rmgr => {
                for (rmgr, counts) in self.stats.rmgrs() {
                    row(f, &rmgr.to_string(), &counts, &total)?;
                }
            }
            By::Record => {
                for (rmgr, info, counts) in self.stats.types() {
                    row(f, &format!("{rmgr}/{}", type_name(rmgr, info)), &counts, &total)?;
                }
            }
        }
        let line = "--------";
        writeln!(f, "{:27} {line:>20} {:8} {line:>20} {:8} {line:>20} {:8} {line:>20}", "", "", "", "")?;
        let of_total = |part| format!("[{:.2}%]", percent(part, total.total_bytes()));
        writeln!(
            f,
            "{:27} {:20} {:9}{:20} {:9}{:20} {:9}{:20} {:6}",
            "Total",
            total.count,
            "",
            total.record_bytes,
            of_total(total.record_bytes),
            total.fpi_bytes,
            of_total(total.fpi_bytes),
            total.total_bytes(),
            "[100%]"
        )
    }
}

fn heading(f: &mut fmt::Formatter<'_>, first: &str, columns: [&str; 4], percent: &str) -> fmt::Result {
    write!(f, "{first:27}")?;
    columns.iter().try_for_each(|column| write!(f, " {column:>20} {percent:>8}"))?;
    writeln!(f)
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, counts: &Counts, total: &Counts) -> fmt::Result {
    let cells = [
        (counts.count, total.count),
        (counts.record_bytes, total.record_bytes),
        (counts.fpi_bytes, total.fpi_bytes),
        (counts.total_bytes(), total.total_bytes()),
    ];
    write!(f, "{name:27}")?;
    cells.iter().try_for_each(|&(part, whole)| write!(f, " {part:20} ({:6.2})", percent(part, whole)))?;
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::BKPIMAGE_COMPRESS_LZ4;
    use crate::testing::{RecordBuilder, TEST_REL};
    use walrider_layout::ForkNumber;

    fn stats(records: &[Vec<u8>]) -> WalStats {
        let mut stats = WalStats::new();
        let mut lsn = Lsn(0x1_0000_0028);
        for bytes in records {
            let record = RecordBuilder::parse(bytes, lsn);
            stats.add(&record);
            lsn = record.end;
        }
        stats
    }

    fn sample() -> WalStats {
        let commit = RecordBuilder::new(RmgrId::XACT, 0x80).main_data([0; 12]).build();
        let plain_commit = RecordBuilder::new(RmgrId::XACT, 0).main_data([0; 8]).build();
        let insert = RecordBuilder::new(RmgrId::HEAP, 0x80)
            .main_data([0; 3])
            .block(0, TEST_REL, ForkNumber::Main, 7)
            .image(BKPIMAGE_COMPRESS_LZ4, 0, 0, [1; 100])
            .block(1, TEST_REL, ForkNumber::VisibilityMap, 0)
            .image(BKPIMAGE_COMPRESS_LZ4, 0, 0, [1; 50])
            .build();
        let custom = RecordBuilder::new(RmgrId(128), 0x20).build();
        stats(&[commit, plain_commit, insert, custom])
    }

    #[test]
    fn images_are_counted_apart() {
        let types: Vec<_> = sample().types().collect();
        let [(rmgr, 0, commits), (heap, 0x80, inserts), (RmgrId(128), 0x20, custom)] = types[..] else {
            panic!("{types:?}");
        };
        assert_eq!((rmgr, heap), (RmgrId::XACT, RmgrId::HEAP));
        assert_eq!(commits, Counts { count: 2, record_bytes: 24 + 14 + 24 + 10, fpi_bytes: 0 });
        assert_eq!(inserts, Counts { count: 1, record_bytes: 24 + 9 + 16 + 9 + 4 + 5, fpi_bytes: 150 });
        assert_eq!(custom, Counts { count: 1, record_bytes: 24, fpi_bytes: 0 });
        assert_eq!(
            (type_name(RmgrId::HEAP, 0x80), type_name(RmgrId(128), 0x2F)),
            ("INSERT+INIT".into(), "UNKNOWN (20)".into())
        );
    }

    #[test]
    fn the_table_is_that_of_pg_waldump() {
        let table = sample().table(By::Record).to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "WAL statistics between 1/28 and 1/170:");
        assert_eq!(
            lines[1],
            "Type                                           N      (%)          Record size      (%)             \
             FPI size      (%)        Combined size      (%)"
        );
        assert_eq!(
            lines[2],
            "----                                           -      ---          -----------      ---             \
             --------      ---        -------------      ---"
        );
        assert_eq!(
            lines[3],
            "Transaction/COMMIT                             2 ( 50.00)                   72 ( 44.17)                    \
             0 (  0.00)                   72 ( 23.00)"
        );
        assert_eq!(lines[5].split_whitespace().next(), Some("custom128/UNKNOWN"));
        assert_eq!(
            lines[6],
            "                                        --------                      --------                      \
             --------                      --------"
        );
        assert_eq!(
            lines[7],
            "Total                                          4                           163 [52.08%]                  \
             150 [47.92%]                  313 [100%]"
        );
        assert_eq!(lines.len(), 8);
        assert_eq!(
            sample().table(By::Rmgr).to_string().lines().count(),
            5 + 22 + 1,
            "one line each, and the custom one"
        );
        assert_eq!(WalStats::new().table(By::Rmgr).to_string(), "");
    }
}
