//! Whether a server's certificate is one to trust.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

use super::certificate;

/// libpq's rules, which differ from those of the web: the chain, the name, both or neither is verified, and the name may
/// be the Common Name.
#[derive(Debug)]
pub(super) struct Verifier {
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    /// Who must have signed it; `None`: anyone.
    pub(super) trust: Option<Trust>,
    /// The name that it must have; `None`: any.
    pub(super) host: Option<String>,
}

/// Root certificates.
#[derive(Debug)]
pub(super) struct Trust {
    pub(super) chain: Arc<WebPkiServerVerifier>,
    /// A server's own certificate among them is trusted as it is: PostgreSQL's manual has one made that way, and
    /// WebPKI does not take a certificate of an authority for that of a server.
    pub(super) exact: Vec<CertificateDer<'static>>,
}

impl Trust {
    fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<(), Error> {
        if self.exact.contains(end_entity) {
            return certificate::check_validity(end_entity, now).map_err(Error::General);
        }
        match self.chain.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Ok(_) => Ok(()),
            // The name is looked at last; whether it matters, we say.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(()),
            Err(error) => Err(Error::General(format!("certificate verify failed: {}", reason(&error)))),
        }
    }
}

/// In OpenSSL's words where it has some.
fn reason(error: &Error) -> String {
    use CertificateError::*;
    let known = match error {
        Error::InvalidCertificate(Expired | ExpiredContext { .. }) => "certificate has expired",
        Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => "certificate is not yet valid",
        Error::InvalidCertificate(Revoked) => "certificate revoked",
        Error::InvalidCertificate(UnknownRevocationStatus) => "sslcrl has no list of the certificate's authority",
        Error::InvalidCertificate(UnknownIssuer) => {
            "the server's certificate is not signed by an authority in sslrootcert"
        }
        other => return other.to_string(),
    };
    known.to_owned()
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(trust) = &self.trust {
            trust.check(end_entity, intermediates, name, ocsp, now)?;
        }
        if let Some(host) = &self.host {
            certificate::check_host(end_entity, host).map_err(Error::General)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // By the key: WebPKI does not read certificates of version 1, which PostgreSQL's manual has made with
        // OpenSSL before 3.2, and which are good enough where nobody verifies them.
        let key = certificate::public_key(certificate).map_err(Error::General)?;
        let key = SubjectPublicKeyInfoDer::from(key.as_slice());
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
