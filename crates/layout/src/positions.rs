//! The names of the positions that WAL passes on its way from a primary to pages.

use crate::Lsn;

/// Ends of WAL, exclusive; zero for what is not known, or not known here. A position *lags behind* a higher one; what lies above a
/// position is *past* it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WalPositions {
    /// Has come from the primary in this session.
    pub received: Lsn,
    /// Of that, is in the operating system, in segments or in the early log: a kill does not lose it. The primary is told this as
    /// written.
    pub held: Lsn,
    /// Of that, is durable: a power loss does not lose it. The primary is told this as flushed.
    pub held_durable: Lsn,
    /// Is in segments, where replay finds it.
    pub written: Lsn,
    /// Is durable in segments.
    pub flushed: Lsn,
    /// Is replayed. WAL from archives counts, so it may be past all of the above.
    pub applied: Lsn,
    /// The newest flush position that the primary has told: what is past it, the primary may still lose.
    pub horizon: Lsn,
}

impl WalPositions {
    /// Panics where the positions are not in order, in builds with assertions. Called wherever one moves.
    pub fn check(&self) {
        let WalPositions { received, held, held_durable, written, flushed, .. } = *self;
        debug_assert!(flushed <= written && written <= held, "{self:?}");
        debug_assert!(flushed <= held_durable && held_durable <= held, "{self:?}");
        debug_assert!(held <= received || received == Lsn::INVALID, "{self:?}");
    }
}
