//! Values of connection parameters: words and numbers.

use std::time::Duration;

use walrider_wire::conninfo::ConnInfo;

use crate::{ConnectError, Reason, Result};

pub(crate) fn config<T>(text: impl Into<Reason>) -> Result<T> {
    Err(ConnectError::Config(text.into()))
}

/// One of a few words.
pub(crate) fn choice<T: Copy>(info: &ConnInfo, keyword: &str, default: T, words: &[(&str, T)]) -> Result<T> {
    // One that is empty, as of a variable that is not set, is none of them (`pqConnectOptions2`).
    let Some(text) = info.get(keyword) else { return Ok(default) };
    match words.iter().find(|(word, _)| *word == text) {
        Some((_, value)) => Ok(*value),
        None => config(format!("invalid {keyword} value: \"{text}\"")),
    }
}

pub(crate) fn number(info: &ConnInfo, keyword: &str) -> Result<Option<i64>> {
    let Some(text) = info.non_empty(keyword) else { return Ok(None) };
    match text.trim().parse::<i32>() {
        Ok(number) => Ok(Some(number.into())),
        Err(_) => config(format!("invalid integer value \"{text}\" for connection option \"{keyword}\"")),
    }
}

/// A time in the option's unit; zero and less mean none.
pub(crate) fn duration(info: &ConnInfo, keyword: &str, unit: fn(u64) -> Duration) -> Result<Option<Duration>> {
    let number = number(info, keyword)?.and_then(|number| u64::try_from(number).ok());
    Ok(number.filter(|&number| number > 0).map(unit))
}
