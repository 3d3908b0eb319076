//! Bytes from the server until they are whole messages.

use std::ops::Range;

use walrider_wire::WireError;
use walrider_wire::backend::Frame;

/// Where it begins, in bytes: a few of the longest messages that a stock walsender sends (`MAX_SEND_SIZE`, 128 kB).
const INITIAL: usize = 512 * 1024;
/// Less room than this is not worth a system call, in bytes.
const LEAST_READ: usize = 64 * 1024;

/// A buffer that grows to the longest message, but never beyond twice of what was received.
pub(crate) struct Input {
    bytes: Vec<u8>,
    /// `start <= end <= bytes.len()`; what is between was received and not taken.
    start: usize,
    end: usize,
    /// Length of the message that `start` is at, if it is known.
    wanted: usize,
}

impl Input {
    pub(crate) fn new() -> Input {
        Input { bytes: vec![0; INITIAL], start: 0, end: 0, wanted: 0 }
    }

    /// The type of the next message, if it is whole.
    pub(crate) fn peek(&self, limit: usize) -> Result<Option<u8>, WireError> {
        let front = &self.bytes[self.start..self.end];
        Ok(Frame::peek(front, limit)?.filter(|frame| frame.total_len <= front.len()).map(|frame| frame.tag))
    }

    /// Takes the next message if it is whole: its type and where its body is, until [`Input::room`] is called.
    pub(crate) fn take(&mut self, limit: usize) -> Result<Option<(u8, Range<usize>)>, WireError> {
        self.wanted = 0;
        let Some(frame) = Frame::peek(&self.bytes[self.start..self.end], limit)? else { return Ok(None) };
        if self.end - self.start < frame.total_len {
            self.wanted = frame.total_len;
            return Ok(None);
        }
        let body = self.start + Frame::HEADER..self.start + frame.total_len;
        self.start = body.end;
        Ok(Some((frame.tag, body)))
    }

    pub(crate) fn body(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }

    /// Where to put what is received next; never empty. Bodies taken before are gone.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let missing = self.wanted.saturating_sub(self.end - self.start);
        if self.bytes.len() - self.end < missing.clamp(1, LEAST_READ) || self.bytes.len() == self.end {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() == self.end {
            let grown = self.wanted.clamp(self.end + LEAST_READ, self.end * 2);
            self.bytes.resize(grown, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// `len` bytes were put at the front of the room.
    pub(crate) fn received(&mut self, len: usize) {
        self.end += len;
        debug_assert!(self.end <= self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of `len` bytes in all, with a body that tells its number.
    fn message(number: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![b'd'];
        bytes.extend((len as u32 - 1).to_be_bytes());
        bytes.resize(len, number as u8);
        bytes
    }

    #[test]
    fn messages_come_out_whole_however_they_arrive() {
        let lens = [5, 6, 40_000, 131_101, 5, 2_000_000, 7, 600_000, 131_101, 131_101, 131_101, 131_101, 131_101];
        let stream: Vec<u8> = lens.iter().enumerate().flat_map(|(n, &len)| message(n, len)).collect();
        for step in [1_usize, 4_093, 65_536, usize::MAX] {
            let (mut input, mut sent, mut taken) = (Input::new(), 0, 0);
            while taken < lens.len() {
                while let Some((tag, body)) = input.take(1 << 26).unwrap() {
                    assert_eq!((tag, body.len() + 5), (b'd', lens[taken]));
                    assert!(input.body(body).iter().all(|&byte| byte == taken as u8));
                    taken += 1;
                }
                let room = input.room();
                let len = room.len().min(step).min(stream.len() - sent);
                assert!(!room.is_empty());
                room[..len].copy_from_slice(&stream[sent..sent + len]);
                input.received(len);
                sent += len;
            }
            assert!(input.bytes.len() <= 2_100_000, "{}", input.bytes.len());
        }
    }

    #[test]
    fn a_length_that_is_only_claimed_takes_no_memory() {
        let mut input = Input::new();
        input.room()[..5].copy_from_slice(&message(0, 1 << 26)[..5]);
        input.received(5);
        assert!(input.take(1 << 26).unwrap().is_none());
        assert_eq!(input.room().len(), INITIAL - 5);
        assert!(input.take((1 << 26) - 1).is_err());
    }
}
