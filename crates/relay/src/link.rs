//! A connection from downstream: framed messages in, messages and pieces of files out. Nothing blocks but [`Link::wait`].

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;
use rustls::ServerConnection;
use socket2::Socket;
use walrider_wire::WireError;
use walrider_wire::backend::Frame;
use walrider_wire::server::Opening;

/// The longest message that is taken: a status update has 39 bytes, a command a few hundred.
pub const MAX_MESSAGE: usize = 64 << 10;
/// A piece of a file that goes through memory, because it is encrypted on its way.
const PIECE: usize = 64 << 10;

/// What is wrong with a connection.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The other side has closed it.
    #[error("the connection was closed")]
    Closed,
    /// Something that is no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The system.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Nothing came, or went, in time.
    #[error("timeout expired")]
    Timeout,
    /// A segment is shorter than a segment.
    #[error("a WAL segment ends early")]
    ShortFile,
}

/// What goes out, in order.
enum Out {
    Bytes(Vec<u8>, usize),
    /// So many bytes of a file from an offset on.
    File(Arc<File>, u64, u64),
}

/// A connection.
pub struct Link {
    socket: Socket,
    tls: Option<Box<ServerConnection>>,
    input: Vec<u8>,
    /// Of `input`, what was taken.
    taken: usize,
    output: VecDeque<Out>,
}

impl Link {
    /// A connection that was accepted; the socket does not block from now on.
    ///
    /// # Errors
    /// The system does not let it.
    pub fn new(socket: Socket) -> io::Result<Link> {
        socket.set_nonblocking(true)?;
        if socket.local_addr()?.is_ipv4() || socket.local_addr()?.is_ipv6() {
            socket.set_tcp_nodelay(true)?;
            socket.set_keepalive(true)?;
        }
        Ok(Link { socket, tls: None, input: Vec::new(), taken: 0, output: VecDeque::new() })
    }

    /// Encrypts it, from the next byte on. What came before that was not asked for (CVE-2021-23214) is refused.
    ///
    /// # Errors
    /// The handshake fails, or takes longer than until `deadline`.
    pub fn encrypt(&mut self, session: ServerConnection, deadline: Instant) -> Result<(), LinkError> {
        if self.taken < self.input.len() {
            return Err(WireError::Malformed("SSLRequest").into());
        }
        let mut session = Box::new(session);
        while session.is_handshaking() {
            match session.complete_io(&mut &self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut wanted = PollFlags::empty();
                    wanted.set(PollFlags::IN, session.wants_read());
                    wanted.set(PollFlags::OUT, session.wants_write());
                    self.poll(wanted, &[], Some(deadline))?;
                    if Instant::now() >= deadline {
                        return Err(LinkError::Timeout);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(LinkError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
        self.tls = Some(session);
        Ok(())
    }

    /// The encryption, if there is one.
    pub fn tls(&self) -> Option<&ServerConnection> {
        self.tls.as_deref()
    }

    /// Reads what is there: whether anything was.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn fill(&mut self) -> Result<bool, LinkError> {
        self.input.drain(..self.taken);
        self.taken = 0;
        // One message, and the beginning of another: who sends more than that waits.
        if self.input.len() > MAX_MESSAGE {
            return Ok(false);
        }
        let mut some = false;
        let mut piece = [0; 8192];
        loop {
            let read = match &mut self.tls {
                None => (&self.socket).read(&mut piece),
                Some(tls) => read_tls(tls, &self.socket, &mut piece),
            };
            match read {
                // What came before counts; the end is met once more.
                Ok(0) if some => return Ok(true),
                Ok(0) => return Err(LinkError::Closed),
                Ok(len) => {
                    self.input.extend_from_slice(&piece[..len]);
                    some = true;
                    if self.input.len() > MAX_MESSAGE {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(some),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(LinkError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next message's type and body, if a whole one is there.
    ///
    /// # Errors
    /// It is too long, or none.
    pub fn message(&mut self) -> Result<Option<(u8, &[u8])>, LinkError> {
        let rest = &self.input[self.taken..];
        let Some(frame) = Frame::peek(rest, MAX_MESSAGE)? else { return Ok(None) };
        if rest.len() < frame.total_len {
            return Ok(None);
        }
        let from = self.taken;
        self.taken += frame.total_len;
        Ok(Some((frame.tag, &self.input[from + Frame::HEADER..from + frame.total_len])))
    }

    /// Waits for the first packet, which has no type; its body.
    ///
    /// # Errors
    /// It is too long, or does not come in time.
    pub fn startup_packet(&mut self, deadline: Instant) -> Result<Vec<u8>, LinkError> {
        loop {
            let rest = &self.input[self.taken..];
            if let Some(len) = Opening::peek(rest)?.filter(|len| rest.len() >= *len) {
                let body = rest[Opening::HEADER..len].to_vec();
                self.taken += len;
                return Ok(body);
            }
            self.read_more(Some(deadline))?;
        }
    }

    /// Waits for a message and hands it on.
    ///
    /// # Errors
    /// Those of [`Link::message`], or none comes in time.
    pub fn wait_message(&mut self, deadline: Option<Instant>) -> Result<(u8, Vec<u8>), LinkError> {
        loop {
            if let Some((tag, body)) = self.message()? {
                return Ok((tag, body.to_vec()));
            }
            self.read_more(deadline)?;
        }
    }

    fn read_more(&mut self, deadline: Option<Instant>) -> Result<(), LinkError> {
        while !self.fill()? {
            self.poll(PollFlags::IN, &[], deadline)?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(LinkError::Timeout);
            }
        }
        Ok(())
    }

    /// Queues what `write` appends.
    pub fn queue(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        match self.output.back_mut() {
            Some(Out::Bytes(bytes, at)) => {
                bytes.drain(..std::mem::take(at));
                write(bytes);
            }
            _ => {
                let mut bytes = Vec::new();
                write(&mut bytes);
                self.output.push_back(Out::Bytes(bytes, 0));
            }
        }
    }

    /// Queues `len` bytes of a file from `offset` on.
    pub fn queue_file(&mut self, file: Arc<File>, offset: u64, len: u64) {
        self.output.push_back(Out::File(file, offset, len));
    }

    /// Whether something is left to send.
    pub fn is_pending(&self) -> bool {
        !self.output.is_empty() || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what the connection takes: whether nothing is left. Pieces of files go from the system's cache to the socket without a
    /// copy here, unless they are encrypted.
    ///
    /// # Errors
    /// The connection is lost, or a file cannot be read.
    pub fn flush(&mut self) -> Result<bool, LinkError> {
        loop {
            let more = self.output.len() > 1;
            let Some(front) = self.output.front_mut() else { break };
            let sent = match (front, &mut self.tls) {
                (Out::Bytes(bytes, at), None) => {
                    // A header waits for the WAL that it is of.
                    let flags = if more { SendFlags::MORE } else { SendFlags::empty() };
                    match self.socket.send_with_flags(&bytes[*at..], flags.bits() as i32) {
                        Ok(len) => {
                            *at += len;
                            Ok(*at == bytes.len())
                        }
                        Err(error) => Err(error),
                    }
                }
                (Out::Bytes(bytes, at), Some(tls)) => write_tls(tls, &self.socket, &bytes[*at..]).map(|len| {
                    *at += len;
                    *at == bytes.len()
                }),
                (Out::File(file, offset, left), None) => {
                    let most = usize::try_from(*left).unwrap_or(usize::MAX);
                    match rustix::fs::sendfile(&self.socket, &**file, Some(offset), most) {
                        Ok(0) => return Err(LinkError::ShortFile),
                        Ok(len) => {
                            *left -= len as u64;
                            Ok(*left == 0)
                        }
                        Err(error) => Err(error.into()),
                    }
                }
                (Out::File(file, offset, left), Some(_)) => {
                    use std::os::unix::fs::FileExt;
                    let mut piece = vec![0; PIECE.min(usize::try_from(*left).unwrap_or(usize::MAX))];
                    let len = file.read_at(&mut piece, *offset)?;
                    if len == 0 {
                        return Err(LinkError::ShortFile);
                    }
                    piece.truncate(len);
                    (*offset, *left) = (*offset + len as u64, *left - len as u64);
                    if *left == 0 {
                        self.output.pop_front();
                    }
                    self.output.push_front(Out::Bytes(piece, 0));
                    Ok(false)
                }
            };
            match sent {
                Ok(true) => drop(self.output.pop_front()),
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(tls) = &mut self.tls {
            while tls.wants_write() {
                match tls.write_tls(&mut &self.socket) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(true)
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// Those of [`Link::flush`], or it takes longer than until `deadline`.
    pub fn flush_all(&mut self, deadline: Instant) -> Result<(), LinkError> {
        while !self.flush()? {
            self.poll(PollFlags::OUT, &[], Some(deadline))?;
            if Instant::now() >= deadline {
                return Err(LinkError::Timeout);
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, or `wake` is readable, or what is left can be sent, or `timeout` is over.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self, wake: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<(), LinkError> {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.is_pending());
        self.poll(wanted, &[wake], timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// Waits until what is left can be sent, or `wake` is readable. What comes in stays where it is.
    ///
    /// # Errors
    /// The system's.
    pub fn wait_to_send(&self, wake: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.poll(PollFlags::OUT, &[wake], None)
    }

    fn poll(&self, wanted: PollFlags, others: &[BorrowedFd<'_>], deadline: Option<Instant>) -> Result<(), LinkError> {
        let mut fds = vec![PollFd::new(&self.socket, wanted)];
        fds.extend(others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // An unthinkable time is none.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

/// Waits until `wake` is readable, or the time is over.
///
/// # Errors
/// The system's.
pub fn wait_readable(wake: BorrowedFd<'_>, time: Duration) -> Result<(), LinkError> {
    let time = Timespec::try_from(time).ok();
    match poll(&mut [PollFd::from_borrowed_fd(wake, PollFlags::IN)], time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn read_tls(tls: &mut ServerConnection, socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match tls.reader().read(into) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
        if tls.read_tls(&mut &*socket)? == 0 {
            return Ok(0);
        }
        if let Err(error) = tls.process_new_packets() {
            // It tells the other side why, if that takes it.
            let _ = tls.write_tls(&mut &*socket);
            return Err(io::Error::new(ErrorKind::InvalidData, error));
        }
    }
}

fn write_tls(tls: &mut ServerConnection, socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    match tls.writer().write(bytes)? {
        // Its buffer is full.
        0 if !bytes.is_empty() => {
            tls.write_tls(&mut &*socket)?;
            tls.writer().write(bytes)
        }
        len => Ok(len),
    }
}
