//! TLS as a server has it (`be-secure-openssl.c`), by rustls: its certificate, and those of clients.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig, ServerConnection};
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::name::DirectoryString;

use crate::rules::ClientCert;

/// The protocol's name in the handshake (`PG_ALPN_PROTOCOL`).
///
/// A client that names protocols must name this one, or the handshake fails. One that begins with TLS, without asking first,
/// must name protocols (`ProcessSSLStartup`): [`rustls::CommonState::alpn_protocol`] tells.
pub const ALPN: &[u8] = b"postgresql";

/// No file of these is longer, in bytes.
const LONGEST: u64 = 4 << 20;

const CERTIFICATE: &str = "certificate file";
const KEY: &str = "private key file";
const CLIENT_CA: &str = "client root certificate file";

/// A file for TLS that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The operating system refused.
    #[error("could not read {what} \"{}\": {source}", path.display())]
    Read {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// It is not as it must be.
    #[error("{what} \"{}\" {text}", path.display())]
    Wrong {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        text: String,
    },
}

/// Encrypts connections with the server's certificate, and verifies those of clients.
#[derive(Clone, Debug)]
pub struct Acceptor {
    config: Arc<ServerConfig>,
    certificate_hash: Option<Vec<u8>>,
    verifies_clients: bool,
}

impl Acceptor {
    /// Reads the server's certificate (and those that lead to its authority), its key, and the authorities that may sign
    /// certificates of clients, all in PEM. Without the last, clients are not asked for a certificate.
    ///
    /// A client that shows no certificate is not refused: this is for the rules to decide ([`check_client`]). One that shows
    /// a wrong one is, as in PostgreSQL.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is not of this form, others can read the key (`check_ssl_key_file_permissions`), the key is
    /// protected by a password, or it is not that of the certificate.
    pub fn load(cert_file: &Path, key_file: &Path, client_ca: Option<&Path>) -> Result<Acceptor, TlsError> {
        let chain = certificates(CERTIFICATE, cert_file)?;
        let key = private_key(key_file)?;
        let provider = Arc::new(ring::default_provider());
        let certificate_hash = chain.first().and_then(walrider_session::tls_server_end_point);
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder
            .with_protocol_versions(rustls::ALL_VERSIONS)
            .map_err(|error| wrong(CERTIFICATE, cert_file, format!("cannot be used: {error}")))?;
        let builder = match client_ca {
            Some(path) => builder.with_client_cert_verifier(client_verifier(path, provider)?),
            None => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|error| unusable(&error, cert_file, key_file))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Nobody resumes a session, as in PostgreSQL: it would count for a certificate that is not verified again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Acceptor { config: Arc::new(config), certificate_hash, verifies_clients: client_ca.is_some() })
    }

    /// Begins a handshake.
    ///
    /// # Errors
    ///
    /// None that depends on the client.
    pub fn accept(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.config.clone())
    }

    /// The hash of the server's certificate for channel binding (`be_tls_get_certificate_hash`, RFC 5929). `None` if none is
    /// defined for its signature, as for Ed25519: then there is no channel binding.
    pub fn certificate_hash(&self) -> Option<&[u8]> {
        self.certificate_hash.as_deref()
    }

    /// Whether clients are asked for certificates. If not, rules that ask for one refuse everybody.
    pub fn verifies_clients(&self) -> bool {
        self.verifies_clients
    }
}

/// A client's certificate that is not as a rule asks for. Its SQLSTATE is 28000.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientCertError {
    /// There is none, or the connection is not encrypted.
    #[error("connection requires a valid client certificate")]
    Missing,
    /// It names another user, or none.
    #[error("certificate authentication failed for user \"{user}\"")]
    User {
        /// Who the client wants to be.
        user: String,
        /// Who it is by its certificate: for the log, not for the client.
        named: Option<String>,
    },
}

/// Is a client's certificate as a rule asks for (`CheckCertAuth`)? `chain` is what it has shown
/// ([`rustls::CommonState::peer_certificates`]), which the handshake has verified; the caller has finished that.
///
/// # Errors
///
/// If there is no certificate, or not the user's.
pub fn check_client(
    asked: ClientCert,
    chain: Option<&[CertificateDer<'_>]>,
    user: &str,
) -> Result<(), ClientCertError> {
    let certificate = chain.and_then(<[_]>::first).ok_or(ClientCertError::Missing)?;
    if asked == ClientCert::VerifyCa {
        return Ok(());
    }
    match common_name(certificate) {
        Some(name) if name == user => Ok(()),
        named => Err(ClientCertError::User { user: user.to_owned(), named }),
    }
}

/// The Common Name in a certificate, the first if there are several. `None` if there is none, it is empty, or has a zero byte
/// in it, which PostgreSQL does not take for a name either (`be_tls_open_server`).
pub fn common_name(cert_der: &[u8]) -> Option<String> {
    let certificate = Certificate::from_der(cert_der).ok()?;
    let name = certificate.tbs_certificate().subject().common_name().ok()??;
    // Every letter of these has a zero byte as a rule.
    if matches!(name, DirectoryString::BmpString(_)) {
        return None;
    }
    let name = name.value().into_owned();
    (!name.is_empty() && !name.contains('\0')).then_some(name)
}

fn client_verifier(
    path: &Path,
    provider: Arc<rustls::crypto::CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CLIENT_CA, path)? {
        roots.add(certificate).map_err(|error| wrong(CLIENT_CA, path, format!("cannot be used: {error}")))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).allow_unauthenticated();
    builder.build().map_err(|error| wrong(CLIENT_CA, path, format!("cannot be used: {error}")))
}

/// The certificates of a PEM file, at least one.
fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = open(what, path)?;
    let bytes = read(what, path, file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| wrong(what, path, format!("is not a file of certificates in PEM: {error}")))?;
    if found.is_empty() {
        return Err(wrong(what, path, "has no certificate in PEM (\"BEGIN CERTIFICATE\") in it".to_owned()));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let file = open(KEY, path)?;
    check_permissions(path, &file)?;
    let bytes = read(KEY, path, file)?;
    // "ENCRYPTED PRIVATE KEY", or "Proc-Type: 4,ENCRYPTED".
    if bytes.windows(9).any(|word| word == b"ENCRYPTED") {
        let text = "is protected by a password, which is not supported; remove it (openssl pkey) and protect the file";
        return Err(wrong(KEY, path, text.to_owned()));
    }
    PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|error| wrong(KEY, path, format!("has no private key in PEM in it: {error}")))
}

/// Opens a plain file.
fn open(what: &'static str, path: &Path) -> Result<File, TlsError> {
    let unreadable = |source| TlsError::Read { what, path: path.to_owned(), source };
    // A pipe would wait for its other end otherwise.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(wrong(what, path, "is not a regular file".to_owned()));
    }
    if metadata.len() > LONGEST {
        return Err(wrong(what, path, "is too long".to_owned()));
    }
    Ok(file)
}

fn read(what: &'static str, path: &Path, file: File) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let done = file.take(LONGEST).read_to_end(&mut bytes);
    done.map_err(|source| TlsError::Read { what, path: path.to_owned(), source })?;
    Ok(bytes)
}

/// Looks at the open file, so that no other takes its place in between.
fn check_permissions(path: &Path, file: &File) -> Result<(), TlsError> {
    let metadata = file.metadata().map_err(|source| TlsError::Read { what: KEY, path: path.to_owned(), source })?;
    let own = rustix::process::geteuid().as_raw();
    check_owner_and_mode(metadata.uid(), metadata.mode(), own).map_err(|text| wrong(KEY, path, text.to_owned()))
}

/// A key that root owns may be for a group, as where a system keeps all its keys in one place.
fn check_owner_and_mode(owner: u32, mode: u32, own: u32) -> Result<(), &'static str> {
    if owner != own && owner != 0 {
        return Err("must be owned by the user who runs this program, or by root (chown)");
    }
    let forbidden = if owner == 0 { 0o037 } else { 0o077 };
    if mode & forbidden != 0 {
        return Err(
            "has group or world access; it must have permissions u=rw (0600) or less if owned by the user who runs \
                    this program, or u=rw,g=r (0640) or less if owned by root (chmod)",
        );
    }
    Ok(())
}

fn wrong(what: &'static str, path: &Path, text: String) -> TlsError {
    TlsError::Wrong { what, path: path.to_owned(), text }
}

fn unusable(error: &rustls::Error, cert_file: &Path, key_file: &Path) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            wrong(KEY, key_file, format!("is not the key of certificate file \"{}\"", cert_file.display()))
        }
        rustls::Error::InvalidCertificate(_) => {
            let text =
                format!("cannot be used: {error}; its first certificate must be the server's, of X.509 version 3");
            wrong(CERTIFICATE, cert_file, text)
        }
        error => wrong(KEY, key_file, format!("cannot be used: {error}")),
    }
}

#[cfg(test)]
mod tests;
