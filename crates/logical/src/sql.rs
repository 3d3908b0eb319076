//! Text that becomes part of SQL.

pub(crate) use walrider_wire::command::quote_identifier as identifier;

/// A string constant, for a session with `standard_conforming_strings`.
pub(crate) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_are_doubled() {
        assert_eq!(literal("it's \\"), "'it''s \\'");
    }
}
