//! Servers that are none: whatever they send, there is an error soon, a bound to the memory, and no secret is given away.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, ServerConnection};
use walrider_layout::{Lsn, TimelineId};
use walrider_session::{ConnectError, ConnectOptions, Connection, CopyEvent, Read};

/// Serves connections, one at a time, with a script; tells what each client sent before it was gone.
fn serve(script: impl Fn(&mut TcpStream) + Send + 'static) -> (u16, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            script(&mut stream);
            let mut seen = Vec::new();
            // The client may be gone already, with a reset.
            let _ = stream.read_to_end(&mut seen);
            if sender.send(seen).is_err() {
                return;
            }
        }
    });
    (port, receiver)
}

/// A machine that is busy with other things may take its time.
const LONG: Duration = Duration::from_secs(60);

fn options(port: u16, more: &str) -> ConnectOptions {
    let conninfo =
        format!("host=127.0.0.1 port={port} user=u password=s3cret sslmode=disable connect_timeout=60 {more}");
    ConnectOptions::resolve_with(&conninfo, "w", &|name| (name == "HOME").then(|| "/nonexistent".into())).unwrap()
}

/// What is said, before long.
fn failure(port: u16, more: &str) -> String {
    let began = Instant::now();
    let error = Connection::open(&options(port, more)).err().expect("no connection").to_string();
    assert!(began.elapsed() < LONG, "{error} took {:?}", began.elapsed());
    assert!(!error.contains("s3cret"), "{error}");
    error
}

/// The timeout, where nothing else comes to an end.
fn assert_times_out(port: u16, more: &str) {
    let error = failure(port, &format!("connect_timeout=1 {more}"));
    assert!(error.contains("timeout expired"), "{error}");
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend((body.len() as u32 + 4).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn authentication(code: u32, data: &[u8]) -> Vec<u8> {
    message(b'R', &[&code.to_be_bytes(), data].concat())
}

/// Everything up to ReadyForQuery.
fn ready() -> Vec<u8> {
    [authentication(0, b""), message(b'S', b"server_version\x0018.6\0"), message(b'K', &[0; 8]), message(b'Z', b"I")]
        .concat()
}

/// Reads one message without type: the startup message.
fn take_startup(stream: &mut TcpStream) {
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut body = vec![0; u32::from_be_bytes(len) as usize - 4];
    stream.read_exact(&mut body).unwrap();
}

/// Reads one message.
fn take(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let mut head = [0; 5];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; u32::from_be_bytes(head[1..].try_into().unwrap()) as usize - 4];
    stream.read_exact(&mut body).unwrap();
    (head[0], body)
}

/// A connection that is ready, to a server that then goes on with this.
fn connected(script: impl Fn(&mut TcpStream) + Send + 'static) -> Connection {
    let (port, _) = serve(move |stream| {
        take_startup(stream);
        stream.write_all(&ready()).unwrap();
        script(stream);
    });
    let mut connection = Connection::open(&options(port, "")).unwrap();
    connection.set_response_timeout(Some(LONG));
    connection
}

#[test]
fn a_server_that_says_nonsense_is_refused_at_once() {
    let cases: [(&[u8], &str); 8] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "may not be PostgreSQL"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "may not be PostgreSQL"),
        (b"R\x7f\xff\xff\xff\0\0\0\0", "may not be PostgreSQL"),
        (b"R\0\0\0\x03", "may not be PostgreSQL"),
        (b"R\0\0\0\x06\0\0", "invalid Authentication message"),
        (b"Z\0\0\0\x05I", "unexpected message type 0x5a (\"Z\")"),
        (b"D\0\0\0\x06\0\0", "unexpected message type"),
        (b"E\0\0\0\x05S", "invalid ErrorResponse message"),
    ];
    for (bytes, expected) in cases {
        let (port, _) = serve(move |stream| {
            let _ = stream.write_all(bytes);
        });
        let error = failure(port, "");
        assert!(error.contains(expected), "{bytes:?}: {error}");
    }
}

#[test]
fn a_server_that_says_nothing_or_not_enough_is_waited_for_until_the_timeout() {
    let (port, _) = serve(|_| ());
    assert_times_out(port, "");
    // A byte at a time.
    let (port, _) = serve(|stream| {
        for byte in ready() {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    assert_times_out(port, "");
    // Nobody accepts the connection, but the system does.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_times_out(listener.local_addr().unwrap().port(), "sslmode=require");
    // Half a message, then the end.
    let (port, _) = serve(|stream| {
        stream.write_all(&ready()[..12]).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    assert!(failure(port, "").contains("server closed the connection unexpectedly"));
    // Notices without end.
    let (port, _) = serve(|stream| {
        let notices = message(b'N', b"SNOTICE\0Mm\0\0").repeat(1000);
        while stream.write_all(&notices).is_ok() {}
    });
    assert_times_out(port, "");
    let (port, _) = serve(|stream| {
        let parameters = [authentication(0, b""), message(b'K', b"")].concat().repeat(1000);
        while stream.write_all(&parameters).is_ok() {}
    });
    assert!(failure(port, "").contains("unexpected message type"));
}

/// Without `connect_timeout`, as most connection strings are.
#[test]
fn authentication_that_never_ends_is_given_up() {
    let scram = |stream: &mut TcpStream| {
        stream.write_all(&authentication(10, b"SCRAM-SHA-256\0\0")).unwrap();
        let (_, first) = take(stream);
        let nonce = String::from_utf8_lossy(&first).split_once(",r=").unwrap().1.to_owned();
        stream.write_all(&authentication(11, format!("r={nonce}x,s=AAAA,i=4096").as_bytes())).unwrap();
    };
    // Whether SCRAM begins, and what then comes again and again, each long before a silence would be noticed.
    let cases = [
        (false, message(b'N', b"SNOTICE\0Mm\0\0")),
        (false, message(b'S', b"server_version\x0018.6\0")),
        (true, message(b'N', b"SNOTICE\0Mm\0\0")),
        (true, message(b'S', b"a\0b\0")),
        (false, message(b'A', b"\0\0\0\x01a\0b\0")),
    ];
    for (begins, again) in cases {
        let (port, _) = serve(move |stream| {
            take_startup(stream);
            if begins {
                scram(stream);
            }
            // The test, not the server, is to end it.
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(20) && stream.write_all(&again).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut options = options(port, "connect_timeout=0");
        options.give_up_after(Duration::from_millis(300));
        let began = Instant::now();
        let error = Connection::open(&options).err().expect("no connection").to_string();
        assert!(error.contains("timeout expired"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    // SASL that goes on is an error at once.
    let (port, _) = serve(move |stream| {
        take_startup(stream);
        scram(stream);
        let (tag, _) = take(stream);
        assert_eq!(tag, b'p');
        while stream.write_all(&authentication(11, b"r=x,s=AAAA,i=4096")).is_ok() {}
    });
    assert!(failure(port, "connect_timeout=0").contains("SCRAM authentication failed"));
}

#[test]
fn random_bytes_are_an_error() {
    let mut state = walrider_seed::seed() | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..200 {
        let mut bytes = ready();
        for _ in 0..=next() % 4 {
            let at = next() as usize % bytes.len();
            match next() % 3 {
                0 => bytes[at] = next() as u8,
                1 => bytes.truncate(at + 1),
                _ => bytes.extend(std::iter::repeat_with(|| next() as u8).take(100)),
            }
        }
        let (port, _) = serve(move |stream| {
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
        });
        // Some of the changes do not matter.
        if let Ok(mut connection) = Connection::open(&options(port, "")) {
            connection.set_response_timeout(Some(LONG));
            assert!(connection.identify_system().is_err());
        }
    }
}

#[test]
fn a_password_is_given_only_to_those_who_may_ask() {
    let clear = |stream: &mut TcpStream| {
        take_startup(stream);
        stream.write_all(&authentication(3, b"")).unwrap();
    };
    for (more, expected) in [
        ("require_auth=scram-sha-256", "server requested a cleartext password"),
        ("require_auth=!password", "server requested a cleartext password"),
        ("channel_binding=require", "channel binding required but not supported"),
    ] {
        let (port, seen) = serve(clear);
        assert!(failure(port, more).contains(expected));
        assert_eq!(seen.recv().unwrap(), b"", "nothing is answered");
    }
    let (port, seen) = serve(clear);
    // It waits for what does not come.
    failure(port, "connect_timeout=5");
    assert!(seen.recv().unwrap().windows(6).any(|window| window == b"s3cret"), "this is how it would be seen");
}

#[test]
fn a_server_must_prove_that_it_knows_the_password_too() {
    let scram = authentication(10, b"SCRAM-SHA-256\0\0");
    // Each is what follows the client's first message, made of its nonce.
    type Answer = fn(&str) -> Vec<u8>;
    let cases: [(Answer, &str); 6] = [
        (|_| ready(), "server did not complete authentication"),
        (|_| authentication(12, b"v=AAAA"), "SCRAM authentication failed"),
        (|_| authentication(11, b"r=other,s=AAAA,i=4096"), "SCRAM authentication failed"),
        (
            |nonce| authentication(11, format!("r={nonce}x,s=AAAA,i=4294967295").as_bytes()),
            "SCRAM authentication failed",
        ),
        (
            |nonce| {
                let first = authentication(11, format!("r={nonce}x,s=AAAA,i=4096").as_bytes());
                [first, authentication(12, b"v=AAAA"), ready()].concat()
            },
            "SCRAM authentication failed",
        ),
        (
            |nonce| [authentication(11, format!("r={nonce}x,s=AAAA,i=4096").as_bytes()), ready()].concat(),
            "server did not complete authentication",
        ),
    ];
    for (answer, expected) in cases {
        let scram = scram.clone();
        let (port, _) = serve(move |stream| {
            take_startup(stream);
            stream.write_all(&scram).unwrap();
            let (tag, body) = take(stream);
            assert_eq!(tag, b'p');
            let text = String::from_utf8_lossy(&body).into_owned();
            let nonce = text.split_once(",r=").unwrap().1;
            let _ = stream.write_all(&answer(nonce));
        });
        let error = failure(port, "");
        assert!(error.contains(expected), "{expected}: {error}");
    }
    for (first, expected) in [
        (authentication(11, b"r=x"), "without a SASL exchange"),
        (authentication(12, b"v=x"), "without a SASL exchange"),
        (authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"), "over a non-SSL connection"),
        (authentication(10, b"OAUTHBEARER\0\0"), "it offers \"OAUTHBEARER\""),
        (scram.repeat(2), "duplicate SASL authentication request"),
        (authentication(7, b""), "authentication method 7 not supported"),
    ] {
        let (port, _) = serve(move |stream| {
            let _ = stream.write_all(&first);
        });
        let error = failure(port, "");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn nothing_unencrypted_is_taken_for_encrypted() {
    let cases: [(&[u8], &str); 4] = [
        (b"SR\0\0\0\x08\0\0\0\0Z\0\0\0\x05I", "SSL error"),
        (b"N", "server does not support SSL, but SSL was required"),
        (b"E\0\0\0\x10SFATAL\0Mlies\0\0", "server sent an error response during SSL exchange"),
        (b"x", "received invalid response to SSL negotiation: 0x78"),
    ];
    let answers = |bytes: &'static [u8]| {
        let (port, _) = serve(move |stream| {
            let mut request = [0; 8];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request, [0, 0, 0, 8, 4, 210, 22, 47]);
            stream.write_all(bytes).unwrap();
        });
        port
    };
    assert_times_out(answers(b"S"), "sslmode=require");
    for (bytes, expected) in cases {
        let port = answers(bytes);
        let error = failure(port, "sslmode=require");
        assert!(error.contains(expected) && !error.contains("lies"), "{error}");
    }
}

/// A server that shows a certificate, and signs with some key.
#[derive(Debug)]
struct Shown(Arc<CertifiedKey>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[test]
fn a_certificate_is_of_use_to_its_owner_only() {
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
            for is_owner in [true, false] {
                let (own, other) =
                    (KeyPair::generate_for(algorithm).unwrap(), KeyPair::generate_for(algorithm).unwrap());
                let certificate = CertificateParams::default().self_signed(&own).unwrap();
                let key = if is_owner { &own } else { &other };
                let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let key = provider.key_provider.load_private_key(key).unwrap();
                let shown = Shown(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], key)));
                let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
                let mut config = config.with_no_client_auth().with_cert_resolver(Arc::new(shown));
                config.alpn_protocols = vec![b"postgresql".to_vec()];
                let config = Arc::new(config);
                let (port, _) = serve(move |stream| {
                    stream.read_exact(&mut [0; 8]).unwrap();
                    stream.write_all(b"S").unwrap();
                    let mut session = ServerConnection::new(config.clone()).unwrap();
                    let _ = session.complete_io(stream);
                    let _ = session.writer().write_all(&message(b'E', b"SFATAL\0Menough\0\0"));
                    let _ = session.complete_io(stream);
                });
                let error = failure(port, "sslmode=require");
                let expected = if is_owner { "FATAL:  enough" } else { "invalid peer certificate: BadSignature" };
                assert!(error.contains(expected), "{version:?} {algorithm:?}: {error}");
            }
        }
    }
}

#[test]
fn an_answer_has_an_end_or_a_bound() {
    let row = message(b'D', &[&[0, 1, 0, 1, 0, 0][..], &[b'x'; 0x1_0000]].concat());
    let mut connection = connected(move |stream| {
        take(stream);
        while stream.write_all(&row).is_ok() {}
    });
    let error = connection.simple_query("x").unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
    let error = connection.simple_query("x").unwrap_err();
    assert!(error.to_string().contains("not ready for a command"), "{error}");

    let mut connection = connected(|stream| {
        take(stream);
        let notices = message(b'N', b"SNOTICE\0Mm\0\0").repeat(1000);
        while stream.write_all(&notices).is_ok() {}
    });
    connection.set_response_timeout(Some(Duration::from_secs(1)));
    assert!(matches!(connection.identify_system(), Err(ConnectError::Timeout)));
    assert_eq!(connection.take_notices().len(), 16);

    for (answer, expected) in [
        (message(b'Z', b"I"), "could not identify system"),
        ([message(b'D', b"\0\x01\0\0\0\x01x"), message(b'Z', b"I")].concat(), "could not identify system"),
        (message(b'E', b"SFATAL\0C57P01\0Mbye\0\0"), "FATAL:  bye"),
        (message(b'D', b"\0\x01\0\0\0\x09x"), "invalid DataRow message"),
        (message(b'G', b""), "unexpected message type"),
    ] {
        let mut connection = connected(move |stream| {
            take(stream);
            let _ = stream.write_all(&answer);
        });
        let error = connection.identify_system().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_history_file_is_a_name_and_bytes() {
    let history = |row: &'static [u8]| {
        let mut connection = connected(move |stream| {
            assert_eq!(take(stream), (b'Q', b"TIMELINE_HISTORY 3\0".to_vec()));
            let answer = [message(b'D', row), message(b'C', b"x\0"), message(b'Z', b"I")].concat();
            stream.write_all(&answer).unwrap();
        });
        connection.timeline_history(TimelineId(3)).map_err(|error| error.to_string())
    };
    // What they say is not the connection's business.
    let (name, contents) = history(b"\0\x02\0\0\0\x04../x\0\0\0\x02\xff\0").unwrap();
    assert_eq!((name.as_str(), contents.as_slice()), ("../x", &b"\xff\0"[..]));
    for row in [&b"\0\x01\0\0\0\x01x"[..], b"\0\x02\0\0\0\x01\xff\0\0\0\x01x", b"\0\x02\0\0\0\x01x\xff\xff\xff\xff"] {
        assert!(history(row).unwrap_err().contains("no timeline history file"));
    }
}

#[test]
fn a_stream_is_data_or_an_end_or_an_error() {
    let stream = |then: Vec<u8>| {
        let mut connection = connected(move |stream| {
            take(stream);
            let _ = stream.write_all(&[message(b'W', b"\0\0\0"), then.clone()].concat());
            let _ = stream.shutdown(std::net::Shutdown::Write);
        });
        connection.start_replication(None, Lsn(0), TimelineId(1)).unwrap();
        let mut seen = Vec::new();
        loop {
            match connection.next_message() {
                Ok(Some(CopyEvent::Data(payload))) => seen.push(format!("{} bytes", payload.len())),
                Ok(Some(CopyEvent::Done)) => {
                    seen.push("done".to_owned());
                    break;
                }
                Ok(None) => {
                    if connection.read_some().unwrap() == Read::Closed {
                        seen.push("closed".to_owned());
                        break;
                    }
                }
                Err(error) => {
                    seen.push(error.to_string());
                    break;
                }
            }
        }
        seen.join(", ")
    };
    assert_eq!(stream(message(b'd', b"x").repeat(2)), "1 bytes, 1 bytes, closed");
    assert_eq!(
        stream([message(b'N', b"\0"), message(b'd', &[0; 70_000]), message(b'c', b"")].concat()),
        "70000 bytes, done"
    );
    assert_eq!(stream(message(b'C', b"COPY 0\0")), "done");
    assert!(stream(message(b'E', b"SERROR\0C58P01\0Mgone\0\0")).contains("ERROR:  gone"));
    assert!(stream(message(b'T', b"\0\0")).contains("unexpected message type"));
    assert!(stream(b"d\x04\0\0\0".to_vec()).contains("where at most 67108864 are accepted"));
    assert_eq!(stream(b"d\x03\xff\xff\xff".to_vec()), "closed");
}

#[test]
fn what_a_server_does_not_read_is_bounded() {
    let (_end, ended) = channel::<()>();
    let mut connection = connected(move |stream| {
        take(stream);
        stream.write_all(&message(b'W', b"\0\0\0")).unwrap();
        let _ = ended.recv();
    });
    connection.start_replication(None, Lsn(0), TimelineId(1)).unwrap();
    let mut sent = 0;
    while connection.send_copy_data(&[0; 1000]) {
        sent += 1;
        assert!(sent < 100_000, "there is no end to it");
        connection.flush().unwrap();
    }
    assert!(connection.wants_write());
    assert!(matches!(connection.flush(), Ok(false)));
}

/// A server that takes rows, or statements, and says nothing before the end.
fn silent_until(last: u8, first_answer: Option<Vec<u8>>, answer: Vec<u8>) -> (u16, Receiver<Vec<u8>>) {
    serve(move |stream| {
        take_startup(stream);
        stream.write_all(&ready()).unwrap();
        if let Some(answer) = &first_answer {
            take(stream);
            stream.write_all(answer).unwrap();
        }
        while take(stream).0 != last {}
        stream.write_all(&answer).unwrap();
    })
}

/// More than fits into the sockets, in pieces of more than may wait. Once it was waited for an answer that was not due, after all
/// had been sent: a copy stood still now and then.
#[test]
fn nobody_waits_for_an_answer_that_is_not_due() {
    let piece = vec![b'x'; 300_000];
    let done = [message(b'C', b"COPY 100\0"), message(b'Z', b"I")].concat();
    let (port, _seen) = silent_until(b'c', Some(message(b'G', &[0; 3])), done);
    let mut connection = Connection::open(&options(port, "")).unwrap();
    connection.copy_in("COPY t FROM STDIN").unwrap();
    for _ in 0..100 {
        connection.write_copy(&piece).unwrap();
    }
    assert_eq!(connection.finish_copy().unwrap(), 100);
    drop(connection);

    let mut answers = Vec::new();
    for _ in 0..100 {
        answers.extend([message(b'2', b""), message(b'C', b"INSERT 0 1\0")].concat());
    }
    answers.extend(message(b'Z', b"I"));
    let (port, _seen) = silent_until(b'S', None, answers);
    let mut connection = Connection::open(&options(port, "")).unwrap();
    let mut pipeline = connection.pipeline().unwrap();
    for number in 0..100 {
        pipeline.execute(number, "s", [Some(piece.as_slice())], Some(1)).unwrap();
    }
    let outcome = pipeline.finish().unwrap();
    assert!(outcome.failure.is_none() && outcome.unexpected.is_empty());
}
