//! What has to be right before anything is changed. All that is not is told at once.

use std::collections::{BTreeMap, BTreeSet};

use walrider_session::Connection;

use crate::origins::{FUNCTIONS, PROGRESS, is_ours_sql};

use super::{Handover, PLUGIN, Settings, Setup, SetupError, Side, Tables};
use crate::copy::{Storage, Table};
use crate::sql::{identifier, literal};

/// Oldest version of both servers: that of the plugin.
const OLDEST: u32 = 170_000;

/// What the checks found.
pub(super) struct Looked {
    /// Whether the source's session has a transaction open in which the publication was made.
    pub publication_created: bool,
    pub tables: Vec<Table>,
}

/// What tables are, whatever their length: names, columns, filter, and the relations that have the rows.
pub(super) fn identities(tables: &[Table]) -> Vec<Table> {
    let mut tables = tables.to_vec();
    tables.iter_mut().flat_map(|table| &mut table.storage).for_each(|storage| storage.blocks = 0);
    tables
}

/// Schema, name, columns and filter of each table of a publication.
type Published = BTreeSet<(String, String, Vec<String>, String)>;

impl Setup {
    /// Leaves the source's session in a transaction with the new publication; the caller commits it, or does not.
    pub(super) fn check(&self, source: &mut Connection, target: &mut Connection) -> Result<Looked, SetupError> {
        let settings = &self.settings;
        for (side, connection) in [(Side::Source, &*source), (Side::Target, &*target)] {
            if connection.server_version_num() < OLDEST {
                return Err(refused(format!("the {side} is older than PostgreSQL 17")));
            }
        }
        let mut problems = check_source(source, settings)?;
        problems.extend(check_target(target, settings)?);
        refuse(problems)?;
        Side::Source.run(source, "BEGIN")?;
        let publication_created = provide_publication(source, settings)?;
        let tables = tables_of(source, &settings.publication)?;
        if tables.is_empty() {
            return Err(refused(format!("publication {} has no table", identifier(&settings.publication))));
        }
        let mut problems = check_identities(source, &settings.publication)?;
        problems.extend(check_tables(target, &tables, settings.copy)?);
        refuse(problems)?;
        if let Handover::Subscription { name, connection } = &settings.handover {
            // The server looks itself: rights, names, and whether it reaches the source.
            Side::Target.run(target, "BEGIN")?;
            Side::Target.run(target, &self.create_subscription(name, connection))?;
            Side::Target.run(target, "ROLLBACK")?;
        }
        Ok(Looked { publication_created, tables })
    }
}

fn refused(problem: String) -> SetupError {
    SetupError::Refused(vec![problem])
}

fn refuse(problems: Vec<String>) -> Result<(), SetupError> {
    if problems.is_empty() { Ok(()) } else { Err(SetupError::Refused(problems)) }
}

fn check_source(source: &mut Connection, settings: &Settings) -> Result<Vec<String>, SetupError> {
    let rows: Vec<[String; 8]> = Side::Source.rows(
        source,
        &format!(
            "SELECT current_setting('wal_level'), pg_is_in_recovery(), r.rolsuper OR r.rolreplication, \
             r.rolname, current_setting('max_replication_slots')::int <= (SELECT count(*) FROM \
             pg_replication_slots), current_setting('max_wal_senders')::int - 1 <= (SELECT \
             count(*) FROM pg_stat_replication), \
             (SELECT setting FROM pg_settings WHERE name = 'output_plugin_libraries'), \
             EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = {}) \
             FROM pg_roles r WHERE r.rolname = current_user",
            literal(&settings.slot)
        ),
    )?;
    let row = rows.first().ok_or_else(|| refused("the source does not know its own role".into()))?;
    let mut problems = Vec::new();
    if row[0] != "logical" {
        problems.push(format!("source: wal_level is \"{}\": set wal_level = logical, and restart the server", row[0]));
    }
    if row[1] == "t" {
        problems.push("source: it is a standby: name its primary".into());
    }
    if row[2] != "t" {
        let role = identifier(&row[3]);
        problems.push(format!("source: role {role} may not create slots: ALTER ROLE {role} REPLICATION"));
    }
    if row[4] == "t" {
        problems.push("source: no slot is free: raise max_replication_slots, and restart the server".into());
    }
    // One while tables are copied, one for the subscriber afterwards.
    if row[5] == "t" {
        problems.push("source: fewer than two connections are free for replication: raise max_wal_senders, and restart the server".into());
    }
    // Empty also where the role may not see it; then the slot is refused.
    if !row[6].is_empty() && !row[6].split(',').any(|library| library.trim().trim_matches('"') == PLUGIN) {
        problems.push(format!(
            "source: the server does not trust the output plugin: set output_plugin_libraries = '{}, {PLUGIN}', and reload it",
            row[6]
        ));
    }
    if row[7] == "t" {
        problems.push(format!(
            "source: replication slot {} exists: choose another name, or SELECT pg_drop_replication_slot({}) if it is left \
             from an earlier start",
            identifier(&settings.slot),
            literal(&settings.slot)
        ));
    }
    Ok(problems)
}

fn check_target(target: &mut Connection, settings: &Settings) -> Result<Vec<String>, SetupError> {
    // Each job has one, whose rows it copies; a subscription has one.
    let (origins, is_ours) = match settings.handover {
        Handover::Apply if settings.copy => (settings.jobs.max(1), is_ours_sql(&settings.slot)),
        _ => (1, "false".to_owned()),
    };
    let rows: Vec<[String; 4]> = Side::Target.rows(
        target,
        &format!(
            "SELECT pg_is_in_recovery(), has_parameter_privilege('session_replication_role', 'SET'), \
             current_user, (SELECT count(*) FROM pg_replication_origin WHERE NOT {is_ours}) + {origins} > \
             current_setting(CASE WHEN current_setting('max_active_replication_origins', true) IS NULL \
             THEN 'max_replication_slots' ELSE 'max_active_replication_origins' END)::int"
        ),
    )?;
    let row = rows.first().ok_or_else(|| refused("the target gave no answer".into()))?;
    let mut problems = Vec::new();
    if row[0] == "t" {
        problems.push("target: it is a standby: name its primary".into());
    }
    if settings.copy && row[1] != "t" {
        problems.push(format!(
            "target: role {0} may not keep triggers and foreign keys from firing: as a superuser, GRANT SET ON PARAMETER \
             session_replication_role TO {0}",
            identifier(&row[2])
        ));
    }
    if row[3] == "t" {
        problems.push(format!(
            "target: fewer replication origins are free than are needed, {origins}: raise max_active_replication_origins (17: \
             max_replication_slots), or use fewer jobs"
        ));
    }
    if settings.handover == Handover::Apply {
        problems.extend(check_progress(target, settings)?);
        problems.extend(check_origins(target)?);
    }
    Ok(problems)
}

/// An apply that finds an earlier one's position would leave out what comes before that.
fn check_progress(target: &mut Connection, settings: &Settings) -> Result<Option<String>, SetupError> {
    let find = format!("SELECT 1 WHERE to_regclass({}) IS NOT NULL", literal(PROGRESS));
    if Side::Target.rows::<1>(target, &find)?.is_empty() {
        return Ok(None);
    }
    let rows_of_it = format!("FROM {PROGRESS} WHERE origin = {}", literal(&settings.slot));
    let known = !Side::Target.rows::<1>(target, &format!("SELECT 1 {rows_of_it} LIMIT 1"))?.is_empty();
    Ok(known.then(|| {
        format!("target: there are positions of an earlier apply from a slot of this name: DELETE {rows_of_it}, or choose another name")
    }))
}

/// The rows come with origins, and `walrider logical apply` needs the same rights.
fn check_origins(target: &mut Connection) -> Result<Option<String>, SetupError> {
    let list = FUNCTIONS.map(|function| literal(&format!("pg_catalog.{function}"))).join(", ");
    let ask = format!(
        "SELECT current_user FROM unnest(ARRAY[{list}]) f GROUP BY 1 HAVING NOT bool_and(has_function_privilege(f, 'EXECUTE'))"
    );
    let lacks = Side::Target.rows::<1>(target, &ask)?;
    Ok(lacks.first().map(|[role]| {
        let (role, functions) = (identifier(role), FUNCTIONS.join(", "));
        format!("target: role {role} may not use replication origins: as a superuser, GRANT EXECUTE ON FUNCTION {functions} TO {role}")
    }))
}

/// Makes the publication if there is none; whether it did.
fn provide_publication(source: &mut Connection, settings: &Settings) -> Result<bool, SetupError> {
    let name = identifier(&settings.publication);
    let ask = format!("SELECT 1 FROM pg_publication WHERE pubname = {}", literal(&settings.publication));
    let exists = !Side::Source.rows::<1>(source, &ask)?.is_empty();
    let what = match &settings.tables {
        Tables::OfPublication if exists => return Ok(false),
        Tables::OfPublication => {
            return Err(refused(format!(
                "source: there is no publication {name}: create it, or say what it is to have (--tables, --schema, --all-tables)"
            )));
        }
        _ if exists => {
            return Err(refused(format!(
                "source: publication {name} exists: leave out --tables, --schema and --all-tables to use it as it is, or \
                 choose another name"
            )));
        }
        Tables::All => "ALL TABLES".to_owned(),
        Tables::Schemas(schemas) => {
            format!(
                "TABLES IN SCHEMA {}",
                schemas.iter().map(|schema| identifier(schema)).collect::<Vec<_>>().join(", ")
            )
        }
        Tables::Named(tables) => {
            let quoted = |(schema, name): &(String, String)| format!("{}.{}", identifier(schema), identifier(name));
            format!("TABLE {}", tables.iter().map(quoted).collect::<Vec<_>>().join(", "))
        }
    };
    Side::Source.run(source, &format!("CREATE PUBLICATION {name} FOR {what}"))?;
    Ok(true)
}

/// The tables of a publication, with their columns as they are published.
fn published(source: &mut Connection, publication: &str) -> Result<Published, SetupError> {
    let rows = Side::Source.rows(
        source,
        &format!(
            "SELECT p.schemaname, p.tablename, p.rowfilter, u.attname FROM pg_publication_tables p \
             LEFT JOIN LATERAL unnest(p.attnames) WITH ORDINALITY u(attname, number) ON true \
             WHERE p.pubname = {} ORDER BY p.schemaname, p.tablename, u.number",
            literal(publication)
        ),
    )?;
    let mut tables: BTreeMap<(String, String), (Vec<String>, String)> = BTreeMap::new();
    for row in rows {
        let [schema, name, filter, column] = row;
        let entry = tables.entry((schema, name)).or_insert_with(|| (Vec::new(), filter));
        if !column.is_empty() {
            entry.0.push(column);
        }
    }
    Ok(tables.into_iter().map(|((schema, name), (columns, filter))| (schema, name, columns, filter)).collect())
}

/// The tables of a publication, in order of their names, with what has their rows.
pub(super) fn tables_of(source: &mut Connection, publication: &str) -> Result<Vec<Table>, SetupError> {
    let storage: Vec<[String; 5]> = Side::Source.rows(
        source,
        &format!(
            "SELECT p.schemaname, p.tablename, ln.nspname, l.relname, \
             pg_relation_size(l.oid) / current_setting('block_size')::int \
             FROM pg_publication_tables p JOIN pg_namespace n ON n.nspname = p.schemaname \
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename \
             CROSS JOIN LATERAL (SELECT c.oid WHERE c.relkind <> 'p' UNION ALL SELECT t.relid \
             FROM pg_partition_tree(c.oid) t WHERE c.relkind = 'p' AND t.isleaf) s(oid) \
             JOIN pg_class l ON l.oid = s.oid AND l.relkind <> 'p' JOIN pg_namespace ln ON ln.oid = l.relnamespace \
             WHERE p.pubname = {} ORDER BY 1, 2, 3, 4",
            literal(publication)
        ),
    )?;
    let storage_of = |schema: &str, name: &str| {
        let own = storage.iter().filter(|row| row[0] == schema && row[1] == name);
        own.map(|row| Storage { schema: row[2].clone(), name: row[3].clone(), blocks: row[4].parse().unwrap_or(0) })
            .collect()
    };
    let table = |(schema, name, columns, filter): (String, String, Vec<String>, String)| Table {
        storage: storage_of(&schema, &name),
        filter: Some(filter).filter(|filter| !filter.is_empty()),
        schema,
        name,
        columns,
    };
    Ok(published(source, publication)?.into_iter().map(table).collect())
}

/// With a table that has no identity in it, the publication would make the source refuse UPDATE and DELETE.
fn check_identities(source: &mut Connection, publication: &str) -> Result<Vec<String>, SetupError> {
    let rows = Side::Source.rows(
        source,
        &format!(
            "SELECT DISTINCT ln.nspname, l.relname FROM pg_publication_tables p \
             JOIN pg_publication b ON b.pubname = p.pubname AND (b.pubupdate OR b.pubdelete) \
             JOIN pg_namespace n ON n.nspname = p.schemaname \
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename \
             CROSS JOIN LATERAL (SELECT c.oid WHERE c.relkind <> 'p' UNION ALL SELECT t.relid \
             FROM pg_partition_tree(c.oid) t WHERE c.relkind = 'p' AND t.isleaf) s(oid) \
             JOIN pg_class l ON l.oid = s.oid AND l.relkind <> 'p' JOIN pg_namespace ln ON ln.oid = l.relnamespace \
             WHERE p.pubname = {} AND (l.relreplident = 'n' OR l.relreplident = 'd' AND NOT EXISTS \
             (SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisprimary) \
             OR l.relreplident = 'i' AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisreplident)) \
             ORDER BY 1, 2",
            literal(publication)
        ),
    )?;
    let problem = |row: &[String; 2]| {
        let table = format!("{}.{}", identifier(&row[0]), identifier(&row[1]));
        format!(
            "source: table {table} has no replica identity, so that its UPDATEs and DELETEs would fail: give it a primary key, \
             or ALTER TABLE {table} REPLICA IDENTITY FULL"
        )
    };
    Ok(rows.iter().map(problem).collect())
}

/// A table as the target has it.
#[derive(Default)]
struct Found {
    kind: String,
    may_insert: bool,
    /// Whether each column is generated.
    columns: BTreeMap<String, bool>,
}

fn check_tables(target: &mut Connection, tables: &[Table], copy: bool) -> Result<Vec<String>, SetupError> {
    let list =
        |part: &dyn Fn(&Table) -> &str| tables.iter().map(|table| literal(part(table))).collect::<Vec<_>>().join(", ");
    let rows = Side::Target.rows(
        target,
        &format!(
            "SELECT n.nspname, c.relname, c.relkind, has_table_privilege(c.oid, 'INSERT'), a.attname, \
             a.attgenerated <> '' FROM unnest(ARRAY[{}], ARRAY[{}]) t(s, n) \
             JOIN pg_namespace n ON n.nspname = t.s JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.n \
             LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped",
            list(&|table| &table.schema),
            list(&|table| &table.name)
        ),
    )?;
    let mut found: BTreeMap<(String, String), Found> = BTreeMap::new();
    for row in rows {
        let [schema, name, kind, may_insert, column, generated] = row;
        let entry = found.entry((schema, name)).or_default();
        (entry.kind, entry.may_insert) = (kind, may_insert == "t");
        entry.columns.insert(column, generated == "t");
    }
    let mut problems = Vec::new();
    let mut usable = Vec::new();
    for table in tables {
        match found.get(&(table.schema.clone(), table.name.clone())) {
            None => problems.push(format!(
                "target: there is no table {}: bring the schema over first, as with pg_dump --schema-only",
                table.quoted()
            )),
            Some(there) => {
                problems.extend(compare(table, there, copy));
                usable.push(table);
            }
        }
    }
    if copy && problems.is_empty() {
        problems.extend(not_empty(target, &usable)?);
    }
    Ok(problems)
}

fn compare(table: &Table, there: &Found, copy: bool) -> Vec<String> {
    let quoted = table.quoted();
    let mut problems = Vec::new();
    if !matches!(there.kind.as_str(), "r" | "p") {
        problems.push(format!("target: {quoted} is no table"));
    }
    if copy && !there.may_insert {
        problems.push(format!("target: no right to write into {quoted}: GRANT INSERT ON {quoted}"));
    }
    for column in &table.columns {
        match there.columns.get(column) {
            None => problems.push(format!("target: table {quoted} has no column {}", identifier(column))),
            Some(true) => {
                problems.push(format!("target: column {} of {quoted} is generated there", identifier(column)))
            }
            Some(false) => (),
        }
    }
    problems
}

fn not_empty(target: &mut Connection, tables: &[&Table]) -> Result<Vec<String>, SetupError> {
    let ask =
        |table: &&Table| format!("SELECT {} WHERE EXISTS (SELECT FROM {})", literal(&table.quoted()), table.quoted());
    let asked = tables.iter().map(ask).collect::<Vec<_>>().join(" UNION ALL ");
    let rows = Side::Target.rows(target, &asked)?;
    let problem = |row: &[String; 1]| {
        format!(
            "target: table {0} is not empty: TRUNCATE {0} if nobody needs its rows, or use --no-copy if they are the source's",
            row[0]
        )
    };
    Ok(rows.iter().map(problem).collect())
}
