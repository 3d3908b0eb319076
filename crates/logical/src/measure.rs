//! Counts what a slot sends, for `walrider logical stream --measure`.

use std::collections::{BTreeMap, HashMap};

use walrider_layout::TransactionId;

use crate::message::{Kind, Message};

/// Transactions of one sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transactions {
    /// All of them.
    pub count: u64,
    /// Those in which nothing was sent: no row, TRUNCATE or message.
    pub empty: u64,
}

impl Transactions {
    fn add(&mut self, changes: u64) {
        self.count += 1;
        self.empty += u64::from(changes == 0);
    }
}

/// Messages of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// How many.
    pub count: u64,
    /// Their length in bytes, as the plugin wrote them.
    pub bytes: u64,
}

/// How long after its commit a transaction was sent, by the publisher's clock, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delay {
    /// Of the last.
    pub last: Option<i64>,
    /// The longest.
    pub max: Option<i64>,
}

/// What was counted.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// By kind.
    pub messages: BTreeMap<Kind, Messages>,
    /// Sent when they were committed.
    pub plain: Transactions,
    /// Sent when they were prepared.
    pub prepared: Transactions,
    /// Sent while they were in progress, and committed or prepared.
    pub streamed: Transactions,
    /// Sent while they were in progress, and rolled back.
    pub aborted: Transactions,
    /// Rows inserted, updated and deleted.
    pub rows: u64,
    /// From commit to the end of sending; of what was committed, not of what was prepared.
    pub delay: Delay,
}

impl Counts {
    /// Messages and bytes of all kinds.
    pub fn total(&self) -> Messages {
        self.messages.values().fold(Messages::default(), |sum, messages| Messages {
            count: sum.count + messages.count,
            bytes: sum.bytes + messages.bytes,
        })
    }

    /// Transactions of all sorts, those that were rolled back too.
    pub fn transactions(&self) -> Transactions {
        [self.plain, self.prepared, self.streamed, self.aborted].iter().fold(Transactions::default(), |sum, sort| {
            Transactions { count: sum.count + sort.count, empty: sum.empty + sort.empty }
        })
    }
}

/// Counts the messages of one connection after another.
#[derive(Clone, Debug, Default)]
pub struct Measure {
    counts: Counts,
    /// Changes of the transaction that is open.
    changes: u64,
    /// The transaction in progress whose chunk is open.
    chunk: Option<TransactionId>,
    /// Changes of those in progress.
    in_progress: HashMap<TransactionId, u64>,
}

impl Measure {
    /// Nothing was counted yet.
    pub fn new() -> Measure {
        Measure::default()
    }

    /// What was counted.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// What was begun will begin again, on another connection.
    pub fn reconnect(&mut self) {
        (self.changes, self.chunk) = (0, None);
        self.in_progress.clear();
    }

    /// From here on, [`Delay::max`] counts.
    pub fn begin_interval(&mut self) {
        self.counts.delay.max = None;
    }

    /// Counts a message of so many bytes, sent at `send_time`.
    pub fn count(&mut self, message: &Message<'_>, bytes: usize, send_time: i64) {
        let messages = self.counts.messages.entry(message.kind()).or_default();
        messages.count += 1;
        messages.bytes += bytes as u64;
        match message {
            Message::Insert { .. } | Message::Update { .. } | Message::Delete { .. } => {
                self.counts.rows += 1;
                self.change();
            }
            Message::Truncate { .. } | Message::Logical { transactional: true, .. } => self.change(),
            Message::Begin { .. } | Message::BeginPrepare(_) => self.changes = 0,
            Message::Commit { commit_time, .. } => {
                self.counts.plain.add(self.changes);
                self.sent(*commit_time, send_time);
            }
            Message::Prepare(_) => self.counts.prepared.add(self.changes),
            Message::CommitPrepared { commit_time, .. } => self.sent(*commit_time, send_time),
            Message::StreamStart { xid, .. } => {
                self.chunk = Some(*xid);
                self.in_progress.entry(*xid).or_default();
            }
            Message::StreamStop => self.chunk = None,
            Message::StreamCommit { xid, commit_time, .. } => {
                let changes = self.in_progress.remove(xid).unwrap_or_default();
                self.counts.streamed.add(changes);
                self.sent(*commit_time, send_time);
            }
            Message::StreamPrepare(prepare) => {
                let changes = self.in_progress.remove(&prepare.xid).unwrap_or_default();
                self.counts.streamed.add(changes);
            }
            Message::StreamAbort { xid, subxid, .. } if xid == subxid => {
                let changes = self.in_progress.remove(xid).unwrap_or_default();
                self.counts.aborted.add(changes);
            }
            _ => {}
        }
    }

    fn change(&mut self) {
        match self.chunk {
            Some(xid) => *self.in_progress.entry(xid).or_default() += 1,
            None => self.changes += 1,
        }
    }

    fn sent(&mut self, commit_time: i64, send_time: i64) {
        let delay = send_time.saturating_sub(commit_time);
        self.counts.delay.last = Some(delay);
        self.counts.delay.max = self.counts.delay.max.max(Some(delay));
    }
}

#[cfg(test)]
mod tests {
    use walrider_layout::Lsn;

    use super::*;
    use crate::message::{Prepare, Value};
    use crate::testing::{relation_ids, tuple};

    #[test]
    fn empty_transactions_are_told_apart() {
        let mut bytes = Vec::new();
        let new = tuple(&mut bytes, &[Value::Null]);
        let insert = |xid| Message::Insert { xid, relation: 1, new };
        let begin = Message::Begin { final_lsn: Lsn(1), commit_time: 0, xid: 3 };
        let commit = Message::Commit { commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 10 };
        let prepare = Prepare { prepare_lsn: Lsn(1), end_lsn: Lsn(2), prepare_time: 3, xid: 4, gid: "g" };
        let start = |xid| Message::StreamStart { xid, first: true };
        let stop = Message::StreamStop;
        let abort = |xid, subxid| Message::StreamAbort { xid, subxid, abort: None };
        let stream_commit = |xid| Message::StreamCommit { xid, commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 90 };
        let truncate =
            Message::Truncate { xid: None, cascade: false, restart_identity: false, relations: relation_ids(&[]) };
        let aside = Message::Logical { xid: None, transactional: false, lsn: Lsn(1), prefix: "", content: b"" };
        let mut measure = Measure::new();
        let stream: Vec<Message<'_>> = [
            vec![begin.clone(), insert(None), commit.clone(), begin.clone(), truncate, commit.clone()],
            vec![begin.clone(), commit.clone(), aside],
            vec![Message::BeginPrepare(prepare), Message::Prepare(prepare)],
            vec![
                start(9),
                insert(Some(9)),
                stop.clone(),
                start(10),
                stop.clone(),
                abort(9, 11),
                start(12),
                stop.clone(),
            ],
            vec![stream_commit(9), stream_commit(10), abort(12, 12), start(4), stop, Message::StreamPrepare(prepare)],
        ]
        .concat();
        for message in &stream {
            measure.count(message, 5, 100);
        }
        let counts = measure.counts();
        let transactions = |count, empty| Transactions { count, empty };
        assert_eq!((counts.plain, counts.prepared), (transactions(3, 1), transactions(1, 1)));
        assert_eq!((counts.streamed, counts.aborted), (transactions(3, 2), transactions(1, 1)));
        assert_eq!((counts.transactions(), counts.rows), (transactions(8, 5), 2));
        assert_eq!(counts.total(), Messages { count: stream.len() as u64, bytes: 5 * stream.len() as u64 });
        assert_eq!(counts.messages[&Kind::Insert], Messages { count: 2, bytes: 10 });
        assert_eq!(counts.delay, Delay { last: Some(10), max: Some(90) });
        measure.begin_interval();
        assert_eq!(measure.counts().delay, Delay { last: Some(10), max: None });
    }
}
