use std::num::NonZeroU32;

use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};
use ring::pbkdf2;
use walrider_seed::Random;

use super::*;

const HASH: &[u8] = &[7; 32];
const NONCE: &[u8; NONCE_LENGTH] = b"eighteen bytes....";

fn mock() -> Mock {
    Mock::new(&[1; 32], [])
}

/// Makes a secret as PostgreSQL does.
fn secret(password: &str, salt: &[u8], iterations: u32) -> String {
    let mut salted = [0; KEY_LENGTH];
    let count = NonZeroU32::new(iterations).unwrap();
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, count, salt, password.as_bytes(), &mut salted);
    let client_key = signature(&salted, &[b"Client Key"]);
    let stored_key = digest::digest(&digest::SHA256, client_key.as_ref());
    let server_key = signature(&salted, &[b"Server Key"]);
    let [salt, stored_key, server_key] = [salt, stored_key.as_ref(), server_key.as_ref()].map(|b| BASE64.encode(b));
    format!("SCRAM-SHA-256${iterations}:{salt}${stored_key}:{server_key}")
}

fn parsed(password: &str) -> Secret {
    Secret::parse(&secret(password, b"salt of a secret", 2)).unwrap()
}

/// A whole exchange with the client of `postgres_protocol`; `change` may change each of the client's messages. Fails with
/// what the server says, if it fails there, and does not succeed unless the client is content with the server's proof.
fn exchange(
    exchange: &mut Exchange,
    password: &str,
    binding: ChannelBinding,
    mechanism: &str,
    mut change: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), Option<ScramError>> {
    let mut client = ScramSha256::new(password.as_bytes(), binding);
    let mut message = client.message().to_vec();
    change(0, &mut message);
    let challenge = exchange.begin(mechanism, &message, NONCE)?;
    client.update(&challenge).map_err(|_| None)?;
    let mut message = client.message().to_vec();
    change(1, &mut message);
    let proof = exchange.finish(&message)?;
    client.finish(&proof).map_err(|_| None)
}

fn bound() -> ChannelBinding {
    ChannelBinding::tls_server_end_point(HASH.to_vec())
}

#[test]
fn a_client_is_let_in_by_its_password_alone() {
    let secret = parsed("pencil");
    let (plus, plain) = (SCRAM_SHA_256_PLUS, SCRAM_SHA_256);
    let cases = [
        (plain, None, ChannelBinding::unsupported(), Ok(())),
        (plain, None, ChannelBinding::unrequested(), Ok(())),
        (plus, Some(HASH), bound(), Ok(())),
        (plain, Some(HASH), ChannelBinding::unsupported(), Ok(())),
        (plain, Some(HASH), ChannelBinding::unrequested(), Err(ScramError::Downgrade)),
        (plus, None, bound(), Err(ScramError::Mechanism)),
        ("SCRAM-SHA-512", None, bound(), Err(ScramError::Mechanism)),
        (plus, Some(&[8; 32][..]), bound(), Err(ScramError::Binding)),
    ];
    for (mechanism, hash, binding, expected) in cases {
        let mut server = Exchange::new(Some(&secret), "u", &mock(), hash);
        assert_eq!(server.mechanisms().contains(&plus), hash.is_some());
        let result = exchange(&mut server, "pencil", binding, mechanism, |_, _| ());
        assert_eq!(result, expected.map_err(Some), "{mechanism} {hash:?}");
    }
    for hash in [None, Some(HASH)] {
        let (binding, mechanism) = match hash {
            Some(_) => (bound(), plus),
            None => (ChannelBinding::unsupported(), plain),
        };
        let mut server = Exchange::new(Some(&secret), "u", &mock(), hash);
        let result = exchange(&mut server, "pen", binding, mechanism, |_, _| ());
        assert_eq!(result, Err(Some(ScramError::Refused)));
    }
}

#[test]
fn a_secret_that_postgresql_would_make_is_verified() {
    let text = postgres_protocol::password::scram_sha_256(b"pencil");
    let secret = Secret::parse(&text).unwrap();
    assert_eq!(secret.shape(), DEFAULT_SHAPE);
    let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
    let binding = ChannelBinding::unsupported();
    assert_eq!(exchange(&mut server, "pencil", binding, SCRAM_SHA_256, |_, _| ()), Ok(()));
}

#[test]
fn the_mechanism_fits_the_first_message() {
    let secret = parsed("pencil");
    let malformed = |text| Err(ScramError::Malformed(text));
    let with = malformed("SCRAM-SHA-256 was selected, with channel binding");
    let without = malformed("SCRAM-SHA-256-PLUS was selected, without channel binding");
    let unknown = malformed("the channel binding flag is unknown");
    let cases: [(&str, &str, Result<(), ScramError>); 17] = [
        (SCRAM_SHA_256, "n,,n=,r=abc", Ok(())),
        (SCRAM_SHA_256, "n,,n=ignored,r=abc,x=1,Y=", Ok(())),
        (SCRAM_SHA_256, "p=tls-server-end-point,,n=,r=abc", with),
        (SCRAM_SHA_256_PLUS, "n,,n=,r=abc", without),
        (SCRAM_SHA_256_PLUS, "y,,n=,r=abc", without),
        (
            SCRAM_SHA_256_PLUS,
            "p=tls-unique,,n=,r=abc",
            malformed("the channel binding type is not tls-server-end-point"),
        ),
        (SCRAM_SHA_256_PLUS, "p=tls-server-end-point,,n=,r=abc", Ok(())),
        (SCRAM_SHA_256, "x,,n=,r=abc", unknown),
        (SCRAM_SHA_256, ",,n=,r=abc", unknown),
        (SCRAM_SHA_256, "n,a=other,n=,r=abc", Err(ScramError::Unsupported("an authorization identity"))),
        (SCRAM_SHA_256, "n,,m=1,n=,r=abc", Err(ScramError::Unsupported("a SCRAM extension"))),
        (SCRAM_SHA_256, "n,,r=abc", malformed("an expected attribute is missing")),
        (SCRAM_SHA_256, "n,,n=,r=", malformed("the nonce is empty or not printable")),
        (SCRAM_SHA_256, "n,,n=,r=a b", malformed("the nonce is empty or not printable")),
        (SCRAM_SHA_256, "n,,n=,r=abc,1=2", malformed("an attribute is not one")),
        (SCRAM_SHA_256, "n,", malformed("it is too short")),
        (SCRAM_SHA_256, "", malformed("it is empty")),
    ];
    for (mechanism, message, expected) in cases {
        let mut server = Exchange::new(Some(&secret), "u", &mock(), Some(HASH));
        assert_eq!(server.begin(mechanism, message.as_bytes(), NONCE).map(|_| ()), expected, "{message}");
    }
    let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
    let long = format!("n,,n=,r={}", "a".repeat(MAX_MESSAGE_LENGTH));
    let result = server.begin(SCRAM_SHA_256, long.as_bytes(), NONCE);
    assert_eq!(result, Err(ScramError::Malformed("it is too long")));
}

#[test]
fn no_step_is_taken_twice_or_too_early() {
    let secret = parsed("pencil");
    let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
    assert_eq!(server.finish(b"c=biws,r=,p="), Err(ScramError::OutOfOrder));
    assert_eq!(server.begin(SCRAM_SHA_256, b"n,,n=,r=abc", NONCE), Err(ScramError::OutOfOrder));
    let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
    assert!(server.begin(SCRAM_SHA_256, b"n,,n=,r=abc", NONCE).is_ok());
    assert_eq!(server.begin(SCRAM_SHA_256, b"n,,n=,r=abc", NONCE), Err(ScramError::OutOfOrder));
    let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
    let mut last = Vec::new();
    let keep = |step, message: &mut Vec<u8>| last = if step == 1 { message.clone() } else { Vec::new() };
    assert_eq!(exchange(&mut server, "pencil", ChannelBinding::unsupported(), SCRAM_SHA_256, keep), Ok(()));
    assert_eq!(server.finish(&last), Err(ScramError::OutOfOrder));
}

#[test]
fn any_changed_byte_is_noticed() {
    let secret = parsed("pencil");
    for hash in [None, Some(HASH)] {
        for step in [0, 1] {
            let mut length = 1;
            let mut at = 0;
            while at < length {
                for flip in [1, 2, 0x20, 0x80, 0xff] {
                    let (binding, mechanism) = match hash {
                        Some(_) => (bound(), SCRAM_SHA_256_PLUS),
                        None => (ChannelBinding::unsupported(), SCRAM_SHA_256),
                    };
                    let mut server = Exchange::new(Some(&secret), "u", &mock(), hash);
                    let result = exchange(&mut server, "pencil", binding, mechanism, |now, message| {
                        if now == step {
                            length = message.len();
                            message[at] ^= flip;
                        }
                    });
                    assert!(result.is_err(), "{hash:?}, message {step}, byte {at} ^ {flip}");
                }
                at += 1;
            }
            assert!(length > 30);
        }
    }
}

#[test]
fn the_last_message_is_checked_as_a_whole() {
    let secret = parsed("pencil");
    type Change = fn(&str) -> String;
    let changes: [(Change, Result<(), ScramError>); 9] = [
        (|last| last.to_owned(), Ok(())),
        (
            |last| last.replace("c=biws", "c=eSws"),
            Err(ScramError::Malformed("the last message does not repeat the channel binding flag")),
        ),
        (|last| last.replace("r=", "r=x"), Err(ScramError::Nonce)),
        (|last| last.split(",p=").next().unwrap().to_owned(), Err(ScramError::Malformed("there is no proof"))),
        (|last| format!("{last},x=1"), Err(ScramError::Malformed("something follows the proof"))),
        (|last| format!("{last}A"), Err(ScramError::Malformed("the proof is not one"))),
        (|last| last.replace(",p=", ",x=1,p="), Err(ScramError::Refused)),
        (|last| last.replace(",p=", ",,p="), Err(ScramError::Malformed("an attribute is not one"))),
        (|last| format!("{last}\0"), Err(ScramError::Malformed("it contains a zero byte"))),
    ];
    for (change, expected) in changes {
        let mut server = Exchange::new(Some(&secret), "u", &mock(), None);
        let binding = ChannelBinding::unsupported();
        let result = exchange(&mut server, "pencil", binding, SCRAM_SHA_256, |step, message| {
            if step == 1 {
                *message = change(std::str::from_utf8(message).unwrap()).into_bytes();
            }
        });
        assert_eq!(result, expected.map_err(Some));
    }
}

/// RFC 7677, section 3.
#[test]
fn the_example_of_the_rfc() {
    let salt = BASE64.decode("W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
    let secret = Secret::parse(&secret("pencil", &salt, 4096)).unwrap();
    let mut server = Exchange::new(Some(&secret), "user", &mock(), None);
    let first = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO";
    let challenge = server.begin_with(SCRAM_SHA_256, first, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0").unwrap();
    let expected = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
    assert_eq!(String::from_utf8(challenge).unwrap(), expected);
    let last = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                 p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
    let proof = server.finish(last).unwrap();
    assert_eq!(String::from_utf8(proof).unwrap(), "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
}

#[test]
fn a_made_up_user_answers_like_a_true_one_and_never_succeeds() {
    let challenge = |secret: Option<&Secret>, user: &str, mock: &Mock| {
        let mut server = Exchange::new(secret, user, mock, None);
        String::from_utf8(server.begin(SCRAM_SHA_256, b"n,,n=,r=abc", NONCE).unwrap()).unwrap()
    };
    let form = |challenge: &str| {
        let (nonce, rest) = challenge.split_once(",s=").unwrap();
        let (salt, iterations) = rest.split_once(",i=").unwrap();
        (nonce.to_owned(), BASE64.decode(salt).unwrap().len(), iterations.to_owned())
    };
    let secrets: Vec<_> =
        [(16, 4096), (40, 3)].map(|(salt, count)| Secret::parse(&secret("p", &vec![9; salt], count)).unwrap()).into();
    let forms: Vec<_> = secrets.iter().map(|secret| form(&challenge(Some(secret), "u", &mock()))).collect();
    assert_eq!(form(&challenge(None, "u", &mock())), forms[0]);
    for one in 0..2 {
        let mock = Mock::new(&[1; 32], [&secrets[one]]);
        assert_eq!(form(&challenge(None, "u", &mock)), forms[one]);
    }
    let mock = Mock::new(&[1; 32], &secrets);
    let other_key = Mock::new(&[2; 32], &secrets);
    let other_order = Mock::new(&[1; 32], secrets.iter().rev());
    let mut seen = [0, 0];
    for number in 0..100 {
        let user = format!("u{number}");
        let answer = challenge(None, &user, &mock);
        assert_eq!(challenge(None, &user, &mock), answer);
        assert_ne!(challenge(None, &user, &other_key), answer);
        assert_eq!(challenge(None, &user, &other_order), answer);
        seen[forms.iter().position(|one| *one == form(&answer)).unwrap()] += 1;
    }
    assert!(seen[0] > 20 && seen[1] > 20, "{seen:?}");
    assert_ne!(challenge(None, "a", &self::mock()), challenge(None, "b", &self::mock()));

    // Not even a client that knows the made up keys gets in.
    let mut server = Exchange::new(None, "u", &self::mock(), None);
    server.secret = parsed("pencil");
    let binding = ChannelBinding::unsupported();
    assert_eq!(exchange(&mut server, "pencil", binding, SCRAM_SHA_256, |_, _| ()), Err(Some(ScramError::Refused)));
}

#[test]
fn secrets_are_read_as_postgresql_writes_them() {
    let good = secret("pencil", b"salt of a secret", 4096);
    let secret = Secret::parse(&good).unwrap();
    let shown = format!("{secret:?}");
    assert_eq!(shown, "Secret { iterations: 4096, .. }");
    let exchange = Exchange::new(Some(&secret), "u", &mock(), None);
    assert_eq!(format!("{exchange:?} {:?}", mock()), "Exchange { .. } Mock { .. }");

    let bad = [
        ("pencil", SecretError::Plain),
        ("", SecretError::Plain),
        ("SCRAM-SHA-256", SecretError::Plain),
        ("md5d41d8cd98f00b204e9800998ecf8427e", SecretError::Md5),
        ("md5", SecretError::Plain),
        ("SCRAM-SHA-256$", SecretError::Malformed),
        (&good.replace("4096", "0"), SecretError::Malformed),
        (&good.replace("4096", "-1"), SecretError::Malformed),
        (&good.replace("4096", "+1"), SecretError::Malformed),
        (&good.replace("4096", ""), SecretError::Malformed),
        (&good.replace("4096", "2147483648"), SecretError::Malformed),
        (&good.replace("=$", "$"), SecretError::Malformed),
        (&format!("{good}A"), SecretError::Malformed),
        (&format!("{good} "), SecretError::Malformed),
        (&format!("SCRAM-SHA-256$4096:${}", good.rsplit('$').next().unwrap()), SecretError::Malformed),
        (&good.replace("4096", &"0".repeat(600)), SecretError::Malformed),
    ];
    for (text, expected) in bad {
        assert_eq!(Secret::parse(text).unwrap_err(), expected, "{text}");
    }
    for end in 0..good.len() {
        assert!(Secret::parse(&good[..end]).is_err());
    }
    assert_eq!(Secret::parse(&good.replace("4096", "2147483647")).unwrap().iterations, 2147483647);
}

#[test]
fn any_bytes_are_refused_without_panic() {
    let good = secret("pencil", b"salt of a secret", 2);
    let secret = Secret::parse(&good).unwrap();
    let firsts = ["n,,n=,r=abc", "y,,n=,r=abc", "p=tls-server-end-point,,n=u,r=abc,x=1"].map(|m| m.as_bytes().to_vec());
    let nonce = BASE64.encode(NONCE);
    let proof = BASE64.encode([0; KEY_LENGTH]);
    let lasts = ["n,,", "y,,", "p=tls-server-end-point,,"].map(|header| {
        let binding = if header.starts_with('p') { [header.as_bytes(), HASH].concat() } else { header.into() };
        format!("c={},r=abc{nonce},p={proof}", BASE64.encode(binding)).into_bytes()
    });
    let telling = b",=npyarscvm\0/+A";
    let (mut begun, mut refused) = (0, 0);
    walrider_seed::rounds(20_000, |seed| {
        let mut random = Random(seed);
        let secret = (!random.one_in(4)).then_some(&secret);
        let binding = (!random.one_in(2)).then_some(HASH);
        let mut server = Exchange::new(secret, "u", &mock(), binding);
        let mechanism = [SCRAM_SHA_256, SCRAM_SHA_256_PLUS][random.index(2)];
        let first = match random.below(4) {
            0 => (0..random.below(60)).map(|_| random.number() as u8).collect(),
            1 => random.spoiled(&firsts, telling),
            _ => firsts[random.index(3)].clone(),
        };
        if server.begin(mechanism, &first, NONCE).is_ok() {
            begun += 1;
            let last = match random.below(4) {
                0 => (0..random.below(60)).map(|_| random.number() as u8).collect(),
                1 => random.spoiled(&lasts, telling),
                _ => lasts[random.index(3)].clone(),
            };
            match server.finish(&last) {
                Ok(_) => panic!("let in by {first:?} {last:?}"),
                Err(ScramError::Refused) => refused += 1,
                Err(_) => (),
            }
        }
        let text = random.spoiled(&[good.as_bytes().to_vec()], b"$:=+/A0");
        let _ = Secret::parse(&String::from_utf8_lossy(&text));
    });
    assert!(begun > 0 && refused > 0, "{begun} {refused}");
}
