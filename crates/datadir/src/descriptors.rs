//! How many files may be open (`set_max_safe_fds`, `storage/file/fd.c`, PostgreSQL 18): one bound for the whole program,
//! taken from `RLIMIT_NOFILE`, and shared out to all who keep files open.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{DataDirError, Result};

/// The limit is raised to this, if it may be: all that is ever kept, and a few hundred threads. Not further, because commands
/// that the configuration names inherit it: few programs use select(2), which ends at 1,024, and open more files than that,
/// but some close or look at every number below the limit.
const ENOUGH: u64 = 2048;
/// Open without being kept: sockets, pipes, the log, what is read or written at a time. A standby has about 30 of them.
const RESERVED: u64 = 32;
/// A thread that works may have so many files open that nobody keeps any more.
const PER_THREAD: u64 = 2;
/// With fewer there is nothing to share out (`FD_MINFREE` for PostgreSQL, which needs 58 in all).
const LEAST: u64 = 16;

/// Most files that each may keep open. All of them together are the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Relation files.
    pub relations: usize,
    /// Files that WAL is read from.
    pub wal: usize,
    /// Segments that are written and not durable; there may be as many files of the early log.
    pub unsynced: usize,
    /// Connections over HTTP.
    pub connections: usize,
}

impl Shares {
    /// Those under a limit, with so many threads.
    fn under(limit: u64, threads: u64) -> Option<Shares> {
        let bound = limit.checked_sub(RESERVED + PER_THREAD * threads).filter(|&bound| bound >= LEAST)?;
        let eighth = bound.min(1 << 20) as usize / 8;
        // More gains nothing that could be measured (PostgreSQL's max_files_per_process is 1,000), or makes others wait.
        let (relations, unsynced) = ((4 * eighth).min(1000), eighth.min(256));
        Some(Shares { relations, wal: eighth.min(64), unsynced, connections: eighth.min(64) })
    }
}

static SHARES: OnceLock<Shares> = OnceLock::new();

/// To be called once, at the start of the program: raises the limit as far as it makes sense, and shares out what there is
/// beside so many threads.
///
/// # Errors
/// If the limit is too low for them.
pub fn share_out(threads: usize) -> Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let needed = RESERVED + PER_THREAD * threads as u64 + LEAST;
    let wanted = needed.max(ENOUGH).min(maximum.unwrap_or(u64::MAX));
    if current.is_some_and(|current| current < wanted) {
        // Then we do with what there is.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
    let limit = limit();
    let shares = Shares::under(limit, threads as u64).ok_or_else(|| {
        DataDirError::Refused(format!(
            "{limit} files may be open, and {threads} threads need {needed}: raise the limit (ulimit -n, LimitNOFILE), or give \
             fewer threads (--jobs)"
        ))
    })?;
    SHARES.get_or_init(|| shares);
    Ok(())
}

/// Most files that each may keep open.
pub fn shares() -> Shares {
    *SHARES.get_or_init(|| {
        Shares::under(limit(), 16).unwrap_or(Shares { relations: 8, wal: 2, unsynced: 2, connections: 2 })
    })
}

/// As many threads as the limit allows, once it is raised.
pub fn most_threads() -> usize {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    (limit.saturating_sub(RESERVED + LEAST) / PER_THREAD).clamp(1, 1 << 16) as usize
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_shares_are_below_the_limit() {
        for (limit, threads) in [(64, 8), (64, 2), (256, 8), (1024, 16), (4096, 64), (u64::MAX, 1)] {
            let Shares { relations, wal, unsynced, connections } = Shares::under(limit, threads).unwrap();
            let kept = (relations + wal + 2 * unsynced + connections) as u64;
            assert!(kept + RESERVED + PER_THREAD * threads <= limit, "{kept} of {limit}");
            assert!(wal.min(unsynced).min(connections) >= 2);
        }
        assert_eq!(Shares::under(64, 9), None);
        assert_eq!(Shares::under(0, 1), None);
    }
}
