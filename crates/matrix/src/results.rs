//! The file of results: a line of JSON about the experiment, then one for each run. What it has need not be done again.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use walrider_observe::status::Time;

use crate::figures::Outcome;
use crate::plan::{Plan, Run};

/// A key that goes, or means something else, raises it.
pub const SCHEMA_VERSION: u32 = 1;

/// The first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Of Walrider.
    pub version: String,
    /// When it began.
    pub started_at: Time,
    /// The machine that the load ran on.
    pub machine: Machine,
    /// What is to be done.
    pub plan: Plan,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name and release of the system's kernel.
    pub system: String,
    /// Of its processors, as far as it is told.
    pub processor: String,
    /// How many may be used.
    pub cores: usize,
    /// Memory in bytes, if that is told.
    pub memory_bytes: Option<u64>,
}

impl Machine {
    /// This one.
    pub fn this() -> Machine {
        let of = |file: &str, key: &str| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned())).unwrap_or_default()
        };
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let kilobytes = of("/proc/meminfo", "MemTotal").trim_end_matches("kB").trim().parse::<u64>();
        Machine {
            system: format!("{} {}", std::env::consts::OS, release.trim()),
            processor: of("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kilobytes.ok().map(|kilobytes| kilobytes << 10),
        }
    }
}

/// The level of each factor, by name.
pub type Settings = BTreeMap<String, String>;

/// A run, as a line has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Its number in the order of runs, from 1.
    pub run: usize,
    /// How often its settings were there before.
    pub repeat: u32,
    /// The level of each factor, by name.
    pub settings: Settings,
    /// When it began.
    pub started_at: Time,
    /// What was measured; none if it failed.
    pub outcome: Option<Outcome>,
    /// Why it failed.
    pub failed: Option<Failed>,
}

impl Done {
    fn key(&self) -> (Settings, u32) {
        (self.settings.clone(), self.repeat)
    }
}

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// In words.
    pub message: String,
    /// The last lines of servers' logs.
    pub log: Vec<String>,
}

/// Why there is no file of results.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// The system refused.
    #[error("could not {what} \"{}\": {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It cannot be gone on with.
    #[error("\"{}\" {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
}

/// The file, and what it has.
#[derive(Debug)]
pub struct Results {
    path: PathBuf,
    file: File,
    /// The first line.
    pub header: Header,
    /// Runs by what they are of; the last line about one counts.
    runs: BTreeMap<(Settings, u32), Done>,
}

impl Results {
    /// A new file. Another bench that runs cannot use it meanwhile.
    ///
    /// # Errors
    /// It is there already, or cannot be written.
    pub fn create(path: &Path, header: Header) -> Result<Results, ResultsError> {
        let failed = |what| move |source| ResultsError::Io { what, path: path.to_owned(), source };
        let file = match OpenOptions::new().read(true).append(true).create_new(true).open(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(refused(path, "is there already: --resume goes on with it"));
            }
            other => other.map_err(failed("create"))?,
        };
        lock(path, &file)?;
        let mut results = Results { path: path.to_owned(), file, header, runs: BTreeMap::new() };
        results.write(&results.header.clone())?;
        Ok(results)
    }

    /// Goes on with a file. A last line that is not whole is cut off, and its run is made again.
    ///
    /// # Errors
    /// It is not there, is no such file, or of another experiment; a seed of zero is any.
    pub fn resume(path: &Path, plan: &Plan) -> Result<Results, ResultsError> {
        let failed = |what| move |source| ResultsError::Io { what, path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(failed("open"))?;
        lock(path, &file)?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed("read"))?;
        let whole = text.rfind('\n').map_or(0, |at| at + 1);
        if whole < text.len() {
            file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed("write"))?;
        }
        let mut lines = text[..whole].lines().enumerate();
        let wrong = |nth: usize, error: serde_json::Error| refused(path, format!("line {}: {error}", nth + 1));
        let first = lines.next().ok_or_else(|| refused(path, "has no line that is whole: remove it"))?.1;
        let header: Header = serde_json::from_str(first).map_err(|error| wrong(0, error))?;
        if header.schema_version != SCHEMA_VERSION {
            return Err(refused(path, format!("is of another Walrider: schema_version {}", header.schema_version)));
        }
        if let Some(difference) = difference(&header.plan, plan) {
            return Err(refused(path, format!("is of another experiment: {difference}")));
        }
        let runs = lines.map(|(nth, line)| serde_json::from_str(line).map_err(|error| wrong(nth, error)));
        let runs = runs.map(|done: Result<Done, _>| done.map(|done| (done.key(), done))).collect::<Result<_, _>>()?;
        Ok(Results { path: path.to_owned(), file, header, runs })
    }

    /// Adds a run; it is durable then.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn add(&mut self, done: Done) -> Result<(), ResultsError> {
        self.write(&done)?;
        self.runs.insert(done.key(), done);
        Ok(())
    }

    /// What there is of a run. By its settings: its number may be that of another with another version's random numbers.
    pub fn of(&self, run: &Run) -> Option<&Done> {
        self.runs.get(&(self.header.plan.settings(run).into_iter().collect(), run.repeat))
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), ResultsError> {
        let mut text = serde_json::to_vec(line).expect("it has no keys but text");
        text.push(b'\n');
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        written.map_err(|source| ResultsError::Io { what: "write", path: self.path.clone(), source })
    }
}

fn refused(path: &Path, why: impl Into<String>) -> ResultsError {
    ResultsError::Refused { path: path.to_owned(), why: why.into() }
}

fn lock(path: &Path, file: &File) -> Result<(), ResultsError> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => refused(path, "is in use by another walrider bench"),
        TryLockError::Error(source) => ResultsError::Io { what: "lock", path: path.to_owned(), source },
    })
}

/// What the plans do not have in common, in words.
fn difference(was: &Plan, is: &Plan) -> Option<String> {
    let factors = |plan: &Plan| {
        let shown = plan.factors.iter().map(|factor| format!("{}={}", factor.name, factor.levels.join(",")));
        shown.collect::<Vec<_>>().join(" ")
    };
    let seed = if is.seed == 0 { was.seed } else { is.seed };
    let compared = [
        ("settings", factors(was), factors(is)),
        ("--fraction", format!("1/{}", was.fraction), format!("1/{}", is.fraction)),
        ("--repeats", was.repeats.to_string(), is.repeats.to_string()),
        ("--seed", was.seed.to_string(), seed.to_string()),
        ("--load", format!("{:?}", was.load), format!("{:?}", is.load)),
        ("--clients", was.clients.to_string(), is.clients.to_string()),
        ("--time", format!("{} s", was.seconds), format!("{} s", is.seconds)),
        ("servers", was.servers.join(" "), is.servers.join(" ")),
    ];
    let (what, was, is) = compared.into_iter().find(|(_, was, is)| was != is)?;
    Some(format!("{what}: it was \"{was}\", and is \"{is}\" now"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    fn header(plan: &Plan) -> Header {
        Header {
            schema_version: SCHEMA_VERSION,
            version: "1".into(),
            started_at: Time::default(),
            machine: Machine::default(),
            plan: plan.clone(),
        }
    }

    fn done(run: usize, a: &str, wal_bytes: u64) -> Done {
        let outcome = Outcome { wal_bytes, load_seconds: 0.1 + 0.2, ..Outcome::default() };
        Done {
            run,
            repeat: 0,
            settings: BTreeMap::from([("a".into(), a.into())]),
            started_at: Time::default(),
            outcome: Some(outcome),
            failed: None,
        }
    }

    #[test]
    fn what_was_done_is_read_again_but_for_half_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let (path, plan) = (dir.path().join("r"), plan(&["a=1,2"], 1, 2));
        let mut results = Results::create(&path, header(&plan)).unwrap();
        assert!(Results::resume(&path, &plan).unwrap_err().to_string().contains("in use"));
        results.add(done(3, "1", 1)).unwrap();
        results.add(done(1, "2", 2)).unwrap();
        results.add(done(4, "1", 3)).unwrap();
        drop(results);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, whole.clone() + r#"{"run":4,"repe"#).unwrap();
        let mut results = Results::resume(&path, &Plan { seed: 0, ..plan.clone() }).unwrap();
        assert_eq!(results.header, header(&plan));
        let of = |levels: usize, repeat| results.of(&Run { number: 9, repeat, levels: vec![levels] }).cloned();
        assert_eq!((of(0, 0), of(1, 0), of(0, 1)), (Some(done(4, "1", 3)), Some(done(1, "2", 2)), None));
        results.add(done(4, "2", 4)).unwrap();
        let added = serde_json::to_string(&done(4, "2", 4)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{whole}{added}\n"));
    }

    #[test]
    fn another_experiment_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, plan) = (dir.path().join("r"), plan(&["a=1,2"], 1, 2));
        let why = |plan: &Plan| Results::resume(&path, plan).unwrap_err().to_string();
        assert!(why(&plan).starts_with("could not open"));
        drop(Results::create(&path, header(&plan)).unwrap());
        assert!(Results::create(&path, header(&plan)).unwrap_err().to_string().contains("--resume goes on with it"));
        let other = Plan { factors: crate::plan::tests::plan(&["a=1,3"], 1, 2).factors, ..plan.clone() };
        assert!(
            why(&other).ends_with("another experiment: settings: it was \"a=1,2\", and is \"a=1,3\" now"),
            "{}",
            why(&other)
        );
        for (other, what) in [
            (Plan { seed: 8, ..plan.clone() }, "--seed"),
            (Plan { repeats: 3, ..plan.clone() }, "--repeats"),
            (Plan { fraction: 2, ..plan.clone() }, "--fraction"),
            (Plan { clients: 2, ..plan.clone() }, "--clients"),
            (Plan { seconds: 2.0, ..plan.clone() }, "--time"),
            (Plan { load: crate::plan::Load::Pgbench { scale: 1 }, ..plan.clone() }, "--load"),
            (Plan { servers: vec!["db1:5432".into()], ..plan.clone() }, "servers"),
        ] {
            assert!(why(&other).contains(&format!("another experiment: {what}: it was")), "{}", why(&other));
        }
        for (text, what) in [("", "no line"), ("{}\n", "line 1"), ("{\n", "line 1")] {
            std::fs::write(&path, text).unwrap();
            assert!(why(&plan).contains(what), "{}", why(&plan));
        }
        let newer = Header { schema_version: 2, ..header(&plan) };
        std::fs::write(&path, serde_json::to_string(&newer).unwrap() + "\n").unwrap();
        assert!(why(&plan).contains("schema_version 2"));
    }
}
