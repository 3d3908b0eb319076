//! What a client is told that does not get what it wants.

use std::io;

use walrider_backup::header::TooLong;
use walrider_backup::manifest::ManifestError;
use walrider_datadir::DataDirError;
use walrider_wire::backend::ServerMessage;

use crate::link::LinkError;
use crate::origin::OriginError;
use crate::slots::SlotError;

/// An error for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub Box<ServerMessage>);

impl Refusal {
    /// With PostgreSQL's code.
    pub fn new(code: &str, message: impl Into<String>) -> Refusal {
        let message = ServerMessage {
            severity: "ERROR".into(),
            code: code.into(),
            message: message.into(),
            ..ServerMessage::default()
        };
        Refusal(Box::new(message))
    }

    /// With more about it.
    pub fn detail(mut self, detail: impl Into<String>) -> Refusal {
        self.0.detail = detail.into();
        self
    }

    /// With what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Refusal {
        self.0.hint = hint.into();
        self
    }

    /// It ends the session.
    pub fn fatal(mut self) -> Refusal {
        self.0.severity = "FATAL".into();
        self
    }

    /// Whether it does.
    pub fn is_fatal(&self) -> bool {
        self.0.severity == "FATAL"
    }
}

impl From<OriginError> for Refusal {
    fn from(error: OriginError) -> Refusal {
        let code = match error {
            OriginError::Removed(_) => "58P01",
            OriginError::Io { .. } => "58030",
            OriginError::History { .. } | OriginError::Short { .. } => "XX000",
        };
        Refusal::new(code, error.to_string())
    }
}

impl From<SlotError> for Refusal {
    fn from(error: SlotError) -> Refusal {
        let refusal = Refusal::new(error.sqlstate(), error.to_string());
        match error {
            SlotError::Lost(_) => refusal.detail("This replication slot has been invalidated due to \"wal_removed\"."),
            _ => refusal,
        }
    }
}

impl From<DataDirError> for Refusal {
    fn from(error: DataDirError) -> Refusal {
        let code = match &error {
            DataDirError::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => "58P01",
                io::ErrorKind::PermissionDenied => "42501",
                _ => "58030",
            },
            _ => "58030",
        };
        Refusal::new(code, error.to_string())
    }
}

impl From<ManifestError> for Refusal {
    fn from(error: ManifestError) -> Refusal {
        let code = match error {
            ManifestError::Io(_) => "58030",
            ManifestError::History(..) => "XX000",
        };
        Refusal::new(code, error.to_string())
    }
}

impl From<TooLong> for Refusal {
    fn from(error: TooLong) -> Refusal {
        Refusal::new("XX000", error.to_string())
    }
}

/// Why a session, or a command of it, ends.
#[derive(Debug)]
pub enum Stopped {
    /// The client is told.
    Refused(Refusal),
    /// Nobody is there to be told.
    Link(LinkError),
}

impl From<Refusal> for Stopped {
    fn from(refusal: Refusal) -> Stopped {
        Stopped::Refused(refusal)
    }
}

impl From<DataDirError> for Stopped {
    fn from(error: DataDirError) -> Stopped {
        Stopped::Refused(error.into())
    }
}

impl From<ManifestError> for Stopped {
    fn from(error: ManifestError) -> Stopped {
        Stopped::Refused(error.into())
    }
}

impl From<TooLong> for Stopped {
    fn from(error: TooLong) -> Stopped {
        Stopped::Refused(error.into())
    }
}

impl From<OriginError> for Stopped {
    fn from(error: OriginError) -> Stopped {
        Stopped::Refused(error.into())
    }
}

impl From<SlotError> for Stopped {
    fn from(error: SlotError) -> Stopped {
        Stopped::Refused(error.into())
    }
}

impl From<LinkError> for Stopped {
    fn from(error: LinkError) -> Stopped {
        Stopped::Link(error)
    }
}

impl From<walrider_wire::WireError> for Stopped {
    fn from(error: walrider_wire::WireError) -> Stopped {
        Stopped::Link(error.into())
    }
}
