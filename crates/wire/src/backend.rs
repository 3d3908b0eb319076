//! Messages from a server ("Message Formats" in PostgreSQL's manual).

use std::fmt;

use crate::WireError;
use crate::reader::Reader;

/// Where a message ends, told by its first five bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The message's type.
    pub tag: u8,
    /// Its length in bytes, with type and length word; at least 5.
    pub total_len: usize,
}

impl Frame {
    /// Bytes of type and length word.
    pub const HEADER: usize = 5;

    /// Looks at the front of `bytes`; `None` if the header is not complete. A message of more than `limit` bytes in all
    /// is refused before anyone waits for it or makes room for it.
    pub fn peek(bytes: &[u8], limit: usize) -> Result<Option<Frame>, WireError> {
        let Some(&[tag, a, b, c, d]) = bytes.first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes([a, b, c, d]);
        if length < 4 {
            return Err(WireError::Length { tag, length });
        }
        let total = u64::from(length) + 1;
        match usize::try_from(total) {
            Ok(total_len) if total_len <= limit => Ok(Some(Frame { tag, total_len })),
            _ => Err(WireError::TooLong { tag, length: total, limit }),
        }
    }
}

/// An ErrorResponse or NoticeResponse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerMessage {
    /// `ERROR`, `FATAL`, `WARNING`, …, not translated.
    pub severity: String,
    /// The SQLSTATE, five characters.
    pub code: String,
    /// What happened.
    pub message: String,
    /// More about it, or empty.
    pub detail: String,
    /// What to do about it, or empty.
    pub hint: String,
}

impl ServerMessage {
    /// The longest text kept of a field, in bytes: messages go into logs.
    pub const MAX_FIELD: usize = 8192;

    /// Reads the fields. Text that is not UTF-8 is shown with replacement characters, control characters as spaces:
    /// it goes to logs and terminals.
    pub fn parse(body: &[u8]) -> Result<ServerMessage, WireError> {
        let mut reader = Reader::new(body, "ErrorResponse");
        let mut message = ServerMessage::default();
        loop {
            let field = reader.u8()?;
            if field == 0 {
                break;
            }
            let text = reader.cstr()?;
            let into = match field {
                // 'V' is 'S' untranslated, sent since 9.6; both are sent, 'V' second.
                b'S' | b'V' => &mut message.severity,
                b'C' => &mut message.code,
                b'M' => &mut message.message,
                b'D' => &mut message.detail,
                b'H' => &mut message.hint,
                _ => continue,
            };
            *into = printable(text);
        }
        reader.end()?;
        Ok(message)
    }

    /// Whether the SQLSTATE is this one.
    pub fn is(&self, sqlstate: &str) -> bool {
        self.code == sqlstate
    }
}

impl fmt::Display for ServerMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:  {}", self.severity, self.message)?;
        if !self.detail.is_empty() {
            write!(f, "; DETAIL:  {}", self.detail)?;
        }
        if !self.hint.is_empty() {
            write!(f, "; HINT:  {}", self.hint)?;
        }
        Ok(())
    }
}

fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(ServerMessage::MAX_FIELD)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What the server wants as proof of who we are (message `R`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authentication<'a> {
    /// Nothing more.
    Ok,
    /// The password as it is.
    CleartextPassword,
    /// The password, hashed with the user name and these bytes.
    Md5Password {
        /// Salt.
        salt: [u8; 4],
    },
    /// One of these SASL mechanisms.
    Sasl(Vec<&'a str>),
    /// Data of the SASL exchange.
    SaslContinue(&'a [u8]),
    /// Last data of the SASL exchange.
    SaslFinal(&'a [u8]),
    /// Another method, by number: Kerberos, GSSAPI, SSPI.
    Other(u32),
}

impl<'a> Authentication<'a> {
    /// Reads the body.
    pub fn parse(body: &'a [u8]) -> Result<Authentication<'a>, WireError> {
        let mut reader = Reader::new(body, "Authentication");
        let request = match reader.u32()? {
            0 => Authentication::Ok,
            3 => Authentication::CleartextPassword,
            5 => {
                let salt = reader.u32()?.to_be_bytes();
                Authentication::Md5Password { salt }
            }
            10 => {
                let mut mechanisms = Vec::new();
                loop {
                    let name = reader.cstr()?;
                    if name.is_empty() {
                        break;
                    }
                    mechanisms.push(std::str::from_utf8(name).map_err(|_| reader.malformed())?);
                }
                Authentication::Sasl(mechanisms)
            }
            11 => return Ok(Authentication::SaslContinue(reader.rest())),
            12 => return Ok(Authentication::SaslFinal(reader.rest())),
            other => return Ok(Authentication::Other(other)),
        };
        reader.end()?;
        Ok(request)
    }
}

/// Reads a ParameterStatus: name and value.
pub fn parameter_status(body: &[u8]) -> Result<(String, String), WireError> {
    let mut reader = Reader::new(body, "ParameterStatus");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let pair = (text(reader.cstr()?), text(reader.cstr()?));
    reader.end()?;
    Ok(pair)
}

/// Reads a NegotiateProtocolVersion: the newest protocol that the server speaks, and the options it does not know.
pub fn negotiate_protocol_version(body: &[u8]) -> Result<(u32, Vec<String>), WireError> {
    let mut reader = Reader::new(body, "NegotiateProtocolVersion");
    let version = reader.u32()?;
    let count = reader.u32()?;
    let mut options = Vec::new();
    for _ in 0..count {
        options.push(String::from_utf8_lossy(reader.cstr()?).into_owned());
    }
    reader.end()?;
    Ok((version, options))
}

/// Reads a RowDescription: the columns' names.
pub fn row_description(body: &[u8]) -> Result<Vec<String>, WireError> {
    let mut reader = Reader::new(body, "RowDescription");
    let count = reader.u16()?;
    let mut names = Vec::new();
    for _ in 0..count {
        names.push(String::from_utf8_lossy(reader.cstr()?).into_owned());
        // Table, column, type, its length, its modifier, format.
        reader.take(4 + 2 + 4 + 2 + 4 + 2)?;
    }
    reader.end()?;
    Ok(names)
}

/// Reads a DataRow: the values as text, `None` for null.
pub fn data_row(body: &[u8]) -> Result<Vec<Option<Vec<u8>>>, WireError> {
    let mut reader = Reader::new(body, "DataRow");
    let count = reader.u16()?;
    let mut values = Vec::new();
    for _ in 0..count {
        values.push(match reader.i32()? {
            -1 => None,
            len => Some(reader.take(usize::try_from(len).map_err(|_| reader.malformed())?)?.to_vec()),
        });
    }
    reader.end()?;
    Ok(values)
}

/// Reads a CommandComplete: its tag.
pub fn command_complete(body: &[u8]) -> Result<String, WireError> {
    let mut reader = Reader::new(body, "CommandComplete");
    let tag = String::from_utf8_lossy(reader.cstr()?).into_owned();
    reader.end()?;
    Ok(tag)
}

/// Rows that a command affected, as its tag says; zero if it tells of none.
pub fn affected_rows(tag: &str) -> u64 {
    tag.rsplit(' ').next().and_then(|last| last.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_refused_before_it_is_waited_for() {
        assert_eq!(Frame::peek(b"d\0\0\0", 100), Ok(None));
        assert_eq!(Frame::peek(b"d\0\0\0\x04rest", 100), Ok(Some(Frame { tag: b'd', total_len: 5 })));
        assert_eq!(Frame::peek(b"d\0\0\0\x03", 100), Err(WireError::Length { tag: b'd', length: 3 }));
        assert_eq!(
            Frame::peek(b"HTTP/1.1 400", 100),
            Err(WireError::TooLong { tag: b'H', length: 0x5454502f + 1, limit: 100 })
        );
        assert!(Frame::peek(b"d\0\0\0\x63", 100).is_ok());
        assert!(Frame::peek(b"d\0\0\0\x64", 100).is_err());
    }

    #[test]
    fn an_error_is_read_and_shown_on_one_line() {
        let body = b"SFEHLER\0VERROR\0C58P01\0Mrequested WAL\nsegment\0Dd\0Hh\0Fx.c\0L12\0\0";
        let message = ServerMessage::parse(body).unwrap();
        assert!(message.is("58P01") && message.severity == "ERROR");
        assert_eq!(message.to_string(), "ERROR:  requested WAL segment; DETAIL:  d; HINT:  h");
        assert!(ServerMessage::parse(b"SERROR\0").is_err());
        assert!(ServerMessage::parse(b"SERROR").is_err());
        let long = [b"M".as_slice(), &[b'x'; 100_000], b"\0\0"].concat();
        assert_eq!(ServerMessage::parse(&long).unwrap().message.len(), ServerMessage::MAX_FIELD);
    }

    #[test]
    fn rows_are_bounded_by_their_bytes() {
        assert_eq!(data_row(b"\0\x02\0\0\0\x01a\xff\xff\xff\xff"), Ok(vec![Some(b"a".to_vec()), None]));
        assert!(data_row(b"\xff\xff").is_err());
        assert!(data_row(b"\0\x01\xff\xff\xff\xfe").is_err());
        assert!(data_row(b"\0\x01\x7f\xff\xff\xffx").is_err());
        assert_eq!(row_description(&[b"\0\x01name\0".as_slice(), &[0; 18]].concat()), Ok(vec!["name".to_owned()]));
        assert!(row_description(b"\0\x01name\0").is_err());
        assert!(negotiate_protocol_version(b"\0\x03\0\0\xff\xff\xff\xff").is_err());
        assert_eq!(command_complete(b"SELECT 1\0"), Ok("SELECT 1".to_owned()));
        assert_eq!(["INSERT 0 12", "UPDATE 3", "TRUNCATE TABLE"].map(affected_rows), [12, 3, 0]);
    }

    #[test]
    fn authentication_requests_are_told_apart() {
        assert_eq!(Authentication::parse(&[0; 4]), Ok(Authentication::Ok));
        assert_eq!(Authentication::parse(b"\0\0\0\x05abcd"), Ok(Authentication::Md5Password { salt: *b"abcd" }));
        assert_eq!(
            Authentication::parse(b"\0\0\0\x0aSCRAM-SHA-256\0\0"),
            Ok(Authentication::Sasl(vec!["SCRAM-SHA-256"]))
        );
        assert!(Authentication::parse(b"\0\0\0\x0aSCRAM-SHA-256\0").is_err());
        assert_eq!(Authentication::parse(b"\0\0\0\x07"), Ok(Authentication::Other(7)));
        assert!(Authentication::parse(b"\0\0").is_err());
    }
}
