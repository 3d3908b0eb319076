//! `walrider logical setup`.

use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use walrider_logical::copy::Progress;
use walrider_logical::setup::{Handover, Report, Settings, Setup, SetupError, Stage, Tables};

use crate::failure::{Exit, Failure, SCHEMA_VERSION, note};
use crate::values::parse_slot;

/// How often the bar moves.
const TICK: Duration = Duration::from_millis(100);

/// Start logical replication: publication, slot, initial copy and subscription, so that nothing is missing or twice
///
/// The tables must exist on the target, and be empty: bring the schema over first, as with pg_dump --schema-only. All that can be
/// looked at is looked at before anything is changed. The copy is that of one moment, at which the slot begins; nobody else may
/// write into the target's tables meanwhile. What fails in the middle, or is stopped by SIGINT or SIGTERM, is taken back, and the
/// message says what could not be.
#[derive(Args)]
#[command(group = ArgGroup::new("receiver").required(true))]
pub struct SetupArgs {
    /// How to connect to the database that is published
    #[arg(long, value_name = "CONNINFO")]
    source: String,
    /// How to connect to the database that it goes to
    #[arg(long, value_name = "CONNINFO")]
    target: String,
    /// The publication; it is created if --tables, --schema or --all-tables says what it is to have
    #[arg(long, value_name = "NAME")]
    publication: String,
    /// Publish these tables
    #[arg(long, value_name = "SCHEMA.TABLE", value_delimiter = ',', group = "what", value_parser = parse_table)]
    tables: Vec<(String, String)>,
    /// Publish all tables of these schemas
    #[arg(long, value_name = "SCHEMA", value_delimiter = ',', group = "what")]
    schema: Vec<String>,
    /// Publish all tables of the database
    #[arg(long, group = "what")]
    all_tables: bool,
    /// The replication slot, which is created, with the output plugin walrider_pgoutput
    #[arg(long, value_name = "NAME", value_parser = parse_slot)]
    slot: String,
    /// Create this subscription of PostgreSQL's on the target
    #[arg(long, value_name = "NAME", group = "receiver")]
    subscription: Option<String>,
    /// Leave the changes to walrider logical apply
    #[arg(long, group = "receiver")]
    apply: bool,
    /// How the target's server connects to the source; default --source
    #[arg(long, value_name = "CONNINFO", requires = "subscription")]
    connection: Option<String>,
    /// Connections that copy side by side
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Copy nothing: the target has the source's rows of the moment at which nobody writes any more
    #[arg(long)]
    no_copy: bool,
    /// Send prepared transactions when they are prepared
    #[arg(long)]
    two_phase: bool,
    /// The subscription's streaming of transactions that are in progress
    #[arg(long, value_enum, default_value = "parallel")]
    streaming: Streaming,
    /// Look at everything, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// As CREATE SUBSCRIPTION has it.
#[derive(Clone, Copy, ValueEnum)]
enum Streaming {
    Off,
    On,
    Parallel,
}

fn parse_table(text: &str) -> Result<(String, String), String> {
    match text.split_once('.') {
        Some((schema, name)) if !schema.is_empty() && !name.is_empty() => Ok((schema.to_owned(), name.to_owned())),
        _ => Err("expected a schema and a table, as in public.orders".into()),
    }
}

/// Runs the command.
pub fn run(args: SetupArgs) -> ExitCode {
    let json = args.json;
    match set_up(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => Failure::new(Exit::Refused, error).tell(json),
    }
}

fn settings(args: &SetupArgs) -> Settings {
    let tables = match args {
        SetupArgs { all_tables: true, .. } => Tables::All,
        SetupArgs { schema, .. } if !schema.is_empty() => Tables::Schemas(schema.clone()),
        SetupArgs { tables, .. } if !tables.is_empty() => Tables::Named(tables.clone()),
        _ => Tables::OfPublication,
    };
    let connection = args.connection.clone().unwrap_or_else(|| args.source.clone());
    let handover = match args.subscription.clone() {
        Some(name) => Handover::Subscription { name, connection },
        None => Handover::Apply,
    };
    let streaming = match args.streaming {
        Streaming::Off => "off",
        Streaming::On => "on",
        Streaming::Parallel => "parallel",
    };
    Settings {
        source: args.source.clone(),
        target: args.target.clone(),
        publication: args.publication.clone(),
        tables,
        slot: args.slot.clone(),
        handover,
        jobs: args.jobs.into(),
        copy: !args.no_copy,
        two_phase: args.two_phase,
        streaming: streaming.to_owned(),
        dry_run: args.dry_run,
    }
}

fn set_up(args: SetupArgs) -> Result<(), SetupError> {
    let setup = Setup::new(settings(&args))?;
    let stop = setup.stopper();
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(SetupError::Signals)?;
    thread::spawn(move || signals.forever().for_each(|_| stop()));
    let (stage, stages) = channel();
    let progress = setup.progress();
    let report = thread::scope(|scope| {
        let shown = scope.spawn(move || show(&stages, &progress));
        // It ends with the show, which ends when nobody says a stage any more.
        let report = setup.run(&|at| {
            let _ = stage.send(at);
        });
        drop(stage);
        drop(shown.join());
        report
    })?;
    say(&report, &args);
    Ok(())
}

/// The stages, and a bar while rows are copied; hidden unless stderr is a terminal.
fn show(stages: &Receiver<Stage>, progress: &Progress) {
    let bar = ProgressBar::no_length();
    let style = "{msg} {bar:30} {percent}% {elapsed_precise}, {eta} left";
    bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
    let mut copying = false;
    loop {
        match stages.recv_timeout(TICK) {
            Ok(Stage::Copying) => copying = true,
            Ok(Stage::CreatingSlot) => {
                note("creating the slot; it waits for the transactions that are running on the source")
            }
            Ok(Stage::Checking | Stage::HandingOver) => copying = false,
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if copying {
            bar.set_length(progress.blocks_total.load(Relaxed));
            bar.set_position(progress.blocks.load(Relaxed));
            let (rows, bytes) = (progress.rows.load(Relaxed), progress.bytes.load(Relaxed));
            bar.set_message(format!("{rows} rows, {} MB", bytes / 1_000_000));
        }
    }
    bar.finish_and_clear();
}

fn say(report: &Report, args: &SetupArgs) {
    if args.json {
        let object = json!({
            "schema_version": SCHEMA_VERSION,
            "dry_run": args.dry_run,
            "publication": args.publication,
            "publication_created": report.publication_created && !args.dry_run,
            "slot": args.slot,
            "subscription": args.subscription,
            "tables": report.tables,
            "rows": report.rows,
            "copy_bytes": report.bytes,
            "copy_seconds": report.copying.as_secs_f64(),
            "consistent_lsn": report.consistent_point.map(|lsn| lsn.to_string()),
        });
        println!("{object}");
        return;
    }
    let Some(lsn) = report.consistent_point else {
        println!("everything is in order: {} tables would be published", report.tables);
        return;
    };
    println!(
        "{} tables, {} rows copied in {:.1} s; slot \"{}\" begins at {lsn}",
        report.tables,
        report.rows,
        report.copying.as_secs_f64(),
        args.slot
    );
    match &args.subscription {
        Some(name) => println!("subscription \"{name}\" is enabled"),
        None => println!(
            "next: walrider logical apply --source … --target … --publication {} --slot {}",
            args.publication, args.slot
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_a_schema() {
        assert_eq!(parse_table("a.b.c"), Ok(("a".into(), "b.c".into())));
        for bad in ["a", ".a", "a.", ""] {
            assert!(parse_table(bad).is_err(), "{bad}");
        }
    }
}
