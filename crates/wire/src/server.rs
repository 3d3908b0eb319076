//! The other side of [`crate::backend`] and [`crate::frontend`]: what a server reads from clients, and what it answers
//! ("Message Formats" in PostgreSQL's manual; `backend_startup.c`, `auth.c`, `auth-sasl.c`, `walsender.c`, PostgreSQL 18).
//!
//! Each function that takes `out` appends one whole message. Texts must not hold a zero byte, except in errors and
//! notices, which are written without it.

pub use crate::frontend::{copy_data, copy_done};

use walrider_layout::Oid;

use crate::WireError;
use crate::backend::ServerMessage;
use crate::framing::{self, counted, cstr, framed};
use crate::frontend::PROTOCOL_3_2;
use crate::reader::Reader;

/// `CANCEL_REQUEST_CODE`: numbers that no version has, in the place of the version.
const CANCEL_REQUEST: u32 = 1234 << 16 | 5678;
/// `NEGOTIATE_SSL_CODE`.
const SSL_REQUEST: u32 = 1234 << 16 | 5679;
/// `NEGOTIATE_GSS_CODE`.
const GSS_REQUEST: u32 = 1234 << 16 | 5680;

/// The first packet of a connection, the only one without a type (`ProcessStartupPacket`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// The client wants TLS. The answer is one byte: `S`, and TLS follows, or `N`, and another packet like this one follows.
    Ssl,
    /// The client wants GSSAPI's encryption. The answer is one byte, as for [`Opening::Ssl`]: `G` or `N`.
    Gss,
    /// Another session is to interrupt its command. There is no answer.
    Cancel {
        /// The session, as [`backend_key_data`] named it.
        pid: u32,
        /// What proves the right to do so, 1 to 256 bytes. To be compared without telling by the time taken.
        key: Vec<u8>,
    },
    /// A session begins.
    Startup(Startup),
}

impl Opening {
    /// The longest packet, in bytes without the length word (`MAX_STARTUP_PACKET_LENGTH`).
    pub const MAX_LEN: usize = 10_000;

    /// Bytes of the length word.
    pub const HEADER: usize = 4;

    /// Looks at the front of `bytes`: the packet's length in bytes, with the length word, or `None` if that is not
    /// complete. A length that no packet has is refused ([`WireError::StartupLength`]) before anyone waits for it.
    pub fn peek(bytes: &[u8]) -> Result<Option<usize>, WireError> {
        let Some(&word) = bytes.first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes(word);
        match usize::try_from(length) {
            Ok(total) if (8..=Opening::HEADER + Opening::MAX_LEN).contains(&total) => Ok(Some(total)),
            _ => Err(WireError::StartupLength(length)),
        }
    }

    /// Reads a packet, without its length word. Major versions other than 3 are refused ([`WireError::Protocol`]);
    /// about minor ones see [`Startup::negotiation`]. Text that is not UTF-8 is refused as malformed.
    pub fn parse(packet: &[u8]) -> Result<Opening, WireError> {
        let mut reader = Reader::new(packet, "startup");
        let code = reader.u32()?;
        let opening = match code {
            SSL_REQUEST => Opening::Ssl,
            GSS_REQUEST => Opening::Gss,
            CANCEL_REQUEST => {
                let pid = reader.u32()?;
                let key = reader.rest();
                reader.take(key.len())?;
                if !(1..=256).contains(&key.len()) {
                    return Err(reader.malformed());
                }
                Opening::Cancel { pid, key: key.to_vec() }
            }
            protocol if protocol >> 16 == 3 => {
                let mut parameters = Vec::new();
                loop {
                    let name = reader.text()?;
                    if name.is_empty() {
                        break;
                    }
                    parameters.push((name.to_owned(), reader.text()?.to_owned()));
                }
                Opening::Startup(Startup { protocol, parameters })
            }
            other => return Err(WireError::Protocol(other)),
        };
        reader.end()?;
        Ok(opening)
    }
}

/// What a client says of the session that it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Startup {
    /// The version it would like: major in the upper, minor in the lower half. The major one is 3.
    pub protocol: u32,
    /// `user`, `database`, `replication`, `options`, and settings, as they came.
    pub parameters: Vec<(String, String)>,
}

impl Startup {
    /// A parameter's value; the last one, if it was given several times.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.parameters.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// What is spoken in this session: the client's version, or 3.2 if that is newer.
    pub fn spoken(&self) -> u32 {
        self.protocol.min(PROTOCOL_3_2)
    }

    /// What [`negotiate_protocol_version`] must tell the client, if anything: the version that is spoken, since the
    /// client's is newer, and the options of the protocol (`_pq_.…`), none of which is known.
    ///
    /// ```
    /// use walrider_wire::server::Startup;
    /// let startup = |protocol| Startup { protocol, parameters: vec![("user".into(), "u".into())] };
    /// assert_eq!(startup(0x3_0002).negotiation(), None);
    /// assert_eq!(startup(0x3_270f).negotiation(), Some((0x3_0002, vec![])));
    /// ```
    pub fn negotiation(&self) -> Option<(u32, Vec<&str>)> {
        let names = self.parameters.iter().map(|(name, _)| name.as_str());
        let options: Vec<&str> = names.filter(|name| name.starts_with("_pq_.")).collect();
        (self.protocol > PROTOCOL_3_2 || !options.is_empty()).then(|| (self.spoken(), options))
    }

    /// Which kind of session this is, as `replication` says; `None` where its value is none that PostgreSQL knows.
    pub fn replication(&self) -> Option<Replication> {
        let Some(value) = self.get("replication") else { return Some(Replication::Off) };
        if value == "database" {
            return Some(Replication::Database);
        }
        let on = boolean(value)?;
        Some(if on { Replication::Physical } else { Replication::Off })
    }
}

/// The kinds of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// An ordinary one.
    Off,
    /// With replication commands, and no database.
    Physical,
    /// With replication commands and SQL, in a database.
    Database,
}

/// What PostgreSQL takes for a boolean (`parse_bool`): a beginning of the words, as long as it is unambiguous.
pub fn boolean(value: &str) -> Option<bool> {
    let words = [("true", 1, true), ("false", 1, false), ("yes", 1, true), ("no", 1, false)];
    let words = words.into_iter().chain([("on", 2, true), ("off", 2, false), ("1", 1, true), ("0", 1, false)]);
    let begins = |word: &str| word.get(..value.len()).is_some_and(|front| front.eq_ignore_ascii_case(value));
    words.into_iter().find(|&(word, least, _)| value.len() >= least && begins(word)).map(|(_, _, on)| on)
}

/// A message of a client after the first packet. [`crate::backend::Frame`] tells where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromClient<'a> {
    /// A simple query: a replication command, or SQL.
    Query(&'a str),
    /// What the client proves itself with; [`password`] and [`sasl_initial_response`] read it, further data of a SASL
    /// exchange are these bytes.
    Password(&'a [u8]),
    /// A message of the replication stream, or a piece of a manifest.
    CopyData(&'a [u8]),
    /// The end of the client's side of the stream.
    CopyDone,
    /// The client cannot go on with its side, and says why.
    CopyFail(&'a str),
    /// The end of the session.
    Terminate,
    /// Another one, by its type: the extended protocol and function calls, which a walsender refuses.
    Other(u8),
}

impl<'a> FromClient<'a> {
    /// Reads the body of a message of this type. Text that is not UTF-8 is refused as malformed.
    pub fn parse(tag: u8, body: &'a [u8]) -> Result<FromClient<'a>, WireError> {
        let mut reader = Reader::new(body, message_name(tag));
        let message = match tag {
            b'Q' => FromClient::Query(reader.text()?),
            b'p' => return Ok(FromClient::Password(body)),
            b'd' => return Ok(FromClient::CopyData(body)),
            b'c' => FromClient::CopyDone,
            b'f' => FromClient::CopyFail(reader.text()?),
            b'X' => FromClient::Terminate,
            other => return Ok(FromClient::Other(other)),
        };
        reader.end()?;
        Ok(message)
    }
}

fn message_name(tag: u8) -> &'static str {
    match tag {
        b'Q' => "Query",
        b'c' => "CopyDone",
        b'f' => "CopyFail",
        b'X' => "Terminate",
        _ => "client",
    }
}

/// Reads a password, in clear text or as its MD5 answer, out of [`FromClient::Password`].
pub fn password(body: &[u8]) -> Result<&[u8], WireError> {
    let mut reader = Reader::new(body, "Password");
    let password = reader.cstr()?;
    reader.end()?;
    Ok(password)
}

/// Reads the choice of a SASL mechanism, with its first data if there are any, out of [`FromClient::Password`].
pub fn sasl_initial_response(body: &[u8]) -> Result<(&str, Option<&[u8]>), WireError> {
    let mut reader = Reader::new(body, "SASLInitialResponse");
    let mechanism = reader.text()?;
    let data = match reader.i32()? {
        -1 => None,
        len => Some(reader.take(usize::try_from(len).map_err(|_| reader.malformed())?)?),
    };
    reader.end()?;
    Ok((mechanism, data))
}

/// The client is who it says.
pub fn authentication_ok(out: &mut Vec<u8>) {
    authentication(out, 0, |_| ());
}

/// The client is to choose one of these SASL mechanisms.
pub fn authentication_sasl(out: &mut Vec<u8>, mechanisms: &[&str]) {
    authentication(out, 10, |out| {
        mechanisms.iter().for_each(|name| cstr(out, name));
        out.push(0);
    });
}

/// Data of the SASL exchange.
pub fn authentication_sasl_continue(out: &mut Vec<u8>, data: &[u8]) {
    authentication(out, 11, |out| out.extend(data));
}

/// Last data of the SASL exchange; [`authentication_ok`] follows.
pub fn authentication_sasl_final(out: &mut Vec<u8>, data: &[u8]) {
    authentication(out, 12, |out| out.extend(data));
}

fn authentication(out: &mut Vec<u8>, request: u32, body: impl FnOnce(&mut Vec<u8>)) {
    framed(out, Some(b'R'), |out| {
        out.extend(request.to_be_bytes());
        body(out);
    });
}

/// The version that is spoken, major in the upper half, and the options of the client that are not known.
pub fn negotiate_protocol_version(out: &mut Vec<u8>, protocol: u32, options: &[&str]) {
    framed(out, Some(b'v'), |out| {
        out.extend(protocol.to_be_bytes());
        out.extend((options.len() as u32).to_be_bytes());
        options.iter().for_each(|name| cstr(out, name));
    });
}

/// A setting that clients want to know.
pub fn parameter_status(out: &mut Vec<u8>, name: &str, value: &str) {
    framed(out, Some(b'S'), |out| {
        cstr(out, name);
        cstr(out, value);
    });
}

/// What a client needs to cancel this session's command. The key has 4 bytes in protocol 3.0, and at most 256 in 3.2.
pub fn backend_key_data(out: &mut Vec<u8>, pid: u32, key: &[u8]) {
    debug_assert!((4..=256).contains(&key.len()));
    framed(out, Some(b'K'), |out| {
        out.extend(pid.to_be_bytes());
        out.extend(key);
    });
}

/// The next command can come. `status`: `I` outside of a transaction, `T` in one, `E` in a failed one.
pub fn ready_for_query(out: &mut Vec<u8>, status: u8) {
    framed(out, Some(b'Z'), |out| out.push(status));
}

/// The types of the columns that walsenders send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// `text`.
    Text,
    /// `int8`.
    Int8,
    /// `int4`.
    Int4,
    /// `oid`.
    Oid,
}

impl Type {
    /// Its number in `pg_type`.
    pub fn oid(self) -> Oid {
        match self {
            Type::Text => 25,
            Type::Int8 => 20,
            Type::Int4 => 23,
            Type::Oid => 26,
        }
    }

    /// Its length in bytes (`typlen`), -1 if values differ in it.
    pub fn size(self) -> i16 {
        match self {
            Type::Text => -1,
            Type::Int8 => 8,
            Type::Int4 | Type::Oid => 4,
        }
    }
}

/// The columns of the rows that follow, all as text. At most 65,535.
pub fn row_description(out: &mut Vec<u8>, columns: &[(&str, Type)]) {
    framed(out, Some(b'T'), |out| {
        counted(out, |out| {
            for (name, kind) in columns {
                cstr(out, name);
                // Of no table: its number, and the column's.
                out.extend([0; 4 + 2]);
                out.extend(kind.oid().to_be_bytes());
                out.extend(kind.size().to_be_bytes());
                // No modifier of the type; the format is text.
                out.extend((-1_i32).to_be_bytes());
                out.extend([0; 2]);
            }
            columns.len()
        });
    });
}

/// A row, its values as text or null. At most 65,535.
pub fn data_row<'a>(out: &mut Vec<u8>, values: impl IntoIterator<Item = Option<&'a [u8]>>) {
    framed(out, Some(b'D'), |out| framing::values(out, values));
}

/// A command went through.
pub fn command_complete(out: &mut Vec<u8>, tag: &str) {
    framed(out, Some(b'C'), |out| cstr(out, tag));
}

/// The command failed, or with the severity `FATAL` the session.
pub fn error_response(out: &mut Vec<u8>, message: &ServerMessage) {
    framed(out, Some(b'E'), |out| fields(out, message));
}

/// Something to know, while the command goes on.
pub fn notice_response(out: &mut Vec<u8>, message: &ServerMessage) {
    framed(out, Some(b'N'), |out| fields(out, message));
}

fn fields(out: &mut Vec<u8>, message: &ServerMessage) {
    let ServerMessage { severity, code, message, detail, hint } = message;
    let always = [(b'S', severity), (b'V', severity), (b'C', code), (b'M', message)];
    let optional = [(b'D', detail), (b'H', hint)].into_iter().filter(|(_, text)| !text.is_empty());
    for (field, text) in always.into_iter().chain(optional) {
        out.push(field);
        // What a client sent may be quoted here.
        out.extend(text.bytes().filter(|&byte| byte != 0));
        out.push(0);
    }
    out.push(0);
}

/// From here on both sides send CopyData: START_REPLICATION.
pub fn copy_both_response(out: &mut Vec<u8>) {
    copy_response(out, b'W');
}

/// From here on the server sends CopyData: BASE_BACKUP.
pub fn copy_out_response(out: &mut Vec<u8>) {
    copy_response(out, b'H');
}

/// Of no columns, and not binary.
fn copy_response(out: &mut Vec<u8>, tag: u8) {
    framed(out, Some(tag), |out| out.extend([0; 1 + 2]));
}

/// What precedes a payload of so many bytes in a CopyData, for who sends the payload by itself: header and payload are
/// what [`copy_data`] writes.
///
/// # Panics
///
/// Where the length does not fit a message, which is 2 GB.
pub fn copy_data_header(len: usize) -> [u8; 5] {
    let length = i32::try_from(len).ok().and_then(|len| len.checked_add(4)).expect("a message of less than 2 GB");
    let [a, b, c, d] = length.to_be_bytes();
    [b'd', a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{self, Authentication, Frame};
    use crate::frontend::{self, PROTOCOL_3_0};

    /// The only message that is written, as its type and body.
    fn message(write: impl FnOnce(&mut Vec<u8>)) -> (u8, Vec<u8>) {
        let mut out = b"before".to_vec();
        write(&mut out);
        let bytes = out.split_off(6);
        assert_eq!(out, b"before");
        let frame = Frame::peek(&bytes, bytes.len()).unwrap().unwrap();
        assert_eq!(frame.total_len, bytes.len());
        (frame.tag, bytes[Frame::HEADER..].to_vec())
    }

    /// A first packet, without its length word.
    fn packet(code: u32, rest: &[u8]) -> Vec<u8> {
        [&code.to_be_bytes(), rest].concat()
    }

    fn startup(protocol: u32, parameters: &[(&str, &str)]) -> Startup {
        let mut out = Vec::new();
        frontend::startup(&mut out, protocol, parameters);
        assert_eq!(Opening::peek(&out), Ok(Some(out.len())));
        for len in 0..out.len() {
            assert_eq!(Opening::peek(&out[..len]), Ok((len >= 4).then_some(out.len())));
            assert!(Opening::parse(&out[Opening::HEADER..len.max(4)]).is_err(), "{len} bytes");
        }
        match Opening::parse(&out[Opening::HEADER..]) {
            Ok(Opening::Startup(startup)) => startup,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_packet_is_told_by_its_code() {
        assert_eq!(Opening::peek(&frontend::SSL_REQUEST), Ok(Some(8)));
        assert_eq!(Opening::parse(&frontend::SSL_REQUEST[4..]), Ok(Opening::Ssl));
        assert_eq!(Opening::parse(&packet(GSS_REQUEST, b"")), Ok(Opening::Gss));
        for code in [SSL_REQUEST, GSS_REQUEST] {
            assert_eq!(Opening::parse(&packet(code, b"\0")), Err(WireError::Malformed("startup")));
        }
        let cancel = |key: &[u8]| Opening::parse(&packet(CANCEL_REQUEST, &[b"\0\0\x01\x02", key].concat()));
        for key in [b"k".as_slice(), b"key!", &[0; 256]] {
            assert_eq!(cancel(key), Ok(Opening::Cancel { pid: 258, key: key.to_vec() }));
        }
        assert!(cancel(b"").is_err() && cancel(&[0; 257]).is_err());
        assert!(Opening::parse(&packet(CANCEL_REQUEST, b"\0\0\0")).is_err());
    }

    #[test]
    fn a_first_packet_of_no_possible_length_is_not_waited_for() {
        for (word, total) in [(8_u32, Some(8)), (10_004, Some(10_004)), (7, None), (0, None), (10_005, None)] {
            assert_eq!(Opening::peek(&word.to_be_bytes()), total.map(Some).ok_or(WireError::StartupLength(word)));
        }
        assert_eq!(Opening::peek(b"GET / HTTP/1.1"), Err(WireError::StartupLength(0x4745_5420)));
        assert_eq!(Opening::peek(b"\x16\x03\x01"), Ok(None));
    }

    #[test]
    fn a_session_begins_with_what_the_client_says() {
        let parameters = [("user", "ü"), ("replication", "true"), ("user", "v"), ("application_name", "")];
        let begun = startup(PROTOCOL_3_0, &parameters);
        assert_eq!((begun.protocol, begun.spoken(), begun.negotiation()), (PROTOCOL_3_0, PROTOCOL_3_0, None));
        assert_eq!(begun.parameters.len(), 4);
        assert_eq!((begun.get("user"), begun.get("application_name")), (Some("v"), Some("")));
        assert_eq!(begun.get("database"), None);
        assert_eq!(startup(PROTOCOL_3_0, &[]).parameters, []);

        let two = &PROTOCOL_3_0.to_be_bytes();
        for rest in [
            b"".as_slice(),
            b"user\0u\0",
            b"user\0u\0\0\0",
            b"user\0\0",
            b"user\0u\0\0database\0d\0\0",
            b"user\0\xff\0\0",
            b"\xff\0u\0\0",
        ] {
            let packet = [two, rest].concat();
            assert_eq!(Opening::parse(&packet), Err(WireError::Malformed("startup")), "{rest:?}");
        }
    }

    #[test]
    fn versions_are_negotiated_as_postgresql_does() {
        let parameters = [("_pq_.a", "1"), ("user", "u"), ("_pq_.b", "")];
        for (protocol, spoken) in [(0, 0), (1, 1), (2, 2), (3, 2), (9999, 2), (0xffff, 2)] {
            let [protocol, spoken] = [protocol, spoken].map(|minor| PROTOCOL_3_0 | minor);
            let begun = startup(protocol, &[("user", "u")]);
            assert_eq!(begun.spoken(), spoken);
            assert_eq!(begun.negotiation(), (protocol != spoken).then(|| (spoken, vec![])));
            let begun = startup(protocol, &parameters);
            assert_eq!(begun.negotiation(), Some((spoken, vec!["_pq_.a", "_pq_.b"])));
        }
        for code in [0, 2 << 16, 4 << 16, 1234 << 16 | 5677, u32::MAX] {
            assert_eq!(Opening::parse(&packet(code, b"user\0u\0\0")), Err(WireError::Protocol(code)));
        }
        let text = WireError::Protocol(2 << 16 | 1).to_string();
        assert_eq!(text, "unsupported frontend protocol 2.1: server supports 3.0 to 3.2");
    }

    #[test]
    fn replication_is_a_boolean_or_the_word_database() {
        let kind = |value| startup(PROTOCOL_3_0, &[("replication", value)]).replication();
        for value in ["t", "TRUE", "yE", "on", "1"] {
            assert_eq!(kind(value), Some(Replication::Physical), "{value}");
        }
        for value in ["f", "False", "n", "of", "OFF", "0"] {
            assert_eq!(kind(value), Some(Replication::Off), "{value}");
        }
        for value in ["", "o", "truee", "00", "2", "Database", "ä"] {
            assert_eq!(kind(value), None, "{value}");
        }
        assert_eq!(kind("database"), Some(Replication::Database));
        assert_eq!(startup(PROTOCOL_3_0, &[]).replication(), Some(Replication::Off));
    }

    #[test]
    fn what_clients_write_is_read() {
        let read = |write: &dyn Fn(&mut Vec<u8>), expected: FromClient<'_>| {
            let (tag, body) = message(write);
            assert_eq!(FromClient::parse(tag, &body), Ok(expected));
            let fixed = matches!(tag, b'Q' | b'f' | b'c' | b'X');
            for len in 0..body.len() {
                assert_eq!(FromClient::parse(tag, &body[..len]).is_err(), fixed, "{len} bytes of {expected:?}");
            }
            let longer = [body.as_slice(), b"x"].concat();
            assert_eq!(FromClient::parse(tag, &longer).is_err(), fixed, "{expected:?}");
        };
        read(&|out| frontend::query(out, "SHOW ä"), FromClient::Query("SHOW ä"));
        read(&|out| frontend::query(out, ""), FromClient::Query(""));
        read(&|out| frontend::password(out, b"pw"), FromClient::Password(b"pw\0"));
        read(&|out| frontend::sasl_response(out, b"data"), FromClient::Password(b"data"));
        read(&|out| copy_data(out, b"payload"), FromClient::CopyData(b"payload"));
        read(&|out| copy_data(out, b""), FromClient::CopyData(b""));
        read(&copy_done, FromClient::CopyDone);
        read(&frontend::terminate, FromClient::Terminate);
        read(&|out| framed(out, Some(b'f'), |out| cstr(out, "why")), FromClient::CopyFail("why"));
        read(&|out| frontend::parse(out, "", "SELECT 1"), FromClient::Other(b'P'));
        read(&frontend::sync, FromClient::Other(b'S'));
        assert_eq!(FromClient::parse(b'Q', b"\xff\0"), Err(WireError::Malformed("Query")));
        assert_eq!(FromClient::parse(b'f', b"\xff\0"), Err(WireError::Malformed("CopyFail")));
        assert_eq!(FromClient::parse(b'Q', b"a\0b\0"), Err(WireError::Malformed("Query")));
    }

    #[test]
    fn proofs_are_read() {
        assert_eq!(password(b"pw\0"), Ok(b"pw".as_slice()));
        for body in [b"".as_slice(), b"pw", b"p\0w\0"] {
            assert!(password(body).is_err(), "{body:?}");
        }
        let (_, body) = message(|out| frontend::sasl_initial_response(out, "SCRAM-SHA-256", b"n,,"));
        assert_eq!(sasl_initial_response(&body), Ok(("SCRAM-SHA-256", Some(b"n,,".as_slice()))));
        for len in 0..body.len() {
            assert!(sasl_initial_response(&body[..len]).is_err(), "{len} bytes");
        }
        assert_eq!(sasl_initial_response(b"M\0\xff\xff\xff\xff"), Ok(("M", None)));
        assert_eq!(sasl_initial_response(b"M\0\0\0\0\0"), Ok(("M", Some(b"".as_slice()))));
        for body in [b"M\0\xff\xff\xff\xffx".as_slice(), b"M\0\xff\xff\xff\xfe", b"M\0\x7f\xff\xff\xffx"] {
            assert!(sasl_initial_response(body).is_err(), "{body:?}");
        }
    }

    #[test]
    fn clients_read_what_a_server_writes() {
        let authentication = |write: &dyn Fn(&mut Vec<u8>), expected: Authentication<'_>| {
            let (tag, body) = message(write);
            assert_eq!((tag, Authentication::parse(&body)), (b'R', Ok(expected)));
        };
        authentication(&authentication_ok, Authentication::Ok);
        for names in [vec![], vec!["SCRAM-SHA-256"], vec!["SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"]] {
            authentication(&|out| authentication_sasl(out, &names), Authentication::Sasl(names.clone()));
        }
        authentication(&|out| authentication_sasl_continue(out, b"r="), Authentication::SaslContinue(b"r="));
        authentication(&|out| authentication_sasl_final(out, b"v="), Authentication::SaslFinal(b"v="));

        let (tag, body) = message(|out| negotiate_protocol_version(out, PROTOCOL_3_2, &["_pq_.a", "_pq_.b"]));
        let options = vec!["_pq_.a".to_owned(), "_pq_.b".to_owned()];
        assert_eq!((tag, backend::negotiate_protocol_version(&body)), (b'v', Ok((PROTOCOL_3_2, options))));
        let (tag, body) = message(|out| parameter_status(out, "server_version", "18.6"));
        let pair = ("server_version".to_owned(), "18.6".to_owned());
        assert_eq!((tag, backend::parameter_status(&body)), (b'S', Ok(pair)));
        assert_eq!(message(|out| backend_key_data(out, 258, b"key!")), (b'K', b"\0\0\x01\x02key!".to_vec()));
        assert_eq!(message(|out| ready_for_query(out, b'I')), (b'Z', b"I".to_vec()));
        assert_eq!(message(copy_both_response), (b'W', vec![0; 3]));
        assert_eq!(message(copy_out_response), (b'H', vec![0; 3]));
        assert_eq!(message(copy_done), (b'c', vec![]));
        let (tag, body) = message(|out| command_complete(out, "IDENTIFY_SYSTEM"));
        assert_eq!((tag, backend::command_complete(&body)), (b'C', Ok("IDENTIFY_SYSTEM".to_owned())));
    }

    #[test]
    fn clients_read_rows() {
        let columns = [("systemid", Type::Text), ("timeline", Type::Int8), ("n", Type::Int4)];
        let (tag, body) = message(|out| row_description(out, &columns));
        let names = columns.map(|(name, _)| name.to_owned()).to_vec();
        assert_eq!((tag, backend::row_description(&body)), (b'T', Ok(names)));
        let types = b"\0\x03systemid\0\0\0\0\0\0\0\0\0\0\x19\xff\xff\xff\xff\xff\xff\0\0\
                      timeline\0\0\0\0\0\0\0\0\0\0\x14\0\x08\xff\xff\xff\xff\0\0\
                      n\0\0\0\0\0\0\0\0\0\0\x17\0\x04\xff\xff\xff\xff\0\0";
        assert_eq!(body, types);
        let values = [Some(b"1".as_slice()), None, Some(b"")];
        let (tag, body) = message(|out| data_row(out, values));
        let read = values.map(|value| value.map(<[u8]>::to_vec)).to_vec();
        assert_eq!((tag, backend::data_row(&body)), (b'D', Ok(read)));
        assert_eq!(message(|out| data_row(out, [])), (b'D', vec![0; 2]));
        assert_eq!(message(|out| row_description(out, &[])), (b'T', vec![0; 2]));
        let many = vec![None; usize::from(u16::MAX)];
        let (_, body) = message(|out| data_row(out, many.clone()));
        assert_eq!(backend::data_row(&body).map(|row| row.len()), Ok(many.len()));
    }

    #[test]
    fn clients_read_errors_and_notices() {
        let text = |text: &str| text.to_owned();
        let mut sent = ServerMessage {
            severity: text("ERROR"),
            code: text("42601"),
            message: text("syntax error"),
            detail: text("There is more."),
            hint: text("Try again."),
        };
        let (tag, body) = message(|out| error_response(out, &sent));
        assert_eq!((tag, ServerMessage::parse(&body)), (b'E', Ok(sent.clone())));
        assert!(body.starts_with(b"SERROR\0VERROR\0C42601\0Msyntax error\0D"));
        (sent.severity, sent.detail, sent.hint) = (text("NOTICE"), String::new(), String::new());
        let (tag, body) = message(|out| notice_response(out, &sent));
        assert_eq!((tag, ServerMessage::parse(&body)), (b'N', Ok(sent.clone())));
        assert_eq!(body, b"SNOTICE\0VNOTICE\0C42601\0Msyntax error\0\0");
        sent.message = text("a\0Hb");
        let (_, body) = message(|out| error_response(out, &sent));
        let read = ServerMessage::parse(&body).unwrap();
        assert_eq!((read.message, read.hint), (text("aHb"), String::new()));
    }

    #[test]
    fn a_payload_may_be_sent_apart_from_its_header() {
        for len in [0, 1, 70_000] {
            let payload = vec![7; len];
            let mut whole = Vec::new();
            copy_data(&mut whole, &payload);
            assert_eq!(whole, [copy_data_header(len).as_slice(), &payload].concat());
        }
    }
}
