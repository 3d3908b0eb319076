//! How memory is shared between pages and the batches that change them.

use std::ops::RangeInclusive;

/// Memory that is neither pages nor WAL, in bytes: the program itself, SLRU pages, tables.
pub const OTHER_BYTES: u64 = 16 << 20;
/// Most WAL in one batch where pages do not fit into memory, in bytes.
pub const MAX_SHORT_BATCH_BYTES: u64 = 512 << 20;
/// What an operation takes beside its place in the plan, in bytes: from one of many on its page to the only one there.
const OPERATION_BYTES: RangeInclusive<usize> = 16..=128;

/// How memory is shared.
#[derive(Clone, Copy, Debug)]
pub struct MemoryShares {
    /// Bytes for everything.
    pub all_bytes: u64,
    /// Bytes for pages while all of them fit.
    pub page_bytes: u64,
    /// Most bytes of WAL in one batch then.
    pub batch_bytes: u64,
}

/// What a batch took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    /// Bytes of its WAL and the plan of it.
    pub loaded: usize,
    /// Bytes that partitions make of it.
    pub made: usize,
    /// Operations in it.
    pub operations: usize,
    /// Bytes of pages.
    pub frames: usize,
}

/// The shares where pages do not fit.
///
/// What counts then is how seldom each page is visited: most of the memory is for one batch, and pages pass through the rest of it in file
/// order. What a batch takes depends on its records: little more than its WAL where it has images, more than three times as much where
/// they are small. And an allocator loses some of what comes and goes in small pieces. So both are measured, batch by batch.
#[derive(Clone, Copy, Debug)]
pub struct Short {
    all: u64,
    other: u64,
    batch: u64,
    operation: usize,
}

impl Short {
    /// What is neither batches nor pages, at least: of what an allocator loses, an eighth is the guess.
    fn least_other(all_bytes: u64) -> u64 {
        OTHER_BYTES + all_bytes / 8
    }

    /// Nothing is known of batches yet, nor of what an allocator loses.
    pub fn new(all_bytes: u64) -> Short {
        Short { all: all_bytes, other: Short::least_other(all_bytes), batch: 0, operation: *OPERATION_BYTES.end() }
    }

    /// Notes what a batch took when the whole process had `resident` bytes.
    pub fn note(&mut self, taken: Taken, resident: Option<u64>) {
        self.batch = (taken.loaded + taken.made) as u64;
        self.operation = (taken.made / taken.operations.max(1)).clamp(*OPERATION_BYTES.start(), *OPERATION_BYTES.end());
        let other = resident.unwrap_or(0).saturating_sub(self.batch + taken.frames as u64);
        // More counts at once. Less does little by little, as what was measured between two batches is not the most that there is within one.
        self.other = other.max(self.other - self.other.saturating_sub(other) / 8).max(Short::least_other(self.all));
    }

    /// Bytes for a batch and its pages.
    fn rest(&self) -> u64 {
        self.all.saturating_sub(self.other)
    }

    /// Bytes for a batch.
    pub fn for_batch(&self) -> u64 {
        self.rest() / 8 * 7
    }

    /// What an operation of the next batch will take beside its place in the plan, in bytes.
    pub fn operation(&self) -> usize {
        self.operation
    }

    /// Bytes for the pages of the next batch, if it is `growth` times as large as the last one.
    pub fn for_pages(&self, growth: f64) -> u64 {
        let batch = (self.batch as f64 * growth) as u64;
        self.rest() - batch.min(self.for_batch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn a_batch_has_most_of_it() {
        let mut short = Short::new(128 << 20);
        assert_eq!(short.for_batch(), 84 << 20);
        short.note(Taken { loaded: 20 * MB, made: 8 * MB, operations: MB / 8, frames: 70 * MB }, Some(128 << 20));
        assert_eq!((short.for_batch(), short.operation()), (84 << 20, 64));
        assert_eq!(short.for_pages(1.0), 68 << 20);
        assert_eq!(short.for_pages(2.0), 40 << 20);
        assert_eq!(short.for_pages(8.0), 12 << 20);
    }

    /// What batches and pages do not explain is not theirs.
    #[test]
    fn what_the_allocator_lost_is_missing() {
        let mut short = Short::new(128 << 20);
        let taken = Taken { loaded: 60 * MB, made: 20 * MB, operations: MB, frames: 20 * MB };
        short.note(taken, Some(140 << 20));
        assert_eq!(short.for_batch(), 77 << 20);
        short.note(taken, Some(132 << 20));
        assert_eq!(short.for_batch(), 77 << 20 | 7 << 17);
        (0..20).for_each(|_| short.note(taken, None));
        assert_eq!(short.for_batch(), 84 << 20);
    }

    #[test]
    fn less_than_the_program_takes() {
        let mut short = Short::new(8 << 20);
        short.note(Taken { loaded: MB, ..Taken::default() }, Some(20 << 20));
        assert_eq!((short.for_batch(), short.for_pages(2.0)), (0, 0));
    }
}
