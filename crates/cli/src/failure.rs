//! How every command tells that it failed: a line on stderr in the form that PostgreSQL's programs have, an exit code, and with
//! `--json` an object.

use std::fmt::Display;
use std::process::ExitCode;

use serde_json::{Value, json};
use walrider_layout::Lsn;

/// Version of what `--json` prints, as `schema_version` in every object: a key that goes, or means something else, raises it.
pub const SCHEMA_VERSION: u32 = 1;

/// How a command ends, the same for all; `status` has those of `pg_ctl status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Something has to be set right first.
    Refused = 1,
    /// Wrong usage.
    Usage = 2,
    /// Stopped cleanly before a record without redo.
    Unsupported = 3,
    /// WAL, a page or a file is damaged.
    Damaged = 4,
    /// Done, and a difference was found.
    Different = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command failed.
#[derive(Clone, Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    code: u8,
    lsn: Option<Lsn>,
}

impl Failure {
    /// The message says what to do.
    pub fn new(exit: Exit, message: impl Display) -> Failure {
        Failure { message: message.to_string(), hint: None, code: exit as u8, lsn: None }
    }

    /// With an exit code of another table.
    pub fn with_code(self, code: u8) -> Failure {
        Failure { code, ..self }
    }

    /// Says where in the WAL, if that is known.
    pub fn at(self, lsn: impl Into<Option<Lsn>>) -> Failure {
        Failure { lsn: lsn.into(), ..self }
    }

    /// Says what else there is to know about what comes next.
    pub fn hint(self, hint: impl Display) -> Failure {
        Failure { hint: Some(hint.to_string()), ..self }
    }

    /// Says no more than what is wrong.
    pub fn without_hint(self) -> Failure {
        Failure { hint: None, ..self }
    }

    /// What stands under `error` in an object.
    pub fn to_json(&self) -> Value {
        json!({
            "message": self.message,
            "hint": self.hint,
            "code": self.code,
            "lsn": self.lsn.map(|lsn| lsn.to_string()),
        })
    }

    /// Says so on stderr.
    pub fn complain(&self) -> ExitCode {
        error(&self.message);
        if let Some(hint) = &self.hint {
            say("hint", hint);
        }
        ExitCode::from(self.code)
    }

    /// Says so on stderr, and on stdout too if JSON is wanted there.
    pub fn tell(&self, json: bool) -> ExitCode {
        if json {
            let object = json!({ "schema_version": SCHEMA_VERSION, "error": self.to_json() });
            println!("{object}");
        }
        self.complain()
    }
}

/// What may be good to know (`pg_log_info`).
pub fn note(message: impl Display) {
    eprintln!("walrider: {message}");
}

/// An error, as `pg_basebackup` and the others write one (`pg_log_error`, `common/logging.c`).
pub fn error(message: impl Display) {
    say("error", &message);
}

/// The same for a warning.
pub fn warning(message: impl Display) {
    say("warning", &message);
}

fn say(severity: &str, message: &dyn Display) {
    eprintln!("walrider: {severity}: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_json() {
        let failure = Failure::new(Exit::Damaged, "a \"b\"").at(Lsn(0x28));
        assert_eq!(failure.to_json(), json!({ "message": "a \"b\"", "hint": null, "code": 4, "lsn": "0/28" }));
        assert_eq!(
            Failure::new(Exit::Refused, 1).hint(2).to_json(),
            json!({ "message": "1", "hint": "2", "code": 1, "lsn": null })
        );
    }
}
