//! Parts that records of several resource managers share: arrays, transaction ids, cache invalidations, paths, times.

use std::fmt::{self, Write as _};
use std::marker::PhantomData;

use walrider_layout::bytes::{Reader, u16_at, u32_at};
use walrider_layout::{DEFAULT_TABLESPACE_OID, ForkNumber, GLOBAL_TABLESPACE_OID, Major, Oid, RelFileLocator};

/// Something of a fixed size that records hold arrays of.
pub trait Item {
    /// Its bytes in the array; those of the newest major where they differ.
    const SIZE: usize;

    /// Reads one from exactly as many bytes.
    fn read(bytes: &[u8]) -> Self;
}

impl Item for u16 {
    const SIZE: usize = 2;

    fn read(bytes: &[u8]) -> u16 {
        u16_at(bytes, 0)
    }
}

impl Item for u32 {
    const SIZE: usize = 4;

    fn read(bytes: &[u8]) -> u32 {
        u32_at(bytes, 0)
    }
}

impl Item for RelFileLocator {
    const SIZE: usize = 12;

    fn read(bytes: &[u8]) -> RelFileLocator {
        RelFileLocator { tablespace: u32_at(bytes, 0), database: u32_at(bytes, 4), relation: u32_at(bytes, 8) }
    }
}

/// An array within a record, not yet read. The bytes of all its elements are there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Items<'a, T> {
    bytes: &'a [u8],
    /// Bytes of an element, not 0.
    size: usize,
    of: PhantomData<T>,
}

impl<'a, T: Item> Items<'a, T> {
    /// Takes an array of `count` elements; `None` if there are fewer, or the count is negative.
    pub fn take(reader: &mut Reader<'a>, count: i32) -> Option<Items<'a, T>> {
        Items::take_sized(reader, count, T::SIZE)
    }

    /// As [`Items::take`], of elements that have another size in some major.
    pub(super) fn take_sized(reader: &mut Reader<'a>, count: i32, size: usize) -> Option<Items<'a, T>> {
        let len = usize::try_from(count).ok()?.checked_mul(size)?;
        Some(Items { bytes: reader.take(len)?, size, of: PhantomData })
    }

    /// As [`Items::take`], with the bytes behind it that align the next part to 8.
    pub(super) fn take_aligned(reader: &mut Reader<'a>, count: i32) -> Option<Items<'a, T>> {
        Items::take(reader, count)?.aligned(reader)
    }

    /// Takes the bytes behind the array that align the next part to 8.
    pub(super) fn aligned(self, reader: &mut Reader<'a>) -> Option<Items<'a, T>> {
        reader.take(self.bytes.len().next_multiple_of(8) - self.bytes.len())?;
        Some(self)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.size
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = T> + ExactSizeIterator + Clone + use<'a, T> {
        self.bytes.chunks_exact(self.size).map(T::read)
    }
}

impl<T: Item> Default for Items<'_, T> {
    fn default() -> Self {
        Items { bytes: &[], size: T::SIZE, of: PhantomData }
    }
}

impl<T: Item + fmt::Debug> fmt::Debug for Items<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// As `[a, b]` (`array_desc`, `access/rmgrdesc/rmgrdesc_utils.c`).
impl<T: Item + fmt::Display> fmt::Display for Items<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, item) in self.iter().enumerate() {
            write!(f, "{}{item}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// A 64-bit transaction id (`FullTransactionId`), shown as `epoch:xid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullTransactionId(pub u64);

impl fmt::Display for FullTransactionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0 >> 32, self.0 as u32)
    }
}

/// A message that caches of catalogs are out of date (`SharedInvalidationMessage`, `storage/sinval.h`): 16 bytes whose
/// meaning the first one tells. Bytes between the fields mean nothing and may be anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// `id`: a catalog cache if not negative, else what is meant.
    pub id: i8,
    /// `dbId`, where there is one.
    pub database: Oid,
    /// `catId`, `relId` or `relid`, where there is one.
    pub object: Oid,
}

impl Item for Invalidation {
    const SIZE: usize = 16;

    fn read(bytes: &[u8]) -> Invalidation {
        Invalidation { id: bytes[0] as i8, database: u32_at(bytes, 4), object: u32_at(bytes, 8) }
    }
}

/// Appends the description of invalidations (`standby_desc_invalidations`, `access/rmgrdesc/standbydesc.c`). With
/// `init_file`, of this database and tablespace, the relation cache's file is out of date, too.
pub(super) fn describe_invalidations(
    messages: &Items<'_, Invalidation>,
    database: Oid,
    tablespace: Oid,
    init_file: bool,
    out: &mut String,
) {
    if messages.is_empty() {
        return;
    }
    if init_file {
        let _ = write!(out, "; relcache init file inval dbid {database} tsid {tablespace}");
    }
    out.push_str("; inval msgs:");
    for message in messages.iter() {
        let Invalidation { id, database, object } = message;
        let _ = match id {
            0.. => write!(out, " catcache {id}"),
            -1 => write!(out, " catalog {object}"),
            -2 => write!(out, " relcache {object}"),
            -3 => write!(out, " smgr"),
            -4 => write!(out, " relmap db {database}"),
            -5 => write!(out, " snapshot {object}"),
            -6 => write!(out, " relsync {object}"),
            _ => write!(out, " unrecognized id {id}"),
        };
    }
}

/// Reads the main data of a record that says which page of an SLRU begins, all that it says (`WriteZeroPageXlogRec`
/// in clog.c and commit_ts.c, `WriteMZeroPageXlogRec`); `None` if it is too short.
pub fn parse_zero_page(main_data: &[u8]) -> Option<i64> {
    Reader::new(main_data).i64()
}

/// A relation's file, as a path within the data directory (`relpathperm`, `common/relpath.c`).
pub(super) struct RelPath(pub(super) RelFileLocator, pub(super) ForkNumber, pub(super) Major);

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RelPath(RelFileLocator { tablespace, database, relation }, fork, major) = *self;
        match tablespace {
            GLOBAL_TABLESPACE_OID => write!(f, "global/{relation}"),
            DEFAULT_TABLESPACE_OID => write!(f, "base/{database}/{relation}"),
            _ => {
                let (major, catalog) = (major.number(), major.catalog_version());
                write!(f, "pg_tblspc/{tablespace}/PG_{major}_{catalog}/{database}/{relation}")
            }
        }?;
        f.write_str(fork.suffix())
    }
}

/// A point in time, in microseconds since 2000-01-01 UTC (`TimestampTz`), as `pg_waldump` writes it
/// (`timestamptz_to_str`, `bin/pg_waldump/compat.c`) where the local time zone is UTC. Ours knows no other: which zone
/// the reader lives in is not in the WAL.
pub struct Timestamp(pub i64);

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAYS_FROM_1970_TO_2000: i64 = 10_957;
        // The sign of the fraction is that of the whole, also before 2000, and also in pg_waldump.
        let (seconds, fraction) = (self.0 / 1_000_000, self.0 % 1_000_000);
        let (days, second) = (seconds.div_euclid(86_400) + DAYS_FROM_1970_TO_2000, seconds.rem_euclid(86_400));
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{fraction:06} UTC")
    }
}

/// Year, month and day of the Gregorian calendar, from days since 1970-01-01. Counts in years that begin in March, so
/// that the leap day is the last of its year.
fn civil(days: i64) -> (i64, i64, i64) {
    const DAYS_IN_400_YEARS: i64 = 146_097;
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(DAYS_IN_400_YEARS), days.rem_euclid(DAYS_IN_400_YEARS));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// `wal_level` as `pg_waldump` writes it (`get_wal_level_string`, `access/rmgrdesc/xlogdesc.c`).
pub(super) fn wal_level_name(level: u32) -> &'static str {
    ["minimal", "replica", "logical"].get(level as usize).copied().unwrap_or("?")
}

/// A truth as a letter.
pub(super) fn true_false(value: bool) -> char {
    if value { 'T' } else { 'F' }
}

/// A number as C's `%g` writes it.
pub(super) struct General(pub(super) f64);

impl fmt::Display for General {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: i32 = 6;
        if !self.0.is_finite() {
            let sign = if self.0.is_sign_negative() { "-" } else { "" };
            return write!(f, "{sign}{}", if self.0.is_nan() { "nan" } else { "inf" });
        }
        let without_zeros = |digits: &str| match digits.contains('.') {
            true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => digits.to_owned(),
        };
        let scientific = format!("{:.*e}", DIGITS as usize - 1, self.0);
        let (digits, exponent) = scientific.split_once('e').expect("an exponent");
        let exponent: i32 = exponent.parse().expect("a number");
        if (-4..DIGITS).contains(&exponent) {
            let fixed = format!("{:.*}", (DIGITS - 1 - exponent) as usize, self.0);
            f.write_str(&without_zeros(&fixed))
        } else {
            let sign = if exponent < 0 { '-' } else { '+' };
            write!(f, "{}e{sign}{:02}", without_zeros(digits), exponent.abs())
        }
    }
}

/// The bytes before the first zero; `None` if there is none.
pub(super) fn c_string(bytes: &[u8]) -> Option<&[u8]> {
    bytes.iter().position(|&byte| byte == 0).map(|end| &bytes[..end])
}

/// Appends bytes that are text, though not of any known encoding.
pub(super) fn push_text(bytes: &[u8], out: &mut String) {
    out.push_str(&String::from_utf8_lossy(bytes));
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::RecordBuilder;
    use walrider_layout::Lsn;

    /// What a record of this type with this main data says.
    pub(crate) fn described(rmgr: RmgrId, info: u8, main: &[u8]) -> String {
        described_from(rmgr, info, 0, main)
    }

    /// The same, of a record that came from an origin.
    pub(crate) fn described_from(rmgr: RmgrId, info: u8, origin: u16, main: &[u8]) -> String {
        let mut builder = RecordBuilder::new(rmgr, info).main_data(main);
        if origin != 0 {
            builder = builder.origin(origin);
        }
        let bytes = builder.build();
        let mut out = String::new();
        (rmgr.get().unwrap().describe)(&RecordBuilder::parse(&bytes, Lsn(40)), &mut out);
        out
    }

    /// 32-bit numbers, one after the other.
    pub(crate) fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn every_description_survives_every_short_record() {
        for rmgr in (0..=RmgrId::LOGICALMSG.0).map(RmgrId) {
            for info in (0..=0xF0).step_by(0x10) {
                for len in 0..96 {
                    for fill in [0, 1, 0xFF] {
                        described(rmgr, info, &vec![fill; len]);
                    }
                }
            }
        }
    }

    #[test]
    fn times_are_written_in_utc() {
        assert_eq!(Timestamp(0).to_string(), "2000-01-01 00:00:00.000000 UTC");
        assert_eq!(Timestamp(762_436_800_000_000 - 1).to_string(), "2024-02-28 11:59:59.999999 UTC");
        assert_eq!(Timestamp(762_523_200_000_000).to_string(), "2024-02-29 12:00:00.000000 UTC");
        assert_eq!(Timestamp(762_566_400_000_000).to_string(), "2024-03-01 00:00:00.000000 UTC");
        assert_eq!(Timestamp(-1_000_000).to_string(), "1999-12-31 23:59:59.000000 UTC");
        let _ = (Timestamp(i64::MIN).to_string(), Timestamp(i64::MAX).to_string());
    }

    #[test]
    fn numbers_are_written_as_c_does() {
        let cases = [
            (0.0, "0"),
            (100.0, "100"),
            (123_456.0, "123456"),
            (1_234_567.0, "1.23457e+06"),
            (1e6, "1e+06"),
            (0.5, "0.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e100, "-2.5e+100"),
            (999_999.5, "1e+06"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ];
        for (number, text) in cases {
            assert_eq!(General(number).to_string(), text);
        }
    }

    #[test]
    fn arrays_are_all_there_or_not_at_all() {
        let bytes = words([1, 2, 3]);
        let take = |count| Items::<u32>::take(&mut Reader::new(&bytes), count);
        assert_eq!(take(3).unwrap().iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(take(2).unwrap().len(), 2);
        assert!(take(0).unwrap().is_empty());
        assert_eq!(take(4), None);
        assert_eq!(take(-1), None);
        assert_eq!(Items::<u32>::take_aligned(&mut Reader::new(&bytes), 3), None, "its padding is missing");
    }

    #[test]
    fn paths_are_those_of_postgresql() {
        let path_of = |major, tablespace, database, fork| {
            RelPath(RelFileLocator { tablespace, database, relation: 7 }, fork, major).to_string()
        };
        let path = |tablespace, database, fork| path_of(Major::V18, tablespace, database, fork);
        assert_eq!(path(1664, 0, ForkNumber::Main), "global/7");
        assert_eq!(path(1663, 5, ForkNumber::Init), "base/5/7_init");
        assert_eq!(path(16400, 5, ForkNumber::VisibilityMap), "pg_tblspc/16400/PG_18_202506291/5/7_vm");
        assert_eq!(path_of(Major::V17, 16400, 5, ForkNumber::Main), "pg_tblspc/16400/PG_17_202406281/5/7");
    }
}
