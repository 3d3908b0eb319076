//! Many statements on their way at once: the extended protocol without waiting for each answer.
//!
//! Both sides may have more to say than fits into the socket's buffers. So a side that waits to send also reads what has come.

use std::collections::VecDeque;
use std::os::fd::AsFd;

use walrider_wire::WireError;
use walrider_wire::backend::{self, ServerMessage};
use walrider_wire::frontend;

use super::{Connection, Read, State};
use crate::{ConnectError, Result};

/// Bytes that are collected before they are sent.
const SEND_AT: usize = 16 * 1024;
/// Bytes that may wait to be sent; with more, queueing waits for the server.
const MAX_WAITING: usize = 256 * 1024;
/// Statements with another number of rows than expected that are kept; the rest is only counted.
const MAX_UNEXPECTED: usize = 1000;

/// Whether a transaction is open, as ReadyForQuery says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transaction {
    /// None is.
    None,
    /// One is, and goes on.
    Open,
    /// One is that failed, and can only be rolled back.
    Failed,
}

/// What came of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The first statement that failed, by the number that it was queued with, and the server's error. Nothing after it was
    /// executed.
    pub failure: Option<(u64, ServerMessage)>,
    /// Statements that affected another number of rows than expected: their number, and the rows. At most 1,000.
    pub unexpected: Vec<(u64, u64)>,
    /// How many there were.
    pub unexpected_total: u64,
    /// How many statements were prepared, of those that were to be, in their order.
    pub prepared: usize,
    /// Where it leaves the session.
    pub transaction: Transaction,
}

/// An answer that is due.
#[derive(Debug)]
enum Due {
    ParseComplete {
        number: u64,
    },
    /// BindComplete and CommandComplete.
    Execution {
        number: u64,
        rows: Option<u64>,
    },
}

impl Due {
    fn number(&self) -> u64 {
        match self {
            Due::ParseComplete { number } | Due::Execution { number, .. } => *number,
        }
    }
}

/// A series of statements. [`Pipeline::finish`] ends it; dropped before, the connection is of no more use.
pub struct Pipeline<'a> {
    connection: &'a mut Connection,
    due: VecDeque<Due>,
    outcome: Outcome,
}

impl Connection {
    /// Begins a series of statements. What waits for the server in it has no timeout, but see
    /// [`crate::ConnectOptions::interrupt_with`].
    ///
    /// # Errors
    /// If the connection is not ready for commands.
    pub fn pipeline(&mut self) -> Result<Pipeline<'_>> {
        if self.state != State::Idle {
            return Err(ConnectError::Protocol("the connection is not ready for a pipeline".to_owned()));
        }
        self.state = State::Busy;
        let outcome = Outcome {
            failure: None,
            unexpected: Vec::new(),
            unexpected_total: 0,
            prepared: 0,
            transaction: Transaction::None,
        };
        Ok(Pipeline { connection: self, due: VecDeque::new(), outcome })
    }
}

impl Pipeline<'_> {
    /// Whether a statement has failed, as far as is known: what is queued after it is thrown away by the server.
    pub fn has_failed(&self) -> bool {
        self.outcome.failure.is_some()
    }

    /// Queues the preparation of a statement. `number` is the caller's, for [`Outcome::failure`].
    pub fn prepare(&mut self, number: u64, name: &str, text: &str) -> Result<()> {
        if text.contains('\0') {
            return Err(ConnectError::Config("a command must not contain a zero byte".into()));
        }
        frontend::parse(&mut self.connection.output.0, name, text);
        self.due.push_back(Due::ParseComplete { number });
        self.proceed()
    }

    /// Queues the execution of a prepared statement; `rows`: how many it must affect, else it is in
    /// [`Outcome::unexpected`]. Values are text.
    pub fn execute<'v>(
        &mut self,
        number: u64,
        statement: &str,
        values: impl IntoIterator<Item = Option<&'v [u8]>>,
        rows: Option<u64>,
    ) -> Result<()> {
        let output = &mut self.connection.output.0;
        frontend::bind(output, statement, values);
        frontend::execute(output);
        self.due.push_back(Due::Execution { number, rows });
        self.proceed()
    }

    /// Queues data for a COPY FROM STDIN that was just executed.
    pub fn copy_data(&mut self, data: &[u8]) -> Result<()> {
        frontend::copy_data(&mut self.connection.output.0, data);
        self.proceed()
    }

    /// Queues the end of that data.
    pub fn copy_done(&mut self) -> Result<()> {
        frontend::copy_done(&mut self.connection.output.0);
        self.proceed()
    }

    /// Sends what is queued as far as the server takes it; does not wait.
    pub fn send(&mut self) -> Result<()> {
        self.connection.flush().map(|_| ())
    }

    /// Ends the series, and waits for all answers.
    pub fn finish(mut self) -> Result<Outcome> {
        frontend::sync(&mut self.connection.output.0);
        while !self.take_answers()? {
            self.wait(true)?;
        }
        debug_assert!(self.due.is_empty() || self.outcome.failure.is_some(), "every statement has its answer");
        Ok(self.outcome)
    }

    /// Sends when it is worth a system call; waits when too much is queued.
    fn proceed(&mut self) -> Result<()> {
        let waiting = |connection: &Connection| connection.output.0.len() - connection.output.1;
        if waiting(self.connection) < SEND_AT {
            return Ok(());
        }
        self.connection.flush()?;
        while waiting(self.connection) > MAX_WAITING {
            self.take_answers()?;
            self.wait(false)?;
        }
        Ok(())
    }

    /// Sends and receives; waits until one of both was possible. Once all is sent it waits only `for_answers`: before a Sync, or
    /// in the middle of a COPY, the server has none.
    fn wait(&mut self, for_answers: bool) -> Result<()> {
        let connection = &mut *self.connection;
        let sent = connection.flush();
        match connection.read_some()? {
            Read::Bytes(_) => connection.patience.check(),
            Read::Closed => Err(sent.err().unwrap_or(ConnectError::Closed)),
            Read::WouldBlock => match sent? {
                true if !for_answers => Ok(()),
                sent => connection.patience.wait(connection.transport.as_fd(), true, !sent),
            },
        }
    }

    /// Takes the answers that are there; whether ReadyForQuery was among them.
    fn take_answers(&mut self) -> Result<bool> {
        while let Some((tag, range)) = self.connection.take()? {
            let body = self.connection.input.body(range);
            match tag {
                b'1' => match self.due.pop_front() {
                    Some(Due::ParseComplete { .. }) => self.outcome.prepared += 1,
                    _ => return Err(WireError::Unexpected(tag).into()),
                },
                // BindComplete; rows, which nobody wants; CopyInResponse.
                b'2' | b'D' | b'G' => (),
                // CommandComplete, or the EmptyQueryResponse instead of it.
                b'C' | b'I' => {
                    let Some(Due::Execution { number, rows }) = self.due.pop_front() else {
                        return Err(WireError::Unexpected(tag).into());
                    };
                    let affected =
                        if tag == b'C' { backend::affected_rows(&backend::command_complete(body)?) } else { 0 };
                    if rows.is_some_and(|rows| rows != affected) {
                        self.outcome.unexpected_total += 1;
                        if self.outcome.unexpected.len() < MAX_UNEXPECTED {
                            self.outcome.unexpected.push((number, affected));
                        }
                    }
                }
                b'E' => {
                    let error = ServerMessage::parse(body)?;
                    if error.severity != "ERROR" {
                        return Err(ConnectError::Server(error));
                    }
                    if self.outcome.failure.is_none() {
                        let number = self.due.front().map_or(u64::MAX, Due::number);
                        self.outcome.failure = Some((number, error));
                    }
                }
                b'Z' => {
                    self.outcome.transaction = match body {
                        b"I" => Transaction::None,
                        b"T" => Transaction::Open,
                        b"E" => Transaction::Failed,
                        _ => return Err(WireError::Unexpected(tag).into()),
                    };
                    self.connection.state = State::Idle;
                    return Ok(true);
                }
                other => return Err(WireError::Unexpected(other).into()),
            }
        }
        Ok(false)
    }
}
