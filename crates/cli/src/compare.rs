//! `walrider compare`: two stopped data directories, page by page.

mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use walrider_inspect::compare::{CompareError, How, compare};
use walrider_layout::control::ControlError;

use crate::failure::{Exit, Failure};

/// Compares two stopped data directories, page by page.
///
/// Exit code 0: equal; 5: different; 1: a server runs on one, or a file could not be read; 2: not two data directories; 4: a
/// damaged control file.
#[derive(clap::Args, Clone, Debug)]
pub struct CompareArgs {
    /// The first data directory
    dir_a: PathBuf,
    /// The second data directory
    dir_b: PathBuf,
    /// No masks: LSNs, checksums, hint bits and unused space count, too
    #[arg(long)]
    strict: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Show this many differences in full
    #[arg(long, value_name = "N", default_value_t = 20)]
    first: usize,
}

/// Runs the command.
pub fn run(args: CompareArgs) -> ExitCode {
    let CompareArgs { dir_a, dir_b, strict, json, first } = args;
    match compare([&dir_a, &dir_b], How { strict, first }, &report::show_progress) {
        Ok(report) => {
            report::print(&report, json);
            if report.tally.differences() > 0 { Exit::Different.into() } else { ExitCode::SUCCESS }
        }
        Err(error) => Failure::new(exit(&error), &error).tell(json),
    }
}

fn exit(error: &CompareError) -> Exit {
    use ControlError as C;
    match error {
        CompareError::Control { source: C::TooShort { .. } | C::Checksum { .. } | C::State { .. }, .. } => {
            Exit::Damaged
        }
        CompareError::NotADataDirectory { .. } | CompareError::Control { .. } => Exit::Usage,
        CompareError::Running { .. } | CompareError::Read(_) => Exit::Refused,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use walrider_inspect::compare::ReadError;

    use super::*;

    #[test]
    fn exit_codes() {
        let dir = || PathBuf::from("d");
        let failed = || io::Error::from(io::ErrorKind::NotFound);
        let control = |source| exit(&CompareError::Control { dir: dir(), source });
        assert_eq!(exit(&CompareError::NotADataDirectory { dir: dir(), source: failed() }), Exit::Usage);
        assert_eq!(exit(&CompareError::Running { dir: dir(), pid: 1 }), Exit::Refused);
        assert_eq!(exit(&CompareError::Read(ReadError { path: dir(), source: failed() })), Exit::Refused);
        assert_eq!(control(ControlError::TooShort { found_bytes: 1 }), Exit::Damaged);
        assert_eq!(control(ControlError::ByteOrder), Exit::Usage);
    }
}
