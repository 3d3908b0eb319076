//! PostgreSQL 18, read off 18.6.

use super::Format;

pub(super) const FORMAT: Format = Format {
    number: 18,
    wal_magic: 0xD118,
    control_version: 1800,
    catalog_version: 202_506_291,
    control_has_char_signedness: true,
    inplace_has_invalidations: true,
    // `kind`, `dboid`, and the object's identifier in 64 bits: `objid_lo`, `objid_hi`.
    stats_item_size: 16,
    vacuum_clears_cycle_id: true,
    session_zone_abbreviations: true,
};
