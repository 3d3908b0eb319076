//! Asking a running Walrider at its own `/status`.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::status::{SCHEMA_VERSION, StandbyStatus};

/// How long to wait for an answer, and for each piece of it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer.
const MAX_ANSWER: u64 = 1 << 20;

/// The status of what serves HTTP at `address`, a host and port: read, and as it is, with what a newer version may add.
///
/// # Errors
/// Nobody answers, or with something else.
pub fn get_status(address: &str) -> io::Result<(StandbyStatus, Value)> {
    let address = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut text)?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let json: Value = serde_json::from_str(body)?;
    let told = StandbyStatus::deserialize(&json)?;
    if told.schema_version != SCHEMA_VERSION {
        return Err(io::Error::other(format!("schema_version {} is of another Walrider", told.schema_version)));
    }
    Ok((told, json))
}
