//! A connection string made whole and checked: what to connect to, and how (`pqConnectOptions2`, PostgreSQL 18).

use std::fmt;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use walrider_wire::conninfo::ConnInfo;
use walrider_wire::frontend::{PROTOCOL_3_0, PROTOCOL_3_2};

use crate::Result;
use crate::files::{self, Env};
use crate::security::{AuthPolicy, Binding, RequireAuth, SslOptions};
use crate::value::{choice, config, duration, number};

/// Everything that opening a connection needs. Shows itself without passwords. Two are equal if they were resolved from
/// the same parameters, secrets included.
#[derive(Clone)]
pub struct ConnectOptions {
    /// Given and found parameters; what is below was made of them.
    info: ConnInfo,
    warnings: Vec<String>,
    pub(crate) hosts: Vec<Host>,
    pub(crate) user: String,
    /// Parameters of the startup message.
    pub(crate) startup: Vec<(&'static str, String)>,
    /// Newest protocol to ask for, and oldest to accept.
    pub(crate) protocol: (u32, u32),
    /// For each address, from connecting to the end of authentication.
    pub(crate) connect_timeout: Option<Duration>,
    /// The caller's own bound to the same; the shorter one counts.
    pub(crate) session_timeout: Option<Duration>,
    pub(crate) tcp: TcpOptions,
    pub(crate) ssl: SslOptions,
    pub(crate) auth: AuthPolicy,
    pub(crate) requirepeer: Option<String>,
    pub(crate) target: TargetSession,
    pub(crate) load_balance: bool,
    pub(crate) interrupt: Option<Arc<OwnedFd>>,
}

/// A server to try.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// A name, an address, or a directory with a unix socket.
    pub(crate) host: String,
    /// Where `host` is, if it is not to be looked up.
    pub(crate) hostaddr: Option<String>,
    pub(crate) port: u16,
    pub(crate) password: Option<String>,
}

impl Host {
    /// Whether `host` is where a unix socket is.
    pub(crate) fn is_unix(&self) -> bool {
        self.hostaddr.is_none() && self.host.starts_with(['/', '@'])
    }

    /// For messages.
    pub(crate) fn peer(&self) -> String {
        if self.is_unix() {
            return format!("{}/.s.PGSQL.{}", self.host, self.port);
        }
        let host = if self.host.is_empty() { self.hostaddr.as_deref().unwrap_or_default() } else { &self.host };
        if host.contains(':') { format!("[{host}]:{}", self.port) } else { format!("{host}:{}", self.port) }
    }
}

/// Options of a TCP socket; what is `None` is the system's default.
#[derive(Clone, Debug)]
pub(crate) struct TcpOptions {
    pub(crate) keepalives: bool,
    pub(crate) keepalives_idle: Option<Duration>,
    pub(crate) keepalives_interval: Option<Duration>,
    pub(crate) keepalives_count: Option<u32>,
    pub(crate) user_timeout: Option<Duration>,
}

/// What a session is for; its startup message differs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A walsender without a database.
    Physical,
    /// A walsender of a database.
    Logical,
    /// A backend.
    Ordinary,
}

impl Purpose {
    /// The value of `replication`; none is sent if it is empty.
    fn replication(self) -> &'static str {
        match self {
            Purpose::Physical => "true",
            Purpose::Logical => "database",
            Purpose::Ordinary => "",
        }
    }
}

/// What the server must be (`target_session_attrs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetSession {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

impl ConnectOptions {
    /// Completes a connection string as libpq does, for physical replication: service file, environment, password file,
    /// built-in values. `fallback_application_name` counts if no `application_name` is given anywhere.
    pub fn resolve(conninfo: &str, fallback_application_name: &str) -> Result<ConnectOptions> {
        ConnectOptions::resolve_with(conninfo, fallback_application_name, &|name| std::env::var(name).ok())
    }

    /// The same for a connection to a database, on which a walsender takes SQL too: to that of the connection string, else
    /// `postgres`.
    pub fn resolve_for_database(conninfo: &str, fallback_application_name: &str) -> Result<ConnectOptions> {
        let env = |name: &str| std::env::var(name).ok();
        ConnectOptions::complete(conninfo, fallback_application_name, &env, Purpose::Logical)
    }

    /// The same for an ordinary session, with a backend, not a walsender: to the database of the connection string, else to
    /// that of the user's name.
    pub fn resolve_ordinary(conninfo: &str, fallback_application_name: &str) -> Result<ConnectOptions> {
        ConnectOptions::resolve_ordinary_with(conninfo, fallback_application_name, &|name| std::env::var(name).ok())
    }

    /// [`ConnectOptions::resolve_ordinary`] in an environment of the caller's.
    pub fn resolve_ordinary_with(
        conninfo: &str,
        fallback_application_name: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<ConnectOptions> {
        ConnectOptions::complete(conninfo, fallback_application_name, env, Purpose::Ordinary)
    }

    /// [`ConnectOptions::resolve`] in an environment of the caller's.
    pub fn resolve_with(
        conninfo: &str,
        fallback_application_name: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<ConnectOptions> {
        ConnectOptions::complete(conninfo, fallback_application_name, env, Purpose::Physical)
    }

    fn complete(
        conninfo: &str,
        fallback_application_name: &str,
        env: Env<'_>,
        purpose: Purpose,
    ) -> Result<ConnectOptions> {
        let mut info = ConnInfo::parse(conninfo)?;
        let service = info.get("service").map(str::to_owned).or_else(|| env("PGSERVICE"));
        if let Some(service) = service {
            info.merge_defaults(&files::service(&service, env)?);
        }
        info.merge_defaults(&ConnInfo::from_env(env)?);
        if info.get("sslmode").is_none() {
            let strict = info.get("sslrootcert") == Some("system");
            info.set("sslmode", if strict { "verify-full" } else { "prefer" })?;
        }
        match purpose {
            // As libpqrcv_connect does; the name is for the password file only.
            Purpose::Physical => info.set("dbname", "replication")?,
            Purpose::Logical => {
                // "replication" stands in connection strings that were made for physical replication.
                let name =
                    info.non_empty("dbname").filter(|name| *name != "replication").unwrap_or("postgres").to_owned();
                info.set("dbname", &name)?;
            }
            Purpose::Ordinary => {
                let name = match info.non_empty("dbname").or(info.non_empty("user")) {
                    Some(name) => name.to_owned(),
                    None => files::os_user()?,
                };
                info.set("dbname", &name)?;
            }
        }
        info.set("replication", purpose.replication())?;
        if info.get("fallback_application_name").is_none() {
            info.set("fallback_application_name", fallback_application_name)?;
        }
        ConnectOptions::build(info, env)
    }

    /// Ends any waiting of [`crate::Connection::open`] and of commands with [`crate::ConnectError::Interrupted`] as soon as
    /// `fd`, an eventfd or pipe, is readable. Looking up a host name cannot be interrupted.
    pub fn interrupt_with(&mut self, fd: Arc<OwnedFd>) {
        self.interrupt = Some(fd);
    }

    /// Bounds each address that is tried, from connecting to the end of authentication, whatever the server sends meanwhile;
    /// zero: `connect_timeout` alone does. Until streaming begins nobody else looks whether the server gets on.
    pub fn give_up_after(&mut self, timeout: Duration) {
        self.session_timeout = Some(timeout).filter(|timeout| !timeout.is_zero());
    }

    /// How long an address may take.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.connect_timeout.into_iter().chain(self.session_timeout).min()
    }

    /// The servers in the order in which they are tried, as messages name them: host and port, or socket.
    pub fn peers(&self) -> Vec<String> {
        self.hosts.iter().map(Host::peer).collect()
    }

    /// What should be logged: a password file that was not used because others can read it, and the like.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The name that the primary knows us by, for `synchronous_standby_names`.
    pub fn application_name(&self) -> &str {
        let name = self.info.non_empty("application_name");
        name.or(self.info.get("fallback_application_name")).unwrap_or_default()
    }

    /// The database that is connected to.
    pub fn database(&self) -> &str {
        self.info.get("dbname").unwrap_or_default()
    }

    fn build(info: ConnInfo, env: Env<'_>) -> Result<ConnectOptions> {
        refuse_what_we_have_not(&info)?;
        let user = match info.non_empty("user") {
            Some(user) => user.to_owned(),
            None => files::os_user()?,
        };
        let mut warnings = Vec::new();
        let hosts = hosts(&info, &user, env, &mut warnings)?;
        let given = |name| info.get(name).unwrap_or_default().to_owned();
        let mut startup = vec![("user", user.clone()), ("database", given("dbname"))];
        startup.extend(info.non_empty("replication").map(|value| ("replication", value.to_owned())));
        startup.extend(info.non_empty("options").map(|value| ("options", value.to_owned())));
        // "auto" is the locale's, for programs that show text.
        let encoding = info.non_empty("client_encoding").filter(|encoding| *encoding != "auto");
        startup.extend(encoding.map(|value| ("client_encoding", value.to_owned())));
        let mut options = ConnectOptions {
            warnings,
            hosts,
            startup,
            protocol: protocol(&info)?,
            connect_timeout: duration(&info, "connect_timeout", Duration::from_secs)?,
            session_timeout: None,
            tcp: TcpOptions {
                keepalives: number(&info, "keepalives")? != Some(0),
                keepalives_idle: duration(&info, "keepalives_idle", Duration::from_secs)?,
                keepalives_interval: duration(&info, "keepalives_interval", Duration::from_secs)?,
                keepalives_count: number(&info, "keepalives_count")?
                    .and_then(|n| u32::try_from(n).ok())
                    .filter(|&n| n > 0),
                user_timeout: duration(&info, "tcp_user_timeout", Duration::from_millis)?,
            },
            ssl: SslOptions::read(&info, env)?,
            auth: AuthPolicy {
                binding: choice(
                    &info,
                    "channel_binding",
                    Binding::Prefer,
                    &[("disable", Binding::Disable), ("prefer", Binding::Prefer), ("require", Binding::Require)],
                )?,
                require_auth: info.non_empty("require_auth").map(RequireAuth::parse).transpose()?,
            },
            requirepeer: info.non_empty("requirepeer").map(str::to_owned),
            target: choice(
                &info,
                "target_session_attrs",
                TargetSession::Any,
                &[
                    ("any", TargetSession::Any),
                    ("read-write", TargetSession::ReadWrite),
                    ("read-only", TargetSession::ReadOnly),
                    ("primary", TargetSession::Primary),
                    ("standby", TargetSession::Standby),
                    ("prefer-standby", TargetSession::PreferStandby),
                ],
            )?,
            load_balance: choice(&info, "load_balance_hosts", false, &[("disable", false), ("random", true)])?,
            interrupt: None,
            user,
            info,
        };
        let name = options.application_name().to_owned();
        if !name.is_empty() {
            options.startup.push(("application_name", name));
        }
        Ok(options)
    }
}

impl PartialEq for ConnectOptions {
    fn eq(&self, other: &ConnectOptions) -> bool {
        self.info == other.info && self.hosts == other.hosts
    }
}

impl fmt::Display for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectOptions({})", self.info)
    }
}

/// Parameters that libpq knows and we cannot honour are refused rather than ignored.
fn refuse_what_we_have_not(info: &ConnInfo) -> Result<()> {
    let refused = |keyword: &str, why: &str| config(format!("connection option \"{keyword}\" is not supported: {why}"));
    match info.non_empty("gssencmode") {
        None | Some("disable" | "prefer") => (),
        Some("require") => return refused("gssencmode=require", "there is no GSSAPI; use sslmode=verify-full"),
        Some(other) => return config(format!("invalid gssencmode value: \"{other}\"")),
    }
    for keyword in ["scram_client_key", "scram_server_key"] {
        if info.non_empty(keyword).is_some() {
            return refused(keyword, "give a password");
        }
    }
    for keyword in ["oauth_issuer", "oauth_client_id", "oauth_client_secret", "oauth_scope"] {
        if info.non_empty(keyword).is_some() {
            return refused(keyword, "there is no OAuth; use a password or a client certificate");
        }
    }
    if info.non_empty("sslpassword").is_some() {
        return refused("sslpassword", "remove the password from the key file (openssl pkey) and protect the file");
    }
    for keyword in ["sslcrldir", "sslkeylogfile"] {
        if info.non_empty(keyword).is_some() {
            return refused(keyword, "leave it out");
        }
    }
    Ok(())
}

/// Splits the lists of hosts, addresses and ports.
fn hosts(info: &ConnInfo, user: &str, env: Env<'_>, warnings: &mut Vec<String>) -> Result<Vec<Host>> {
    let list = |keyword| info.non_empty(keyword).map(|text| text.split(',').collect::<Vec<_>>());
    let (hosts, addresses, ports) = (list("host"), list("hostaddr"), list("port").unwrap_or(vec![""]));
    let count = addresses.as_ref().or(hosts.as_ref()).map_or(1, Vec::len);
    if let Some(hosts) = hosts.as_ref().filter(|hosts| hosts.len() != count) {
        return config(format!("could not match {} host names to {count} hostaddr values", hosts.len()));
    }
    if ports.len() != 1 && ports.len() != count {
        return config(format!("could not match {} port numbers to {count} hosts", ports.len()));
    }
    let database = info.non_empty("dbname").unwrap_or_default();
    // Where a standby's entry is for "replication", it serves the early stream as well, which is to a database.
    let spare = (info.get("replication") == Some("database")).then_some("replication");
    let given = info.non_empty("password").map(str::to_owned);
    let file = match (&given, info.non_empty("passfile")) {
        (Some(_), _) => None,
        (None, Some(path)) => Some(PathBuf::from(path)),
        (None, None) => files::home(env).map(|home| home.join(".pgpass")),
    };
    let passwords = file.map(|path| files::password_file(&path, warnings)).unwrap_or_default();
    (0..count)
        .map(|at| {
            let port = match ports[if ports.len() == 1 { 0 } else { at }] {
                "" => 5432,
                text => match text.trim().parse() {
                    Ok(port) if port != 0 => port,
                    // In a URI, what should be a port may be a password with a "/" in it.
                    _ if text.contains(|c: char| !c.is_ascii_digit()) => {
                        return config("invalid port number: it is not a number, or not one from 1 to 65535");
                    }
                    _ => return config(format!("invalid port number: \"{text}\"")),
                },
            };
            let of = |list: &Option<Vec<&str>>| list.as_ref().map_or("", |list| list[at]).to_owned();
            let hostaddr = Some(of(&addresses)).filter(|address| !address.is_empty());
            if let Some(address) = hostaddr.as_ref().filter(|address| address.parse::<IpAddr>().is_err()) {
                return config(format!("could not parse network address \"{address}\""));
            }
            let mut host = of(&hosts);
            if host.is_empty() && hostaddr.is_none() {
                host = files::default_socket_directory(port).to_owned();
            }
            let named = if host.is_empty() { hostaddr.as_deref().unwrap_or_default() } else { &host };
            let find = |database| files::password(&passwords, named, port, database, user);
            let password = given.clone().or_else(|| find(database)).or_else(|| spare.and_then(find));
            Ok(Host { host, hostaddr, port, password })
        })
        .collect()
}

fn protocol(info: &ConnInfo) -> Result<(u32, u32)> {
    let versions = [("3.0", PROTOCOL_3_0), ("3.2", PROTOCOL_3_2), ("latest", PROTOCOL_3_2)];
    let min = choice(info, "min_protocol_version", PROTOCOL_3_0, &versions)?;
    let max = choice(info, "max_protocol_version", min, &versions)?;
    if min > max {
        return config("\"min_protocol_version\" is greater than \"max_protocol_version\"");
    }
    Ok((max, min))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::SslMode;

    fn resolve(conninfo: &str) -> Result<ConnectOptions> {
        ConnectOptions::resolve_with(conninfo, "walreceiver", &|name| (name == "HOME").then(|| "/nonexistent".into()))
    }

    fn failure(conninfo: &str) -> String {
        resolve(conninfo).expect_err(conninfo).to_string()
    }

    #[test]
    fn hosts_addresses_and_ports_are_matched() {
        let peers = |text| resolve(text).unwrap().hosts.iter().map(Host::peer).collect::<Vec<_>>();
        assert_eq!(peers("host=a,b,/s port=1 user=u"), ["a:1", "b:1", "/s/.s.PGSQL.1"]);
        assert_eq!(peers("host=a,b port=1, user=u"), ["a:1", "b:5432"]);
        assert_eq!(peers("hostaddr=::1,10.0.0.1 host=,x user=u"), ["[::1]:5432", "x:5432"]);
        assert_eq!(failure("host=a,b port=1,2,3"), "could not match 3 port numbers to 2 hosts");
        assert_eq!(failure("host=a,b hostaddr=1"), "could not match 2 host names to 1 hostaddr values");
        for port in ["0", "65536"] {
            assert_eq!(failure(&format!("host=a port={port}")), format!("invalid port number: \"{port}\""));
        }
        assert!(failure("host=a port=-1").starts_with("invalid port number"));
        assert!(!failure("postgresql://u:secret/x@h").contains("secret"));
    }

    /// `pgpass` is looked up for `replication` by a connection that streams WAL, and for the database by every other.
    #[test]
    fn the_password_file_is_asked_for_the_database_that_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pgpass");
        std::fs::write(&path, "h:*:replication:u:streams\nh:*:shop:u:buys\nh:*:postgres:u:looks").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let conninfo = format!("host=h user=u passfile={}", path.display());
        let password = |database: &str, purpose| {
            let options = ConnectOptions::complete(&format!("{conninfo} {database}"), "w", &|_| None, purpose);
            options.unwrap().hosts[0].password.clone()
        };
        assert_eq!(password("dbname=shop", Purpose::Physical).as_deref(), Some("streams"));
        assert_eq!(password("dbname=shop", Purpose::Ordinary).as_deref(), Some("buys"));
        assert_eq!(password("dbname=shop", Purpose::Logical).as_deref(), Some("buys"));
        assert_eq!(password("", Purpose::Logical).as_deref(), Some("looks"));
        assert_eq!(password("dbname=other", Purpose::Logical).as_deref(), Some("streams"));
        assert_eq!(password("dbname=other", Purpose::Ordinary), None);
        assert_eq!(password("", Purpose::Ordinary), None);
    }

    #[test]
    fn the_startup_message_says_who_we_are() {
        let options = resolve("user=u dbname=x application_name='' options='-c a=b'").unwrap();
        let text: Vec<String> = options.startup.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let expected =
            ["user=u", "database=replication", "replication=true", "options=-c a=b", "application_name=walreceiver"];
        assert_eq!(text, expected);
        assert_eq!(resolve("user=u application_name=s1").unwrap().application_name(), "s1");
        let ordinary = |conninfo| {
            let options = ConnectOptions::resolve_ordinary_with(conninfo, "w", &|_| None).unwrap();
            options.startup.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(ordinary("user=u"), ["user=u", "database=u", "application_name=w"]);
        assert_eq!(ordinary("user=u dbname=d replication=true"), ["user=u", "database=d", "application_name=w"]);
    }

    #[test]
    fn values_are_checked() {
        let cases = [
            ("sslmode=strict", "invalid sslmode value: \"strict\""),
            ("sslmode=", "invalid sslmode value: \"\""),
            ("target_session_attrs=", "invalid target_session_attrs value: \"\""),
            ("sslmode=require sslrootcert=system", "weak sslmode \"require\" may not be used with sslrootcert=system"),
            ("sslnegotiation=direct", "weak sslmode \"prefer\" may not be used with sslnegotiation=direct"),
            ("channel_binding=x", "invalid channel_binding value: \"x\""),
            ("gssencmode=require", "not supported"),
            ("connect_timeout=5s", "invalid integer value \"5s\" for connection option \"connect_timeout\""),
            ("require_auth=md5,!none", "cannot be mixed"),
            ("require_auth=md5,scram", "invalid require_auth value: \"scram\""),
            ("ssl_max_protocol_version=TLSv1.1 ssl_min_protocol_version=TLSv1", "not safe"),
            ("ssl_max_protocol_version=TLSv1.2 ssl_min_protocol_version=TLSv1.3", "invalid SSL protocol version range"),
            ("min_protocol_version=3.2 max_protocol_version=3.0", "greater"),
            ("hostaddr=10.0.0", "could not parse network address \"10.0.0\""),
            ("service=nosuch", "definition of service \"nosuch\" not found"),
        ];
        for (conninfo, expected) in cases {
            assert!(failure(conninfo).contains(expected), "{conninfo}: {}", failure(conninfo));
        }
        assert_eq!(resolve("sslrootcert=system").unwrap().ssl.mode, SslMode::VerifyFull);
        assert_eq!(resolve("connect_timeout=-1").unwrap().connect_timeout, None);
    }

    #[test]
    fn passwords_come_from_string_service_environment_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("pgpass"), "a:5432:replication:u:from-file\n").unwrap();
        std::fs::set_permissions(path("pgpass"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(path("services"), "[s]\nhost=a\nuser=u\n[t]\nhost=a\npassword=from-service\n").unwrap();
        let resolve = |conninfo: &str, more: (&str, &str)| {
            let env = |name: &str| match name {
                "PGSERVICEFILE" => Some(path("services")),
                "PGPASSFILE" => Some(path("pgpass")),
                "PGUSER" => Some("u".to_owned()),
                other => (other == more.0).then(|| more.1.to_owned()),
            };
            let options = ConnectOptions::resolve_with(conninfo, "w", &env).unwrap();
            assert!(!format!("{options:?} {options}").contains("from-"));
            options.hosts.iter().map(|host| host.password.clone()).collect::<Vec<_>>()
        };
        assert_eq!(resolve("host=a,b", ("", "")), [Some("from-file".to_owned()), None]);
        assert_eq!(resolve("service=s", ("", "")), [Some("from-file".to_owned())]);
        assert_eq!(resolve("", ("PGSERVICE", "t")), [Some("from-service".to_owned())]);
        assert_eq!(resolve("host=a", ("PGPASSWORD", "from-env")), [Some("from-env".to_owned())]);
        assert_eq!(
            resolve("host=a password=from-string", ("PGPASSWORD", "from-env")),
            [Some("from-string".to_owned())]
        );
    }
}
