//! A connection that is open: queries, and COPY both ways.

mod copy;
mod pipeline;
mod replication;

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use socket2::{SockAddr, SockRef};
use walrider_wire::backend::{self, ServerMessage};
use walrider_wire::frontend;

use crate::answer::{Row, version_number};
use crate::input::Input;
use crate::socket::Patience;
use crate::transport::Transport;
use crate::{ConnectError, Result, tls};

pub use pipeline::{Outcome, Pipeline, Transaction};
pub use replication::{NewSlot, SlotOfDatabase, Start, SystemIdentity};

/// The longest message of a server that is accepted, in bytes. A stock walsender sends at most 128 kB of WAL at a time.
pub const MAX_MESSAGE: usize = 64 << 20;
/// Rows of one answer that are kept, in bytes of their messages. The longest are timeline history files.
const MAX_ANSWER: usize = 64 << 20;
/// Bytes that [`Connection::send_copy_data`] keeps for a server that does not read: some thousand status updates.
const MAX_QUEUED: usize = 128 * 1024;
/// Notices kept for [`Connection::take_notices`].
const MAX_NOTICES: usize = 16;
/// Parameters of a server that are kept; PostgreSQL 18 has 15.
const MAX_PARAMETERS: usize = 64;

/// Messages that may come at any time: NoticeResponse, ParameterStatus, NotificationResponse.
const ANY_TIME: [u8; 3] = *b"NSA";

/// What came of [`Connection::read_some`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes, at least one. There may be more, which `poll` does not tell of when the connection is encrypted:
    /// read until [`Read::WouldBlock`] before waiting.
    Bytes(usize),
    /// Nothing now.
    WouldBlock,
    /// The server has closed the connection.
    Closed,
}

/// What a server sends while it streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEvent<'a> {
    /// The payload of a CopyData, for [`walrider_wire::stream::Streamed::parse`].
    Data(&'a [u8]),
    /// The server has ended the stream, at the end of the timeline or to shut down: [`Connection::end_copy`] is next.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for a command.
    Idle,
    /// In a command; stays so if it fails without an answer, and the connection is of no use any more.
    Busy,
    /// COPY both ways.
    Streaming,
    /// The server has ended the stream; what comes next is the result.
    Ended,
    /// COPY TO STDOUT.
    CopyOut,
    /// COPY FROM STDIN.
    CopyIn,
}

/// A session with a server. The socket never blocks: commands wait for it with a timeout, the methods for streaming
/// do not wait.
pub struct Connection {
    transport: Transport,
    input: Input,
    /// Sent up to `.1`.
    output: (Vec<u8>, usize),
    state: State,
    parameters: BTreeMap<String, String>,
    notices: VecDeque<ServerMessage>,
    peer: String,
    patience: Patience,
    response_timeout: Option<Duration>,
    /// The longest message that is accepted now, in bytes.
    max_message: usize,
}

/// A message, its body still in the input buffer.
pub(crate) type Message = (u8, Range<usize>);

impl Connection {
    /// Over a socket that is connected, before the startup message.
    pub(crate) fn new(transport: Transport, peer: String, patience: Patience) -> Connection {
        Connection {
            transport,
            input: Input::new(),
            output: (Vec::new(), 0),
            state: State::Busy,
            parameters: BTreeMap::new(),
            notices: VecDeque::new(),
            peer,
            patience,
            response_timeout: Some(Duration::from_secs(60)),
            max_message: MAX_MESSAGE,
        }
    }

    /// The server's version, 180006 for 18.6; zero if it did not say.
    pub fn server_version_num(&self) -> u32 {
        self.parameter("server_version").and_then(version_number).unwrap_or(0)
    }

    /// A parameter as the server reported it.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }

    /// Host and port, or the socket, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.transport.is_encrypted()
    }

    /// Has the server see a window of about `bytes` from now on, where it runs on this host; elsewhere nothing changes. A sender that
    /// meets a closed window adds small messages to one that waits, which costs it less than to send each.
    ///
    /// # Errors
    /// The system does not say who is at the other end, or does not take the size.
    pub fn narrow_window_on_same_host(&self, bytes: usize) -> std::io::Result<()> {
        let socket = SockRef::from(&self.transport);
        let address = |end: SockAddr| end.as_socket().map(|end| end.ip());
        match (address(socket.local_addr()?), address(socket.peer_addr()?)) {
            (Some(ours), Some(theirs)) if ours == theirs => socket.set_recv_buffer_size(bytes),
            _ => Ok(()),
        }
    }

    /// How long a command may take until its whole answer is there; 60 seconds if nothing else is said, `None` for ever.
    /// Has no meaning for the stream itself.
    pub fn set_response_timeout(&mut self, timeout: Option<Duration>) {
        self.response_timeout = timeout;
    }

    /// From now on, nothing of [`crate::ConnectOptions::interrupt_with`] ends waiting any more.
    pub fn ignore_interrupts(&mut self) {
        self.patience.interrupt = None;
    }

    /// Notices of the server since the last call; the newest 16.
    pub fn take_notices(&mut self) -> Vec<ServerMessage> {
        self.notices.drain(..).collect()
    }

    // Commands

    /// Runs a command and returns the rows of its answer.
    pub fn simple_query(&mut self, text: &str) -> Result<Vec<Vec<Option<Vec<u8>>>>> {
        let deadline = self.begin(text)?;
        self.collect_answer(deadline)
    }

    /// Runs a command whose answer is one row of `N` columns.
    ///
    /// # Errors
    /// Those of [`Connection::simple_query`]; [`ConnectError::Protocol`] if the answer is another.
    pub fn query_row<const N: usize>(&mut self, text: &str) -> Result<[Option<Vec<u8>>; N]> {
        let mut rows = self.simple_query(text)?;
        let row = rows.pop().filter(|_| rows.is_empty()).and_then(|row| row.try_into().ok());
        row.ok_or_else(|| ConnectError::Protocol(format!("the answer is not one row of {N} columns, to: {text}")))
    }

    /// Sends a command; returns until when its answer must be there.
    fn begin(&mut self, text: &str) -> Result<Option<Instant>> {
        if self.state != State::Idle {
            return Err(ConnectError::Protocol(
                "the connection is not ready for a command: it is streaming, or an earlier command got no answer"
                    .to_owned(),
            ));
        }
        if text.contains('\0') {
            return Err(ConnectError::Config("a command must not contain a zero byte".into()));
        }
        self.state = State::Busy;
        frontend::query(&mut self.output.0, text);
        Ok(self.deadline())
    }

    fn deadline(&self) -> Option<Instant> {
        self.response_timeout.map(|timeout| Instant::now() + timeout)
    }

    fn collect_answer(&mut self, deadline: Option<Instant>) -> Result<Vec<Row>> {
        let message = self.receive(deadline)?;
        self.collect_answer_from(message, deadline)
    }

    /// From the first message of an answer to ReadyForQuery.
    fn collect_answer_from(&mut self, first: Message, deadline: Option<Instant>) -> Result<Vec<Row>> {
        let (mut rows, mut len, mut failure) = (Vec::new(), 0, None);
        let mut message = first;
        loop {
            let (tag, range) = message;
            let body = self.input.body(range);
            match tag {
                b'T' => drop(backend::row_description(body)?),
                b'D' => {
                    // A value of one byte takes a vector: the bound counts that too.
                    len += body.len() * 8;
                    if len > MAX_ANSWER {
                        return Err(ConnectError::Protocol("the server's answer is too long".to_owned()));
                    }
                    rows.push(backend::data_row(body)?);
                }
                b'C' => drop(backend::command_complete(body)?),
                // The end of a stream: what was under way when we wanted it to end is not for us any more.
                b'd' | b'c' | b'I' => (),
                b'E' => {
                    let error = ServerMessage::parse(body)?;
                    if error.severity != "ERROR" {
                        // The session ends with it, and no ReadyForQuery comes.
                        return Err(ConnectError::Server(error));
                    }
                    failure.get_or_insert(error);
                }
                b'Z' => {
                    self.state = State::Idle;
                    return failure.map_or(Ok(rows), |error| Err(ConnectError::Server(error)));
                }
                other => return Err(walrider_wire::WireError::Unexpected(other).into()),
            }
            message = self.receive(deadline)?;
        }
    }

    // The stream

    /// Whether something waits to be sent: then wait for the socket to be writable too, and call
    /// [`Connection::flush`].
    pub fn wants_write(&self) -> bool {
        self.output.1 < self.output.0.len() || self.transport.wants_write()
    }

    /// Receives what is there, in one system call where the connection is not encrypted. Does not wait. Events taken
    /// before are gone.
    pub fn read_some(&mut self) -> Result<Read> {
        match self.transport.read(self.input.room()) {
            Ok(0) => Ok(Read::Closed),
            Ok(len) => {
                self.input.received(len);
                Ok(Read::Bytes(len))
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(Read::WouldBlock),
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => Ok(Read::Closed),
                ErrorKind::InvalidData => Err(tls::io_failed(error)),
                _ => Err(ConnectError::io("receive data from server", error)),
            },
        }
    }

    /// Whether [`Connection::next_message`] has something.
    pub fn has_message(&mut self) -> Result<bool> {
        while let Some(tag) = self.input.peek(self.max_message)? {
            if !ANY_TIME.contains(&tag) {
                return Ok(true);
            }
            if let Some((tag, range)) = self.input.take(self.max_message)? {
                self.note(tag, range)?;
            }
        }
        Ok(self.state == State::Ended)
    }

    /// The next event of the stream that is whole; `None`: [`Connection::read_some`] is next. Notices and parameters in
    /// between are noted. An error of the server's ends the session.
    pub fn next_message(&mut self) -> Result<Option<CopyEvent<'_>>> {
        match self.state {
            State::Streaming => (),
            State::Ended => return Ok(Some(CopyEvent::Done)),
            _ => return Err(ConnectError::Protocol("the connection is not streaming".to_owned())),
        }
        let Some((tag, range)) = self.take()? else { return Ok(None) };
        match tag {
            b'd' => Ok(Some(CopyEvent::Data(self.input.body(range)))),
            // CommandComplete comes without CopyDone when the server shuts down (WalSndDone, walsender.c).
            b'c' | b'C' => {
                self.state = State::Ended;
                Ok(Some(CopyEvent::Done))
            }
            b'E' => {
                self.state = State::Busy;
                Err(ConnectError::Server(ServerMessage::parse(self.input.body(range))?))
            }
            other => Err(walrider_wire::WireError::Unexpected(other).into()),
        }
    }

    /// Queues a message, as [`walrider_wire::stream`] encodes them; [`Connection::flush`] sends. `false`: it was not
    /// taken, because the server has not read the 128 kB before it.
    #[must_use]
    pub fn send_copy_data(&mut self, payload: &[u8]) -> bool {
        let queued = self.output.0.len() - self.output.1;
        if queued + payload.len() > MAX_QUEUED {
            return false;
        }
        frontend::copy_data(&mut self.output.0, payload);
        true
    }

    /// Sends what is queued as far as the server takes it now: whether that was all.
    pub fn flush(&mut self) -> Result<bool> {
        let (bytes, sent) = &mut self.output;
        let result = loop {
            if *sent == bytes.len() {
                bytes.clear();
                *sent = 0;
                break self.transport.flush();
            }
            match self.transport.write(&bytes[*sent..]) {
                Ok(len) => *sent += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) => break Err(error),
            }
        };
        match result {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(ConnectError::io("send data to server", error)),
            Ok(all) => Ok(all),
        }
    }

    // Messages, waiting

    /// The next message that is whole, past those that may come at any time.
    fn take(&mut self) -> Result<Option<Message>> {
        while let Some((tag, range)) = self.input.take(self.max_message)? {
            if !ANY_TIME.contains(&tag) {
                return Ok(Some((tag, range)));
            }
            self.note(tag, range)?;
        }
        Ok(None)
    }

    /// Takes note of one of those.
    fn note(&mut self, tag: u8, range: Range<usize>) -> Result<()> {
        let body = self.input.body(range);
        match tag {
            b'N' => {
                let notice = ServerMessage::parse(body)?;
                if self.notices.len() == MAX_NOTICES {
                    self.notices.pop_front();
                }
                self.notices.push_back(notice);
            }
            b'S' => {
                let (name, value) = backend::parameter_status(body)?;
                let fits = name.len() + value.len() <= ServerMessage::MAX_FIELD;
                if fits && (self.parameters.len() < MAX_PARAMETERS || self.parameters.contains_key(&name)) {
                    self.parameters.insert(name, value);
                }
            }
            // A NotificationResponse: nobody listens.
            _ => {}
        }
        Ok(())
    }

    /// Sends what is queued, and waits for the next message.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<Message> {
        let patience = Patience { deadline, interrupt: self.patience.interrupt.clone() };
        self.receive_within(&patience)
    }

    fn receive_within(&mut self, patience: &Patience) -> Result<Message> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            // Also what the server sent before it stopped reading is worth having, an error most of all.
            let sent = self.flush();
            match self.read_some()? {
                // There is an end to it even if the server sends notices without end.
                Read::Bytes(_) => patience.check()?,
                Read::Closed => return Err(sent.err().unwrap_or(ConnectError::Closed)),
                Read::WouldBlock => patience.wait(self.transport.as_fd(), true, !sent?)?,
            }
        }
    }

    // For `open`

    /// Queues a message.
    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output.0
    }

    /// Waits for the next message, as long as opening the connection may take.
    pub(crate) fn receive_startup(&mut self) -> Result<Message> {
        let patience = self.patience.clone();
        self.receive_within(&patience)
    }

    pub(crate) fn body(&self, range: Range<usize>) -> &[u8] {
        self.input.body(range)
    }

    /// The server said that it is ready for commands.
    pub(crate) fn set_ready(&mut self) {
        self.state = State::Idle;
        self.patience.deadline = None;
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
}

impl Drop for Connection {
    /// Says goodbye, if the server takes it at once.
    fn drop(&mut self) {
        if self.state == State::Idle {
            frontend::terminate(&mut self.output.0);
            // A connection that is dropped is done with, and so is a server that is not there any more.
            let _ = self.flush();
        }
    }
}
