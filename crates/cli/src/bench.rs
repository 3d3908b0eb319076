//! `walrider bench`.

mod report;
mod summary;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use walrider_lag::collect::Target;
use walrider_matrix::fraction::Design;
use walrider_matrix::given::Given;
use walrider_matrix::plan::{BINDIR, Factor, Load, Plan, Run};
use walrider_matrix::results::{Done, Header, Machine, Results, SCHEMA_VERSION};
use walrider_matrix::throwaway::{self, Place};
use walrider_matrix::{Conditions, RunError, Stop};
use walrider_observe::status::Time;

use crate::failure::{self, Exit, Failure, note, warning};
use crate::out;
use crate::values::parse_duration;
use summary::Summary;

/// How often the bar moves while a run goes on.
const TICK: Duration = Duration::from_millis(200);

/// Find out what settings do to the speed of replication: a run for each combination of them, and their effects with intervals
///
/// Each run is made on a primary and a standby of its own, which are removed afterwards; or, with --primary, on servers that are
/// there. What is measured is written to FILE, a line for each run, and a report in HTML beside it. A run that fails is recorded, and the
/// others are made.
///
/// Exit codes: 0 all runs have succeeded; 1 one has failed, or it was interrupted.
#[derive(Args)]
pub struct BenchArgs {
    /// Vary a setting; with | between levels that have commas. Beside PostgreSQL's own: standby=stock,walrider,none,
    /// data_checksums=on,off, bindir=DIR,DIR for several majors
    #[arg(long, value_name = "NAME=LEVEL,LEVEL", value_parser = Factor::parse)]
    vary: Vec<Factor>,
    /// Set a setting in all runs
    #[arg(long, value_name = "NAME=VALUE", value_parser = Factor::fixed)]
    set: Vec<Factor>,
    /// Try one of N combinations, chosen so that effects are still told apart as far as can be; the report says what is not
    #[arg(long, value_name = "1/N", default_value = "1/1", value_parser = parse_fraction)]
    fraction: u32,
    /// Try each so often; with 1 there are no intervals
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Of the order of runs, and of a fraction that is chosen at random [default: of the time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seed: Option<u64>,
    /// What is done: tables (inserts into five partitioned tables, 500 rows a commit), pgbench, or script=FILE for pgbench
    #[arg(long, value_name = "LOAD", default_value = "tables")]
    load: String,
    /// SQL for psql that makes what the script needs
    #[arg(long, value_name = "FILE", conflicts_with = "given_primary")]
    init: Option<PathBuf>,
    /// Of pgbench's tables
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    scale: u32,
    /// Sessions at once
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    clients: u16,
    /// How long the load of each run takes
    #[arg(short, long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    time: Duration,
    /// How long a server may take to start, to answer, or to catch up
    #[arg(long, value_name = "TIME", default_value = "5min", value_parser = parse_duration)]
    timeout: Duration,
    /// Directory of PostgreSQL's programs [default: they are on the PATH]
    #[arg(long, value_name = "DIR")]
    bindir: Option<PathBuf>,
    /// Where servers are made; each run needs room for its data twice, and its WAL three times [default: TMPDIR]
    #[arg(long, value_name = "DIR", conflicts_with = "given_primary")]
    work_dir: Option<PathBuf>,
    /// A primary that is there; the load runs in the database of the connection string
    #[arg(id = "given_primary", long = "primary", value_name = "CONNINFO")]
    primary: Option<String>,
    /// Its standby: a connection string, or http://HOST:PORT of a walrider standby
    #[arg(id = "given_standby", long = "standby", value_name = "CONNINFO", requires = "given_primary")]
    standby: Option<String>,
    /// Change what is varied or set by ALTER SYSTEM on both, and put it back at the end
    #[arg(long, requires = "given_primary")]
    change_settings: bool,
    /// The file of results: an object a line
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The report [default: FILE with .html]
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Go on with the file of results: what it has is not done again, but for runs that have failed
    #[arg(long)]
    resume: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs it.
pub fn run(args: &BenchArgs) -> ExitCode {
    match bench(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => Exit::Refused.into(),
        Err(failure) => failure.tell(args.json),
    }
}

/// Whether all runs have succeeded.
fn bench(args: &BenchArgs) -> Result<bool, Failure> {
    let plan = plan(args)?;
    let report = args.report.clone().unwrap_or_else(|| args.output.with_extension("html"));
    if report == args.output {
        return Err(Failure::new(Exit::Usage, "--output and --report are the same file"));
    }
    let design = |plan: &Plan| plan.design().map_err(|error| Failure::new(Exit::Usage, error));
    design(&plan)?;
    if args.primary.is_none() && rustix::process::geteuid().is_root() {
        let message = "servers cannot be run as root: become another user, or name servers with --primary";
        return Err(Failure::new(Exit::Refused, message));
    }
    let stop = Stop::default();
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        let registered = signal_hook::flag::register(signal, stop.0.clone());
        registered.map_err(|error| refused(format!("could not handle signals: {error}")))?;
    }
    let (load, clients) = (plan.load.clone(), args.clients);
    let conditions = Conditions { load, clients, duration: args.time, timeout: args.timeout, stop };
    let servers = Servers::open(args, &plan, &conditions)?;
    let mut results = open(args, plan)?;
    // Of its seed, which may be that of the file.
    let design = design(&results.header.plan)?;
    let runs = results.header.plan.runs(&design);
    let done = made(&servers, &design, &runs, &conditions, &mut results);
    let put_back = servers.put_back(&conditions);
    let summary = Summary::new(&results, &runs);
    let told = tell(args.json, &report, &summary, &design);
    // The object was printed: the rest is said on stderr alone.
    let wrong: Vec<Failure> = [put_back, done, told].into_iter().filter_map(Result::err).collect();
    wrong.iter().for_each(|failure| _ = failure.complain());
    Ok(wrong.is_empty() && summary.is_complete())
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Refused, error)
}

fn parse_fraction(text: &str) -> Result<u32, String> {
    let denominator = text.strip_prefix("1/").and_then(|number| number.parse().ok());
    denominator.filter(|&denominator| denominator > 0).ok_or_else(|| "expected a fraction as in 1/2".to_owned())
}

/// What the options say; a seed that is not named is zero.
fn plan(args: &BenchArgs) -> Result<Plan, Failure> {
    let usage = |message: String| Failure::new(Exit::Usage, message);
    let mut factors: Vec<Factor> = args.vary.iter().chain(&args.set).cloned().collect();
    let text = |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| usage("a path must be UTF-8".to_owned()));
    let mut servers = Vec::new();
    match &args.primary {
        Some(primary) => {
            if !factors.is_empty() && !args.change_settings {
                return Err(usage("settings of given servers are only changed with --change-settings".to_owned()));
            }
            for server in [Some(primary), args.standby.as_ref()].into_iter().flatten() {
                servers.push(Target::parse(server, "walrider bench").map_err(|error| usage(error.to_string()))?.name());
            }
        }
        None => {
            if let Some(bindir) = args.bindir.as_deref().filter(|_| factors.iter().all(|factor| factor.name != BINDIR))
            {
                factors.push(Factor { name: BINDIR.to_owned(), levels: vec![text(bindir)?] });
            }
        }
    }
    let load = match (args.load.as_str(), args.load.strip_prefix("script=")) {
        ("tables", _) => Load::Tables,
        ("pgbench", _) => Load::Pgbench { scale: args.scale },
        (_, Some(file)) => Load::Script { file: file.into(), init: args.init.clone() },
        (other, None) => return Err(usage(format!("--load is tables, pgbench or script=FILE, not \"{other}\""))),
    };
    if let Load::Script { file, init } = &load {
        for file in [Some(file), init.as_ref()].into_iter().flatten() {
            let opened = std::fs::File::open(file);
            opened.map_err(|error| usage(format!("could not open \"{}\": {error}", file.display())))?;
        }
    } else if args.init.is_some() {
        return Err(usage("--init is for --load script=FILE".to_owned()));
    }
    if args.time < Duration::from_secs(1) {
        return Err(usage("--time must be at least 1s".to_owned()));
    }
    Ok(Plan {
        factors,
        fraction: args.fraction,
        repeats: args.repeats,
        seed: args.seed.unwrap_or(0),
        load,
        clients: args.clients,
        seconds: args.time.as_secs_f64(),
        servers,
    })
}

/// The file of results, new or gone on with.
fn open(args: &BenchArgs, mut plan: Plan) -> Result<Results, Failure> {
    if args.resume {
        return Results::resume(&args.output, &plan).map_err(refused);
    }
    if plan.seed == 0 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        plan.seed = 1 + now % 1_000_000;
    }
    let header = Header {
        schema_version: SCHEMA_VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: Time::now(),
        machine: Machine::this(),
        plan,
    };
    Results::create(&args.output, header).map_err(refused)
}

/// What runs are made on.
enum Servers {
    ThrowAway(Place),
    Given(Box<Given>),
}

impl Servers {
    fn open(args: &BenchArgs, plan: &Plan, conditions: &Conditions) -> Result<Servers, Failure> {
        let Some(primary) = &args.primary else {
            let walrider = std::env::current_exe();
            let walrider = walrider.map_err(|error| refused(format!("could not find this program: {error}")))?;
            let work_dir = args.work_dir.clone().unwrap_or_else(std::env::temp_dir);
            // Servers run in directories of their own.
            let work_dir = std::path::absolute(&work_dir);
            let work_dir = work_dir.map_err(|error| refused(format!("could not find this directory: {error}")))?;
            return Ok(Servers::ThrowAway(Place { work_dir, walrider }));
        };
        let given = Given::open(primary, args.standby.as_deref(), args.bindir.clone(), &plan.factors, conditions);
        let given = given.map_err(refused)?;
        given.changes().iter().for_each(note);
        Ok(Servers::Given(Box::new(given)))
    }

    fn put_back(&self, conditions: &Conditions) -> Result<(), Failure> {
        match self {
            Servers::ThrowAway(_) => Ok(()),
            Servers::Given(given) => given.put_back(conditions).map_err(|failed| refused(failed.join("\n"))),
        }
    }
}

/// Makes the runs that are not there yet, until somebody wants it to end.
fn made(
    servers: &Servers,
    design: &Design,
    runs: &[Run],
    conditions: &Conditions,
    results: &mut Results,
) -> Result<(), Failure> {
    let plan = results.header.plan.clone();
    let has_figures = |run: &Run| results.of(run).is_some_and(|done| done.outcome.is_some());
    let left: Vec<&Run> = runs.iter().filter(|run| !has_figures(run)).collect();
    let combinations = design.combinations.len();
    note(format_args!(
        "{} of {} runs to do: {combinations} combinations, each {} times, in the order of --seed {}",
        left.len(),
        runs.len(),
        plan.repeats,
        plan.seed
    ));
    design.limits.iter().for_each(note);
    let bar = ProgressBar::new(runs.len() as u64).with_position((runs.len() - left.len()) as u64);
    let style = "{spinner} {bar:30} {pos} of {len} runs, {elapsed_precise}, {eta} left: {msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
    bar.enable_steady_tick(TICK);
    for run in left {
        let settings = plan.settings(run);
        let varied = plan.factors.iter().zip(&settings).filter(|(factor, _)| factor.levels.len() > 1);
        let name = varied.map(|(_, (name, value))| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
        bar.set_message(name.clone());
        if bar.is_hidden() {
            note(format_args!("run {} of {}: {name}", run.number, runs.len()));
        }
        let started_at = Time::now();
        let outcome = match servers {
            Servers::ThrowAway(place) => throwaway::run(place, &settings, conditions),
            Servers::Given(given) => given.run(&settings, conditions),
        };
        // What ends because everything ends has not failed.
        let outcome = conditions.stop.check().and(outcome);
        let (outcome, failed) = match outcome {
            Ok(outcome) => (Some(outcome), None),
            Err(RunError::Interrupted) => {
                bar.finish_and_clear();
                let message = "interrupted: --resume goes on with what is left";
                return Err(refused(message));
            }
            Err(RunError::Failed(failed)) => {
                bar.suspend(|| warning(format_args!("run {} ({name}) has failed: {}", run.number, failed.message)));
                (None, Some(failed))
            }
        };
        let settings = settings.into_iter().collect();
        let (run, repeat) = (run.number, run.repeat);
        results.add(Done { run, repeat, settings, started_at, outcome, failed }).map_err(refused)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Prints what came of it, and writes the report.
fn tell(json: bool, path: &Path, summary: &Summary<'_>, design: &Design) -> Result<(), Failure> {
    let written = std::fs::write(path, report::render(summary, design));
    if json {
        println!("{}", summary.to_json(design));
    } else {
        out::say(format_args!("{}", text::render(summary)));
    }
    written.map_err(|error| refused(format!("could not write \"{}\": {error}", path.display())))?;
    failure::note(format_args!("the report is \"{}\"", path.display()));
    Ok(())
}
