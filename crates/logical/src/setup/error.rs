//! What can go wrong, on which server; and how each is asked.

use std::fmt;

use rustix::io::Errno;
use walrider_session::{ConnectError, ConnectOptions, Connection};

use super::SESSION;

/// One of the two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It publishes.
    Source,
    /// It subscribes.
    Target,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Source => "source",
            Side::Target => "target",
        })
    }
}

/// Why it was not set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Nothing was changed: this has to be set right first, each of it.
    #[error("{}", list(.0))]
    Refused(Vec<String>),
    /// A server, or the way to it.
    #[error("{side}: {what}: {error}")]
    Server {
        /// Which.
        side: Side,
        /// What was not possible.
        what: String,
        /// Why.
        error: Box<ConnectError>,
    },
    /// The operating system.
    #[error("could not make an eventfd: {0}")]
    System(Errno),
    /// Also the operating system.
    #[error("could not handle signals: {0}")]
    Signals(std::io::Error),
    /// It failed in the middle.
    #[error("{cause}{}", Told(.removed, .left))]
    Undone {
        /// Why.
        cause: Box<SetupError>,
        /// What was taken back.
        removed: Vec<String>,
        /// What is still there, and how to remove it.
        left: Vec<String>,
    },
    /// The answer to the last step is missing, but it was done.
    #[error("{0}; but the subscription is there, and enabled: the rest was done")]
    Done(Box<SetupError>),
}

impl SetupError {
    /// Whether somebody asked for the end.
    pub fn is_interrupt(&self) -> bool {
        match self {
            SetupError::Server { error, .. } => matches!(**error, ConnectError::Interrupted),
            SetupError::Undone { cause, .. } => cause.is_interrupt(),
            _ => false,
        }
    }
}

/// One problem as it is, several below each other.
fn list(problems: &[String]) -> String {
    match problems {
        [problem] => problem.clone(),
        _ => format!("{} things have to be set right first\n- {}", problems.len(), problems.join("\n- ")),
    }
}

struct Told<'a>(&'a [String], &'a [String]);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() {
            write!(f, "; removed again: {}", self.0.join(", "))?;
        }
        match self.1 {
            [] => f.write_str("; nothing is left, start again"),
            left => write!(f, "; left, to be removed before the next start: {}", left.join("; ")),
        }
    }
}

impl Side {
    pub(crate) fn failed(self, what: &str, error: ConnectError) -> SetupError {
        SetupError::Server { side: self, what: what.to_owned(), error: error.into() }
    }

    /// A session without timeouts: some commands wait for others' transactions.
    pub(crate) fn open(self, options: &ConnectOptions) -> Result<Connection, SetupError> {
        let mut connection = Connection::open(options).map_err(|error| self.failed("could not connect", error))?;
        connection.set_response_timeout(None);
        self.run(&mut connection, SESSION)?;
        Ok(connection)
    }

    /// A command whose answer does not matter.
    pub(crate) fn run(self, connection: &mut Connection, command: &str) -> Result<(), SetupError> {
        self.ask(connection, command).map(drop)
    }

    /// Rows of so many columns, as text; null is an empty one.
    pub(crate) fn rows<const N: usize>(
        self,
        connection: &mut Connection,
        command: &str,
    ) -> Result<Vec<[String; N]>, SetupError> {
        let text = |value: Option<Vec<u8>>| String::from_utf8_lossy(&value.unwrap_or_default()).into_owned();
        let columns =
            |row: Vec<Option<Vec<u8>>>| <[_; N]>::try_from(row.into_iter().map(text).collect::<Vec<_>>()).ok();
        let rows = self.ask(connection, command)?;
        let rows: Option<Vec<_>> = rows.into_iter().map(columns).collect();
        let odd = || ConnectError::Protocol("the answer has other columns than were asked for".to_owned());
        rows.ok_or_else(|| self.failed(&beginning(command), odd()))
    }

    fn ask(self, connection: &mut Connection, command: &str) -> Result<Vec<Vec<Option<Vec<u8>>>>, SetupError> {
        connection.simple_query(command).map_err(|error| self.failed(&beginning(command), error))
    }
}

/// The first words of a command: they say enough, and passwords come later.
fn beginning(command: &str) -> String {
    command.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
