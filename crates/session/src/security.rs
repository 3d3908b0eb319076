//! How much encryption and proof is asked for, and the words that ask for it.

use std::path::PathBuf;

use walrider_wire::conninfo::ConnInfo;

use crate::Result;
use crate::files::{self, Env};
use crate::value::{choice, config};

/// How much encryption, and how much proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// Whether our certificate is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CertMode {
    Disable,
    Allow,
    Require,
}

/// All about encryption.
#[derive(Clone, Debug)]
pub(crate) struct SslOptions {
    pub(crate) mode: SslMode,
    /// TLS from the first byte, without asking the server first.
    pub(crate) direct: bool,
    pub(crate) cert_mode: CertMode,
    /// Certificates to trust: a file, or "system".
    pub(crate) root_cert: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) crl: Option<PathBuf>,
    pub(crate) sni: bool,
    /// TLS 1.2 and 1.3 may be used.
    pub(crate) versions: (bool, bool),
}

/// Which authentication to agree to.
#[derive(Clone, Debug)]
pub(crate) struct AuthPolicy {
    pub(crate) binding: Binding,
    pub(crate) require_auth: Option<RequireAuth>,
}

/// Channel binding: SCRAM proves that it is the TLS server itself that knows the password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binding {
    Disable,
    Prefer,
    Require,
}

/// The methods that `require_auth` allows.
#[derive(Clone, Debug)]
pub(crate) struct RequireAuth {
    pub(crate) text: String,
    pub(crate) methods: Vec<Method>,
}

/// A method of authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    None,
    Password,
    Md5,
    ScramSha256,
    /// GSSAPI, SSPI, OAuth: known to libpq, not offered by us.
    Other,
}

impl SslOptions {
    /// Reads the parameters whose names begin with `ssl`.
    pub(crate) fn read(info: &ConnInfo, env: Env<'_>) -> Result<SslOptions> {
        use SslMode::*;
        let modes = [
            ("disable", Disable),
            ("allow", Allow),
            ("prefer", Prefer),
            ("require", Require),
            ("verify-ca", VerifyCa),
            ("verify-full", VerifyFull),
        ];
        let mode = choice(info, "sslmode", Prefer, &modes)?;
        let shown = info.get("sslmode").unwrap_or_default();
        let direct = choice(info, "sslnegotiation", false, &[("postgres", false), ("direct", true)])?;
        if direct && mode < Require {
            return config(format!(
                "weak sslmode \"{shown}\" may not be used with sslnegotiation=direct (use \"require\", \"verify-ca\", or \"verify-full\")"
            ));
        }
        if info.get("sslrootcert") == Some("system") && mode != VerifyFull {
            return config(format!(
                "weak sslmode \"{shown}\" may not be used with sslrootcert=system (use \"verify-full\")"
            ));
        }
        let versions = [("TLSv1", 0), ("TLSv1.1", 1), ("TLSv1.2", 2), ("TLSv1.3", 3)];
        let min = choice(info, "ssl_min_protocol_version", 2, &versions)?;
        let max = choice(info, "ssl_max_protocol_version", 3, &versions)?;
        if min > max {
            return config("invalid SSL protocol version range");
        }
        if max < 2 {
            return config("ssl_max_protocol_version must be TLSv1.2 or TLSv1.3: older versions are not safe any more");
        }
        let certmodes = [("disable", CertMode::Disable), ("allow", CertMode::Allow), ("require", CertMode::Require)];
        let home = files::home(env).map(|home| home.join(".postgresql"));
        let file = |keyword, default: &str| {
            let given = info.non_empty(keyword).map(PathBuf::from);
            given.or_else(|| home.as_ref().map(|home| home.join(default)))
        };
        Ok(SslOptions {
            mode,
            direct,
            cert_mode: choice(info, "sslcertmode", CertMode::Allow, &certmodes)?,
            root_cert: file("sslrootcert", "root.crt"),
            cert: file("sslcert", "postgresql.crt"),
            key: file("sslkey", "postgresql.key"),
            // The default is looked for; one that was asked for must be there.
            crl: file("sslcrl", "root.crl").filter(|path| info.non_empty("sslcrl").is_some() || path.exists()),
            sni: info.non_empty("sslsni") != Some("0"),
            versions: (min <= 2, max >= 3),
        })
    }
}

impl RequireAuth {
    /// Reads a list of methods, or of methods that are not allowed, each with `!`.
    pub(crate) fn parse(text: &str) -> Result<RequireAuth> {
        let known = [
            ("password", Method::Password),
            ("md5", Method::Md5),
            ("scram-sha-256", Method::ScramSha256),
            ("none", Method::None),
            ("gss", Method::Other),
            ("sspi", Method::Other),
            ("oauth", Method::Other),
        ];
        let negated = text.trim_start().starts_with('!');
        let mut named = Vec::new();
        for item in text.split(',') {
            let item = item.trim();
            let name = item.strip_prefix('!').unwrap_or(item);
            if negated != (name.len() != item.len()) {
                return config(format!(
                    "require_auth method \"{item}\" cannot be mixed with {}",
                    if negated { "negative methods" } else { "positive methods" }
                ));
            }
            match known.iter().find(|(known, _)| *known == name) {
                Some((_, method)) => named.push(*method),
                None => return config(format!("invalid require_auth value: \"{name}\"")),
            }
        }
        // Other is never allowed by naming one of them, as we have none; forbidding one does not forbid the rest, and
        // they fail all the same.
        let all = [Method::None, Method::Password, Method::Md5, Method::ScramSha256, Method::Other];
        let methods = all.into_iter().filter(|method| named.contains(method) != negated).collect();
        Ok(RequireAuth { text: text.to_owned(), methods })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn require_auth_names_what_is_allowed() {
        let methods = |text| RequireAuth::parse(text).unwrap().methods;
        assert_eq!(methods("scram-sha-256, none"), [Method::None, Method::ScramSha256]);
        assert_eq!(methods("!password,!md5,!none"), [Method::ScramSha256, Method::Other]);
    }
}
