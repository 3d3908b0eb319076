//! `walrider logical pause` and `resume`: signals for a `walrider logical apply` that runs here, found by its slot or origin.

use std::process::ExitCode;

use clap::Args;
use rustix::process::Signal;

use crate::Command;
use crate::control::finish;
use crate::logical::LogicalCommand;
use crate::running::{ControlError, Kind, Running};
use crate::values::parse_slot;

/// Which `walrider logical apply`
///
/// It is looked for among the processes of this machine. The state is in /status and /metrics, and lasts until the process ends.
#[derive(Args)]
pub struct WhichArgs {
    /// Its slot
    #[arg(short = 'S', long, value_name = "NAME", value_parser = parse_slot)]
    slot: String,
    /// Its --origin, where several have a slot of this name
    #[arg(long, value_name = "NAME", value_parser = parse_slot)]
    origin: Option<String>,
}

/// Runs the command: sends the signal, and does not wait.
pub fn run(args: &WhichArgs, signal: Signal) -> ExitCode {
    finish(find(args).and_then(|apply| apply.signal(signal)))
}

fn find(which: &WhichArgs) -> Result<Running, ControlError> {
    let is_it = |running: &Running| {
        let Some(Command::Logical(logical)) = running.command() else { return false };
        let LogicalCommand::Apply(args) = logical.command else { return false };
        args.slot == which.slot
            && which.origin.as_ref().is_none_or(|wanted| args.origin.as_ref().unwrap_or(&args.slot) == wanted)
    };
    let mut found: Vec<Running> = Running::all(Kind::LogicalApply)?.filter(is_it).collect();
    let slot = which.slot.clone();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(ControlError::NotApplying { slot }),
        _ => {
            let pids: Vec<String> = found.iter().map(|running| running.pid().to_string()).collect();
            Err(ControlError::SeveralApply { slot, pids: pids.join(", ") })
        }
    }
}
