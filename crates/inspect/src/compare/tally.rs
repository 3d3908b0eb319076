//! What has been found so far: counts by class, and the first findings in full.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::classes::Class;

/// A difference, in full.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of its class.
    pub class: &'static str,
    /// Path below the data directories.
    pub file: String,
    /// Block of the fork, counted over all segment files; or page of an SLRU segment.
    pub block: Option<u32>,
    /// Byte of the page, or of the file.
    pub offset: Option<u32>,
    /// What stands there.
    pub field: String,
    /// In the first directory.
    pub a: String,
    /// In the second one.
    pub b: String,
}

/// Where a finding is.
#[derive(Clone, Debug, Default)]
pub struct Location {
    /// Block, or page of an SLRU segment.
    pub block: Option<u32>,
    /// Byte of the page, or of the file.
    pub offset: Option<usize>,
    /// What stands there.
    pub field: String,
}

/// Counts by class, and the first differences.
#[derive(Clone, Debug)]
pub struct Tally {
    strict: bool,
    /// Most findings that are kept in full.
    limit: usize,
    counts: [u64; Class::ALL.len()],
    /// Differences in full, at most the limit.
    pub first: Vec<Finding>,
    /// Relation pages compared.
    pub pages: u64,
    /// Files compared.
    pub files: u64,
}

impl Tally {
    /// An empty one that keeps at most `limit` findings.
    pub fn new(strict: bool, limit: usize) -> Tally {
        Tally { strict, limit, counts: [0; Class::ALL.len()], first: Vec::new(), pages: 0, files: 0 }
    }

    /// Counts something of a class that needs no place.
    pub fn count(&mut self, class: Class) {
        self.counts[class as usize] += 1;
    }

    /// Counts a finding; keeps it if it is a difference and among the first.
    pub fn find(&mut self, class: Class, file: &str, place: Location, a: impl Into<String>, b: impl Into<String>) {
        self.count(class);
        if class.is_difference(self.strict) && self.first.len() < self.limit {
            self.first.push(Finding {
                class: class.info().name,
                file: file.to_owned(),
                block: place.block,
                offset: place.offset.map(|offset| offset as u32),
                field: place.field,
                a: a.into(),
                b: b.into(),
            });
        }
    }

    /// Adds what another one has found further on.
    pub fn append(&mut self, other: Tally) {
        for (sum, more) in self.counts.iter_mut().zip(other.counts) {
            *sum += more;
        }
        let room = self.limit - self.first.len();
        self.first.extend(other.first.into_iter().take(room));
        self.pages += other.pages;
        self.files += other.files;
    }

    /// Findings of a class.
    pub fn of(&self, class: Class) -> u64 {
        self.counts[class as usize]
    }

    /// Findings that make the directories different.
    pub fn differences(&self) -> u64 {
        Class::ALL.iter().filter(|class| class.is_difference(self.strict)).map(|&class| self.of(class)).sum()
    }
}

/// A few bytes at `offset`, in hexadecimal; "end" where there are none.
pub fn excerpt(bytes: &[u8], offset: usize) -> String {
    let there = bytes.get(offset..).unwrap_or(&[]);
    if there.is_empty() {
        return "end".to_owned();
    }
    there.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("could not read {}: {source}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: std::io::Error,
}

impl ReadError {
    /// For `map_err`.
    pub fn at(path: &Path) -> impl Fn(std::io::Error) -> ReadError + '_ {
        move |source| ReadError { path: path.to_owned(), source }
    }
}
