//! Whole transactions out of messages: those sent at once, those streamed in chunks, and what was prepared.
//!
//! Changes are kept as they came, without the xid that streamed ones carry. Where they become too many for memory, those of the
//! largest transaction go to a file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use walrider_layout::Lsn;
use walrider_wire::WireError;

use crate::message::Message;

/// Bytes before a change's body: its length, and the subtransaction.
const HEADER: usize = 8;
/// Bytes of a spilled transaction that are read at once.
const READ_AHEAD: usize = 256 << 10;

/// Memory that a transaction may get before anything of it has come, in bytes.
const RESERVED: usize = 64 << 10;

/// What ends a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// COMMIT.
    Commit,
    /// PREPARE TRANSACTION.
    Prepare,
    /// COMMIT PREPARED of a transaction that was sent before.
    CommitPrepared,
    /// ROLLBACK PREPARED of one.
    RollbackPrepared,
}

/// A transaction that has ended, in the publisher's order.
pub struct Transaction {
    /// How it ended.
    pub end: End,
    /// Its id on the publisher.
    pub xid: u32,
    /// Where the record begins that ended it.
    pub commit_lsn: Lsn,
    /// Where that record ends.
    pub end_lsn: Lsn,
    /// When it ended, in microseconds since 2000-01-01.
    pub time: i64,
    /// What it did.
    pub changes: Changes,
}

/// The messages of one transaction, RELATION among them, in their order.
#[derive(Default)]
pub struct Changes {
    memory: Vec<u8>,
    /// One without a name in the directory for these: whatever becomes of this process, it goes.
    file: Option<File>,
    file_len: u64,
    aborted: HashSet<u32>,
    count: u64,
}

impl Changes {
    /// How many there are, those of subtransactions that were rolled back included.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Bytes in memory.
    pub fn memory_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Whether all of it is in memory.
    pub fn in_memory(&self) -> bool {
        self.file.is_none()
    }

    /// The body of a change in memory, by where it is; see [`Changes::each`].
    pub fn body(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[at..at + len]
    }

    /// Goes through the changes: their number, where each is (of use in memory only), and its bytes. RELATION messages come
    /// also from subtransactions that were rolled back: the publisher sends none twice.
    pub fn each<E: From<io::Error>>(&self, mut visit: impl FnMut(u64, usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut number = 0;
        let Some(file) = &self.file else {
            let mut at = 0;
            while at < self.memory.len() {
                let (len, subxid) = header(&self.memory[at..]);
                let body = &self.memory[at + HEADER..at + HEADER + len];
                if self.lasts(subxid, body) {
                    visit(number, at + HEADER, body)?;
                }
                number += 1;
                at += HEADER + len;
            }
            return Ok(());
        };
        assert!(self.memory.is_empty(), "a spilled transaction that has ended is in its file");
        let (mut buffer, mut start, mut read) = (Vec::new(), 0, 0_u64);
        while read < self.file_len || start < buffer.len() {
            let whole = buffer.len() - start >= HEADER && {
                let (len, subxid) = header(&buffer[start..]);
                let whole = buffer.len() - start >= HEADER + len;
                if whole {
                    let body = &buffer[start + HEADER..start + HEADER + len];
                    if self.lasts(subxid, body) {
                        visit(number, 0, body)?;
                    }
                    number += 1;
                    start += HEADER + len;
                }
                whole
            };
            if !whole {
                buffer.drain(..start);
                start = 0;
                let more = (self.file_len - read).min(READ_AHEAD as u64) as usize;
                if more == 0 {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
                let end = buffer.len();
                buffer.resize(end + more, 0);
                file.read_exact_at(&mut buffer[end..], read)?;
                read += more as u64;
            }
        }
        Ok(())
    }

    /// The same without its rows: what it says of relations stays known.
    pub fn without_rows(&self) -> Changes {
        let mut left = Changes::default();
        // What cannot be read back is of no use for what is left out, and will be described again after the next connection.
        let _ = self.each(|_, _, body| -> io::Result<()> {
            if body[0] == b'R' {
                left.push(0, [body, &[]]);
            }
            Ok(())
        });
        left
    }

    fn lasts(&self, subxid: u32, body: &[u8]) -> bool {
        !self.aborted.contains(&subxid) || body[0] == b'R'
    }

    fn push(&mut self, subxid: u32, parts: [&[u8]; 2]) {
        let len = parts[0].len() + parts[1].len();
        self.memory.extend((len as u32).to_be_bytes());
        self.memory.extend(subxid.to_be_bytes());
        self.memory.extend(parts[0]);
        self.memory.extend(parts[1]);
        self.count += 1;
    }

    /// Moves what is in memory to the file, which is made in `directory` if need be. Returns how many bytes.
    fn spill(&mut self, directory: &Path) -> io::Result<u64> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile_in(directory)?),
        };
        file.write_all(&self.memory)?;
        let len = self.memory.len() as u64;
        self.file_len += len;
        self.memory = Vec::new();
        Ok(len)
    }
}

fn header(bytes: &[u8]) -> (usize, u32) {
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    (word(0) as usize, word(4))
}

/// Why a stream cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A message that is none.
    #[error("the publisher sent something that is no message of pgoutput: {0}")]
    Wire(#[from] WireError),
    /// Messages in an order that pgoutput never has.
    #[error("the publisher sent \"{}\" where it cannot be ({what})", *tag as char)]
    Order {
        /// The message's type.
        tag: u8,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The file for changes that do not fit into memory.
    #[error("could not write changes to a temporary file: {0}; make room, or name another directory with --spill-dir")]
    Spill(#[from] io::Error),
}

/// Collects transactions.
pub struct Assembler {
    /// Where changes go that do not fit into memory.
    spill_dir: PathBuf,
    /// Bytes of changes in memory, at most, besides those of one message.
    limit: usize,
    memory: usize,
    spilled_bytes: u64,
    /// Between BEGIN and COMMIT.
    current: Option<Changes>,
    /// Where and when that commits; `None`: it is to be prepared.
    commits: Option<(Lsn, i64)>,
    /// Bytes of the last transaction: most often the next is as large.
    last_bytes: usize,
    /// Transactions that are streamed, and the one whose chunk this is.
    streamed: HashMap<u32, Changes>,
    chunk: Option<u32>,
}

impl Assembler {
    /// `limit`: bytes of changes that stay in memory; what is more goes to files in `spill_dir`.
    pub fn new(limit: usize, spill_dir: PathBuf) -> Assembler {
        Assembler {
            spill_dir,
            limit,
            memory: 0,
            spilled_bytes: 0,
            current: None,
            commits: None,
            last_bytes: 0,
            streamed: HashMap::new(),
            chunk: None,
        }
    }

    /// Bytes written to files so far.
    pub fn spilled_bytes(&self) -> u64 {
        self.spilled_bytes
    }

    /// Whether every transaction that is known to have committed was handed on. One that is streamed may wait: it commits behind all
    /// that has come, and comes again if this ends before.
    pub fn is_between(&self) -> bool {
        self.current.is_none() && self.chunk.is_none()
    }

    /// Takes a message, and its bytes; returns the transaction that it ends.
    pub fn take(&mut self, message: Message<'_>, body: &[u8]) -> Result<Option<Transaction>, AssembleError> {
        let order = |what| AssembleError::Order { tag: body[0], what };
        let ended = match message {
            Message::Begin { .. } | Message::BeginPrepare(_) => {
                self.commits = match message {
                    Message::Begin { final_lsn, commit_time, .. } => Some((final_lsn, commit_time)),
                    _ => None,
                };
                let memory = Vec::with_capacity(self.last_bytes.min(RESERVED));
                self.current = Some(Changes { memory, ..Changes::default() });
                None
            }
            Message::Commit { commit_lsn, end_lsn, commit_time } => {
                let changes = self.current.take().ok_or(order("no transaction is open"))?;
                Some((End::Commit, 0, commit_lsn, end_lsn, commit_time, changes))
            }
            Message::Prepare(p) => {
                let changes = self.current.take().ok_or(order("no transaction is open"))?;
                Some((End::Prepare, p.xid, p.prepare_lsn, p.end_lsn, p.prepare_time, changes))
            }
            Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, .. } => {
                self.forget(xid);
                Some((End::CommitPrepared, xid, commit_lsn, end_lsn, commit_time, Changes::default()))
            }
            Message::RollbackPrepared { end_lsn, rollback_time, xid, .. } => {
                self.forget(xid);
                Some((End::RollbackPrepared, xid, end_lsn, end_lsn, rollback_time, Changes::default()))
            }
            Message::Relation { xid, .. }
            | Message::Insert { xid, .. }
            | Message::Update { xid, .. }
            | Message::Delete { xid, .. }
            | Message::Truncate { xid, .. } => {
                self.add(xid, body).ok_or(order("no transaction is open"))?;
                None
            }
            Message::Origin { .. } | Message::Type { .. } | Message::Logical { .. } => None,
            Message::StreamStart { xid, first } => {
                if first == self.streamed.contains_key(&xid) {
                    return Err(order("a chunk is missing"));
                }
                self.streamed.entry(xid).or_default();
                self.chunk = Some(xid);
                None
            }
            Message::StreamStop => {
                self.chunk = None;
                None
            }
            Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time } => {
                let changes = self.streamed.remove(&xid).ok_or(order("nothing of it was streamed"))?;
                Some((End::Commit, xid, commit_lsn, end_lsn, commit_time, changes))
            }
            Message::StreamPrepare(p) => {
                let changes = self.streamed.remove(&p.xid).ok_or(order("nothing of it was streamed"))?;
                Some((End::Prepare, p.xid, p.prepare_lsn, p.end_lsn, p.prepare_time, changes))
            }
            Message::StreamAbort { xid, subxid, .. } => {
                if xid == subxid {
                    self.forget(xid);
                } else if let Some(changes) = self.streamed.get_mut(&xid) {
                    changes.aborted.insert(subxid);
                }
                None
            }
        };
        self.make_room()?;
        let Some((end, xid, commit_lsn, end_lsn, time, mut changes)) = ended else { return Ok(None) };
        self.memory -= changes.memory_bytes();
        self.last_bytes = changes.memory_bytes();
        if !changes.in_memory() {
            self.spilled_bytes += changes.spill(&self.spill_dir)?;
        }
        Ok(Some(Transaction { end, xid, commit_lsn, end_lsn, time, changes }))
    }

    /// Takes away what has come of the open transaction, once that is so much, if it is sure to commit, past `after`: one that is not
    /// streamed is sent when it has committed. The part's `end_lsn` is only where the record of the commit begins.
    pub fn take_part(&mut self, rows: u64, bytes: usize, after: Lsn) -> Option<Transaction> {
        let (changes, (commit_lsn, time)) = (self.current.as_mut()?, self.commits?);
        let large = changes.count() >= rows || changes.memory_bytes() >= bytes;
        if !large || !changes.in_memory() || commit_lsn <= after {
            return None;
        }
        let changes = std::mem::take(changes);
        self.memory -= changes.memory_bytes();
        Some(Transaction { end: End::Commit, xid: 0, commit_lsn, end_lsn: commit_lsn, time, changes })
    }

    /// Drops what was streamed of a transaction. One that was prepared before the session began may be streamed once more, and that has no
    /// end of its own (`ReorderBufferLargestStreamableTopTXN`, reorderbuffer.c, 18: it passes over nothing that was prepared).
    fn forget(&mut self, xid: u32) {
        if let Some(changes) = self.streamed.remove(&xid) {
            self.memory -= changes.memory_bytes();
        }
    }

    /// Keeps a message that is part of the open transaction.
    fn add(&mut self, xid: Option<u32>, body: &[u8]) -> Option<()> {
        let (changes, subxid, rest) = match (xid, self.chunk) {
            (Some(subxid), Some(chunk)) => (self.streamed.get_mut(&chunk)?, subxid, &body[5..]),
            (None, None) => (self.current.as_mut()?, 0, &body[1..]),
            _ => return None,
        };
        let before = changes.memory_bytes();
        changes.push(subxid, [&body[..1], rest]);
        self.memory += changes.memory_bytes() - before;
        Some(())
    }

    fn make_room(&mut self) -> Result<(), AssembleError> {
        while self.memory > self.limit {
            let all = self.streamed.values_mut().chain(self.current.as_mut());
            let largest = all.max_by_key(|changes| changes.memory_bytes()).filter(|changes| changes.memory_bytes() > 0);
            // What was just ended is on its way out, and was counted.
            let Some(largest) = largest else { break };
            let len = largest.spill(&self.spill_dir)?;
            self.memory -= len as usize;
            self.spilled_bytes += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Decoder, Protocol};

    fn read(
        assembler: &mut Assembler,
        decoder: &mut Decoder,
        body: &[u8],
    ) -> Result<Option<Transaction>, AssembleError> {
        assembler.take(decoder.decode(body)?, body)
    }

    fn message(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
        [&[tag], parts.concat().as_slice()].concat()
    }

    fn insert(xid: Option<u32>, value: &[u8]) -> Vec<u8> {
        let xid = xid.map(u32::to_be_bytes);
        let len = (value.len() as u32).to_be_bytes();
        message(b'I', &[xid.as_ref().map_or(&[], |xid| xid), &7_u32.to_be_bytes(), b"N\0\x01t", &len, value])
    }

    fn values(transaction: &Transaction) -> Vec<String> {
        let mut found = Vec::new();
        let visit = |_, _, body: &[u8]| {
            found.push(String::from_utf8(body[13..].to_vec()).unwrap());
            Ok::<_, io::Error>(())
        };
        transaction.changes.each(visit).unwrap();
        found
    }

    fn begin() -> Vec<u8> {
        message(b'B', &[&[1; 20]])
    }

    fn commit(end: u64) -> Vec<u8> {
        message(b'C', &[&[0], &end.to_be_bytes(), &end.to_be_bytes(), &[0; 8]])
    }

    #[test]
    fn chunks_are_put_together_without_what_was_rolled_back() {
        let dir = tempfile::tempdir().unwrap();
        for limit in [0, 50, 1 << 20] {
            let mut assembler = Assembler::new(limit, dir.path().to_owned());
            let mut decoder = Decoder::new(Protocol::V4);
            let mut take = |body: Vec<u8>| read(&mut assembler, &mut decoder, &body).unwrap();
            let start = |xid: u32, first| message(b'S', &[&xid.to_be_bytes(), &[first]]);
            assert!(take(start(5, 1)).is_none());
            take(insert(Some(5), b"a"));
            take(insert(Some(6), b"gone"));
            take(insert(Some(7), b"c"));
            take(message(b'E', &[]));
            take(begin());
            take(insert(None, b"between"));
            assert_eq!(values(&take(commit(9)).unwrap()), ["between"]);
            take(start(5, 0));
            take(insert(Some(5), b"d"));
            take(message(b'E', &[]));
            take(message(b'A', &[&5_u32.to_be_bytes(), &6_u32.to_be_bytes()]));
            take(start(8, 1));
            take(message(b'E', &[]));
            take(message(b'A', &[&8_u32.to_be_bytes(), &8_u32.to_be_bytes()]));
            let ended = take(message(b'c', &[&5_u32.to_be_bytes(), &[0], &[1; 24]])).unwrap();
            assert_eq!((values(&ended), ended.xid), (["a", "c", "d"].map(str::to_owned).to_vec(), 5));
            assert_eq!(ended.changes.in_memory(), limit > 100);
            assert!(assembler.streamed.is_empty() && assembler.memory == 0, "{}", assembler.memory);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_prepared_before_and_is_streamed_again_ends_with_it() {
        for end in [b'K', b'r'] {
            let mut assembler = Assembler::new(1 << 20, "nowhere".into());
            let mut decoder = Decoder::new(Protocol::V4);
            let mut inside = Vec::new();
            let gid = b"gid\0";
            let positions: &[u8] = if end == b'K' { &[1; 24] } else { &[1; 32] };
            for body in [
                message(b'S', &[&5_u32.to_be_bytes(), &[1]]),
                insert(Some(5), b"a"),
                message(b'E', &[]),
                message(end, &[&[0], positions, &5_u32.to_be_bytes(), gid]),
            ] {
                let ended = read(&mut assembler, &mut decoder, &body).unwrap();
                assert_eq!(ended.is_some(), body[0] == end);
                inside.push(!assembler.is_between());
            }
            assert_eq!(inside, [true, true, false, false]);
            assert!(assembler.streamed.is_empty() && assembler.memory == 0, "{}", assembler.memory);
        }
    }

    #[test]
    fn a_large_transaction_is_read_back_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut assembler = Assembler::new(100_000, dir.path().to_owned());
        let mut decoder = Decoder::new(Protocol::V4);
        read(&mut assembler, &mut decoder, &begin()).unwrap();
        let rows: Vec<String> = (0..20_000).map(|n| format!("{n}:{}", "x".repeat(n % 700))).collect();
        for row in &rows {
            read(&mut assembler, &mut decoder, &insert(None, row.as_bytes())).unwrap();
        }
        let ended = read(&mut assembler, &mut decoder, &commit(1)).unwrap().unwrap();
        assert!(!ended.changes.in_memory() && assembler.spilled_bytes() > 7_000_000);
        assert_eq!(values(&ended), rows);
    }

    #[test]
    fn an_impossible_order_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for messages in [
            vec![commit(1)],
            vec![insert(None, b"x")],
            vec![begin(), begin()],
            vec![message(b'E', &[])],
            vec![message(b'S', &[&[0, 0, 0, 5, 0]])],
            vec![message(b'c', &[&[1; 4], &[0], &[1; 24]])],
            vec![b"Z".to_vec()],
            vec![b"".to_vec()],
        ] {
            let mut assembler = Assembler::new(0, dir.path().to_owned());
            let mut decoder = Decoder::new(Protocol::V4);
            let fails = messages.iter().any(|body| read(&mut assembler, &mut decoder, body).is_err());
            assert!(fails, "{messages:?}");
        }
    }
}
