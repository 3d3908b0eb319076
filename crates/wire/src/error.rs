//! Bytes that are no message of the protocol.

/// The other side sent something that PostgreSQL does not send. The connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The length word of a message is less than its own four bytes.
    #[error("message type 0x{tag:02x} claims a length of {length} bytes; the other side may not be PostgreSQL")]
    Length {
        /// The message's type.
        tag: u8,
        /// What the length word says.
        length: u32,
    },
    /// The message is longer than any that is expected here.
    #[error(
        "message type 0x{tag:02x} claims {length} bytes, where at most {limit} are accepted; the other side may not be PostgreSQL"
    )]
    TooLong {
        /// The message's type.
        tag: u8,
        /// Its length in bytes with type and length word.
        length: u64,
        /// The longest that is accepted, in bytes.
        limit: usize,
    },
    /// The message's contents do not fit its type.
    #[error("invalid {0} message")]
    Malformed(&'static str),
    /// The first packet of a session is shorter or longer than any that PostgreSQL takes.
    #[error("invalid length of startup packet: {0} bytes")]
    StartupLength(u32),
    /// The client wants a protocol with another major version than 3.
    #[error("unsupported frontend protocol {}.{}: server supports 3.0 to 3.2", .0 >> 16, .0 & 0xffff)]
    Protocol(u32),
    /// A type that has no place here.
    #[error("unexpected message type {}", shown(*.0))]
    Unexpected(u8),
}

/// The type as a number, and as a character if it is one.
fn shown(tag: u8) -> String {
    if tag.is_ascii_graphic() { format!("0x{tag:02x} (\"{}\")", tag as char) } else { format!("0x{tag:02x}") }
}
