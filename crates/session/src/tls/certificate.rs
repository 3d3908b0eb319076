//! What a server's certificate says: names, validity, key, and its hash for channel binding.

use std::net::IpAddr;

use ring::digest;
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use x509_cert::der::asn1::{AnyRef, BitString, ContextSpecific, ObjectIdentifier};
use x509_cert::der::{Decode, Encode, SliceReader, TagNumber};
use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::ext::pkix::{BasicConstraints, KeyUsage, NameConstraints, SubjectAltName};
use x509_cert::spki::{AlgorithmIdentifierOwned, AlgorithmIdentifierRef};
use x509_cert::{Certificate, TbsCertificate, Version};

fn parse(der: &CertificateDer<'_>) -> Result<Certificate, String> {
    Certificate::from_der(der).map_err(invalid)
}

/// A public key, or a signature: the contents of its AlgorithmIdentifier, and its bits.
pub(super) struct Keyed {
    pub(super) algorithm: Vec<u8>,
    pub(super) bits: Vec<u8>,
}

impl Keyed {
    fn new(algorithm: &AlgorithmIdentifierOwned, bits: &BitString) -> Result<Keyed, String> {
        let algorithm = algorithm.to_der().and_then(|der| Ok(AnyRef::from_der(&der)?.value().to_vec()));
        let bits = bits.as_bytes().ok_or("server certificate is invalid: a key is not whole bytes")?;
        Ok(Keyed { algorithm: algorithm.map_err(invalid)?, bits: bits.to_vec() })
    }
}

fn invalid(error: impl std::fmt::Display) -> String {
    format!("server certificate is invalid: {error}")
}

/// The certificate's own key.
pub(super) fn public_key(der: &CertificateDer<'_>) -> Result<Keyed, String> {
    let certificate = parse(der)?;
    let key = certificate.tbs_certificate().subject_public_key_info();
    Keyed::new(&key.algorithm, &key.subject_public_key)
}

/// Whether it is of version 1, without any extension.
pub(super) fn is_version_1(der: &CertificateDer<'_>) -> bool {
    parse(der).is_ok_and(|certificate| certificate.tbs_certificate().version() == Version::V1)
}

/// Is a certificate of version 1 signed by one of these authorities, without others in between?
///
/// WebPKI does not read such certificates, but the recipes in PostgreSQL's manual make them with OpenSSL before 3.2. They
/// have no extensions that could restrict them, so that issuer, signature and validity are all there is to verify.
pub(super) fn check_version_1(
    der: &CertificateDer<'_>,
    roots: &[CertificateDer<'_>],
    algorithms: &[&dyn SignatureVerificationAlgorithm],
    now: UnixTime,
) -> Result<(), String> {
    check_validity(der, now)?;
    let certificate = parse(der)?;
    let signed = certificate.tbs_certificate().to_der().map_err(invalid)?;
    let signature = Keyed::new(certificate.signature_algorithm(), certificate.signature())?;
    for root_der in roots {
        let Ok(root) = parse(root_der) else { continue };
        let tbs = root.tbs_certificate();
        if tbs.subject() != certificate.tbs_certificate().issuer()
            || !may_sign(tbs)
            || check_validity(root_der, now).is_err()
        {
            continue;
        }
        let key = public_key(root_der)?;
        let verified = algorithms.iter().any(|algorithm| {
            algorithm.signature_alg_id().as_ref() == signature.algorithm
                && algorithm.public_key_alg_id().as_ref() == key.algorithm
                && algorithm.verify_signature(&key.bits, &signed, &signature.bits).is_ok()
        });
        if verified {
            return Ok(());
        }
    }
    Err("certificate verify failed: the server's certificate is of X.509 version 1, and not signed by an authority in \
         sslrootcert itself"
        .to_owned())
}

/// Is it an authority's, for any name? One of version 1 cannot tell.
fn may_sign(root: &TbsCertificate) -> bool {
    let authority = match root.get_extension::<BasicConstraints>() {
        Ok(Some((_, constraints))) => constraints.ca,
        Ok(None) => root.version() == Version::V1,
        Err(_) => false,
    };
    let usage = match root.get_extension::<KeyUsage>() {
        Ok(usage) => usage.is_none_or(|(_, usage)| usage.key_cert_sign()),
        Err(_) => false,
    };
    authority && usage && matches!(root.get_extension::<NameConstraints>(), Ok(None))
}

/// Is it valid at this time?
pub(super) fn check_validity(der: &CertificateDer<'_>, now: UnixTime) -> Result<(), String> {
    let certificate = parse(der)?;
    let validity = certificate.tbs_certificate().validity();
    let (from, until) = (validity.not_before.to_unix_duration(), validity.not_after.to_unix_duration());
    match now.as_secs() {
        now if now < from.as_secs() => Err("certificate verify failed: certificate is not yet valid".to_owned()),
        now if now > until.as_secs() => Err("certificate verify failed: certificate has expired".to_owned()),
        _ => Ok(()),
    }
}

/// Is it for this host (`pgtls_verify_peer_name_matches_certificate_guts`, PostgreSQL 18)? The Common Name counts if there
/// is no alternative name of the host's kind.
pub(super) fn check_host(der: &CertificateDer<'_>, host: &str) -> Result<(), String> {
    let certificate = parse(der)?;
    let certificate = certificate.tbs_certificate();
    let address: Option<IpAddr> = host.parse().ok();
    let alternatives = certificate.get_extension::<SubjectAltName>().map_err(invalid)?;
    let alternatives = alternatives.map(|(_, names)| names.0).unwrap_or_default();
    let mut names = Vec::new();
    let mut same_kind = false;
    for name in &alternatives {
        match name {
            GeneralName::DnsName(name) => {
                same_kind |= address.is_none();
                names.push(name.as_str().to_owned());
            }
            GeneralName::IpAddress(octets) => {
                same_kind |= address.is_some();
                let octets = octets.as_bytes();
                let found = <[u8; 4]>::try_from(octets).map(IpAddr::from);
                match found.or_else(|_| <[u8; 16]>::try_from(octets).map(IpAddr::from)) {
                    Ok(found) if Some(found) == address => return Ok(()),
                    Ok(found) => names.push(found.to_string()),
                    Err(_) => {
                        return Err(format!("certificate contains IP address with invalid length {}", octets.len()));
                    }
                }
            }
            _ => (),
        }
    }
    if !same_kind && let Ok(Some(name)) = certificate.subject().common_name() {
        names.push(name.value().into_owned());
    }
    if names.iter().any(|name| name_matches(name, host)) {
        return Ok(());
    }
    match names.as_slice() {
        [] => Err("could not get server's host name from server certificate".to_owned()),
        [name] => Err(format!("server certificate for \"{}\" does not match host name \"{host}\"", shown(name))),
        [name, rest @ ..] => Err(format!(
            "server certificate for \"{}\" (and {} other names) does not match host name \"{host}\"",
            shown(name),
            rest.len()
        )),
    }
}

fn shown(name: &str) -> String {
    name.chars().take(255).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Equal but for case, or a wildcard for the first label (`wildcard_certificate_match`).
fn name_matches(name: &str, host: &str) -> bool {
    if name.eq_ignore_ascii_case(host) {
        return true;
    }
    match (name.strip_prefix("*."), host.split_once('.')) {
        (Some(domain), Some((label, rest))) => {
            !domain.is_empty() && !label.is_empty() && domain.eq_ignore_ascii_case(rest)
        }
        _ => false,
    }
}

/// The hash of the whole certificate for `tls-server-end-point` (RFC 5929): with the hash of its signature, but not less
/// than SHA-256. `None` where the signature names none, as Ed25519.
pub fn end_point(der: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let certificate = parse(der).ok()?;
    let algorithm = certificate.signature_algorithm();
    let parameters = algorithm.parameters.as_ref().map(AnyRef::from);
    let hash = signature_hash(algorithm.oid, parameters)?;
    Some(digest::digest(hash, der).as_ref().to_vec())
}

fn signature_hash(oid: ObjectIdentifier, parameters: Option<AnyRef<'_>>) -> Option<&'static digest::Algorithm> {
    Some(match oid.to_string().as_str() {
        // MD5 and SHA-1, with RSA and ECDSA.
        "1.2.840.113549.1.1.4" | "1.2.840.113549.1.1.5" | "1.2.840.10045.4.1" => &digest::SHA256,
        "1.2.840.113549.1.1.11" | "1.2.840.10045.4.3.2" => &digest::SHA256,
        "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" => &digest::SHA384,
        "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" => &digest::SHA512,
        // RSASSA-PSS has its hash in the parameters; without, it is SHA-1 (RFC 4055).
        "1.2.840.113549.1.1.10" => {
            let mut reader = SliceReader::new(parameters?.value()).ok()?;
            let hash =
                ContextSpecific::<AlgorithmIdentifierRef<'_>>::decode_explicit(&mut reader, TagNumber(0)).ok()?;
            match hash.map(|hash| hash.value.oid.to_string()).as_deref() {
                None | Some("1.3.14.3.2.26" | "2.16.840.1.101.3.4.2.1") => &digest::SHA256,
                Some("2.16.840.1.101.3.4.2.2") => &digest::SHA384,
                Some("2.16.840.1.101.3.4.2.3") => &digest::SHA512,
                Some(_) => return None,
            }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    fn certificate(common_name: Option<&str>, alternatives: &[&str]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        for name in alternatives {
            params.subject_alt_names.push(match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            });
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    // The cases are those of src/test/ssl/t/001_ssltests.pl.
    #[test]
    fn names_match_as_in_libpq() {
        let cases: [(Option<&str>, &[&str], &str, bool); 19] = [
            (Some("common-name.pg-ssltest.test"), &[], "common-name.pg-ssltest.test", true),
            (Some("Common-Name.pg-ssltest.test"), &[], "common-name.PG-ssltest.test", true),
            (Some("common-name.pg-ssltest.test"), &[], "wronghost.test", false),
            (Some("cn.test"), &["dns1.alt.test", "dns2.alt.test", "*.wildcard.test"], "dns2.alt.test", true),
            (Some("cn.test"), &["dns1.alt.test", "dns2.alt.test", "*.wildcard.test"], "foo.wildcard.test", true),
            (Some("cn.test"), &["dns1.alt.test", "*.wildcard.test"], "deep.subdomain.wildcard.test", false),
            (Some("cn.test"), &["dns1.alt.test", "*.wildcard.test"], "wildcard.test", false),
            (Some("cn.test"), &["dns1.alt.test"], "cn.test", false),
            (None, &["192.0.2.1", "2001:db8::1"], "192.0.2.1", true),
            (None, &["192.0.2.1", "2001:db8::1"], "2001:DB8:0::1", true),
            (None, &["192.0.2.1"], "192.0.2.2", false),
            (Some("192.0.2.1"), &[], "192.0.2.1", true),
            (Some("192.0.2.1"), &["192.0.2.2"], "192.0.2.1", false),
            (Some("192.0.2.1"), &["dns1.alt.test"], "192.0.2.1", true),
            (Some("cn.test"), &["192.0.2.1"], "cn.test", true),
            (Some("*."), &[], ".", false),
            (Some("*"), &[], "x", false),
            (Some("*.test"), &[], ".test", false),
            (None, &[], "cn.test", false),
        ];
        for (common_name, alternatives, host, expected) in cases {
            let result = check_host(&certificate(common_name, alternatives), host);
            assert_eq!(result.is_ok(), expected, "{common_name:?} {alternatives:?} {host}: {result:?}");
        }
        let error = check_host(&certificate(Some("a\nb"), &[]), "x").unwrap_err();
        assert_eq!(error, "server certificate for \"a b\" does not match host name \"x\"");
    }

    #[test]
    fn any_bytes_are_a_certificate_or_an_error() {
        let good = certificate(Some("cn.test"), &["192.0.2.1", "a.test"]).to_vec();
        for at in 0..good.len() {
            for change in [1, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= change;
                let bad = CertificateDer::from(bad);
                let _ = (check_host(&bad, "a.test"), public_key(&bad), end_point(&bad));
                let _ = check_validity(&bad, UnixTime::now());
            }
            let short = CertificateDer::from(good[..at].to_vec());
            assert!(check_host(&short, "a.test").is_err() && end_point(&short).is_none());
        }
    }
}
