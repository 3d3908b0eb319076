//! A server of its own for each test, stopped when dropped.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use walrider_session::{ConnectOptions, Connection};

/// Options from this string alone: nothing of the caller's environment.
pub fn resolve(conninfo: &str) -> ConnectOptions {
    let env = |name: &str| (name == "HOME").then(|| "/nonexistent".to_owned());
    ConnectOptions::resolve_with(conninfo, "walrider", &env).unwrap_or_else(|error| panic!("{conninfo}: {error}"))
}

pub fn connect(conninfo: &str) -> Connection {
    Connection::open(&resolve(conninfo)).unwrap_or_else(|error| panic!("{conninfo}: {error}"))
}

/// What is said when there is no connection.
pub fn failure(conninfo: &str) -> String {
    match Connection::open(&resolve(conninfo)) {
        Ok(_) => panic!("{conninfo} is a connection"),
        Err(error) => error.to_string(),
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn run(program: &str, arguments: &[&str]) -> Output {
    let bindir = std::env::var("PG_BINDIR").expect("PG_BINDIR must name the directory of initdb, pg_ctl, psql");
    let mut command = Command::new(Path::new(&bindir).join(program));
    command.args(arguments).env("LC_ALL", "C").env("PGCONNECT_TIMEOUT", "30");
    command.output().expect("the program starts")
}

fn run_ok(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text.trim_end().to_owned()
}

/// A cluster, running.
pub struct Server {
    dir: TempDir,
    port: u16,
}

impl Server {
    /// With these settings, and this pg_hba.conf unless it is empty: then everyone is trusted.
    pub fn start(settings: &str, hba: &str) -> Server {
        let server = Server { dir: tempfile::tempdir().unwrap(), port: free_port() };
        run_ok(
            "initdb",
            &["-D", server.data_str(), "-U", "postgres", "-A", "trust", "--no-sync", "--no-locale", "-E", "UTF8"],
        );
        if !hba.is_empty() {
            server.set_hba(hba);
        }
        let socket = server.dir.path().display();
        let port = server.port;
        server.configure(&format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{socket}'\n\
             fsync = off\nshared_buffers = 16MB\n{settings}\n"
        ));
        server.start_again();
        server
    }

    /// Who may connect, from the next start on.
    pub fn set_hba(&self, text: &str) {
        fs::write(self.data().join("pg_hba.conf"), text).unwrap();
    }

    pub fn configure(&self, text: &str) {
        let conf = self.data().join("postgresql.conf");
        fs::write(&conf, fs::read_to_string(&conf).unwrap() + text).unwrap();
    }

    pub fn start_again(&self) {
        let log = self.dir.path().join("log");
        let log = log.to_str().unwrap();
        let output = run("pg_ctl", &["start", "-w", "-D", self.data_str(), "-l", log]);
        assert!(output.status.success(), "{}", fs::read_to_string(log).unwrap_or_default());
    }

    /// Stops it, and makes it a primary on the next timeline.
    pub fn promote(&self) {
        self.stopper()("fast");
        fs::write(self.data().join("standby.signal"), "").unwrap();
        self.start_again();
        run_ok("pg_ctl", &["promote", "-w", "-D", self.data_str()]);
    }

    pub fn stopper(&self) -> impl Fn(&str) + Send + 'static + use<> {
        let data = self.data_str();
        move |mode| drop(run_ok("pg_ctl", &["stop", "-w", "-D", data, "-m", mode]))
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn data_str(&self) -> &'static str {
        self.data().to_str().unwrap().to_owned().leak()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where everything of it is.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn unix_no_user(&self) -> String {
        format!("host={} port={}", self.dir.path().display(), self.port)
    }

    pub fn unix(&self, more: &str) -> String {
        format!("{} user=postgres {more}", self.unix_no_user())
    }

    pub fn tcp(&self, more: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres sslmode=disable {more}", self.port)
    }

    pub fn major(&self) -> u32 {
        let version: u32 = self.sql("SHOW server_version_num").parse().unwrap();
        version / 10_000
    }

    /// Who runs these tests.
    pub fn os_user(&self) -> String {
        let output = Command::new("id").arg("-un").output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Rows of one column are lines.
    pub fn sql(&self, sql: &str) -> String {
        let host = self.dir.path().to_str().unwrap();
        let port = self.port.to_string();
        run_ok("psql", &["-XAtq", "-h", host, "-p", &port, "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-c", sql])
    }

    /// Until a query gives this.
    pub fn wait_for(&self, sql: &str, expected: &str) {
        let end = Instant::now() + Duration::from_secs(30);
        while self.sql(sql) != expected {
            assert!(Instant::now() < end, "{sql} is not {expected}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.data().join("postmaster.pid").exists() {
            run("pg_ctl", &["stop", "-w", "-D", self.data_str(), "-m", "immediate"]);
        }
    }
}
