//! `walrider top`, and `walrider explain-lag`, which says the same of a recording.

mod metrics;
mod screen;
mod terminal;
mod text;
mod trend;
mod web;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use walrider_lag::collect::{Collector, Target};
use walrider_lag::sample::{SCHEMA_VERSION, Sample};
use walrider_lag::split::{Observer, View};

use crate::failure::{self, Exit, Failure};
use crate::out;
use crate::values::parse_duration;
use terminal::Terminal;
use trend::Trend;
use web::Web;

/// How long the first answers may take.
pub const PATIENCE: Duration = Duration::from_secs(6);
/// The same before a screen is shown, or a page served, that says so.
const SHORT_PATIENCE: Duration = Duration::from_millis(300);
/// How often to look whether a signal has come.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

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
    /// End when so many were printed
    #[arg(short = 'n', long, value_name = "N", requires = "batch", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print an object for each round
    #[arg(long, requires = "batch")]
    json: bool,
    /// Serve the same as a web page, and as /metrics for Prometheus; where there is no terminal, nothing but that
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Ask the primary every 10 s what its WAL is made of, by pg_walinspect; that costs it more than the rest
    #[arg(id = "wal_content", long = "wal")]
    wal: bool,
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
    // A terminal is restored by then.
    match watch(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(args.json),
    }
}

/// Where a view goes, besides the page.
enum Shows {
    Lines { json: bool },
    Screen(Box<Terminal>),
    Nothing,
}

/// Whether a signal wants it to end.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Stop {
    fn by_signals() -> io::Result<Stop> {
        let stop = Stop::default();
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Waits; whether to go on.
    fn sleep_until(&self, deadline: Instant) -> bool {
        while !self.is_wanted() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(LOOK_INTERVAL));
        }
        false
    }
}

fn watch(args: &TopArgs) -> Result<(), Failure> {
    if args.interval < Duration::from_millis(100) {
        return Err(Failure::new(Exit::Usage, "--interval must be at least 100ms"));
    }
    if !args.batch && args.listen.is_none() && !Terminal::is_there() {
        let message = "the standard output is no terminal: --batch prints text, --listen HOST:PORT serves a page";
        return Err(Failure::new(Exit::Usage, message));
    }
    let targets = targets(&args.servers, "walrider top")?;
    let recording = args.record.as_ref().map(Recording::open).transpose()?;
    let web = args.listen.as_deref().map(Web::start).transpose();
    let web = web.map_err(|error| Failure::new(Exit::Refused, error))?;
    // The reader of the lines may end this at any moment, as ever.
    let stop = if args.batch { Ok(Stop::default()) } else { Stop::by_signals() };
    let stop = stop.map_err(|error| Failure::new(Exit::Refused, format!("could not handle signals: {error}")))?;
    let shows = if args.batch {
        Shows::Lines { json: args.json }
    } else if Terminal::is_there() {
        Shows::Screen(Box::new(Terminal::take(args.interval).map_err(|error| no_terminal(&error))?))
    } else {
        Shows::Nothing
    };
    if let (Some(web), Shows::Lines { .. } | Shows::Nothing) = (&web, &shows) {
        failure::note(format_args!("the page is at {}", web.url()));
    }
    rounds(args, &targets, shows, web.as_ref(), recording, &stop)
}

fn no_terminal(error: &io::Error) -> Failure {
    Failure::new(Exit::Refused, format!("could not use the terminal: {error}; --batch prints text"))
}

/// Asks, shows, and waits for the next time.
fn rounds(
    args: &TopArgs,
    targets: &[Target],
    mut shows: Shows,
    web: Option<&Web>,
    mut recording: Option<Recording>,
    stop: &Stop,
) -> Result<(), Failure> {
    let collector = Collector::start(targets, args.interval, args.wal);
    let (mut observer, mut trend) = (Observer::default(), Trend::default());
    collector.wait(if args.batch { PATIENCE } else { SHORT_PATIENCE });
    let mut next = Instant::now();
    for round in 0.. {
        let sample = collector.sample();
        if let Some(recording) = &mut recording {
            recording.add(&sample)?;
        }
        let view = observer.look(&sample);
        trend.note(&view);
        if let Some(web) = web {
            web.show(&view, &trend, sample.time, args.interval);
        }
        // One that was late does not make the others come all at once.
        next = (next + args.interval).max(Instant::now());
        let goes_on = match &mut shows {
            Shows::Screen(terminal) => terminal.show(&view, &trend, next, stop).map_err(|error| no_terminal(&error))?,
            Shows::Nothing => stop.sleep_until(next),
            Shows::Lines { json } => {
                // The first says nothing of speed.
                if round > 0 {
                    print(&view, *json);
                }
                let last = args.count.is_some_and(|count| round >= count) || out::is_closed();
                !last && stop.sleep_until(next)
            }
        };
        if !goes_on {
            break;
        }
    }
    Ok(())
}

/// The servers of a command line; without one, that of the environment.
pub fn targets(servers: &[String], application_name: &str) -> Result<Vec<Target>, Failure> {
    let servers = if servers.is_empty() { &[String::new()][..] } else { servers };
    let targets = servers.iter().map(|server| Target::parse(server, application_name)).collect::<Result<_, _>>();
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
