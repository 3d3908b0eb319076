//! Commands that the configuration names (`replace_percent_placeholders`, `common/percentrepl.c`; `ExecuteRecoveryCommand`,
//! `access/transam/xlogarchive.c`, PostgreSQL 18).

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// Replaces placeholders, each a letter behind a percent sign, and `%%`.
///
/// # Errors
/// A percent sign in front of anything else; `parameter` is the setting that the message names.
pub fn expand(parameter: &str, command: &str, values: &[(char, &str)]) -> Result<String, String> {
    let mut line = String::new();
    let mut chars = command.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            line.push(char);
            continue;
        }
        let placeholder = chars.next();
        match values.iter().find(|(letter, _)| Some(*letter) == placeholder) {
            Some((_, value)) => line.push_str(value),
            None if placeholder == Some('%') => line.push('%'),
            None => {
                let known: Vec<String> = values.iter().map(|(letter, _)| format!("%{letter}")).collect();
                return Err(format!(
                    "invalid value for parameter \"{parameter}\": \"{command}\": only {} and %% are placeholders; correct \
                     it, and try again",
                    known.join(", ")
                ));
            }
        }
    }
    Ok(line)
}

/// A shell in the data directory that runs a line. What it prints goes to stderr: our own output may be JSON.
pub fn shell(data_dir: &Path, line: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(line).current_dir(data_dir).stdin(Stdio::null()).stdout(io::stderr());
    // Only our own service manager's business.
    command.env_remove("NOTIFY_SOCKET");
    command
}

/// Runs a line whose failure is told, and stops nothing.
///
/// # Errors
/// How it failed.
pub fn run(data_dir: &Path, line: &str) -> Result<(), String> {
    match shell(data_dir, line).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders() {
        let expand = |command| expand("restore_command", command, &[('f', "FILE"), ('r', "OLD")]);
        assert_eq!(expand("cp /a/%f x%%y %r"), Ok("cp /a/FILE x%y OLD".to_owned()));
        for wrong in ["%x", "cp %", "%F"] {
            assert!(expand(wrong).unwrap_err().contains("only %f, %r and %% are placeholders"), "{wrong}");
        }
    }
}
