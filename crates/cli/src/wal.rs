//! `walrider wal`: what is in some WAL, as `pg_waldump` tells it; and archives of WAL.

mod archive;
mod json;

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use walrider_inspect::wal::{Ended, Range, WalError, each_record};
use walrider_layout::Lsn;
use walrider_wal::describe::describe_line;
use walrider_wal::record::Record;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::stats::{By, WalStats};

use crate::failure::{self, Exit, Failure};

/// Look into WAL; put it into an archive, and get it from there
#[derive(clap::Args, Clone, Debug)]
pub struct WalArgs {
    #[command(subcommand)]
    command: WalCommand,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum WalCommand {
    /// Count records and their bytes, by type
    Stats(StatsArgs),
    /// Print records, one a line
    Dump(DumpArgs),
    Put(archive::PutArgs),
    Get(archive::GetArgs),
    Expire(archive::ExpireArgs),
    #[command(hide = true)]
    Ahead(archive::AheadArgs),
}

#[derive(clap::Args, Clone, Debug)]
struct SourceArgs {
    /// A directory of WAL segments (an archive, or pg_wal), or segment files that follow one another
    #[arg(required = true)]
    source: Vec<PathBuf>,
    /// Begin with the first record at or after this position
    #[arg(long, value_name = "LSN")]
    start: Option<Lsn>,
    /// Leave out records that do not end before this position
    #[arg(long, value_name = "LSN")]
    end: Option<Lsn>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Clone, Debug)]
struct StatsArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// What to count by
    #[arg(long, value_enum, default_value_t = StatsBy::Record)]
    by: StatsBy,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum StatsBy {
    /// Resource managers
    Rmgr,
    /// Record types
    Record,
}

#[derive(clap::Args, Clone, Debug)]
struct DumpArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// Only records of this resource manager; may be given several times
    #[arg(long, value_name = "NAME", value_parser = parse_rmgr)]
    rmgr: Vec<RmgrId>,
    /// Stop after this many records
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
}

/// A resource manager by the name that `pg_waldump` prints, in any case.
fn parse_rmgr(name: &str) -> Result<RmgrId, String> {
    let valid = || (0..=u8::MAX).map(RmgrId).filter(|rmgr| rmgr.is_valid());
    valid().find(|rmgr| rmgr.to_string().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let known: Vec<String> = valid().filter(|rmgr| !rmgr.is_custom()).map(|rmgr| rmgr.to_string()).collect();
        format!("no such resource manager: there are {}, and custom128 to custom255", known.join(", "))
    })
}

/// Why the command failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Wal(#[from] WalError),
    #[error("could not write: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    fn failure(&self) -> Failure {
        use WalError as W;
        let (exit, lsn) = match self {
            Error::Output(_) | Error::Wal(W::Io(..) | W::Store(_)) => (Exit::Refused, None),
            Error::Wal(W::NoSegments(_) | W::Packed(_) | W::NotASegmentName(..)) => (Exit::Usage, None),
            Error::Wal(W::Missing { at, .. } | W::Damaged { at, .. } | W::EndsEarly { at, .. }) => {
                (Exit::Damaged, Some(*at))
            }
            Error::Wal(W::InvalidRecord(_, at, _)) => (Exit::Damaged, Some(*at)),
            Error::Wal(W::NotWal(_) | W::Version(..) | W::History(..)) => (Exit::Damaged, None),
        };
        Failure::new(exit, self).at(lsn)
    }
}

pub use archive::{asks_for_wal, named_archive};

/// Runs the command.
pub fn run(args: WalArgs) -> ExitCode {
    // The object of `stats` has the error in it; `dump` ends with one of its own.
    let (result, json) = match &args.command {
        WalCommand::Stats(args) => (stats(args), false),
        WalCommand::Dump(args) => (dump(args), args.source.json),
        WalCommand::Put(args) => return archive::put(args),
        WalCommand::Get(args) => return archive::get(args),
        WalCommand::Expire(args) => return archive::expire(args),
        WalCommand::Ahead(args) => return archive::ahead(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has seen enough.
        Err(Error::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => error.failure().tell(json),
    }
}

impl SourceArgs {
    /// Hands all records asked for to `take`.
    fn each(&self, take: impl FnMut(&Record<'_>) -> Result<ControlFlow<()>, Error>) -> Result<Ended, Error> {
        each_record(&self.source, Range { start: self.start, end: self.end }, take)
    }
}

fn stats(args: &StatsArgs) -> Result<(), Error> {
    let mut stats = WalStats::new();
    let result = args.source.each(|record| {
        stats.add(record);
        Ok(ControlFlow::Continue(()))
    });
    // What comes before an invalid record is worth knowing.
    let mut out = BufWriter::new(io::stdout().lock());
    let by = if args.by == StatsBy::Rmgr { By::Rmgr } else { By::Record };
    if args.source.json {
        let mut object = serde_json::to_value(json::Stats::new(&stats, by)).map_err(io::Error::from)?;
        if let Err(error) = &result {
            object["error"] = error.failure().to_json();
        }
        writeln!(out, "{object}")?;
    } else {
        write!(out, "{}", stats.table(by))?;
    }
    out.flush()?;
    note_end(&result?, args.source.json);
    Ok(())
}

fn dump(args: &DumpArgs) -> Result<(), Error> {
    let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let mut left = args.limit.unwrap_or(u64::MAX);
    if left == 0 {
        return Ok(());
    }
    let mut line = String::new();
    let result = args.source.each(|record| {
        if !args.rmgr.is_empty() && !args.rmgr.contains(&record.header.rmgr) {
            return Ok(ControlFlow::Continue(()));
        }
        if args.source.json {
            serde_json::to_writer(&mut out, &json::Record::new(record)).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            line.clear();
            describe_line(record, &mut line);
            writeln!(out, "{line}")?;
        }
        left -= 1;
        Ok(if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    out.flush()?;
    note_end(&result?, args.source.json);
    Ok(())
}

/// Says where the WAL ended, which may be earlier than its files do.
fn note_end(ended: &Ended, json: bool) {
    if let Ended::EndOfWal { at, why } = ended
        && !json
    {
        failure::warning(format_args!("WAL ends at {at}: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_managers_have_pg_waldumps_names() {
        assert_eq!(parse_rmgr("heap2"), Ok(RmgrId::HEAP2));
        assert_eq!(parse_rmgr("custom200"), Ok(RmgrId(200)));
        assert!(parse_rmgr("nope").unwrap_err().contains("LogicalMessage"));
    }
}
