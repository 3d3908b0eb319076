//! Whom the primary's synchronous commits wait for, stage by stage: for the relay's own spool alone, or for some of those downstream as
//! well, named as in `synchronous_standby_names`.

use std::collections::BTreeMap;
use std::str::FromStr;

use walrider_layout::{Lsn, TimelineId};

use crate::downstream::Downstream;

/// So many of those named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quorum {
    count: usize,
    /// `application_name`s; `*` is everybody.
    names: Vec<String>,
}

/// What cannot be a quorum.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" names no standbys: write \"own\", \"ANY 1 (a, b)\" or \"ALL (a, b)\"; * stands for every name")]
pub struct QuorumError(String);

/// Stage by stage; `None`: the relay's own spool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acks {
    /// For `synchronous_commit = remote_write`.
    pub write: Option<Quorum>,
    /// For `on`.
    pub flush: Option<Quorum>,
    /// For `remote_apply`. The relay applies nothing itself: without anybody, nothing is ever acknowledged.
    pub apply: Option<Quorum>,
}

/// How far each stage is where others count; what does not count is as far as can be, and `apply` nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Written.
    pub write: Lsn,
    /// Durable.
    pub flush: Lsn,
    /// Applied.
    pub apply: Lsn,
}

impl Default for Reached {
    fn default() -> Reached {
        Reached { write: Lsn(0), flush: Lsn(0), apply: Lsn(0) }
    }
}

impl Reached {
    /// The further of two, stage by stage.
    pub fn max(self, other: Reached) -> Reached {
        Reached {
            write: self.write.max(other.write),
            flush: self.flush.max(other.flush),
            apply: self.apply.max(other.apply),
        }
    }
}

impl Acks {
    /// How far those downstream are together on a timeline. Those on another do not count: what they have more of it can never be of this one.
    pub fn reached(&self, downstreams: &[&Downstream], timeline: TimelineId) -> Reached {
        let downstreams: Vec<&Downstream> =
            downstreams.iter().copied().filter(|one| one.streaming == Some(timeline)).collect();
        let reached = |quorum: &Option<Quorum>, of: fn(&Downstream) -> Lsn, without: Lsn| {
            quorum.as_ref().map_or(without, |quorum| quorum.reached(downstreams.iter().copied(), of))
        };
        Reached {
            write: reached(&self.write, |one| one.told.write, Lsn(u64::MAX)),
            flush: reached(&self.flush, |one| one.told.flush, Lsn(u64::MAX)),
            apply: reached(&self.apply, |one| one.told.apply, Lsn(0)),
        }
    }
}

impl Quorum {
    /// Up to where enough of those named are; zero while there are too few (`SyncRepGetNthLatestSyncRecPtr`).
    fn reached<'a>(&self, downstreams: impl Iterator<Item = &'a Downstream>, of: fn(&Downstream) -> Lsn) -> Lsn {
        let named = |one: &&Downstream| {
            self.names.iter().any(|name| name == "*" || name.eq_ignore_ascii_case(&one.application_name))
        };
        // One that came back is still one, although its old connection is not known to be gone.
        let mut by_name: BTreeMap<String, Lsn> = BTreeMap::new();
        for one in downstreams.filter(named) {
            let at = by_name.entry(one.application_name.to_ascii_lowercase()).or_default();
            *at = of(one).max(*at);
        }
        let mut positions: Vec<Lsn> = by_name.into_values().collect();
        positions.sort_unstable_by(|a, b| b.cmp(a));
        positions.get(self.count - 1).copied().unwrap_or(Lsn(0))
    }
}

impl FromStr for Quorum {
    type Err = QuorumError;

    fn from_str(text: &str) -> Result<Quorum, QuorumError> {
        let wrong = || QuorumError(text.to_owned());
        let (how, names) = text.trim().strip_suffix(')').and_then(|rest| rest.split_once('(')).ok_or_else(wrong)?;
        let name = |name: &str| {
            let name = name.trim();
            let name = name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name);
            (!name.is_empty() && !name.contains('"')).then(|| name.to_owned())
        };
        let names: Vec<String> = names.split(',').map(name).collect::<Option<_>>().ok_or_else(wrong)?;
        let mut words = how.split_whitespace();
        let count = match (words.next(), words.next(), words.next()) {
            (Some(all), None, None) if all.eq_ignore_ascii_case("ALL") && !names.iter().any(|name| name == "*") => {
                names.len()
            }
            (Some(any), Some(count), None) if any.eq_ignore_ascii_case("ANY") => count.parse().map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        if count == 0 || (count > names.len() && !names.iter().any(|name| name == "*")) {
            return Err(wrong());
        }
        Ok(Quorum { count, names })
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use walrider_wire::stream::StatusUpdate;

    use super::*;

    fn one(name: &str, at: u64) -> Downstream {
        Downstream {
            application_name: name.into(),
            user: "u".into(),
            address: "local".into(),
            since: SystemTime::UNIX_EPOCH,
            slot: None,
            streaming: Some(TimelineId(2)),
            sent: Lsn(at),
            told: StatusUpdate {
                write: Lsn(at),
                flush: Lsn(at - 1),
                apply: Lsn(at - 2),
                time: 0,
                reply_requested: false,
            },
            feedback: None,
        }
    }

    #[test]
    fn so_many_of_those_named_count() {
        let left = Downstream { streaming: Some(TimelineId(1)), ..one("c", 5000) };
        let all = [one("a", 100), one("b", 90), one("c", 80), one("x", 1000), one("A", 70), left];
        let reached = |text: &str| {
            let acks = Acks { flush: Some(text.parse().unwrap()), ..Acks::default() };
            acks.reached(&all.iter().collect::<Vec<_>>(), TimelineId(2)).flush.0
        };
        assert_eq!(reached("ANY 1 (a, b, c)"), 99);
        assert_eq!(reached("any 2 (A,\"b\", c)"), 89);
        assert_eq!(reached("ALL (a, b, c)"), 79);
        assert_eq!(reached("ANY 1 (*)"), 999);
        assert_eq!(reached("ANY 2 (c, away)"), 0, "one of them is not here");
        assert_eq!(reached("ANY 9 (*)"), 0);
        let own = Acks::default().reached(&all.iter().collect::<Vec<_>>(), TimelineId(2));
        assert_eq!((own.write, own.flush, own.apply), (Lsn(u64::MAX), Lsn(u64::MAX), Lsn(0)));
    }

    #[test]
    fn what_names_nobody_is_refused() {
        for text in [
            "",
            "a",
            "ANY (a)",
            "ANY 0 (a)",
            "ANY 2 (a)",
            "ALL (*)",
            "ANY 1 (a",
            "ANY 1 ()",
            "ANY x (a)",
            "FIRST 1 (a)",
        ] {
            assert!(text.parse::<Quorum>().is_err(), "{text}");
        }
    }
}
