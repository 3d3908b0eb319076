//! What the primary's WAL is made of, by the extension pg_walinspect: the questions, and the answer.

use serde::{Deserialize, Serialize};
use walrider_layout::Lsn;
use walrider_observe::status::text;

/// Most WAL that is looked into at a time, in bytes.
pub const MOST: u64 = 16 << 20;
/// The same for its blocks, which cost more.
const MOST_BLOCKS: u64 = 2 << 20;

/// A stretch of WAL, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WalContent {
    /// From there
    #[serde(with = "text")]
    pub from: Option<Lsn>,
    /// to there.
    #[serde(with = "text")]
    pub to: Option<Lsn>,
    /// Bytes of all its records, with their images.
    pub bytes: u64,
    /// Bytes of full-page images.
    pub image_bytes: u64,
    /// The kinds of record that take most, the largest first.
    pub kinds: Vec<Kind>,
    /// The relations whose blocks take most, of the newest part of it, the largest first. Empty before 16.
    pub relations: Vec<Relation>,
    /// Bytes of all relations' blocks there.
    pub block_bytes: u64,
    /// Why it is not seen, and what to do.
    pub unseen: Option<String>,
}

/// A kind of record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kind {
    /// `Heap/INSERT`
    pub name: String,
    /// How many.
    pub records: u64,
    /// Bytes, with images.
    pub bytes: u64,
    /// Bytes of full-page images.
    pub image_bytes: u64,
}

/// A relation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Relation {
    /// Its name; of one in another database, that database and its file's number.
    pub name: String,
    /// Bytes of its blocks' data and images in WAL.
    pub bytes: u64,
}

/// Where the extension is, quoted, and whether this user may ask it.
pub const FIND: &str = "SELECT e.extnamespace::regnamespace, has_function_privilege(p.oid, 'EXECUTE') FROM pg_extension e \
                        JOIN pg_proc p ON p.pronamespace = e.extnamespace AND p.proname = 'pg_get_wal_stats' \
                        WHERE e.extname = 'pg_walinspect' LIMIT 1";

impl WalContent {
    /// Nothing is seen, for this reason.
    pub fn unseen(why: String) -> WalContent {
        WalContent { unseen: Some(why), ..WalContent::default() }
    }
}

/// The schema, from the answer to [`FIND`].
///
/// # Errors
/// What is missing, and what to do.
pub fn found(row: Option<(&str, bool)>) -> Result<&str, String> {
    match row {
        Some((schema, true)) => Ok(schema),
        Some((schema, false)) => Err(format!(
            "GRANT EXECUTE ON FUNCTION {schema}.pg_get_wal_stats, {schema}.pg_get_wal_block_info TO this user would show what \
             WAL is made of"
        )),
        None => Err("CREATE EXTENSION pg_walinspect in the database that is connected to would show what WAL is made of: kinds of \
                     record, full-page images, relations"
            .to_owned()),
    }
}

/// Takes a stretch of WAL apart: one JSON object, a [`WalContent`]. `schema` is quoted.
pub fn question(version: u32, schema: &str, from: Lsn, to: Lsn) -> String {
    let kinds = format!(
        "s AS MATERIALIZED (SELECT \"resource_manager/record_type\" AS name, count AS records, combined_size AS bytes, \
         fpi_size AS image_bytes FROM {schema}.pg_get_wal_stats('{from}', '{to}', true) WHERE count > 0)"
    );
    // pg_walinspect 1.1 came with 16.
    let blocks = if version >= 160_000 {
        let from = Lsn(from.0.max(to.0.saturating_sub(MOST_BLOCKS)));
        format!(
            "b AS MATERIALIZED (SELECT reltablespace, reldatabase, relfilenode, sum(block_data_length + block_fpi_length)::bigint \
             AS bytes FROM {schema}.pg_get_wal_block_info('{from}', '{to}', false) GROUP BY 1, 2, 3)"
        )
    } else {
        "b AS (SELECT 0::oid AS reltablespace, 0::oid AS reldatabase, 0::oid AS relfilenode, 0::bigint AS bytes WHERE false)"
            .to_owned()
    };
    format!(
        "WITH {kinds}, {blocks} SELECT json_build_object('from', '{from}', 'to', '{to}', \
         'bytes', (SELECT coalesce(sum(bytes), 0)::bigint FROM s), \
         'image_bytes', (SELECT coalesce(sum(image_bytes), 0)::bigint FROM s), \
         'block_bytes', (SELECT coalesce(sum(bytes), 0)::bigint FROM b), \
         'kinds', (SELECT coalesce(json_agg(k), '[]') FROM (SELECT * FROM s ORDER BY bytes DESC LIMIT 12) k), \
         'relations', (SELECT coalesce(json_agg(r), '[]') FROM (SELECT coalesce(CASE WHEN d.datname = current_database() THEN \
         pg_filenode_relation(reltablespace, relfilenode)::regclass::text END, coalesce(d.datname, 'shared') || ' file ' || \
         relfilenode) AS name, bytes FROM (SELECT * FROM b ORDER BY bytes DESC LIMIT 8) t LEFT JOIN pg_database d \
         ON d.oid = reldatabase ORDER BY bytes DESC) r))"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        assert_eq!(found(Some(("public", true))), Ok("public"));
        let said = |row| found(row).unwrap_err();
        assert!(said(None).contains("CREATE EXTENSION pg_walinspect"));
        assert!(said(Some(("x", false))).contains("GRANT EXECUTE ON FUNCTION x.pg_get_wal_stats"));
    }

    #[test]
    fn blocks_are_of_the_newest_part_and_not_before_16() {
        let (from, to) = (Lsn(0x100_0000), Lsn(0x200_0000));
        let new = question(160_000, "public", from, to);
        assert!(new.contains("pg_get_wal_stats('0/1000000', '0/2000000'"), "{new}");
        assert!(new.contains("pg_get_wal_block_info('0/1E00000', '0/2000000'"), "{new}");
        assert!(!question(150_000, "public", from, to).contains("block_info"));
    }
}
