//! Text that becomes part of SQL.

pub(crate) use walrider_wire::command::{quote_identifier as identifier, quote_literal as literal};
