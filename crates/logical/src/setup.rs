//! The start of logical replication: publication, slot, initial copy and subscription, so that nothing is missing or twice.
//!
//! A slot exports the snapshot of the position where it begins (`CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')`). All tables are
//! copied as that snapshot sees them, and the subscriber starts with the slot's first change. So each row comes once.
//!
//! Everything is looked at before anything is changed. What fails later is taken back, as far as the servers can be reached.

mod checks;
mod error;
mod take_back;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use walrider_layout::Lsn;
use walrider_session::{ConnectOptions, Connection};

use crate::copy::{Copy, Progress, Table, raise};
use crate::origins;
use crate::sql::{identifier, literal};

pub use error::{SetupError, Side};

/// The output plugin of the slot.
pub const PLUGIN: &str = "walrider_pgoutput";
/// `application_name` where the connection string has none.
const NAME: &str = "walrider";
/// Tables that are locked with one command.
const LOCKED_AT_ONCE: usize = 100;
/// Sessions that wait for nothing and nobody, and read what is written as it is.
const SESSION: &str = "SET client_encoding = 'UTF8'; SET search_path = ''; SET standard_conforming_strings = on; \
     SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET extra_float_digits = 3; SET row_security = off; \
     SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0; \
     SET transaction_timeout = 0; SET default_transaction_read_only = off";

/// What is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tables {
    /// What the publication has, which exists.
    OfPublication,
    /// These: schema and name.
    Named(Vec<(String, String)>),
    /// All of these schemas.
    Schemas(Vec<String>),
    /// All of the database.
    All,
}

/// Who applies the changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handover {
    /// A stock subscription of the target.
    Subscription {
        /// Its name.
        name: String,
        /// How the target's server connects to the source.
        connection: String,
    },
    /// `walrider logical apply`, which starts where a new slot begins.
    Apply,
}

/// What to set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The database that is published.
    pub source: String,
    /// The database that it goes to.
    pub target: String,
    /// Name of the publication.
    pub publication: String,
    /// What is in it.
    pub tables: Tables,
    /// Name of the slot, which does not exist.
    pub slot: String,
    /// Who goes on.
    pub handover: Handover,
    /// Connections to each server that copy.
    pub jobs: usize,
    /// Whether rows are copied; else the target has them already.
    pub copy: bool,
    /// Whether prepared transactions are sent when they are prepared.
    pub two_phase: bool,
    /// The subscription's `streaming`: "off", "on" or "parallel".
    pub streaming: String,
    /// Look at everything, and change nothing.
    pub dry_run: bool,
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Looking at both servers.
    Checking,
    /// The slot waits for the transactions that are running on the source.
    CreatingSlot,
    /// Rows are copied.
    Copying,
    /// The subscription is made.
    HandingOver,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the publication is new.
    pub publication_created: bool,
    /// The tables that are published.
    pub tables: usize,
    /// Rows that were copied.
    pub rows: u64,
    /// Bytes of these in COPY's text format.
    pub bytes: u64,
    /// Where the slot begins; `None` of a dry run.
    pub consistent_point: Option<Lsn>,
    /// How long the copy took.
    pub copying: Duration,
}

/// What exists on the servers because of us, for what fails later.
#[derive(Debug, Default)]
struct Made {
    publication: bool,
    slot: bool,
    /// Replication origins of the target.
    origins: Vec<String>,
    /// Tables of the target that have, or may have, rows.
    copied: Vec<Table>,
    /// The subscription was sent to be committed, and the answer did not come.
    unknown: bool,
}

/// A run.
pub struct Setup {
    settings: Settings,
    source: ConnectOptions,
    target: ConnectOptions,
    /// The source's walsender that makes the slot.
    exporter: ConnectOptions,
    progress: Arc<Progress>,
    stop: Arc<OwnedFd>,
}

impl Setup {
    /// Reads the connection strings.
    pub fn new(settings: Settings) -> Result<Setup, SetupError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(SetupError::System)?;
        let stop = Arc::new(stop);
        let complete = |side: Side, resolved: walrider_session::Result<ConnectOptions>| {
            let mut options = resolved.map_err(|error| side.failed("could not read its connection string", error))?;
            options.interrupt_with(stop.clone());
            Ok::<_, SetupError>(options)
        };
        let source = complete(Side::Source, ConnectOptions::resolve_ordinary(&settings.source, NAME))?;
        let target = complete(Side::Target, ConnectOptions::resolve_ordinary(&settings.target, NAME))?;
        let exporter = complete(Side::Source, ConnectOptions::resolve_for_database(&settings.source, NAME))?;
        // The two kinds of session have different databases where none is named.
        if exporter.database() != source.database() {
            return Err(SetupError::Refused(vec!["name the database in --source, as in dbname=NAME".into()]));
        }
        Ok(Setup { settings, source, target, exporter, progress: Arc::default(), stop })
    }

    /// How far the copy is.
    pub fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// What ends it early when called, from any thread: it takes back what it made.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + use<> {
        let stop = self.stop.clone();
        move || raise(&stop)
    }

    /// Does it all. `at` hears of each stage.
    pub fn run(&self, at: &dyn Fn(Stage)) -> Result<Report, SetupError> {
        let mut made = Made::default();
        match self.proceed(at, &mut made) {
            Ok(report) => Ok(report),
            Err(error) => Err(self.take_back(error, &made)),
        }
    }

    fn proceed(&self, at: &dyn Fn(Stage), made: &mut Made) -> Result<Report, SetupError> {
        at(Stage::Checking);
        let mut source = Side::Source.open(&self.source)?;
        let mut target = Side::Target.open(&self.target)?;
        let looked = self.check(&mut source, &mut target)?;
        let mut report = Report {
            publication_created: looked.publication_created,
            tables: looked.tables.len(),
            rows: 0,
            bytes: 0,
            consistent_point: None,
            copying: Duration::ZERO,
        };
        if self.settings.dry_run {
            Side::Source.run(&mut source, "ROLLBACK")?;
            return Ok(report);
        }
        made.publication = looked.publication_created;
        Side::Source.run(&mut source, "COMMIT")?;

        Side::Source.run(&mut source, "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")?;
        if self.settings.copy {
            // As pg_dump does: what rewrites a table behind the snapshot's back, ALTER TABLE or VACUUM FULL, waits until it is copied. The
            // locks are older than the snapshot.
            lock(&mut source, &looked.tables)?;
        }
        at(Stage::CreatingSlot);
        let (exporting, consistent_point, snapshot) = self.create_slot(made)?;
        // A table or partition that was added meanwhile would never be copied.
        let now = checks::tables_of(&mut source, &self.settings.publication)?;
        if checks::identities(&now) != checks::identities(&looked.tables) {
            return Err(SetupError::Refused(vec![
                "the publication was changed, or a table of it, since it was looked at: start again".into(),
            ]));
        }
        if self.settings.copy {
            at(Stage::Copying);
            self.create_origins(&mut target, made)?;
            made.copied.clone_from(&looked.tables);
            let began = Instant::now();
            self.copy(&looked.tables, &snapshot)?;
            Self::settle(&mut target)?;
            report.copying = began.elapsed();
        }
        drop(exporting);
        Side::Source.run(&mut source, "COMMIT")?;
        report.rows = self.progress.rows.load(Ordering::Relaxed);
        report.bytes = self.progress.bytes.load(Ordering::Relaxed);
        report.consistent_point = Some(consistent_point);

        at(Stage::HandingOver);
        if let Handover::Subscription { name, connection } = &self.settings.handover {
            self.subscribe(&mut target, name, connection, &looked.tables, made)?;
        }
        Ok(report)
    }

    /// The slot; the session must live as long as its snapshot is to be imported.
    fn create_slot(&self, made: &mut Made) -> Result<(Connection, Lsn, String), SetupError> {
        let what = format!("could not create replication slot {}", identifier(&self.settings.slot));
        let failed = |error| Side::Source.failed(&what, error);
        let mut connection = Connection::open(&self.exporter).map_err(failed)?;
        // It waits for the end of every transaction that is running.
        connection.set_response_timeout(None);
        let command = format!(
            "CREATE_REPLICATION_SLOT {} LOGICAL {} (SNAPSHOT 'export', TWO_PHASE {})",
            identifier(&self.settings.slot),
            identifier(PLUGIN),
            self.settings.two_phase
        );
        // If the connection is lost, there may be a slot: it is looked for by name, which nobody had when we looked.
        made.slot = true;
        let rows = connection.simple_query(&command).map_err(|error| {
            made.slot = error.server_message().is_none();
            failed(error)
        })?;
        let text = |at: usize| rows.first().and_then(|row| std::str::from_utf8(row.get(at)?.as_deref()?).ok());
        match (text(1).and_then(|lsn| lsn.parse().ok()), text(2).map(str::to_owned)) {
            (Some(lsn), Some(snapshot)) => Ok((connection, lsn, snapshot)),
            _ => Err(SetupError::Refused(vec!["the source made a slot, and exported no snapshot".into()])),
        }
    }

    fn copy(&self, tables: &[Table], snapshot: &str) -> Result<(), SetupError> {
        let copy = Copy {
            source: &self.source,
            target: &self.target,
            tables,
            snapshot,
            workers: self.workers(),
            origin: self.origin(),
            progress: &self.progress,
            stop: &self.stop,
        };
        copy.run()
    }

    fn workers(&self) -> usize {
        self.settings.jobs.max(1)
    }

    /// Whose rows they are: as if `walrider logical apply` had brought them. Else it would take them for changes that were made on the
    /// target, when the copy committed, which are newer than the publisher's.
    fn origin(&self) -> Option<&str> {
        (self.settings.handover == Handover::Apply).then_some(&self.settings.slot)
    }

    fn create_origins(&self, target: &mut Connection, made: &mut Made) -> Result<(), SetupError> {
        let Some(origin) = self.origin() else { return Ok(()) };
        for name in (0..self.workers()).map(|number| origins::name_of(origin, number)) {
            if !Side::Target.rows::<1>(target, &origins::create_sql(&literal(&name)))?.is_empty() {
                made.origins.push(name);
            }
        }
        Ok(())
    }

    /// Waits until all that was committed on the target is durable, whatever its sessions waited for.
    fn settle(target: &mut Connection) -> Result<(), SetupError> {
        let write =
            "BEGIN; SET LOCAL synchronous_commit = on; SELECT pg_logical_emit_message(true, 'walrider', ''); COMMIT";
        Side::Target.run(target, write)
    }

    /// The subscription, which knows every table as copied, and begins at the slot's first change: all in one transaction.
    fn subscribe(
        &self,
        target: &mut Connection,
        name: &str,
        connection: &str,
        tables: &[Table],
        made: &mut Made,
    ) -> Result<(), SetupError> {
        Side::Target.run(target, "BEGIN")?;
        Side::Target.run(target, &self.create_subscription(name, connection))?;
        let known: Vec<[String; 3]> = Side::Target.rows(
            target,
            &format!(
                "SELECT n.nspname, c.relname, r.srsubstate FROM pg_subscription s \
                 JOIN pg_subscription_rel r ON r.srsubid = s.oid JOIN pg_class c ON c.oid = r.srrelid \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE s.subname = {} AND s.subdbid = (SELECT oid FROM pg_database WHERE datname = \
                 current_database())",
                literal(name)
            ),
        )?;
        let found =
            |table: &Table| known.iter().any(|row| row[0] == table.schema && row[1] == table.name && row[2] == "r");
        if known.len() != tables.len() || !tables.iter().all(found) {
            return Err(SetupError::Refused(vec![
                "the tables of the publication have changed since they were copied: start again".into(),
            ]));
        }
        // Its origin says nothing yet, so that it starts where the slot does (CreateDecodingContext, logical.c). Advancing the origin
        // here would not be undone with this transaction, and count for the origin that gets its number next.
        Side::Target.run(target, &format!("ALTER SUBSCRIPTION {} ENABLE", identifier(name)))?;
        made.unknown = true;
        Side::Target.run(target, "COMMIT")
    }

    fn create_subscription(&self, name: &str, connection: &str) -> String {
        format!(
            "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH (create_slot = false, slot_name = {}, copy_data = false, \
             enabled = false, two_phase = {}, streaming = {})",
            identifier(name),
            literal(connection),
            identifier(&self.settings.publication),
            literal(&self.settings.slot),
            self.settings.two_phase,
            identifier(&self.settings.streaming),
        )
    }
}

/// Locks the relations that have the rows, until the transaction ends, so that they can be read and written, and nothing else.
fn lock(source: &mut Connection, tables: &[Table]) -> Result<(), SetupError> {
    let names = tables.iter().flat_map(|table| &table.storage);
    let looks: Vec<String> = names
        .map(|storage| {
            format!("SELECT FROM ONLY {}.{} LIMIT 0", identifier(&storage.schema), identifier(&storage.name))
        })
        .collect();
    looks.chunks(LOCKED_AT_ONCE).try_for_each(|some| Side::Source.run(source, &some.join("; ")))
}
