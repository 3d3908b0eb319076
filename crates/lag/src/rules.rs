//! What is wrong with replication, by rule: what samples over some time show, with the evidence, what to do, and what that costs.
//! No clock, no connection.

mod primary;
mod standby;
#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::sample::{Process, Sample, Server, ServerSample};
use crate::split::{Observer, Standby, View};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Data, or the primary itself, are in danger.
    Critical,
    /// Something is wrong.
    Warning,
    /// Worth to know; nothing is wrong.
    Notice,
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The rule's name, which stays.
    pub rule: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// Of which server or standby.
    pub subject: String,
    /// What, in a sentence.
    pub what: String,
    /// What shows it.
    pub evidence: Vec<String>,
    /// What to change.
    pub advice: String,
    /// What that costs.
    pub cost: String,
}

/// Samples over some time, and what they come to.
#[derive(Debug, Default)]
pub struct Series {
    samples: Vec<Sample>,
    views: Vec<View>,
    observer: Observer,
}

impl Series {
    /// One more.
    pub fn add(&mut self, sample: Sample) {
        self.views.push(self.observer.look(&sample));
        self.samples.push(sample);
    }

    /// The last view.
    pub fn view(&self) -> Option<&View> {
        self.views.last()
    }

    /// Between the first sample and the last, in seconds.
    fn seconds(&self) -> f64 {
        match (self.samples.first(), self.samples.last()) {
            (Some(first), Some(last)) => last.time - first.time,
            _ => 0.0,
        }
    }

    /// The servers that answered, each with what it said first and last.
    fn servers(&self) -> impl Iterator<Item = Spoken<'_>> {
        let last = self.samples.last().map_or(&[][..], |sample| &sample.servers);
        last.iter().filter_map(|at| {
            let said =
                |sample: &'_ Sample| sample.servers.iter().any(|other| other.name == at.name && other.server.is_some());
            let first = self.samples.iter().find(|sample| said(sample))?;
            let first = first.servers.iter().find(|other| other.name == at.name)?;
            Some(Spoken { at, first: first.server.as_ref()?, last: at.server.as_ref()? })
        })
    }

    /// What the system said of the process that replays on a server, and when.
    fn processes<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (f64, Process)> + 'a {
        let of = move |sample: &'a Sample| sample.servers.iter().find(|at| at.name == name);
        self.samples.iter().filter_map(of).filter_map(|at| Some((at.answered_at, at.process?)))
    }

    fn primary(&self) -> Option<Spoken<'_>> {
        let (primary, _) = self.samples.last()?.primary()?;
        self.servers().find(|spoken| spoken.name() == primary.name)
    }

    /// What the views say of a standby, one after the other.
    fn of(&self, standby: &Standby) -> impl Iterator<Item = &Standby> {
        let key = standby.key();
        self.views.iter().filter_map(move |view| view.standbys.iter().find(|standby| standby.key() == key))
    }

    /// Everything that is found, the worst first.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        primary::look(self, &mut findings);
        standby::look(self, &mut findings);
        findings.sort_by(|a, b| (a.severity, &a.subject).cmp(&(b.severity, &b.subject)));
        findings
    }
}

/// A server's first word and its last.
#[derive(Clone, Copy)]
struct Spoken<'a> {
    at: &'a ServerSample,
    first: &'a Server,
    last: &'a Server,
}

impl Spoken<'_> {
    fn name(&self) -> &str {
        &self.at.name
    }

    /// By how much a counter grew; nothing if it was reset.
    fn grown(&self, of: impl Fn(&Server) -> Option<u64>) -> Option<u64> {
        of(self.last)?.checked_sub(of(self.first)?)
    }
}

/// The mean of what is known; nothing if nothing is.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}
