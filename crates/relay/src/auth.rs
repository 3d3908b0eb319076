//! Who is it? The exchange that a rule asks for, over the connection (`ClientAuthentication`, `libpq/auth.c`, PostgreSQL 18).

use std::net::IpAddr;
use std::time::Instant;

use ring::rand::{SecureRandom, SystemRandom};
use walrider_wire::server;

use crate::link::{Link, LinkError};
use crate::refusal::{Refusal, Stopped};
use crate::rules::{ClientCert, Peer, Verdict};
use crate::scram::{self, Exchange, ScramError};
use crate::service::Access;
use crate::tls;

/// Has the client prove that it is `user`. Nothing is said of success yet.
pub(crate) fn authenticate(
    link: &mut Link,
    access: &Access,
    address: Option<IpAddr>,
    user: &str,
    deadline: Instant,
) -> Result<(), Stopped> {
    let peer = Peer { address, tls: link.tls().is_some() };
    match access.rules.decide(&peer, user) {
        Verdict::Trust => Ok(()),
        Verdict::Reject => {
            let from = address.map_or("[local]".to_owned(), |address| address.to_string());
            let how = if peer.tls { "SSL encryption" } else { "no encryption" };
            let message = format!(
                "no rule of the relay allows a replication connection from host \"{from}\", user \"{user}\", {how}"
            );
            Err(Refusal::new("28000", message).into())
        }
        Verdict::Cert { client_cert } => certificate(link, user, client_cert),
        Verdict::Scram { client_cert } => {
            if let Some(wanted) = client_cert {
                certificate(link, user, wanted)?;
            }
            password(link, access, user, deadline)
        }
    }
}

/// The certificate was verified in the handshake, if there is one.
fn certificate(link: &Link, user: &str, asked: ClientCert) -> Result<(), Stopped> {
    let chain = link.tls().and_then(|tls| tls.peer_certificates());
    tls::check_client(asked, chain, user).map_err(|error| Refusal::new("28000", error.to_string()).into())
}

/// SCRAM-SHA-256, with channel binding over TLS.
fn password(link: &mut Link, access: &Access, user: &str, deadline: Instant) -> Result<(), Stopped> {
    let failed = |error: ScramError| match error {
        ScramError::Refused => {
            Stopped::from(Refusal::new("28P01", format!("password authentication failed for user \"{user}\"")))
        }
        error => Refusal::new(error.sqlstate(), error.to_string()).into(),
    };
    let binding = match link.tls() {
        Some(_) => access.tls.as_ref().and_then(|tls| tls.certificate_hash()),
        None => None,
    };
    let mut exchange = Exchange::new(access.rules.secret(user), user, &access.mock, binding);
    link.queue(|out| server::authentication_sasl(out, exchange.mechanisms()));
    link.flush_all(deadline)?;
    let message = answer(link, deadline)?;
    let (mechanism, first) = server::sasl_initial_response(&message)?;
    let first = first.ok_or_else(|| Refusal::new("08P01", "malformed SCRAM message"))?;
    let mut nonce = [0; scram::NONCE_LENGTH];
    let random = SystemRandom::new().fill(&mut nonce);
    random.map_err(|_| Refusal::new("XX000", "could not generate random nonce"))?;
    let challenge = exchange.begin(mechanism, first, &nonce).map_err(failed)?;
    link.queue(|out| server::authentication_sasl_continue(out, &challenge));
    link.flush_all(deadline)?;
    let last = exchange.finish(&answer(link, deadline)?).map_err(failed)?;
    link.queue(|out| server::authentication_sasl_final(out, &last));
    Ok(())
}

/// What the client answers.
fn answer(link: &mut Link, deadline: Instant) -> Result<Vec<u8>, Stopped> {
    match link.wait_message(Some(deadline))? {
        (b'p', body) if body.len() <= scram::MAX_MESSAGE_LENGTH => Ok(body),
        (b'X', _) => Err(LinkError::Closed.into()),
        (tag, _) => {
            let message = format!("expected SASL response, got message type {tag}");
            Err(Refusal::new("08P01", message).into())
        }
    }
}
