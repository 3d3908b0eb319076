//! `walrider standby`.

mod options;
#[cfg(test)]
mod options_tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use walrider_datadir::descriptors;
use walrider_standby::{Node, Outcome, StandbyError};

use crate::failure::{Exit, Failure};
use crate::logging::{self, LevelSwitch};
use crate::service::{self, Wish};
use crate::serving::ServingError;
use options::{Resolved, StandbyOptions};

/// Follow a primary: receive its WAL, replay it, acknowledge it; and be promoted
///
/// DIR is a base backup of the primary, or the directory of a stopped standby. After `pg_basebackup -R` nothing but -D is
/// needed: what no option says is taken from the directory's own configuration, as PostgreSQL takes it.
///
/// SIGTERM and SIGINT stop it; the directory is then one that PostgreSQL, or the same command, goes on with. SIGHUP reads
/// FILE and the directory's configuration again. `walrider promote` promotes, `walrider pause` and `resume` hold replay.
///
/// Nobody can read it while Walrider replays. With --readable PostgreSQL has the directory near the end of WAL, and Walrider far
/// from it: so it can be read, and catches up fast.
#[derive(Args)]
pub struct StandbyArgs {
    /// TOML file with options: each by its name here, with underscores; options given here go before
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Create standby.signal, if it is not there and the primary says that DIR is a copy of it. Not for the unit of a service:
    /// after a promotion it would make the new primary a standby of the old one
    #[arg(long)]
    make_standby: bool,
    #[command(flatten)]
    options: StandbyOptions,
}

impl StandbyArgs {
    /// Where it serves HTTP, if that was asked for. `seen`: a path of its command line as it is seen from here.
    pub fn http(&self, seen: impl Fn(&Path) -> PathBuf) -> Option<String> {
        let file = self.config.as_deref().and_then(|path| StandbyOptions::read(&seen(path)).ok());
        let http = self.options.http.clone().or(file.and_then(|file| file.http));
        http.filter(|http| !http.is_empty())
    }
}

/// Runs the command.
pub fn run(args: StandbyArgs) -> ExitCode {
    let resolved = match Resolved::load(&args.options, args.config.as_deref()) {
        Ok(mut resolved) => {
            resolved.settings.make_standby = args.make_standby;
            resolved
        }
        Err(error) => {
            let exit = if error.is_usage() { Exit::Usage } else { Exit::Refused };
            return Failure::new(exit, error).complain();
        }
    };
    let level = logging::start(resolved.log_format, resolved.log_level);
    match follow(args, resolved, level) {
        Ok(Outcome::Stopped(summary)) => {
            tracing::info!(
                "stopped at {} on timeline {}; PostgreSQL, started on the directory, would replay {:.1} MB again",
                summary.end,
                summary.timeline,
                summary.again_bytes as f64 / 1e6
            );
            ExitCode::SUCCESS
        }
        Ok(Outcome::Promoted(summary)) => {
            tracing::info!("handed over at {} on timeline {}", summary.end, summary.timeline);
            ExitCode::SUCCESS
        }
        Ok(Outcome::ServerStopped) => {
            tracing::info!("stopped, and PostgreSQL with it");
            ExitCode::SUCCESS
        }
        Ok(Outcome::ServerPromoted) => {
            tracing::info!("PostgreSQL has been promoted, and has the directory from now on");
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!("{error}");
            error.code()
        }
    }
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("could not start threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    #[error(transparent)]
    Descriptors(#[from] walrider_datadir::DataDirError),
    #[error(transparent)]
    Service(#[from] service::ServiceError),
    #[error(transparent)]
    Serving(#[from] ServingError),
    #[error(transparent)]
    Standby(#[from] StandbyError),
}

impl RunError {
    fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            RunError::Serving(_) => 2,
            RunError::Standby(error) if error.is_unsupported() => 3,
            RunError::Standby(error) if error.is_corruption() => 4,
            _ => 1,
        })
    }
}

fn follow(args: StandbyArgs, mut resolved: Resolved, level: LevelSwitch) -> Result<Outcome, RunError> {
    tracing::info!("starting walrider standby {}: {}", env!("CARGO_PKG_VERSION"), resolved.settings.describe());
    note(&resolved);
    descriptors::share_out(resolved.jobs)?;
    rayon::ThreadPoolBuilder::new().num_threads(resolved.jobs).build_global()?;
    let node = Node::new(resolved.settings.clone())?;
    resolved.settings.data_dir = node.data_dir();
    let (told, observed) = (node.clone(), node.clone());
    let served = match &resolved.serving {
        Some((settings, files)) => Some((node.serve(settings.clone(), files.read()?)?, files.clone())),
        None => None,
    };
    let http = resolved.http.clone();
    let _http = service::start(http.as_deref(), Arc::new(move || observed.status()), move |wish| match wish {
        Wish::Stop => told.stop(),
        Wish::Promote => told.promote(),
        Wish::Look => told.check_control_files(),
        Wish::Reload => {
            reload(&args, &resolved, &level, &told);
            if let Some((relay, files)) = &served {
                files.reload(relay);
            }
        }
    })?;
    Ok(node.run()?)
}

/// Reads everything again. What is wrong now is said, and what was right before stays.
fn reload(args: &StandbyArgs, running: &Resolved, level: &LevelSwitch, node: &Node) {
    // What it runs on, and not what has the name now.
    let options = StandbyOptions { data_dir: Some(node.data_dir()), ..args.options.clone() };
    match Resolved::load(&options, args.config.as_deref()) {
        Ok(mut new) => {
            tracing::info!("received SIGHUP, reloading configuration files");
            note(&new);
            for name in running.fixed(&new) {
                tracing::warn!("\"{name}\" cannot be changed without restarting walrider");
            }
            new.settings.memory_bytes = running.settings.memory_bytes;
            new.settings.spill = running.settings.spill.clone();
            level.set(new.log_level);
            node.reload(new.settings);
        }
        Err(error) => tracing::error!("the configuration is wrong, and stays as it was: {error}"),
    }
}

fn note(resolved: &Resolved) {
    for note in &resolved.notes {
        tracing::warn!("{note}");
    }
}
