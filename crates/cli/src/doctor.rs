//! `walrider doctor`.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use walrider_lag::collect::Collector;
use walrider_lag::rules::{Finding, Series, Severity};
use walrider_lag::sample::SCHEMA_VERSION;

use crate::failure::{Exit, Failure};
use crate::out;
use crate::top::{self, PATIENCE};
use crate::values::parse_duration;

/// How often servers are asked.
const INTERVAL: Duration = Duration::from_secs(1);

/// Watch servers for a while, and say what is wrong with replication: what shows it, what to change, and what that costs
///
/// Name the primary and its standbys, or a recording of walrider top --record. pg_monitor is enough, and no extension is needed;
/// nothing is changed on any server.
///
/// Exit codes: 0 nothing is wrong; 5 something is.
#[derive(Args)]
pub struct DoctorArgs {
    /// Servers: connection strings as libpq takes them, or http://HOST:PORT of a walrider standby; none: PGHOST and the like
    #[arg(value_name = "CONNINFO")]
    servers: Vec<String>,
    /// How long to watch
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    time: Duration,
    /// Read what walrider top --record has written instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["servers", "time"])]
    recording: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs it.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let series = match &args.recording {
        Some(file) => read(file),
        None => watch(args),
    };
    let findings = match series {
        Ok(series) => series.findings(),
        Err(failure) => return failure.tell(args.json),
    };
    if args.json {
        println!("{}", json!({"schema_version": SCHEMA_VERSION, "findings": findings}));
    } else {
        out::say(format_args!("{}", render(&findings)));
    }
    match findings.iter().any(|finding| finding.severity != Severity::Notice) {
        true => Exit::Different.into(),
        false => ExitCode::SUCCESS,
    }
}

fn watch(args: &DoctorArgs) -> Result<Series, Failure> {
    let targets = top::targets(&args.servers, "walrider doctor")?;
    let collector = Collector::start(&targets, INTERVAL, false);
    collector.wait(PATIENCE);
    let mut series = Series::default();
    let mut next = Instant::now();
    let end = next + args.time.max(2 * INTERVAL);
    while next <= end {
        series.add(collector.sample());
        next += INTERVAL;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(series)
}

fn read(file: &std::path::Path) -> Result<Series, Failure> {
    let mut series = Series::default();
    top::read_recording(file, &mut |sample| series.add(sample))?;
    Ok(series)
}

fn render(findings: &[Finding]) -> String {
    let mut text = String::new();
    let mut line = |words: &str| {
        text += words;
        text.push('\n');
    };
    if findings.is_empty() {
        line("Nothing is wrong, as far as was seen.");
    }
    for finding in findings {
        let kind = match finding.severity {
            Severity::Critical => "CRITICAL",
            Severity::Warning => "WARNING",
            Severity::Notice => "NOTICE",
        };
        let subject = if finding.subject.is_empty() { String::new() } else { format!("{}: ", finding.subject) };
        line(&format!("{kind}  {subject}{} [{}]", finding.what, finding.rule));
        finding.evidence.iter().for_each(|evidence| line(&format!("    seen:   {evidence}")));
        line(&format!("    do:     {}", finding.advice));
        if !finding.cost.is_empty() {
            line(&format!("    costs:  {}", finding.cost));
        }
    }
    text
}
