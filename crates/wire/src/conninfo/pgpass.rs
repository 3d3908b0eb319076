//! Password files: `host:port:database:user:password`, `*` for any (`passwordFromFile`).

/// The password of the first line that fits. For a unix socket in the default directory `host` is `localhost`; the
/// database of a replication connection is `replication`.
///
/// ```
/// use walrider_wire::conninfo::pgpass::lookup;
/// let file = "# comment\ndb1:*:replication:repl:a\\:b\n*:5432:*:*:other";
/// assert_eq!(lookup(file, "db1", "5433", "replication", "repl").as_deref(), Some("a:b"));
/// assert_eq!(lookup(file, "db2", "5432", "replication", "repl").as_deref(), Some("other"));
/// assert_eq!(lookup(file, "db2", "5433", "replication", "repl"), None);
/// ```
pub fn lookup(text: &str, host: &str, port: &str, database: &str, user: &str) -> Option<String> {
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let mut rest = line.trim_end_matches('\r');
        for wanted in [host, port, database, user] {
            let (field, after) = take_field(rest);
            if field != wanted && !rest.starts_with("*:") {
                return None;
            }
            rest = after?;
        }
        Some(take_field(rest).0)
    })
}

/// Up to the next colon that has no backslash before it: the text without backslashes, and what follows the colon.
fn take_field(text: &str) -> (String, Option<&str>) {
    let mut field = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            ':' => return (field, Some(chars.as_str())),
            '\\' => field.push(chars.next().unwrap_or('\\')),
            other => field.push(other),
        }
    }
    (field, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_as_in_libpq() {
        let find = |line: &str| lookup(line, "h:1", "5", "replication", "u\\");
        assert_eq!(find("h\\:1:5:replication:u\\\\:p:rest").as_deref(), Some("p"));
        assert_eq!(find("*:*:*:*:p\\\\q\\").as_deref(), Some("p\\q\\"));
        assert_eq!(find("*:*:*:*:").as_deref(), Some(""));
        assert_eq!(find("*:*:*:*"), None);
        assert_eq!(find("\\*:*:*:*:p"), None);
        assert_eq!(find("*x:*:*:*:p"), None);
        assert_eq!(find(""), None);
        assert_eq!(find("#:\n*:*:*:*:p\r\n").as_deref(), Some("p"));
    }
}
