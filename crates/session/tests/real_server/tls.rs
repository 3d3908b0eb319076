//! Encryption against a server with OpenSSL: who is trusted, who is not, and what is said.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa, KeyIdMethod,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P384_SHA384, RevokedCertParams, SanType, SigningKey, date_time_ymd,
};
use walrider_layout::{Lsn, TimelineId};

use crate::server::{Server, connect, failure};
use crate::stream;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap()).unwrap()
}

fn named(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

/// One element of DER.
fn der(tag: u8, contents: &[u8]) -> Vec<u8> {
    let head = match contents.len() {
        len @ 0..128 => vec![tag, len as u8],
        len @ 128..256 => vec![tag, 0x81, len as u8],
        len => vec![tag, 0x82, (len >> 8) as u8, len as u8],
    };
    [&head, contents].concat()
}

/// Takes one element of DER off the front: its tag, all of it, its contents.
fn take_der<'a>(bytes: &mut &'a [u8]) -> (u8, &'a [u8], &'a [u8]) {
    let (head, len) = match bytes[1] {
        0x81 => (3, usize::from(bytes[2])),
        0x82 => (4, usize::from(bytes[2]) << 8 | usize::from(bytes[3])),
        len => (2, usize::from(len)),
    };
    let (element, rest) = bytes.split_at(head + len);
    *bytes = rest;
    (element[0], element, &element[head..])
}

/// The same certificate in version 1, as `openssl x509 -req` made them before OpenSSL 3.2, signed again.
fn in_version_1(certificate: &rcgen::Certificate, issuer: &Authority) -> String {
    let (_, _, mut outer) = take_der(&mut certificate.der().as_ref());
    let (_, _, mut fields) = take_der(&mut outer);
    let (_, algorithm, _) = take_der(&mut outer);
    let mut kept = Vec::new();
    while !fields.is_empty() {
        let (tag, field, _) = take_der(&mut fields);
        // Without [0] version and [3] extensions.
        if tag != 0xa0 && tag != 0xa3 {
            kept.extend(field);
        }
    }
    let signed = der(0x30, &kept);
    let signature = der(3, &[&[0], issuer.key().sign(&signed).unwrap().as_slice()].concat());
    let bytes = der(0x30, &[&signed, algorithm, &signature].concat());
    pem::encode(&pem::Pem::new("CERTIFICATE", bytes))
}

/// Writes certificate and key under a name, in the server's directory.
fn issue(server: &Server, file: &str, params: CertificateParams, issuer: &Authority) {
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, issuer).unwrap();
    write(server, &format!("{file}.crt"), &certificate.pem());
    write(server, &format!("{file}.key"), &key.serialize_pem());
}

fn write(server: &Server, file: &str, text: &str) {
    let path = server.dir().join(file);
    fs::write(&path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Has the server show another certificate.
fn show(server: &Server, file: &str) {
    server.stopper()("fast");
    for extension in ["crt", "key"] {
        let from = server.dir().join(format!("{file}.{extension}"));
        fs::copy(from, server.dir().join(format!("server.{extension}"))).unwrap();
    }
    server.start_again();
}

/// `{}` in `more` is the server's directory.
fn conninfo(server: &Server, more: &str) -> String {
    let directory = server.dir().to_str().unwrap();
    format!("port={} user=postgres host=localhost {}", server.port(), more.replace("{}", directory))
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_server_without_tls_is_one_for_those_who_do_not_insist() {
    let server = Server::start("", "local all all trust\nhost replication scram all scram-sha-256\n");
    server.sql("CREATE ROLE scram LOGIN REPLICATION PASSWORD 'p'");
    let error = failure(&conninfo(&server, "user=scram password=p sslmode=require"));
    assert!(error.contains("server does not support SSL, but SSL was required"), "{error}");
    for mode in ["allow", "prefer"] {
        assert!(!connect(&conninfo(&server, &format!("user=scram password=p sslmode={mode}"))).is_encrypted());
        let error = failure(&conninfo(&server, &format!("user=scram password=wr0ng sslmode={mode}")));
        assert!(error.contains("password authentication failed") && !error.contains("wr0ng"), "{error}");
    }
    let error = failure(&conninfo(&server, "user=scram password=p channel_binding=require"));
    assert!(error.contains("channel binding is required, but server did not offer"), "{error}");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn servers_and_clients_prove_who_they_are() {
    let server = Server::start("", "");
    if server.sql("SHOW ssl_library").is_empty() {
        return; // What such a server does is the other test.
    }
    server.set_hba(
        "local all postgres trust\nhostssl replication cert all cert\nhostssl replication scram all scram-sha-256\n\
         hostssl replication md5 all md5\nhost replication scram all scram-sha-256\n\
         hostssl replication postgres all trust\n",
    );
    let (ours, theirs) = (authority("Our CA"), authority("Their CA"));
    let mut good = named("ignored.test");
    good.subject_alt_names = vec![
        SanType::DnsName("localhost".try_into().unwrap()),
        SanType::DnsName("*.wild.test".try_into().unwrap()),
        SanType::IpAddress(Ipv4Addr::LOCALHOST.into()),
    ];
    good.serial_number = Some(77.into());
    let mut expired = named("localhost");
    expired.not_after = date_time_ymd(2020, 1, 1);
    let mut own = named("localhost");
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let own_key = KeyPair::generate().unwrap();
    let own = own.self_signed(&own_key).unwrap();
    write(&server, "own.crt", &own.pem());
    write(&server, "own.key", &own_key.serialize_pem());
    write(&server, "ours.crt", &ours.pem());
    write(&server, "theirs.crt", &theirs.pem());
    let now = rcgen::date_time_ymd(2024, 1, 1);
    let crl = CertificateRevocationListParams {
        this_update: now,
        next_update: date_time_ymd(2100, 1, 1),
        crl_number: 1.into(),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: 77.into(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    write(&server, "revoked.crl", &crl.signed_by(&ours).unwrap().pem().unwrap());
    issue(&server, "good", good, &ours);
    issue(&server, "cn", named("localhost"), &ours);
    issue(&server, "expired", expired, &ours);
    issue(&server, "client", named("cert"), &ours);
    issue(&server, "stranger", named("cert"), &theirs);
    let directory = server.dir().display().to_string();
    server.configure(&format!(
        "ssl = on\nssl_cert_file = '{directory}/server.crt'\nssl_key_file = '{directory}/server.key'\n\
         ssl_ca_file = '{directory}/ours.crt'\n"
    ));
    server.sql("CREATE ROLE cert LOGIN REPLICATION; CREATE ROLE scram LOGIN REPLICATION PASSWORD 'p'");
    server.sql("SET password_encryption = 'md5'; CREATE ROLE md5 LOGIN REPLICATION PASSWORD 'p'");

    let accepted = |more: &str| {
        let connection = connect(&conninfo(&server, more));
        assert!(connection.is_encrypted(), "{more}");
        connection
    };
    let refused = |more: &str, expected: &str| {
        let error = failure(&conninfo(&server, more));
        assert!(error.contains(expected), "{more}: {error}");
    };

    show(&server, "good");
    accepted("");
    accepted("sslmode=allow");
    accepted("sslmode=require");
    accepted("sslmode=require sslnegotiation=direct");
    accepted("sslmode=verify-ca sslrootcert={}/ours.crt host=wrong.test hostaddr=127.0.0.1");
    accepted("sslmode=verify-full sslrootcert={}/ours.crt sslsni=0");
    accepted("sslmode=verify-full sslrootcert={}/ours.crt host=127.0.0.1");
    accepted("sslmode=verify-full sslrootcert={}/ours.crt host=a.wild.test hostaddr=127.0.0.1");
    refused(
        "sslmode=verify-full sslrootcert={}/ours.crt host=wrong.test hostaddr=127.0.0.1",
        "server certificate for \"localhost\" (and 2 other names) does not match host name \"wrong.test\"",
    );
    refused("sslmode=verify-full sslrootcert={}/ours.crt host='' hostaddr=127.0.0.1", "host name must be specified");
    for mode in ["require", "verify-ca", "verify-full"] {
        // A root certificate that is there counts in every mode.
        refused(&format!("sslmode={mode} sslrootcert={{}}/theirs.crt"), "not signed by an authority in sslrootcert");
    }
    refused("sslmode=verify-ca sslrootcert={}/nosuch.crt", "nosuch.crt\" does not exist");
    refused("sslmode=verify-ca sslrootcert={}/good.key", "no certificate found");
    refused("sslrootcert=system", "certificate");
    refused("sslmode=verify-ca sslrootcert={}/ours.crt sslcrl={}/revoked.crl", "certificate revoked");
    refused(
        "sslmode=verify-ca sslrootcert={}/ours.crt sslcrl={}/nosuch.crl",
        "could not read certificate revocation list",
    );
    for (version, shown) in [("TLSv1.2", "TLSv1.2"), ("TLSv1.3", "TLSv1.3")] {
        let range = format!("ssl_min_protocol_version={version} ssl_max_protocol_version={version} sslmode=require");
        let _connection = accepted(&range);
        server.wait_for("SELECT version FROM pg_stat_ssl WHERE ssl AND pid <> pg_backend_pid()", shown);
    }

    // A server of another kind is none without encryption either, where pg_hba.conf wants that: once it ended the search so.
    let error = failure(&conninfo(&server, "target_session_attrs=standby"));
    assert!(error.contains("not in hot standby mode") && !error.contains("no encryption"), "{error}");

    // Our certificate.
    let cert = "user=cert sslmode=require sslcert={}/client.crt sslkey={}/client.key";
    accepted(cert);
    accepted(&format!("{cert} sslcertmode=require require_auth=none"));
    refused("user=cert sslmode=require", "connection requires a valid client certificate");
    refused(&format!("{cert} sslcertmode=disable"), "connection requires a valid client certificate");
    refused("sslmode=require sslcertmode=require", "without a valid SSL certificate");
    refused("user=scram password=p sslmode=disable sslcertmode=require", "did not request an SSL certificate");
    refused("user=cert sslmode=require sslcert={}/stranger.crt sslkey={}/stranger.key", "alert");
    refused("user=cert sslmode=require sslcert={}/client.crt sslkey={}/stranger.key", "does not match private key");
    refused("user=cert sslmode=require sslcert={}/client.crt", "certificate present, but not private key file");
    fs::set_permissions(server.dir().join("client.key"), fs::Permissions::from_mode(0o644)).unwrap();
    refused(cert, "has group or world access");

    // Channel binding: it is this server that knows the password.
    accepted("user=scram password=p channel_binding=require");
    accepted("user=scram password=p channel_binding=disable require_auth=scram-sha-256");
    refused("user=scram password=p channel_binding=require sslmode=disable", "channel binding is required");
    refused("user=md5 password=p channel_binding=require", "channel binding required but not supported");
    refused("channel_binding=require", "server authenticated client without channel binding");
    refused("user=scram password=wr0ng sslmode=require", "password authentication failed");
    refused("user=md5 password=p sslmode=disable", "no encryption");

    // WAL, encrypted, to the byte.
    let mut connection = accepted("sslmode=require");
    let start = Lsn(connection.identify_system().unwrap().flushed.0 & !0xff_ffff);
    connection.start_replication(None, start, TimelineId(1)).unwrap();
    server.sql("CREATE TABLE t AS SELECT g, repeat('x', 500) FROM generate_series(1, 40000) g");
    let until: Lsn = server.sql("SELECT pg_current_wal_flush_lsn()").parse().unwrap();
    let wal = stream(&mut connection, start, until);
    let path = server.data().join(format!("pg_wal/00000001{:08X}{:08X}", start.0 >> 32, (start.0 as u32) >> 24));
    let file = fs::read(path).unwrap();
    let common = wal.len().min(file.len());
    assert!(common > 8 << 20 && wal[..common] == file[..common]);
    assert_eq!(connection.end_copy().unwrap(), None);
    connection.identify_system().unwrap();
    drop(connection);

    show(&server, "cn");
    accepted("sslmode=verify-full sslrootcert={}/ours.crt");
    accepted("user=scram password=p channel_binding=require");
    refused("sslmode=verify-full sslrootcert={}/ours.crt host=127.0.0.1", "for \"localhost\" does not match");

    // Version 1.
    let impostor = authority("Our CA");
    for (file, issuer, year) in [("v1", &ours, 2090), ("v1_impostor", &impostor, 2090), ("v1_expired", &ours, 2020)] {
        let mut params = named("localhost");
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, issuer).unwrap();
        write(&server, &format!("{file}.crt"), &in_version_1(&certificate, issuer));
        write(&server, &format!("{file}.key"), &key.serialize_pem());
    }
    show(&server, "v1");
    for version in ["TLSv1.2", "TLSv1.3"] {
        accepted(&format!("sslmode=require ssl_min_protocol_version={version} ssl_max_protocol_version={version}"));
    }
    accepted("sslmode=verify-full sslrootcert={}/ours.crt");
    accepted("user=scram password=p channel_binding=require");
    refused("sslmode=verify-full sslrootcert={}/ours.crt host=127.0.0.1", "for \"localhost\" does not match");
    refused("sslmode=verify-ca sslrootcert={}/theirs.crt", "of X.509 version 1, and not signed by an authority");
    refused("sslmode=verify-ca sslrootcert={}/good.crt", "of X.509 version 1, and not signed by an authority");
    refused("sslmode=verify-ca sslrootcert={}/ours.crt sslcrl={}/revoked.crl", "not looked for in sslcrl");
    show(&server, "v1_impostor");
    refused("sslmode=verify-ca sslrootcert={}/ours.crt", "of X.509 version 1, and not signed by an authority");
    show(&server, "v1_expired");
    refused("sslmode=verify-ca sslrootcert={}/ours.crt", "certificate has expired");

    show(&server, "expired");
    refused("sslmode=verify-ca sslrootcert={}/ours.crt", "certificate has expired");
    accepted("sslmode=require");
    show(&server, "own");
    accepted("sslmode=verify-full sslrootcert={}/own.crt");
    accepted("user=scram password=p channel_binding=require");
    refused("sslmode=verify-full sslrootcert={}/ours.crt", "certificate verify failed");
}
