//! Whether a server's certificate is one to trust.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, SignatureVerificationAlgorithm, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, PeerMisbehaved, SignatureScheme};

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
    /// There is a list of revoked certificates, which `chain` looks at.
    pub(super) revocation: bool,
}

impl Trust {
    fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
        algorithms: &[&dyn SignatureVerificationAlgorithm],
    ) -> Result<(), Error> {
        if self.exact.contains(end_entity) {
            return certificate::check_validity(end_entity, now).map_err(Error::General);
        }
        if certificate::is_version_1(end_entity) {
            if self.revocation {
                let text = "certificate verify failed: the server's certificate is of X.509 version 1, which is not looked \
                            for in sslcrl; make one of version 3";
                return Err(Error::General(text.to_owned()));
            }
            return certificate::check_version_1(end_entity, &self.exact, algorithms, now).map_err(Error::General);
        }
        match self.chain.verify_server_cert(end_entity, intermediates, name, &[], now) {
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

/// What may sign a handshake of TLS 1.3 (RFC 8446, 4.2.3): no PKCS #1, no SHA-1.
const TLS13_SCHEMES: [SignatureScheme; 7] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
    SignatureScheme::ED25519,
];

impl Verifier {
    /// Is the handshake signed with the certificate's key? As in rustls, but it reads certificates of version 1 too.
    fn verify_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = certificate::public_key(certificate).map_err(Error::General)?;
        let mut possible = self.algorithms.mapping.iter().filter(|(scheme, _)| *scheme == signature.scheme);
        let Some((_, algorithms)) = possible.next() else {
            return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
        };
        // In TLS 1.2 the scheme does not say which curve.
        let fits =
            |algorithm: &&&dyn SignatureVerificationAlgorithm| algorithm.public_key_alg_id().as_ref() == key.algorithm;
        match algorithms.iter().find(fits) {
            Some(algorithm) if algorithm.verify_signature(&key.bits, message, signature.signature()).is_ok() => {
                Ok(HandshakeSignatureValid::assertion())
            }
            _ => Err(CertificateError::BadSignature.into()),
        }
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(trust) = &self.trust {
            trust.check(end_entity, intermediates, name, now, self.algorithms.all)?;
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
        self.verify_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if !TLS13_SCHEMES.contains(&signature.scheme) {
            return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
        }
        self.verify_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
