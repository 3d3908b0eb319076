//! Whether a standby follows as it should: the answer for load balancers.

use crate::status::{Command, StandbyStatus, State};

/// How far behind is still healthy; no limit where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Bytes that replay may be behind the primary (for `walrider receive`: what is durable).
    pub max_lag_bytes: Option<u64>,
    /// Seconds that replay may be behind.
    pub max_lag_seconds: Option<f64>,
}

impl Limits {
    /// Reads them from the query of a URL, as in `max_lag_bytes=1048576&max_lag_seconds=10`.
    ///
    /// # Errors
    /// Says what is not understood: a limit that is misspelt must not count as none.
    pub fn parse(query: &str) -> Result<Limits, String> {
        let mut limits = Limits::default();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let invalid = |expected: &str| format!("invalid value for \"{name}\": \"{value}\"; expected {expected}");
            match name {
                "max_lag_bytes" => limits.max_lag_bytes = Some(value.parse().map_err(|_| invalid("a number"))?),
                "max_lag_seconds" => {
                    let seconds = value.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
                    limits.max_lag_seconds = Some(seconds.ok_or_else(|| invalid("a number of seconds"))?);
                }
                _ => return Err(format!("unknown parameter \"{name}\": use max_lag_bytes or max_lag_seconds")),
            }
        }
        Ok(limits)
    }
}

/// Whether it gets WAL from where it should. Where replay is paused it does: what counts is the connection.
pub fn follows(status: &StandbyStatus) -> bool {
    match status.state {
        State::Streaming => true,
        State::Paused | State::Readable => status.connected_since.is_some(),
        State::Recovering => !status.has_primary,
        _ => false,
    }
}

/// Whether it follows, replays, and is within the limits.
///
/// A standby without a primary, which follows an archive, is healthy while it recovers. A limit that cannot be checked,
/// because nothing is known yet to count from, counts as exceeded.
///
/// # Errors
/// The reason why not, in words.
pub fn check(status: &StandbyStatus, limits: &Limits) -> Result<(), String> {
    if !follows(status) {
        if status.state == State::Readable {
            return Err("readable, but nothing is received".to_owned());
        }
        let trouble =
            matches!(status.state, State::Starting | State::Connecting | State::WaitingForDisk | State::Failed);
        let because = status.last_error.as_ref().filter(|_| trouble).map(|error| format!(": {}", error.message));
        return Err(format!("{}{}", status.state, because.unwrap_or_default()));
    }
    if status.paused || status.state == State::Paused {
        return Err("replay is paused".to_owned());
    }
    let (done, position, lag_seconds) = match status.command {
        Command::Receive | Command::Relay => ("flush", status.positions.flushed, None),
        _ => ("replay", status.positions.replayed, status.replay_lag_seconds),
    };
    if let Some(limit) = limits.max_lag_bytes {
        match position.behind_bytes {
            Some(behind) if behind <= limit => {}
            Some(behind) => return Err(format!("{done} is {behind} bytes behind, more than {limit}")),
            None => return Err(format!("how far {done} is behind is not known yet")),
        }
    }
    if let Some(limit) = limits.max_lag_seconds {
        match lag_seconds {
            Some(lag) if lag <= limit => {}
            Some(lag) => return Err(format!("{done} is {lag:.1} s behind, more than {limit}")),
            None => return Err(format!("how many seconds {done} is behind is not known")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::tests::streaming;

    fn verdict(status: &StandbyStatus, query: &str) -> Result<(), String> {
        check(status, &Limits::parse(query).unwrap())
    }

    #[test]
    fn only_what_follows_is_healthy() {
        for state in State::ALL {
            let status = StandbyStatus { state, ..streaming() };
            let follows = [State::Streaming, State::Readable].contains(&state);
            assert_eq!(verdict(&status, "").is_ok(), follows, "{state:?}");
        }
        let archive = StandbyStatus { state: State::Recovering, has_primary: false, primary: None, ..streaming() };
        verdict(&archive, "").unwrap();
        // It was never reached, and so is not known by name.
        let unreached = StandbyStatus { has_primary: true, ..archive };
        assert_eq!(verdict(&unreached, ""), Err("recovering".into()));
        let alone = StandbyStatus { state: State::Readable, connected_since: None, ..streaming() };
        assert_eq!(verdict(&alone, ""), Err("readable, but nothing is received".into()));
        let paused = StandbyStatus { paused: true, ..streaming() };
        assert_eq!(verdict(&paused, ""), Err("replay is paused".into()));
        let away = StandbyStatus { state: State::Connecting, ..streaming() };
        assert!(verdict(&away, "").unwrap_err().starts_with("connecting: connection \"lost\""));
    }

    #[test]
    fn limits() {
        let status = streaming();
        verdict(&status, "max_lag_bytes=16&max_lag_seconds=2").unwrap();
        assert_eq!(verdict(&status, "max_lag_bytes=15").unwrap_err(), "replay is 16 bytes behind, more than 15");
        assert_eq!(verdict(&status, "max_lag_seconds=1.5").unwrap_err(), "replay is 2.0 s behind, more than 1.5");
        let fresh = StandbyStatus { state: State::Streaming, ..StandbyStatus::new() };
        assert!(verdict(&fresh, "max_lag_bytes=1").is_err() && verdict(&fresh, "max_lag_seconds=1").is_err());
        let receive = StandbyStatus { command: Command::Receive, ..streaming() };
        verdict(&receive, "max_lag_bytes=8").unwrap();
        assert_eq!(verdict(&receive, "max_lag_bytes=7").unwrap_err(), "flush is 8 bytes behind, more than 7");
    }

    #[test]
    fn what_is_not_understood_is_not_ignored() {
        for query in ["max_lag_bytes", "max_lag_bytes=-1", "max_lag_seconds=NaN", "max_lag_seconds=-1", "max_lag=1"] {
            assert!(Limits::parse(query).is_err(), "{query}");
        }
        assert_eq!(Limits::parse("").unwrap(), Limits::default());
    }
}
