//! Connection strings as libpq reads them (`fe-connect.c`, PostgreSQL 18): `keyword=value` lists and URIs, the
//! environment, service files, password files. What is read from files is handed in as text.
//!
//! ```
//! use walrider_wire::conninfo::ConnInfo;
//! let info = ConnInfo::parse("host=db1,db2 user='re pl' password=x").unwrap();
//! assert_eq!(info.get("user"), Some("re pl"));
//! assert_eq!(info.to_string(), "user='re pl' password=******** host=db1,db2");
//! let uri = ConnInfo::parse("postgresql://re%20pl@[::1]:5433/?sslmode=require").unwrap();
//! assert_eq!((uri.get("host"), uri.get("sslmode")), (Some("::1"), Some("require")));
//! ```

pub mod keywords;
pub mod pgpass;
mod service;
mod uri;

use std::fmt;

use keywords::{KEYWORDS, Keyword};

/// A connection string, service file or variable that cannot be used. The text never holds a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConnInfoError(pub(crate) String);

fn error<T>(text: impl Into<String>) -> Result<T, ConnInfoError> {
    Err(ConnInfoError(text.into()))
}

/// Parameters of a connection by keyword: those that were given, not those that libpq would fill in.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ConnInfo {
    /// One for each row of [`KEYWORDS`], or fewer.
    values: Vec<Option<String>>,
}

impl ConnInfo {
    /// Reads a URI (`postgresql://`, `postgres://`) or a list of `keyword=value`.
    pub fn parse(text: &str) -> Result<ConnInfo, ConnInfoError> {
        if text.contains('\0') {
            return error("a connection string must not contain a zero byte");
        }
        match ["postgresql://", "postgres://"].iter().find_map(|prefix| text.strip_prefix(prefix)) {
            // A password with a "?" that should have been encoded: what follows looks like parameters, and is not shown.
            Some(rest) if rest.split_once('?').is_some_and(|(_, query)| query.contains('@')) => uri::parse(rest)
                .or_else(|_| error("invalid URI: percent-encode \"@\", \"/\" and \"?\" in its password")),
            Some(rest) => uri::parse(rest),
            None => ConnInfo::parse_list(text),
        }
    }

    fn parse_list(text: &str) -> Result<ConnInfo, ConnInfoError> {
        let mut info = ConnInfo::default();
        // The rest of a password that should have been quoted looks like the next keyword, and is not shown.
        let mut after_secret = false;
        let mut rest = text.trim_start_matches(is_space);
        while !rest.is_empty() {
            let end = rest.find(|c| c == '=' || is_space(c)).unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            let Some(value) = after.trim_start_matches(is_space).strip_prefix('=') else {
                let name = if after_secret { "..." } else { name };
                return error(format!("missing \"=\" after \"{name}\" in connection info string"));
            };
            let (value, after) = take_value(value.trim_start_matches(is_space))?;
            match info.set(name, &value) {
                Err(_) if after_secret && !is_known(name) => return error("invalid connection option \"...\""),
                result => result?,
            }
            after_secret = is_secret(name);
            rest = after.trim_start_matches(is_space);
        }
        Ok(info)
    }

    /// The variables of the environment that libpq reads (`PGHOST`, `PGPORT`, …).
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<ConnInfo, ConnInfoError> {
        let mut info = ConnInfo::default();
        for Keyword { name, env, .. } in KEYWORDS {
            if let Some(value) = env.and_then(&variable) {
                info.set(name, &value)?;
            }
        }
        if info.get("sslmode").is_none() && variable("PGREQUIRESSL").is_some_and(|value| value.starts_with('1')) {
            info.set("sslmode", "require")?;
        }
        Ok(info)
    }

    /// The parameters of a service in the text of a service file; `None` if it does not have that service. `file` names
    /// it in errors.
    pub fn service(text: &str, name: &str, file: &str) -> Result<Option<ConnInfo>, ConnInfoError> {
        service::parse(text, name, file)
    }

    /// The value of a parameter, if it was given.
    pub fn get(&self, keyword: &str) -> Option<&str> {
        let at = KEYWORDS.iter().position(|row| row.name == keyword)?;
        self.values.get(at)?.as_deref()
    }

    /// The value of a parameter, if it was given and is not empty: libpq takes most empty values as not given.
    pub fn non_empty(&self, keyword: &str) -> Option<&str> {
        self.get(keyword).filter(|value| !value.is_empty())
    }

    /// Gives a parameter a value, instead of the one it had. An unknown keyword is an error.
    pub fn set(&mut self, keyword: &str, value: &str) -> Result<(), ConnInfoError> {
        if value.contains('\0') {
            return error(format!("the value of connection option \"{keyword}\" must not contain a zero byte"));
        }
        // Older than sslmode, and still taken (conninfo_storeval).
        let (keyword, value) = match (keyword, value.starts_with('1')) {
            ("requiressl", true) => ("sslmode", "require"),
            ("requiressl", false) => ("sslmode", "prefer"),
            _ => (keyword, value),
        };
        let Some(at) = KEYWORDS.iter().position(|row| row.name == keyword) else {
            return error(format!("invalid connection option \"{}\"", keyword.escape_debug()));
        };
        self.values.resize(KEYWORDS.len(), None);
        self.values[at] = Some(value.to_owned());
        Ok(())
    }

    /// Takes over what is not given here: for service, environment, built-in values, in this order.
    pub fn merge_defaults(&mut self, defaults: &ConnInfo) {
        self.values.resize(KEYWORDS.len(), None);
        for (value, default) in self.values.iter_mut().zip(&defaults.values) {
            if value.is_none() {
                value.clone_from(default);
            }
        }
    }
}

impl fmt::Display for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (row, value) in KEYWORDS.iter().zip(&self.values) {
            let Some(value) = value else { continue };
            write!(f, "{separator}{}=", row.name)?;
            separator = " ";
            if row.secret {
                f.write_str("********")?;
            } else if !value.is_empty() && value.chars().all(|c| !is_space(c) && c != '\'' && c != '\\') {
                f.write_str(value)?;
            } else {
                write!(f, "'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnInfo({self})")
    }
}

fn is_known(keyword: &str) -> bool {
    KEYWORDS.iter().any(|row| row.name == keyword)
}

fn is_secret(keyword: &str) -> bool {
    KEYWORDS.iter().any(|row| row.name == keyword && row.secret)
}

/// C's `isspace`.
fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t'..='\r')
}

/// A value, quoted or not, and what follows it.
fn take_value(text: &str) -> Result<(String, &str), ConnInfoError> {
    let quoted = text.strip_prefix('\'');
    let mut value = String::new();
    let mut chars = quoted.unwrap_or(text).chars();
    loop {
        match chars.next() {
            None if quoted.is_some() => return error("unterminated quoted string in connection info string"),
            None => break,
            Some('\'') if quoted.is_some() => break,
            Some(c) if quoted.is_none() && is_space(c) => break,
            Some('\\') => value.extend(chars.next()),
            Some(c) => value.push(c),
        }
    }
    Ok((value, chars.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> String {
        let info = ConnInfo::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let given = KEYWORDS.iter().filter_map(|row| Some(format!("{}={}", row.name, info.get(row.name)?)));
        given.collect::<Vec<_>>().join(",")
    }

    fn failure(text: &str) -> String {
        ConnInfo::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn lists_are_read_as_libpq_reads_them() {
        assert_eq!(list(""), "");
        assert_eq!(list(" host = a\tport=\n'5 \\'4' user=a\\ b password="), "user=a b,password=,host=a,port=5 '4");
        assert_eq!(list("host='a'user=b"), "user=b,host=a");
        assert_eq!(list("user=a user=b"), "user=b");
        assert_eq!(list("user=a\\"), "user=a");
        assert_eq!(list("user=a=b"), "user=a=b");
        assert_eq!(list("user="), "user=");
        assert_eq!(list("requiressl=1"), "sslmode=require");
        assert_eq!(failure("host"), "missing \"=\" after \"host\" in connection info string");
        assert_eq!(failure("host 'a'"), "missing \"=\" after \"host\" in connection info string");
        assert_eq!(failure("user='a"), "unterminated quoted string in connection info string");
        assert_eq!(failure("nosuch=1"), "invalid connection option \"nosuch\"");
        assert!(!failure("password=my secret").contains("secret"));
        assert!(!failure("password=my secret=1").contains("secret"));
        assert!(failure("user=a\0b").contains("zero byte"));
    }

    // The cases are those of src/interfaces/libpq/t/001_uri.pl.
    #[test]
    fn uris_are_read_as_libpq_reads_them() {
        let cases = [
            (
                "postgresql://uri-user:secret@host:12345/db",
                "user=uri-user,password=secret,dbname=db,host=host,port=12345",
            ),
            ("postgresql://uri-user@host:12345/", "user=uri-user,host=host,port=12345"),
            ("postgresql://host", "host=host"),
            ("postgres://", ""),
            ("postgresql:///db?user=uri-user&password=x", "user=uri-user,password=x,dbname=db"),
            ("postgresql://host:12345?user=uri-user", "user=uri-user,host=host,port=12345"),
            ("postgresql://%65:%66@ho%73t/d%62", "user=e,password=f,dbname=db,host=host"),
            ("postgresql://[::1]/db", "dbname=db,host=::1"),
            ("postgresql://[2001:db8::1]:5432", "host=2001:db8::1,port=5432"),
            ("postgresql://%2Fvar%2Flib%2Fpostgresql/dbname", "dbname=dbname,host=/var/lib/postgresql"),
            ("postgresql://?host=/tmp&hostaddr=", "host=/tmp,hostaddr="),
            ("postgresql://a:1,b,[::2]:3/", "host=a,b,::2,port=1,,3"),
            ("postgresql://h?ssl=true", "host=h,sslmode=require"),
            ("postgresql://@h", "host=h"),
            ("postgresql://:p@h", "password=p,host=h"),
            ("postgresql://h?", "host=h"),
            ("postgresql://u@h/?application_name=%20a ", "user=u,host=h,application_name= a"),
        ];
        for (uri, expected) in cases {
            assert_eq!(list(uri), expected, "{uri}");
        }
        let failures = [
            ("postgresql://h?zzz", "missing key/value separator \"=\" in URI query parameter: \"zzz\""),
            ("postgresql://h?user=a=b", "extra key/value separator \"=\" in URI query parameter: \"user\""),
            ("postgresql://h?zzz=1", "invalid URI query parameter: \"zzz\""),
            ("postgresql://h?user=a%zz", "invalid percent-encoded token: \"a%zz\""),
            ("postgresql://h?user=a%0", "invalid percent-encoded token: \"a%0\""),
            ("postgresql://h?user=a%00", "forbidden value %00 in percent-encoded value: \"a%00\""),
            ("postgresql://h?user=a b", "unexpected spaces found in \"a b\", use percent-encoded spaces (%20) instead"),
            ("postgresql://[::1", "end of string reached when looking for matching \"]\" in IPv6 host address in URI"),
            ("postgresql://[]", "IPv6 host address may not be empty in URI"),
            ("postgresql://[::1]z", "unexpected character \"z\" in URI (expected \":\" or \"/\")"),
        ];
        for (uri, expected) in failures {
            assert_eq!(failure(uri), expected, "{uri}");
        }
        for uri in [
            "postgresql://u:secr et@h",
            "postgresql://u:secret%zz@h",
            "postgresql://h?password=secr%e",
            "postgresql://u:p/x?secr@h",
        ] {
            assert!(!failure(uri).contains("secr"), "{uri}");
        }
        assert!(failure("postgresql://h?user=%ff").contains("not valid UTF-8"));
    }

    #[test]
    fn nothing_secret_is_shown() {
        let info = ConnInfo::parse("password=s3 sslpassword='s3' user='a b\\''scram_client_key=s3 host=").unwrap();
        for shown in [info.to_string(), format!("{info:?}")] {
            assert!(!shown.contains("s3"), "{shown}");
            assert!(shown.contains("user='a b\\''") && shown.contains("host=''"), "{shown}");
        }
        let text = ConnInfo::parse(r"application_name='it\'s \\'").unwrap();
        assert_eq!(ConnInfo::parse(&text.to_string()).unwrap(), text);
    }

    #[test]
    fn what_is_given_goes_before_the_environment() {
        let env = |name: &str| match name {
            "PGHOST" => Some("envhost".to_owned()),
            "PGUSER" => Some("envuser".to_owned()),
            "PGREQUIRESSL" => Some("1".to_owned()),
            _ => None,
        };
        let mut info = ConnInfo::parse("host=given").unwrap();
        info.merge_defaults(&ConnInfo::from_env(env).unwrap());
        assert_eq!(info.to_string(), "user=envuser host=given sslmode=require");
        assert_eq!((info.get("port"), info.get("nosuch")), (None, None));
    }

    #[test]
    fn a_service_is_a_section_of_its_file() {
        let text = "# c\n[other]\nhost=x\n [mine] \r\n  host = y\nport=1\n\n[more]\nport=2\n[mine]\nport=3\n";
        let service = |name| ConnInfo::service(text, name, "f");
        // A blank before "=" belongs to the keyword, as in libpq.
        assert!(service("mine").unwrap_err().to_string().contains("syntax error in service file \"f\", line 5"));
        assert_eq!(service("other").unwrap().unwrap().to_string(), "host=x");
        assert_eq!(service("none").unwrap(), None);
        let nested = ConnInfo::service("[a]\nservice=b", "a", "f").unwrap_err().to_string();
        assert_eq!(nested, "nested service specifications not supported in service file \"f\", line 2");
        assert_eq!(ConnInfo::service("[a]\nport=1\nport=2", "a", "f").unwrap().unwrap().get("port"), Some("1"));
    }
}
