//! TCP and unix sockets, never blocking: waiting has a deadline and can be interrupted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use crate::options::TcpOptions;
use crate::{ConnectError, Result};

/// Until when to wait, and what else ends it.
#[derive(Clone, Default)]
pub(crate) struct Patience {
    pub(crate) deadline: Option<Instant>,
    pub(crate) interrupt: Option<Arc<OwnedFd>>,
}

impl Patience {
    /// Is it time to give up?
    pub(crate) fn check(&self) -> Result<()> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(ConnectError::Timeout);
        }
        let Some(interrupt) = &self.interrupt else { return Ok(()) };
        let mut fds = [PollFd::new(interrupt, PollFlags::IN)];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(ConnectError::Interrupted),
        }
    }

    /// Waits until `fd` is readable, or writable if `write`. Errors of the socket count as both.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> Result<()> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, read);
        wanted.set(PollFlags::OUT, write);
        loop {
            let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(ConnectError::Timeout);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = vec![PollFd::from_borrowed_fd(fd, wanted)];
            fds.extend(self.interrupt.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
            match poll(&mut fds, left.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(ConnectError::io("wait for server", error)),
                Ok(_) => (),
            }
            if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
                return Err(ConnectError::Interrupted);
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
        }
    }
}

/// The address of the unix socket for `port` in a directory; a name that begins with `@` is an abstract one.
pub(crate) fn unix_address(directory: &str, port: u16) -> Result<SockAddr> {
    let path = format!("{directory}/.s.PGSQL.{port}");
    let address = match path.strip_prefix('@') {
        Some(name) => SockAddr::unix(format!("\0{name}")),
        None => SockAddr::unix(Path::new(&path)),
    };
    // sun_path has 108 bytes with the zero at its end.
    address.map_err(|_| {
        ConnectError::Config(format!("Unix-domain socket path \"{path}\" is too long (maximum 107 bytes)").into())
    })
}

/// What fails if nobody is there, in [`ConnectError::Io`].
pub(crate) const CONNECT: &str = "connect";

/// Connects, with the options that libpq sets (`PQconnectPoll`).
pub(crate) fn connect(address: &SockAddr, tcp: &TcpOptions, patience: &Patience) -> Result<Socket> {
    let failed = |error| ConnectError::io(CONNECT, error);
    let socket = Socket::new(address.domain(), Type::STREAM, None).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    if address.domain() != Domain::UNIX {
        set_tcp_options(&socket, tcp).map_err(|error| ConnectError::io("set socket option", error))?;
    }
    match socket.connect(address) {
        Ok(()) => return Ok(socket),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => (),
        Err(error) => return Err(failed(error)),
    }
    patience.wait(socket.as_fd(), false, true)?;
    match socket.take_error().map_err(failed)? {
        None => Ok(socket),
        Some(error) => Err(failed(error)),
    }
}

fn set_tcp_options(socket: &Socket, tcp: &TcpOptions) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if tcp.keepalives {
        let mut keepalive = TcpKeepalive::new();
        if let Some(idle) = tcp.keepalives_idle {
            keepalive = keepalive.with_time(idle);
        }
        if let Some(interval) = tcp.keepalives_interval {
            keepalive = keepalive.with_interval(interval);
        }
        if let Some(count) = tcp.keepalives_count {
            keepalive = keepalive.with_retries(count);
        }
        socket.set_keepalive(true)?;
        socket.set_tcp_keepalive(&keepalive)?;
    }
    socket.set_tcp_user_timeout(tcp.user_timeout)
}

/// The user at the other end of a unix socket must be this one (`requirepeer`).
pub(crate) fn check_peer(socket: &Socket, wanted: &str) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(socket)
        .map_err(|error| ConnectError::io("get peer credentials", error))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(peer.uid.as_raw())).ok().flatten();
    let Some(user) = user else {
        return Err(ConnectError::Auth(format!("could not look up local user ID {}", peer.uid.as_raw()).into()));
    };
    if user.name == wanted {
        return Ok(());
    }
    let actual = user.name;
    Err(ConnectError::Auth(
        format!("requirepeer specifies \"{wanted}\", but actual peer user name is \"{actual}\"").into(),
    ))
}
