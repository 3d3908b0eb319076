//! Accepts connections, each with a thread of its own.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::link::Link;
use crate::service::Service;
use crate::session::Session;

/// Connections at once that have not said who they are: more of one address, or of all, are closed unheard.
const MAX_UNKNOWN_OF_ADDRESS: usize = 16;
const MAX_UNKNOWN: usize = 64;
/// How often to look whether it ends.
const LOOK: Duration = Duration::from_secs(1);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Not an address.
    #[error("could not translate \"{address}\" to an address: {source}; it is HOST:PORT, as in 127.0.0.1:5432")]
    Address {
        /// As it was given.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// It is taken, or not ours.
    #[error("could not listen on {address}: {source}")]
    Listen {
        /// As it was given.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No thread.
    #[error("could not start a thread: {0}")]
    Thread(io::Error),
}

/// Sockets that listen.
pub struct Listeners(Vec<Socket>);

impl Listeners {
    /// On all addresses of `HOST:PORT`.
    ///
    /// # Errors
    /// One cannot be had.
    pub fn open(addresses: &[String]) -> Result<Listeners, ListenError> {
        let mut sockets = Vec::new();
        for address in addresses {
            let found = address.to_socket_addrs();
            let found = found.map_err(|source| ListenError::Address { address: address.clone(), source })?;
            for address in found {
                sockets.push(listen(address).map_err(|source| ListenError::Listen { address, source })?);
            }
        }
        Ok(Listeners(sockets))
    }

    /// Where they listen.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let address = |socket: &Socket| socket.local_addr().ok().and_then(|address| address.as_socket());
        self.0.iter().filter_map(address).collect()
    }

    /// Serves until the service is stopped, in threads of their own.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn serve(self, service: &Arc<Service>) -> Result<(), ListenError> {
        for socket in self.0 {
            let service = service.clone();
            let run = move || accept(&socket, &service);
            thread::Builder::new().name("relay-accept".into()).spawn(run).map_err(ListenError::Thread)?;
        }
        Ok(())
    }
}

fn listen(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    // Looked at from time to time, so that it ends.
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

/// How many connections there are of each address that have not said who they are.
pub(crate) type UnknownCounts = Mutex<HashMap<Option<IpAddr>, usize>>;

/// A connection that has not said who it is, counted until this is dropped.
pub(crate) struct Unknown(Arc<UnknownCounts>, Option<IpAddr>);

impl Unknown {
    /// One more, unless there are too many.
    fn enter(counts: &Arc<UnknownCounts>, address: Option<IpAddr>) -> Option<Unknown> {
        let mut known = counts.lock().expect("no panic while locked");
        let of_address = known.get(&address).copied().unwrap_or(0);
        if of_address >= MAX_UNKNOWN_OF_ADDRESS || known.values().sum::<usize>() >= MAX_UNKNOWN {
            return None;
        }
        known.insert(address, of_address + 1);
        Some(Unknown(counts.clone(), address))
    }
}

impl Drop for Unknown {
    fn drop(&mut self) {
        let mut known = self.0.lock().expect("no panic while locked");
        if let Some(count) = known.get_mut(&self.1) {
            *count -= 1;
        }
        known.retain(|_, count| *count > 0);
    }
}

/// Accepts connections until the service ends.
fn accept(listener: &Socket, service: &Arc<Service>) {
    while !service.is_stopping() {
        let (socket, address) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(error) => {
                // Too few file descriptors, or little memory: others may end.
                tracing::warn!("could not accept a connection: {error}");
                thread::sleep(LOOK);
                continue;
            }
        };
        let address = address.as_socket().map(|address| address.ip());
        let Some(unknown) = Unknown::enter(&service.unknown, address) else {
            tracing::warn!("too many connections that do not say who they are: one is closed unheard");
            continue;
        };
        let link = match Link::new(socket) {
            Ok(link) => link,
            Err(error) => {
                tracing::debug!("a connection was lost at once: {error}");
                continue;
            }
        };
        let service = service.clone();
        let run = move || Session::new(&service, link, address, unknown).run();
        if let Err(error) = thread::Builder::new().name("relay-send".into()).spawn(run) {
            tracing::warn!("could not start a thread for a connection: {error}");
        }
    }
}
