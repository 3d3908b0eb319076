//! The server's side of SCRAM-SHA-256 and SCRAM-SHA-256-PLUS (RFC 5802, 7677), as PostgreSQL speaks it (`auth-scram.c`).
//!
//! The server knows a [`Secret`], which is enough to verify a password and to prove in return that it is the server. Nothing
//! here reads a file, a socket, or random numbers: the caller hands in the nonce.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac};
use subtle::ConstantTimeEq;

/// The mechanism without channel binding.
pub const SCRAM_SHA_256: &str = "SCRAM-SHA-256";
/// The mechanism with channel binding, over TLS only.
pub const SCRAM_SHA_256_PLUS: &str = "SCRAM-SHA-256-PLUS";
/// The random bytes of a nonce (`SCRAM_RAW_NONCE_LEN`).
pub const NONCE_LENGTH: usize = 18;
/// The bytes of a message that are read at most (`PG_MAX_SASL_MESSAGE_LENGTH`). A server should not buffer more either.
pub const MAX_MESSAGE_LENGTH: usize = 1024;

/// The bytes of a key and of a proof.
const KEY_LENGTH: usize = digest::SHA256_OUTPUT_LEN;
/// The only kind of channel binding in PostgreSQL.
const BINDING_HEADER: &[u8] = b"p=tls-server-end-point,,";
/// What PostgreSQL makes secrets with unless it is told otherwise.
const DEFAULT_SHAPE: Shape = Shape { iterations: 4096, salt_length: 16 };
/// The longest secret in characters (`MAX_ENCRYPTED_PASSWORD_LEN`).
const MAX_SECRET_LENGTH: usize = 512;

/// What a server keeps of a password, as in `pg_authid.rolpassword`.
///
/// Who knows it can play the server. It is not enough to log in, unless one has also listened to somebody who did without
/// TLS: a file with secrets is for its owner alone. `Debug` shows no keys.
#[derive(Clone)]
pub struct Secret {
    iterations: u32,
    /// In base64, as it is sent.
    salt: String,
    stored_key: [u8; KEY_LENGTH],
    server_key: [u8; KEY_LENGTH],
}

/// What is wrong with a secret. Its text shows nothing of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It does not begin as any secret does: a password as it is typed, most likely.
    #[error("it is not a SCRAM-SHA-256 secret")]
    Plain,
    /// An MD5 hash, which SCRAM cannot use.
    #[error("it is an MD5 hash, which is not supported")]
    Md5,
    /// It begins as a secret does, but its parts are not right.
    #[error("it begins as a SCRAM-SHA-256 secret, but is not whole")]
    Malformed,
}

impl Secret {
    /// Reads `SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>` (`parse_scram_secret`).
    ///
    /// # Errors
    ///
    /// If it is not of this form, or longer than PostgreSQL stores.
    pub fn parse(text: &str) -> Result<Secret, SecretError> {
        let Some(rest) = text.strip_prefix("SCRAM-SHA-256$") else {
            // `get_password_type`: "md5" and 32 hexadecimal digits.
            let hash = text.strip_prefix("md5").filter(|hash| hash.len() == 32);
            let md5 = hash.is_some_and(|hash| hash.bytes().all(|digit| digit.is_ascii_hexdigit()));
            return Err(if md5 { SecretError::Md5 } else { SecretError::Plain });
        };
        if text.len() > MAX_SECRET_LENGTH {
            return Err(SecretError::Malformed);
        }
        Secret::parse_parts(rest).ok_or(SecretError::Malformed)
    }

    fn parse_parts(text: &str) -> Option<Secret> {
        let (iterations, rest) = text.split_once(':')?;
        let (salt, keys) = rest.split_once('$')?;
        let (stored_key, server_key) = keys.split_once(':')?;
        if !iterations.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        // PostgreSQL keeps them in an int.
        let iterations = iterations.parse().ok().filter(|count| (1..=i32::MAX as u32).contains(count))?;
        if BASE64.decode(salt).ok()?.is_empty() {
            return None;
        }
        let key = |text| BASE64.decode(text).ok()?.try_into().ok();
        let (stored_key, server_key) = (key(stored_key)?, key(server_key)?);
        Some(Secret { iterations, salt: salt.to_owned(), stored_key, server_key })
    }

    fn shape(&self) -> Shape {
        Shape { iterations: self.iterations, salt_length: BASE64.decode(&self.salt).map_or(0, |salt| salt.len()) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

/// What anybody learns of a secret who asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    iterations: u32,
    salt_length: usize,
}

/// Makes up answers for users who have no secret, so that nobody learns who has one (`mock_scram_secret`).
///
/// The answers of one user are always the same as long as the key is; they look like those of a user who has a secret.
pub struct Mock {
    key: hmac::Key,
    shapes: Vec<Shape>,
}

impl Mock {
    /// Makes up answers from a random key, in the form of these secrets. Without any, in that of PostgreSQL's default.
    ///
    /// The key must be kept as long as possible: an answer that changes with it is one that was made up.
    pub fn new<'a>(key: &[u8; 32], like: impl IntoIterator<Item = &'a Secret>) -> Mock {
        let mut shapes: Vec<Shape> = like.into_iter().map(Secret::shape).collect();
        // Their order must not show.
        shapes.sort_unstable();
        if shapes.is_empty() {
            shapes.push(DEFAULT_SHAPE);
        }
        Mock { key: hmac::Key::new(hmac::HMAC_SHA256, key), shapes }
    }

    /// The secret of a user who has none. No password belongs to it.
    fn secret(&self, user: &str) -> Secret {
        let block = |number: u32| {
            let mut context = hmac::Context::with_key(&self.key);
            context.update(&number.to_be_bytes());
            context.update(user.as_bytes());
            context.sign()
        };
        let [a, b, c, d, ..] = key_of(block(0));
        let shape = self.shapes[u32::from_be_bytes([a, b, c, d]) as usize % self.shapes.len()];
        let mut salt = Vec::new();
        for number in 3.. {
            if salt.len() >= shape.salt_length {
                break;
            }
            salt.extend_from_slice(block(number).as_ref());
        }
        salt.truncate(shape.salt_length);
        Secret {
            iterations: shape.iterations,
            salt: BASE64.encode(salt),
            stored_key: key_of(block(1)),
            server_key: key_of(block(2)),
        }
    }
}

impl fmt::Debug for Mock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mock").finish_non_exhaustive()
    }
}

/// An exchange that failed. After any of them the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScramError {
    /// The client chose a mechanism that was not offered.
    #[error("client selected an invalid SASL authentication mechanism")]
    Mechanism,
    /// The client's message is not one of SCRAM.
    #[error("malformed SCRAM message: {0}")]
    Malformed(&'static str),
    /// The client asks for something in SCRAM that PostgreSQL does not have.
    #[error("client requires {0}, which is not supported")]
    Unsupported(&'static str),
    /// The client thinks that channel binding is not offered, although it is: somebody in between took the offer away.
    #[error(
        "SCRAM channel binding negotiation error: the client thinks that the server does not support it, but it does"
    )]
    Downgrade,
    /// The client's TLS connection ends at another certificate: somebody is in between.
    #[error("SCRAM channel binding check failed")]
    Binding,
    /// The client does not repeat the nonce.
    #[error("invalid SCRAM response: nonce does not match")]
    Nonce,
    /// The password is wrong, or the user has no secret. A client must not learn which.
    #[error("password authentication failed")]
    Refused,
    /// The caller asked for a step that is not the next.
    #[error("SCRAM message out of order")]
    OutOfOrder,
}

impl ScramError {
    /// The SQLSTATE that PostgreSQL sends to the client with it.
    pub fn sqlstate(&self) -> &'static str {
        match self {
            ScramError::Unsupported(_) => "0A000",
            ScramError::Downgrade | ScramError::Binding => "28000",
            ScramError::Refused => "28P01",
            _ => "08P01",
        }
    }
}

/// One exchange: the client's first message, a challenge, the client's proof, the server's proof.
pub struct Exchange {
    secret: Secret,
    /// Without a secret it fails, whatever the client sends.
    doomed: bool,
    /// The hash of the server's certificate, if TLS is on.
    binding: Option<Vec<u8>>,
    state: State,
}

enum State {
    New,
    Challenged(Challenge),
    /// Finished or failed.
    Over,
}

/// What was said until the challenge was sent.
struct Challenge {
    first_bare: Vec<u8>,
    server_first: Vec<u8>,
    /// The client's and the server's.
    nonce: Vec<u8>,
    /// What the client has to repeat of channel binding, in base64.
    binding: String,
}

impl Exchange {
    /// Begins an exchange with a user. `binding` is the hash of the server's certificate
    /// ([`crate::tls::Acceptor::certificate_hash`]) if the connection is encrypted.
    pub fn new(secret: Option<&Secret>, user: &str, mock: &Mock, binding: Option<&[u8]>) -> Exchange {
        // Made up in any case: it takes time that would tell who has a secret.
        let made_up = mock.secret(user);
        Exchange {
            doomed: secret.is_none(),
            secret: secret.cloned().unwrap_or(made_up),
            binding: binding.map(<[u8]>::to_vec),
            state: State::New,
        }
    }

    /// The mechanisms to offer, the better first (`scram_get_mechanisms`).
    pub fn mechanisms(&self) -> &'static [&'static str] {
        match self.binding {
            Some(_) => &[SCRAM_SHA_256_PLUS, SCRAM_SHA_256],
            None => &[SCRAM_SHA_256],
        }
    }

    /// Reads the client's first message, and returns the challenge (`read_client_first_message`,
    /// `build_server_first_message`). The nonce must be of fresh random bytes.
    ///
    /// # Errors
    ///
    /// If the mechanism was not offered, the message is malformed, or it does not fit the mechanism.
    pub fn begin(
        &mut self,
        mechanism: &str,
        client_first: &[u8],
        nonce: &[u8; NONCE_LENGTH],
    ) -> Result<Vec<u8>, ScramError> {
        self.begin_with(mechanism, client_first, &BASE64.encode(nonce))
    }

    fn begin_with(&mut self, mechanism: &str, client_first: &[u8], nonce: &str) -> Result<Vec<u8>, ScramError> {
        let State::New = std::mem::replace(&mut self.state, State::Over) else {
            return Err(ScramError::OutOfOrder);
        };
        if !self.mechanisms().contains(&mechanism) {
            return Err(ScramError::Mechanism);
        }
        check_message(client_first)?;
        let (binding, bare) = self.read_binding(mechanism, client_first)?;
        let client_nonce = read_first_bare(bare)?;
        let nonce = [client_nonce, nonce.as_bytes()].concat();
        let parameters = format!(",s={},i={}", self.secret.salt, self.secret.iterations);
        let server_first = [b"r=", nonce.as_slice(), parameters.as_bytes()].concat();
        let challenge = Challenge { first_bare: bare.to_vec(), server_first: server_first.clone(), nonce, binding };
        self.state = State::Challenged(challenge);
        Ok(server_first)
    }

    /// Reads the header in front of the first message: returns what the last message must repeat of it, and the rest.
    fn read_binding<'m>(&self, mechanism: &str, first: &'m [u8]) -> Result<(String, &'m [u8]), ScramError> {
        let mut parts = first.splitn(3, |byte| *byte == b',');
        let (Some(flag), Some(identity), Some(bare)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(ScramError::Malformed("it is too short"));
        };
        let plus = mechanism == SCRAM_SHA_256_PLUS;
        let binding = match (flag, &self.binding) {
            (b"n" | b"y", _) if plus => {
                return Err(ScramError::Malformed("SCRAM-SHA-256-PLUS was selected, without channel binding"));
            }
            (b"n", _) => BASE64.encode("n,,"),
            (b"y", Some(_)) => return Err(ScramError::Downgrade),
            (b"y", None) => BASE64.encode("y,,"),
            ([b'p', b'=', ..], _) if !plus => {
                return Err(ScramError::Malformed("SCRAM-SHA-256 was selected, with channel binding"));
            }
            ([b'p', b'=', kind @ ..], Some(hash)) => {
                if kind != b"tls-server-end-point" {
                    return Err(ScramError::Malformed("the channel binding type is not tls-server-end-point"));
                }
                BASE64.encode([BINDING_HEADER, hash].concat())
            }
            _ => return Err(ScramError::Malformed("the channel binding flag is unknown")),
        };
        match identity {
            [] => Ok((binding, bare)),
            [b'a', ..] => Err(ScramError::Unsupported("an authorization identity")),
            _ => Err(ScramError::Malformed("unexpected attribute before the user's name")),
        }
    }

    /// Reads the client's proof, and returns the server's (`read_client_final_message`, `verify_client_proof`,
    /// `build_server_final_message`). The client is who it says it is if this succeeds, and not otherwise.
    ///
    /// # Errors
    ///
    /// If the message is malformed or does not fit the exchange, the password is wrong, or the user has no secret.
    pub fn finish(&mut self, client_final: &[u8]) -> Result<Vec<u8>, ScramError> {
        let State::Challenged(challenge) = std::mem::replace(&mut self.state, State::Over) else {
            return Err(ScramError::OutOfOrder);
        };
        check_message(client_final)?;
        let read = Final::read(client_final)?;
        if read.binding != challenge.binding.as_bytes() {
            return Err(match self.binding {
                Some(_) if challenge.binding.len() > BINDING_HEADER.len() => ScramError::Binding,
                _ => ScramError::Malformed("the last message does not repeat the channel binding flag"),
            });
        }
        if !equal(read.nonce, &challenge.nonce) {
            return Err(ScramError::Nonce);
        }
        let message: [&[u8]; 5] = [&challenge.first_bare, b",", &challenge.server_first, b",", read.without_proof];
        let mut client_key = key_of(signature(&self.secret.stored_key, &message));
        client_key.iter_mut().zip(read.proof).for_each(|(byte, proof)| *byte ^= proof);
        let right = equal(digest::digest(&digest::SHA256, &client_key).as_ref(), &self.secret.stored_key);
        let server_signature = signature(&self.secret.server_key, &message);
        // The proof is verified even if it does not matter: to leave that out would take less time.
        if !right || self.doomed {
            return Err(ScramError::Refused);
        }
        Ok(format!("v={}", BASE64.encode(server_signature)).into_bytes())
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").finish_non_exhaustive()
    }
}

fn signature(key: &[u8; KEY_LENGTH], message: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    message.iter().for_each(|part| context.update(part));
    context.sign()
}

fn key_of(tag: hmac::Tag) -> [u8; KEY_LENGTH] {
    let mut key = [0; KEY_LENGTH];
    key.copy_from_slice(tag.as_ref());
    key
}

/// Equal? Takes the same time wherever they differ.
fn equal(one: &[u8], other: &[u8]) -> bool {
    one.ct_eq(other).into()
}

fn check_message(message: &[u8]) -> Result<(), ScramError> {
    match message.len() {
        0 => Err(ScramError::Malformed("it is empty")),
        1..=MAX_MESSAGE_LENGTH if message.contains(&0) => Err(ScramError::Malformed("it contains a zero byte")),
        1..=MAX_MESSAGE_LENGTH => Ok(()),
        _ => Err(ScramError::Malformed("it is too long")),
    }
}

/// Checks the first message after its header, and returns its nonce. The user's name in it does not count: PostgreSQL takes
/// that of the startup packet.
fn read_first_bare(bare: &[u8]) -> Result<&[u8], ScramError> {
    if bare.first() == Some(&b'm') {
        return Err(ScramError::Unsupported("a SCRAM extension"));
    }
    let mut attributes = bare.split(|byte| *byte == b',');
    let mut next = || attributes.next().unwrap_or_default();
    value(next(), b'n')?;
    let nonce = value(next(), b'r')?;
    if nonce.is_empty() || !nonce.iter().all(u8::is_ascii_graphic) {
        return Err(ScramError::Malformed("the nonce is empty or not printable"));
    }
    // Optional extensions are ignored.
    attributes.try_for_each(check_attribute)?;
    Ok(nonce)
}

/// The client's last message.
struct Final<'m> {
    binding: &'m [u8],
    nonce: &'m [u8],
    proof: [u8; KEY_LENGTH],
    without_proof: &'m [u8],
}

impl Final<'_> {
    fn read(message: &[u8]) -> Result<Final<'_>, ScramError> {
        let mut attributes = message.split(|byte| *byte == b',');
        let mut next = || attributes.next().unwrap_or_default();
        let binding = value(next(), b'c')?;
        let nonce = value(next(), b'r')?;
        // Length until the proof: as far as read, with a comma after each.
        let mut length = binding.len() + nonce.len() + 2 * "c=,".len();
        let proof = loop {
            let attribute = attributes.next().ok_or(ScramError::Malformed("there is no proof"))?;
            check_attribute(attribute)?;
            match attribute.strip_prefix(b"p=") {
                Some(proof) => break proof,
                // Optional extensions are ignored.
                None => length += attribute.len() + 1,
            }
        };
        if attributes.next().is_some() {
            return Err(ScramError::Malformed("something follows the proof"));
        }
        let proof = BASE64.decode(proof).ok().and_then(|proof| proof.try_into().ok());
        let proof = proof.ok_or(ScramError::Malformed("the proof is not one"))?;
        Ok(Final { binding, nonce, proof, without_proof: &message[..length - 1] })
    }
}

fn value(attribute: &[u8], name: u8) -> Result<&[u8], ScramError> {
    match attribute {
        [found, b'=', value @ ..] if *found == name => Ok(value),
        _ => Err(ScramError::Malformed("an expected attribute is missing")),
    }
}

fn check_attribute(attribute: &[u8]) -> Result<(), ScramError> {
    match attribute {
        [name, b'=', ..] if name.is_ascii_alphabetic() => Ok(()),
        _ => Err(ScramError::Malformed("an attribute is not one")),
    }
}

#[cfg(test)]
mod tests;
