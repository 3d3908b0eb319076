//! The table of libpq's parameters (`PQconninfoOptions` in `fe-connect.c`, PostgreSQL 18).

/// A parameter of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Keyword {
    /// Its name in connection strings.
    pub name: &'static str,
    /// The variable of the environment that gives its default.
    pub env: Option<&'static str>,
    /// Never shown.
    pub secret: bool,
}

const fn row(name: &'static str, env: Option<&'static str>) -> Keyword {
    Keyword { name, env, secret: false }
}

const fn secret(name: &'static str, env: Option<&'static str>) -> Keyword {
    Keyword { name, env, secret: true }
}

/// All of them, in libpq's order.
pub const KEYWORDS: &[Keyword] = &[
    row("service", Some("PGSERVICE")),
    row("user", Some("PGUSER")),
    secret("password", Some("PGPASSWORD")),
    row("passfile", Some("PGPASSFILE")),
    row("channel_binding", Some("PGCHANNELBINDING")),
    row("connect_timeout", Some("PGCONNECT_TIMEOUT")),
    row("dbname", Some("PGDATABASE")),
    row("host", Some("PGHOST")),
    row("hostaddr", Some("PGHOSTADDR")),
    row("port", Some("PGPORT")),
    row("client_encoding", Some("PGCLIENTENCODING")),
    row("options", Some("PGOPTIONS")),
    row("application_name", Some("PGAPPNAME")),
    row("fallback_application_name", None),
    row("keepalives", None),
    row("keepalives_idle", None),
    row("keepalives_interval", None),
    row("keepalives_count", None),
    row("tcp_user_timeout", None),
    row("sslmode", Some("PGSSLMODE")),
    row("sslnegotiation", Some("PGSSLNEGOTIATION")),
    row("sslcompression", Some("PGSSLCOMPRESSION")),
    row("sslcert", Some("PGSSLCERT")),
    row("sslkey", Some("PGSSLKEY")),
    row("sslcertmode", Some("PGSSLCERTMODE")),
    secret("sslpassword", None),
    row("sslrootcert", Some("PGSSLROOTCERT")),
    row("sslcrl", Some("PGSSLCRL")),
    row("sslcrldir", Some("PGSSLCRLDIR")),
    row("sslsni", Some("PGSSLSNI")),
    row("requirepeer", Some("PGREQUIREPEER")),
    row("require_auth", Some("PGREQUIREAUTH")),
    row("min_protocol_version", Some("PGMINPROTOCOLVERSION")),
    row("max_protocol_version", Some("PGMAXPROTOCOLVERSION")),
    row("ssl_min_protocol_version", Some("PGSSLMINPROTOCOLVERSION")),
    row("ssl_max_protocol_version", Some("PGSSLMAXPROTOCOLVERSION")),
    row("gssencmode", Some("PGGSSENCMODE")),
    row("krbsrvname", Some("PGKRBSRVNAME")),
    row("gsslib", Some("PGGSSLIB")),
    row("gssdelegation", Some("PGGSSDELEGATION")),
    row("replication", None),
    row("target_session_attrs", Some("PGTARGETSESSIONATTRS")),
    row("load_balance_hosts", Some("PGLOADBALANCEHOSTS")),
    secret("scram_client_key", None),
    secret("scram_server_key", None),
    row("oauth_issuer", None),
    row("oauth_client_id", None),
    secret("oauth_client_secret", None),
    row("oauth_scope", None),
    row("sslkeylogfile", None),
];
