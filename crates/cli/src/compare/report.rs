//! Tells the result: lines and a table for a person, one JSON object for a program.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::classes::Class;
use super::tally::{Finding, Tally};
use crate::failure::SCHEMA_VERSION;
use crate::out;

/// How often the progress bar moves.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Characters of the progress bar.
const PROGRESS_WIDTH: usize = 40;

/// The result of a comparison.
pub struct Report {
    /// Without masks.
    pub strict: bool,
    /// Relations compared.
    pub relations: u64,
    /// All findings.
    pub tally: Tally,
}

#[derive(Serialize)]
struct Json<'a> {
    schema_version: u32,
    equal: bool,
    strict: bool,
    relations: u64,
    pages: u64,
    files: u64,
    differences: u64,
    classes: BTreeMap<&'static str, u64>,
    first: &'a [Finding],
}

impl Report {
    /// Prints the result to the standard output.
    pub fn print(&self, json: bool) {
        out::say(format_args!("{}", if json { self.json() } else { self.text() }));
    }

    /// The result as one JSON object.
    pub fn json(&self) -> String {
        let found = Class::ALL.iter().filter(|&&class| self.tally.of(class) > 0);
        let object = Json {
            schema_version: SCHEMA_VERSION,
            equal: self.tally.differences() == 0,
            strict: self.strict,
            relations: self.relations,
            pages: self.tally.pages,
            files: self.tally.files,
            differences: self.tally.differences(),
            classes: found.map(|&class| (class.info().name, self.tally.of(class))).collect(),
            first: &self.tally.first,
        };
        serde_json::to_string(&object).expect("strings and numbers") + "\n"
    }

    /// The result for a person.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.tally.first {
            text += &finding_line(finding);
            text.push('\n');
        }
        let differences = self.tally.differences();
        let more = differences - self.tally.first.len() as u64;
        if more > 0 {
            text += &format!("... and {more} more\n");
        }
        if differences > 0 {
            text.push('\n');
        }
        let rows = |is_difference: bool| {
            let classes = Class::ALL.iter().filter(move |class| class.is_difference(self.strict) == is_difference);
            classes.filter(|&&class| self.tally.of(class) > 0).map(|class| {
                let info = class.info();
                format!("  {:<26}{:>10} {:<8} {}\n", info.name, self.tally.of(*class), info.unit, info.why)
            })
        };
        let (different, expected) = (rows(true).collect::<String>(), rows(false).collect::<String>());
        if !different.is_empty() {
            text += &format!("Differences:\n{different}");
        }
        if !expected.is_empty() {
            text += &format!("Not counted as differences (docs/compare.md says why):\n{expected}");
        }
        text += &format!(
            "{} relations, {} pages, {} files compared{}: {}\n",
            self.relations,
            self.tally.pages,
            self.tally.files,
            if self.strict { " without masks" } else { "" },
            match differences {
                0 => "equal".to_owned(),
                1 => "1 difference".to_owned(),
                many => format!("{many} differences"),
            }
        );
        text
    }
}

/// One finding on one line.
fn finding_line(finding: &Finding) -> String {
    let mut line = format!("{}: {}", finding.class, finding.file);
    if let Some(block) = finding.block {
        line += &format!(" block {block}");
    }
    if let Some(offset) = finding.offset {
        line += &format!(" byte {offset}");
    }
    if !finding.field.is_empty() {
        line += &format!(" ({})", finding.field);
    }
    line + &format!(": {} | {}", finding.a, finding.b)
}

/// Draws a progress bar on a terminal until the work is finished.
pub fn show_progress(total_bytes: u64, done_bytes: &AtomicU64, finished: &AtomicBool) {
    if !io::stderr().is_terminal() || total_bytes == 0 {
        return;
    }
    while !finished.load(Ordering::Relaxed) {
        let done = done_bytes.load(Ordering::Relaxed).min(total_bytes);
        let filled = (done as u128 * PROGRESS_WIDTH as u128 / u128::from(total_bytes)) as usize;
        let bar = format!("{:=<filled$}{:width$}", "", "", width = PROGRESS_WIDTH - filled);
        eprint!("\rcomparing [{bar}] {} of {} MB ", done >> 20, total_bytes >> 20);
        thread::sleep(PROGRESS_INTERVAL);
    }
    eprint!("\r{:width$}\r", "", width = PROGRESS_WIDTH + 50);
}
