//! WAL that is held, and that its primary may yet take back.

use bytes::{Buf, BytesMut};
use walrider_layout::Lsn;

/// WAL without gaps from `start` to `end`, past what is in segments.
///
/// It may come a second time, when the connection is lost and made again. As long as it is the same, nothing happens; where it differs, the
/// primary has lost what it had sent before, and what is held from there on is worth nothing.
///
/// ```
/// use walrider_layout::Lsn;
/// use walrider_spool::Tail;
/// let mut tail = Tail::default();
/// tail.extend(Lsn(100), b"abcdef");
/// assert_eq!(tail.difference(Lsn(98), b"..abXdef"), Some(Lsn(102)));
/// tail.truncate(Lsn(102));
/// assert_eq!(tail.fresh(Lsn(98), b"..abXdef"), (Lsn(102), &b"Xdef"[..]));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tail {
    start: Lsn,
    bytes: BytesMut,
}

impl Tail {
    /// Where it begins.
    pub fn start(&self) -> Lsn {
        self.start
    }

    /// Where it ends, exclusive.
    pub fn end(&self) -> Lsn {
        Lsn(self.start.0 + self.bytes.len() as u64)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What is held from `from` to `to`; both must lie in it, in this order.
    pub fn slice(&self, from: Lsn, to: Lsn) -> &[u8] {
        &self.bytes[(from.0 - self.start.0) as usize..(to.0 - self.start.0) as usize]
    }

    /// Where `bytes`, which belong at `at`, first differ from what is held.
    pub fn difference(&self, at: Lsn, bytes: &[u8]) -> Option<Lsn> {
        let from = self.start.max(at);
        let to = self.end().min(Lsn(at.0 + bytes.len() as u64));
        if from >= to {
            return None;
        }
        let (held, new) = (self.slice(from, to), &bytes[(from.0 - at.0) as usize..(to.0 - at.0) as usize]);
        if held == new {
            return None;
        }
        held.iter().zip(new).position(|(held, new)| held != new).map(|same| Lsn(from.0 + same as u64))
    }

    /// The part of `bytes`, which belong at `at`, that lies past all that is held; all of them if nothing is.
    pub fn fresh<'a>(&self, at: Lsn, bytes: &'a [u8]) -> (Lsn, &'a [u8]) {
        let known = if self.is_empty() { 0 } else { self.end().0.saturating_sub(at.0).min(bytes.len() as u64) };
        (Lsn(at.0 + known), &bytes[known as usize..])
    }

    /// Appends `bytes`, if there are any, at `at`, which must be the end, unless nothing is held.
    pub fn extend(&mut self, at: Lsn, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.is_empty() {
            self.start = at;
        }
        assert_eq!(at, self.end(), "WAL has no gaps");
        self.bytes.extend_from_slice(bytes);
    }

    /// Forgets what lies past `end`.
    pub fn truncate(&mut self, end: Lsn) {
        self.bytes.truncate(end.0.saturating_sub(self.start.0) as usize);
    }

    /// Forgets what lies before `start`.
    pub fn forget_before(&mut self, start: Lsn) {
        let gone = start.0.saturating_sub(self.start.0).min(self.bytes.len() as u64);
        self.bytes.advance(gone as usize);
        self.start = Lsn(self.start.0 + gone);
    }

    /// Takes in `bytes` that were received at `at` after all that is held: the newer count where they differ, and begin again
    /// where they do not join.
    pub fn merge(&mut self, at: Lsn, bytes: &[u8]) {
        if let Some(difference) = self.difference(at, bytes) {
            self.truncate(difference);
        }
        if at < self.start || at > self.end() {
            self.bytes.clear();
        }
        let (from, fresh) = self.fresh(at, bytes);
        self.extend(from, fresh);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(start: u64, bytes: &[u8]) -> Tail {
        let mut tail = Tail::default();
        tail.extend(Lsn(start), bytes);
        tail
    }

    #[test]
    fn the_same_again_changes_nothing() {
        let mut tail = held(10, b"abcd");
        for (at, bytes) in [(10, &b"abcd"[..]), (11, b"bc"), (14, b""), (12, b"c")] {
            assert_eq!(tail.difference(Lsn(at), bytes), None);
            assert!(tail.fresh(Lsn(at), bytes).1.is_empty());
            tail.merge(Lsn(at), bytes);
            assert_eq!(tail, held(10, b"abcd"));
        }
        tail.merge(Lsn(12), b"cdef");
        assert_eq!(tail, held(10, b"abcdef"));
    }

    #[test]
    fn where_it_differs_the_new_counts() {
        let mut tail = held(10, b"abcd");
        tail.merge(Lsn(11), b"bX");
        assert_eq!(tail, held(10, b"abX"));
        // Not what came before, and nothing that was held follows.
        tail.merge(Lsn(10), b"Y");
        assert_eq!(tail, held(10, b"Y"));
        tail.merge(Lsn(8), b"12");
        assert_eq!(tail, held(8, b"12"));
        tail.merge(Lsn(20), b"z");
        assert_eq!(tail, held(20, b"z"));
    }

    #[test]
    fn it_shrinks_at_both_ends() {
        let mut tail = held(10, b"abcdef");
        tail.forget_before(Lsn(5));
        tail.forget_before(Lsn(12));
        tail.truncate(Lsn(20));
        tail.truncate(Lsn(14));
        assert_eq!((tail.start(), tail.end(), tail.slice(Lsn(13), Lsn(14))), (Lsn(12), Lsn(14), &b"d"[..]));
        tail.forget_before(Lsn(30));
        assert!(tail.is_empty());
        assert_eq!(tail.fresh(Lsn(7), b"xy"), (Lsn(7), &b"xy"[..]));
    }
}
