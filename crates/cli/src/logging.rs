//! The log of long runs, on stderr: lines like PostgreSQL's, or a JSON object for each.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use clap::ValueEnum;
use serde::Deserialize;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{DefaultFields, FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormattedFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry, filter::LevelFilter, layer::SubscriberExt, reload};

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines as PostgreSQL's: time, process, severity, message
    #[default]
    Text,
    /// A JSON object on each line
    Json,
}

/// Reads a level: `error`, `warn`, `info`, `debug` or `trace`.
pub fn parse_level(text: &str) -> Result<LevelFilter, String> {
    let known = ["error", "warn", "info", "debug", "trace"].contains(&text);
    let level = LevelFilter::from_str(text).ok().filter(|_| known);
    level.ok_or_else(|| "expected error, warn, info, debug or trace".to_owned())
}

/// Changes the level of the log while it runs.
#[derive(Clone, Debug)]
pub struct LevelSwitch(reload::Handle<LevelFilter, Registry>);

impl LevelSwitch {
    /// From now on.
    pub fn set(&self, level: LevelFilter) {
        // It fails only when the log is gone, and that is as long as the process.
        let _ = self.0.reload(level);
    }
}

/// Starts the log of this process, on stderr. Only the first call counts.
pub fn start(format: LogFormat, level: LevelFilter) -> LevelSwitch {
    let (subscriber, switch) = subscriber(format, level, std::io::stderr);
    // Somebody else's log, as in tests, does as well.
    let _ = tracing::subscriber::set_global_default(subscriber);
    switch
}

fn subscriber<W>(format: LogFormat, level: LevelFilter, writer: W) -> (impl Subscriber + Send + Sync, LevelSwitch)
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(level);
    let base = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
    let lines = match format {
        LogFormat::Text => base.event_format(ServerLines).boxed(),
        LogFormat::Json => base.json().flatten_event(true).with_timer(Rfc3339).boxed(),
    };
    (Registry::default().with(filter).with(lines), LevelSwitch(handle))
}

/// Times of JSON lines: as those of `/status`.
struct Rfc3339;

impl FormatTime for Rfc3339 {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        write!(writer, "{:.6}", now())
    }
}

fn now() -> jiff::Timestamp {
    jiff::Timestamp::try_from(SystemTime::now()).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}

/// Lines as with `log_line_prefix = '%m [%p] '`, in UTC.
struct ServerLines;

impl<S> FormatEvent<S, DefaultFields> for ServerLines
where
    S: Subscriber + for<'l> LookupSpan<'l>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, DefaultFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // PostgreSQL's words (`error_severity`, `utils/error/elog.c`).
        let severity = match *event.metadata().level() {
            Level::ERROR => "ERROR",
            Level::WARN => "WARNING",
            Level::INFO => "LOG",
            Level::DEBUG => "DEBUG",
            Level::TRACE => "DEBUG5",
        };
        let mut fields = FormattedFields::<DefaultFields>::new(String::new());
        context.field_format().format_fields(fields.as_writer(), event)?;
        // What a server sent may have lines of its own; a tab keeps them from passing for others of the log.
        let message = fields.fields.replace('\r', "\\r").replace('\n', "\n\t");
        let time = now().strftime("%Y-%m-%d %H:%M:%S%.3f UTC");
        writeln!(writer, "{time} [{}] {severity}:  {message}", std::process::id())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, work: impl FnOnce(&LevelSwitch)) -> String {
        let sink = Sink::default();
        let into = sink.clone();
        let (subscriber, switch) = subscriber(format, LevelFilter::INFO, move || into.clone());
        tracing::subscriber::with_default(subscriber, || work(&switch));
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_like_the_servers() {
        let text = logged(LogFormat::Text, |_| {
            tracing::warn!(lsn = "0/28", "one\ntwo\r");
            tracing::debug!("not this");
        });
        let (time, rest) = text.split_at(text.find(" [").unwrap());
        assert!(time.ends_with(" UTC") && time.len() == "2026-11-21 10:42:26.123 UTC".len(), "{text}");
        assert_eq!(rest, format!(" [{}] WARNING:  one\n\ttwo\\r lsn=\"0/28\"\n", std::process::id()));
    }

    #[test]
    fn json() {
        let text = logged(LogFormat::Json, |_| tracing::info!(timeline = 3, "a \"b\"\nc"));
        let line: serde_json::Value = serde_json::from_str(text.strip_suffix('\n').unwrap()).unwrap();
        assert_eq!(
            (&line["level"], &line["message"], &line["timeline"]),
            (&"INFO".into(), &"a \"b\"\nc".into(), &3.into())
        );
        assert!(line["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{line}");
    }

    #[test]
    fn the_level_changes_while_it_runs() {
        let text = logged(LogFormat::Text, |switch| {
            tracing::debug!("one");
            switch.set(LevelFilter::DEBUG);
            tracing::debug!("two");
            switch.set(LevelFilter::ERROR);
            tracing::warn!("three");
        });
        assert!(text.contains("two") && !text.contains("one") && !text.contains("three"), "{text}");
    }

    #[test]
    fn levels() {
        assert_eq!(parse_level("warn"), Ok(LevelFilter::WARN));
        for bad in ["", "off", "3", "WARN", "info,x=debug"] {
            assert!(parse_level(bad).is_err(), "{bad}");
        }
    }
}
