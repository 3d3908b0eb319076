//! Network byte order from front to back; every read is checked.

use crate::WireError;

/// What is left of a message named `what`.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Reader<'a> {
        Reader { bytes, what }
    }

    pub(crate) fn malformed(&self) -> WireError {
        WireError::Malformed(self.what)
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (front, rest) = self.bytes.split_at_checked(len).ok_or(self.malformed())?;
        self.bytes = rest;
        Ok(front)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (front, rest) = self.bytes.split_first_chunk().ok_or(self.malformed())?;
        self.bytes = rest;
        Ok(*front)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn i32(&mut self) -> Result<i32, WireError> {
        self.array().map(i32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn i64(&mut self) -> Result<i64, WireError> {
        self.array().map(i64::from_be_bytes)
    }

    /// Bytes up to a zero, which is consumed.
    pub(crate) fn cstr(&mut self) -> Result<&'a [u8], WireError> {
        let end = self.bytes.iter().position(|&byte| byte == 0).ok_or(self.malformed())?;
        let text = &self.bytes[..end];
        self.bytes = &self.bytes[end + 1..];
        Ok(text)
    }

    pub(crate) fn end(&self) -> Result<(), WireError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.malformed()) }
    }
}
