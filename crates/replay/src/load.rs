//! From the source to planned stretches: reads, decodes and plans WAL, several stretches side by side.

use rayon::prelude::*;
use walrider_layout::wal::{END_OF_POSITIONS, SegmentSize, page_header_size, page_of};
use walrider_layout::{Lsn, XLOG_BLCKSZ};
use walrider_store::read::{self, ReadWal};
use walrider_wal::decode::{Found, Invalid, PIECE, Status, Stretch, WalFormat};

use crate::error::ReplayError;
use crate::plan::Planned;
use crate::rels::{RelNumbers, RelTable};

/// How a stretch ended.
#[derive(Debug)]
pub enum Ending {
    /// The next record is at this position, or past the page header there.
    Goes(Lsn),
    /// There is no valid record at `at`.
    Ends {
        /// Where a record was expected.
        at: Lsn,
        /// The page to blame.
        page: Lsn,
        /// Why.
        why: Invalid,
    },
    /// The source failed.
    Failed(ReplayError),
}

/// Loads WAL from a position on.
pub struct Loader {
    format: WalFormat,
    /// Bytes of WAL in one stretch; a power of two, at most a segment.
    window: u64,
    /// Where the next stretch begins.
    next: Lsn,
    /// `next` is where a record begins, not just a page.
    exact: bool,
    /// Where the last record that was accepted begins.
    last: Lsn,
    /// The rest of the WAL is not to be had, and why.
    ended: Option<Ending>,
    /// How many stretches are worth a try: one where the WAL has just ended, and again more while it does not.
    width: usize,
    spare: Vec<Planned>,
    numbers: Vec<RelNumbers>,
}

impl Loader {
    /// Starts with the record at `start`, in stretches of `window` bytes.
    pub fn new(format: WalFormat, window: u64, start: Lsn) -> Loader {
        let window = window.min(format.segment_size.bytes());
        Loader {
            format,
            window,
            next: start,
            exact: true,
            last: Lsn::INVALID,
            ended: None,
            width: usize::MAX,
            spare: Vec::new(),
            numbers: Vec::new(),
        }
    }

    /// How WAL is checked.
    pub fn format(&self) -> &WalFormat {
        &self.format
    }

    /// Where the next record is expected.
    pub fn position(&self) -> Lsn {
        self.next
    }

    /// Gives a stretch back for reuse; but for one that has grown with a record of many times its size, which would keep that much for ever.
    pub fn recycle(&mut self, planned: Planned) {
        if planned.held_bytes() as u64 <= 16 * self.window.max(1 << 20) {
            self.spare.push(planned);
        }
    }

    /// Gives the memory back of those that wait for reuse.
    pub fn drop_spare(&mut self) {
        self.spare = Vec::new();
    }

    /// How many wait for that.
    pub fn spare(&self) -> usize {
        self.spare.len()
    }

    /// Loads up to `count` more stretches, but none that has to be waited for: a thread that decodes has better things to do
    /// meanwhile. The last record of a stretch may go on in the next segment.
    pub fn load_ready(&mut self, count: usize, source: &dyn ReadWal, rels: &RelTable) -> Vec<Planned> {
        let upto = source.ready_up_to(self.next);
        let ready = (upto.0.saturating_sub(1) / self.window).saturating_sub(self.next.0 / self.window);
        match count.min(usize::try_from(ready).unwrap_or(usize::MAX)) {
            0 => {
                source.release_before(self.next);
                Vec::new()
            }
            count => self.load(count, source, rels),
        }
    }

    /// Loads up to `count` more stretches. Those that come back are whole, in order, and follow one another; none, once
    /// the WAL ends: [`Loader::take_ending`] says why.
    pub fn load(&mut self, count: usize, source: &dyn ReadWal, rels: &RelTable) -> Vec<Planned> {
        if self.ended.is_some() {
            return Vec::new();
        }
        if let Err(ending) = may_be(self.next, self.format.segment_size) {
            self.end(ending);
            return Vec::new();
        }
        source.release_before(self.next);
        let count = count.min(self.width);
        let first_piece = if self.width == 1 { XLOG_BLCKSZ as u64 } else { PIECE };
        let mut work: Vec<(Planned, RelNumbers)> = Vec::with_capacity(count);
        let mut from = self.next;
        for nth in 0..count {
            let limit = Lsn((from.0 / self.window + 1) * self.window);
            let mut planned = self.spare.pop().unwrap_or_default();
            planned.done = 0;
            planned.stretch.reset(from, self.exact && nth == 0, limit, self.format.segment_size);
            work.push((planned, self.numbers.pop().unwrap_or_default()));
            from = limit;
        }
        let format = &self.format;
        let load_one = |(planned, numbers): &mut (Planned, RelNumbers)| {
            let Planned { stretch, plan, .. } = planned;
            plan.reset();
            fill(stretch, source, format, first_piece, |found| plan.take(format.major, found, rels, numbers))
        };
        // One is not worth waking a thread.
        let endings: Vec<Ending> = match &mut work[..] {
            [one] => vec![load_one(one)],
            work => work.par_iter_mut().with_max_len(1).map(load_one).collect(),
        };
        let mut loaded = Vec::with_capacity(count);
        for ((planned, numbers), ending) in work.into_iter().zip(endings) {
            self.numbers.push(numbers);
            let accepted = self.ended.is_none() && self.accept(&planned, ending);
            // One without records still tells what was passed over.
            if !accepted || (planned.stretch.places().is_empty() && planned.stretch.overwritten().is_empty()) {
                self.spare.push(planned);
            } else {
                loaded.push(planned);
            }
        }
        self.width = if self.ended.is_some() { 1 } else { self.width.saturating_mul(2) };
        loaded
    }

    /// Checks that a stretch follows the one before. False: it is not part of the WAL.
    fn accept(&mut self, planned: &Planned, ending: Ending) -> bool {
        let stretch = &planned.stretch;
        // A record, or the unused rest of a segment after XLOG_SWITCH, covers the whole stretch.
        if self.next >= stretch.limit() {
            return false;
        }
        let seam = match stretch.begins_at() {
            Some(begins) if self.first_record_at(begins) == self.first_record_at(self.next) => {
                stretch.follows(self.last)
            }
            Some(_) => Err(Invalid::UnexpectedContinuation),
            None => Err(Invalid::NoContinuation(self.next)),
        };
        if let Err(why) = seam {
            let ends = Ending::Ends { at: self.next, page: page_of(self.next), why };
            // A page that could not even be read or checked says more than what follows from that.
            self.end(match ending {
                Ending::Goes(_) => ends,
                Ending::Ends { page, why, .. } if stretch.places().is_empty() => {
                    Ending::Ends { at: self.next, page, why }
                }
                Ending::Ends { .. } => ends,
                failed => failed,
            });
            return false;
        }
        // None: the only record that begins here was never finished.
        self.last = stretch.last().unwrap_or(self.last);
        self.exact = true;
        match ending {
            Ending::Goes(next) => self.next = next,
            ending => {
                self.next = stretch.position();
                self.end(ending);
            }
        }
        true
    }

    fn end(&mut self, ending: Ending) {
        self.ended = Some(ending);
    }

    fn first_record_at(&self, lsn: Lsn) -> Lsn {
        if page_of(lsn) == lsn { Lsn(lsn.0 + page_header_size(lsn, self.format.segment_size) as u64) } else { lsn }
    }

    /// Why there is no more, once [`Loader::load`] has come back with less than was asked for. Loading can be tried
    /// again afterwards, from where it ended.
    pub fn take_ending(&mut self) -> Option<Ending> {
        self.ended.take()
    }
}

/// Refuses a position, which a damaged file may state, where no record can be.
fn may_be(at: Lsn, segment_size: SegmentSize) -> Result<(), Ending> {
    let in_page = at.0 % XLOG_BLCKSZ as u64;
    // As `XRecOffIsValid`, but for the beginning of a page, which stands for its first record.
    let is_record =
        at.0.is_multiple_of(8) && (in_page == 0 || in_page >= page_header_size(page_of(at), segment_size) as u64);
    match at < END_OF_POSITIONS && is_record {
        true => Ok(()),
        false => Err(Ending::Failed(ReplayError::CorruptWal(format!(
            "a record is expected at {at}, where there can be none"
        )))),
    }
}

/// Reads the record at `at` alone.
///
/// # Errors
/// How the WAL ends there.
pub fn read_record(source: &dyn ReadWal, format: &WalFormat, at: Lsn) -> Result<Stretch, Ending> {
    may_be(at, format.segment_size)?;
    let mut stretch = Stretch::new();
    stretch.reset(at, true, Lsn(at.0 + 1), format.segment_size);
    match fill(&mut stretch, source, format, PIECE, |_| {}) {
        Ending::Goes(_) => Ok(stretch),
        other => Err(other),
    }
}

/// Fills a stretch from the source ([`read::fill`]), a piece of `piece` bytes first. `each` sees every record.
fn fill(
    stretch: &mut Stretch,
    source: &dyn ReadWal,
    format: &WalFormat,
    piece: u64,
    each: impl FnMut(&Found<'_>),
) -> Ending {
    match read::fill(stretch, source, format, piece, each) {
        Ok(Status::Complete { next }) if next >= stretch.limit() => Ending::Goes(next),
        Ok(Status::Complete { next }) => Ending::Ends { at: next, page: page_of(next), why: Invalid::Incomplete },
        Ok(Status::NeedPages { .. }) => {
            Ending::Ends { at: stretch.position(), page: stretch.filled(), why: Invalid::Incomplete }
        }
        Ok(Status::Invalid { at, page, why }) => Ending::Ends { at, page, why },
        Err(error) => Ending::Failed(error.into()),
    }
}

#[cfg(test)]
mod tests;
