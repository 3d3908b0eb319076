use std::fs;
use std::os::unix::fs::PermissionsExt;

use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, DnValue, IsCa, KeyPair,
    date_time_ymd,
};
use rustls::{ClientConfig, ClientConnection, SupportedProtocolVersion};
use tempfile::TempDir;

use super::*;
use crate::scram::{Exchange, Mock, NONCE_LENGTH, SCRAM_SHA_256_PLUS, Secret};

type Authority = CertifiedIssuer<'static, KeyPair>;
type Owned = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn named(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(["relay.test".to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

fn authority(name: &str) -> Authority {
    CertifiedIssuer::self_signed(ca_params(name), KeyPair::generate().unwrap()).unwrap()
}

fn issue(params: &CertificateParams, issuer: &Authority) -> Owned {
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, issuer).unwrap();
    (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
}

/// The files of a server, in a directory.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new(issuer: &Authority) -> Files {
        let files = Files { dir: tempfile::tempdir().unwrap() };
        let key = KeyPair::generate().unwrap();
        files.write("server.crt", &named("relay").signed_by(&key, issuer).unwrap().pem());
        files.write("server.key", &key.serialize_pem());
        files.write("root.crt", &issuer.pem());
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn load(&self, client_ca: Option<&str>) -> Result<Acceptor, TlsError> {
        let client_ca = client_ca.map(|name| self.path(name));
        Acceptor::load(&self.path("server.crt"), &self.path("server.key"), client_ca.as_deref())
    }

    fn failure(&self, client_ca: Option<&str>) -> String {
        self.load(client_ca).unwrap_err().to_string()
    }
}

fn client(
    issuer: &Authority,
    versions: &[&'static SupportedProtocolVersion],
    own: Option<Owned>,
    alpn: &[&[u8]],
) -> ClientConnection {
    connection(&client_config(issuer, versions, own, alpn))
}

fn connection(config: &Arc<ClientConfig>) -> ClientConnection {
    ClientConnection::new(config.clone(), "relay.test".try_into().unwrap()).unwrap()
}

fn client_config(
    issuer: &Authority,
    versions: &[&'static SupportedProtocolVersion],
    own: Option<Owned>,
    alpn: &[&[u8]],
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(issuer.der().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(versions).unwrap().with_root_certificates(roots);
    let mut config = match own {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Arc::new(config)
}

/// Hands over what they say until both are content, or one is not.
fn shake_hands(client: &mut ClientConnection, server: &mut ServerConnection) -> Result<(), rustls::Error> {
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() || server.wants_write() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets()?;
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets()?;
        }
    }
    Ok(())
}

#[test]
fn certificates_of_clients_are_verified_if_they_are_shown() {
    let (ca, other) = (authority("ca"), authority("other ca"));
    let files = Files::new(&ca);
    let mut expired = named("replicator");
    expired.not_after = date_time_ymd(2020, 1, 1);
    for version in rustls::ALL_VERSIONS {
        for (own, client_ca, expected) in [
            (None, Some("root.crt"), Ok(None)),
            (Some(issue(&named("replicator"), &ca)), Some("root.crt"), Ok(Some("replicator"))),
            (Some(issue(&named("replicator"), &ca)), None, Ok(None)),
            (Some(issue(&named("replicator"), &other)), Some("root.crt"), Err(())),
            (Some(issue(&expired, &ca)), Some("root.crt"), Err(())),
        ] {
            let acceptor = files.load(client_ca).unwrap();
            assert_eq!(acceptor.verifies_clients(), client_ca.is_some());
            let mut server = acceptor.accept().unwrap();
            let result = shake_hands(&mut client(&ca, &[version], own, &[ALPN]), &mut server);
            assert_eq!(result.map_err(|_| ()), expected.map(|_| ()), "{version:?} {expected:?}");
            if let Ok(name) = expected {
                let chain = server.peer_certificates();
                let shown = chain.and_then(|chain| common_name(&chain[0]));
                assert_eq!(shown.as_deref(), name);
                let missing = Err(ClientCertError::Missing);
                let other = |name: &str| ClientCertError::User { user: "other".into(), named: Some(name.into()) };
                let ask = |asked, user| check_client(asked, chain, user);
                assert_eq!(ask(ClientCert::VerifyCa, "other"), name.map_or(missing.clone(), |_| Ok(())));
                assert_eq!(ask(ClientCert::VerifyFull, "replicator"), name.map_or(missing.clone(), |_| Ok(())));
                assert_eq!(ask(ClientCert::VerifyFull, "other"), name.map_or(missing, |name| Err(other(name))));
                assert_eq!(server.alpn_protocol(), Some(ALPN));
                assert_eq!(server.handshake_kind(), Some(rustls::HandshakeKind::Full));
            }
        }
    }
}

#[test]
fn a_client_that_names_protocols_must_name_this_one() {
    let ca = authority("ca");
    let acceptor = Files::new(&ca).load(None).unwrap();
    let other: &[u8] = b"h2";
    let cases: [(&[&[u8]], _); 4] =
        [(&[], Some(None)), (&[ALPN], Some(Some(ALPN))), (&[other, ALPN], Some(Some(ALPN))), (&[other], None)];
    for (alpn, expected) in cases {
        let mut server = acceptor.accept().unwrap();
        let done = shake_hands(&mut client(&ca, rustls::ALL_VERSIONS, None, alpn), &mut server);
        assert_eq!(done.ok().map(|()| server.alpn_protocol()), expected);
    }
}

#[test]
fn no_session_is_resumed() {
    let ca = authority("ca");
    let acceptor = Files::new(&ca).load(Some("root.crt")).unwrap();
    for version in rustls::ALL_VERSIONS {
        let config = client_config(&ca, &[version], Some(issue(&named("u"), &ca)), &[ALPN]);
        for _ in 0..2 {
            let (mut client, mut server) = (connection(&config), acceptor.accept().unwrap());
            shake_hands(&mut client, &mut server).unwrap();
            assert_eq!(client.handshake_kind(), Some(rustls::HandshakeKind::Full));
        }
    }
}

#[test]
fn channel_binding_is_to_the_certificate_that_the_client_sees() {
    let files = Files::new(&authority("unused"));
    let cases = [
        (&rcgen::PKCS_ECDSA_P256_SHA256, Some(&::ring::digest::SHA256)),
        (&rcgen::PKCS_ECDSA_P384_SHA384, Some(&::ring::digest::SHA384)),
        (&rcgen::PKCS_ED25519, None),
    ];
    for (algorithm, hash) in cases {
        let ca = CertifiedIssuer::self_signed(ca_params("ca"), KeyPair::generate_for(algorithm).unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        files.write("server.crt", &named("relay").signed_by(&key, &ca).unwrap().pem());
        files.write("server.key", &key.serialize_pem());
        let acceptor = files.load(None).unwrap();
        let (mut client, mut server) = (client(&ca, rustls::ALL_VERSIONS, None, &[]), acceptor.accept().unwrap());
        shake_hands(&mut client, &mut server).unwrap();
        let seen = &client.peer_certificates().unwrap()[0];
        let expected = hash.map(|hash| ::ring::digest::digest(hash, seen).as_ref().to_vec());
        assert_eq!(acceptor.certificate_hash(), expected.as_deref());

        // And both sides of SCRAM agree on it.
        let secret = Secret::parse(&postgres_protocol::password::scram_sha_256(b"pencil")).unwrap();
        let mut exchange =
            Exchange::new(Some(&secret), "u", &Mock::new(&[0; 32], [&secret]), acceptor.certificate_hash());
        assert_eq!(exchange.mechanisms()[0] == SCRAM_SHA_256_PLUS, hash.is_some());
        if let Some(hash) = expected {
            let mut scram = ScramSha256::new(b"pencil", ChannelBinding::tls_server_end_point(hash));
            let challenge = exchange.begin(SCRAM_SHA_256_PLUS, scram.message(), &[5; NONCE_LENGTH]).unwrap();
            scram.update(&challenge).unwrap();
            scram.finish(&exchange.finish(scram.message()).unwrap()).unwrap();
        }
    }
}

#[test]
fn a_chain_leads_to_the_clients_authority() {
    let root = authority("root");
    let between = CertifiedIssuer::signed_by(ca_params("between"), KeyPair::generate().unwrap(), &root).unwrap();
    let files = Files::new(&between);
    let leaf = fs::read_to_string(files.path("server.crt")).unwrap();
    for (text, works) in [(format!("{leaf}\n{}", between.pem()), true), (leaf, false)] {
        files.write("server.crt", &text);
        let acceptor = files.load(None).unwrap();
        let mut client = client(&root, rustls::ALL_VERSIONS, None, &[]);
        assert_eq!(shake_hands(&mut client, &mut acceptor.accept().unwrap()).is_ok(), works);
    }
}

#[test]
fn a_key_that_others_can_read_is_not_used() {
    let files = Files::new(&authority("ca"));
    let key = files.path("server.key");
    for mode in [0o644, 0o604, 0o660, 0o620, 0o601] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let text = files.failure(None);
        assert!(text.contains("server.key\" has group or world access") && text.contains("0600"), "{mode:o}: {text}");
    }
    fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
    files.load(None).unwrap();
    let (user, other) = (1000, 1001);
    for (owner, mode, allowed) in [
        (user, 0o600, true),
        (user, 0o700, true),
        (user, 0o640, false),
        (0, 0o640, true),
        (0, 0o644, false),
        (0, 0o660, false),
        (other, 0o600, false),
    ] {
        assert_eq!(check_owner_and_mode(owner, 0o100_000 | mode, user).is_ok(), allowed, "{owner} {mode:o}");
    }
}

#[test]
fn a_wrong_file_is_named_and_says_why() {
    let ca = authority("ca");
    let files = Files::new(&ca);
    let (certificate, key) = ("server.crt", "server.key");
    let good_key = fs::read_to_string(files.path(key)).unwrap();
    let good_certificate = fs::read_to_string(files.path(certificate)).unwrap();

    assert!(files.failure(Some("none")).contains("could not read client root certificate file"));
    files.write("empty", "");
    assert!(files.failure(Some("empty")).contains("empty\" has no certificate in PEM"));
    files.write("broken", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    assert!(files.failure(Some("broken")).contains("broken\" cannot be used"));
    files.write("cut", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    assert!(files.failure(Some("cut")).contains("cut\" is not a file of certificates in PEM"));
    assert!(files.failure(Some("")).contains("is not a regular file"));
    let fifo = files.path("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    assert!(files.failure(Some("fifo")).contains("is not a regular file"));
    fs::File::create(files.path("long")).unwrap().set_len(LONGEST + 1).unwrap();
    assert!(files.failure(Some("long")).contains("is too long"));

    files.write(key, &KeyPair::generate().unwrap().serialize_pem());
    let text = files.failure(None);
    assert!(text.contains("server.key\" is not the key of certificate file") && text.contains("server.crt"), "{text}");
    for header in ["-----BEGIN ENCRYPTED PRIVATE KEY-----", "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED"] {
        files.write(key, &good_key.replace("-----BEGIN PRIVATE KEY-----", header));
        assert!(files.failure(None).contains("is protected by a password"));
    }
    files.write(key, &good_certificate);
    assert!(files.failure(None).contains("has no private key in PEM"));
    files.write(key, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
    assert!(files.failure(None).contains("private key file"));
    fs::remove_file(files.path(key)).unwrap();
    assert!(files.failure(None).contains("could not read private key file"));
    files.write(key, &good_key);
    files.write(certificate, &fs::read_to_string(files.path("broken")).unwrap());
    let text = files.failure(None);
    assert!(text.contains("certificate file") && text.contains("version 3"), "{text}");
    files.write(certificate, &good_certificate);
    files.load(Some("root.crt")).unwrap();
}

#[test]
fn the_common_name_is_what_it_says() {
    let ca = authority("ca");
    let of = |params: &CertificateParams| common_name(&issue(params, &ca).0[0]);
    for name in ["replicator", "Ünïcode", "with space"] {
        assert_eq!(of(&named(name)).as_deref(), Some(name));
    }
    assert_eq!((of(&named("")), of(&named("replicator\0.example"))), (None, None));
    let typed = |value: DnValue| {
        let mut params = named("");
        params.distinguished_name.push(DnType::CommonName, value);
        of(&params)
    };
    assert_eq!(typed(DnValue::PrintableString("u".try_into().unwrap())).as_deref(), Some("u"));
    assert_eq!(typed(DnValue::BmpString("u".try_into().unwrap())), None);
    let mut none = named("x");
    none.distinguished_name = DistinguishedName::new();
    none.distinguished_name.push(DnType::OrganizationName, "replicator");
    assert_eq!(of(&none), None);

    let good = issue(&named("replicator"), &ca).0[0].to_vec();
    assert_eq!(common_name(&[]), None);
    for at in 0..good.len() {
        assert_eq!(common_name(&good[..at]), None);
        for change in [1, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] ^= change;
            let _ = common_name(&bad);
        }
    }
}
