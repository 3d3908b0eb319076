//! Network byte order from front to back; every read is checked.

use crate::WireError;

/// What is left of a message, for errors with the message's name. Every read fails with [`WireError::Malformed`] where too
/// little is left, and then has taken nothing.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// Begins at the front of `bytes`, which are a message called `what`.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Reader<'a> {
        Reader { bytes, what }
    }

    /// The error of this message.
    pub fn malformed(&self) -> WireError {
        WireError::Malformed(self.what)
    }

    /// What was not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    /// So many bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (front, rest) = self.bytes.split_at_checked(len).ok_or(self.malformed())?;
        self.bytes = rest;
        Ok(front)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (front, rest) = self.bytes.split_first_chunk().ok_or(self.malformed())?;
        self.bytes = rest;
        Ok(*front)
    }

    /// A byte.
    pub fn u8(&mut self) -> Result<u8, WireError> {
        self.array().map(|[byte]| byte)
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_be_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_be_bytes)
    }

    /// Four bytes, signed.
    pub fn i32(&mut self) -> Result<i32, WireError> {
        self.array().map(i32::from_be_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_be_bytes)
    }

    /// Eight bytes, signed.
    pub fn i64(&mut self) -> Result<i64, WireError> {
        self.array().map(i64::from_be_bytes)
    }

    /// Bytes up to a zero, which is consumed.
    pub fn cstr(&mut self) -> Result<&'a [u8], WireError> {
        let end = self.bytes.iter().position(|&byte| byte == 0).ok_or(self.malformed())?;
        let text = &self.bytes[..end];
        self.bytes = &self.bytes[end + 1..];
        Ok(text)
    }

    /// [`Reader::cstr`] in UTF-8.
    pub fn text(&mut self) -> Result<&'a str, WireError> {
        let mut ahead = *self;
        let text = std::str::from_utf8(ahead.cstr()?).map_err(|_| self.malformed())?;
        *self = ahead;
        Ok(text)
    }

    /// Nothing is left.
    pub fn end(&self) -> Result<(), WireError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.malformed()) }
    }
}
