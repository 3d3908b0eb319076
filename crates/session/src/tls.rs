//! TLS as `sslmode` and the files it names ask for it (`initialize_SSL` in `fe-secure-openssl.c`), by rustls.

mod certificate;
mod verifier;

use std::error::Error;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustls::client::{ResolvesClientCert, WebPkiServerVerifier};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, RootCertStore, SignatureScheme};
use socket2::Socket;

use crate::auth::Security;
use crate::files;
use crate::options::Host;
use crate::security::{CertMode, SslMode, SslOptions};
use crate::socket::Patience;
use crate::{ConnectError, Reason, Result};
pub use certificate::end_point;
use verifier::{Trust, Verifier};

/// The protocol's name in the handshake, which a server checks that begins with TLS (`PG_ALPN_PROTOCOL`).
const ALPN: &[u8] = b"postgresql";

/// An encrypted connection.
pub(crate) struct Tls {
    pub(crate) socket: Socket,
    pub(crate) session: ClientConnection,
}

/// Why `sslcertmode=require` refuses a server.
pub(crate) const NO_CERTIFICATE_REQUESTED: &str = "server did not request an SSL certificate";

/// Encrypts a connection; returns also what authentication wants to know of it.
pub(crate) fn establish(socket: Socket, ssl: &SslOptions, host: &Host, patience: &Patience) -> Result<(Tls, Security)> {
    let certificate = Arc::new(OwnCertificate { key: own_key(ssl)?, requested: AtomicBool::new(false) });
    let config = config(ssl, host, certificate.clone())?;
    let session = ClientConnection::new(Arc::new(config), server_name(host)).map_err(failed)?;
    let mut tls = Tls { socket, session };
    tls.shake_hands(patience)?;
    if ssl.direct && tls.session.alpn_protocol() != Some(ALPN) {
        let text = "direct SSL connection was established without ALPN protocol negotiation extension";
        return Err(ConnectError::Tls(text.into()));
    }
    let end_point = tls.session.peer_certificates().and_then(|chain| certificate::end_point(chain.first()?));
    let refusal = match ssl.cert_mode {
        CertMode::Require if !certificate.requested.load(Relaxed) => Some(NO_CERTIFICATE_REQUESTED),
        CertMode::Require if certificate.key.is_none() => {
            Some("server accepted connection without a valid SSL certificate")
        }
        _ => None,
    };
    Ok((tls, Security { tls: true, end_point, refusal }))
}

impl Tls {
    fn shake_hands(&mut self, patience: &Patience) -> Result<()> {
        while self.session.is_handshaking() {
            match self.session.complete_io(&mut &self.socket) {
                Ok(_) => (),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let (read, write) = (self.session.wants_read(), self.session.wants_write());
                    patience.wait(self.socket.as_fd(), read, write)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(ConnectError::Closed),
                Err(error) => return Err(io_failed(error)),
            }
        }
        Ok(())
    }

    /// See [`crate::transport::Transport::read`].
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
                done => return done,
            }
            self.session.read_tls(&mut &self.socket)?;
            if let Err(error) = self.session.process_new_packets() {
                // It tells the other side why, if that takes it.
                let _ = self.session.write_tls(&mut &self.socket);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }

    /// See [`crate::transport::Transport::write`].
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.session.writer().write(bytes)? {
            // Its buffer is full.
            0 if !bytes.is_empty() => {
                self.session.write_tls(&mut &self.socket)?;
                self.session.writer().write(bytes)
            }
            len => Ok(len),
        }
    }

    /// See [`crate::transport::Transport::flush`].
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            self.session.write_tls(&mut &self.socket)?;
        }
        Ok(true)
    }
}

/// An error of rustls, or of the socket below.
pub(crate) fn io_failed(error: io::Error) -> ConnectError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => failed(error.clone()),
        None => ConnectError::io("establish an SSL connection", error),
    }
}

fn failed(error: rustls::Error) -> ConnectError {
    match error {
        // Our own, of the verifier.
        rustls::Error::General(text) => ConnectError::Tls(text.into()),
        error => ConnectError::Tls(Reason::of("SSL error", error)),
    }
}

fn config(ssl: &SslOptions, host: &Host, certificate: Arc<OwnCertificate>) -> Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let algorithms = provider.signature_verification_algorithms;
    let versions: &[&rustls::SupportedProtocolVersion] = match ssl.versions {
        (true, false) => &[&rustls::version::TLS12],
        (false, true) => &[&rustls::version::TLS13],
        _ => rustls::ALL_VERSIONS,
    };
    if ssl.mode == SslMode::VerifyFull && host.host.is_empty() {
        let text = "host name must be specified for a verified SSL connection";
        return Err(ConnectError::Config(text.into()));
    }
    let verifier = Verifier {
        algorithms,
        trust: trust(ssl, &provider)?,
        host: (ssl.mode == SslMode::VerifyFull).then(|| host.host.clone()),
    };
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).map_err(failed)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = builder.with_client_cert_resolver(certificate);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.enable_sni = ssl.sni;
    // Another session will not resume this one.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// For rustls, which sends it if it is a name and not an address. What is verified is in [`Verifier`].
fn server_name(host: &Host) -> ServerName<'static> {
    // A name that could not be one in a certificate either is not sent.
    ServerName::try_from(host.host.clone()).unwrap_or(ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into()))
}

/// Whom to trust; `None`: anyone, as libpq does below `verify-ca` if there is no root certificate file.
fn trust(ssl: &SslOptions, provider: &Arc<rustls::crypto::CryptoProvider>) -> Result<Option<Trust>> {
    let mut roots = RootCertStore::empty();
    let mut exact = Vec::new();
    match &ssl.root_cert {
        Some(path) if path == Path::new("system") => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
        }
        Some(path) if path.exists() => {
            exact = certificates(path, "root certificate file")?;
            for certificate in &exact {
                roots.add(certificate.clone()).map_err(|error| unreadable("root certificate file", path, error))?;
            }
        }
        _ if ssl.mode < SslMode::VerifyCa => return Ok(None),
        path => {
            let path = path.as_deref().unwrap_or(Path::new("")).display();
            return Err(ConnectError::Config(format!(
                "root certificate file \"{path}\" does not exist; either provide the file, use the system's trusted \
                 roots with sslrootcert=system, or change sslmode to disable server certificate verification"
            ).into()));
        }
    }
    if roots.is_empty() {
        let text = "there are no root certificates on this system; give sslrootcert";
        return Err(ConnectError::Config(text.into()));
    }
    let mut builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    if let Some(path) = &ssl.crl {
        let bytes = files::read(path).map_err(|error| unreadable("certificate revocation list", path, error))?;
        let lists: std::result::Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&bytes).collect();
        let lists = lists.map_err(|error| unreadable("certificate revocation list", path, error))?;
        builder = builder.with_crls(lists).enforce_revocation_expiration();
    }
    let chain =
        builder.build().map_err(|error| ConnectError::Tls(Reason::of("could not use root certificates", error)))?;
    Ok(Some(Trust { chain, exact, revocation: ssl.crl.is_some() }))
}

/// Our certificate and its key, if there is one and it may be shown.
fn own_key(ssl: &SslOptions) -> Result<Option<Arc<CertifiedKey>>> {
    let Some(cert) = ssl.cert.as_ref().filter(|path| path.exists() && ssl.cert_mode != CertMode::Disable) else {
        return Ok(None);
    };
    let chain = certificates(cert, "certificate file")?;
    let Some(key) = ssl.key.as_ref().filter(|path| path.exists()) else {
        let key = ssl.key.as_deref().unwrap_or(Path::new("")).display();
        return Err(ConnectError::Tls(format!("certificate present, but not private key file \"{key}\"").into()));
    };
    files::check_key_permissions(key)?;
    let bytes = files::read(key).map_err(|error| unreadable("private key file", key, error))?;
    if contains(&bytes, b"ENCRYPTED") {
        return Err(ConnectError::Tls(format!(
            "private key file \"{}\" is protected by a password, which is not supported; remove it (openssl pkey) and \
             protect the file",
            key.display()
        ).into()));
    }
    let parsed = match PrivateKeyDer::from_pem_slice(&bytes) {
        // Not PEM; libpq takes DER too.
        Err(_) if bytes.first() == Some(&0x30) => {
            PrivateKeyDer::try_from(bytes).map_err(|error| unreadable("private key file", key, error))?
        }
        parsed => parsed.map_err(|error| unreadable("private key file", key, error))?,
    };
    let certified = CertifiedKey::from_der(chain, parsed, &ring::default_provider());
    certified.map(|key| Some(Arc::new(key))).map_err(|error| {
        let (cert, key) = (cert.display(), key.display());
        let what = format_args!("certificate \"{cert}\" does not match private key file \"{key}\"");
        ConnectError::Tls(Reason::of(what, error))
    })
}

/// The certificates of a PEM file, at least one.
fn certificates(path: &Path, what: &str) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = files::read(path).map_err(|error| unreadable(what, path, error))?;
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| unreadable(what, path, error))?;
    if found.is_empty() { Err(unreadable(what, path, "no certificate found")) } else { Ok(found) }
}

fn unreadable(what: &str, path: &Path, error: impl Into<Box<dyn Error + Send + Sync>>) -> ConnectError {
    ConnectError::Config(Reason::of(format_args!("could not read {what} \"{}\"", path.display()), error))
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}

/// Shows our certificate to any server that asks, as libpq does.
#[derive(Debug)]
struct OwnCertificate {
    key: Option<Arc<CertifiedKey>>,
    requested: AtomicBool,
}

impl ResolvesClientCert for OwnCertificate {
    fn resolve(&self, _issuers: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.requested.store(true, Relaxed);
        self.key.clone()
    }

    fn has_certs(&self) -> bool {
        self.key.is_some()
    }
}
