//! COPY of an ordinary session, out of one server and into another: a row at a time, with waiting.

use std::ops::Range;
use std::os::fd::AsFd;

use walrider_wire::backend::{self, ServerMessage};
use walrider_wire::{WireError, frontend};

use super::{Connection, Read, State};
use crate::{ConnectError, Result};

/// The longest row, in bytes: what a server keeps in one piece (`MaxAllocSize`, `memutils.h`).
pub(super) const MAX_ROW: usize = 0x3fff_ffff;
/// Bytes that are collected before they are sent.
const SEND_AT: usize = 64 * 1024;
/// Bytes that may wait to be sent; with more, [`Connection::write_copy`] waits for the server.
const MAX_WAITING: usize = 256 * 1024;

impl Connection {
    /// Starts `COPY … TO STDOUT`; [`Connection::read_copy`] has the rows. Waits as long as a command may take.
    pub fn copy_out(&mut self, command: &str) -> Result<()> {
        self.start_copy(command, b'H', State::CopyOut)
    }

    /// Waits for the next row, with its end of line in COPY's text format; `None`: that was all, and the session is ready for
    /// a command.
    pub fn read_copy(&mut self) -> Result<Option<&[u8]>> {
        if self.state != State::CopyOut {
            return Err(ConnectError::Protocol("the connection is not in a COPY TO".to_owned()));
        }
        let (tag, range) = self.receive(None)?;
        match tag {
            b'd' => Ok(Some(self.input.body(range))),
            b'c' => {
                self.state = State::Busy;
                let deadline = self.deadline();
                self.collect_answer(deadline)?;
                self.max_message = super::MAX_MESSAGE;
                Ok(None)
            }
            b'E' => Err(self.failed((tag, range))),
            other => Err(WireError::Unexpected(other).into()),
        }
    }

    /// Starts `COPY … FROM STDIN`.
    pub fn copy_in(&mut self, command: &str) -> Result<()> {
        self.start_copy(command, b'G', State::CopyIn)
    }

    /// Queues rows, sends what is worth a system call, and waits while the server does not take it.
    pub fn write_copy(&mut self, rows: &[u8]) -> Result<()> {
        if self.state != State::CopyIn {
            return Err(ConnectError::Protocol("the connection is not in a COPY FROM".to_owned()));
        }
        frontend::copy_data(&mut self.output.0, rows);
        let waiting = |connection: &Connection| connection.output.0.len() - connection.output.1;
        if waiting(self) < SEND_AT {
            return Ok(());
        }
        loop {
            let sent = self.flush();
            // Nothing to read is due: it is waited for only beside room to send.
            if sent.is_ok() && waiting(self) <= MAX_WAITING {
                return Ok(());
            }
            // What a server says in the middle is that it gave up.
            if let Some(message) = self.take()? {
                return Err(self.failed(message));
            }
            match self.read_some()? {
                Read::Bytes(_) => self.patience.check()?,
                Read::Closed => return Err(sent.err().unwrap_or(ConnectError::Closed)),
                Read::WouldBlock => self.patience.wait(self.transport.as_fd(), true, !sent?)?,
            }
        }
    }

    /// Ends the rows, and waits until the server has them all, without a timeout: indexes take time. Returns how many there were.
    pub fn finish_copy(&mut self) -> Result<u64> {
        if self.state != State::CopyIn {
            return Err(ConnectError::Protocol("the connection is not in a COPY FROM".to_owned()));
        }
        frontend::copy_done(&mut self.output.0);
        let (tag, range) = self.receive(None)?;
        if tag != b'C' {
            return Err(self.failed((tag, range)));
        }
        let rows = backend::affected_rows(&backend::command_complete(self.input.body(range))?);
        self.state = State::Busy;
        self.collect_answer(None)?;
        Ok(rows)
    }

    fn start_copy(&mut self, command: &str, wanted: u8, state: State) -> Result<()> {
        let deadline = self.begin(command)?;
        let message = self.receive(deadline)?;
        if message.0 != wanted {
            return match self.collect_answer_from(message, deadline) {
                Err(error) => Err(error),
                Ok(_) => Err(ConnectError::Protocol("the command is not a COPY of that direction".to_owned())),
            };
        }
        self.state = state;
        self.max_message = MAX_ROW;
        Ok(())
    }

    /// The error that came instead of rows; the connection is of no more use.
    fn failed(&mut self, (tag, range): (u8, Range<usize>)) -> ConnectError {
        self.state = State::Busy;
        match tag {
            b'E' => match ServerMessage::parse(self.input.body(range)) {
                Ok(message) => ConnectError::Server(message),
                Err(error) => error.into(),
            },
            other => WireError::Unexpected(other).into(),
        }
    }
}
