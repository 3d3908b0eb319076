//! `walrider replay`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use walrider_archive::ArchiveError;
use walrider_datadir::config::quoted_value;
use walrider_datadir::descriptors;
use walrider_datadir::recovery_settings::{RecoveryTarget, TargetTimeline};
use walrider_datadir::timestamp::{TimestampTz, parse_timestamptz};
use walrider_layout::Lsn;
use walrider_replay::base::Base;
use walrider_replay::engine::{Flow, Stop};
use walrider_replay::error::ReplayError;
use walrider_replay::restartpoint::RestartpointPolicy;
use walrider_replay::startup::{Options, Promotion, SpillOptions, Summary, replay};
use walrider_replay::stats::Stats;

use crate::failure::{self, Exit, Failure, SCHEMA_VERSION};
use crate::values::{
    DEFAULT_FETCH_JOBS, MAX_FETCH_JOBS, default_jobs, default_memory, parse_memory, parse_size, parse_timeline,
};
use crate::wal;

/// Roll a data directory forward through WAL, and hand it to PostgreSQL
///
/// DIR is a base backup, or a stopped or crashed standby. Replay goes to the end of the WAL or to a recovery target.
/// Without options, restore_command and recovery_target_* are read from the directory's own configuration, as
/// PostgreSQL reads them.
///
/// With --promote, or recovery_target_action = promote and the target reached, recovery ends there: PostgreSQL, started on the
/// directory, opens at once. Else PostgreSQL begins at the last checkpoint, replays again everything after it, and finishes at the
/// same place: where options are given and the directory has no recovery.signal or standby.signal, recovery.signal is
/// written, and what PostgreSQL must know is set in postgresql.auto.conf.
///
/// If replay is interrupted, even by a crash, run the same command again, or start PostgreSQL on the directory.
#[derive(Args)]
pub struct ReplayArgs {
    /// The data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    #[command(flatten)]
    recovery: RecoveryArgs,
    /// Wait for more WAL at its end, until SIGINT or SIGTERM
    #[arg(long, conflicts_with = "promote")]
    follow: bool,
}

/// How a directory is recovered, whatever it was made of.
#[derive(Args)]
pub struct RecoveryArgs {
    /// postgresql.conf, where it is not in the data directory (config_file)
    #[arg(long, value_name = "FILE")]
    config_file: Option<PathBuf>,
    /// Directory with WAL segments, .partial ones included, or an archive of walrider wal put: its directory, s3://BUCKET/PREFIX,
    /// gs:// or az:// [default: restore_command, then DIR/pg_wal]
    #[arg(long, value_name = "SOURCE")]
    wal: Option<PathBuf>,
    #[command(flatten)]
    target: TargetArgs,
    /// After replay, end recovery: the directory becomes a primary on a new timeline (recovery_target_action = promote)
    #[arg(long)]
    promote: bool,
    /// Leave it to PostgreSQL to end recovery, even with recovery_target_action = promote; it replays again what follows
    /// the last checkpoint
    #[arg(long, conflicts_with = "promote")]
    no_promote: bool,
    #[command(flatten)]
    resources: ResourceArgs,
    /// Compare each page with the images that wal_consistency_checking leaves in the WAL; exit code 5 if one differs
    #[arg(long)]
    verify_images: bool,
    /// Print the end of the last record replayed, and the time in seconds since 1970, whenever a batch is done
    #[arg(long)]
    positions: bool,
    /// Print one JSON object; with --positions, one more on each line before it
    #[arg(long)]
    pub json: bool,
}

/// Where replay stops.
#[derive(Args)]
pub struct TargetArgs {
    /// Stop at this LSN (recovery_target_lsn)
    #[arg(long, value_name = "LSN", group = "target")]
    target_lsn: Option<Lsn>,
    /// Stop at this time (recovery_target_time); without a zone, it is in that of TZ, or GMT, not in the server's
    #[arg(long, value_name = "TIMESTAMP", group = "target", value_parser = parse_time)]
    target_time: Option<TimestampTz>,
    /// Stop at the end of this transaction (recovery_target_xid)
    #[arg(long, value_name = "XID", group = "target")]
    target_xid: Option<u32>,
    /// Stop at this restore point (recovery_target_name)
    #[arg(long, value_name = "NAME", group = "target")]
    target_name: Option<String>,
    /// Stop as soon as the directory is consistent (recovery_target = 'immediate')
    #[arg(long, group = "target")]
    target_immediate: bool,
    /// Stop just before the target, not after it (recovery_target_inclusive = off)
    #[arg(long, requires = "target")]
    target_exclusive: bool,
    /// Follow this timeline: latest, current, or a number (recovery_target_timeline)
    #[arg(long, value_name = "TIMELINE", value_parser = parse_timeline)]
    target_timeline: Option<TargetTimeline>,
}

/// What it may use.
#[derive(Args)]
pub struct ResourceArgs {
    /// Threads [default: one per core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// restore_command's, or requests to an object store, at once: WAL is fetched ahead of replay; 1 for a command that must run alone
    #[arg(long, value_name = "N", default_value_t = DEFAULT_FETCH_JOBS, value_parser = clap::value_parser!(u16).range(1..=MAX_FETCH_JOBS))]
    fetch_jobs: u16,
    /// Memory for pages and WAL, as in 512MB [default: a quarter of RAM, or of what its control group allows]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
    /// Most disk space for a batch that is larger than memory, so that each page is read and written once; 0: visit pages
    /// again and again instead [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    spill_size: Option<u64>,
    /// Where that space is [default: base/pgsql_tmp in the data directory]
    #[arg(long, value_name = "DIR")]
    spill_dir: Option<PathBuf>,
    /// Make each batch one that is larger than memory, whether that is worth it or not: for tests
    #[arg(long, hide = true)]
    spill_always: bool,
}

/// A time; without a time zone it is in that of PGTZ or TZ, else GMT.
fn parse_time(text: &str) -> Result<TimestampTz, String> {
    let zone = std::env::var("PGTZ").or_else(|_| std::env::var("TZ")).unwrap_or_else(|_| "GMT".into());
    parse_timestamptz(text, &zone, true)
}

/// Runs the command.
pub fn run(args: ReplayArgs) -> ExitCode {
    let json = args.recovery.json;
    match args.recovery.resources.start().and_then(|_| args.recovery.replay(args.data_dir, args.follow, None, true)) {
        Ok(summary) => tell(&summary, args.recovery.verify_images, json.then(|| to_json(&summary))),
        Err(failure) => failure.tell(json),
    }
}

/// Prints how a replay went, as text or as this object, and gives the exit code.
pub fn tell(summary: &Summary, verify: bool, object: Option<Value>) -> ExitCode {
    match object {
        Some(object) => println!("{object}"),
        None => print(summary, verify),
    }
    complain(summary)
}

impl ResourceArgs {
    /// Requests, or commands, at once.
    pub fn fetch_jobs(&self) -> usize {
        self.fetch_jobs.into()
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.unwrap_or_else(default_memory)
    }

    /// Starts the threads, and says how many.
    pub fn start(&self) -> Result<usize, Failure> {
        let jobs = self.jobs.map_or_else(default_jobs, usize::from);
        descriptors::share_out(jobs).map_err(|error| Failure::new(Exit::Refused, error))?;
        rayon::ThreadPoolBuilder::new()
            .num_threads(jobs)
            .build_global()
            .map_err(|error| Failure::new(Exit::Refused, format!("could not start threads: {error}")))?;
        Ok(jobs)
    }
}

impl TargetArgs {
    fn target(&self) -> Option<RecoveryTarget> {
        match (self.target_lsn, self.target_time, self.target_xid, &self.target_name) {
            (Some(lsn), ..) => Some(RecoveryTarget::Lsn(lsn)),
            (_, Some(time), ..) => Some(RecoveryTarget::Time(time)),
            (_, _, Some(xid), _) => Some(RecoveryTarget::Xid(xid)),
            (_, _, _, Some(name)) => Some(RecoveryTarget::Name(name.clone())),
            _ => self.target_immediate.then_some(RecoveryTarget::Immediate),
        }
    }
}

/// What replay is asked for: of this directory, to there, and nothing else.
pub fn plain_options(
    data_dir: PathBuf,
    wal: Option<&Path>,
    target: &TargetArgs,
    resources: &ResourceArgs,
) -> Result<Options, ArchiveError> {
    let fetch_jobs = resources.fetch_jobs();
    let archive = wal.map(|wal| wal::named_archive(wal, &data_dir, fetch_jobs, false)).transpose()?.flatten();
    Ok(Options {
        data_dir,
        config_file: None,
        wal: wal.filter(|_| archive.is_none()).map(Path::to_owned),
        archive,
        configured_target: true,
        inclusive: target.target_exclusive.then_some(false),
        target: target.target(),
        timeline: target.target_timeline,
        memory_bytes: resources.memory_bytes(),
        spill: SpillOptions {
            bytes: resources.spill_size,
            directory: resources.spill_dir.clone(),
            always: resources.spill_always,
        },
        base: None,
        new_tablespaces: None,
        verify_images: false,
        follow: false,
        promotion: Promotion::AsConfigured,
        restore_command: None,
        fetch_jobs,
        restartpoints: RestartpointPolicy::default(),
        upstream: None,
    })
}

/// Replays, and shows how far it is.
pub fn run_to_end(options: &Options, named: Option<&Path>, positions: Option<Form>) -> Result<Summary, Failure> {
    failure::note(banner(options, named));
    let result = Progress::new(options, positions).and_then(|mut progress| {
        let summary = replay(options, &mut |stats, lsn| progress.update(stats, lsn));
        progress.bar.finish_and_clear();
        summary
    });
    result.map_err(|error| {
        let exit = if error.is_corruption() { Exit::Damaged } else { Exit::Refused };
        Failure::new(exit, &error).at(error.lsn())
    })
}

impl RecoveryArgs {
    /// Where WAL is looked for.
    pub fn wal(&self) -> Option<&Path> {
        self.wal.as_deref()
    }

    /// What the threads are.
    pub fn resources(&self) -> &ResourceArgs {
        &self.resources
    }

    /// Whether pages are compared.
    pub fn verify_images(&self) -> bool {
        self.verify_images
    }

    /// Replays onto a directory. `configured`: recovery targets in its own configuration files count.
    pub fn replay(
        &self,
        data_dir: PathBuf,
        follow: bool,
        base: Option<Arc<dyn Base>>,
        configured: bool,
    ) -> Result<Summary, Failure> {
        let options = plain_options(data_dir, self.wal(), &self.target, &self.resources)
            .map_err(|error| Failure::new(Exit::Refused, error))?;
        let options = Options {
            config_file: self.config_file.clone(),
            configured_target: configured || self.config_file.is_some(),
            base,
            verify_images: self.verify_images,
            follow,
            promotion: match (self.promote, self.no_promote) {
                (true, _) => Promotion::Always,
                (_, true) => Promotion::Never,
                _ => Promotion::AsConfigured,
            },
            ..options
        };
        let positions = self.positions.then_some(if self.json { Form::Json } else { Form::Text });
        run_to_end(&options, self.wal(), positions)
    }
}

/// What begins, in a line.
fn banner(options: &Options, named: Option<&Path>) -> String {
    let wal = named.map_or("as configured".to_owned(), |wal| format!("from \"{}\"", wal.display()));
    format!(
        "replay {}: data directory \"{}\", WAL {wal}, {} threads, {} MB of memory",
        env!("CARGO_PKG_VERSION"),
        options.data_dir.display(),
        rayon::current_num_threads(),
        options.memory_bytes >> 20
    )
}

/// Most memory that this process has had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|text| text.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

/// How positions are printed.
pub enum Form {
    /// Position and time.
    Text,
    /// An object.
    Json,
}

/// The progress line on a terminal, positions on stdout, and the wish to stop.
struct Progress {
    bar: ProgressBar,
    positions: Option<Form>,
    printed: Lsn,
    started: Instant,
    first: Option<Lsn>,
    stop: Arc<AtomicBool>,
}

impl Progress {
    fn new(options: &Options, positions: Option<Form>) -> Result<Progress, ReplayError> {
        let stop = Arc::new(AtomicBool::new(false));
        if options.follow {
            for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
                signal_hook::flag::register(signal, stop.clone())
                    .map_err(|error| ReplayError::Refused(format!("could not handle signals: {error}")))?;
            }
        }
        // Hidden unless stderr is a terminal.
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}").expect("a valid template"));
        Ok(Progress { bar, positions, printed: Lsn::INVALID, started: Instant::now(), first: None, stop })
    }

    /// Prints where replay stands, if it moved since. That it cannot be printed is no reason to stop.
    fn print_position(&mut self, lsn: Lsn) {
        let Some(form) = self.positions.as_ref().filter(|_| self.printed != lsn) else { return };
        self.printed = lsn;
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let line = match form {
            Form::Text => format!("{lsn} {}.{:06}", time.as_secs(), time.subsec_micros()),
            Form::Json => json!({ "replayed_lsn": lsn.to_string(), "time": time.as_secs_f64() }).to_string(),
        };
        println!("{line}");
    }

    fn update(&mut self, stats: &Stats, lsn: Lsn) -> Flow {
        self.print_position(lsn);
        let first = *self.first.get_or_insert(lsn);
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let at = stats.spilled_to.unwrap_or(lsn);
        let megabytes = (at.0 - first.0) as f64 / 1e6;
        let what = match stats.spilled_to {
            Some(to) => format!("at {lsn}, WAL put apart up to {to}"),
            None => format!("at {lsn}"),
        };
        self.bar.set_message(format!(
            "{what}: {} records, {} transactions, {:.0} MB/s",
            stats.records,
            stats.transactions,
            megabytes / seconds
        ));
        self.bar.tick();
        if self.stop.load(Ordering::Relaxed) { Flow::Stop } else { Flow::Continue }
    }
}

fn end_reason(stop: Option<&Stop>) -> &'static str {
    match stop {
        None => "nothing_to_do",
        Some(Stop::Target) => "target",
        Some(Stop::EndOfWal { .. }) => "end_of_wal",
        Some(Stop::Outage { .. }) => "archive_out_of_reach",
        Some(Stop::Unsupported { .. }) => "unsupported",
        // Replay stops before a commit only where commits are delayed.
        Some(Stop::Interrupted | Stop::ApplyDelay { .. }) => "interrupted",
        Some(Stop::Corrupt { .. }) => "corrupt",
    }
}

/// How a replay went, as an object.
pub fn to_json(summary: &Summary) -> Value {
    let stats = &summary.stats;
    let stages: serde_json::Map<String, Value> =
        stats.stages.times().map(|(stage, time)| (stage.name().to_owned(), json!(time.as_secs_f64()))).collect();
    let settings: serde_json::Map<String, Value> =
        summary.settings_written.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let mut object = json!({
        "schema_version": SCHEMA_VERSION,
        "end_reason": end_reason(summary.stop.as_ref()),
        "start_lsn": summary.start.to_string(),
        "end_lsn": summary.end.to_string(),
        "checkpoint_lsn": summary.checkpoint.to_string(),
        "timeline": summary.timeline.0,
        "end_of_wal": end_of_wal(summary),
        "promoted": summary.promoted.as_ref().map(|promoted| json!({
            "timeline": promoted.timeline.0,
            "switch_lsn": promoted.switch_point.to_string(),
            "checkpoint_lsn": promoted.checkpoint.to_string(),
        })),
        "replayed_again_bytes": summary.again_bytes,
        "records": stats.records,
        "wal_bytes": summary.end.0 - summary.start.0,
        "transactions": stats.transactions,
        "aborts": stats.aborts,
        "redo_seconds": summary.redo.as_secs_f64(),
        "total_seconds": summary.total.as_secs_f64(),
        "stages": stages,
        "apply_longest_seconds": stats.apply_longest.as_secs_f64(),
        "segments_fetched": summary.fetch.segments,
        "fetch_jobs": summary.fetch.jobs,
        "fetch_alone": summary.fetch.alone,
        "fetch_seconds": summary.fetch.commands.as_secs_f64(),
        "fetch_wait_seconds": summary.fetch.waited.as_secs_f64(),
        "pages_read": stats.pages_read,
        "pages_written": stats.pages_written,
        "pages_evicted": stats.pages_evicted,
        "sweeps": stats.sweeps,
        "spilled_bytes": stats.spilled_bytes,
        "sorted_bytes": stats.sorted_bytes,
        "request_bytes": stats.request_bytes,
        "write_bytes_per_second": stats.write_bytes_per_second,
        "unpacked_at_lsn": stats.unpacked_at.map(|lsn| lsn.to_string()),
        "restartpoints": stats.restartpoints,
        "images_verified": stats.images_verified,
        "image_differences": stats.image_difference_count,
        "peak_memory_bytes": peak_memory(),
        "settings_written": settings,
    });
    if let Some(failure) = why_incomplete(summary) {
        object["error"] = failure.to_json();
    }
    object
}

/// Why the WAL was taken to end, and what restore_command said there.
fn end_of_wal(summary: &Summary) -> Option<Value> {
    let (Some(Stop::EndOfWal { why }) | Some(Stop::Outage { why })) = &summary.stop else { return None };
    let refusal = summary.refusal.as_ref();
    Some(json!({
        "why": why,
        "command": refusal.map(|refusal| &refusal.command),
        "exit_code": refusal.map(|refusal| refusal.exit_code),
        "file": refusal.map(|refusal| &refusal.file),
    }))
}

fn print(summary: &Summary, verify: bool) {
    match &summary.stop {
        None => println!("The directory was shut down cleanly at {}: nothing to replay.", summary.end),
        Some(stop) => print_replay(summary, stop, verify),
    }
    if let Some(promoted) = &summary.promoted {
        println!(
            "Recovery has ended at {}: the directory is a primary's on timeline {} now. Start PostgreSQL on it.",
            promoted.switch_point, promoted.timeline
        );
    }
}

fn print_replay(summary: &Summary, stop: &Stop, verify: bool) {
    let stats = &summary.stats;
    let seconds = summary.redo.as_secs_f64().max(1e-6);
    println!(
        "Replayed {} to {} on timeline {}: {} records, {} transactions, {:.1} MB of WAL.",
        summary.start,
        summary.end,
        summary.timeline,
        stats.records,
        stats.transactions,
        (summary.end.0 - summary.start.0) as f64 / 1e6
    );
    println!(
        "Redo took {:.2} s ({:.0} transactions/s, {:.0} MB/s), everything {:.2} s.",
        seconds,
        stats.transactions as f64 / seconds,
        (summary.end.0 - summary.start.0) as f64 / 1e6 / seconds,
        summary.total.as_secs_f64()
    );
    print_fetching(summary);
    if verify {
        println!("Compared {} images with redo: {} differ.", stats.images_verified, stats.image_difference_count);
    }
    for (name, value) in &summary.settings_written {
        println!("Set in postgresql.auto.conf: {name} = {}", quoted_value(value));
    }
    if let Stop::EndOfWal { why } = stop {
        println!("The WAL ends there: {why}.");
    }
    if summary.again_bytes > 0 {
        println!(
            "PostgreSQL will replay {:.1} MB again, from the last checkpoint on; --promote ends recovery here instead.",
            summary.again_bytes as f64 / 1e6
        );
    }
}

/// What restore_command cost, and whether it was the limit.
fn print_fetching(summary: &Summary) {
    let fetch = &summary.fetch;
    if fetch.segments == 0 {
        return;
    }
    println!(
        "restore_command fetched {} segments in {:.2} s of commands, up to {} at once; replay waited {:.2} s for it.",
        fetch.segments,
        fetch.commands.as_secs_f64(),
        fetch.jobs,
        fetch.waited.as_secs_f64()
    );
    if fetch.alone {
        println!(
            "One failed beside others and not alone; from then on one ran at a time (--fetch-jobs 1 does that from the start)."
        );
    }
    if fetch.waited > summary.redo / 2 {
        println!("Fetching was the limit, not redo: more --fetch-jobs may help, or a faster archive.");
    }
}

/// What kept replay from going on, although all is well up to there.
pub fn why_incomplete(summary: &Summary) -> Option<Failure> {
    match summary.stop.as_ref()? {
        Stop::Unsupported { lsn, record, relation } => {
            let relation = relation.map(|rel| format!(" (relation {rel})")).unwrap_or_default();
            let message = format!(
                "stopped cleanly before the record at {lsn}: there is no redo for {record}{relation} yet. PostgreSQL, started \
                 on the directory, replays the rest"
            );
            Some(Failure::new(Exit::Unsupported, message).at(*lsn))
        }
        Stop::Outage { why } => {
            let message = format!("{why}. Replay stopped cleanly at {}; mend the archive, and try again", summary.end);
            Some(Failure::new(Exit::Refused, message).at(summary.end))
        }
        Stop::Corrupt { lsn, why } => {
            let message = format!(
                "WAL is corrupt at {lsn}: {why}. Replay stopped cleanly before; get an intact copy of that file and try again"
            );
            Some(Failure::new(Exit::Damaged, message).at(*lsn))
        }
        _ => None,
    }
}

/// Says what is not as it should be, on stderr, and gives the exit code.
fn complain(summary: &Summary) -> ExitCode {
    for difference in &summary.stats.image_differences {
        failure::error(format_args!(
            "at {}: {}: redo differs from the image at {}",
            difference.lsn, difference.what, difference.at
        ));
    }
    for warning in summary.promoted.iter().flat_map(|promoted| &promoted.warnings) {
        failure::warning(warning);
    }
    match why_incomplete(summary) {
        Some(failure) => failure.complain(),
        None if summary.stats.image_difference_count > 0 => Exit::Different.into(),
        None => ExitCode::SUCCESS,
    }
}
