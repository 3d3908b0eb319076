//! `walrider top`, and `walrider explain-lag`, which says the same of a recording.

mod text;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use walrider_lag::collect::{Collector, Target};
use walrider_lag::sample::{SCHEMA_VERSION, Sample};
use walrider_lag::split::{Observer, View};

use crate::failure::{self, Exit, Failure};
use crate::out;
use crate::values::parse_duration;

/// How long the first answers may take.
pub const PATIENCE: Duration = Duration::from_secs(6);

/// Show where the lag of standbys is: not sent, network, write, fsync, or replay and what that waits for
///
/// Name the primary and, to see why replay is slow, its standbys. pg_monitor is enough, and no extension is needed; nothing is
/// changed on any server. For walrider standby, name its --http.
#[derive(Args)]
pub struct TopArgs {
    /// Servers: connection strings as libpq takes them, or http://HOST:PORT of a walrider standby; none: PGHOST and the like
    #[arg(value_name = "CONNINFO")]
    servers: Vec<String>,
    /// How often to ask
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    interval: Duration,
    /// Print plain text, or with --json an object a line, instead of a screen
    #[arg(short, long)]
    batch: bool,
    /// End after so many rounds
    #[arg(short = 'n', long, value_name = "N", requires = "batch")]
    count: Option<u64>,
    /// Print an object for each round
    #[arg(long, requires = "batch")]
    json: bool,
    /// Append what the servers say to a file, for walrider explain-lag
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Say where the lag was, from what walrider top --record has written
#[derive(Args)]
pub struct ExplainLagArgs {
    /// The recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `walrider top`.
pub fn run(args: &TopArgs) -> ExitCode {
    match watch(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(args.json),
    }
}

fn watch(args: &TopArgs) -> Result<(), Failure> {
    if args.interval < Duration::from_millis(100) {
        return Err(Failure::new(Exit::Usage, "--interval must be at least 100ms"));
    }
    let targets = targets(&args.servers)?;
    let mut recording = args.record.as_ref().map(Recording::open).transpose()?;
    let collector = Collector::start(&targets, args.interval);
    let mut observer = Observer::default();
    collector.wait_for(1, PATIENCE);
    let mut next = Instant::now();
    for round in 0.. {
        let sample = collector.sample();
        if let Some(recording) = &mut recording {
            recording.add(&sample)?;
        }
        let view = observer.look(&sample);
        // The first says nothing of speed.
        if round > 0 || args.count == Some(1) {
            print(&view, args.json);
        }
        if args.count.is_some_and(|count| round >= count.max(2) - 1) || out::is_closed() {
            break;
        }
        next += args.interval;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// The servers of a command line; without one, that of the environment.
pub fn targets(servers: &[String]) -> Result<Vec<Target>, Failure> {
    let servers = if servers.is_empty() { &[String::new()][..] } else { servers };
    let targets = servers.iter().map(|server| Target::parse(server)).collect::<Result<_, _>>();
    targets.map_err(|error| Failure::new(Exit::Usage, error))
}

fn print(view: &View, json: bool) {
    if json {
        println!("{}", json!({"schema_version": SCHEMA_VERSION, "view": view}));
    } else {
        out::say(format_args!("{}\n", text::render(view)));
    }
}

/// A file of samples, one a line.
struct Recording {
    path: PathBuf,
    file: File,
}

impl Recording {
    fn open(path: &PathBuf) -> Result<Recording, Failure> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|error| Recording::failure(path, &error))?;
        Ok(Recording { path: path.clone(), file })
    }

    fn add(&mut self, sample: &Sample) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(sample).expect("it has no keys but text");
        line.push(b'\n');
        self.file.write_all(&line).map_err(|error| Recording::failure(&self.path, &error))
    }

    fn failure(path: &Path, error: &io::Error) -> Failure {
        Failure::new(Exit::Refused, format!("could not write \"{}\": {error}", path.display()))
    }
}

/// Runs `walrider explain-lag`.
pub fn explain(args: &ExplainLagArgs) -> ExitCode {
    match explained(args) {
        Ok(view) => {
            print(&view, args.json);
            ExitCode::SUCCESS
        }
        Err(failure) => failure.tell(args.json),
    }
}

fn explained(args: &ExplainLagArgs) -> Result<View, Failure> {
    let (mut observer, mut last) = (Observer::default(), None);
    read_recording(&args.file, &mut |sample| last = Some(observer.look(&sample)))?;
    Ok(last.expect("a recording has a sample"))
}

/// Hands out the samples of a recording, of which there is at least one.
pub fn read_recording(path: &Path, found: &mut dyn FnMut(Sample)) -> Result<(), Failure> {
    let shown = path.display();
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(Exit::Refused, format!("could not read \"{shown}\": {error}"));
    let file = File::open(path).map_err(|error| failed(&error))?;
    let mut any = false;
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|error| failed(&error))?;
        match serde_json::from_str::<Sample>(&line) {
            Ok(sample) if sample.schema_version == SCHEMA_VERSION => {
                any = true;
                found(sample);
            }
            Ok(sample) => {
                let version = sample.schema_version;
                return Err(Failure::new(
                    Exit::Refused,
                    format!("\"{shown}\" is of another Walrider: schema_version {version}"),
                ));
            }
            // The last line of one that was killed.
            Err(error) => failure::warning(format_args!("\"{shown}\", line {}: {error}; passed over", number + 1)),
        }
    }
    let nothing = || Failure::new(Exit::Damaged, format!("\"{shown}\" is no recording of walrider top --record"));
    any.then_some(()).ok_or_else(nothing)
}
