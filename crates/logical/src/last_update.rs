//! The rule that the last update wins: by when the row was last changed, as `track_commit_timestamp` knows it
//! (`GetTupleTransactionInfo`, conflict.c, PostgreSQL 18), and when the publisher's transaction committed.

use walrider_session::Connection;
use walrider_wire::command::quote_literal;

use crate::error::ApplyError;
use crate::origins::is_ours_sql;
use crate::target::ROW;

/// What is added to statements. What a session of ours wrote is the publisher's own: it is changed as it comes.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The OIDs of our origins, as an array.
    ours: String,
    /// Of changes of one time the target's stays: it has the greater system identifier. So both sides of a pair decide alike.
    target_wins_ties: bool,
}

impl Rule {
    /// Asks the target for what it needs. `origin`: what the names of our origins have in common; `source`: the publisher's system identifier.
    ///
    /// # Errors
    /// The target does not keep the times of commits.
    pub fn find(control: &mut Connection, origin: &str, source: u64) -> Result<Rule, ApplyError> {
        let [tracks] = control.query_row("SHOW track_commit_timestamp")?;
        if tracks.as_deref() != Some(b"on") {
            return Err(ApplyError::Refused(
                "last-update-wins compares times of commits, and the target has track_commit_timestamp = off; set it to on there and \
                 restart that server, or choose another --on-conflict"
                    .into(),
            ));
        }
        let [ours, system] = control.query_row(&format!(
            "SELECT pg_catalog.array_agg(roident), (SELECT system_identifier FROM pg_catalog.pg_control_system()) \
             FROM pg_catalog.pg_replication_origin WHERE {}",
            is_ours_sql(origin)
        ))?;
        let text = |value: Option<Vec<u8>>| value.map(|text| String::from_utf8_lossy(&text).into_owned());
        let target: u64 = text(system).and_then(|text| text.parse().ok()).unwrap_or(0);
        Ok(Rule { ours: text(ours).unwrap_or_else(|| "{}".into()), target_wins_ties: target > source })
    }

    fn last_change(&self, row: &str, condition: &str) -> String {
        let ours = quote_literal(&self.ours);
        format!(
            "EXISTS (SELECT FROM pg_catalog.pg_xact_commit_timestamp_origin({row}xmin) walrider_last \
             WHERE walrider_last.roident <> ALL ({ours}::pg_catalog.oid[]){condition})"
        )
    }

    /// The row was last changed by somebody else. What is frozen, or older than what is kept, was changed by nobody.
    pub fn differs(&self) -> String {
        format!(" AND {}", self.last_change("", ""))
    }

    /// The row was not changed by somebody else after a time, which is a parameter: microseconds since 2000-01-01. `replacing`: in an
    /// INSERT that may update.
    pub fn wins(&self, parameter: usize, replacing: bool) -> String {
        let later = if self.target_wins_ties { ">=" } else { ">" };
        let condition = format!(
            " AND walrider_last.\"timestamp\" {later} pg_catalog.timestamptz '2000-01-01 00:00:00+00' \
             + ${parameter}::pg_catalog.int8 * interval '1 microsecond'"
        );
        let row = if replacing { format!("{ROW}.") } else { String::new() };
        format!(" AND NOT {}", self.last_change(&row, &condition))
    }
}
