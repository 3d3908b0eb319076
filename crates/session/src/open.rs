//! From connection options to a session: addresses, encryption, startup, authentication (`PQconnectPoll`).

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::Instant;

use socket2::{SockAddr, Socket};
use walrider_wire::WireError;
use walrider_wire::backend::{self, Authentication, ServerMessage};
use walrider_wire::frontend;

use crate::auth::{Authenticator, Security};
use crate::connection::Connection;
use crate::error::FailedAttempt;
use crate::options::{Host, TargetSession};
use crate::security::{CertMode, SslMode};
use crate::socket::{self, Patience};
use crate::transport::Transport;
use crate::{ConnectError, ConnectOptions, Result, tls};

/// Messages of a server until it is ready, parameters and notices not counted; a stock one sends five to ten.
const MAX_STARTUP_MESSAGES: usize = 64;

/// With or without TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encryption {
    Plain,
    Tls,
    /// With, unless the server says that it cannot.
    TlsIfOffered,
}

impl Connection {
    /// Connects to the first server of `options` that is there and fits `target_session_attrs`.
    ///
    /// Waits: `connect_timeout` or [`ConnectOptions::give_up_after`] for each address, for ever without them, but see
    /// [`ConnectOptions::interrupt_with`]. Looking up a host name is not within the timeout, as in libpq.
    ///
    /// # Errors
    /// [`ConnectError::Open`] with every address that was tried, [`ConnectError::Interrupted`], or
    /// [`ConnectError::Config`] for files named in the options.
    pub fn open(options: &ConnectOptions) -> Result<Connection> {
        let targets: &[TargetSession] = match options.target {
            TargetSession::PreferStandby => &[TargetSession::Standby, TargetSession::Any],
            ref target => std::slice::from_ref(target),
        };
        let mut hosts: Vec<&Host> = options.hosts.iter().collect();
        if options.load_balance {
            shuffle(&mut hosts);
        }
        let mut attempts = Vec::new();
        for target in targets {
            for host in &hosts {
                // To look up a name takes as long as it takes: not another one, then.
                Patience { deadline: None, interrupt: options.interrupt.clone() }.check()?;
                let mut addresses = match addresses(host) {
                    Ok(addresses) => addresses,
                    Err(error) => {
                        attempts.push(FailedAttempt { peer: host.peer(), error });
                        continue;
                    }
                };
                if options.load_balance {
                    shuffle(&mut addresses);
                }
                for address in &addresses {
                    if let Some(connection) = open_address(options, host, address, *target, &mut attempts)? {
                        return Ok(connection);
                    }
                }
            }
        }
        Err(ConnectError::Open(attempts))
    }
}

/// It starts up, shuts down or is a standby that lets nobody in; another may.
const CANNOT_CONNECT_NOW: &str = "57P03";

/// Where a host may be. At least one address.
fn addresses(host: &Host) -> Result<Vec<SockAddr>> {
    if host.is_unix() {
        return Ok(vec![socket::unix_address(&host.host, host.port)?]);
    }
    if let Some(address) = &host.hostaddr {
        let parsed: IpAddr = address
            .parse()
            .map_err(|_| ConnectError::Config(format!("could not parse network address \"{address}\"").into()))?;
        return Ok(vec![SocketAddr::new(parsed, host.port).into()]);
    }
    let name = &host.host;
    let found = (name.as_str(), host.port).to_socket_addrs().map(|found| found.map(SockAddr::from).collect::<Vec<_>>());
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(ConnectError::Config(format!("could not translate host name \"{name}\" to address").into())),
        Err(error) => Err(ConnectError::Io { operation: "translate host name to address", source: error }),
    }
}

/// Tries an address, with and without TLS as `sslmode` says. `None`: the next one may be better. An error: a server was
/// there and refused us for who we are, and libpq tries no other either.
fn open_address(
    options: &ConnectOptions,
    host: &Host,
    address: &SockAddr,
    target: TargetSession,
    attempts: &mut Vec<FailedAttempt>,
) -> Result<Option<Connection>> {
    // Nobody listens in on a unix socket: sslmode has no meaning there (init_allowed_encryption_methods).
    let ways: &[Encryption] = match options.ssl.mode {
        _ if host.is_unix() => &[Encryption::Plain],
        SslMode::Disable => &[Encryption::Plain],
        SslMode::Allow => &[Encryption::Plain, Encryption::Tls],
        SslMode::Prefer => &[Encryption::TlsIfOffered, Encryption::Plain],
        _ => &[Encryption::Tls],
    };
    let patience = Patience {
        deadline: options.timeout().map(|timeout| Instant::now() + timeout),
        interrupt: options.interrupt.clone(),
    };
    for &way in ways {
        let mut used = way;
        let opened = open_session(options, host, address, &mut used, &patience);
        let error = match opened.and_then(|connection| check_target(connection, target)) {
            Ok(connection) => return Ok(Some(connection)),
            Err(error @ (ConnectError::Interrupted | ConnectError::Config(_))) => return Err(error),
            Err(error) => error,
        };
        // Whether TLS is used makes a difference only to a server that was there, and refused us, and once. What we refuse, or a server of
        // another kind, is no better without.
        let settled = match &error {
            ConnectError::Timeout | ConnectError::Io { operation: socket::CONNECT, .. } => true,
            ConnectError::Target(_) | ConnectError::Auth(_) => true,
            ConnectError::Server(message) => message.is(CANNOT_CONNECT_NOW),
            _ => false,
        };
        let last =
            settled || way == ways[ways.len() - 1] || (way == Encryption::TlsIfOffered && used == Encryption::Plain);
        let fatal = match &error {
            ConnectError::Server(message) => !message.is(CANNOT_CONNECT_NOW),
            ConnectError::Auth(_) => true,
            _ => false,
        };
        attempts.push(FailedAttempt { peer: host.peer(), error });
        if last && fatal {
            return Err(ConnectError::Open(std::mem::take(attempts)));
        }
        if last {
            break;
        }
    }
    Ok(None)
}

/// Sets `way` to what it came to.
fn open_session(
    options: &ConnectOptions,
    host: &Host,
    address: &SockAddr,
    way: &mut Encryption,
    patience: &Patience,
) -> Result<Connection> {
    let socket = socket::connect(address, &options.tcp, patience)?;
    if let (Some(user), true) = (&options.requirepeer, host.is_unix()) {
        socket::check_peer(&socket, user)?;
    }
    if *way != Encryption::Plain && !options.ssl.direct && !ask_for_tls(&socket, patience)? {
        if *way == Encryption::Tls {
            return Err(ConnectError::Tls("server does not support SSL, but SSL was required".into()));
        }
        *way = Encryption::Plain;
    }
    let (transport, security) = match way {
        Encryption::Plain => {
            // Nor did it request one here.
            let refusal = (options.ssl.cert_mode == CertMode::Require).then_some(tls::NO_CERTIFICATE_REQUESTED);
            (Transport::Plain(socket), Security { refusal, ..Security::default() })
        }
        _ => {
            let (tls, security) = tls::establish(socket, &options.ssl, host, patience)?;
            (Transport::Tls(Box::new(tls)), security)
        }
    };
    let mut connection = Connection::new(transport, host.peer(), patience.clone());
    start_up(&mut connection, options, host, security)?;
    connection.set_ready();
    Ok(connection)
}

/// Sends an SSLRequest. Exactly one byte is read: what follows it is for TLS, or someone in between has put it there.
fn ask_for_tls(mut socket: &Socket, patience: &Patience) -> Result<bool> {
    // Into an empty socket buffer.
    socket.write_all(&frontend::SSL_REQUEST).map_err(|error| ConnectError::io("send SSL negotiation packet", error))?;
    let mut answer = [0];
    loop {
        match socket.read(&mut answer) {
            Ok(0) => return Err(ConnectError::Closed),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::WouldBlock => patience.wait(socket.as_fd(), true, false)?,
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(ConnectError::io("receive data from server", error)),
        }
    }
    match answer[0] {
        b'S' => Ok(true),
        b'N' => Ok(false),
        // Its text could be anyone's, and is not shown (CVE-2024-10977).
        b'E' => Err(ConnectError::Protocol("server sent an error response during SSL exchange".to_owned())),
        other => Err(ConnectError::Protocol(format!("received invalid response to SSL negotiation: 0x{other:02x}"))),
    }
}

/// Startup message, authentication, parameters, until ReadyForQuery.
fn start_up(connection: &mut Connection, options: &ConnectOptions, host: &Host, security: Security) -> Result<()> {
    let parameters: Vec<(&str, &str)> = options.startup.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let (newest, oldest) = options.protocol;
    frontend::startup(connection.output(), newest, &parameters);
    let mut authenticator = Authenticator::new(&options.user, host.password.as_deref(), &options.auth, security);
    let mut authenticated = false;
    for _ in 0..MAX_STARTUP_MESSAGES {
        let (tag, range) = connection.receive_startup()?;
        match tag {
            b'E' => return Err(ConnectError::Server(ServerMessage::parse(connection.body(range))?)),
            b'R' if !authenticated => {
                let mut answer = Vec::new();
                authenticated = authenticator.answer(&Authentication::parse(connection.body(range))?, &mut answer)?;
                connection.output().extend(answer);
            }
            b'v' if !authenticated => {
                let (version, unknown) = backend::negotiate_protocol_version(connection.body(range))?;
                if version < oldest || version > newest || !unknown.is_empty() {
                    let text = format!("server offers protocol {}.{} only", version >> 16, version & 0xffff);
                    return Err(ConnectError::Protocol(text));
                }
            }
            // The key with which a query could be cancelled.
            b'K' if authenticated => (),
            b'Z' if authenticated => return Ok(()),
            other => return Err(WireError::Unexpected(other).into()),
        }
    }
    Err(ConnectError::Protocol("server sent too many messages before it was ready".to_owned()))
}

/// Is it a server of the kind that was asked for? Servers since 14 tell by parameters.
fn check_target(connection: Connection, target: TargetSession) -> Result<Connection> {
    let is_on = |name| connection.parameter(name) == Some("on");
    let (standby, read_only) = (is_on("in_hot_standby"), is_on("default_transaction_read_only"));
    let reason = match target {
        TargetSession::ReadWrite if standby || read_only => "session is read-only",
        TargetSession::ReadOnly if !standby && !read_only => "session is not read-only",
        TargetSession::Primary if standby => "server is in hot standby mode",
        TargetSession::Standby if !standby => "server is not in hot standby mode",
        _ => return Ok(connection),
    };
    Err(ConnectError::Target(reason))
}

/// In any order, for `load_balance_hosts=random`. The standard library seeds its hash tables at random; more is not needed.
fn shuffle<T>(items: &mut [T]) {
    use std::hash::{BuildHasher, RandomState};
    let state = RandomState::new();
    for at in (1..items.len()).rev() {
        items.swap(at, state.hash_one(at) as usize % (at + 1));
    }
}
