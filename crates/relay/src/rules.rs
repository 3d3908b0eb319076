//! Who is served, and by which proof: rules as in `pg_hba.conf`, written in TOML.
//!
//! ```toml
//! [[allow]]                          # the first rule that fits decides; if none fits, the client is refused
//! from = ["10.0.0.0/8", "::1/128"]   # networks, "loopback", "local" (a unix socket), "all"
//! user = ["replicator"]              # absent: all users
//! tls = "require"                    # or "refuse"; absent: either
//! method = "scram-sha-256"           # or "cert", "trust", "reject"
//! clientcert = "verify-full"         # a client certificate beside the password, or "verify-ca"; absent: none
//!
//! [users]
//! replicator = "SCRAM-SHA-256$4096:…" # SELECT rolpassword FROM pg_authid WHERE rolname = 'replicator'
//! ```
//!
//! Rules differ from `pg_hba.conf` where that lets in by mistake: `trust` is for this host alone unless the rule says
//! `insecure = true`, and `cert` and `clientcert` make a rule fit encrypted connections only, without another word.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::Deserialize;
use toml::{Table, Value};

use crate::scram::{Secret, SecretError};

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The client's address; `None`: it is on this host, and came by a unix socket.
    pub address: Option<IpAddr>,
    /// The connection is encrypted.
    pub tls: bool,
}

/// What a client must do to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Trust,
    /// It is not served, whatever it does.
    Reject,
    /// Prove by SCRAM that it knows the user's password.
    Scram {
        /// And show a certificate.
        client_cert: Option<ClientCert>,
    },
    /// Show a certificate.
    Cert {
        /// Which must be the user's.
        client_cert: ClientCert,
    },
}

/// Which certificate a client must show (`clientcert` in `pg_hba.conf`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientCert {
    /// One that is signed by an authority that is trusted.
    VerifyCa,
    /// One that also names the user (its Common Name).
    VerifyFull,
}

/// What is wrong with the rules, and what to do. No text of it shows a password or a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// The text is not TOML, or not of this form.
    #[error("line {line}: {text}")]
    Form {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        text: String,
    },
    /// A rule is wrong.
    #[error("rule {number}: {text}")]
    Rule {
        /// Counted from 1.
        number: usize,
        /// What is wrong.
        text: String,
    },
    /// A user's secret is wrong.
    #[error("[users], \"{user}\": {text}")]
    User {
        /// The user.
        user: String,
        /// What is wrong.
        text: String,
    },
}

/// The rules, and the users' secrets. Without rules, nobody is served.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    users: BTreeMap<String, Secret>,
}

#[derive(Clone, Debug)]
struct Rule {
    from: Vec<Source>,
    /// `None`: all.
    users: Option<Vec<String>>,
    /// Encrypted or not; `None`: either.
    tls: Option<bool>,
    verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    All,
    Local,
    Network(Network),
}

/// Addresses that begin alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    /// So many bits of them.
    prefix: u8,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRules {
    allow: Option<Value>,
    users: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    from: Vec<String>,
    user: Option<Vec<String>>,
    tls: Option<RawTls>,
    method: RawMethod,
    clientcert: Option<ClientCert>,
    #[serde(default)]
    insecure: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RawTls {
    Require,
    Refuse,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
enum RawMethod {
    #[serde(rename = "scram-sha-256")]
    Scram,
    #[serde(rename = "cert")]
    Cert,
    #[serde(rename = "trust")]
    Trust,
    #[serde(rename = "reject")]
    Reject,
}

impl Rules {
    /// Reads rules from their text; see [`crate::rules`] for its form.
    ///
    /// # Errors
    ///
    /// If the text is not of this form, a rule could let in by mistake or never fits, or a user's secret is not one.
    pub fn parse(text: &str) -> Result<Rules, RulesError> {
        let raw: RawRules = toml::from_str(text).map_err(|error| {
            // Not its whole text, which shows the line, and so perhaps a secret.
            let before = text.as_bytes().get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
            let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
            RulesError::Form { line, text: error.message().to_owned() }
        })?;
        let mut rules = Vec::new();
        for (at, table) in tables(raw.allow)?.into_iter().enumerate() {
            let rule =
                table.try_into().map_err(|error: toml::de::Error| error.message().to_owned()).and_then(Rule::new);
            rules.push(rule.map_err(|text| RulesError::Rule { number: at + 1, text })?);
        }
        let mut users = BTreeMap::new();
        for (user, value) in secrets(raw.users)? {
            let secret = value.as_str().map_or(Err(SecretError::Plain), Secret::parse);
            let secret = secret.map_err(|error| RulesError::User { text: advice(error, &user), user: user.clone() })?;
            users.insert(user, secret);
        }
        Ok(Rules { rules, users })
    }

    /// What a client must do that wants to be this user. The first rule that fits decides (`check_hba`).
    pub fn decide(&self, peer: &Peer, user: &str) -> Verdict {
        self.fitting(peer, user).map_or(Verdict::Reject, |at| self.rules[at - 1].verdict)
    }

    /// The number of the rule that decides, counted from 1, for a log. `None`: no rule fits.
    pub fn fitting(&self, peer: &Peer, user: &str) -> Option<usize> {
        // A socket for both kinds of addresses shows those of IPv4 as ones of IPv6.
        let peer = Peer { address: peer.address.map(|address| address.to_canonical()), tls: peer.tls };
        Some(1 + self.rules.iter().position(|rule| rule.fits(&peer, user))?)
    }

    /// The secret of a user, if there is one.
    pub fn secret(&self, user: &str) -> Option<&Secret> {
        self.users.get(user)
    }

    /// All secrets, which made up ones must look like ([`crate::scram::Mock::new`]).
    pub fn secrets(&self) -> impl Iterator<Item = &Secret> {
        self.users.values()
    }

    /// Whether a rule lets in by encrypted connections only. It never does if the server has no certificate.
    pub fn needs_tls(&self) -> bool {
        self.rules.iter().any(|rule| rule.tls == Some(true) && rule.verdict != Verdict::Reject)
    }

    /// Whether a rule asks for a client's certificate. Nobody can show one unless the server knows an authority to trust.
    pub fn needs_client_ca(&self) -> bool {
        let needs =
            |rule: &Rule| matches!(rule.verdict, Verdict::Cert { .. } | Verdict::Scram { client_cert: Some(_) });
        self.rules.iter().any(needs)
    }
}

fn tables(allow: Option<Value>) -> Result<Vec<Table>, RulesError> {
    let rules = match allow {
        None => Vec::new(),
        Some(Value::Array(rules)) => rules,
        Some(_) => {
            let text = "\"allow\" is a list of rules: write [[allow]] above each".to_owned();
            return Err(RulesError::Rule { number: 1, text });
        }
    };
    let table = |(at, rule)| match rule {
        Value::Table(table) => Ok(table),
        _ => {
            let text = "it is not a table: write [[allow]] above it".to_owned();
            Err(RulesError::Rule { number: at + 1, text })
        }
    };
    rules.into_iter().enumerate().map(table).collect()
}

fn secrets(users: Option<Value>) -> Result<Table, RulesError> {
    match users {
        None => Ok(Table::new()),
        Some(Value::Table(users)) => Ok(users),
        Some(_) => {
            let text = "\"users\" is a table: write [users], and below it a line for each user".to_owned();
            Err(RulesError::Form { line: 1, text })
        }
    }
}

/// What is wrong with a secret, and where to get a right one.
fn advice(error: SecretError, user: &str) -> String {
    let name = user.replace('\'', "''");
    let query = format!("SELECT rolpassword FROM pg_authid WHERE rolname = '{name}'");
    match error {
        SecretError::Plain => {
            format!(
                "{error}; passwords are not kept here: ask the primary server for the secret, as a superuser: {query}"
            )
        }
        SecretError::Md5 => format!(
            "{error}; set the password again on the primary server, with password_encryption = 'scram-sha-256', then: \
             {query}"
        ),
        SecretError::Malformed => format!("{error}; copy it again, as a whole: {query}"),
    }
}

impl Rule {
    fn new(raw: RawRule) -> Result<Rule, String> {
        if raw.from.is_empty() {
            return Err("\"from\" is empty; name networks, or \"all\"".to_owned());
        }
        let mut from = Vec::new();
        for text in &raw.from {
            from.extend(sources(text)?);
        }
        if let Some(users) = &raw.user {
            check_users(users)?;
        }
        let verdict = verdict(&raw)?;
        if raw.insecure && raw.method != RawMethod::Trust {
            return Err("\"insecure\" is for method \"trust\" alone; take it away".to_owned());
        }
        if raw.method == RawMethod::Trust && !raw.insecure && !from.iter().all(Source::is_this_host) {
            return Err(
                "method \"trust\" lets in from other hosts without any proof; use \"scram-sha-256\", or from = \
                        [\"loopback\", \"local\"], or add insecure = true if this is what you want"
                    .to_owned(),
            );
        }
        let proof = raw.method == RawMethod::Cert || raw.clientcert.is_some();
        let tls = match raw.tls {
            Some(RawTls::Refuse) if proof => {
                return Err("there is no client certificate without TLS; take tls = \"refuse\" away".to_owned());
            }
            Some(tls) => Some(tls == RawTls::Require),
            None => proof.then_some(true),
        };
        if tls == Some(true) && from.contains(&Source::Local) {
            return Err(
                "it asks for TLS, which a unix socket never has; take \"local\" away, or write a rule of its own \
                        for it"
                    .to_owned(),
            );
        }
        Ok(Rule { from, users: raw.user, tls, verdict })
    }

    fn fits(&self, peer: &Peer, user: &str) -> bool {
        self.tls.is_none_or(|tls| tls == peer.tls)
            && self.from.iter().any(|source| source.fits(peer.address))
            && self.users.as_ref().is_none_or(|users| users.iter().any(|name| name == user))
    }
}

fn verdict(raw: &RawRule) -> Result<Verdict, String> {
    match (raw.method, raw.clientcert) {
        (RawMethod::Scram, client_cert) => Ok(Verdict::Scram { client_cert }),
        (RawMethod::Cert, None | Some(ClientCert::VerifyFull)) => {
            Ok(Verdict::Cert { client_cert: ClientCert::VerifyFull })
        }
        (RawMethod::Cert, Some(ClientCert::VerifyCa)) => {
            Err("method \"cert\" asks for the user's own certificate always; take clientcert away".to_owned())
        }
        (RawMethod::Trust | RawMethod::Reject, Some(_)) => {
            Err("\"clientcert\" is for method \"scram-sha-256\"; use method \"cert\" for a certificate alone"
                .to_owned())
        }
        (RawMethod::Trust, None) => Ok(Verdict::Trust),
        (RawMethod::Reject, None) => Ok(Verdict::Reject),
    }
}

/// Refuses what means something else in `pg_hba.conf`: a rule that rejects would reject nobody.
fn check_users(users: &[String]) -> Result<(), String> {
    if users.is_empty() {
        return Err("\"user\" is empty; name users, or take it away for all".to_owned());
    }
    for user in users {
        match user.chars().next() {
            None => return Err("a name in \"user\" is empty".to_owned()),
            Some('+' | '/' | '@') => {
                return Err(format!(
                    "\"{user}\" in \"user\": roles, patterns and files are not supported; name the users"
                ));
            }
            _ if user == "all" => return Err("take \"user\" away for all users".to_owned()),
            _ => (),
        }
    }
    Ok(())
}

/// What a word in `from` stands for.
fn sources(text: &str) -> Result<Vec<Source>, String> {
    let networks = match text {
        "all" => return Ok(vec![Source::All]),
        "local" => return Ok(vec![Source::Local]),
        "loopback" => vec![Network::LOOPBACK_4, Network::LOOPBACK_6],
        _ => vec![Network::parse(text).ok_or_else(|| {
            format!(
                "\"{text}\" in \"from\" is not a network; write one as \"10.0.0.0/8\" or \"fd00::/8\", an address, or \
                 \"loopback\", \"local\" or \"all\" (names of hosts are not supported)"
            )
        })?],
    };
    Ok(networks.into_iter().map(Source::Network).collect())
}

impl Source {
    fn fits(&self, address: Option<IpAddr>) -> bool {
        match (self, address) {
            (Source::All, _) => true,
            (Source::Local, address) => address.is_none(),
            (Source::Network(_), None) => false,
            (Source::Network(network), Some(address)) => network.contains(address),
        }
    }

    /// Is nothing but this host in it?
    fn is_this_host(&self) -> bool {
        match self {
            Source::All => false,
            Source::Local => true,
            Source::Network(network) => [Network::LOOPBACK_4, Network::LOOPBACK_6]
                .iter()
                .any(|loopback| loopback.contains(network.address) && network.prefix >= loopback.prefix),
        }
    }
}

impl Network {
    const LOOPBACK_4: Network = Network { address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), prefix: 8 };
    const LOOPBACK_6: Network = Network { address: IpAddr::V6(Ipv6Addr::LOCALHOST), prefix: 128 };

    /// Reads an address, or one with the length of its prefix. Bits after the prefix do not matter, as in PostgreSQL.
    fn parse(text: &str) -> Option<Network> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix: u8 = match prefix {
            None => bits,
            Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => digits.parse().ok()?,
            Some(_) => return None,
        };
        if prefix > bits {
            return None;
        }
        match address.to_canonical() {
            // Of IPv4, as the addresses that it is compared with. One that reaches beyond is a mistake.
            mapped @ IpAddr::V4(_) if address.is_ipv6() => {
                Some(Network { address: mapped, prefix: prefix.checked_sub(96)? })
            }
            address => Some(Network { address, prefix }),
        }
    }

    fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
