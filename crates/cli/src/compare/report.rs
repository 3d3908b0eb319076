//! Tells the result: lines and a table for a person, one JSON object for a program.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::thread;
use std::time::Duration;

use serde::Serialize;
use walrider_inspect::compare::{Class, Finding, Progress, Report};

use crate::failure::SCHEMA_VERSION;
use crate::out;

/// How often the progress bar moves.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Characters of the progress bar.
const PROGRESS_WIDTH: usize = 40;

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

/// Prints the result to the standard output.
pub fn print(report: &Report, json: bool) {
    out::say(format_args!("{}", if json { to_json(report) } else { to_text(report) }));
}

/// The result as one JSON object.
fn to_json(report: &Report) -> String {
    let found = Class::ALL.iter().filter(|&&class| report.tally.of(class) > 0);
    let object = Json {
        schema_version: SCHEMA_VERSION,
        equal: report.tally.differences() == 0,
        strict: report.strict,
        relations: report.relations,
        pages: report.tally.pages,
        files: report.tally.files,
        differences: report.tally.differences(),
        classes: found.map(|&class| (class.info().name, report.tally.of(class))).collect(),
        first: &report.tally.first,
    };
    serde_json::to_string(&object).expect("strings and numbers") + "\n"
}

/// The result for a person.
fn to_text(report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.tally.first {
        text += &finding_line(finding);
        text.push('\n');
    }
    let differences = report.tally.differences();
    let more = differences - report.tally.first.len() as u64;
    if more > 0 {
        text += &format!("... and {more} more\n");
    }
    if differences > 0 {
        text.push('\n');
    }
    let rows = |is_difference: bool| {
        let classes = Class::ALL.iter().filter(move |class| class.is_difference(report.strict) == is_difference);
        classes.filter(|&&class| report.tally.of(class) > 0).map(|class| {
            let info = class.info();
            format!("  {:<26}{:>10} {:<8} {}\n", info.name, report.tally.of(*class), info.unit, info.why)
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
        report.relations,
        report.tally.pages,
        report.tally.files,
        if report.strict { " without masks" } else { "" },
        match differences {
            0 => "equal".to_owned(),
            1 => "1 difference".to_owned(),
            many => format!("{many} differences"),
        }
    );
    text
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
pub fn show_progress(progress: &Progress) {
    let total_bytes = progress.total_bytes;
    if !io::stderr().is_terminal() || total_bytes == 0 {
        return;
    }
    while !progress.is_finished() {
        let done = progress.done_bytes().min(total_bytes);
        let filled = (done as u128 * PROGRESS_WIDTH as u128 / u128::from(total_bytes)) as usize;
        let bar = format!("{:=<filled$}{:width$}", "", "", width = PROGRESS_WIDTH - filled);
        eprint!("\rcomparing [{bar}] {} of {} MB ", done >> 20, total_bytes >> 20);
        thread::sleep(PROGRESS_INTERVAL);
    }
    eprint!("\r{:width$}\r", "", width = PROGRESS_WIDTH + 50);
}

#[cfg(test)]
mod tests {
    use walrider_inspect::compare::{Location, Tally};

    use super::*;

    fn report(found: &[Class]) -> Report {
        let mut tally = Tally::new(false, 1);
        for &class in found {
            let place = Location { block: Some(7), offset: Some(24), field: "line pointer 1".into() };
            tally.find(class, "base/5/16384", place, "01", "02");
        }
        (tally.pages, tally.files) = (1, 4);
        Report { strict: false, relations: 1, tally }
    }

    #[test]
    fn equal_directories_are_said_to_be_equal() {
        assert!(to_text(&report(&[Class::Masked])).ends_with("1 relations, 1 pages, 4 files compared: equal\n"));
    }

    #[test]
    fn both_forms_carry_the_counts_and_the_first_differences() {
        let report = report(&[Class::Masked, Class::Page, Class::File]);
        let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
        assert_eq!((&json["differences"], &json["equal"]), (&2.into(), &false.into()));
        assert_eq!((&json["classes"]["page"], &json["classes"]["masked"]), (&1.into(), &1.into()));
        assert_eq!(json["first"].as_array().unwrap().len(), 1);
        assert_eq!((&json["first"][0]["file"], &json["first"][0]["a"]), (&"base/5/16384".into(), &"01".into()));
        let text = to_text(&report);
        assert!(text.starts_with("page: base/5/16384 block 7 byte 24 (line pointer 1): 01 | 02\n... and 1 more\n"));
        assert!(text.ends_with(" compared: 2 differences\n"), "{text}");
    }
}
