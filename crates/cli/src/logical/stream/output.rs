//! Where the lines go: the standard output, or a file.

use std::fs::File;
use std::io::{self, ErrorKind, Stdout, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walrider_layout::Lsn;
use walrider_logical::journal::Journal;
use walrider_logical::json::Lines;
use walrider_logical::message::Message;
use walrider_logical::stream::{Sink, StreamError};

/// What a pipe takes at once when it is writable (`PIPE_BUF`, `pipe`(7)).
const PIPE_BUF: usize = 4096;
/// How often the publisher is seen to while a pipe takes nothing.
const TEND_INTERVAL: Duration = Duration::from_millis(100);

enum Target {
    Stdout {
        out: Stdout,
        /// It may block, and its reader may close it.
        pipe: bool,
    },
    File(Journal),
}

/// Prints messages as lines.
pub struct Printer {
    lines: Lines,
    /// Lines that were not passed on.
    buffer: Vec<u8>,
    /// How much of that is complete, and the position then.
    complete: Option<(usize, Lsn)>,
    target: Target,
}

impl Printer {
    /// As they come.
    pub fn to_stdout() -> Printer {
        let out = io::stdout();
        let pipe = is_pipe(out.as_fd()).unwrap_or(false);
        Printer::new(Target::Stdout { out, pipe })
    }

    /// Into a file.
    pub fn to_file(journal: Journal) -> Printer {
        Printer::new(Target::File(journal))
    }

    fn new(target: Target) -> Printer {
        Printer { lines: Lines::new(), buffer: Vec::new(), complete: None, target }
    }
}

fn is_pipe(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let kind = File::from(fd.try_clone_to_owned()?).metadata()?.file_type();
    Ok(kind.is_fifo() || kind.is_socket())
}

impl Sink for Printer {
    fn take(&mut self, lsn: Lsn, _send_time: i64, message: &Message<'_>, _len: usize) -> Result<(), StreamError> {
        self.lines.write(lsn, message, &mut self.buffer)?;
        if let Some(at) = message.complete_at() {
            self.complete = Some((self.buffer.len(), at));
        }
        Ok(())
    }

    fn pass_on(&mut self, tend: &mut dyn FnMut() -> Result<(), StreamError>) -> Result<(), StreamError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        match &mut self.target {
            Target::File(journal) => {
                journal.append(&self.buffer)?;
                if let Some((upto, lsn)) = self.complete.take() {
                    journal.complete((self.buffer.len() - upto) as u64, lsn);
                }
            }
            Target::Stdout { out, pipe: false } => out.lock().write_all(&self.buffer).map_err(failed)?,
            Target::Stdout { out, pipe: true } => {
                let mut written = 0;
                let result = write_to_pipe(out, &self.buffer, &mut written, tend);
                if result.is_err() {
                    // It may be tried again with the rest.
                    self.buffer.drain(..written);
                    return result;
                }
            }
        }
        self.buffer.clear();
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StreamError> {
        match &mut self.target {
            Target::File(journal) => Ok(journal.sync()?),
            Target::Stdout { out, .. } => out.flush().map_err(failed),
        }
    }

    fn disconnected(&mut self) -> Result<(), StreamError> {
        let open = self.lines.open();
        self.lines = Lines::new();
        match &mut self.target {
            Target::File(journal) => {
                self.buffer.clear();
                self.complete = None;
                journal.cut_back()?;
                Ok(journal.sync()?)
            }
            Target::Stdout { .. } => {
                if let Some(xid) = open {
                    self.buffer.extend(format!("{{\"kind\":\"interrupted\",\"xid\":{xid}}}\n").into_bytes());
                }
                // Nobody can stop us any more: a reader that is stuck is given a moment.
                match self.pass_on(&mut || Err(StreamError::OutputClosed)) {
                    Ok(()) => self.sync(),
                    Err(StreamError::OutputClosed) => Ok(()),
                    error => error,
                }
            }
        }
    }

    fn tick(&mut self, _seen: Lsn) -> Option<Duration> {
        None
    }

    fn closes(&self) -> Option<BorrowedFd<'_>> {
        match &self.target {
            Target::Stdout { out, pipe: true } => Some(out.as_fd()),
            _ => None,
        }
    }
}

fn failed(error: io::Error) -> StreamError {
    if error.kind() == ErrorKind::BrokenPipe { StreamError::OutputClosed } else { StreamError::Output(error) }
}

/// Writes without being blocked for long; tells how much was written.
fn write_to_pipe(
    out: &mut Stdout,
    bytes: &[u8],
    written: &mut usize,
    tend: &mut dyn FnMut() -> Result<(), StreamError>,
) -> Result<(), StreamError> {
    while *written < bytes.len() {
        let mut fds = [PollFd::from_borrowed_fd(out.as_fd(), PollFlags::OUT)];
        let timeout = Timespec::try_from(TEND_INTERVAL).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => tend()?,
            Ok(_) => match rustix::io::write(out.as_fd(), &bytes[*written..bytes.len().min(*written + PIPE_BUF)]) {
                Ok(len) => *written += len,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(failed(error.into())),
            },
            Err(error) => return Err(failed(error.into())),
        }
    }
    Ok(())
}
