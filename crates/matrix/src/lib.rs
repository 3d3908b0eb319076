//! An experiment about the speed of replication: a matrix of settings, a run for each combination of them on servers of its own or
//! on given ones, and what the settings come to.
//!
//! [`plan`], [`fraction`], [`effects`] and [`figures`] are pure; [`results`] has the file of what was measured; [`throwaway`] and
//! [`given`] have the servers, the load, the clock and the processes. Nothing here prints.

pub mod effects;
pub mod figures;
pub mod fraction;
pub mod given;
mod load;
mod measure;
pub mod plan;
mod program;
pub mod results;
pub mod throwaway;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use walrider_session::ConnectError;

use results::Failed;

/// Why a run has no figures.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Somebody wants the experiment to end.
    #[error("interrupted")]
    Interrupted,
    /// The run failed; others may not.
    #[error("{}", .0.message)]
    Failed(Failed),
}

impl RunError {
    /// With no log yet.
    pub(crate) fn failed(message: impl ToString) -> RunError {
        RunError::Failed(Failed { message: message.to_string(), log: Vec::new() })
    }

    /// With what a log said last, if it has none yet.
    pub(crate) fn with_log(mut self, log: impl FnOnce() -> Vec<String>) -> RunError {
        if let RunError::Failed(Failed { log: lines, .. }) = &mut self
            && lines.is_empty()
        {
            *lines = log();
        }
        self
    }

    /// Of the operating system, for `map_err`: what was tried.
    pub(crate) fn io(what: String) -> impl FnOnce(std::io::Error) -> RunError {
        move |error| RunError::failed(format!("could not {what}: {error}"))
    }
}

impl From<ConnectError> for RunError {
    fn from(error: ConnectError) -> RunError {
        RunError::failed(error)
    }
}

/// Result of a run, or of a part of it.
pub type Result<T> = std::result::Result<T, RunError>;

/// Whether somebody wants the experiment to end; a handler of signals sets it.
#[derive(Clone, Default)]
pub struct Stop(pub Arc<AtomicBool>);

impl Stop {
    /// An error if so.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(RunError::Interrupted) } else { Ok(()) }
    }
}

/// How a run is made, whatever its settings.
#[derive(Clone)]
pub struct Conditions {
    /// What is done.
    pub load: plan::Load,
    /// By how many sessions at once.
    pub clients: u16,
    /// For how long.
    pub duration: Duration,
    /// How long a server may take to start, to stop, to answer, and to catch up.
    pub timeout: Duration,
    /// Whether to go on.
    pub stop: Stop,
}
