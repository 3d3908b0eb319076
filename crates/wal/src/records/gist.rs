//! Records of this resource manager.

use crate::record::Record;

/// The name of a record type.
pub fn identify(_info: u8) -> Option<&'static str> {
    None
}

/// Appends what the record says.
pub fn describe(_record: &Record<'_>, _out: &mut String) {}
