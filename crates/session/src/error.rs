//! Why there is no connection, or none any more.

use std::error::Error;
use std::fmt;
use std::io;

use walrider_wire::WireError;
use walrider_wire::backend::ServerMessage;
use walrider_wire::conninfo::ConnInfoError;

/// A connection that failed. No text of it holds a password.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The connection string, the environment or a file they name is wrong; trying again does not help.
    #[error(transparent)]
    Config(Reason),
    /// The operating system refused.
    #[error("could not {operation}: {source}")]
    Io {
        /// What was tried: "connect to server", "receive data from server", …
        operation: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
    /// The server went away without a word.
    #[error("server closed the connection unexpectedly; its log may tell why")]
    Closed,
    /// The server did not answer in time.
    #[error("timeout expired")]
    Timeout,
    /// The caller's interrupt (see [`crate::ConnectOptions::interrupt_with`]) came first.
    #[error("interrupted")]
    Interrupted,
    /// No encryption as asked for.
    #[error(transparent)]
    Tls(Reason),
    /// Authentication as asked for is not possible. A refused password is a [`ConnectError::Server`].
    #[error(transparent)]
    Auth(Reason),
    /// The server is not of the kind that `target_session_attrs` asks for.
    #[error("{0}")]
    Target(&'static str),
    /// The server answered with an error.
    #[error("{0}")]
    Server(ServerMessage),
    /// The server sent bytes that are no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The server sent something that a PostgreSQL server does not send.
    #[error("{0}")]
    Protocol(String),
    /// No server could be connected to. At least one attempt.
    #[error("{}", Attempts(.0))]
    Open(Vec<FailedAttempt>),
}

/// What is wrong, in words, with the error behind it if there is one; the words tell of that, too.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Reason {
    text: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Reason {
    /// Puts words before an error.
    pub(crate) fn of(what: impl fmt::Display, source: impl Into<Box<dyn Error + Send + Sync>>) -> Reason {
        let source = source.into();
        Reason { text: format!("{what}: {source}"), source: Some(source) }
    }
}

impl<T: Into<String>> From<T> for Reason {
    fn from(text: T) -> Reason {
        Reason { text: text.into(), source: None }
    }
}

/// One address that was tried.
#[derive(Debug)]
pub struct FailedAttempt {
    /// Host and port, or the socket.
    pub peer: String,
    /// What came of it.
    pub error: ConnectError,
}

struct Attempts<'a>(&'a [FailedAttempt]);

impl fmt::Display for Attempts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, attempt) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}connection to server at \"{}\" failed: {}", attempt.peer, attempt.error)?;
        }
        Ok(())
    }
}

impl ConnectError {
    pub(crate) fn io(operation: &'static str, source: impl Into<io::Error>) -> ConnectError {
        ConnectError::Io { operation, source: source.into() }
    }

    /// The server's own words, if it said anything; of several attempts, the last.
    pub fn server_message(&self) -> Option<&ServerMessage> {
        match self {
            ConnectError::Server(message) => Some(message),
            ConnectError::Open(attempts) => attempts.iter().rev().find_map(|attempt| attempt.error.server_message()),
            _ => None,
        }
    }

    /// Whether we did not want to be let in as the server would have it; of several attempts, the last.
    pub fn is_authentication(&self) -> bool {
        match self {
            ConnectError::Auth(_) => true,
            ConnectError::Open(attempts) => attempts.last().is_some_and(|attempt| attempt.error.is_authentication()),
            _ => false,
        }
    }

    /// Whether the server answered with this SQLSTATE. 58P01 (`undefined_file`) to START_REPLICATION or while
    /// streaming: the WAL segment was removed (`WalSndSegmentOpen`, `walsender.c`).
    pub fn is_sqlstate(&self, sqlstate: &str) -> bool {
        self.server_message().is_some_and(|message| message.is(sqlstate))
    }
}

impl From<ConnInfoError> for ConnectError {
    fn from(error: ConnInfoError) -> ConnectError {
        ConnectError::Config(error.to_string().into())
    }
}
