//! Headers of tar archives as PostgreSQL writes them (`tarCreateHeader`, `port/tar.c`, PostgreSQL 18): ustar, names of at most
//! 99 bytes, without the prefix field.

/// What fits into no header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLong {
    /// A name.
    #[error("file name too long for tar format: \"{0}\"")]
    Name(String),
    /// The target of a link of this name.
    #[error("symbolic link target too long for tar format: file name \"{0}\", target \"{1}\"")]
    Target(String, String),
}

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use walrider_datadir::DataDirError;

/// Bytes of a block: a header, and what contents are padded to (`TAR_BLOCK_SIZE`).
pub const BLOCK: usize = 512;
/// The longest name, in bytes: one more ends it.
const MAX_NAME: usize = 99;
/// Bytes of zeros at the end of an archive.
pub const END: usize = 2 * BLOCK;

/// What a header is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member<'a> {
    /// A file of so many bytes.
    File(u64),
    /// A directory.
    Directory,
    /// A link to there.
    Link(&'a [u8]),
}

/// Who owns a member, who may do what with it, and when it was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions.
    pub mode: u32,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime: i64,
}

impl Attributes {
    /// Those of a file.
    pub fn of(metadata: &Metadata) -> Attributes {
        Attributes { mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), mtime: metadata.mtime() }
    }

    /// Those of the files that a server makes in a data directory.
    ///
    /// # Errors
    /// It is not there.
    pub fn of_new_files(data_dir: &Path) -> Result<Attributes, DataDirError> {
        let of_root =
            std::fs::metadata(data_dir).map_err(|error| DataDirError::io("stat directory", data_dir, error))?;
        let of_root = Attributes::of(&of_root);
        let mode = if of_root.mode & 0o050 == 0o050 { 0o640 } else { 0o600 };
        Ok(Attributes { mode, mtime: now(), ..of_root })
    }
}

/// Now, in seconds since 1970.
pub(crate) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

/// A header.
///
/// # Errors
/// A name or a link's target is too long.
pub fn header(name: &[u8], member: Member<'_>, attributes: Attributes) -> Result<[u8; BLOCK], TooLong> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    if name.len() > MAX_NAME {
        return Err(TooLong::Name(text(name)));
    }
    let mut header = [0; BLOCK];
    header[..name.len()].copy_from_slice(name);
    let (kind, size) = match member {
        Member::File(size) => (b'0', size),
        Member::Directory => (b'5', 0),
        Member::Link(target) if target.len() > MAX_NAME => {
            return Err(TooLong::Target(text(name), text(target)));
        }
        Member::Link(target) => {
            header[157..157 + target.len()].copy_from_slice(target);
            (b'2', 0)
        }
    };
    if kind != b'0' {
        // Over the last byte of the longest name, as PostgreSQL does it.
        header[name.len().min(MAX_NAME - 1)] = b'/';
    }
    number(&mut header[100..108], u64::from(attributes.mode & 0o7777));
    number(&mut header[108..116], u64::from(attributes.uid));
    number(&mut header[116..124], u64::from(attributes.gid));
    number(&mut header[124..136], size);
    number(&mut header[136..148], attributes.mtime.max(0) as u64);
    header[156] = kind;
    header[257..262].copy_from_slice(b"ustar");
    header[263..265].copy_from_slice(b"00");
    for owner in [265, 297] {
        header[owner..owner + 8].copy_from_slice(b"postgres");
    }
    number(&mut header[329..337], 0);
    number(&mut header[337..345], 0);
    // The sum counts its own field as spaces.
    header[148..156].fill(b' ');
    let sum = header.iter().map(|&byte| u64::from(byte)).sum();
    number(&mut header[148..156], sum);
    Ok(header)
}

/// Octal digits and a space; or, where they do not fit, all bits, with the first one set (`print_tar_number`).
fn number(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    if value >> (3 * digits) != 0 {
        for (at, byte) in field.iter_mut().rev().enumerate() {
            *byte = if at < 8 { (value >> (8 * at)) as u8 } else { 0 };
        }
        field[0] |= 0x80;
        return;
    }
    for (at, byte) in field[..digits].iter_mut().rev().enumerate() {
        *byte = b'0' + (value >> (3 * at) & 7) as u8;
    }
    field[digits] = b' ';
}

/// Bytes of zeros after so many bytes of contents.
pub fn padding(len: u64) -> usize {
    (len.wrapping_neg() % BLOCK as u64) as usize
}

/// Bytes that a member takes.
pub fn size(member: Member<'_>) -> u64 {
    match member {
        Member::File(len) => BLOCK as u64 + len + padding(len) as u64,
        _ => BLOCK as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Attributes = Attributes { mode: 0o100_600, uid: 70, gid: 1 << 22, mtime: 1_700_000_000 };

    /// The system's tar reads it.
    fn listed(archive: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.tar");
        std::fs::write(&file, archive).unwrap();
        let tar =
            std::process::Command::new("tar").args(["--numeric-owner", "-tvf"]).arg(&file).env("TZ", "UTC").output();
        let Ok(tar) = tar else { return String::new() };
        assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
        String::from_utf8(tar.stdout).unwrap()
    }

    #[test]
    fn members_are_read_by_tar() {
        let mut archive = Vec::new();
        archive.extend(header(b"base/5/1259", Member::File(3), PLAIN).unwrap());
        archive.extend(b"abc");
        archive.extend(vec![0; padding(3)]);
        archive.extend(header(b"pg_wal", Member::Directory, Attributes { mode: 0o40_700, ..PLAIN }).unwrap());
        archive.extend(header(b"pg_tblspc/20000", Member::Link(b"/some/where"), PLAIN).unwrap());
        assert_eq!(archive.len() as u64, size(Member::File(3)) + 2 * size(Member::Directory));
        archive.extend([0; END]);
        let listed = listed(&archive);
        if listed.is_empty() {
            return;
        }
        let lines: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["-rw-------", "70/4194304", "3", "2023-11-14", "22:13", "base/5/1259"]);
        assert_eq!((lines[1][0], lines[1][5]), ("drwx------", "pg_wal/"));
        assert_eq!(lines[2][5..], ["pg_tblspc/20000/", "->", "/some/where"]);
    }

    #[test]
    fn numbers_that_do_not_fit_are_binary() {
        let mut field = [0; 12];
        number(&mut field, 0o77_777_777_777);
        assert_eq!(&field, b"77777777777 ");
        number(&mut field, 1 << 33);
        assert_eq!(field, [0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let long = [b'x'; 100];
        assert!(header(&long[1..], Member::Directory, PLAIN).is_ok());
        assert!(header(&long, Member::File(0), PLAIN).unwrap_err().to_string().contains("too long for tar format"));
        assert!(header(b"x", Member::Link(&long), PLAIN).unwrap_err().to_string().contains("symbolic link target"));
        assert_eq!((padding(0), padding(1), padding(512), padding(513)), (0, 511, 0, 511));
    }
}
