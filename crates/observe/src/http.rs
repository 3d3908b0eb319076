//! `/metrics`, `/health` and `/status`, or other pages, over HTTP, in a thread of their own.
//!
//! Anyone who reaches the port may ask; nothing can be changed through it. What a client can take is bounded: connections,
//! the size of a request, and the time that one may last.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};

use crate::Observed;
use crate::health::Limits;

/// Connections at one time; more wait to be accepted. Scrapers and load balancers open a few.
const MAX_CONNECTIONS: usize = 64;
/// Longest head of a request in bytes.
const MAX_HEAD: usize = 16 << 10;
/// How long a connection may last: one request and its answer, also to a slow reader. So those who hold all connections
/// and say nothing keep others out for this long at most.
const MAX_TIME: Duration = Duration::from_secs(5);

/// Makes the snapshot that a request is answered from. It is called in the thread that serves, so it must not wait.
pub type Provider<S> = Arc<dyn Fn() -> S + Send + Sync>;

/// Answers a request for a path, with the query behind it. It is called in the thread that serves, so it must not wait.
pub type Pages = Arc<dyn Fn(&str, Option<&str>) -> Answer + Send + Sync>;

/// The port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("could not listen on \"{address}\": {source}; name a free address and port of this host")]
pub struct HttpError {
    address: String,
    source: io::Error,
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Handle {
    address: SocketAddr,
    stop: Option<oneshot::Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Where it listens; with the port that was chosen where 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and ends no more than the port.
            let _ = thread.join();
        }
    }
}

/// Listens on `address`, as in `127.0.0.1:9187`, and answers in a thread of its own, at most so many `connections` at a time.
///
/// # Errors
/// If it cannot listen there.
pub fn serve<S: Observed>(address: &str, provider: Provider<S>, connections: usize) -> Result<Handle, HttpError> {
    serve_pages(address, Arc::new(move |path, query| answer(path, query, &*provider)), connections)
}

/// The same for other pages.
///
/// # Errors
/// If it cannot listen there.
pub fn serve_pages(address: &str, pages: Pages, connections: usize) -> Result<Handle, HttpError> {
    let failed = |source| HttpError { address: address.to_owned(), source };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().map_err(failed)?;
    let listener = {
        let _context = runtime.enter();
        TcpListener::from_std(listener).map_err(failed)?
    };
    let (stop, stopped) = oneshot::channel::<Infallible>();
    let serve = move || {
        runtime.spawn(accept(listener, pages, connections));
        // It only ever ends by the sender's end; with the runtime go all connections.
        let _ = runtime.block_on(stopped);
    };
    let thread = std::thread::Builder::new().name("http".into()).spawn(serve).map_err(failed)?;
    Ok(Handle { address: bound, stop: Some(stop), thread: Some(thread) })
}

async fn accept(listener: TcpListener, pages: Pages, connections: usize) {
    let room = Arc::new(Semaphore::new(connections.min(MAX_CONNECTIONS)));
    loop {
        let place = room.clone().acquire_owned().await.expect("it is never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let pages = pages.clone();
                tokio::spawn(async move {
                    // Clients that are slow, send nonsense or go away: nobody needs to know.
                    let _ = tokio::time::timeout(MAX_TIME, converse(stream, pages)).await;
                    drop(place);
                });
            }
            // Out of file descriptors, most likely: others need them more.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// One request, one answer.
async fn converse(stream: TcpStream, pages: Pages) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = match *request.method() {
            Method::GET | Method::HEAD => pages(request.uri().path(), request.uri().query()),
            _ => Answer::text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD"),
        };
        std::future::ready(Ok::<_, Infallible>(answer.into_response()))
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// What a request gets.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    content_type: &'static str,
    policy: Option<&'static str>,
    body: String,
}

impl Answer {
    fn text(status: StatusCode, body: impl Into<String>) -> Answer {
        Answer { status, body: body.into() + "\n", ..Answer::ok("text/plain; charset=utf-8", String::new()) }
    }

    /// A page of this type.
    pub fn ok(content_type: &'static str, body: String) -> Answer {
        Answer { status: StatusCode::OK, content_type, policy: None, body }
    }

    /// Metrics in the text format of Prometheus.
    pub fn metrics(body: String) -> Answer {
        Answer::ok("text/plain; version=0.0.4; charset=utf-8", body)
    }

    /// An HTML page under a `Content-Security-Policy`.
    pub fn html(policy: &'static str, body: String) -> Answer {
        Answer { policy: Some(policy), ..Answer::ok("text/html; charset=utf-8", body) }
    }

    /// There is no such page; the words say what there is.
    pub fn not_found(words: &str) -> Answer {
        Answer::text(StatusCode::NOT_FOUND, words)
    }

    fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(Bytes::from(self.body)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(policy) = self.policy {
            headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
            headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        }
        if self.status == StatusCode::METHOD_NOT_ALLOWED {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }
}

fn answer<S: Observed>(path: &str, query: Option<&str>, status: &dyn Fn() -> S) -> Answer {
    match path {
        "/metrics" => Answer::metrics(status().metrics()),
        "/status" => Answer::ok("application/json", format!("{:#}\n", status().to_json())),
        "/health" => match Limits::parse(query.unwrap_or_default()) {
            Err(reason) => Answer::text(StatusCode::BAD_REQUEST, reason),
            Ok(limits) => match status().health(&limits) {
                Ok(()) => Answer::text(StatusCode::OK, "ok"),
                Err(reason) => Answer::text(StatusCode::SERVICE_UNAVAILABLE, reason),
            },
        },
        _ => Answer::not_found("there is /metrics, /health and /status"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::metrics;
    use crate::status::StandbyStatus;
    use crate::status::State;
    use crate::status::tests::streaming;

    fn started() -> Handle {
        serve("127.0.0.1:0", Arc::new(streaming), MAX_CONNECTIONS).unwrap()
    }

    /// What comes back until the server closes; and whether it closed within the time that a test has.
    fn send(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // It may answer and close before it has read everything.
        let _ = stream.write_all(request);
        read(&mut stream)
    }

    fn read(stream: &mut TcpStream) -> String {
        let mut bytes = Vec::new();
        match stream.read_to_end(&mut bytes) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!("not closed: {error}"),
            _ => String::from_utf8(bytes).unwrap(),
        }
    }

    fn get(address: SocketAddr, path: &str) -> (u16, String) {
        let answer = send(address, format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    #[test]
    fn the_three_pages() {
        let server = started();
        // What the system tells of the process differs each time.
        let ours = |text: &str| text.split("# HELP process_").next().map(str::to_owned);
        let (code, text) = get(server.address(), "/metrics");
        assert_eq!((code, ours(&text)), (200, ours(&metrics::render(&streaming()))));
        assert!(text.contains("\nprocess_open_fds "), "{text}");
        let (code, body) = get(server.address(), "/status");
        assert_eq!((code, serde_json::from_str::<serde_json::Value>(&body).unwrap()), (200, streaming().to_json()));
        assert_eq!(get(server.address(), "/health"), (200, "ok\n".into()));
        assert_eq!(get(server.address(), "/health?max_lag_bytes=1").0, 503);
        assert_eq!(get(server.address(), "/health?max_lag_byte=1").0, 400);
        for path in ["/", "/metrics/", "/status/x", "//health", "/%6detrics"] {
            assert_eq!(get(server.address(), path).0, 404, "{path}");
        }
    }

    #[test]
    fn only_reading() {
        let server = started();
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "BREW"] {
            let answer = send(server.address(), format!("{method} /status HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
            assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("allow: GET, HEAD\r\n"), "{answer}");
        }
        let head = send(server.address(), b"HEAD /health HTTP/1.0\r\n\r\n");
        assert!(head.starts_with("HTTP/1.0 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    }

    #[test]
    fn nonsense_and_more_than_there_is_room_for() {
        let server = started();
        let long_line = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20));
        let long_header = format!("GET /status HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
        let many_headers = format!("GET /status HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(1000));
        for request in [&long_line, &long_header, &many_headers, "\0\x01\r\n\r\n", "GET\r\n\r\n"] {
            let answer = send(server.address(), request.as_bytes());
            // Where the request was not read to its end, the connection is reset, and the answer may be lost.
            assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
        }
        assert_eq!(get(server.address(), "/health").0, 200);
    }

    /// Connections that say nothing, or a letter now and then, are closed; and meanwhile those of others are served as
    /// soon as there is room.
    #[test]
    fn slow_clients_are_dropped() {
        let server = started();
        let begun = Instant::now();
        let mut idle: Vec<TcpStream> =
            (0..MAX_CONNECTIONS).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
        for stream in &mut idle {
            stream.write_all(b"GET /sta").unwrap();
        }
        assert_eq!(get(server.address(), "/health").0, 200);
        assert!(begun.elapsed() < 4 * MAX_TIME, "{:?}", begun.elapsed());
        for stream in &mut idle {
            stream.set_read_timeout(Some(4 * MAX_TIME)).unwrap();
            read(stream);
        }
    }

    #[test]
    fn many_at_once_and_the_provider_may_panic() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let provider = move || {
            assert!(counted.fetch_add(1, Ordering::Relaxed) != 0, "the first one fails");
            StandbyStatus { state: State::Failed, ..streaming() }
        };
        let server = serve("127.0.0.1:0", Arc::new(provider), MAX_CONNECTIONS).unwrap();
        assert_eq!(send(server.address(), b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"), "");
        std::thread::scope(|scope| {
            for _ in 0..2 * MAX_CONNECTIONS {
                scope.spawn(|| assert_eq!(get(server.address(), "/health").0, 503));
            }
        });
        assert_eq!(calls.load(Ordering::Relaxed), 1 + 2 * MAX_CONNECTIONS);
    }

    #[test]
    fn its_end_frees_the_port() {
        let server = started();
        let address = server.address();
        let mut open = TcpStream::connect(address).unwrap();
        assert_eq!(get(address, "/health").0, 200);
        let error = serve(&address.to_string(), Arc::new(streaming), MAX_CONNECTIONS).unwrap_err().to_string();
        assert!(error.contains(&format!("could not listen on \"{address}\"")), "{error}");
        drop(server);
        open.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        read(&mut open);
        assert!(TcpStream::connect(address).is_err());
    }
}
