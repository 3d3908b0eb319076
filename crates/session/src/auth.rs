//! Who we are: answers to the server's authentication requests (`fe-auth.c`). No socket here.

use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256};
use walrider_wire::backend::Authentication;
use walrider_wire::frontend;

use crate::security::{AuthPolicy, Binding, Method};
use crate::{ConnectError, Reason, Result};

/// What is known of the encryption.
#[derive(Clone, Debug, Default)]
pub(crate) struct Security {
    /// The connection is encrypted.
    pub(crate) tls: bool,
    /// Hash of the server's certificate (`tls-server-end-point`), if one is defined for it.
    pub(crate) end_point: Option<Vec<u8>>,
    /// Why the server must not let us in all the same: it did not look at our certificate, and `sslcertmode` says that it
    /// must.
    pub(crate) refusal: Option<&'static str>,
}

/// One authentication, from the first request to [`Authentication::Ok`].
pub(crate) struct Authenticator<'a> {
    user: &'a str,
    password: Option<&'a str>,
    policy: &'a AuthPolicy,
    security: Security,
    scram: Option<ScramSha256>,
    /// The server's proof was right too.
    scram_finished: bool,
    channel_bound: bool,
    /// A secret was sent as asked for, or SCRAM was finished.
    answered: bool,
}

impl<'a> Authenticator<'a> {
    pub(crate) fn new(
        user: &'a str,
        password: Option<&'a str>,
        policy: &'a AuthPolicy,
        security: Security,
    ) -> Authenticator<'a> {
        Authenticator {
            user,
            password,
            policy,
            security,
            scram: None,
            scram_finished: false,
            channel_bound: false,
            answered: false,
        }
    }

    /// Appends the answer to a request, if it wants one. After `Ok(true)` the server trusts us, and we trust the server as
    /// far as we were told to.
    pub(crate) fn answer(&mut self, request: &Authentication<'_>, out: &mut Vec<u8>) -> Result<bool> {
        self.check_expected(request)?;
        match request {
            Authentication::Ok => return Ok(true),
            Authentication::CleartextPassword => {
                frontend::password(out, self.password()?.as_bytes());
                self.answered = true;
            }
            Authentication::Md5Password { salt } => {
                let hash = md5_hash(self.user.as_bytes(), self.password()?.as_bytes(), *salt);
                frontend::password(out, hash.as_bytes());
                self.answered = true;
            }
            Authentication::Sasl(mechanisms) => self.begin_scram(mechanisms, out)?,
            Authentication::SaslContinue(data) => {
                let scram = self.scram.as_mut().ok_or_else(out_of_order)?;
                scram.update(data).map_err(scram_failed)?;
                frontend::sasl_response(out, scram.message());
            }
            Authentication::SaslFinal(data) => {
                let mut scram = self.scram.take().ok_or_else(out_of_order)?;
                scram.finish(data).map_err(scram_failed)?;
                (self.scram_finished, self.answered) = (true, true);
            }
            Authentication::Other(number) => {
                return Err(ConnectError::Auth(format!("authentication method {number} not supported").into()));
            }
        }
        Ok(false)
    }

    fn begin_scram(&mut self, mechanisms: &[&str], out: &mut Vec<u8>) -> Result<()> {
        if self.scram.is_some() || self.scram_finished {
            return Err(ConnectError::Auth("duplicate SASL authentication request".into()));
        }
        let plus = mechanisms.contains(&SCRAM_SHA_256_PLUS);
        if plus && !self.security.tls {
            // A server offers it over TLS only: someone in between has taken TLS away.
            let text = "server offered SCRAM-SHA-256-PLUS authentication over a non-SSL connection";
            return Err(ConnectError::Auth(text.into()));
        }
        let end_point = self.security.end_point.clone().filter(|_| self.policy.binding != Binding::Disable);
        let (mechanism, binding) = match end_point {
            Some(hash) if plus => (SCRAM_SHA_256_PLUS, ChannelBinding::tls_server_end_point(hash)),
            _ if self.policy.binding == Binding::Require => {
                let text = "channel binding is required, but server did not offer an authentication method that supports channel binding";
                return Err(ConnectError::Auth(text.into()));
            }
            _ if !mechanisms.contains(&SCRAM_SHA_256) => {
                let offered = mechanisms.join(", ").escape_debug().to_string();
                let text = format!(
                    "none of the server's SASL authentication mechanisms are supported: it offers \"{offered}\""
                );
                return Err(ConnectError::Auth(text.into()));
            }
            // We could, the server did not offer it: it learns that, should someone have taken the offer away.
            Some(_) => (SCRAM_SHA_256, ChannelBinding::unrequested()),
            None => (SCRAM_SHA_256, ChannelBinding::unsupported()),
        };
        let scram = ScramSha256::new(self.password()?.as_bytes(), binding);
        frontend::sasl_initial_response(out, mechanism, scram.message());
        self.channel_bound = mechanism == SCRAM_SHA_256_PLUS;
        self.scram = Some(scram);
        Ok(())
    }

    /// Before any secret is sent: is this a request that we were told to answer (`check_expected_areq`)?
    fn check_expected(&self, request: &Authentication<'_>) -> Result<()> {
        if let (Authentication::Ok, Some(refusal)) = (request, self.security.refusal) {
            return Err(ConnectError::Auth(refusal.into()));
        }
        // Not even without require_auth may a server leave out its own proof.
        if *request == Authentication::Ok && self.scram.is_some() {
            return Err(ConnectError::Auth("server did not complete authentication".into()));
        }
        let sasl =
            matches!(request, Authentication::Sasl(_) | Authentication::SaslContinue(_) | Authentication::SaslFinal(_));
        let method = match request {
            Authentication::Ok if self.answered => None,
            Authentication::Ok => Some((Method::None, "server did not complete authentication")),
            Authentication::CleartextPassword => Some((Method::Password, "server requested a cleartext password")),
            Authentication::Md5Password { .. } => Some((Method::Md5, "server requested a hashed password")),
            Authentication::Other(_) => Some((Method::Other, "server requested an unknown authentication type")),
            _ => Some((Method::ScramSha256, "server requested SCRAM-SHA-256 authentication")),
        };
        if let (Some((method, reason)), Some(policy)) = (method, &self.policy.require_auth)
            && !policy.methods.contains(&method)
        {
            let text = format!("authentication method requirement \"{}\" failed: {reason}", policy.text);
            return Err(ConnectError::Auth(text.into()));
        }
        if self.policy.binding == Binding::Require && !sasl {
            if *request != Authentication::Ok {
                let text = "channel binding required but not supported by server's authentication request";
                return Err(ConnectError::Auth(text.into()));
            }
            if !(self.channel_bound && self.scram_finished) {
                let text = "channel binding required, but server authenticated client without channel binding";
                return Err(ConnectError::Auth(text.into()));
            }
        }
        Ok(())
    }

    fn password(&self) -> Result<&'a str> {
        let text = "no password supplied: give it in the connection string, the password file or PGPASSWORD";
        self.password.filter(|password| !password.is_empty()).ok_or_else(|| ConnectError::Auth(text.into()))
    }
}

fn out_of_order() -> ConnectError {
    ConnectError::Auth("server sent SASL data without a SASL exchange".into())
}

fn scram_failed(error: std::io::Error) -> ConnectError {
    ConnectError::Auth(Reason::of("SCRAM authentication failed", error))
}
