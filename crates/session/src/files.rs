//! What libpq finds in the user's home: service file, password file, the user's name.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{User, getuid};
use rustix::fs::OFlags;
use walrider_wire::conninfo::{ConnInfo, pgpass};

use crate::{ConnectError, Reason, Result};

/// No file of these is longer, in bytes.
const LONGEST: u64 = 4 << 20;

/// Reads variables of the environment; tests have their own.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The home directory (`pqGetHomeDirectory`).
pub(crate) fn home(env: Env<'_>) -> Option<PathBuf> {
    match env("HOME").filter(|home| !home.is_empty()) {
        Some(home) => Some(home.into()),
        None => User::from_uid(getuid()).ok().flatten().map(|user| user.dir),
    }
}

/// The name of the operating system's user who runs this program.
pub(crate) fn os_user() -> Result<String> {
    match User::from_uid(getuid()) {
        Ok(Some(user)) => Ok(user.name),
        _ => Err(ConnectError::Config(format!("local user with ID {} does not exist; give \"user\"", getuid()).into())),
    }
}

/// Reads a whole file, if it is one and not absurdly long.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe would wait for its other end otherwise.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > LONGEST {
        return Err(io::Error::other("it is not a plain file of reasonable length"));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The parameters of a service, from the user's file or else the system's (`parseServiceInfo`).
pub(crate) fn service(name: &str, env: Env<'_>) -> Result<ConnInfo> {
    let own = match env("PGSERVICEFILE") {
        Some(file) => Some(PathBuf::from(file)),
        None => home(env).map(|home| home.join(".pg_service.conf")).filter(|path| path.exists()),
    };
    let system = env("PGSYSCONFDIR").map(|dir| Path::new(&dir).join("pg_service.conf")).filter(|path| path.exists());
    for path in own.into_iter().chain(system) {
        let shown = path.display().to_string();
        let unreadable =
            |error| ConnectError::Config(Reason::of(format_args!("service file \"{shown}\" could not be read"), error));
        let text = read(&path).map_err(unreadable)?;
        if let Some(found) = ConnInfo::service(&String::from_utf8_lossy(&text), name, &shown)? {
            return Ok(found);
        }
    }
    Err(ConnectError::Config(format!("definition of service \"{name}\" not found").into()))
}

/// The text of a password file, if there is one that only its owner can read. Otherwise empty, with a warning unless
/// there is none (`passwordFromFile`).
pub(crate) fn password_file(path: &Path, warnings: &mut Vec<String>) -> String {
    let Ok(metadata) = path.metadata() else { return String::new() };
    let shown = path.display();
    if !metadata.is_file() {
        warnings.push(format!("password file \"{shown}\" is not a plain file"));
        return String::new();
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        warnings.push(format!(
            "password file \"{shown}\" has group or world access; permissions should be u=rw (0600) or less"
        ));
        return String::new();
    }
    match read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => {
            warnings.push(format!("password file \"{shown}\" could not be read: {error}"));
            String::new()
        }
    }
}

/// The password for a database of a server, from the text of a password file.
pub(crate) fn password(text: &str, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
    let host = if DEFAULT_SOCKET_DIRECTORIES.contains(&host) { "localhost" } else { host };
    pgpass::lookup(text, host, &port.to_string(), database, user)
}

/// Where servers put their sockets by default: as PostgreSQL is built by itself, and by Debian and Red Hat.
const DEFAULT_SOCKET_DIRECTORIES: [&str; 3] = ["/tmp", "/var/run/postgresql", "/run/postgresql"];

/// The directory to look for a socket in when no host is given: the first that has one.
pub(crate) fn default_socket_directory(port: u16) -> &'static str {
    let has_socket = |directory: &&str| Path::new(directory).join(format!(".s.PGSQL.{port}")).exists();
    DEFAULT_SOCKET_DIRECTORIES.into_iter().find(has_socket).unwrap_or(DEFAULT_SOCKET_DIRECTORIES[0])
}

/// A private key must be readable by its owner only; by root's group too if root owns it (`initialize_SSL`).
pub(crate) fn check_key_permissions(path: &Path) -> Result<()> {
    let shown = path.display();
    let metadata = path.metadata().map_err(|error| {
        ConnectError::Tls(Reason::of(format_args!("could not stat private key file \"{shown}\""), error))
    })?;
    let (mode, owner) = (metadata.permissions().mode(), metadata.uid());
    let allowed = if owner == 0 { 0o640 } else { 0o600 };
    if !metadata.is_file() {
        return Err(ConnectError::Tls(format!("private key file \"{shown}\" is not a regular file").into()));
    }
    if mode & 0o777 & !allowed != 0 {
        return Err(ConnectError::Tls(format!(
            "private key file \"{shown}\" has group or world access; file must have permissions u=rw (0600) or less if \
             owned by the current user, or permissions u=rw,g=r (0640) or less if owned by root"
        ).into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_password_file_that_others_can_read_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pgpass");
        let mut warnings = Vec::new();
        assert_eq!(password_file(&path, &mut warnings), "");
        assert!(warnings.is_empty());
        fs::write(&path, "localhost:*:replication:u:p\nlocalhost:*:shop:u:q").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(password_file(&path, &mut warnings), "");
        assert!(warnings.pop().unwrap().contains("group or world access"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let text = password_file(&path, &mut warnings);
        assert_eq!(password(&text, "/tmp", 5432, "replication", "u").as_deref(), Some("p"));
        assert_eq!(password(&text, "/tmp", 5432, "shop", "u").as_deref(), Some("q"));
        assert_eq!(password(&text, "/elsewhere", 5432, "replication", "u"), None);
        assert_eq!(password_file(dir.path(), &mut warnings), "");
        assert!(warnings.pop().unwrap().contains("not a plain file"));
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("not a plain file"));
    }
}
