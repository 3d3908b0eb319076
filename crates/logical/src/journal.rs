//! The file of `walrider logical stream --file`: lines of [`crate::json`], which after any crash go on as if there had been none.
//!
//! The file begins with a line that says of which slot it is. Lines are appended; the publisher is told of a position only when
//! the lines before it are durable. What comes after the last line that completes something may be half of a line or of a
//! transaction: it is cut off before more is written, and the publisher is asked to go on at that line's position.
//! [`Message::complete_at`](crate::message::Message::complete_at) is that position, and the lines say it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use walrider_layout::Lsn;

/// The longest line, in bytes, that may complete something: those have a global transaction id at most. Messages may be longer, but
/// then they are looked for from the front.
const MAX_END_LINE: u64 = 4096;
/// How the file begins.
const FIRST: &str = "{\"kind\":\"stream\"";
/// How much of the end of the file is read at a time, in bytes.
const BLOCK: u64 = 256 * 1024;

/// Whose changes a file has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Of the publisher's cluster.
    pub system_identifier: u64,
    /// The database.
    pub database: String,
    /// The slot.
    pub slot: String,
}

impl Header {
    /// The first line.
    pub fn line(&self) -> String {
        let Header { system_identifier, database, slot } = self;
        let (database, slot) = (json!(database), json!(slot));
        // As text: it has more digits than a double.
        format!("{FIRST},\"system_identifier\":\"{system_identifier}\",\"database\":{database},\"slot\":{slot}}}\n")
    }

    fn parse(line: &[u8]) -> Option<Header> {
        let value: Value = serde_json::from_slice(line).ok().filter(|value: &Value| value["kind"] == "stream")?;
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let system_identifier = text("system_identifier")?.parse().ok()?;
        Some(Header { system_identifier, database: text("database")?, slot: text("slot")? })
    }
}

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The operating system.
    #[error("could not {operation} file \"{}\": {source}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Somebody writes it.
    #[error("file \"{}\" is being written by another process: stop that one, or name another file", .0.display())]
    InUse(PathBuf),
    /// It is something else.
    #[error("file \"{}\" was not made by \"walrider logical stream\": name another one", .0.display())]
    Foreign(PathBuf),
    /// It is of another slot.
    #[error(
        "file \"{}\" has the changes of slot \"{}\" of database \"{}\", system {}: name another one", path.display(), found.slot,
        found.database, found.system_identifier
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        found: Header,
    },
}

/// A file that is open, and nobody else's.
pub struct Journal {
    path: PathBuf,
    file: File,
    len: u64,
    /// Up to there everything is complete, and what the publisher is to go on from.
    complete: (u64, Lsn),
    /// Something was written and is not durable.
    dirty: bool,
}

impl Journal {
    /// Makes the file, or goes on with it: cuts off what is not complete. What comes after `confirmed`, the position of the slot, may not
    /// have been durable: after a power loss it can have holes, and all from the first one on is cut off.
    ///
    /// # Errors
    /// The file is not ours to write, or the operating system refuses.
    pub fn open(path: &Path, header: &Header, confirmed: Lsn) -> Result<Journal, JournalError> {
        let failed = |operation, source| JournalError::Io { operation, path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|source| failed("open", source))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::InUse(path.to_owned())),
            Err(TryLockError::Error(source)) => return Err(failed("lock", source)),
        }
        let mut journal = Journal { path: path.to_owned(), file, len: 0, complete: (0, Lsn(0)), dirty: false };
        journal.len = journal.file.metadata().map_err(|source| failed("read", source))?.len();
        let first = journal.first_line().map_err(|source| failed("read", source))?;
        match first {
            None => {
                journal.cut_back()?;
                journal.append(header.line().as_bytes())?;
                journal.complete.0 = journal.len;
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                let synced = File::open(parent).and_then(|parent| parent.sync_all());
                synced.map_err(|source| failed("fsync the directory of", source))?;
            }
            Some(first) => {
                let found = Header::parse(&first).ok_or_else(|| JournalError::Foreign(path.to_owned()))?;
                if found != *header {
                    return Err(JournalError::Other { path: path.to_owned(), found });
                }
                let (len, header_len) = (journal.len, first.len() as u64 + 1);
                let complete = complete_and_whole(&mut journal.file, len, confirmed);
                journal.complete = complete.map_err(|source| failed("read", source))?.unwrap_or((header_len, Lsn(0)));
                journal.cut_back()?;
            }
        }
        // What a crash left may not be durable, though it is there.
        journal.dirty = true;
        journal.sync()?;
        Ok(journal)
    }

    /// The first line; `None`: there is none yet, not even by another program.
    fn first_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut front = Vec::new();
        self.file.seek(SeekFrom::Start(0))?;
        (&self.file).take(MAX_END_LINE).read_to_end(&mut front)?;
        let line = front.iter().position(|byte| *byte == b'\n').map(|len| front[..len].to_vec());
        let begun = front.is_empty() || front.starts_with(FIRST.as_bytes()) && front.len() as u64 == self.len;
        Ok(line.or_else(|| (!begun).then_some(front)))
    }

    /// From where the publisher is to go on; zero: from where the slot was left.
    pub fn resume_at(&self) -> Lsn {
        self.complete.1
    }

    /// Appends lines, and nothing else. What the file system does not take is cut off again when it is opened next.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn append(&mut self, lines: &[u8]) -> Result<(), JournalError> {
        self.dirty = true;
        self.file.write_all(lines).map_err(|source| self.failed("write", source))?;
        self.len += lines.len() as u64;
        Ok(())
    }

    /// All that was appended up to so many bytes before the end is complete, with this position.
    pub fn complete(&mut self, before_end: u64, lsn: Lsn) {
        let upto = self.len.checked_sub(before_end).expect("what was appended has a length");
        assert!(upto >= self.complete.0, "{upto} of {:?}", self.complete);
        // What was prepared before the slot was made comes with a position from then.
        self.complete = (upto, lsn.max(self.complete.1));
    }

    /// Makes durable what was appended.
    ///
    /// # Errors
    /// The operating system refuses; then nobody knows what of it is durable, and the file must be opened again.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        if std::mem::take(&mut self.dirty) {
            self.file.sync_data().map_err(|source| self.failed("fsync", source))?;
        }
        Ok(())
    }

    /// Cuts off what is not complete.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn cut_back(&mut self) -> Result<(), JournalError> {
        let upto = self.complete.0;
        let cut = self.file.set_len(upto).and_then(|()| self.file.seek(SeekFrom::Start(upto)));
        cut.map_err(|source| self.failed("cut", source))?;
        self.len = upto;
        self.dirty = true;
        Ok(())
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> JournalError {
        JournalError::Io { operation, path: self.path.clone(), source }
    }
}

/// [`last_complete`] of what has no hole behind the line that says `confirmed`.
fn complete_and_whole(file: &mut (impl Read + Seek), len: u64, confirmed: Lsn) -> io::Result<Option<(u64, Lsn)>> {
    let found = last_complete(file, len, Lsn(u64::MAX))?;
    let Some((end, lsn)) = found.filter(|(_, lsn)| *lsn > confirmed) else { return Ok(found) };
    let durable = last_complete(file, end, confirmed)?.map_or(0, |(end, _)| end);
    let Some(hole) = first_hole(file, durable, end)? else { return Ok(found) };
    tracing::warn!(
        "the file lacks what was not durable when the machine stopped: {} bytes, of transactions up to {lsn}, are cut off and come again",
        len - hole
    );
    last_complete(file, hole, Lsn(u64::MAX))
}

/// Where the first zero byte is: no line has one, and what a file system has not written is zeros.
fn first_hole(file: &mut (impl Read + Seek), from: u64, to: u64) -> io::Result<Option<u64>> {
    let mut block = Vec::new();
    for at in (from..to).step_by(BLOCK as usize) {
        block.resize((to - at).min(BLOCK) as usize, 0);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut block)?;
        if let Some(zero) = block.iter().position(|byte| *byte == 0) {
            return Ok(Some(at + zero as u64));
        }
    }
    Ok(None)
}

/// Where the last line ends that completes something at `upto` or before, and the position that it says.
fn last_complete(file: &mut (impl Read + Seek), len: u64, upto: Lsn) -> io::Result<Option<(u64, Lsn)>> {
    // The end of the line that is being looked at, without its newline; `None` before the first newline from the end.
    let mut line_end = None;
    let mut at = len;
    let mut block = Vec::new();
    while at > 0 {
        let from = at.saturating_sub(BLOCK);
        block.resize((at - from) as usize, 0);
        file.seek(SeekFrom::Start(from))?;
        file.read_exact(&mut block)?;
        for newline in
            block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| from + at as u64)
        {
            let completed = line_end.map(|end| completes(file, newline + 1, end)).transpose()?.flatten();
            if let Some(lsn) = completed.filter(|lsn| *lsn <= upto) {
                return Ok(line_end.map(|end| (end + 1, lsn)));
            }
            line_end = Some(newline);
        }
        at = from;
    }
    Ok(None)
}

/// The position that a line says, if it completes something.
fn completes(file: &mut (impl Read + Seek), start: u64, end: u64) -> io::Result<Option<Lsn>> {
    let mut line = vec![0; (end - start).min(MAX_END_LINE) as usize];
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(&mut line)?;
    Ok(complete_at(&line))
}

/// The same of a line, or of the beginning of a longer one: a message, which says its position before its contents.
fn complete_at(line: &[u8]) -> Option<Lsn> {
    const ENDS: [&[u8]; 6] =
        [b"commit", b"prepare", b"commit_prepared", b"rollback_prepared", b"stream_commit", b"stream_prepare"];
    let kind = line.strip_prefix(b"{\"kind\":\"")?;
    let kind = &kind[..kind.iter().position(|byte| *byte == b'"')?];
    if ENDS.contains(&kind) {
        let value: Value = serde_json::from_slice(line).ok()?;
        return value["end_lsn"].as_str()?.parse().ok();
    }
    let message = line.strip_prefix(b"{\"kind\":\"message\",\"lsn\":\"")?;
    let text = std::str::from_utf8(&message[..message.iter().position(|byte| *byte == b'"')?]).ok()?;
    let lsn: Lsn = text.parse().ok()?;
    Some(Lsn(lsn.0.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Lines;
    use crate::message::{Message, Prepare};

    /// All that was complete was durable.
    const CONFIRMED: Lsn = Lsn(u64::MAX);

    fn header() -> Header {
        Header { system_identifier: u64::MAX, database: "d\"".into(), slot: "s".into() }
    }

    /// The lines of a transaction, and of others that complete something.
    fn lines(commit: u64, change: usize) -> Vec<u8> {
        let mut lines = Lines::new();
        let mut out = Vec::new();
        let (lsn, end) = (Lsn(commit), Lsn(commit + 8));
        let text = "x".repeat(change);
        let content = text.as_bytes();
        for message in [
            Message::Begin { final_lsn: lsn, commit_time: 0, xid: 7 },
            Message::Logical { xid: None, transactional: true, lsn, prefix: "", content },
            Message::Commit { commit_lsn: lsn, end_lsn: end, commit_time: 0 },
        ] {
            lines.write(lsn, &message, &mut out).unwrap();
        }
        out
    }

    #[test]
    fn it_goes_on_after_the_last_complete_line_wherever_it_was_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("changes");
        let mut journal = Journal::open(&path, &header(), CONFIRMED).unwrap();
        assert_eq!(journal.resume_at(), Lsn(0));
        for commit in [0x10, 0x20] {
            journal.append(&lines(commit, 10)).unwrap();
            journal.complete(0, Lsn(commit + 8));
        }
        drop(journal);
        let whole = std::fs::read(&path).unwrap();
        let (first, one) = (header().line().len(), lines(0x10, 10).len());
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let journal = match Journal::open(&path, &header(), CONFIRMED) {
                Ok(journal) => journal,
                // So little is left that nobody can tell whose it is.
                Err(JournalError::Foreign(_)) => {
                    assert!((1..FIRST.len()).contains(&len), "{len}");
                    continue;
                }
                Err(error) => panic!("{len}: {error}"),
            };
            let (left, at) = match len.saturating_sub(first) / one {
                0 => (first, 0),
                1 => (first + one, 0x18),
                _ => (whole.len(), 0x28),
            };
            assert_eq!((journal.resume_at(), journal.len), (Lsn(at), left as u64), "{len}");
            assert_eq!(std::fs::read(&path).unwrap(), whole[..left]);
        }
    }

    /// After a power loss the end of a file may be there, and not what comes before it. It went on after the end, and the rest was lost.
    #[test]
    fn holes_in_what_was_not_durable_are_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("changes");
        let commits = [0x10, 0x20, 0x30];
        let parts: Vec<Vec<u8>> = commits.iter().map(|&commit| lines(commit, 10)).collect();
        let whole = [header().line().into_bytes(), parts.concat()].concat();
        let first = header().line().len();
        for (hole, confirmed, resumes, transactions) in
            [(1, 0x18, 0x18, 1), (2, 0x18, 0x28, 2), (0, 0, 0, 0), (0, 0x18, 0x38, 3), (2, 0x38, 0x38, 3)]
        {
            let mut with_hole = whole.clone();
            let from = first + parts[..hole].concat().len() + 20;
            with_hole[from..from + 30].fill(0);
            std::fs::write(&path, &with_hole).unwrap();
            let journal = Journal::open(&path, &header(), Lsn(confirmed)).unwrap();
            let len = first + parts[..transactions].concat().len();
            assert_eq!((journal.resume_at(), journal.len), (Lsn(resumes), len as u64), "{hole} {confirmed}");
        }
    }

    /// A crash in the middle of megabytes.
    #[test]
    fn what_is_long_is_found_and_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("changes");
        let mut journal = Journal::open(&path, &header(), CONFIRMED).unwrap();
        let long = lines(0x10, 3 * BLOCK as usize);
        journal.append(&long).unwrap();
        journal.complete(0, Lsn(0x18));
        let half = lines(0x20, 2 * BLOCK as usize);
        journal.append(&half[..half.len() / 2]).unwrap();
        drop(journal);
        let mut journal = Journal::open(&path, &header(), CONFIRMED).unwrap();
        assert_eq!(journal.resume_at(), Lsn(0x18));
        journal.append(b"x").unwrap();
        journal.cut_back().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), [header().line().as_bytes(), &long].concat());
    }

    #[test]
    fn every_line_that_completes_something_is_known() {
        let prepare = Prepare { prepare_lsn: Lsn(0x20), end_lsn: Lsn(0x28), prepare_time: 0, xid: 7, gid: "g\"" };
        let (commit_lsn, end_lsn, commit_time, xid, gid) = (Lsn(0x30), Lsn(0x38), 0, 7, "g");
        let (prepare_end_lsn, prepare_time, rollback_time) = (Lsn(0x28), 0, 1);
        let content = [b'x'; 10_000].as_slice();
        let messages = [
            Message::BeginPrepare(prepare),
            Message::Prepare(prepare),
            Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid },
            Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid },
            Message::StreamStart { xid, first: true },
            Message::StreamStop,
            Message::StreamAbort { xid, subxid: xid, abort: None },
            Message::StreamPrepare(prepare),
            Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time },
            Message::Logical { xid: None, transactional: false, lsn: Lsn(0x40), prefix: "p", content },
            Message::Begin { final_lsn: Lsn(0x50), commit_time, xid },
            Message::Origin { lsn: Lsn(1), name: "o" },
            Message::Logical { xid: None, transactional: true, lsn: Lsn(0x40), prefix: "p", content },
            Message::Commit { commit_lsn, end_lsn, commit_time },
        ];
        let mut lines = Lines::new();
        for message in &messages {
            let mut out = Vec::new();
            lines.write(Lsn(1), message, &mut out).unwrap();
            out.truncate(MAX_END_LINE as usize);
            assert_eq!(complete_at(&out), message.complete_at(), "{message:?}");
        }
        assert_eq!(complete_at(b"{\"kind\":\"commit\",\"end_lsn\":\"0/1"), None);
        assert_eq!(complete_at(header().line().as_bytes()), None);
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("changes");
        let open = Journal::open(&path, &header(), CONFIRMED).unwrap();
        assert!(matches!(Journal::open(&path, &header(), CONFIRMED), Err(JournalError::InUse(_))));
        drop(open);
        let other = Header { slot: "t".into(), ..header() };
        let before = std::fs::read(&path).unwrap();
        assert!(
            matches!(Journal::open(&path, &other, CONFIRMED), Err(JournalError::Other { found, .. }) if found == header())
        );
        assert_eq!(std::fs::read(&path).unwrap(), before);
        for foreign in ["x", "some text\n", "{\"kind\":\"begin\"}\n", "\n"] {
            std::fs::write(&path, foreign).unwrap();
            assert!(matches!(Journal::open(&path, &header(), CONFIRMED), Err(JournalError::Foreign(_))), "{foreign}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), foreign);
        }
    }
}
