//! Standard output and error: all that is said goes through here. What was done stays done, whether it could be said or not.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Something was not written, and somebody wanted it.
static LOST: AtomicBool = AtomicBool::new(false);
/// Nobody reads any more.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Writes to the standard output. A reader that closed it has seen enough; any other failure is said once, and shows in
/// [`exit_code`].
pub fn say(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    note(out.write_fmt(text).and_then(|()| out.flush()));
}

/// Writes to the standard error. If that fails, there is nobody to tell.
pub fn complain(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Takes note of what came of writing to the standard output.
pub fn note(written: io::Result<()>) {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => CLOSED.store(true, Ordering::Relaxed),
        Err(error) if !LOST.swap(true, Ordering::Relaxed) => {
            complain(format_args!("walrider: could not write to the standard output: {error}\n"));
        }
        _ => {}
    }
}

/// Whether the standard output was closed by who read it: what goes on for ever ends then.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// The exit code of a run that ended with `code`: what succeeded and could not be said is no success.
pub fn exit_code(code: ExitCode) -> ExitCode {
    if code == ExitCode::SUCCESS && LOST.load(Ordering::Relaxed) { ExitCode::from(1) } else { code }
}
