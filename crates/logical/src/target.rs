//! The target's tables: what its catalog says of them, and the statements that change them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use walrider_layout::Oid;
use walrider_session::Connection;
use walrider_wire::command::{quote_identifier, quote_literal};

use crate::error::ApplyError;
use crate::keys::{Key, Keys};
use crate::message::{Relation, ReplicaIdentity};

/// A relation of the publisher, and the table of the target that it goes to.
#[derive(Debug)]
pub struct Table {
    /// No other one has had it in this process: prepared statements are kept by it.
    pub generation: u64,
    /// As the publisher describes it.
    pub relation: Relation,
    /// Schema and name, for messages.
    pub name: String,
    /// What its changes depend on.
    pub keys: Keys,
    /// The same in SQL, and `ONLY` before it if it has no partitions.
    sql: String,
    only: String,
    partitioned: bool,
    columns: Vec<TableColumn>,
    /// Where the columns of its unique indexes are in the publisher's rows, of indexes that have only such.
    unique: Vec<Vec<usize>>,
    /// The one of them that its rows are known by.
    identity: Option<usize>,
    /// Why rows cannot be changed or deleted, if so.
    no_key: Option<String>,
    /// Rows are found by all that they hold, and any of several that are equal is meant.
    is_any: bool,
    /// A unique key is deferrable, or an exclusion constraint.
    has_deferrable_keys: bool,
}

#[derive(Debug)]
struct TableColumn {
    quoted: String,
    key: bool,
    /// GENERATED ALWAYS AS IDENTITY.
    always_identity: bool,
    /// The operator by which its type is equal, with its schema, as search_path is empty; `None`: it has none, and is compared as text.
    equal: Option<String>,
    /// The type of arrays of it, where several values can be sent as one.
    array: Option<String>,
}

impl TableColumn {
    /// The condition that it is equal to a parameter.
    fn is_equal_to(&self, number: usize) -> String {
        match &self.equal {
            Some(operator) => format!("{} {operator} ${number}", self.quoted),
            None => format!("{}::pg_catalog.text = ${number}", self.quoted),
        }
    }
}

/// What a statement does to a row; its columns are in the pattern of [`Table::sql`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// INSERT, or with ON CONFLICT DO NOTHING.
    Insert {
        /// A row that exists is left alone.
        or_nothing: bool,
    },
    /// COPY of many new rows.
    Copy,
    /// UPDATE.
    Update,
    /// UPDATE of many rows, from an array for each column.
    UpdateMany,
    /// DELETE.
    Delete,
    /// Counts the rows that a pattern finds.
    Ask,
    /// The same, of rows that somebody else changed last, as [`crate::last_update::Rule`] adds.
    AskDiffers,
    /// INSERT, or the same as an UPDATE of the row that is there.
    InsertOrUpdate,
    /// Finds a row if more than one unique key of a row is there, in other rows than the one that is changed, if one is.
    AskSeveral,
}

/// In a pattern: the column is set to a parameter.
pub const SET: u8 = 1;
/// The column must be equal to a parameter.
pub const EQUAL: u8 = 2;
/// The column must be null.
pub const IS_NULL: u8 = 4;

/// What [`Kind::InsertOrUpdate`] calls the row that is there.
pub const ROW: &str = "walrider_row";

static GENERATION: AtomicU64 = AtomicU64::new(1);

/// The relation, its root, kind, whether triggers run, and whether a constraint with an index is deferrable.
const FIND: &str = "SELECT c.oid, c.relkind, coalesce(pg_catalog.pg_partition_root(c.oid)::pg_catalog.oid, c.oid), \
    EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgenabled IN ('A', 'R') AND (t.tgrelid = c.oid OR t.tgrelid IN \
        (SELECT p.relid FROM pg_catalog.pg_partition_tree(c.oid) p))) \
      OR EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_enabled IN ('A', 'R') AND r.ev_type <> '1'), \
    EXISTS (SELECT FROM pg_catalog.pg_index x WHERE NOT x.indimmediate AND (x.indrelid = c.oid OR x.indrelid IN \
        (SELECT p.relid FROM pg_catalog.pg_partition_tree(c.oid) p))) \
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    WHERE n.nspname = ";
/// Its columns, the operators by which their types are equal, and the types of arrays of them. `unnest` makes several columns of a composite type.
const COLUMNS: &str = "SELECT a.attname, a.attgenerated, a.attidentity, \
    (SELECT CASE WHEN s.nspname = 'pg_catalog' THEN '=' \
          ELSE 'OPERATOR(' || pg_catalog.quote_ident(s.nspname) || '.' || e.oprname || ')' END \
        FROM pg_catalog.pg_opclass o JOIN pg_catalog.pg_am m ON m.oid = o.opcmethod \
        JOIN pg_catalog.pg_amop p ON p.amopfamily = o.opcfamily AND p.amoplefttype = o.opcintype AND p.amoprighttype = o.opcintype \
          AND p.amopstrategy = CASE m.amname WHEN 'btree' THEN 3 ELSE 1 END \
        JOIN pg_catalog.pg_operator e ON e.oid = p.amopopr JOIN pg_catalog.pg_namespace s ON s.oid = e.oprnamespace \
        WHERE o.opcdefault AND m.amname IN ('btree', 'hash') AND o.opcintype = CASE \
            WHEN t.typtype = 'e' THEN 'pg_catalog.anyenum'::pg_catalog.regtype::pg_catalog.oid \
            WHEN t.typtype = 'r' THEN 'pg_catalog.anyrange'::pg_catalog.regtype::pg_catalog.oid \
            WHEN t.typtype = 'm' THEN 'pg_catalog.anymultirange'::pg_catalog.regtype::pg_catalog.oid \
            WHEN t.typname = 'varchar' THEN 'pg_catalog.text'::pg_catalog.regtype::pg_catalog.oid \
            ELSE t.oid END ORDER BY m.amname LIMIT 1), \
    CASE WHEN t0.typarray <> 0 AND t0.typdelim = ',' AND t0.typcategory <> 'A' AND t.typcategory <> 'A' AND t.typtype <> 'c' THEN ( \
        SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(t0.typname) || '[]' \
        FROM pg_catalog.pg_namespace n WHERE n.oid = t0.typnamespace) END \
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t0 ON t0.oid = a.atttypid \
    JOIN pg_catalog.pg_type t ON t.oid = CASE WHEN t0.typtype = 'd' THEN t0.typbasetype ELSE t0.oid END \
    WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attrelid = ";
/// Columns of its unique indexes, and of its partitions': the index, the column, nulls equal, identity or primary key, not deferrable.
const UNIQUE: &str = "SELECT i.indexrelid, a.attname, i.indnullsnotdistinct, \
      i.indrelid = w.oid AND (i.indisreplident OR i.indisprimary), i.indimmediate \
    FROM (SELECT $::pg_catalog.oid AS oid) w, pg_catalog.pg_index i \
    CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY k (attnum, n) \
    LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND a.attnum > 0 \
    WHERE (i.indrelid = w.oid OR i.indrelid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree(w.oid) p)) \
      AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts ORDER BY i.indexrelid, k.n";

/// A row of the catalog, as text.
type Row = Vec<Option<Vec<u8>>>;

fn text(row: &Row, at: usize) -> String {
    row.get(at).and_then(Option::as_ref).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default()
}

struct CatalogColumn {
    name: String,
    generated: bool,
    always_identity: bool,
    equal: Option<String>,
    array: Option<String>,
}

struct UniqueIndex {
    oid: String,
    /// `None`: something else than a column.
    columns: Vec<Option<String>>,
    nulls_equal: bool,
    identity: bool,
    deferrable: bool,
}

impl Table {
    /// Looks a relation up.
    ///
    /// # Errors
    /// [`ApplyError::Schema`] if rows cannot go there.
    pub fn find(catalog: &mut Connection, relation: Relation) -> Result<Table, ApplyError> {
        let name = format!("{}.{}", relation.namespace, relation.name);
        let schema = |what: String| ApplyError::Schema(what);
        let (namespace, relname) = (quote_literal(&relation.namespace), quote_literal(&relation.name));
        let found = catalog.simple_query(&format!("{FIND}{namespace} AND c.relname = {relname}"))?;
        let Some(row) = found.first() else {
            return Err(schema(format!(
                "the target has no table \"{name}\"; create it there, or take it out of the publication"
            )));
        };
        let (oid, kind, root, alone) = (text(row, 0), text(row, 1), text(row, 2), text(row, 3) == "t");
        let has_deferrable_keys = text(row, 4) == "t";
        if !matches!(kind.as_str(), "r" | "p") {
            return Err(schema(format!("\"{name}\" of the target is no table, and rows cannot be replicated into it")));
        }
        let columns: Vec<CatalogColumn> = catalog
            .simple_query(&format!("{COLUMNS}{oid}"))?
            .iter()
            .map(|row| CatalogColumn {
                name: text(row, 0),
                generated: !text(row, 1).is_empty(),
                always_identity: text(row, 2) == "a",
                equal: Some(text(row, 3)).filter(|operator| !operator.is_empty()),
                array: Some(text(row, 4)).filter(|name| !name.is_empty()),
            })
            .collect();
        let indexes = unique_indexes(&catalog.simple_query(&UNIQUE.replace('$', &oid))?);
        let found_by = found_by(&relation, &indexes);
        let columns = match_columns(&relation, &name, &columns, found_by)?;
        let is_any = relation.identity == ReplicaIdentity::Full && found_by.is_none();
        let root: Oid = root.parse().map_err(|_| schema(format!("the target's catalog has no OID for \"{name}\"")))?;
        let no_key = no_key(&relation, &name, &indexes);
        let (unique, identity) = unique_columns(&relation, &indexes);
        let partitioned = kind == "p";
        let sql = format!("{}.{}", quote_identifier(&relation.namespace), quote_identifier(&relation.name));
        Ok(Table {
            generation: GENERATION.fetch_add(1, Ordering::Relaxed),
            keys: keys(&relation, root, alone, &indexes),
            only: if partitioned { sql.clone() } else { format!("ONLY {sql}") },
            relation,
            name,
            sql,
            partitioned,
            columns,
            unique,
            identity,
            no_key,
            is_any,
            has_deferrable_keys,
        })
    }

    /// Why its rows cannot be changed or deleted, if so.
    pub fn no_key(&self) -> Option<&str> {
        self.no_key.as_deref()
    }

    /// Whether a unique key is deferrable: ON CONFLICT DO NOTHING has it for an error.
    pub fn has_deferrable_keys(&self) -> bool {
        self.has_deferrable_keys
    }

    /// Whether an UPDATE cannot set a column: it is GENERATED ALWAYS AS IDENTITY.
    pub fn refuses_values(&self, column: usize) -> bool {
        self.columns[column].always_identity
    }

    /// Whether a column is part of what rows are found by.
    pub fn is_key(&self, column: usize) -> bool {
        self.columns[column].key
    }

    /// Whether rows that are found by a key can be changed many at once: all columns of a pattern can be sent in arrays.
    pub fn takes_arrays(&self, pattern: &[u8]) -> bool {
        let fits = |(column, wanted): (&TableColumn, &u8)| {
            *wanted == 0 || (wanted & IS_NULL == 0 && column.array.is_some() && !(column.key && column.equal.is_none()))
        };
        self.relation.identity != ReplicaIdentity::Full && self.columns.iter().zip(pattern).all(fits)
    }

    /// An UPDATE from arrays, one for each parameter of the same UPDATE of one row. Joined to what `unnest` is taken to return, a few
    /// rows, a large table is looked up by its index. It fails if not all rows are found, so many as the last parameter says: which one
    /// is missing, only an UPDATE of one row can tell.
    fn update_many(&self, pattern: &[u8]) -> String {
        let (mut set, mut found, mut arrays, mut names) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for wish in [SET, EQUAL] {
            for (column, wanted) in self.columns.iter().zip(pattern).filter(|(_, wanted)| **wanted & wish != 0) {
                debug_assert!(wanted & IS_NULL == 0);
                let number = names.len() + 1;
                names.push(format!("p{number}"));
                arrays.push(format!("${number}::{}", column.array.as_deref().unwrap_or_default()));
                let of = if wish == SET { &mut set } else { &mut found };
                let target = if wish == SET { "" } else { "t." };
                let equal = if wish == SET { "=" } else { column.equal.as_deref().unwrap_or("=") };
                of.push(format!("{target}{} {equal} d.p{number}", column.quoted));
            }
        }
        let (set, found) = (set.join(", "), found.join(" AND "));
        let names_count = names.len();
        // Without its schema: only so it takes several arrays (transformRangeFunction, parse_clause.c); search_path is empty.
        let (arrays, names) = (arrays.join(", "), names.join(", "));
        format!(
            "WITH u AS (UPDATE {} AS t SET {set} FROM unnest({arrays}) AS d({names}) WHERE {found} RETURNING 1) \
             SELECT 1 / (pg_catalog.count(*) = ${}::pg_catalog.int8)::pg_catalog.int4 FROM u",
            self.only,
            names_count + 1
        )
    }

    /// A statement; `pattern` has a byte for each column.
    pub fn sql(&self, kind: Kind, pattern: &[u8]) -> String {
        let mut parameter = 0;
        let mut next = || {
            parameter += 1;
            parameter
        };
        let all: Vec<&str> = self.columns.iter().map(|column| column.quoted.as_str()).collect();
        match kind {
            Kind::Copy => format!("COPY {} ({}) FROM STDIN", self.sql, all.join(", ")),
            Kind::Insert { or_nothing } => {
                let conflict = if or_nothing { " ON CONFLICT DO NOTHING" } else { "" };
                if all.is_empty() {
                    return format!("INSERT INTO {} DEFAULT VALUES{conflict}", self.sql);
                }
                format!("{}{conflict}", self.insert(""))
            }
            Kind::Update => {
                let mut set = Vec::new();
                for (column, wanted) in self.columns.iter().zip(pattern) {
                    if wanted & SET != 0 {
                        set.push(format!("{} = ${}", column.quoted, next()));
                    }
                }
                let found = self.found(pattern, &mut next);
                format!("UPDATE {} SET {} WHERE {found}", self.only, set.join(", "))
            }
            Kind::UpdateMany => self.update_many(pattern),
            Kind::Delete => format!("DELETE FROM {} WHERE {}", self.only, self.found(pattern, &mut next)),
            Kind::Ask | Kind::AskDiffers => {
                format!("SELECT FROM {} WHERE {}", self.only, self.conditions(pattern, &mut next))
            }
            Kind::InsertOrUpdate => {
                let insert = self.insert(&format!(" AS {ROW}"));
                let name = |at: &usize| self.columns[*at].quoted.as_str();
                let identity = self.identity.map(|at| &self.unique[at]).expect("asked for where there is one");
                let set: Vec<String> = (0..self.columns.len())
                    .filter(|at| !identity.contains(at) && !self.columns[*at].always_identity)
                    .map(|at| format!("{0} = excluded.{0}", self.columns[at].quoted))
                    .collect();
                // With nothing else in the row, it is what it is to become.
                let set =
                    if set.is_empty() { format!("{0} = excluded.{0}", name(&identity[0])) } else { set.join(", ") };
                let arbiter: Vec<&str> = identity.iter().map(name).collect();
                format!("{insert} ON CONFLICT ({}) DO UPDATE SET {set} WHERE true", arbiter.join(", "))
            }
            Kind::AskSeveral => self.ask_several(pattern),
        }
    }

    fn insert(&self, alias: &str) -> String {
        let columns: Vec<&str> = self.columns.iter().map(|column| column.quoted.as_str()).collect();
        let values: Vec<String> = (1..=columns.len()).map(|number| format!("${number}")).collect();
        let (columns, values) = (columns.join(", "), values.join(", "));
        format!("INSERT INTO {}{alias} ({columns}) OVERRIDING SYSTEM VALUE VALUES ({values})", self.sql)
    }

    /// The pattern that finds a row by what it is known by; [`Table::can_replace`] says whether there is one.
    pub fn identity_pattern(&self) -> Vec<u8> {
        let identity = self.identity.map_or(&[][..], |at| &self.unique[at]);
        (0..self.columns.len()).map(|at| if identity.contains(&at) { EQUAL } else { 0 }).collect()
    }

    /// Whether a new row can replace one that is there.
    pub fn can_replace(&self) -> bool {
        self.identity.is_some() && !self.columns.is_empty()
    }

    /// Whether a row can have several others in its way.
    pub fn has_several_keys(&self) -> bool {
        self.unique.len() > 1
    }

    /// Of a pattern, what [`Kind::AskSeveral`] takes: the columns of unique keys that are set, then what the row is found by.
    pub fn several_pattern(&self, pattern: &[u8]) -> Vec<u8> {
        let is_set = |at: &usize| pattern[*at] & SET != 0;
        let mut left: Vec<u8> = pattern.iter().map(|wanted| wanted & !SET).collect();
        for columns in self.unique.iter().filter(|columns| columns.iter().all(is_set)) {
            columns.iter().for_each(|at| left[*at] |= SET);
        }
        left
    }

    /// A row if two unique keys or more of those that are set have rows, besides the row itself.
    fn ask_several(&self, pattern: &[u8]) -> String {
        let mut parameter = 0;
        let mut numbers = |wish: u8| -> Vec<Option<usize>> {
            let number = |wanted: &u8| {
                (wanted & wish != 0).then(|| {
                    parameter += 1;
                    parameter
                })
            };
            pattern.iter().map(number).collect()
        };
        let (set, found) = (numbers(SET), numbers(EQUAL));
        let equal = |at: usize, number: usize| {
            let column = &self.columns[at];
            column.is_equal_to(number)
        };
        let itself: Vec<String> = found.iter().enumerate().filter_map(|(at, n)| Some(equal(at, (*n)?))).collect();
        let others = if itself.is_empty() { String::new() } else { format!(" AND NOT ({})", itself.join(" AND ")) };
        let mut counts = vec!["0".to_owned()];
        for columns in &self.unique {
            let key: Option<Vec<String>> = columns.iter().map(|at| Some(equal(*at, set[*at]?))).collect();
            let Some(key) = key else { continue };
            let exists = format!("EXISTS (SELECT FROM {} WHERE {}{others})", self.only, key.join(" AND "));
            counts.push(format!("{exists}::pg_catalog.int4"));
        }
        format!("SELECT WHERE {} > 1", counts.join(" + "))
    }

    fn conditions(&self, pattern: &[u8], next: &mut impl FnMut() -> usize) -> String {
        let mut conditions = Vec::new();
        for (column, wanted) in self.columns.iter().zip(pattern) {
            let name = &column.quoted;
            if wanted & IS_NULL != 0 {
                conditions.push(format!("{name} IS NULL"));
            } else if wanted & EQUAL != 0 {
                conditions.push(column.is_equal_to(next()));
            }
        }
        if conditions.is_empty() {
            conditions.push("true".to_owned());
        }
        conditions.join(" AND ")
    }

    /// The condition that finds a row; at most one where the columns are not unique.
    fn found(&self, pattern: &[u8], next: &mut impl FnMut() -> usize) -> String {
        let conditions = self.conditions(pattern, next);
        if !self.is_any {
            return conditions;
        }
        let id = if self.partitioned { "(tableoid, ctid)" } else { "ctid" };
        let plain = if self.partitioned { "tableoid, ctid" } else { "ctid" };
        // The conditions again: a row that was changed meanwhile is looked at once more (EvalPlanQual).
        format!("{id} = (SELECT {plain} FROM {} WHERE {conditions} LIMIT 1) AND {conditions}", self.only)
    }
}

/// TRUNCATE of several tables; never CASCADE, as in native apply: the publisher has listed the tables that it reached.
pub fn truncate_sql(tables: &[Arc<Table>], restart_identity: bool) -> String {
    let names: Vec<&str> = tables.iter().map(|table| table.only.as_str()).collect();
    let identity = if restart_identity { " RESTART IDENTITY" } else { "" };
    format!("TRUNCATE {}{identity}", names.join(", "))
}

fn unique_indexes(rows: &[Row]) -> Vec<UniqueIndex> {
    let mut indexes: Vec<UniqueIndex> = Vec::new();
    for row in rows {
        let oid = text(row, 0);
        if indexes.last().is_none_or(|last| last.oid != oid) {
            let [nulls_equal, identity, immediate] = [2, 3, 4].map(|at| text(row, at) == "t");
            indexes.push(UniqueIndex { oid, columns: Vec::new(), nulls_equal, identity, deferrable: !immediate });
        }
        let column = row[1].as_ref().map(|_| text(row, 1));
        indexes.last_mut().expect("just pushed").columns.push(column);
    }
    indexes
}

/// The publisher's columns as the target has them.
fn match_columns(
    relation: &Relation,
    name: &str,
    columns: &[CatalogColumn],
    found_by: Option<&UniqueIndex>,
) -> Result<Vec<TableColumn>, ApplyError> {
    let mut missing = Vec::new();
    let mut matched = Vec::new();
    for column in &relation.columns {
        let Some(found) = columns.iter().find(|found| found.name == column.name) else {
            missing.push(format!("\"{}\"", column.name));
            continue;
        };
        if found.generated {
            return Err(ApplyError::Schema(format!(
                "column \"{}\" of the target's table \"{name}\" is generated, and the publisher sends values for it; \
                 make it an ordinary column there, or take it out of the publication's column list",
                column.name
            )));
        }
        if found.always_identity && !column.key {
            return Err(ApplyError::Schema(format!(
                "column \"{0}\" of the target's table \"{name}\" is GENERATED ALWAYS AS IDENTITY and no part of the \
                 replica identity, so it cannot be updated; ALTER TABLE {name} ALTER COLUMN \"{0}\" SET GENERATED BY DEFAULT there",
                column.name
            )));
        }
        let key = match found_by {
            Some(index) => index.columns.iter().flatten().any(|name| *name == column.name),
            None => column.key || relation.identity == ReplicaIdentity::Full,
        };
        matched.push(TableColumn {
            quoted: quote_identifier(&column.name),
            key,
            always_identity: found.always_identity,
            equal: found.equal.clone(),
            array: found.array.clone(),
        });
    }
    if !missing.is_empty() {
        return Err(ApplyError::Schema(format!(
            "the target's table \"{name}\" has no column {}; add it there, then start again",
            missing.join(", ")
        )));
    }
    Ok(matched)
}

/// Of whole rows that are sent, the target's own key, if it has one and all of it is sent: what else the target has in the row does not
/// count then (`FindLogicalRepLocalIndex`, relation.c, PostgreSQL 18).
fn found_by<'i>(relation: &Relation, indexes: &'i [UniqueIndex]) -> Option<&'i UniqueIndex> {
    let is_sent = |name: &Option<String>| relation.columns.iter().any(|column| Some(&column.name) == name.as_ref());
    let mut own = indexes.iter().filter(|_| relation.identity == ReplicaIdentity::Full);
    own.find(|index| index.identity && !index.deferrable && index.columns.iter().all(is_sent))
}

/// As `logicalrep_rel_mark_updatable` (relation.c, PostgreSQL 18) has it: the target needs a key, and the publisher has to send it.
fn no_key(relation: &Relation, name: &str, indexes: &[UniqueIndex]) -> Option<String> {
    if relation.identity == ReplicaIdentity::Full {
        return None;
    }
    let sent = |column: &Option<String>| {
        let named = |sent: &crate::message::Column| sent.key && Some(&sent.name) == column.as_ref();
        relation.columns.iter().any(named)
    };
    if indexes.iter().any(|index| index.identity && index.columns.iter().all(sent)) {
        return None;
    }
    Some(format!(
        "rows of the target's table \"{name}\" cannot be found: it needs a primary key or a replica identity of columns that the \
         publisher sends as its own; or set REPLICA IDENTITY FULL on the publisher's table"
    ))
}

/// Of unique indexes of which the publisher sends all columns: where these are; and which of them the rows are known by.
fn unique_columns(relation: &Relation, indexes: &[UniqueIndex]) -> (Vec<Vec<usize>>, Option<usize>) {
    let place = |name: &Option<String>| relation.columns.iter().position(|column| Some(&column.name) == name.as_ref());
    let (mut unique, mut identity) = (Vec::<Vec<usize>>::new(), None);
    for index in indexes {
        let Some(mut columns) = index.columns.iter().map(place).collect::<Option<Vec<usize>>>() else { continue };
        columns.sort_unstable();
        // Partitions have them once more.
        if !unique.contains(&columns) {
            unique.push(columns);
            if index.identity {
                identity = Some(unique.len() - 1);
            }
        }
    }
    (unique, identity)
}

fn keys(relation: &Relation, root: Oid, alone: bool, indexes: &[UniqueIndex]) -> Keys {
    let place = |name: &str| relation.columns.iter().position(|column| column.name == name);
    let key = |names: Vec<&str>, nulls_equal: bool| -> Option<Key> {
        let mut names = names;
        names.sort_unstable();
        let columns = names.iter().map(|name| place(name)).collect::<Option<Vec<usize>>>()?;
        Some(Key { columns, space: Key::space(root, &names), nulls_equal })
    };
    let full = relation.identity == ReplicaIdentity::Full;
    let names: Vec<&str> =
        relation.columns.iter().filter(|column| full || column.key).map(|column| column.name.as_str()).collect();
    let identity = if names.is_empty() { None } else { key(names, true) };
    let mut unique: Vec<Key> = Vec::new();
    for index in indexes {
        // One with a column that is not replicated has values that we do not know: the server will say if two meet.
        let names: Option<Vec<&str>> = index.columns.iter().map(|column| column.as_deref()).collect();
        let Some(found) = names.and_then(|names| key(names, index.nulls_equal)) else { continue };
        if identity.as_ref().is_none_or(|identity| identity.space != found.space)
            && unique.iter().all(|other| other.space != found.space)
        {
            unique.push(found);
        }
    }
    Keys { table: Key::space(root, &[]).max(1), identity, unique, alone }
}
