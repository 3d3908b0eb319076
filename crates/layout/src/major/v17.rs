//! PostgreSQL 17, read off 17.11.

use super::Format;

pub(super) const FORMAT: Format = Format {
    number: 17,
    wal_magic: 0xD116,
    control_version: 1700,
    catalog_version: 202_406_281,
    control_has_char_signedness: false,
    // Only the offset; the invalidations are in the commit record.
    inplace_has_invalidations: false,
    // `kind`, `dboid`, `objoid`.
    stats_item_size: 12,
    vacuum_clears_cycle_id: false,
    session_zone_abbreviations: false,
};
