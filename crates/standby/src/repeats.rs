//! Messages that come again and again are logged once, and then from time to time, with how often they came.

use std::time::{Duration, Instant};

use tracing::Level;

/// How long a message that was logged is only counted.
const INTERVAL: Duration = Duration::from_secs(60);
/// So many messages are known, however they alternate; the one that came first gives way.
const MOST: usize = 16;

/// What was logged of late.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Vec<Said>);

#[derive(Debug)]
struct Said {
    level: Level,
    text: String,
    /// When it was logged last.
    at: Instant,
    /// How often it came since.
    again: u32,
}

impl Said {
    fn line(&self, now: Instant) -> String {
        match self.again {
            0 | 1 => self.text.clone(),
            times => {
                let seconds = (now - self.at).as_secs_f64().ceil();
                format!("{} (repeated {times} times in {seconds} s)", self.text)
            }
        }
    }
}

impl Repeats {
    /// Logs a message, or counts it.
    pub fn say(&mut self, level: Level, text: &str) {
        for (level, line) in self.note(level, text, Instant::now()) {
            log(level, &line);
        }
    }

    /// What went wrong is over: logs what was only counted, and forgets it, so that it is news when it comes again.
    pub fn settle(&mut self) {
        for (level, line) in self.drain(Instant::now()) {
            log(level, &line);
        }
    }

    /// The lines that a message makes due.
    fn note(&mut self, level: Level, text: &str, now: Instant) -> Vec<(Level, String)> {
        if let Some(said) = self.0.iter_mut().find(|said| said.level == level && said.text == text) {
            said.again += 1;
            if now - said.at < INTERVAL {
                return Vec::new();
            }
            let line = said.line(now);
            (said.at, said.again) = (now, 0);
            return vec![(level, line)];
        }
        let mut lines = Vec::new();
        if self.0.len() == MOST {
            let oldest = self.0.remove(0);
            lines.extend((oldest.again > 0).then(|| (oldest.level, oldest.line(now))));
        }
        self.0.push(Said { level, text: text.to_owned(), at: now, again: 0 });
        lines.push((level, text.to_owned()));
        lines
    }

    fn drain(&mut self, now: Instant) -> Vec<(Level, String)> {
        self.0.drain(..).filter(|said| said.again > 0).map(|said| (said.level, said.line(now))).collect()
    }
}

/// Levels of the macros are fixed where they stand.
fn log(level: Level, line: &str) {
    match level {
        Level::ERROR => tracing::error!("{line}"),
        Level::WARN => tracing::warn!("{line}"),
        _ => tracing::info!("{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_and_then_with_a_count() {
        let mut repeats = Repeats::default();
        let began = Instant::now();
        let mut note = |text: &str, seconds| -> Vec<String> {
            let lines = repeats.note(Level::WARN, text, began + Duration::from_secs(seconds));
            lines.into_iter().map(|(_, line)| line).collect()
        };
        assert_eq!(note("refused", 0), ["refused"]);
        for second in 1..12 {
            assert!(note("refused", second * 5).is_empty());
        }
        assert_eq!(note("refused", 60), ["refused (repeated 12 times in 60 s)"]);
        // Two in turn are known both.
        assert_eq!(note("other", 61), ["other"]);
        assert!(note("refused", 62).is_empty() && note("other", 63).is_empty());
        // Long ago, and once: it is news.
        assert_eq!(note("refused", 500), ["refused (repeated 2 times in 440 s)"]);
        assert_eq!(note("refused", 900), ["refused"]);
        assert!(note("refused", 901).is_empty());
        let left = repeats.drain(began + Duration::from_secs(910));
        assert_eq!(left, [(Level::WARN, "refused".to_owned()), (Level::WARN, "other".to_owned())]);
    }

    #[test]
    fn what_is_known_is_bounded() {
        let mut repeats = Repeats::default();
        let now = Instant::now();
        for text in 0..1000 {
            assert_eq!(repeats.note(Level::WARN, &text.to_string(), now).len(), 1);
        }
        assert_eq!(repeats.0.len(), MOST);
        // What gives way is not lost.
        for _ in 0..3 {
            assert!(repeats.note(Level::WARN, "984", now).is_empty());
        }
        let lines = repeats.note(Level::ERROR, "new", now);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0], (Level::WARN, "984 (repeated 3 times in 0 s)".to_owned()));
    }
}
