//! Messages to a server ("Message Formats" in PostgreSQL's manual). Each function appends one whole message.
//!
//! Texts must not hold a zero byte: the callers' come from connection strings and commands, which refuse it.

use crate::framing::{self, cstr, framed};

/// Protocol 3.0.
pub const PROTOCOL_3_0: u32 = 3 << 16;
/// Protocol 3.2, of PostgreSQL 18: longer cancel keys, nothing else.
pub const PROTOCOL_3_2: u32 = 3 << 16 | 2;

/// Asks whether the server speaks TLS; it answers with one byte, `S` or `N`.
pub const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// The first message of a session: version and parameters.
pub fn startup(out: &mut Vec<u8>, protocol: u32, parameters: &[(&str, &str)]) {
    framed(out, None, |out| {
        out.extend(protocol.to_be_bytes());
        for (name, value) in parameters {
            cstr(out, name);
            cstr(out, value);
        }
        out.push(0);
    });
}

/// A simple query, or a replication command.
pub fn query(out: &mut Vec<u8>, text: &str) {
    framed(out, Some(b'Q'), |out| cstr(out, text));
}

/// A password, in clear text or as its MD5 answer.
pub fn password(out: &mut Vec<u8>, password: &[u8]) {
    framed(out, Some(b'p'), |out| {
        out.extend(password);
        out.push(0);
    });
}

/// The choice of a SASL mechanism, with its first data.
pub fn sasl_initial_response(out: &mut Vec<u8>, mechanism: &str, data: &[u8]) {
    framed(out, Some(b'p'), |out| {
        cstr(out, mechanism);
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
    });
}

/// Further data of a SASL exchange.
pub fn sasl_response(out: &mut Vec<u8>, data: &[u8]) {
    framed(out, Some(b'p'), |out| out.extend(data));
}

/// A message of the replication stream, as [`crate::stream`] encodes them.
pub fn copy_data(out: &mut Vec<u8>, payload: &[u8]) {
    framed(out, Some(b'd'), |out| out.extend(payload));
}

/// Prepares a statement; the server finds the types of its parameters out.
pub fn parse(out: &mut Vec<u8>, name: &str, text: &str) {
    framed(out, Some(b'P'), |out| {
        cstr(out, name);
        cstr(out, text);
        out.extend([0; 2]);
    });
}

/// Binds values, as text or null, to a prepared statement, in the portal without a name. At most 65,535.
pub fn bind<'a>(out: &mut Vec<u8>, statement: &str, values: impl IntoIterator<Item = Option<&'a [u8]>>) {
    framed(out, Some(b'B'), |out| {
        out.push(0);
        cstr(out, statement);
        // No format codes: all are text.
        out.extend([0; 2]);
        framing::values(out, values);
        // Nor for the result.
        out.extend([0; 2]);
    });
}

/// Executes the portal without a name, to its end.
pub fn execute(out: &mut Vec<u8>) {
    framed(out, Some(b'E'), |out| out.extend([0; 5]));
}

/// The end of a series of messages: an error skips to here, and the server says that it is ready.
pub fn sync(out: &mut Vec<u8>) {
    framed(out, Some(b'S'), |_| ());
}

/// The end of our side of the stream.
pub fn copy_done(out: &mut Vec<u8>) {
    framed(out, Some(b'c'), |_| ());
}

/// The end of the session.
pub fn terminate(out: &mut Vec<u8>) {
    framed(out, Some(b'X'), |_| ());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_count_themselves() {
        let mut out = Vec::new();
        startup(&mut out, PROTOCOL_3_0, &[("user", "u")]);
        assert_eq!(out, b"\0\0\0\x10\0\x03\0\0user\0u\0\0");
        out.clear();
        query(&mut out, "A");
        copy_done(&mut out);
        sasl_initial_response(&mut out, "M", b"xy");
        bind(&mut out, "s", [None, Some(b"v".as_slice())]);
        execute(&mut out);
        let bound = b"B\0\0\0\x16\0s\0\0\0\0\x02\xff\xff\xff\xff\0\0\0\x01v\0\0E\0\0\0\x09\0\0\0\0\0";
        assert_eq!(out.split_off(out.len() - bound.len()), bound);
        assert_eq!(out, b"Q\0\0\0\x06A\0c\0\0\0\x04p\0\0\0\x0cM\0\0\0\0\x02xy");
    }
}
