//! The socket, encrypted or not. Nothing here blocks.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use socket2::Socket;

use crate::tls::Tls;

/// How bytes travel.
pub(crate) enum Transport {
    /// As they are.
    Plain(Socket),
    /// Encrypted.
    Tls(Box<Tls>),
}

impl Transport {
    /// Receives some bytes; zero at the end.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Transport::Plain(socket) => socket.read(into),
            Transport::Tls(tls) => tls.read(into),
        }
    }

    /// Sends or keeps some bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Transport::Plain(socket) => socket.write(bytes),
            Transport::Tls(tls) => tls.write(bytes),
        }
    }

    /// Sends what was kept: whether nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Transport::Plain(_) => Ok(true),
            Transport::Tls(tls) => tls.flush(),
        }
    }

    /// Whether others on the way cannot read it.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self, Transport::Tls(_))
    }

    /// Whether something was kept.
    pub(crate) fn wants_write(&self) -> bool {
        match self {
            Transport::Plain(_) => false,
            Transport::Tls(tls) => tls.session.wants_write(),
        }
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Transport::Plain(socket) => socket.as_fd(),
            Transport::Tls(tls) => tls.socket.as_fd(),
        }
    }
}
